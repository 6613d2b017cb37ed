"""grpo.py's loss and gradient on a fixed batch are those of TRL's GRPOTrainer. Needs trl==1.16.0; skipped without."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import common
import grpo

pytest.importorskip("trl", reason="TRL is not installed: pip install trl==1.16.0")


@pytest.mark.parametrize("on_policy", [True, False])
def test_loss_and_gradient_are_trls(tiny, tmp_path, on_policy):
    import datasets
    from trl import GRPOConfig, GRPOTrainer
    folder, tokenizer = tiny
    problems = common.load_problems("arithmetic", "train", 4)
    prompts = [common.encode_prompt(problem, tokenizer) for problem in problems]
    rollout = common.HFEngine(common.load_model(folder), tokenizer).generate(prompts, 4, 24, seed=0)
    rewards_PG = torch.tensor(common.score(rollout.texts, [p.answer for p in problems for _ in range(4)])).view(-1, 4)
    advantages = grpo.group_advantages(rewards_PG).flatten()
    old_BT = rollout.logp_BT
    if not on_policy:
        old_BT = old_BT + 0.4 * torch.randn(old_BT.shape, generator=torch.Generator().manual_seed(0))     # so that some clip
    n_tokens = rollout.completion_len_B.sum().item()

    policy = common.Policy(common.load_model(folder))
    logp_BT = policy(rollout.tokens_BL, rollout.prompt_len_B, rollout.completion_len_B)
    loss = grpo.aggregate(grpo.token_loss(logp_BT, old_BT, advantages), rollout.mask_BT, "token", n_tokens)
    loss.backward()

    config = GRPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=16, num_generations=4, beta=0.0,
                        loss_type="dapo", scale_rewards="group", epsilon=0.2, epsilon_high=0.28, temperature=1.0,
                        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[])
    trainer = GRPOTrainer(common.load_model(folder), reward_funcs=lambda completions, **_: [0.0] * len(completions),
                          args=config, processing_class=tokenizer,
                          train_dataset=datasets.Dataset.from_list([{"prompt": p.prompt} for p in problems]))
    rows = [(row[:p], row[p:p + c]) for row, p, c in zip(rollout.tokens_BL, rollout.prompt_len_B, rollout.completion_len_B)]
    left = [pad_sequence([f(p) for p, _ in rows], True, 0, "left") for f in (torch.clone, torch.ones_like)]
    right = [pad_sequence([f(c) for _, c in rows], True, 0) for f in (torch.clone, torch.ones_like)]
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    theirs = trainer._compute_loss(trainer.model, {
        "prompt_ids": left[0], "prompt_mask": left[1], "completion_ids": right[0], "completion_mask": right[1],
        "advantages": advantages, "old_per_token_logps": old_BT, "num_items_in_batch": torch.tensor(n_tokens)})
    theirs.backward()

    assert (advantages != 0).any() and loss.item() == pytest.approx(theirs.item(), abs=1e-5)
    for (name, ours), other in zip(policy.model.named_parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, atol=1e-5, rtol=1e-4, msg=name)
