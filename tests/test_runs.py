"""Whole runs of grpo.py: invariance over processes and micro-batches, kill and resume, bad input, what is written."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, metrics_of, run
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import common
import grpo

# Two mini-batches a rollout, completions that are cut, groups with equal rewards, rows of unequal length.
SHORT = ["--steps", 6, "--save_every", 2, "--eval_every", 3, "--updates_per_rollout", 2, "--max_new_tokens", 18,
         "--prompts_per_step", 8, "--eval_problems", 20]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny):
    """A folder of short runs: one (1 process), rows (1 row a micro-batch), two (2 processes), other (another seed)."""
    folder = tmp_path_factory.mktemp("runs")
    for name, flags, processes in (("one", [], 1), ("rows", ["--micro_batch_tokens", 1], 1), ("two", [], 2),
                                   ("other", ["--seed", 1, "--steps", 1], 1)):
        done = run("grpo.py", *SHORT, *flags, "--run_dir", folder / name, processes=processes)
        assert done.returncode == 0, done.stdout
        (folder / f"{name}.txt").write_text(done.stdout)
    return folder


def weights(run_dir):
    return load_file(run_dir / "final" / "model.safetensors")


def assert_same_weights(a, b, tolerance):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=tolerance, rtol=0)


@pytest.mark.parametrize("other", ["rows", "two"])
def test_a_run_does_not_depend_on_processes_or_micro_batches(runs, other):
    assert_same_weights(runs / "one", runs / other, 1e-5)
    for row, other_row in zip(metrics_of(runs / "one"), metrics_of(runs / other), strict=True):
        assert row == pytest.approx(other_row, abs=1e-4)


def test_the_short_run_covers_the_hard_cases(runs):
    rows = metrics_of(runs / "one")[1:]
    assert any(0 < row["truncated"] < 1 for row in rows) and any(0 < row["no_signal"] < 1 for row in rows)
    assert sum(row["grad_norm"] > 0 for row in rows) >= 4


def test_every_row_keeps_the_contract(runs):
    rows = metrics_of(runs / "one", seconds=True)
    wanted = "step reward length truncated grad_norm loss rollout_s reward_s update_s tokens_per_s".split()
    assert [row["step"] for row in rows] == list(range(7)) and all(set(wanted) <= row.keys() for row in rows)
    assert [row["step"] for row in rows if "eval_pass@1" in row] == [0, 3, 6] and "eval_pass@1/4" in rows[0]
    config = json.loads((runs / "one" / "config.json").read_text())
    assert config["algorithm"] == "grpo" and config["max_new_tokens"] == 18 and config["versions"]["torch"]
    samples = [json.loads(line) for line in open(runs / "one" / "samples.jsonl")]
    assert {sample["kind"] for sample in samples} == {"train", "held-out"}


def test_what_a_person_sees(runs):
    printed = (runs / "one.txt").read_text()
    for words in ("No CUDA device", "step 6/6", "held-out pass@1", "ETA", "before", "after", "tok/s"):
        assert words in printed, words


def test_another_seed_is_another_run(runs):
    assert metrics_of(runs / "other")[1] != metrics_of(runs / "one")[1]


def test_killed_and_resumed_equals_uninterrupted(runs, tmp_path):
    folder = tmp_path / "killed"
    command = [sys.executable, "grpo.py", *map(str, SHORT), "--run_dir", str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and len((folder / "metrics.jsonl").read_text().splitlines()) > 3:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "final").exists()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rew')        # what a kill in the middle of a write leaves
    (folder / "checkpoints" / "part").mkdir(parents=True, exist_ok=True)      # and in the middle of a save
    resumed = run("grpo.py", "--resume", folder)
    assert resumed.returncode == 0, resumed.stdout
    assert metrics_of(folder) == metrics_of(runs / "one")
    assert_same_weights(folder, runs / "one", 0)


def test_resuming_with_another_number_of_processes(runs, tmp_path):
    folder = tmp_path / "half"
    script = f"import common, grpo; common.export = None; grpo.main()"      # ends before final/ is written
    done = subprocess.run([sys.executable, "-c", script, *map(str, SHORT), "--steps", "6", "--run_dir", str(folder)],
                          cwd=ROOT, capture_output=True)
    assert done.returncode != 0 and (folder / "checkpoints" / "step-000006").exists()
    resumed = run("grpo.py", "--resume", folder, processes=2)
    assert resumed.returncode == 0, resumed.stdout
    assert_same_weights(folder, runs / "one", 1e-5)


def test_a_finished_run_says_so(runs):
    before = metrics_of(runs / "other", seconds=True)
    done = run("grpo.py", "--resume", runs / "other")
    assert done.returncode == 0 and "nothing to resume" in done.stdout
    assert metrics_of(runs / "other", seconds=True) == before


def test_the_export_loads_without_a_word(runs):
    for name in ("one", "two"):
        model, info = AutoModelForCausalLM.from_pretrained(runs / name / "final", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert (runs / name / "final" / "tokenizer.json").exists()
    for path in (runs / "one").rglob("*"):
        assert "part" not in path.name


def main(monkeypatch, *flags):
    monkeypatch.setattr("sys.argv", ["grpo.py", *map(str, flags)])
    return grpo.main()


@pytest.mark.parametrize("flags, words", [
    (["--group_size", 1], "at least 2"), (["--prompts_per_step", 7, "--updates_per_rollout", 2], "1 processes x 2"),
    (["--steps", 0], "--steps is 0"), (["--lr", -1], "--lr"), (["--temperature", 0], "--temperature"),
    (["--warmup_steps", -1], "--warmup_steps"), (["--beta2", 1], "--beta2"),
    (["--model", "no/such/folder"], "no such folder"), (["--model", "tiny", "--dataset", "nope"], "is no data set"),
    (["--dataset", "arithmetic:9-3"], "LO <= HI"), (["--max_new_tokens", 5000], "window of 2048"),
    (["--max_prompt_tokens", 3], "raise"), (["--resume", "no/such/run"], "name a run's folder"),
    (["--resume", "x", "--lr", 1], "drop the other flags"), (["--run_dir", "/dev/null/x"], "/dev/null/x"),
    (["--model", "tiny", "--dataset", "words.jsonl"], "--dataset arithmetic"), (["--engine", "vllm"], "vllm"),
])
def test_bad_input_is_one_sentence(monkeypatch, tmp_path, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.jsonl").write_text('{"question": "How many?", "answer": "3"}\n')
    with pytest.raises(common.UserError, match=words) as error:
        main(monkeypatch, *flags)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flags", [["--no_such_flag", 1], ["--step", 3], ["--normalize_std", "maybe"], ["--loss_agg", "x"]])
def test_unknown_flags_are_refused(monkeypatch, flags):
    with pytest.raises(SystemExit) as error:
        main(monkeypatch, *flags)
    assert error.value.code != 0


def test_false_is_false():
    cfg = common.parse_config(grpo.Config, grpo.TINY, ["--model", "tiny", "--normalize_std", "False"])
    assert cfg.normalize_std is False and cfg.steps == grpo.TINY["steps"] and cfg.dataset == "arithmetic"


def test_which_settings_apply(monkeypatch, capsys):
    def settings(*argv):
        cfg = common.parse_config(grpo.Config, grpo.TINY, list(argv))
        return cfg.model, cfg.dataset, cfg.lr
    published = "Qwen/Qwen2.5-1.5B-Instruct", "gsm8k", 1e-6
    tiny = "tiny", "arithmetic", grpo.TINY["lr"]
    assert settings() == tiny and settings("--lr", "1")[2] == 1
    assert settings("--dataset", "arithmetic:3-8")[::2] == ("tiny", grpo.TINY["lr"])
    assert settings("--model", published[0]) == published == settings("--dataset", "gsm8k")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert settings() == published and settings("--model", "tiny") == tiny
    assert "CUDA found, so the published setting runs" in capsys.readouterr().out


def test_a_run_is_not_overwritten(monkeypatch, runs):
    before = metrics_of(runs / "other", seconds=True)
    with pytest.raises(common.UserError, match="already holds a run"):
        main(monkeypatch, "--run_dir", runs / "other")
    assert metrics_of(runs / "other", seconds=True) == before


def test_a_run_of_another_algorithm_is_not_resumed(monkeypatch, runs, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"algorithm": "conspo"}))
    with pytest.raises(common.UserError, match="run of conspo.py"):
        main(monkeypatch, "--resume", tmp_path)


def test_refusals_end_every_process(tmp_path):
    done = run("grpo.py", "--prompts_per_step", 3, "--run_dir", tmp_path / "x", processes=2)
    assert done.returncode != 0 and "must be a multiple of 2 processes" in done.stdout
    assert 'grpo.py", line' not in done.stdout and not (tmp_path / "x").exists()      # no traceback of ours


def test_one_process_that_raises_ends_all(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
sys.argv[0] = "grpo.py"
import common, grpo
import torch.distributed as dist
score = common.score
def broken(*args):
    if os.environ["RANK"] == "1":
        raise RuntimeError("broken on purpose")
    return score(*args)
common.score = broken
try:
    grpo.main()
finally:
    if dist.is_initialized():
        dist.destroy_process_group()
""")
    began = time.monotonic()
    done = run(script, *SHORT, "--run_dir", tmp_path / "x", processes=2)
    assert done.returncode != 0 and "broken on purpose" in done.stdout and time.monotonic() - began < 100


def test_a_full_disk_is_a_sentence_and_the_run_can_go_on(tmp_path, runs):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    done = run("grpo.py", *SHORT, "--run_dir", tmp_path / "x", preexec_fn=small_files)
    assert done.returncode != 0 and "free some space" in done.stdout and "Traceback" not in done.stdout
    resumed = run("grpo.py", "--resume", tmp_path / "x")
    assert resumed.returncode == 0, resumed.stdout
    assert metrics_of(tmp_path / "x") == metrics_of(runs / "one")


def test_the_reference_does_not_move(monkeypatch, tmp_path, tiny):
    main(monkeypatch, *SHORT, "--steps", 2, "--updates_per_rollout", 1, "--kl_coef", .1, "--run_dir", tmp_path / "kl")
    first, second = metrics_of(tmp_path / "kl")[1:]
    assert abs(first["kl"]) < 1e-9 < 1e-7 < second["kl"]


def test_all_truncated_and_masked_is_finite(monkeypatch, tmp_path, capsys):
    main(monkeypatch, *SHORT, "--steps", 1, "--max_new_tokens", 1, "--mask_truncated", "--run_dir", tmp_path / "cut")
    row = metrics_of(tmp_path / "cut")[1]
    assert row["truncated"] == 1 and row["loss"] == 0 and row["grad_norm"] == 0
    printed = capsys.readouterr().out
    for words in ("raise it", "equal rewards", "gradient is exactly 0", "no \\boxed{} answer"):
        assert words in printed, words


def test_rows_left_out_have_no_gradient(tiny):
    """The gradient over all rows equals the one over rows with an advantage: skipping the others is exact."""
    model, engine = common.load_model(tiny[0]), common.HFEngine(common.load_model(tiny[0]), tiny[1])
    problems = common.load_problems("arithmetic", "train", 6)
    rollout = engine.generate([common.encode_prompt(p, tiny[1]) for p in problems], 4, 24, seed=0)
    rewards = torch.tensor(common.score(rollout.texts, [p.answer for p in problems for _ in range(4)])).view(-1, 4)
    advantages = grpo.group_advantages(rewards).flatten()
    cfg = type("Cfg", (), {"micro_batch_tokens": 200})
    gradients = []
    for rows in (torch.arange(24), torch.where(advantages != 0)[0]):
        policy = common.Policy(model)
        policy.zero_grad()
        for numbers, micro in common.micro_batches(rollout, rows, cfg, "cpu"):
            logp = policy(micro.tokens_BL, micro.prompt_len_B, micro.completion_len_B)
            loss = grpo.token_loss(logp, logp.detach(), advantages[numbers])
            grpo.aggregate(loss, micro.mask_BT, "token", rollout.completion_len_B.sum()).backward()
        gradients.append([p.grad.clone() for p in policy.parameters()])
    assert 0 < (advantages == 0).sum() < 24
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-5)


def test_optional_loggers_are_named_when_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(common.UserError, match="wandb"):
        main(monkeypatch, *SHORT, "--wandb", "--run_dir", tmp_path / "w")
    assert not (tmp_path / "w").exists()


def test_each_epoch_visits_every_problem_once():
    seen = [i for step in range(1, 8) for i in common.data_order(10, 4, step - 1, seed=3)]
    assert sorted(seen[:10]) == sorted(seen[10:20]) == list(range(10)) and seen[:10] != seen[10:20]
    assert common.data_order(3, 8, 0, seed=0) != common.data_order(3, 8, 0, seed=1)
    assert os.environ.get("RANK") is None


def test_an_empty_resume_is_no_fresh_run():
    with pytest.raises(common.UserError, match="name a run's folder"):
        common.parse_config(grpo.Config, grpo.TINY, ["--resume="])


def test_a_checkpoint_that_names_a_temperature_is_exported(tiny, tmp_path):
    model = common.load_model(tiny[0])
    model.generation_config.temperature, model.generation_config.do_sample = 0.6, False
    common.export(model, tiny[1], tmp_path / "final", torch.bfloat16)
    config = json.loads((tmp_path / "final" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "final").dtype == torch.bfloat16


def test_a_machine_without_git_can_train(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.which", lambda name: None)
    main(monkeypatch, *SHORT, "--steps", 1, "--run_dir", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["git_commit"] == ""
