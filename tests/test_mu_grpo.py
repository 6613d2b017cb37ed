"""mu_grpo.py: its functions against numbers worked out by hand, and whole short runs against each other."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402
import grpo  # noqa: E402
import mu_grpo  # noqa: E402

SCOPES = ("none", "trigger", "suffix", "suffix_non_trigger", "sequence")


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


# --- stages -----------------------------------------------------------------------------------------------------------

def staleness(updates, stages):
    return [age for length in mu_grpo.stage_lengths(updates, stages) for age in range(length)]


def test_stages_of_the_published_run():
    assert mu_grpo.stage_lengths(4096, 4) == [1024] * 4
    ages = staleness(4096, 4)
    assert [step for step, age in enumerate(ages) if age == 0] == [0, 1024, 2048, 3072]
    assert sum(ages) / 4096 == 511.5
    assert sum(staleness(4096, 1024)) / 4096 == 1.5      # GRPO with mu = 4


@pytest.mark.parametrize("updates, stages, lengths", [(10, 4, [3, 3, 2, 2]), (3, 3, [1, 1, 1]), (5, 2, [3, 2]),
                                                      (7, 1, [7]), (11, 4, [3, 3, 3, 2])])
def test_a_remainder_goes_to_the_first_stages(updates, stages, lengths):
    assert mu_grpo.stage_lengths(updates, stages) == lengths


# --- relaxed clip -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("clip, advantage, ratio, coefficient", [
    ((0.8, 1.2), 1, 0.5, 0.5), ((0.8, 1.2), 1, 1.3, 0), ((0.8, 1.2), -1, 0.5, 0), ((0.8, 1.2), -1, 0.9, -0.9),
    ((0.8, 1.2), -1, 6, -6), ((0, 5), 1, 0.5, 0.5), ((0, 5), 1, 1.3, 1.3), ((0, 5), 1, 4.9, 4.9), ((0, 5), 1, 5.1, 0),
    ((0, 5), -1, 1e-5, -1e-5), ((0, 5), -1, 0.5, -0.5), ((0, 5), -1, 6, -6)])
def test_token_coefficient(clip, advantage, ratio, coefficient):
    old = f64([[-1.3]])
    logp = (old + f64([[ratio]]).log()).requires_grad_()
    loss = mu_grpo.relaxed_token_loss(logp, old, f64([advantage]), *clip)
    loss.sum().backward()
    assert -logp.grad.item() == pytest.approx(coefficient, rel=1e-12, abs=1e-15)
    bounded = min(max(ratio, clip[0]), clip[1])
    assert -loss.item() == pytest.approx(min(ratio * advantage, bounded * advantage), rel=1e-12)


def test_published_clip_range_is_the_default():
    logp = f64([[0.0, 0.0]]).requires_grad_()
    old = -f64([[4.9, 5.1]]).log()
    mu_grpo.relaxed_token_loss(logp, old, f64([1])).sum().backward()
    torch.testing.assert_close(logp.grad, f64([[-4.9, 0]]))
    cfg = mu_grpo.Config()
    assert (cfg.steps, cfg.stages, cfg.clip_min, cfg.clip_max) == (4096, 4, 0, 5)
    assert (cfg.veto_threshold, cfg.veto_scope) == (1e-4, "sequence")
    assert (cfg.prompts_per_step, cfg.group_size, cfg.max_new_tokens, cfg.lr, cfg.kl_coef) == (64, 8, 2560, 1e-6, 0)


def test_right_after_a_rollout_it_is_grpo():
    torch.manual_seed(0)
    old, advantages = -torch.rand(4, 5, dtype=torch.float64), f64([1.5, -0.5, -0.5, -0.5])
    mask = (torch.arange(5) < torch.tensor([[5], [3], [1], [4]])).double()
    kept = mu_grpo.veto_mask(torch.ones_like(old), advantages, mask)
    assert torch.equal(kept, mask)
    grads = []
    for token_loss in (mu_grpo.relaxed_token_loss, grpo.token_loss):
        logp = old.clone().requires_grad_()
        mu_grpo.aggregate(token_loss(logp, old, advantages), kept, "token", mask.sum()).backward()
        grads.append(logp.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)
    torch.testing.assert_close(grads[0], -advantages[:, None] * mask / mask.sum())


# --- veto -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ratio, sums", [
    ([1, .9, 5e-5, .8, 1.1], (-3.80005, -3.8, -1.90005, -1.90005, 0)),
    ([1, .9, 5e-5, .8, 2e-5], (-2.70007, -2.7, -1.90005, -1.90007, 0)),
    ([1, .9, 2e-4, .8, 1.1], (-3.8002,) * 5),
    ([1e-5, 1, 1, 1, 1], (-4.00001, -4, -1e-5, -1e-5, 0))])
def test_veto_scopes(ratio, sums):
    for scope, expected in zip(SCOPES, sums):
        logp = f64([ratio]).log().requires_grad_()
        kept = mu_grpo.veto_mask(logp.detach().exp(), f64([-1]), torch.ones(1, 5, dtype=torch.float64), scope=scope)
        loss = mu_grpo.relaxed_token_loss(logp, torch.zeros_like(logp), f64([-1]))
        mu_grpo.aggregate(loss, kept, "token", 1).backward()
        assert -(loss * kept).sum().item() == pytest.approx(expected, rel=1e-12, abs=1e-15), scope
        torch.testing.assert_close(logp.grad, kept * f64([ratio]))      # d loss / d logp = -rho A where it is kept


@pytest.mark.parametrize("scope", SCOPES)
def test_only_negative_responses_are_vetoed(scope):
    ratio = f64([[1e-9, 1, 1e-9]] * 3)
    kept = mu_grpo.veto_mask(ratio, f64([1, 0, -1]), torch.ones_like(ratio), scope=scope)
    assert torch.equal(kept[:2], torch.ones(2, 3, dtype=torch.float64))
    assert kept[2].sum() == {"none": 3, "trigger": 1, "suffix": 1, "suffix_non_trigger": 2, "sequence": 0}[scope]


@pytest.mark.parametrize("scope", SCOPES)
def test_padding_never_triggers_and_is_never_kept(scope):
    ratio = f64([[1, 1, 0, 1], [1, 1, float("nan"), 0], [0, 0, 0, 0]])
    mask = f64([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    copies = ratio.clone(), mask.clone()
    kept = mu_grpo.veto_mask(ratio, f64([-1, -1, -1]), mask, scope=scope)
    assert torch.equal(kept, mask) and kept.dtype == torch.float64
    assert torch.equal(mask, copies[1]) and torch.equal(ratio.nan_to_num(7), copies[0].nan_to_num(7))
    # A trigger before padding: what is kept stays within the mask.
    kept = mu_grpo.veto_mask(f64([[1e-9, 1, 1, 1]]), f64([-1]), mask[:1], scope=scope)
    assert (kept <= mask[:1]).all()


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty_batches(scope, shape):
    empty = torch.zeros(shape, dtype=torch.float64)
    kept = mu_grpo.veto_mask(empty, -torch.ones(shape[0], dtype=torch.float64), empty, scope=scope)
    assert kept.shape == shape
    loss = mu_grpo.relaxed_token_loss(empty, empty, torch.ones(shape[0], dtype=torch.float64))
    for how in ("token", "sequence", "constant"):
        assert mu_grpo.aggregate(loss, kept, how, 1).item() == 0


def test_everything_vetoed():
    logp = torch.full((2, 3), -20.0, dtype=torch.float64, requires_grad=True)
    old, advantages = torch.zeros(2, 3, dtype=torch.float64), f64([-1, -2])
    kept = mu_grpo.veto_mask((logp.detach() - old).exp(), advantages, torch.ones_like(old))
    for how in ("token", "sequence", "constant"):
        loss = mu_grpo.aggregate(mu_grpo.relaxed_token_loss(logp, old, advantages), kept, how, 1)
        logp.grad = None
        loss.backward()
        assert loss.item() == 0 and torch.equal(logp.grad, torch.zeros_like(old))


# --- command line and docstring ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, words", [
    (["--updates_per_rollout", "2"], "--updates_per_rollout must be 1"),
    (["--stages", "0"], "--stages 0 must be between 1 and --steps 4"),
    (["--stages", "5"], "--stages 5 must be between 1 and --steps 4")])
def test_refused_settings(flags, words, tmp_path):
    with pytest.raises(common.UserError, match=words):
        main(mu_grpo, "--model", "tiny", "--steps", 4, "--stages", 2, "--run_dir", tmp_path / "run", *flags)
    assert not (tmp_path / "run").exists()


def test_equation_tags_match_the_code():
    source = (ROOT / "mu_grpo.py").read_text()
    _, docstring, code = source.split('"""', 2)

    def tags(text):
        return set(re.findall(r"\[((?:mu-)?GRPO [^\]]+)\]", text))

    assert tags(docstring) == tags(code) and len(tags(code)) >= 5


# --- whole runs -------------------------------------------------------------------------------------------------------

SETTING = ["--model", "tiny", "--lr_schedule", "constant", "--warmup_steps", "0", "--eval_problems", "20",
           "--eval_samples", "1", "--group_size", "8"]
# A threshold and a rate at which tokens are vetoed within a few updates, and a scope that keeps parts of responses.
STAGED = [*SETTING, "--steps", "5", "--stages", "2", "--save_every", "2", "--prompts_per_step", "8", "--lr", "1e-3",
          "--veto_threshold", "0.8", "--veto_scope", "suffix", "--eval_every", "2"]
KILLED = """
import os, signal, sys
sys.argv = ["mu_grpo.py"] + sys.argv[1:]
import common, mu_grpo
write = common.RunLog.write
def write_and_die(log, step, metrics):
    write(log, step, metrics)
    if step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
common.RunLog.write = write_and_die
mu_grpo.main()
"""


def start(*command):
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=240,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def main(module, *flags):
    """module.main() with these flags, in this process: a run costs a second, not five. One thread, as `start` has."""
    threads, argv = torch.get_num_threads(), sys.argv
    torch.set_num_threads(1)
    sys.argv = [module.__file__, *map(str, flags)]
    try:
        module.main()
    finally:
        torch.set_num_threads(threads)
        sys.argv = argv


def train(module, run_dir, *flags):
    main(module, *flags, "--run_dir", run_dir)
    return run_dir


def weights(run_dir):
    return load_file(run_dir / "final" / "model.safetensors")


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_seconds(row):
    return {key: value for key, value in row.items() if not key.endswith("_s")}


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max((a[key] - b[key]).abs().max().item() for key in a)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(folder):
    return train(mu_grpo, folder / "whole", *STAGED)


@pytest.fixture(scope="module")
def killed(folder):
    """The same run, killed in its second stage; its last checkpoint is inside the first."""
    result = start(sys.executable, "-c", KILLED, *STAGED, "--run_dir", folder / "killed")
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert rows(folder / "killed")[-1]["step"] == 4
    assert common.latest_checkpoint(folder / "killed")[0] == 2
    return folder / "killed"


@pytest.fixture(scope="module")
def stored(killed):
    """(processes, Rollout) as the killed run saved them."""
    return torch.load(killed / "checkpoints" / "step-000002" / "extra-0.pt", weights_only=False)


def test_grpo_with_four_updates_per_rollout_bit_for_bit(folder):
    theirs = train(grpo, folder / "grpo", *SETTING, "--steps", "2", "--prompts_per_step", "16",
                   "--updates_per_rollout", "4", "--old_logp", "engine", "--clip_high", "0.2", "--lr", "1e-3",
                   "--eval_every", "2")
    ours = train(mu_grpo, folder / "mu", *SETTING, "--steps", "8", "--stages", "2", "--prompts_per_step", "4",
                 "--clip_min", "0.8", "--clip_max", "1.2", "--veto_scope", "none", "--lr", "1e-3", "--eval_every", "3")
    assert largest_difference(weights(theirs), weights(ours)) == 0
    base = load_file(Path(common.tiny_model()) / "model.safetensors")
    assert largest_difference(weights(ours), base) > 1e-3
    for stage, row in enumerate(rows(theirs)[1:]):
        parts = rows(ours)[1 + 4 * stage:][:4]
        for key in ("reward", "length", "truncated", "loss"):
            assert sum(part[key] for part in parts) / 4 == pytest.approx(row[key], rel=1e-9), key
    assert max(row["clip_frac"] for row in rows(ours)[1:]) > 0       # so the classic clip was at work


def test_one_process_two_processes_any_micro_batch(whole, folder):
    small = train(mu_grpo, folder / "small", *STAGED, "--micro_batch_tokens", "1")
    two = start(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                "mu_grpo.py", *STAGED, "--run_dir", folder / "two")
    assert two.returncode == 0, two.stderr
    for other in (small, folder / "two"):
        # AdamW divides a gradient by its own size: where that is near 0, rounding alone moved a weight by 2.7e-5 on one
        # CPU. A training step that differs moves weights by 1e-3, as the test before this one holds.
        assert largest_difference(weights(whole), weights(other)) < 1e-4
        for a, b in zip(rows(whole)[1:], rows(other)[1:]):
            for key in ("reward", "loss", "grad_norm", "clip_frac", "veto_frac", "negative_ratio"):
                assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-6), key


def test_metrics_of_a_stage(whole):
    logged = rows(whole)[1:]
    assert [row["staleness"] for row in logged] == [0, 1, 2, 0, 1]
    for row in logged:
        fresh = row["staleness"] == 0
        assert ("engine_gap" in row) == fresh
        assert (row["sync_s"] > 0) == fresh
        assert (row["rollout_s"] > 0.02) == fresh
        assert (abs(row["negative_ratio"] - 1) < 1e-4) == fresh
        assert (row["veto_frac"] > 0) == (not fresh)
        assert row["engine_gap"] < 1e-4 if fresh else True
        assert ("eval_pass@1" in row) == (row["step"] in (2, 4, 5))


def test_update_is_the_gradient_of_the_whole_objective(killed, stored):
    """Step 3 from the checkpoint after step 2, as one sum over all rows with N counted before the backward pass."""
    cfg = mu_grpo.Config(**{key: value for key, value in json.loads((killed / "config.json").read_text()).items()
                            if key in mu_grpo.Config.__dataclass_fields__})
    name = common.tiny_model()
    policy = common.Policy(common.load_model(name))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), fused=True)
    common.load_checkpoint(killed, policy, optimizer)
    policy.double()

    tokenizer = common.load_tokenizer(name)
    problems, _ = common.encode_prompts(common.load_problems(cfg.dataset, "train"), tokenizer, cfg.max_prompt_tokens)
    order = common.data_order(len(problems), 3 * 8, 1, cfg.seed)[2 * 8:]
    rollout = stored[1].select(range(2 * 64, 3 * 64))
    rewards = common.score(rollout.texts, [problems[i].answer for i in order for _ in range(8)])
    advantages = mu_grpo.group_advantages(torch.tensor(rewards, dtype=torch.float64).view(8, 8)).flatten()
    logp = policy(rollout.tokens_BL, rollout.prompt_len_B, rollout.completion_len_B)
    ratio = (logp - rollout.logp_BT.double()).exp()

    kept, mask = torch.zeros_like(ratio), rollout.mask_BT
    for row, length in enumerate(rollout.completion_len_B.tolist()):
        stop = length
        if advantages[row] < 0:
            low = [t for t in range(length) if ratio[row, t] < cfg.veto_threshold]
            stop = low[0] + 1 if low else length
        kept[row, :stop] = 1
    a = advantages[:, None]
    objective = (torch.minimum(ratio * a, ratio.clamp(0, 5) * a) * kept).sum() / kept.sum()
    (-objective).backward()
    norm = torch.stack([p.grad.norm() for p in policy.parameters()]).norm().item()

    row = rows(killed)[3]
    negative = mask * (a < 0)
    assert row["step"] == 3 and row["reward"] == pytest.approx(sum(rewards) / 64)
    assert 0 < row["veto_frac"] == pytest.approx(((mask - kept).sum() / negative.sum()).item(), rel=1e-6)
    assert row["negative_ratio"] == pytest.approx(((ratio * negative).sum() / negative.sum()).item(), rel=1e-4)
    assert row["loss"] == pytest.approx(-objective.item(), rel=1e-4, abs=1e-6)
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_the_stage_is_saved_while_it_is_unfinished(whole, stored):
    processes, rollout = stored
    assert processes == 1 and len(rollout.texts) == 3 * 8 * 8       # the 3 updates of the first stage
    assert torch.load(whole / "checkpoints" / "step-000005" / "extra-0.pt", weights_only=False) is None


def test_another_number_of_processes_is_refused_inside_a_stage(killed, stored):
    extra = killed / "checkpoints" / "step-000002" / "extra-0.pt"
    torch.save((2, stored[1]), extra)
    with pytest.raises(common.UserError, match="with 2 processes, and there are 1 now"):
        main(mu_grpo, "--resume", killed)
    torch.save(stored, extra)


def test_killed_and_resumed_run_ends_alike(whole, killed, stored):
    """Runs last on this folder: it finishes the killed run."""
    main(mu_grpo, "--resume", killed)
    assert largest_difference(weights(whole), weights(killed)) == 0
    assert list(map(without_seconds, rows(whole)))[1:] == list(map(without_seconds, rows(killed)))[1:]


def test_equal_rewards_leave_the_weights_alone(folder):
    run = train(mu_grpo, folder / "equal", *SETTING, "--max_new_tokens", "2", "--steps", "2", "--stages", "1",
                "--prompts_per_step", "2")
    for row in rows(run)[1:]:
        assert row["no_signal"] == 1 and row["loss"] == 0 and row["grad_norm"] == 0 and row["veto_frac"] == 0
    assert largest_difference(weights(run), load_file(Path(common.tiny_model()) / "model.safetensors")) == 0
