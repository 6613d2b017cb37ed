"""popo.py: the numbers of the method, its gradients, and short runs that must not depend on how they are cut up."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import common  # noqa: E402
import popo  # noqa: E402

F64 = torch.float64
LOGP = [[-.5, -.3], [-.8, -.9], [-.3, -.2], [-1, -1.2]]
REWARDS = [[1., 0., 1., 0.]]


def tensor(values, **kwargs):
    return torch.tensor(values, dtype=F64, **kwargs)


def close(value, expected, tolerance=1e-6):
    torch.testing.assert_close(value, tensor(expected), rtol=0, atol=tolerance)


def mean_score_weights(mode="softmax"):
    return popo.positive_weights(tensor(LOGP).mean(1)[None], tensor(REWARDS), mode)


# --- weights ----------------------------------------------------------------------------------------------------------

def test_weights_are_the_softmax_over_the_positives():
    close(mean_score_weights(), [[.4625702, 0, .5374298, 0]], 1e-7)
    close(mean_score_weights("uniform"), [[.5, 0, .5, 0]])


def test_weights_of_each_prompt_are_its_own():
    scores = tensor([[-.4, -.85, -.25, -1.1], [-5, -6, -7, -8], [-1, -1, -1, -1]])
    rewards = tensor([[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    close(popo.positive_weights(scores, rewards), [[.4625702, 0, .5374298, 0], [0, 1, 0, 0], [0, 0, 0, 0]], 1e-7)


@pytest.mark.parametrize("mode", ["softmax", "uniform"])
def test_weights_are_detached_and_leave_their_inputs_alone(mode):
    scores, rewards = tensor([[-1., -2., -3.]], requires_grad=True), tensor([[1., 1., 0.]])
    weights = popo.positive_weights(scores, rewards, mode)
    assert not weights.requires_grad and weights.dtype == F64
    close(scores.detach(), [[-1, -2, -3]], 0)
    close(rewards, [[1, 1, 0]], 0)


def test_weights_survive_scores_far_apart():
    close(popo.positive_weights(tensor([[-5000., -1., -2000.]]), tensor([[1., 0., 1.]])), [[0, 0, 1]])


# --- NLL --------------------------------------------------------------------------------------------------------------

def test_nll_numbers():
    logp, mask, weights = tensor(LOGP), torch.ones(4, 2, dtype=F64), mean_score_weights()[0]
    close(popo.nll_loss(logp, mask, weights), .3193855, 1e-7)
    close(popo.nll_loss(logp, mask, weights, "tokens"), .1596928, 1e-7)
    close(popo.nll_loss(logp, mask, weights, "tokens", positive_tokens=1), .6387710, 1e-7)      # the manuscript's sum


def test_nll_gradient_is_minus_the_weights():
    mask = tensor([[1, 1], [1, 1], [1, 0], [1, 1]])
    logp, weights = tensor(LOGP, requires_grad=True), mean_score_weights()[0]
    popo.nll_loss(logp, mask, weights).backward()
    close(logp.grad, [[-.4625702 / 2] * 2, [0, 0], [-.5374298, 0], [0, 0]], 1e-7)
    logp.grad = None
    popo.nll_loss(logp, mask, weights, "tokens").backward()
    close(logp.grad, [[-.4625702 / 3] * 2, [0, 0], [-.5374298 / 3, 0], [0, 0]], 1e-7)


def test_nll_of_one_positive_is_supervised_fine_tuning():
    logp = tensor([[-1., -2., -3.], [-4., -5., 0.]])
    weights = popo.positive_weights(tensor([[-2., -4.5]]), tensor([[0., 1.]]))
    close(weights, [[0, 1]])
    close(popo.nll_loss(logp, tensor([[1, 1, 1], [1, 1, 0]]), weights[0]), 4.5)


@pytest.mark.parametrize("norm", ["length", "tokens"])
def test_nll_without_positives_is_zero(norm):
    logp = tensor(LOGP, requires_grad=True)
    weights = popo.positive_weights(tensor([[-1.] * 4]), tensor([[0.] * 4]))[0]
    for mask in (torch.ones(4, 2, dtype=F64), torch.zeros(4, 2, dtype=F64)):
        for given in (weights, torch.ones(4, dtype=F64) / 4):
            if mask.any() and given is not weights:
                continue
            loss = popo.nll_loss(logp, mask, given, norm)
            loss.backward()
            assert loss.item() == 0 and (logp.grad == 0).all()


def test_nll_of_an_empty_batch_is_zero():
    empty = torch.zeros(1, 0, dtype=F64)
    assert popo.nll_loss(empty, empty, tensor([1.]), "length", 3).item() == 0
    assert popo.nll_loss(empty, empty, tensor([1.]), "tokens", 3, 7).item() == 0


def test_length_averages_over_prompts_with_positives():
    logp = tensor([[-1.], [-2.], [-3.], [-4.], [-5.], [-6.]])
    weights = popo.positive_weights(logp.view(3, 2), tensor([[1, 0], [0, 0], [1, 1]]), "uniform").flatten()
    close(popo.nll_loss(logp, torch.ones(6, 1, dtype=F64), weights), (1 + 5.5) / 2)


def test_implicit_negative_gradient():
    logits = tensor([.1, .2, .3, .4]).log().requires_grad_()
    logp = logits.log_softmax(0)
    weights = popo.positive_weights(logp[None], tensor([[1., 1., 0., 0.]]))
    close(weights, [[1 / 3, 2 / 3, 0, 0]])
    popo.nll_loss(logp[:, None], torch.ones(4, 1, dtype=F64), weights[0]).backward()
    close(logits.grad, [-.233333, -.466667, .3, .4])


def test_summed_scores_give_the_gradient_of_the_positives_log_probability():
    torch.manual_seed(0)
    logp = (-torch.rand(4, 5, dtype=F64)).requires_grad_()
    mask = (torch.arange(5) < torch.tensor([5, 2, 3, 4])[:, None]).to(F64)
    score = (logp * mask).sum(1)
    weights = popo.positive_weights(score[None], tensor(REWARDS))[0]
    mine, = torch.autograd.grad(popo.nll_loss(logp, mask, weights, "tokens", positive_tokens=1), logp)
    theirs, = torch.autograd.grad(-score[[0, 2]].logsumexp(0), logp)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("norm", ["length", "tokens"])
def test_micro_batches_add_up_to_the_whole(norm):
    torch.manual_seed(1)
    logp, length = (-torch.rand(8, 6, dtype=F64)).requires_grad_(), torch.randint(1, 7, (8,))
    mask = (torch.arange(6) < length[:, None]).to(F64)
    rewards = tensor([[1, 0, 1, 0], [0, 0, 1, 1]])
    weights = popo.positive_weights(((logp * mask).sum(1) / length).view(2, 4), rewards).flatten()
    counts = 2, length[rewards.flatten() > 0].sum()
    online, target = torch.randn(8, 3, dtype=F64, requires_grad=True), torch.randn(8, 3, dtype=F64)

    def gradients(batches, *given):
        loss = sum(popo.nll_loss(logp[rows], mask[rows], weights[rows], norm, *given)
                   + popo.similarity_loss(online[rows], target[rows], weights[rows], *given[:1]) for rows in batches)
        return [loss, *torch.autograd.grad(loss, (logp, online))]

    whole = gradients([torch.arange(8)])
    for size in (1, 3, 8):
        for mine, expected in zip(gradients(torch.arange(8).split(size), *counts), whole):
            torch.testing.assert_close(mine, expected)


# --- similarity, predictor, anchor ------------------------------------------------------------------------------------

ONLINE, TARGET = [[1., 0.], [5., 5.], [0., 1.], [-1., 0.]], [[2., 0.], [1., 0.], [3., 0.], [1., 0.]]


def test_similarity_number_and_scale_invariance():
    weights = tensor([.3, 0, .5, .2])
    close(popo.similarity_loss(tensor(ONLINE), tensor(TARGET), weights), -.1)
    close(popo.similarity_loss(tensor(ONLINE) * 7, tensor(TARGET) / 3, weights * 2), -.1)
    close(popo.similarity_loss(tensor(ONLINE), tensor(TARGET), weights, 2), -.05)


def test_similarity_trains_the_online_side_alone():
    online, target = tensor(ONLINE, requires_grad=True), tensor(TARGET, requires_grad=True)
    popo.similarity_loss(online, target, tensor([.3, 0, .5, .2])).backward()
    assert target.grad is None
    close(online.grad, [[0, 0], [0, 0], [-.5, 0], [0, 0]])


def test_similarity_without_weights_or_states_is_zero():
    online = torch.zeros(2, 3, dtype=F64, requires_grad=True)
    for weights in ([0., 0.], [.5, .5]):
        loss = popo.similarity_loss(online, torch.zeros(2, 3, dtype=F64), tensor(weights))
        loss.backward()
        assert loss.item() == 0 and torch.isfinite(online.grad).all()


def test_predictor():
    torch.manual_seed(0)
    predictor = popo.Predictor(6, 10).double()
    first, norm, relu, last = predictor.layers
    assert [type(layer) for layer in predictor.layers] == [nn.Linear, nn.LayerNorm, nn.ReLU, nn.Linear]
    assert (first.weight.shape, norm.normalized_shape, last.weight.shape) == ((10, 6), (10,), (6, 10))
    for linear in (first, last):
        largest = linear.weight.abs().max().item()
        assert .8 * (6 / 16) ** .5 < largest <= (6 / 16) ** .5 and (linear.bias == 0).all()     # Xavier, uniform
    state = torch.randn(3, 6, dtype=F64)
    torch.testing.assert_close(predictor(state), last(torch.relu(norm(first(state)))))


def test_ema_numbers():
    anchor, online = nn.Linear(2, 2).double(), nn.Linear(2, 2).double()
    for p, value in [(p, 0.) for p in anchor.parameters()] + [(p, 1.) for p in online.parameters()]:
        nn.init.constant_(p, value)
    for expected in (.1, .19, .271):
        popo.ema_update(anchor, online, .9)
        close(anchor.weight.detach(), [[expected] * 2] * 2, 1e-12)
        close(anchor.bias.detach(), [expected] * 2, 1e-12)
    assert (online.weight == 1).all() and online.weight.grad is None
    close(popo.distance(anchor, online), .729 * 6 ** .5)


def test_ema_moves_a_tied_weight_once():
    anchor, online = (nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]) for _ in range(2))
    for module, value in ((anchor, 0.), (online, 1.)):
        module[1].weight = module[0].weight
        nn.init.constant_(module[0].weight, value)
    popo.ema_update(anchor, online, .9)
    assert anchor[0].weight.item() == pytest.approx(.1) and anchor[1].weight is anchor[0].weight


def test_pooling_ignores_prompt_and_padding():
    prompt, completion = torch.tensor([2, 1, 3]), torch.tensor([3, 1, 0])
    hidden = torch.randn(3, 6, 4, dtype=F64)
    expected = torch.stack([hidden[0, 2:5].mean(0), hidden[1, 1], torch.zeros(4, dtype=F64)])
    torch.testing.assert_close(popo.pool(hidden, prompt, completion), expected)
    hidden[0, [0, 1, 5]], hidden[1, [0, 2, 3, 4, 5]], hidden[2] = 99, -99, 99
    torch.testing.assert_close(popo.pool(hidden, prompt, completion), expected)


# --- the modules ------------------------------------------------------------------------------------------------------

@pytest.fixture
def small_model():
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
                                        num_attention_heads=2, num_key_value_heads=2)).eval()


def test_policy_and_anchor_forward(small_model):
    tokens = torch.randint(11, (2, 7))
    inputs = tokens, torch.tensor([2, 3]), torch.tensor([5, 2])
    policy = popo.PredictingPolicy(small_model, 5)
    logp, entropy, online = policy(*inputs, 0.7, loss_terms=True)
    torch.testing.assert_close(logp, common.Policy(small_model)(*inputs, 0.7))
    torch.testing.assert_close(logp, policy(*inputs, 0.7))
    out = small_model(tokens, output_hidden_states=True)
    p = (out.logits / 0.7).softmax(-1)
    full = -(p * p.log()).sum(-1)
    torch.testing.assert_close(entropy, torch.stack([full[0, 1:6], nn.functional.pad(full[1, 2:4], (0, 3))]))
    state = torch.stack([out.hidden_states[-1][0, 2:7].mean(0), out.hidden_states[-1][1, 3:5].mean(0)])
    torch.testing.assert_close(online, policy.predictor(state))
    torch.testing.assert_close(popo.Anchor(small_model.base_model)(*inputs), state)
    bare = popo.PredictingPolicy(small_model, 0)
    assert bare.predictor is None and bare(*inputs, loss_terms=True)[2] is None
    assert (policy(*inputs, loss_terms=True, with_entropy=False)[1] == 0).all()


def test_all_three_terms_reach_the_weights(small_model):
    policy = popo.PredictingPolicy(small_model, 5)
    inputs = torch.randint(11, (2, 7)), torch.tensor([2, 3]), torch.tensor([5, 2])
    for term in range(3):
        policy.zero_grad()
        (policy(*inputs, loss_terms=True)[term] * torch.randn(2, 1)).sum().backward()
        assert small_model.base_model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
        reached = [p.grad is not None and p.grad.abs().sum() > 0 for p in policy.predictor.parameters()]
        assert all(reached) if term == 2 else not any(reached)


def test_entropy_of_uniform_logits():
    head = nn.Linear(4, 64, bias=False).double()
    nn.init.zeros_(head.weight)
    entropy = common.token_logp(head, torch.randn(3, 4, dtype=F64), torch.tensor([0, 5, 63]), with_entropy=True)[1]
    torch.testing.assert_close(entropy, torch.full((3,), 4.158883), rtol=0, atol=1e-6)


# --- the file ---------------------------------------------------------------------------------------------------------

def test_every_equation_tag_stands_in_docstring_and_code():
    source = (ROOT / "popo.py").read_text()
    stated = set(re.findall(r"\[POPO [^\]]+\]", popo.__doc__))
    implemented = set(re.findall(r"\[POPO [^\]]+\]", source.replace(popo.__doc__, "")))
    assert stated == implemented != set()


def test_every_metric_of_its_own_is_explained():
    own = set(re.findall(r'"(\w+)": (?!0)', inspect.getsource(popo.main).split("metrics |= ")[1].split("}")[0]))
    assert {name for name in own | {"anchor_distance"} if name not in popo.__doc__} <= {"loss", "grad_norm"}


def run(monkeypatch, folder, *flags):
    """popo.main() in this process; returns its metrics."""
    monkeypatch.setattr(sys, "argv", ["popo.py", *map(str, flags)])
    popo.main()
    return read(folder)


def read(folder):
    seconds = {"rollout_s", "reward_s", "update_s", "tokens_per_s"}
    rows = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if key not in seconds} for row in rows]


def flags(folder, steps=4, **more):
    given = dict(model="tiny", run_dir=folder, steps=steps, save_every=2, warmup_steps=1, eval_every=4, eval_problems=4,
                 eval_samples=1, prompts_per_step=4, max_new_tokens=40, predictor_width=16, engine="hf") | more
    return [word for name, value in given.items() for word in (f"--{name}", value)]


def assert_same_run(folder, other, tolerance):
    for row, theirs in zip(read(folder), read(other), strict=True):
        assert row == pytest.approx(theirs, rel=1e-3, abs=max(tolerance, 1e-12)), row["step"]
    mine, theirs = (load_file(Path(f) / "final" / "model.safetensors") for f in (folder, other))
    assert mine.keys() == theirs.keys()
    assert max((mine[name] - theirs[name]).abs().max().item() for name in mine) <= tolerance


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("popo") / "a"
    with pytest.MonkeyPatch.context() as monkeypatch:
        metrics = run(monkeypatch, folder, *flags(folder))
    assert all(row["grad_norm"] > 0 and row["anchor_distance"] > 0 for row in metrics[1:])
    assert any(0 < row["active_prompts"] for row in metrics[1:])
    return folder


def test_one_row_per_micro_batch_changes_nothing(reference_run, tmp_path, monkeypatch):
    run(monkeypatch, tmp_path / "b", *flags(tmp_path / "b", micro_batch_tokens=1))
    assert_same_run(reference_run, tmp_path / "b", 1e-5)


def test_two_processes_change_nothing(reference_run, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", ROOT / "popo.py",
               *flags(tmp_path / "c", micro_batch_tokens=100)]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300, cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(reference_run, tmp_path / "c", 1e-5)


def test_stop_and_resume_changes_nothing(reference_run, tmp_path, monkeypatch):
    folder, write = tmp_path / "d", common.RunLog.write

    def stop(log, step, metrics):
        write(log, step, metrics)
        if step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(common.RunLog, "write", stop)
        run(patch, folder, *flags(folder))
    assert len(read(folder)) == 4 and not (folder / "final").exists()
    run(monkeypatch, folder, "--resume", folder)
    assert_same_run(reference_run, folder, 0)
    with pytest.raises(SystemExit) as finished:
        run(monkeypatch, folder, "--resume", folder)
    assert finished.value.code == 0


def test_export_is_the_model_alone(reference_run):
    names = load_file(reference_run / "final" / "model.safetensors").keys()
    assert not any("predictor" in name or "anchor" in name for name in names)
    assert names == common.load_model(str(reference_run / "final")).state_dict().keys()


def test_a_step_without_positives_moves_the_anchor_alone(tmp_path, monkeypatch):
    weights, calls, score = [], [], common.score

    def only_once(texts, answers):
        if len(texts) == 4 * 8:     # a training step
            calls.append(1)
            return [float(i % 2) for i in range(len(texts))] if len(calls) == 1 else [0.] * len(texts)
        return score(texts, answers)

    def keep(module, *args):
        weights.append(torch.cat([p.detach().flatten() for p in module["policy"].parameters()]))

    monkeypatch.setattr(common, "score", only_once)
    monkeypatch.setattr(common, "save_checkpoint", lambda run_dir, step, module, optimizer: keep(module))
    folder = tmp_path / "none"
    first, second, third = run(monkeypatch, folder, *flags(folder, 3, save_every=1, ema_decay=.9))[1:]
    assert first["grad_norm"] > 0 and first["active_prompts"] == 4 and first["positives"] == .5
    for row, before in ((second, first), (third, second)):
        assert row["grad_norm"] == row["loss"] == row["active_prompts"] == row["max_weight"] == 0
        assert row["anchor_distance"] == pytest.approx(.9 * before["anchor_distance"], rel=1e-4)
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


def test_all_correct_groups_train(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "score", lambda texts, answers: [1.] * len(texts))
    row = run(monkeypatch, tmp_path / "e", *flags(tmp_path / "e", 1, similarity_coef=.1, entropy_coef=.01))[-1]
    assert row["grad_norm"] > 0 and row["positives"] == 1 and row["nll"] > 0
    assert -1 <= row["similarity"] <= 1 and 0 < row["token_entropy"] < 3 and 1 / 8 < row["max_weight"] < 1
    assert row["loss"] == pytest.approx(row["nll"] - .1 * row["similarity"] - .01 * row["token_entropy"], abs=1e-6)


def test_zero_coefficients_skip_the_work(tmp_path, monkeypatch):
    seen, forward, rewards = [], popo.PredictingPolicy.forward, []

    def spy(self, tokens, *args, loss_terms=False, with_entropy=True):
        assert not with_entropy or not loss_terms
        if loss_terms:
            seen.append(len(tokens))
        return forward(self, tokens, *args, loss_terms=loss_terms, with_entropy=with_entropy)

    monkeypatch.setattr(popo.PredictingPolicy, "forward", spy)
    monkeypatch.setattr(popo, "Anchor", None)
    folder = tmp_path / "f"
    row = run(monkeypatch, folder, *flags(folder, 1, similarity_coef=0, entropy_coef=0))[-1]
    assert sum(seen) == round(row["positives"] * 32) and row["grad_norm"] > 0
    assert "anchor_distance" not in row and row["similarity"] == row["token_entropy"] == 0
    assert row["loss"] == row["nll"]


@pytest.mark.parametrize("mode", ["softmax", "softmax_sum", "uniform"])
def test_what_weighs_the_positives(mode, tmp_path, monkeypatch):
    given, rollouts, weigh, count = [], [], popo.positive_weights, common.rollout_metrics

    def keep_scores(*args):
        given.append(args)
        return weigh(*args)

    def keep_rollout(rollout, *args):
        rollouts.append(rollout)
        return count(rollout, *args)

    monkeypatch.setattr(popo, "positive_weights", keep_scores)
    monkeypatch.setattr(common, "rollout_metrics", keep_rollout)
    run(monkeypatch, tmp_path / "g", *flags(tmp_path / "g", 1, weight_mode=mode))
    (scores, rewards, _), rollout = given[0], rollouts[0]
    assert 0 < rewards.sum() < 32
    expected = {"softmax": rollout.logp_BT.sum(1) / rollout.completion_len_B, "softmax_sum": rollout.logp_BT.sum(1),
                "uniform": torch.zeros(32)}[mode]
    torch.testing.assert_close(scores, (expected.view(4, 8) * (rewards > 0)).float(), rtol=1e-4, atol=1e-4)


def test_more_than_one_update_is_refused(tmp_path, monkeypatch):
    with pytest.raises(common.UserError, match="updates_per_rollout"):
        run(monkeypatch, tmp_path / "h", *flags(tmp_path / "h", updates_per_rollout=2))
    assert not (tmp_path / "h").exists()


@pytest.mark.parametrize("name, value", [("predictor_width", 0), ("ema_decay", 1.5), ("ema_decay", -.1),
                                         ("noise_std", -.1), ("entropy_coef", -.1), ("similarity_coef", -.1)])
def test_bad_settings_are_refused(tmp_path, monkeypatch, name, value):
    with pytest.raises(common.UserError, match=name):
        run(monkeypatch, tmp_path / "h", *flags(tmp_path / "h", **{name: value}))
    assert not (tmp_path / "h").exists()
