"""Tests of logit_avg_grpo.py: its formulas in float64, its engine, and short runs in one and two processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402
import logit_avg_grpo as la  # noqa: E402

REF = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64)
THETA = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)


def close(values, expected, tolerance=1e-6):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert torch.allclose(torch.as_tensor(values, dtype=torch.float64), expected, rtol=0, atol=tolerance), values


def probabilities(theta, ref, ref_weight, temperature=1.0):
    """pi_mix over the whole vocabulary, through mixed_logp."""
    ids = torch.arange(min(len(theta), len(ref)))
    rows = len(ids), 1, -1
    theta, ref = theta.expand(rows), ref.expand(rows)
    return la.mixed_logp(theta, ref, ids[:, None], ref_weight, temperature)[:, 0].exp()


# --- the formulas -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ref_weight, temperature, expected", [
    (0.5, 1.0, [.546549, .331499, .121952]),
    (0.25, 1.0, [.362793, .465836, .171371]),
    (0.75, 1.0, [.718440, .205837, .075723]),
    (0.5, 0.7, [.622331, .304657, .073011])])
def test_mixture_probabilities(ref_weight, temperature, expected):
    close(probabilities(THETA, REF, ref_weight, temperature), expected)


def test_mix_logits_is_the_weighted_mean_and_changes_no_input():
    theta, ref = THETA.clone(), REF.clone()
    close(la.mix_logits(theta, ref, 0.25), [0.5, 0.75, -0.25], 1e-15)
    assert la.mix_logits(theta, ref, 0.25).dtype == torch.float64
    assert torch.equal(theta, THETA) and torch.equal(ref, REF)


def test_weight_0_is_theta_and_weight_1_the_reference():
    assert torch.equal(la.mix_logits(THETA, REF, 0.0), THETA)
    assert torch.equal(la.mix_logits(THETA, REF, 1.0), REF)


def test_constants_added_to_logits_change_nothing():
    close(probabilities(THETA + 3, REF - 7, 0.5), probabilities(THETA, REF, 0.5), 1e-12)


def test_the_reference_can_veto():
    ref, theta = torch.tensor([.9, .1, 0.0]).double().log(), torch.tensor([.2, .3, .5]).double().log()
    close(probabilities(theta, ref, 0.5), [.710102, .289898, 0])


def test_padded_vocabularies_are_cut_to_the_shorter():
    padded = torch.cat([THETA, torch.tensor([50.0, 50.0]).double()])
    close(probabilities(padded, REF, 0.5), probabilities(THETA, REF, 0.5), 1e-15)
    close(probabilities(REF, padded, 0.5), probabilities(REF, THETA, 0.5), 1e-15)


def gradient(ref_weight):
    theta, ref = THETA.clone().requires_grad_(), REF.clone().requires_grad_()
    la.mixed_logp(theta[None, None], ref[None, None].detach(), torch.tensor([[1]]), ref_weight).sum().backward()
    return theta.grad


def test_gradient_carries_the_factor_one_minus_w():
    close(gradient(0.5), [-.273275, .334251, -.060976])
    for ref_weight in (0.0, 0.25, 0.9):
        e_a = torch.tensor([0.0, 1.0, 0.0]).double()
        close(gradient(ref_weight), (1 - ref_weight) * (e_a - probabilities(THETA, REF, ref_weight)), 1e-12)


def test_gradient_is_zero_at_weight_1():
    assert torch.equal(gradient(1.0), torch.zeros(3).double())


def test_ratios_are_of_the_mixture():
    moved = THETA + torch.tensor([0.0, 0.3, 0.0])
    close(probabilities(moved, REF, 0.5) / probabilities(THETA, REF, 0.5), [.949084, 1.102678, .949084])
    theta_only = moved.softmax(-1) / THETA.softmax(-1)
    close(theta_only, [.832252, 1.123422, .832252])     # what a ratio of theta alone would be
    logp, old = (probabilities(z, REF, 0.5).log()[None] for z in (moved, THETA))
    close(la.token_loss(logp, old, torch.tensor([1.0]).double()), [[-.949084, -1.102678, -.949084]])


def test_adapt_ref_weight():
    assert la.adapt_ref_weight(0, 0) == 0.5
    close(la.adapt_ref_weight(.06, .02), .598688)
    close(la.adapt_ref_weight(.02, .06), .401312)
    close(la.adapt_ref_weight(0, 0, base_weight=0.3), 0.3, 1e-12)
    assert la.adapt_ref_weight(1, 0) == 0.9 and la.adapt_ref_weight(0, 1) == 0.1
    assert la.adapt_ref_weight(1, 0, kappa=1000.0) == 0.9
    assert isinstance(la.adapt_ref_weight(.06, .02), float)


def test_empty_rows_and_equal_rewards_give_no_nan():
    no_logits, no_targets = torch.zeros(0, 4, 3), torch.zeros(0, 4, dtype=torch.long)
    assert la.mixed_logp(no_logits, no_logits, no_targets, 0.5).shape == (0, 4)
    loss = la.aggregate(torch.zeros(2, 3).double(), torch.zeros(2, 3).double(), "sequence", 1)
    assert loss == 0
    assert torch.equal(la.group_advantages(torch.full((2, 8), 0.1).double()), torch.zeros(2, 8).double())


# --- the policy and the engine ----------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """A folder of the built-in model with every weight jittered: a reference that differs from the model."""
    folder = tmp_path_factory.mktemp("reference")
    model, generator = common.load_model(common.tiny_model()), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.15 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    common.load_tokenizer(common.tiny_model()).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def mixture(other_model):
    return la.MixturePolicy(common.load_model(common.tiny_model()), common.load_model(other_model), 0.3)


@pytest.fixture(scope="module")
def problems():
    tokenizer = common.load_tokenizer(common.tiny_model())
    return tokenizer, *common.encode_prompts(common.load_problems("arithmetic", "test", 24), tokenizer, 64)


def test_policy_equals_whole_logits_with_gradients_and_in_any_chunk(mixture, problems, monkeypatch):
    """The chunked forward against softmax of the averaged (B, L, V) logits: values, and every gradient of theta."""
    mixture.double()
    tokenizer, _, prompts = problems
    lengths = [4, 1, 6]
    rows = [torch.tensor(prompt + list(range(3, 3 + n))) for prompt, n in zip(prompts, lengths)]
    tokens_BL = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    prompt_len_B, completion_len_B = torch.tensor([len(p) for p in prompts[:3]]), torch.tensor(lengths)
    weights_BT = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = torch.zeros(3, 6, dtype=torch.float64)
    alone = want.clone()
    for b in range(3):
        z, z_ref = (model(tokens_BL[b:b + 1]).logits[0] for model in (mixture.model, mixture.reference))
        logp = (0.3 * z_ref + 0.7 * z).div(0.8).log_softmax(-1)
        for t in range(lengths[b]):
            place = int(prompt_len_B[b]) + t
            want[b, t] = logp[place - 1, tokens_BL[b, place]]
            alone[b, t] = z_ref[place - 1].div(0.8).log_softmax(-1)[tokens_BL[b, place]]
    (want * weights_BT).sum().backward()
    want_grad = {name: p.grad.clone() for name, p in mixture.model.named_parameters()}
    assert not any(p.requires_grad for p in mixture.reference.parameters())
    for chunk in (2 ** 26, 2 * len(tokenizer)):         # all 11 tokens at once, or 2 a chunk
        monkeypatch.setattr(common, "LOGITS_PER_CHUNK", chunk)
        most, hooks = [], []
        for model in (mixture.model, mixture.reference):
            hooks.append(model.get_output_embeddings().register_forward_hook(lambda *call: most.append(len(call[2]))))
        mixture.zero_grad()
        logp_BT = mixture(tokens_BL, prompt_len_B, completion_len_B, 0.8)
        (logp_BT * weights_BT).sum().backward()
        for hook in hooks:
            hook.remove()
        assert max(most) == min(11, chunk // len(tokenizer))
        close(logp_BT.detach(), want.detach(), 1e-5)    # the head's logits are float32
        close(mixture.ref_logp_BT, alone.detach(), 1e-5)
        assert not mixture.ref_logp_BT.requires_grad
        for name, parameter in mixture.model.named_parameters():
            close(parameter.grad, want_grad[name], 1e-5)
    assert all(p.grad is None for p in mixture.reference.parameters())


def test_a_row_without_tokens_gives_zero_gradients(mixture, problems):
    prompt = torch.tensor([problems[2][0]])
    logp_BT = mixture(prompt, torch.tensor([prompt.shape[1]]), torch.tensor([0]))
    logp_BT.sum().backward()
    assert logp_BT.shape == (1, 0) and mixture.ref_logp_BT.shape == (1, 0)
    assert all(p.grad is None or not p.grad.any() for p in mixture.model.parameters())


def trainer_logp(policy, rollout, temperature):
    with torch.no_grad():
        return policy(rollout.tokens_BL, rollout.prompt_len_B, rollout.completion_len_B, temperature)


def test_engine_samples_from_the_mixture(mixture, other_model, problems):
    tokenizer, _, prompts = problems
    engine = common.HFEngine(common.load_model(common.tiny_model()), tokenizer, "cpu", 32,
                             common.load_model(other_model), 0.3)
    rollout = engine.generate(prompts, 4, 48, 0.9, 7)
    close(trainer_logp(mixture, rollout, 0.9), rollout.logp_BT, 1e-5)
    for half in (mixture.model, mixture.reference):     # far from either model alone
        gap = (trainer_logp(common.Policy(half), rollout, 0.9) - rollout.logp_BT).abs().max()
        assert gap > 0.1
    for ref_weight, half in ((0.0, mixture.model), (1.0, mixture.reference)):
        rollout = engine.at(ref_weight).generate(prompts, 2, 48, 0.9, 7)
        close(trainer_logp(common.Policy(half), rollout, 0.9), rollout.logp_BT, 1e-5)
        alone = common.HFEngine(half, tokenizer, "cpu", 32).generate(prompts, 2, 48, 0.9, 7)
        assert torch.equal(alone.tokens_BL, rollout.tokens_BL)
    assert engine.ref_weight == 0.3


def test_weight_loads_touch_only_the_policy_half(other_model, problems):
    engine = common.HFEngine(common.load_model(common.tiny_model()), problems[0], "cpu", 32,
                             common.load_model(other_model), 0.5)
    before = {name: tensor.clone() for name, tensor in engine.reference.state_dict().items()}
    new = {name: tensor + 1 for name, tensor in engine.model.state_dict().items()}
    engine.load_weights(new.items())
    assert all(torch.equal(tensor, new[name]) for name, tensor in engine.model.state_dict().items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.reference.state_dict().items())


def test_gain_and_forget_count_problems(monkeypatch):
    """Rewards of 4 problems x 1 sample: the mixture is right where theta is not once, and the reverse twice."""
    rewards = {0.5: [1.0, 1.0, 0.0, 0.0], 0.0: [1.0, 0.0, 1.0, 1.0]}
    monkeypatch.setattr(common, "evaluate", lambda engine, *_: [{"rewards": [r]} for r in rewards[engine.ref_weight]])

    class Engine:
        ref_weight = 0.5

        def at(self, ref_weight):
            other = Engine()
            other.ref_weight = ref_weight
            return other

    assert la.gain_and_forget(Engine(), [], [], la.Config()) == (0.25, 0.5)


@pytest.mark.parametrize("flags", [["--ref_weight", "1"], ["--ref_weight", "-0.1"], ["--adapt_every", "0"],
                                   ["--ref_weight", "0", "--ref_weight_mode", "adaptive"]])
def test_settings_that_cannot_work_are_refused(flags, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["logit_avg_grpo.py", "--model", "tiny", "--run_dir", str(tmp_path / "run"),
                                      *flags])
    with pytest.raises(common.UserError, match="--ref_weight must be"):
        la.main()
    assert not (tmp_path / "run").exists()


def test_another_vocabulary_is_refused(monkeypatch, tmp_path):
    other = common.load_tokenizer(common.tiny_model())
    other.add_tokens(["<think>"])
    shutil.copytree(common.tiny_model(), tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    monkeypatch.setattr(sys, "argv", ["logit_avg_grpo.py", "--run_dir", str(tmp_path / "run"), "--model", "tiny",
                                      "--ref_model", str(tmp_path / "other"), "--steps", "1"])
    with pytest.raises(common.UserError, match="vocabulary"):
        la.main()


def test_the_optimizer_holds_the_trained_model_alone(monkeypatch, tmp_path):
    class Stop(Exception):
        pass

    def optimizer(parameters, **kwargs):
        raise Stop(list(parameters))

    monkeypatch.setattr(torch.optim, "AdamW", optimizer)
    monkeypatch.setattr(sys, "argv", ["logit_avg_grpo.py", "--run_dir", str(tmp_path / "run"), "--model", "tiny"])
    with pytest.raises(Stop) as stop:
        la.main()
    held = stop.value.args[0]
    assert len(held) == len(list(common.load_model(common.tiny_model()).parameters()))
    assert all(parameter.requires_grad for parameter in held)


# --- short runs -------------------------------------------------------------------------------------------------------

SHORT = ["--steps", "5", "--save_every", "3", "--eval_every", "5", "--eval_samples", "1", "--eval_problems", "24",
         "--prompts_per_step", "8", "--updates_per_rollout", "2", "--warmup_steps", "1"]


def command(folder, *flags, program="logit_avg_grpo.py", processes=1):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    folder = [] if "--resume" in flags else ["--run_dir", str(folder)]
    return [sys.executable, *(torchrun if processes > 1 else []), program, *flags, *folder]


def run(*args, **kwargs):
    result = subprocess.run(command(*args, **kwargs), cwd=ROOT, capture_output=True, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr


def killed_and_resumed(folder, *flags):
    """A run that is killed after its fourth step, then resumed from the checkpoint of its third."""
    process = subprocess.Popen(command(folder, *flags), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.time() + 120
    while len(rows_of(folder)) < 5 and process.poll() is None and time.time() < deadline:     # steps 0 to 4
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert common.latest_checkpoint(folder)[0] == 3, "the run was killed too late to test anything"
    run(folder, "--resume", str(folder))


def rows_of(folder):
    path = Path(folder) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{key: value for key, value in row.items() if not key.endswith("_s")} for row in rows]


def weights_of(folder):
    return load_file(Path(folder) / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, other_model):
    """Folders of short runs. The reference is another model; w is adapted at steps 3 and 5, not where a run resumes."""
    common.tiny_model()
    folder = tmp_path_factory.mktemp("runs")
    flags = [*SHORT, "--ref_model", other_model, "--ref_weight_mode", "adaptive", "--adapt_every", "2"]
    plain = [*SHORT[2:], "--steps", "2"]
    jobs = [(run, ("two", *flags), dict(processes=2)), (run, ("one", *flags), {}),
            (run, ("rows", *flags, "--micro_batch_tokens", "1"), {}), (killed_and_resumed, ("killed", *flags), {}),
            (run, ("grpo", *plain), dict(program="grpo.py")), (run, ("w0", *plain, "--ref_weight", "0"), {})]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(job, folder / args[0], *args[1:], **kwargs) for job, args, kwargs in jobs]:
            done.result()
    return folder


@pytest.mark.parametrize("other", ["rows", "two"])
def test_micro_batches_and_processes_change_nothing(runs, other):
    one, weights = weights_of(runs / "one"), weights_of(runs / other)
    assert one.keys() == weights.keys()
    assert max((one[name] - weights[name]).abs().max() for name in one) < 1e-5
    for row, other_row in zip(rows_of(runs / "one"), rows_of(runs / other), strict=True):
        for key in ("reward", "loss", "kl", "grad_norm", "ref_weight", "eval_pass@1", "eval_theta", "eval_reference"):
            assert (key in row) == (key in other_row), (row["step"], key)
            if key in row:
                assert row[key] == pytest.approx(other_row[key], rel=1e-3, abs=1e-5), (row["step"], key)


def test_killed_and_resumed_equals_uninterrupted(runs):
    assert rows_of(runs / "one") == rows_of(runs / "killed")
    one, weights = weights_of(runs / "one"), weights_of(runs / "killed")
    assert all(torch.equal(one[name], weights[name]) for name in one)


def test_weight_0_is_grpo_bit_for_bit(runs):
    ours, grpo = weights_of(runs / "w0"), weights_of(runs / "grpo")
    assert ours.keys() == grpo.keys() and all(torch.equal(ours[name], grpo[name]) for name in ours)
    for row, grpo_row in zip(rows_of(runs / "w0"), rows_of(runs / "grpo"), strict=True):
        for key in ("reward", "length", "loss", "grad_norm", "entropy", "eval_pass@1", "engine_gap"):
            assert row.get(key) == grpo_row.get(key)


def test_the_reference_is_saved_and_never_changes(runs, other_model):
    original = load_file(Path(other_model) / "model.safetensors")
    for name in ("one", "two", "killed"):
        kept = load_file(runs / name / "final" / "reference" / "model.safetensors")
        assert original.keys() == kept.keys() and all(torch.equal(original[key], kept[key]) for key in original)
        held = FileSystemReader(common.latest_checkpoint(runs / name)[1]).read_metadata().state_dict_metadata
        assert any(key.startswith("module.reference.") for key in held)
    assert any((original[key] != weight).any() for key, weight in weights_of(runs / "one").items())


def test_w_is_adapted_exported_and_read_back(runs, problems):
    rows = rows_of(runs / "one")
    weights = [row["ref_weight"] for row in rows[1:]]
    assert weights[:2] == [0.5, 0.5] and weights[2] == weights[3] != 0.5
    ref_weight = json.loads((runs / "one" / "final" / "mixture.json").read_text())["ref_weight"]
    assert ref_weight == rows[-1]["ref_weight"]
    cfg, tokenizer = la.Config(**la.TINY), common.load_tokenizer(str(runs / "one" / "final"))
    scores = {}
    for policy in ("mixture", "theta", "reference"):
        engine = common.load_engine(cfg, runs / "one" / "final", tokenizer, torch.device("cpu"), policy)
        results = common.evaluate(engine, problems[1], problems[2], 1, cfg.max_new_tokens, seed=0)
        scores[policy] = common.pass_at_1(results)["eval_pass@1"]
    assert scores == {"mixture": rows[-1]["eval_pass@1"], "theta": rows[-1]["eval_theta"],
                      "reference": rows[0]["eval_reference"]}
    assert "eval_reference" not in rows[-1]
