"""conspo.py: its numbers, its gradients, and whole short runs."""

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
import conspo  # noqa: E402
from conspo import contrastive_objective, margin_at, masked_mean, score_coefficients  # noqa: E402

SCORES = torch.tensor([[-0.5, -1.0, -0.6, -1.2]], dtype=torch.float64)
REWARDS = torch.tensor([[1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)


def close(actual, expected, tolerance=1e-6):
    actual, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def autograd_coefficients(scores_PG, rewards_PG, margin, tau):
    scores_PG = scores_PG.detach().clone().requires_grad_()
    contrastive_objective(scores_PG, rewards_PG, margin, tau)[0].sum().backward()
    return scores_PG.grad


def random_groups(groups=40, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores_PG = -torch.rand(groups, size, generator=generator, dtype=torch.float64) * 2
    return scores_PG, (torch.rand(groups, size, generator=generator) < 0.4).double()


# --- functions --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tau, margin, objective, coefficients", [
    (1, 0, -1.036589, [.291790, .348968, -.413709, -.227049]),
    (1, .2, -1.169191, [.315614, .369183, -.442143, -.242653]),
    (10, 0, -10.890056, [.328910, .334492, -.341649, -.321753]),
    (10, .01, -10.896691, [.329023, .334603, -.341764, -.321862]),
    (.1, 0, -.216725, [.134714, .491029, -.624196, -.001547]),
    (1e-3, .05, -.225, [0, .5, -.5, 0]),
    (1, 50, None, [.5, .5, -.645656, -.354344]),
])
def test_values_and_gradients(tau, margin, objective, coefficients):
    objective_P, valid_P = contrastive_objective(SCORES, REWARDS, margin, tau)
    assert valid_P.tolist() == [True]
    if objective is not None:
        close(objective_P, [objective])
    close(score_coefficients(SCORES, REWARDS, margin, tau), [coefficients])
    close(autograd_coefficients(SCORES, REWARDS, margin, tau), [coefficients])


@pytest.mark.parametrize("tau, margin", [(10, .01), (1, 0), (.1, .05), (1e-3, .3)])
def test_coefficients_are_the_gradient(tau, margin):
    scores_PG, rewards_PG = random_groups()
    coefficients_PG = score_coefficients(scores_PG, rewards_PG, margin, tau)
    close(coefficients_PG, autograd_coefficients(scores_PG, rewards_PG, margin, tau), 1e-12)
    close(coefficients_PG.sum(1), torch.zeros(len(scores_PG)), 1e-12)
    assert (coefficients_PG[rewards_PG == 1] >= 0).all() and (coefficients_PG[rewards_PG == 0] <= 0).all()


def test_symmetries():
    scores_PG, rewards_PG = random_groups()
    base_PG = score_coefficients(scores_PG, rewards_PG, .1, .5)
    close(score_coefficients(scores_PG + 3, rewards_PG, .1, .5), base_PG, 1e-12)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    close(score_coefficients(scores_PG[:, order], rewards_PG[:, order], .1, .5), base_PG[:, order], 1e-12)
    shifted_PG = scores_PG - .1 * rewards_PG
    close(contrastive_objective(scores_PG, rewards_PG, .1, .5)[0],
          contrastive_objective(shifted_PG, rewards_PG, 0, .5)[0], 1e-12)


def test_other_positives_are_not_in_the_denominator():
    once = score_coefficients(SCORES, REWARDS, 0, 1)[0]
    twice = score_coefficients(torch.tensor([[-.5, -.5, -1.0, -.6, -1.2]], dtype=torch.float64),
                               torch.tensor([[1., 1, 1, 0, 0]]).double(), 0, 1)[0]
    close(twice[[0, 2]] * 3, once[:2] * 2, 1e-12)       # N+ (1 - P_i) is unchanged


@pytest.mark.parametrize("tau", [.1, 1, 10])
def test_equal_scores_give_constant_weights(tau):
    for n_positive in range(1, 8):
        n_negative = 8 - n_positive
        rewards_PG = torch.tensor([[1.0] * n_positive + [0.0] * n_negative]).double()
        coefficients = score_coefficients(torch.full((1, 8), -.7).double(), rewards_PG, 0, tau)[0]
        close(coefficients[:n_positive], [n_negative / (n_positive * (1 + n_negative))] * n_positive, 1e-12)
        close(coefficients[n_positive:], [-1 / (1 + n_negative)] * n_negative, 1e-12)


def test_ratio_of_negatives():
    coefficients = score_coefficients(SCORES, REWARDS, 0, .3)[0]
    close(coefficients[2] / coefficients[3], math.exp((-.6 + 1.2) / .3), 1e-9)


def test_margin_schedule():
    for progress, margin in [(0, 0), (.075, .001464), (.15, .005), (.2, .0075), (.3, .01), (.7, .01), (1, .01)]:
        close(margin_at(progress), margin)
    close(margin_at(.5, max_margin=.2, warmup=1), .1, 1e-12)
    assert margin_at(0, .01, 0) == .01      # the fixed margin


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_groups_without_contrast(reward):
    scores_PG = torch.cat([SCORES, SCORES])
    rewards_PG = torch.cat([torch.full((1, 4), reward).double(), REWARDS])
    objective_P, valid_P = contrastive_objective(scores_PG, rewards_PG, .01, 1)
    assert valid_P.tolist() == [False, True] and objective_P[0] == 0
    for coefficients_PG in (score_coefficients(scores_PG, rewards_PG, .01, 1),
                            autograd_coefficients(scores_PG, rewards_PG, .01, 1)):
        assert (coefficients_PG[0] == 0).all() and coefficients_PG.isfinite().all()


def test_reward_threshold_dtype_and_inputs():
    soft_PG = torch.tensor([[.9, .51, .5, 0.0]]).double()
    scores_PG, rewards_PG = SCORES.clone(), soft_PG.clone()
    close(score_coefficients(scores_PG, rewards_PG, 0, 1), score_coefficients(SCORES, REWARDS, 0, 1), 0)
    close(contrastive_objective(scores_PG, rewards_PG, 0, 1)[0], contrastive_objective(SCORES, REWARDS, 0, 1)[0], 0)
    assert torch.equal(scores_PG, SCORES) and torch.equal(rewards_PG, soft_PG)
    assert score_coefficients(SCORES, REWARDS, 0, 1).dtype == torch.float64
    assert contrastive_objective(SCORES, REWARDS, 0, 1)[0].dtype == torch.float64
    empty = torch.zeros(0, 4).double()
    assert score_coefficients(empty, empty, 0, 1).shape == (0, 4)


def test_scores_and_the_gradient_of_a_token():
    logp_BT = torch.tensor([[-1.0, -3, 9], [-2, 9, 9], [9, 9, 9]], dtype=torch.float64, requires_grad=True)
    mask_BT = torch.tensor([[1.0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.float64)
    scores_B = masked_mean(logp_BT, mask_BT)
    close(scores_B.detach(), [-2, -2, 0])
    (torch.tensor([.3, -.3, .1]) * scores_B).sum().backward()
    close(logp_BT.grad, [[.15, .15, 0], [-.3, 0, 0], [0, 0, 0]], 1e-7)


# --- the loop ---------------------------------------------------------------------------------------------------------

SMALL = ["--model", "tiny", "--dataset", "arithmetic:2-4", "--steps", "4", "--prompts_per_step", "8",
         "--updates_per_rollout", "2", "--save_every", "2", "--eval_problems", "3", "--eval_samples", "1",
         "--eval_every", "100", "--warmup_steps", "1", "--tau", "0.5", "--max_margin", "0.1"]


def run(folder, *flags):
    """A run of conspo.py in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["conspo.py", *flags, *([] if "--resume" in flags else ["--run_dir", str(folder)])])
        conspo.main()


def weights(folder):
    return load_file(folder / "final" / "model.safetensors")


def rows(folder):
    """metrics.jsonl without what depends on the clock."""
    clocks = ("rollout_s", "reward_s", "update_s", "tokens_per_s")
    return [{k: v for k, v in json.loads(line).items() if k not in clocks}
            for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conspo") / "one"
    run(folder, *SMALL)
    return folder


def assert_same_run(a, b):
    for x, y in zip(rows(a), rows(b), strict=True):
        assert x == pytest.approx(y, rel=1e-4, abs=1e-5)
    assert weights(a).keys() == weights(b).keys()
    for name, tensor in weights(a).items():
        assert (tensor - weights(b)[name]).abs().max() < 5e-5, name


def test_margin_of_a_run(one):
    assert [row["margin"] for row in rows(one)[1:]] == [margin_at(step / 4, 0.1, 0.3) for step in range(4)]


def test_micro_batches_of_one_row(one, tmp_path):
    run(tmp_path / "micro", *SMALL, "--micro_batch_tokens", "1")
    assert_same_run(one, tmp_path / "micro")


def test_two_processes(one, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d",
               "--rdzv_endpoint", "localhost:0", "conspo.py", *SMALL, "--run_dir", str(tmp_path / "two")]
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


def test_update_is_the_gradient_through_whole_groups(tmp_path, monkeypatch):
    """Each optimizer step's gradient equals autograd through J_m of all its groups at once, at the weights of then."""
    seen, rollouts, rewards = [], [], []
    clip, generate, score = torch.nn.utils.clip_grad_norm_, common.HFEngine.generate, common.score

    def record_step(parameters, largest):
        parameters = list(parameters)
        seen.append([(p.detach().clone(), p.grad.clone()) for p in parameters])
        return clip(parameters, largest)

    def record_rollout(engine, prompts, n, *rest):
        rollouts.append(generate(engine, prompts, n, *rest))
        return rollouts[-1]

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", record_step)
    monkeypatch.setattr(common.HFEngine, "generate", record_rollout)
    monkeypatch.setattr(common, "score", lambda *texts: rewards.append(score(*texts)) or rewards[-1])
    run(tmp_path / "recorded", *SMALL, "--steps", "1", "--micro_batch_tokens", "300", "--lr", "3e-3",
        "--lr_schedule", "constant",
        "--margin_warmup", "0")
    rollout = next(r for r in rollouts if len(r.texts) == 64)
    rewards_PG = torch.tensor(next(r for r in rewards if len(r) == 64)).view(8, 8)
    assert len(seen) == 2 and not torch.equal(seen[0][0][0], seen[1][0][0])

    policy, total, groups = common.Policy(common.load_model(common.resolve_model("tiny"))), 0.0, 0
    for half, recorded in zip((slice(0, 4), slice(4, 8)), seen):
        for parameter, (value, _) in zip(policy.parameters(), recorded, strict=True):
            parameter.data.copy_(value)
        policy.zero_grad()
        logp_BT = policy(rollout.tokens_BL, rollout.prompt_len_B, rollout.completion_len_B)
        scores_B = masked_mean(logp_BT, rollout.mask_BT)
        objective_P, valid_P = contrastive_objective(scores_B.view(8, 8)[half], rewards_PG[half], 0.1, 0.5)
        assert valid_P.any()
        (-objective_P.sum() / valid_P.sum()).backward()
        total, groups = total - objective_P.sum().item(), groups + valid_P.sum().item()
        for parameter, (_, gradient) in zip(policy.parameters(), recorded):
            assert torch.allclose(parameter.grad, gradient, rtol=1e-3, atol=1e-5)
    row = rows(tmp_path / "recorded")[1]
    assert row["loss"] == pytest.approx(total / groups, rel=1e-5) and row["valid_groups"] == groups
    assert row["score_gap"] == pytest.approx(row["score_pos"] - row["score_neg"]) and row["margin"] == 0.1


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_batches_without_contrast_move_nothing(tmp_path, monkeypatch, reward):
    monkeypatch.setattr(common, "score", lambda texts, answers: [reward] * len(texts))
    run(tmp_path / "equal", *SMALL, "--steps", "1", "--prompts_per_step", "2")
    row = rows(tmp_path / "equal")[1]
    assert row["grad_norm"] == row["loss"] == row["valid_groups"] == row["score_gap"] == 0
    assert all(math.isfinite(value) for value in row.values())
    before = load_file(Path(common.resolve_model("tiny")) / "model.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path / "equal").items())


@pytest.mark.parametrize("flags", [["--tau", "0"], ["--max_margin", "-0.1"], ["--margin_warmup", "-1"]])
def test_useless_values_are_refused(tmp_path, flags):
    with pytest.raises(common.UserError, match=flags[0]):
        run(tmp_path / "refused", *SMALL, *flags)
    assert not (tmp_path / "refused").exists()
