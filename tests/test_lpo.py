"""lpo.py: its numbers, its gradients, and whole short runs."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402
import lpo  # noqa: E402
from lpo import (clamped_log_ratio, divergence_value, listwise_target, masked_mean, matched_temperature,  # noqa: E402
                 projection_coefficients)

DIVERGENCES, MATCHES = ("forward", "reverse", "js"), ("grpo", "dr_grpo", "maxrl", "rloo")


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


ONE_RIGHT, ON_POLICY, MOVED, STD = row(1, 0, 0, 0), row(0, 0, 0, 0), row(.3, -.1, 0, -.2), row(math.sqrt(3) / 4)


def close(actual, expected, tolerance=1e-6):
    actual, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def spread(first, other):
    """One value and three equal ones."""
    return row(first, other, other, other)


def random_lists(lists=40, size=8, seed=0):
    """Scores, prior scores, and rewards that differ within every list."""
    generator = torch.Generator().manual_seed(seed)
    scores_PG = torch.randn(lists, size, generator=generator, dtype=torch.float64) * 0.3
    prior_PG = torch.randn(lists, size, generator=generator, dtype=torch.float64) * 0.3
    rewards_PG = (torch.rand(lists, size, generator=generator) < 0.4).double()
    rewards_PG[:, 0], rewards_PG[:, 1] = 1, 0
    return scores_PG, prior_PG, rewards_PG


# --- functions --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tau, target, forward, reverse, js, kl", [
    (1, (.475367, .174878), (-.225367, .075122), (-.1875, .0625), (-.050145, .016715), (.117993, .107374)),
    (math.sqrt(3) / 4, (.770438, .076521), (-.520438, .173479), (-.433013, .144338), (-.106828, .035609),
     (.595349, .606552)),
    (.25, (.947915, .017362), (-.697915, .232638), (-.75, .25), None, None),
])
def test_on_policy_values(tau, target, forward, reverse, js, kl):
    w_PG = listwise_target(ONE_RIGHT, row(tau))
    close(w_PG, spread(*target))
    for divergence, expected in (("forward", forward), ("reverse", reverse), ("js", js)):
        if expected:
            close(projection_coefficients(ON_POLICY, ONE_RIGHT, row(tau), divergence), spread(*expected))
    if kl:
        close(divergence_value(ON_POLICY, w_PG, "forward"), [kl[0]])
        close(divergence_value(ON_POLICY, w_PG, "reverse"), [kl[1]])


def test_off_policy_values():
    tau = STD
    close(MOVED.softmax(1), row(.331382, .222132, .245494, .200993))
    for divergence, expected in (("forward", (-.439057, .145611, .168973, .124473)),
                                 ("reverse", (-.424537, .139563, .178791, .106183)),
                                 ("js", (-.100427, .033245, .039772, .027409))):
        close(projection_coefficients(MOVED, ONE_RIGHT, tau, divergence), row(*expected))
    w_PG = listwise_target(ONE_RIGHT, tau)
    close(divergence_value(MOVED, w_PG, "forward"), [.405364])
    close(divergence_value(MOVED, w_PG, "reverse"), [.437422])
    equal_PG = row(1, 1, 1, 1)
    close(projection_coefficients(MOVED, equal_PG, row(1), "forward"), row(.081382, -.027868, -.004506, -.049007))


def test_prior_scores():
    prior_PG = row(.2, .1, -.1, 0)
    close(listwise_target(ONE_RIGHT, row(1), prior_PG), row(.524495, .174589, .142941, .157975))
    for divergence, expected in (("forward", (-.235843, .086593, .070897, .078353)),
                                 ("reverse", (-.205332, .075391, .061725, .068216))):
        close(projection_coefficients(prior_PG, ONE_RIGHT, row(1), divergence, prior_PG), row(*expected))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("match", MATCHES)
def test_coefficients_are_the_gradient(divergence, match):
    scores_PG, prior_PG, rewards_PG = random_lists()
    tau_P1 = matched_temperature(rewards_PG, match)
    coefficients_PG = projection_coefficients(scores_PG, rewards_PG, tau_P1, divergence, prior_PG)
    leaf_PG = scores_PG.clone().requires_grad_()
    divergence_value(leaf_PG, listwise_target(rewards_PG, tau_P1, prior_PG), divergence).sum().backward()
    close(coefficients_PG, leaf_PG.grad, 1e-9)
    close(coefficients_PG.sum(1), torch.zeros(len(scores_PG)), 1e-12)
    if divergence == "forward":
        assert coefficients_PG.abs().max() <= 1 and coefficients_PG.abs().sum(1).max() <= 2
    shift_PG = (rewards_PG - 0.3) / tau_P1 + prior_PG           # s = phi up to a constant: arrived
    close(projection_coefficients(shift_PG, rewards_PG, tau_P1, divergence, prior_PG), torch.zeros(40, 8), 1e-12)


@pytest.mark.parametrize("match", MATCHES)
def test_reverse_on_policy_is_the_matched_policy_gradient(match):
    _, _, rewards_PG = random_lists()
    mean_P1, k = rewards_PG.mean(1, keepdim=True), rewards_PG.shape[1]
    others_P1 = (rewards_PG.sum(1, keepdim=True) - rewards_PG) / (k - 1)
    advantages_PG = {"grpo": (rewards_PG - mean_P1) / (rewards_PG.std(1, correction=0, keepdim=True) + 1e-6),
                     "dr_grpo": rewards_PG - mean_P1, "maxrl": (rewards_PG - mean_P1) / (mean_P1 + 1e-6),
                     "rloo": rewards_PG - others_P1}[match]
    coefficients_PG = projection_coefficients(torch.zeros_like(rewards_PG), rewards_PG,
                                              matched_temperature(rewards_PG, match), "reverse")
    close(coefficients_PG, -advantages_PG / k, 1e-12)


def test_matched_temperatures():
    for match, tau in (("grpo", math.sqrt(3) / 4 + 1e-6), ("dr_grpo", 1), ("maxrl", .25 + 1e-6), ("rloo", .75)):
        tau_P1 = matched_temperature(ONE_RIGHT, match)
        assert tau_P1.shape == (1, 1) and tau_P1.dtype == torch.float64
        close(tau_P1, [[tau]], 1e-12)


def test_invariances_and_limits():
    scores_PG, prior_PG, rewards_PG = random_lists()
    tau_P1 = matched_temperature(rewards_PG, "grpo")
    for divergence in DIVERGENCES:
        base_PG = projection_coefficients(scores_PG, rewards_PG, tau_P1, divergence, prior_PG)
        close(projection_coefficients(scores_PG, rewards_PG + 7, tau_P1, divergence, prior_PG), base_PG, 1e-12)
        close(projection_coefficients(scores_PG, rewards_PG * 7, tau_P1 * 7, divergence, prior_PG), base_PG, 1e-12)
        flat_PG = projection_coefficients(prior_PG, rewards_PG, tau_P1 * 1e12, divergence, prior_PG)
        close(flat_PG, torch.zeros(40, 8), 1e-9)
    close(listwise_target(rewards_PG + 7, tau_P1), listwise_target(rewards_PG, tau_P1), 1e-12)
    close(listwise_target(rewards_PG, tau_P1 * 1e-9), rewards_PG / rewards_PG.sum(1, keepdim=True), 1e-12)


def test_monotonic_improvement_identity():
    _, prior_PG, rewards_PG = random_lists()
    tau_P1 = matched_temperature(rewards_PG, "grpo")
    w_PG, p_PG = listwise_target(rewards_PG, tau_P1, prior_PG), prior_PG.softmax(1)
    both_P = divergence_value(prior_PG, w_PG, "forward") + divergence_value(prior_PG, w_PG, "reverse")
    close(((w_PG - p_PG) * rewards_PG).sum(1), tau_P1[:, 0] * both_P, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [3, 7, 8])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_equal_rewards_on_policy_are_exactly_0(dtype, size, reward):
    rewards_PG = torch.full((1, size), reward, dtype=dtype)
    anywhere_PG = torch.linspace(-.3, .2, size, dtype=dtype)[None]
    for match in MATCHES:
        tau_P1 = matched_temperature(rewards_PG, match)
        for divergence in DIVERGENCES:
            assert (projection_coefficients(torch.zeros_like(rewards_PG), rewards_PG, tau_P1, divergence) == 0).all()
            assert (projection_coefficients(anywhere_PG, rewards_PG, tau_P1, divergence, anywhere_PG) == 0).all()
            moved_PG = projection_coefficients(anywhere_PG, rewards_PG, tau_P1, divergence)
            assert moved_PG.isfinite().all() and (moved_PG != 0).any()      # off-policy they are not filtered


def test_extremes_are_finite():
    for dtype in (torch.float32, torch.float64):
        rewards_PG, scores_PG = ONE_RIGHT.to(dtype), row(-900, 0, 5, 900).to(dtype)
        for tau_P1 in (row(1e-6).to(dtype), row(1).to(dtype)):
            for divergence in DIVERGENCES:
                assert projection_coefficients(scores_PG, rewards_PG, tau_P1, divergence).isfinite().all()
                assert divergence_value(scores_PG, listwise_target(rewards_PG, tau_P1), divergence).isfinite().all()


def test_dtype_and_inputs():
    scores_PG, rewards_PG, prior_PG = MOVED.clone(), ONE_RIGHT.clone(), MOVED.clone()
    for divergence in DIVERGENCES:
        assert projection_coefficients(scores_PG, rewards_PG, STD, divergence, prior_PG).dtype == torch.float64
        assert divergence_value(scores_PG, listwise_target(rewards_PG, STD), divergence).dtype == torch.float64
    assert torch.equal(scores_PG, MOVED) and torch.equal(rewards_PG, ONE_RIGHT) and torch.equal(prior_PG, MOVED)


def test_push_on_right_answers():
    for n, mass in enumerate((.621, .520, .451, .381, .304, .218, .118), start=1):
        rewards_PG = row(*[1.0] * n, *[0.0] * (8 - n))
        tau_P1 = matched_temperature(rewards_PG, "grpo")
        c_PG = projection_coefficients(torch.zeros_like(rewards_PG), rewards_PG, tau_P1, "forward")
        close(-c_PG[0, :n].sum(), mass, 6e-4)


def test_clamp_and_the_gradient_of_a_token():
    logp_BT = torch.cat([row(-1.0, -1.1, -3, 9), row(-.5, -.9, 9, 9), row(9, 9, 9, 9)]).requires_grad_()
    mask_BT = torch.cat([row(1, 1, 1, 0), row(1, 1, 0, 0), row(0, 0, 0, 0)])
    clamped_BT = clamped_log_ratio(logp_BT, torch.full_like(logp_BT, -1))
    close(clamped_BT[:2, :2].detach(), [[0, -.1], [.182322, .1]])
    close(clamped_BT[0, 2].detach(), -.223144)
    means_B = masked_mean(clamped_BT, mask_BT)
    assert means_B[2] == 0
    (torch.tensor([.3, -.4, .1], dtype=torch.float64) * means_B).sum().backward()
    close(logp_BT.grad, [[.1, .1, 0, 0], [0, -.2, 0, 0], [0, 0, 0, 0]], 1e-12)


# --- the loop ---------------------------------------------------------------------------------------------------------

SMALL = ["--model", "tiny", "--dataset", "arithmetic:2-4", "--steps", "4", "--prompts_per_step", "8",
         "--updates_per_rollout", "2", "--save_every", "2", "--eval_problems", "3", "--eval_samples", "1",
         "--eval_every", "100", "--warmup_steps", "1"]


def run(folder, *flags):
    """A run of lpo.py in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lpo.py", *flags, *([] if "--resume" in flags else ["--run_dir", str(folder)])])
        lpo.main()


def weights(folder):
    return load_file(folder / "final" / "model.safetensors")


def rows(folder):
    """metrics.jsonl without what depends on the clock."""
    clocks = ("rollout_s", "reward_s", "update_s", "tokens_per_s")
    return [{k: v for k, v in json.loads(line).items() if k not in clocks}
            for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lpo") / "one"
    run(folder, *SMALL)
    return folder


def assert_same_run(a, b):
    for x, y in zip(rows(a), rows(b), strict=True):
        assert x == pytest.approx(y, rel=1e-4, abs=1e-5)
    assert weights(a).keys() == weights(b).keys()
    for name, tensor in weights(a).items():
        assert (tensor - weights(b)[name]).abs().max() < 5e-5, name


def test_micro_batches_of_one_row(one, tmp_path):
    run(tmp_path / "micro", *SMALL, "--micro_batch_tokens", "1")
    assert_same_run(one, tmp_path / "micro")


def test_two_processes(one, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d",
               "--rdzv_endpoint", "localhost:0", "lpo.py", *SMALL, "--run_dir", str(tmp_path / "two")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_same_run(one, tmp_path / "two")


def test_stop_and_resume(one, tmp_path, monkeypatch, capsys):
    write = common.RunLog.write

    def write_and_stop(log, step, metrics):
        write(log, step, metrics)
        if step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(common.RunLog, "write", write_and_stop)
        run(tmp_path / "stopped", *SMALL)
    assert not (tmp_path / "stopped" / "final").exists()
    run(tmp_path / "stopped", "--resume", str(tmp_path / "stopped"))
    assert rows(one) == rows(tmp_path / "stopped")
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, weights(tmp_path / "stopped")[name])
    capsys.readouterr()
    with pytest.raises(SystemExit) as finished:
        run(tmp_path / "stopped", "--resume", str(tmp_path / "stopped"))
    assert finished.value.code == 0
    assert "nothing to resume" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--divergence", "forward"], ["--divergence", "reverse", "--match", "maxrl"],
                                   ["--divergence", "js", "--match", "rloo"]])
def test_update_is_the_gradient_through_whole_lists(tmp_path, monkeypatch, flags):
    """Each optimizer step's gradient equals autograd through the divergences of its lists, at the weights of then.

    The engine is made to disagree with the trainer: its log-probabilities must not matter.
    """
    seen, rollouts, rewards = [], [], []
    clip, generate, score = torch.nn.utils.clip_grad_norm_, common.HFEngine.generate, common.score

    def record_step(parameters, largest):
        parameters = list(parameters)
        seen.append([(p.detach().clone(), p.grad.clone()) for p in parameters])
        return clip(parameters, largest)

    def record_rollout(engine, prompts, n, *rest):
        rollout = generate(engine, prompts, n, *rest)
        noise_BT = 0.05 * torch.sin(torch.arange(rollout.logp_BT.numel())).view_as(rollout.logp_BT)
        rollout.logp_BT += noise_BT * rollout.mask_BT
        rollouts.append(rollout)
        return rollout

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", record_step)
    monkeypatch.setattr(common.HFEngine, "generate", record_rollout)
    monkeypatch.setattr(common, "score", lambda *texts: rewards.append(score(*texts)) or rewards[-1])
    run(tmp_path / "recorded", *SMALL, "--steps", "1", "--micro_batch_tokens", "300", "--lr", "1e-4",
        "--lr_schedule", "constant", "--clip_low", "0.99", "--clip_high", "99", *flags)
    cfg = lpo.Config(**{"run_dir": "", **dict(zip((f.removeprefix("--") for f in flags[::2]), flags[1::2]))})
    rollout = next(r for r in rollouts if len(r.texts) == 64)
    rewards_PG = torch.tensor(next(r for r in rewards if len(r) == 64)).view(8, 8)
    assert len(seen) == 2 and not torch.equal(seen[0][0][0], seen[1][0][0])

    policy, distances = common.Policy(common.load_model(common.resolve_model("tiny"))), []

    def logp_at(recorded):
        for parameter, (value, _) in zip(policy.parameters(), recorded, strict=True):
            parameter.data.copy_(value)
        policy.zero_grad()
        return policy(rollout.tokens_BL, rollout.prompt_len_B, rollout.completion_len_B)

    start_BT = logp_at(seen[0]).detach()
    target_PG = listwise_target(rewards_PG, matched_temperature(rewards_PG, cfg.match))
    for half, recorded in zip((slice(0, 4), slice(4, 8)), seen):
        log_ratio_BT = logp_at(recorded) - start_BT
        scores_PG = masked_mean(log_ratio_BT, rollout.mask_BT).view(8, 8)[half]
        divergence_value(scores_PG, target_PG[half], cfg.divergence).mean().backward()
        distances += divergence_value(scores_PG.detach(), target_PG[half], "forward").tolist()
        for parameter, (_, gradient) in zip(policy.parameters(), recorded):
            assert torch.allclose(parameter.grad, gradient, rtol=1e-3, atol=2e-5)
    logged = rows(tmp_path / "recorded")[1]
    assert logged["clip_frac"] == 0         # or the comparison above would not hold
    assert logged["target_kl"] == pytest.approx(sum(distances) / 8, rel=1e-4)
    assert logged["target_entropy"] == pytest.approx(torch.special.entr(target_PG).sum().item() / 8, rel=1e-4)
    assert 0 < logged["coef_max"] <= 1 and abs(logged["coef_sum"]) < 1e-6


@pytest.mark.parametrize("flags", [[], ["--match", "maxrl", "--divergence", "reverse"], ["--updates_per_rollout", "1"]])
@pytest.mark.parametrize("reward", [0.0, 0.1])
def test_equal_rewards_on_policy_move_nothing(tmp_path, monkeypatch, reward, flags):
    monkeypatch.setattr(common, "score", lambda texts, answers: [reward] * len(texts))
    run(tmp_path / "equal", *SMALL, "--steps", "1", "--prompts_per_step", "2", "--weight_decay", "0", *flags)
    logged = rows(tmp_path / "equal")[1]
    assert logged["grad_norm"] < 1e-6 and logged["coef_max"] < 1e-6 and abs(logged["target_kl"]) < 1e-6
    assert all(math.isfinite(value) for value in logged.values())


@pytest.mark.parametrize("flags", [["--clip_low", "1"], ["--clip_high", "0"]])
def test_useless_values_are_refused(tmp_path, flags):
    with pytest.raises(common.UserError, match=flags[0]):
        run(tmp_path / "refused", *SMALL, *flags)
    assert not (tmp_path / "refused").exists()
