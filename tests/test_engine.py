"""Policy and engine: the trainer's log-probabilities are those of the distribution that the engine sampled from."""

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import common
from common import HFEngine, Policy


@pytest.fixture(scope="module")
def model(tiny):
    return common.load_model(tiny[0])


@pytest.fixture(scope="module")
def engine(tiny):
    return HFEngine(common.load_model(tiny[0]), tiny[1])


def prompts_of(tokenizer, *texts):
    return [tokenizer(text + "\n").input_ids for text in texts]


MIXED = ("7=?", "7+9-3=?", "3+4-5+6-2+1=?")        # prompts of different lengths


def gap(model, rollout, temperature=1.0):
    logp = Policy(model)(rollout.tokens_BL, rollout.prompt_len_B, rollout.completion_len_B, temperature)
    return (logp - rollout.logp_BT).abs().max().item()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.3])
def test_recorded_logp_is_the_trainers(model, engine, tiny, temperature):
    rollout = engine.generate(prompts_of(tiny[1], *MIXED), 4, 24, temperature, seed=1)
    assert len(set(rollout.completion_len_B.tolist())) > 1
    assert gap(model, rollout, temperature) < 1e-4
    if temperature != 1.0:
        assert gap(model, rollout) > 1e-2       # at another temperature they must differ


def test_weights_are_loaded(model, engine, tiny):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    prompts = prompts_of(tiny[1], *MIXED)
    engine.load_weights(common.named_weights(other))
    changed = engine.generate(prompts, 4, 24, seed=1)
    engine.load_weights(common.named_weights(model))
    restored = engine.generate(prompts, 4, 24, seed=1)
    assert gap(other, changed) < 1e-4 < gap(model, changed)
    assert gap(model, restored) < 1e-4
    with pytest.raises(KeyError):
        HFEngine(copy.deepcopy(model), tiny[1]).load_weights([("model.norm.weight", torch.ones(64))])      # the others would silently be stale


def test_absolute_positions_and_tied_head():
    """GPT-2 has absolute positions, so padding that shifts them shows; its head is the embedding."""
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=30, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=None,
                                      eos_token_id=1, initializer_range=0.3)).eval()
    rollout = HFEngine(copy.deepcopy(gpt2), common.tiny_tokenizer()).generate([[3, 4], [5, 6, 7, 8, 9, 10]], 3, 8)
    assert gap(gpt2, rollout) < 1e-4


def test_rows_do_not_touch_each_other(model, engine, tiny):
    rollout = engine.generate(prompts_of(tiny[1], *MIXED), 2, 24, seed=3)
    policy = Policy(model)
    together = policy(rollout.tokens_BL, rollout.prompt_len_B, rollout.completion_len_B)
    for row in range(6):
        one = rollout.select([row])
        alone = policy(one.tokens_BL, one.prompt_len_B, one.completion_len_B)
        torch.testing.assert_close(alone[0], together[row, :alone.shape[1]], atol=1e-5, rtol=0)
        padding = together[row, rollout.completion_len_B[row]:]
        assert (padding == 0).all()


def test_logits_score_the_next_token(model, tiny):
    tokens = torch.tensor([[4, 5, 6, 7, 8]])        # two of prompt, three of completion
    expected = F.log_softmax(model(tokens).logits[0, 1:4], -1).gather(1, tokens[0, 2:, None])[:, 0]
    logp = Policy(model)(tokens, torch.tensor([2]), torch.tensor([3]))
    torch.testing.assert_close(logp[0], expected, atol=1e-5, rtol=0)


def test_temperature_divides_logits_not_log_probabilities():
    head = torch.nn.Linear(1, 2, bias=False)
    head.weight.data = torch.tensor([[2.0], [0.0]])
    logp = common.token_logp(head, torch.ones(1, 1), torch.tensor([0]), temperature=0.5)
    assert logp.item() == pytest.approx(-0.01815, abs=1e-5)


def test_the_engine_samples_the_models_distribution(model, engine, tiny):
    prompt = prompts_of(tiny[1], "7+9-3=?")[0]
    probability = F.softmax(model(torch.tensor([prompt])).logits[0, -1], -1)
    first = engine.generate([prompt], 4000, 1, seed=5).tokens_BL[:, -1]
    frequency = torch.bincount(first, minlength=len(probability)) / len(first)
    assert (frequency - probability).abs().max() < 4 * 0.5 / 4000 ** 0.5


def test_greedy_is_generates_greedy(model, engine, tiny):
    for prompt in prompts_of(tiny[1], *MIXED):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)[0]
        rollout = engine.generate([prompt], 1, 24, temperature=0)
        assert rollout.tokens_BL[0].tolist() == expected.tolist()


def test_generation_config_is_not_read(tiny):
    model = common.load_model(tiny[0])
    model.generation_config.update(top_k=1, do_sample=True, repetition_penalty=5.0, temperature=0.01)
    texts = HFEngine(model, tiny[1]).generate(prompts_of(tiny[1], "7+9-3=?"), 16, 24).texts
    assert len(set(texts)) > 1


def test_seeds(engine, tiny):
    prompts = prompts_of(tiny[1], "7+9-3=?", "7+9-3=?")
    texts = engine.generate(prompts, 4, 24, seed=[11, 12]).texts
    assert texts == engine.generate(prompts, 4, 24, seed=[11, 12]).texts
    assert texts != engine.generate(prompts, 4, 24, seed=[13, 14]).texts
    assert len(set(texts[:4])) > 1 and texts[:4] != texts[4:]
    assert texts[4:] == engine.generate(prompts[:1], 4, 24, seed=[12]).texts        # whatever else is in the batch
    engine.rows_at_once, before = 3, engine.rows_at_once
    assert texts == engine.generate(prompts, 4, 24, seed=[11, 12]).texts            # however it is cut
    engine.rows_at_once = before


def test_streams_differ_by_seed_step_and_prompt():
    seeds = {common.stream_seed(seed, "rollout", step, place) for seed in (0, 1) for step in range(9) for place in range(9)}
    assert len(seeds) == 2 * 9 * 9 and max(seeds) < 2 ** 63


def test_a_tokenizer_without_a_stop_token_is_refused(tiny):
    model, tokenizer = common.load_model(tiny[0]), common.load_tokenizer(tiny[0])
    tokenizer.eos_token = model.config.eos_token_id = model.generation_config.eos_token_id = None
    with pytest.raises(common.UserError, match="no stop token"):
        HFEngine(model, tokenizer)


def test_every_stop_token_ends_a_row_once(tiny):
    model = common.load_model(tiny[0])
    model.generation_config.eos_token_id = [1, 2]       # the newline ends it too
    engine = HFEngine(model, tiny[1])
    assert engine.stop_ids == [1, 2]
    rollout = engine.generate(prompts_of(tiny[1], *MIXED), 8, 6)
    for row in range(24):
        start, n = rollout.prompt_len_B[row], rollout.completion_len_B[row]
        completion = rollout.tokens_BL[row, start:start + n].tolist()
        stops = [token for token in completion if token in (1, 2)]
        assert (len(stops), completion[-1] in (1, 2)) == ((1, True) if rollout.finished_B[row] else (0, False))
        assert rollout.finished_B[row] or n == 6
    assert rollout.finished_B.any() and not rollout.finished_B.all()


def test_masks_come_from_lengths_when_pad_is_the_stop_token():
    rollout = common.pack_rollout([[5, 6]], torch.tensor([[2, 0, 0], [7, 7, 2]]), torch.zeros(2, 3), torch.tensor([1, 3]),
                                  [2], common.tiny_tokenizer())
    assert rollout.mask_BT.tolist() == [[1, 0, 0], [1, 1, 1]]
    rollout.tokens_BL[rollout.tokens_BL == 0] = 2       # as if the stop token padded the rows
    assert rollout.mask_BT.sum(1).tolist() == [1, 3] and rollout.finished_B.all()


def test_rows_are_prompt_major(engine, tiny):
    rollout = engine.generate(prompts_of(tiny[1], "1+1=?", "9-8=?"), 2, 8)
    starts = [tiny[1].decode(tokens[:n]) for tokens, n in zip(rollout.tokens_BL, rollout.prompt_len_B)]
    assert starts == ["1+1=?\n"] * 2 + ["9-8=?\n"] * 2


def test_the_stop_token_has_a_gradient(model, tiny):
    head = copy.deepcopy(model)
    rollout = HFEngine(common.load_model(tiny[0]), tiny[1]).generate(prompts_of(tiny[1], "7+9-3=?"), 1, 60, seed=2)
    assert rollout.finished_B[0]
    logp = Policy(head)(rollout.tokens_BL, rollout.prompt_len_B, rollout.completion_len_B)
    logp[0, -1].backward()
    assert head.lm_head.weight.grad[tiny[1].eos_token_id].abs().sum() > 0


@pytest.mark.parametrize("tokens", [7, 64, 65, 200])
def test_chunked_logp_is_log_softmax(monkeypatch, tokens):
    monkeypatch.setattr(common, "LOGITS_PER_CHUNK", 64 * 11)
    torch.manual_seed(0)
    head = torch.nn.Linear(6, 11, bias=False).double()
    hidden = torch.randn(tokens, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (tokens,))
    weight_logp, weight_entropy = torch.randn(tokens).double(), torch.randn(tokens).double()

    def gradients(logp, entropy):
        return torch.autograd.grad((logp * weight_logp).sum() + (entropy * weight_entropy).sum(), [hidden, head.weight])

    logp_BV = F.log_softmax(head(hidden).float() / 0.7, -1)
    expected = logp_BV.gather(1, targets[:, None])[:, 0], -(logp_BV.exp() * logp_BV).sum(-1)
    found = common.token_logp(head, hidden, targets, 0.7, with_entropy=True)
    torch.testing.assert_close(found, expected)
    for a, b in zip(gradients(*found), gradients(*expected)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(common.token_logp(head, hidden, targets, 0.7), expected[0])


def test_uniform_logits_have_the_largest_entropy():
    head = torch.nn.Linear(3, 64, bias=False)
    head.weight.data.zero_()
    _, entropy = common.token_logp(head, torch.randn(5, 3), torch.zeros(5, dtype=torch.long), with_entropy=True)
    assert entropy.tolist() == pytest.approx([4.158883] * 5, abs=1e-5)


def test_log_probabilities_are_float32_even_from_bf16_logits():
    head = torch.nn.Linear(4, 8, bias=False).bfloat16()
    logp = common.token_logp(head, torch.randn(3, 4).bfloat16(), torch.tensor([0, 1, 2]))
    assert logp.dtype == torch.float32


def test_memory_does_not_grow_with_vocabulary_times_length():
    """What autograd saves for backward stays at one row of numbers a token, not one row of logits."""
    def saved_numbers(tokens, vocabulary=2 ** 13):
        head = torch.nn.Linear(8, vocabulary, bias=False)
        hidden, saved, seen = torch.randn(tokens, 8, requires_grad=True), [0], set()

        def note(tensor):
            if tensor.data_ptr() not in seen and tensor.data_ptr() != head.weight.data_ptr():
                seen.add(tensor.data_ptr())
                saved[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            logp = common.token_logp(head, hidden, torch.zeros(tokens, dtype=torch.long))
        logp.sum().backward()
        return saved[0]

    common_chunk, common.LOGITS_PER_CHUNK = common.LOGITS_PER_CHUNK, 2 ** 13 * 16
    try:
        small, large = saved_numbers(64), saved_numbers(512)
    finally:
        common.LOGITS_PER_CHUNK = common_chunk
    assert large < 512 * 64 and large < 16 * small      # one float32 logit tensor would be 512 * 8192


def test_dropout_is_off(tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=30, n_positions=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=.5,
                               embd_pdrop=.5)).save_pretrained(tmp_path)
    policy = Policy(common.load_model(tmp_path)).train()
    rollout = torch.tensor([[3, 4, 5, 6]]), torch.tensor([2]), torch.tensor([2])
    assert torch.equal(policy(*rollout), policy(*rollout))


def test_gradient_checkpointing_recomputes_and_changes_nothing(tiny):
    gradients, calls = [], []
    for recompute in (False, True):
        policy, count = Policy(common.load_model(tiny[0])), [0]
        if recompute:
            policy.model.train().gradient_checkpointing_enable({"use_reentrant": False})
        policy.layers[0].mlp.register_forward_pre_hook(lambda *_: count.__setitem__(0, count[0] + 1))
        policy(torch.tensor([[3, 4, 5, 6]]), torch.tensor([2]), torch.tensor([2])).sum().backward()
        gradients.append([p.grad for p in policy.parameters()])
        calls.append(count[0])
    assert calls == [1, 2]
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b)


def cut(lengths, rows, tokens):
    rollout = common.pack_rollout([[3]], torch.full((len(lengths), 50), 5), torch.zeros(len(lengths), 50),
                                  torch.tensor(lengths), [1], common.tiny_tokenizer())
    cfg = type("Cfg", (), {"micro_batch_tokens": tokens})
    return [(batch, micro) for batch, micro in common.micro_batches(rollout, torch.tensor(rows), cfg, "cpu")]


def test_micro_batches_hold_every_row_once_within_the_budget():
    batches = cut([3, 40, 7, 7, 20, 2], [0, 1, 2, 3, 5], tokens=24)
    assert sorted(row for batch, _ in batches for row in batch) == [0, 1, 2, 3, 5]
    for batch, micro in batches:
        assert len(batch) == 1 or micro.tokens_BL.numel() <= 24
        assert micro.logp_BT.shape[1] == micro.completion_len_B.max()


def test_no_rows_give_one_empty_micro_batch(model):
    [(rows, micro)] = cut([3, 4], [], tokens=24)
    policy = Policy(copy.deepcopy(model))
    logp = policy(micro.tokens_BL, micro.prompt_len_B, micro.completion_len_B)
    (logp * micro.mask_BT).sum().backward()
    assert rows == [0] and all(p.grad is not None and (p.grad == 0).all() for p in policy.parameters())
