"""lspo.py: the numbers of the method, the adapter, and whole short runs (grpo.py beside it, 1 and 2 processes)."""

import copy
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

import common  # noqa: E402
import grpo  # noqa: E402
import lspo  # noqa: E402

F64 = torch.float64


# --- cliffs, splicing, advantages -------------------------------------------------------------------------------------

def test_a_cliff_is_a_group_without_a_success():
    rewards_PG = torch.tensor([[0., 0, 0, 0], [-1, 1, -1, 1], [-1, -1, -1, -1], [0, .5, .9, .2], [1, 1, 1, 1]])
    before = rewards_PG.clone()
    assert lspo.find_cliffs(rewards_PG).tolist() == [True, False, True, True, False]
    assert lspo.find_cliffs(rewards_PG, success=0.9).tolist() == [True, False, True, False, False]
    assert lspo.find_cliffs(torch.zeros(0, 4)).shape == (0,)
    assert torch.equal(rewards_PG, before)


def test_the_lowest_failed_row_takes_the_first_success():
    assert lspo.splice_plan(range(4), [0., 1, 0, 1], 3) == [(0, 1), (1, 3)]
    assert lspo.splice_plan(range(4), torch.ones(4, dtype=F64), 3) == [(0, 0), (1, 1), (2, 2)]     # one failure stays
    assert lspo.splice_plan([7, 5], [1., 1, 1], 3) == [(5, 0), (7, 1)]
    assert lspo.splice_plan(range(4), [-1., -1], 3) == lspo.splice_plan([], [1.], 3) == []


def random_rollout(rows, longest, seed):
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(1, longest + 1, (rows,), generator=generator)
    length[0] = longest
    keep = torch.arange(longest) < length[:, None]
    tokens = torch.randint(3, 20, (rows, 2 + longest), generator=generator)
    tokens[:, 2:] *= keep
    logp = -torch.rand(rows, longest, generator=generator) * keep
    return common.Rollout(tokens, torch.full((rows,), 2), length, logp, length < longest,
                          [f"{seed}-{i}" for i in range(rows)])


@pytest.mark.parametrize("reroll_longest", [3, 9])
def test_splice_replaces_whole_rows_and_changes_nothing_else(reroll_longest):
    rollout, reroll = random_rollout(6, 5, 0), random_rollout(4, reroll_longest, 1)
    kept = copy.deepcopy((rollout, reroll))
    spliced = lspo.splice(rollout, reroll, [(1, 2), (4, 0)])
    assert spliced.texts == ["0-0", "1-2", "0-2", "0-3", "1-0", "0-5"]
    sources = [(rollout, 0), (reroll, 2), (rollout, 2), (rollout, 3), (reroll, 0), (rollout, 5)]
    for i, (source, row) in enumerate(sources):
        length = int(source.completion_len_B[row])
        assert spliced.completion_len_B[i] == length and spliced.prompt_len_B[i] == 2
        assert torch.equal(spliced.tokens_BL[i, :2 + length], source.tokens_BL[row, :2 + length])
        assert torch.equal(spliced.logp_BT[i, :length], source.logp_BT[row, :length])
        assert spliced.logp_BT[i, length:].abs().sum() == 0 and spliced.finished_B[i] == source.finished_B[row]
    for before, now in zip(kept, (rollout, reroll)):
        assert torch.equal(before.tokens_BL, now.tokens_BL) and before.texts == now.texts


@pytest.mark.parametrize("k, success, failure, population", [
    (1, 3.748501, -.249900, (3.872983, -.258199)), (2, 2.560988, -.365855, (2.645751, -.377964)),
    (4, None, None, (1.732051, -.577350))])
def test_advantages_of_a_spliced_group(k, success, failure, population):
    """G = 16 and k successes put in: the unbiased deviation + 1e-4, and what the population's would give."""
    rewards_PG = torch.zeros(1, 16, dtype=F64)
    assert torch.equal(lspo.group_advantages(rewards_PG), torch.zeros(1, 16, dtype=F64))    # a cliff teaches nothing
    for row, _ in lspo.splice_plan(range(16), [1.0] * k + [0.0] * (16 - k), 15):
        rewards_PG[0, row] = 1
    advantages = lspo.group_advantages(rewards_PG)[0]
    assert advantages.dtype == F64 and (advantages[:k] > 0).all() and (advantages[k:] < 0).all()
    if success:
        assert advantages[0].item() == pytest.approx(success, abs=1e-6)
        assert advantages[-1].item() == pytest.approx(failure, abs=1e-6)
    deviation = rewards_PG.std() + 1e-4
    in_population = advantages * deviation / rewards_PG.std(correction=0)
    assert in_population[0].item() == pytest.approx(population[0], abs=1e-6)
    assert in_population[-1].item() == pytest.approx(population[1], abs=1e-6)


def test_with_all_rows_replaced_the_group_would_teach_nothing_again():
    plan = lspo.splice_plan(range(16), [1.0] * 16, 15)
    rewards_PG = torch.zeros(1, 16, dtype=F64)
    rewards_PG[0, [row for row, _ in plan]] = 1
    assert rewards_PG.sum() == 15 and (lspo.group_advantages(rewards_PG) != 0).all()
    assert (lspo.group_advantages(torch.ones(1, 16, dtype=F64)) == 0).all()


@pytest.mark.parametrize("logp, sampler, loss, coefficient", [
    (-3.0, -1.0, -.524151, .524151),            # rho .135335: pushed up, by little
    (-1.0, -1.5, -4.957419, 0.0),               # rho 1.648721: above 1.28, no gradient
    (-1.1, -1.0, -3.504420, 3.504420)])
def test_the_ratio_to_whoever_sampled_the_row(logp, sampler, loss, coefficient):
    """The gradient with respect to log pi_theta is -rho A, or 0 where the clip binds: A = sqrt(15), G = 16, k = 1."""
    logp_BT = torch.tensor([[logp]], dtype=F64, requires_grad=True)
    sampler_BT = torch.tensor([[sampler]], dtype=F64)
    value = lspo.token_loss(logp_BT, sampler_BT, torch.tensor([math.sqrt(15)], dtype=F64))
    value.sum().backward()
    assert value.item() == pytest.approx(loss, abs=1e-6)
    assert -logp_BT.grad.item() == pytest.approx(coefficient, abs=1e-6)


# --- the adapter ------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def base_model():
    return common.load_model(common.tiny_model()).to(F64)


@pytest.fixture
def adapted(base_model):
    """(the base, a copy of it with an adapter whose B is not 0, phi)"""
    model = copy.deepcopy(base_model)
    lspo.add_lora(model, 4, 8.0, lspo.LORA_TARGETS)
    phi = lspo.reset_lora(model, seed=3)
    for tensor in phi[1::2]:
        tensor.data = torch.randn(tensor.shape, dtype=F64, generator=torch.Generator().manual_seed(1)) / 30
    return base_model, model, phi


TOKENS = torch.tensor([[3, 14, 5, 17, 18, 2, 9, 1]])


def logits(model):
    return model(input_ids=TOKENS, use_cache=False).logits


def test_a_new_adapter_changes_nothing_and_touches_every_target(base_model):
    model = copy.deepcopy(base_model)
    phi = lspo.add_lora(model, 4, 8.0, lspo.LORA_TARGETS)
    assert len(lspo.lora_layers(model)) == 2 * 7 and len(phi) == 2 * 2 * 7
    assert all(layer.scale == 2.0 for layer in lspo.lora_layers(model))
    assert all(tensor.requires_grad and tensor.is_leaf for tensor in phi)
    assert all((tensor == 0).all() == (i % 2 == 1) for i, tensor in enumerate(phi))      # A is random, B is 0
    assert torch.equal(logits(model), logits(base_model))
    first, second, again = (lspo.reset_lora(model, seed) for seed in (1, 2, 1))
    assert not torch.equal(first[0], second[0]) and all(torch.equal(a, b) for a, b in zip(first, again))
    moved = lspo.reset_lora(model.to(torch.bfloat16))       # like .to("cuda"), it puts other tensors in their place
    assert all(tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.bfloat16 for tensor in moved)


def test_at_scale_0_it_is_the_base_bit_for_bit_and_phi_gets_no_gradient(adapted):
    base, model, phi = adapted
    assert (logits(model) - logits(base)).abs().max() > 1e-3
    lspo.set_lora_scale(model, 0)
    assert torch.equal(logits(model), logits(base))
    logits(model).square().sum().backward()
    assert all(tensor.grad is None for tensor in phi)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_merged_weights_compute_what_the_adapter_computes(adapted):
    base, model, phi = adapted
    merged = dict(lspo.merged_weights(model))
    assert {name: tensor.shape for name, tensor in merged.items()} == {
        name: tensor.shape for name, tensor in base.state_dict().items()}
    layer, name = lspo.lora_layers(model)[0], "model.layers.0.self_attn.q_proj.weight"
    assert torch.allclose(merged[name], base.state_dict()[name] + 8 / 4 * layer.lora_B @ layer.lora_A, atol=1e-14)
    assert not any(tensor.requires_grad for tensor in merged.values())
    plain = copy.deepcopy(base)
    plain.load_state_dict(merged)
    assert torch.allclose(logits(plain), logits(model), atol=1e-10)
    lspo.set_lora_scale(model, 0)
    assert all(torch.equal(tensor, base.state_dict()[name]) for name, tensor in lspo.merged_weights(model))


def test_nothing_of_phi_is_in_state_dict_parameters_or_export(adapted, tmp_path):
    base, model, _ = adapted
    assert list(model.state_dict()) == list(base.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in base.named_parameters()]
    model.load_state_dict(base.state_dict(), strict=True)
    common.export(model, common.load_tokenizer(common.tiny_model()), tmp_path / "final", torch.float64)
    assert set(load_file(tmp_path / "final" / "model.safetensors")) == set(base.state_dict())
    assert torch.equal(logits(common.load_model(tmp_path / "final", F64)), logits(base))


def test_a_model_without_the_targets_is_refused():
    with pytest.raises(common.UserError, match="q_projection"):
        lspo.add_lora(torch.nn.Sequential(torch.nn.Linear(2, 2)), 2, 4, ("q_projection",))


# --- the fit ----------------------------------------------------------------------------------------------------------

def test_solutions_end_with_one_stop_token_and_long_ones_are_left_out():
    tokenizer = common.load_tokenizer(common.tiny_model())
    problem = common.arithmetic_problems("arithmetic:3-3", "train")[0]
    ids = lspo.solution_ids(problem, tokenizer, 96)
    assert tokenizer.decode(ids[:-1]) == problem.solution
    assert ids[-1] == tokenizer.eos_token_id and tokenizer.eos_token_id not in ids[:-1]
    assert lspo.solution_ids(problem, tokenizer, len(ids)) == ids
    assert lspo.solution_ids(problem, tokenizer, len(ids) - 1) is None
    assert lspo.solution_ids(common.Problem("1+1=?", "2"), tokenizer, 96) is None


def fit(model, examples, **changes):
    cfg = lspo.Config(**{**lspo.TINY, "scaffold_steps": 4, "lora_rank": 4, "lora_alpha": 8.0, **changes})
    policy = common.Policy(model)
    return policy, lspo.fit_scaffold(policy, examples, cfg, 5, torch.device("cpu"))


def test_the_fit_moves_phi_alone_and_learns_the_solutions(adapted, base_model):
    _, model, _ = adapted
    examples = [([3, 14, 5, 17, 18, 2], [9, 3, 1]), ([4, 14, 4, 17, 18, 2], [18, 7, 17, 1])]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    policy, passes = fit(model, examples)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in policy.parameters())
    phi = [tensor for layer in lspo.lora_layers(model) for tensor in (layer.lora_A, layer.lora_B)]
    assert all(tensor.grad is None for tensor in phi) and all((tensor != 0).any() for tensor in phi)
    assert len(passes) == 4 and passes[-1] < 0.7 * passes[0]
    assert all(layer.scale == 2.0 for layer in lspo.lora_layers(model))
    fit(model, examples)
    again = [tensor for layer in lspo.lora_layers(model) for tensor in (layer.lora_A, layer.lora_B)]
    assert all(torch.equal(a, b) for a, b in zip(again, phi))       # a new phi and optimizer, not more of the old


def test_the_fits_loss_is_the_mean_over_completion_tokens_alone(adapted, base_model):
    _, model, _ = adapted
    prompt, solution = [3, 14, 5, 17, 18, 2], [9, 3, 1]
    _, passes = fit(model, [(prompt, solution)], scaffold_steps=1)
    logp = base_model(input_ids=torch.tensor([prompt + solution])).logits.log_softmax(-1)
    expected = -sum(logp[0, len(prompt) - 1 + t, token] for t, token in enumerate(solution)) / len(solution)
    assert passes == [pytest.approx(expected.item(), rel=1e-5)]     # lay_out and log_softmax are float32


def test_without_scaffold_steps_the_model_stays_the_base(adapted, base_model):
    _, model, _ = adapted
    _, passes = fit(model, [([3, 14, 5, 17, 18, 2], [9, 3, 1])], scaffold_steps=0)
    assert passes == [] and torch.equal(logits(model), logits(base_model))


# --- the file ---------------------------------------------------------------------------------------------------------

def test_equation_tags_of_docstring_and_code_agree():
    source = inspect.getsource(lspo).replace(lspo.__doc__, "")
    pattern = r"\[(LSPO \d+|GRPO eq\. \d|TIS)\]"
    code = set(re.findall(pattern, source))
    for several in re.findall(r"\[GRPO eq\. ([\d, ]+)\]", source):
        code |= {f"GRPO eq. {number}" for number in several.split(", ")}
    assert set(re.findall(pattern, lspo.__doc__)) == code and len(code) == 10


# --- whole runs -------------------------------------------------------------------------------------------------------

SHORT = ["--steps", "3", "--eval_every", "3", "--eval_problems", "20", "--eval_samples", "1", "--save_every", "3"]


def launch(folder, *flags, processes=1):
    """lspo.py in processes of its own."""
    command = [sys.executable] if processes == 1 else [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"]
    return subprocess.Popen([*command, str(REPO / "lspo.py"), "--run_dir", str(folder), *flags],
                            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def finish(process):
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output


def run(module, *flags):
    """module.main() in this process, which is spared the imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__file__, *flags])
        module.main()


def rows(folder):
    return [json.loads(line) for line in open(folder / "metrics.jsonl")]


def weights(folder):
    return load_file(folder / "final" / "model.safetensors")


def same(a, b, tolerance=0.0):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a) <= tolerance


HARD = [*SHORT, "--dataset", "arithmetic:7-8", "--prompts_per_step", "8"]
CONTROL = [*HARD, "--prompts_per_step", "32"]     # enough cliffs for one to be rescued by luck, whatever the base model
RESUMED = [*HARD, "--steps", "4", "--save_every", "2", "--eval_every", "4"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """name -> folder of a short run. All but "killed", which is given no time to end, are finished."""
    folder = tmp_path_factory.mktemp("lspo")
    common.tiny_model()
    two = launch(folder / "two", *HARD, "--updates_per_rollout", "2", processes=2)
    plain = folder / "plain.jsonl"
    problems = common.arithmetic_problems("arithmetic:6-8", "train")[::20]
    plain.write_text("".join(json.dumps({"problem": p.prompt, "answer": p.answer}) + "\n" for p in problems))
    easy = [*SHORT, "--steps", "2", "--dataset", "arithmetic:2-2", "--prompts_per_step", "4", "--group_size", "16"]
    unsolved = [*SHORT, "--steps", "2", "--model", "tiny", "--dataset", str(plain), "--prompts_per_step", "8"]
    wanted = {
        "one": (lspo, HARD), "micro": (lspo, [*HARD, "--micro_batch_tokens", "1"]),
        "halves": (lspo, [*HARD, "--updates_per_rollout", "2"]),
        "control": (lspo, [*CONTROL, "--scaffold_steps", "0"]), "control_grpo": (grpo, CONTROL),
        "whole": (lspo, RESUMED), "easy": (lspo, easy), "easy_grpo": (grpo, easy),
        "unsolved": (lspo, [*unsolved, "--allow_missing_solutions"]), "unsolved_grpo": (grpo, unsolved),
        "hopeless": (lspo, HARD), "hopeless_grpo": (grpo, HARD)}
    plans = []
    for name, (module, flags) in wanted.items():
        with pytest.MonkeyPatch.context() as patch:
            if name == "hopeless":      # every cliff is fitted and re-rolled, in vain
                patch.setattr(lspo, "splice_plan", lambda *arguments: plans.append(arguments) or [])
            run(module, "--run_dir", str(folder / name), *flags)
    finish(two)
    killed = launch(folder / "killed", *RESUMED)
    while killed.poll() is None and not (folder / "killed" / "checkpoints" / "step-000002").exists():
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    return {name: folder / name for name in ["two", "killed", "plain.jsonl", *wanted]} | {"plans": plans}


def trained(folder):
    """The metrics of all steps but 0, without the seconds."""
    timed = re.compile("_s$")
    return [{key: value for key, value in row.items() if not timed.search(key)} for row in rows(folder)[1:]]


def test_the_scaffold_worked_in_the_runs_that_are_compared(runs):
    for name in ("one", "halves"):
        for row in trained(runs[name]):
            assert row["cliffs"] >= row["rescued"] and row["swapped"] >= row["rescued"] and row["cliffs_left"] == 0
            assert 0 <= row["reroll_success"] <= 1 and row["splice_log_rho"] <= row["splice_log_rho_max"]
            assert row["engine_gap"] < 1e-4         # merged weights in the engine, phi in the trainer: one policy
            assert row["cliffs"] == 0 or row["scaffold_loss_after"] < row["scaffold_loss_before"]
        assert sum(row["rescued"] for row in trained(runs[name])) >= 3
        assert max(row["splice_log_rho_max"] for row in trained(runs[name])) > 0.5


def test_micro_batches_and_processes_do_not_matter(runs):
    assert same(runs["one"], runs["micro"], 1e-5) and same(runs["halves"], runs["two"], 1e-5)
    assert not same(runs["one"], runs["halves"], 1e-4)
    for a, b in zip(trained(runs["halves"]), trained(runs["two"]), strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-4)


def test_without_a_cliff_it_is_grpo_bit_for_bit(runs):
    assert sum(row["cliffs"] for row in trained(runs["easy"])) == 0
    assert trained(runs["easy"])[-1]["grad_norm"] > 0 and same(runs["easy"], runs["easy_grpo"])


def test_with_cliffs_that_are_not_rescued_it_is_grpo_bit_for_bit(runs):
    for name in ("hopeless", "unsolved"):
        assert sum(row["cliffs"] for row in trained(runs[name])) > 0
        assert sum(row["rescued"] + row["swapped"] for row in trained(runs[name])) == 0
        assert trained(runs[name])[-1]["grad_norm"] > 0 and same(runs[name], runs[name + "_grpo"])
    assert all("scaffold_loss_before" in row for row in trained(runs["hopeless"]) if row["cliffs"])
    assert all(row["cliffs"] == row["cliffs_left"] for row in trained(runs["unsolved"]))
    assert not same(runs["hopeless"], runs["one"], 1e-4)


def test_every_group_keeps_a_failure(runs):
    assert runs["plans"]
    for failed, rewards, most in runs["plans"]:
        assert list(failed) == list(range(8)) and len(rewards) == 8 and most == 7


def test_the_control_arm_splices_what_the_policy_itself_says(runs):
    assert sum(row["swapped"] for row in trained(runs["control"])) > 0
    assert max(row["splice_log_rho_max"] for row in trained(runs["control"])) < 1e-4
    assert max(row["splice_clip_frac"] for row in trained(runs["control"])) == 0
    assert not any("scaffold_loss_before" in row for row in trained(runs["control"]))
    assert not same(runs["control"], runs["control_grpo"], 1e-4)


def test_nothing_of_phi_is_exported_or_saved(runs):
    names = set(common.load_model(common.tiny_model()).state_dict())
    for name in ("one", "two"):
        assert set(weights(runs[name])) == names
        saved = FileSystemReader(runs[name] / "checkpoints" / "step-000003").read_metadata().state_dict_metadata
        assert saved and not any("lora" in key for key in saved)


def test_killed_and_resumed_it_ends_the_same(runs):
    """Killed with a checkpoint of step 2, the run goes on from there to the same weights and metrics."""
    assert not (runs["killed"] / "final").exists() and rows(runs["killed"])[-1]["step"] < 4
    run(lspo, "--resume", str(runs["killed"]))
    assert same(runs["whole"], runs["killed"]) and trained(runs["whole"]) == trained(runs["killed"])


@pytest.mark.parametrize("flags, sentence", [
    (["--dataset", "plain.jsonl"], "no worked solutions"), (["--lora_rank", "0"], "--lora_rank must be at least 1")])
def test_settings_that_cannot_work_are_refused_in_a_sentence(runs, tmp_path, flags, sentence):
    flags = [str(runs.get(flag, flag)) for flag in flags]
    with pytest.raises(common.UserError, match=sentence):
        run(lspo, "--model", "tiny", "--run_dir", str(tmp_path / "run"), *flags)
