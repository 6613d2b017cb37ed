"""ConSPO, contrastive sequence-level policy optimization.

Paper: "Revisiting Reinforcement Learning with Verifiable Rewards from a Contrastive Perspective" (arXiv 2605.12969).
There is no official code.

A completion's score is its mean token log-probability under the policy itself: what decides generation, not a ratio to
an older policy. Within a group, each right answer (reward above 0.5) is contrasted with all the wrong ones, as InfoNCE
contrasts a positive with its negatives. So a right answer that is already well ahead moves little, a wrong answer that
the policy likes is pushed down most, and a margin that grows during training keeps the pressure up.

    s_i  = mean_t log pi_theta(y_t)                          at the sampling temperature             [ConSPO score]
    J    = 1/N+ sum_i tau log( e^{s_i/tau} / (e^{s_i/tau} + sum_j e^{s_j/tau}) )                     [ConSPO eq. 8]
           i: the group's N+ positives, j: its N- negatives; other positives are not in the denominator
    J_m  = J with s_i - m_t for the positives' s_i                                                   [ConSPO eq. 13]
    m_t  = M/2 (1 - cos(pi min(progress/alpha, 1)))          from 0 to M, then M                     [ConSPO margin]

The step maximises the mean of J_m over all valid groups, those with at least one positive and one negative. The others
are dropped. Let P_i be the fraction in J_m for positive i, and P_ij negative j's share of that denominator:

    dJ_m/ds_i = (1 - P_i)/N+     dJ_m/ds_j = -1/N+ sum_i P_ij     they sum to 0 over a group         [ConSPO lemma 2]

What differs from grpo.py. The objective needs a whole group's scores at once, but groups don't fit in one micro-batch.
So a pass without gradient gives the scores, the derivatives above are computed from them, and the update accumulates
-(derivative * score): the gradient of J_m through the whole group, at any micro-batch size. A token's share is the
derivative over the row's length. There is no ratio, no clip, no KL, no reference and no pi_old. With several updates
per rollout the scores are taken anew before each: all that is old then is the samples.

Published: tau 10, M 0.01, alpha 0.3, lr 2e-6, temperature 1, 8192 tokens, 4 epochs. Not published: group size, prompts
per step, updates per rollout, optimizer betas. Average of seven benchmarks (DeepSeek-R1-Distill-Qwen-1.5B trained on
DeepScaleR): base 33.5, GRPO 40.0, DAPO 41.2, best baseline 42.8, ConSPO 44.4; without margin 44.1, with a fixed margin
43.9, with ratios for scores 43.4, with a linear objective 42.7.

To be honest about the published tau = 10: scores of a group differ by far less than 10, so its softmax is almost flat.
The update is then nearly one of constant weights, and a margin of 0.01 moves about 2e-4 of weight. Contrast becomes
real at tau <= 1; on the built-in task, tau 0.1 unlearned what the base could: in one run held-out pass@1 fell from
0.49 to 0.25, and 77% of what was still right were bare guesses (benchmarks/results/claims.md).
What remains at tau 10 is which prompts weigh most. The weight on positives is N-/(1 + N-) (G = 8, N+ = 1..7: .875 .857
.833 .800 .750 .667 .500), GRPO's is .331 .433 .484 .500 .484 .433 .331: ConSPO leans towards hard prompts.

    python conspo.py                                                  # a laptop: the built-in task, two minutes
    python conspo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k --steps 200 --max_new_tokens 1024 # one GPU
    torchrun --nproc_per_node 8 conspo.py --model deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B               # eight GPUs
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 conspo.py ...   # on each node
    python conspo.py --resume runs/NAME                                              # go on from the last checkpoint

Logged besides what every file logs (README): loss, -J_m, the mean over valid groups, about tau log(1 + N-) at a large
tau; score_pos and score_neg, the mean over valid groups of the positives' and of the negatives' mean score, in nats per
token; score_gap, their difference, which ought to grow; margin, m_t; valid_groups, how many groups were valid. All
scores are those just before a group's own update, so engine_gap includes what earlier updates of the rollout moved.
"""

import math
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import common
from common import arg


@dataclass
class Config:
    model: str = arg("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "folder or hub name of a causal LM, or tiny (paper)")
    dataset: str = arg("deepscaler", "training problems: a name or a file, see README (paper)")
    eval_dataset: str = arg("math500", "held-out problems (not published; ours)")
    steps: int = arg(1260, "rollouts in all (paper: 4 epochs, which is 1260 steps of 128 prompts)")
    prompts_per_step: int = arg(128, "prompts per rollout, over all processes (not published; ours)")
    group_size: int = arg(8, "completions per prompt, G (not published; ours)")
    updates_per_rollout: int = arg(1, "mini-batches, one optimizer step each, that a rollout is cut into")
    max_prompt_tokens: int = arg(1024, "longer prompts are dropped, never cut")
    max_new_tokens: int = arg(8192, "completion length limit (paper)")
    temperature: float = arg(1.0, "sampling temperature, in training and evaluation (papers: 1)")
    lr: float = arg(2e-6, "AdamW learning rate (paper)")
    lr_schedule: Literal["constant", "linear", "cosine"] = arg("constant", "after warm-up (DAPO: constant)")
    warmup_steps: int = arg(10, "steps of linear learning-rate warm-up (not published; ours)")
    beta1: float = arg(0.9, "AdamW beta 1 (not published; ours)")
    beta2: float = arg(0.95, "AdamW beta 2 (not published; ours)")
    weight_decay: float = arg(0.0, "AdamW weight decay (not published; ours)")
    grad_clip: float = arg(1.0, "largest gradient norm (not published; ours)")
    tau: float = arg(10.0, "temperature of the contrast: flat when large, the hardest pairs alone when small (paper)")
    max_margin: float = arg(0.01, "M, the margin that positives must win by in the end, in nats per token (paper)")
    margin_warmup: float = arg(0.3, "alpha, the share of training in which the margin grows to M (paper)")
    seed: int = arg(0, "names every random stream of the run")
    micro_batch_tokens: int = arg(16384, "tokens per forward and backward, padding included: for memory only")
    gradient_checkpointing: bool = arg(False, "recompute activations in backward: less memory, a third more time")
    engine: Literal["auto", "vllm", "hf"] = arg("auto", "what generates; auto: vLLM on CUDA if installed, else hf")
    engine_rows: int = arg(512, "completions that the engine works on at a time")
    engine_memory: float = arg(0.45, "share of the GPU's memory that vLLM may take while it generates")
    engine_parallel: int = arg(1, "GPUs of a node that share one vLLM engine (tensor parallelism)")
    eval_every: int = arg(10, "steps between evaluations")
    eval_samples: int = arg(1, "completions per held-out problem")
    eval_problems: int = arg(256, "the first so many held-out problems")
    save_every: int = arg(50, "steps between checkpoints; one more at the end")
    run_dir: str = arg("", "the run's folder (default runs/<algorithm>-<model>-<dataset>-<time>)")
    resume: str = arg("", "continue the run in this folder, with its settings")
    tensorboard: bool = arg(False, "also log to TensorBoard")
    wandb: bool = arg(False, "also log to Weights & Biases")


# The built-in task, on a CPU: 2 minutes on two cores.
TINY = dict(model="tiny", dataset="arithmetic", eval_dataset="arithmetic", steps=300, prompts_per_step=16,
            max_prompt_tokens=64, max_new_tokens=96, lr=3e-4, lr_schedule="linear", beta2=0.99, eval_every=20,
            eval_samples=4)


def masked_mean(values_BT, mask_BT):
    """Mean of each row (B,) where the mask is 1, and 0 for an empty row: of log-probabilities, the row's score.

    [ConSPO score]
    """
    return (values_BT * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)


def margin_at(progress, max_margin=0.01, warmup=0.3):
    """The margin after a share `progress` (0..1) of training: half a cosine from 0 to max_margin.  [ConSPO margin]

    A warmup of 0 gives the paper's fixed margin.
    """
    grown = min(progress / warmup, 1.0) if warmup > 0 else 1.0
    return max_margin / 2 * (1 - math.cos(math.pi * grown))


def split_groups(rewards_PG):
    """positive_PG, which rewards are above 0.5; valid_P, which groups have positives and negatives."""
    positive_PG = rewards_PG > 0.5
    return positive_PG, positive_PG.any(1) & ~positive_PG.all(1)


def contrastive_objective(scores_PG, rewards_PG, margin, tau):
    """J_m of every group (P,), which is to be maximised, and valid_P; J_m is 0 where not valid.  [ConSPO eq. 8, 13]

    Computed from logarithms, since e^{s/tau} may underflow. Without negatives every fraction is 1, its logarithm 0.
    """
    positive_PG, valid_P = split_groups(rewards_PG)
    own_PG = (scores_PG - margin) / tau
    negatives_P1 = (scores_PG / tau).masked_fill(positive_PG, -torch.inf).logsumexp(1, keepdim=True)
    log_fraction_PG = own_PG - torch.logaddexp(own_PG, negatives_P1)
    return tau * masked_mean(log_fraction_PG, positive_PG), valid_P


def score_coefficients(scores_PG, rewards_PG, margin, tau):
    """dJ_m/ds of every completion (P, G): 0 in groups that are not valid.  [ConSPO lemma 2]

    The loss of positive i, 1 - P_i, is what its negatives get as a whole, each by its softmax share among them. With
    tau far above the score gaps (the published 10) this is flat: whatever the scores, nearly N-/(N+ (1 + N-)) for each
    positive and -1/(1 + N-) for each negative, and a margin of 0.01 shifts 1 - P_i by under 3e-4.
    """
    positive_PG, valid_P = split_groups(rewards_PG)
    negative_PG = (scores_PG / tau).masked_fill(positive_PG, -torch.inf)
    lost_PG = torch.sigmoid(negative_PG.logsumexp(1, keepdim=True) - (scores_PG - margin) / tau)    # 1 - P_i
    up_PG = lost_PG * positive_PG / positive_PG.sum(1, keepdim=True).clamp(min=1)
    down_PG = negative_PG.softmax(1) * up_PG.sum(1, keepdim=True)
    return torch.where(valid_P[:, None], up_PG - down_PG, 0.0)


def shard(policy, device):
    """Spread a policy over the processes with FSDP2; a lone process keeps it whole.

    FSDP2 gathers one decoder layer at a time, as it runs. Weights, gradients and optimizer state are float32; on CUDA
    the compute is bf16.
    """
    if dist.is_initialized():
        on_cuda = device.type == "cuda"
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_cuda else MixedPrecisionPolicy()
        for layer in policy.layers:
            fully_shard(layer, mp_policy=precision)
        fully_shard(policy, mp_policy=precision)
    return policy.to(device)


def main():
    cfg = common.parse_config(Config, TINY)

    # torchrun starts one process per GPU and numbers them; plain python is a world of one.
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    common.check_config(cfg, world_size)
    if not (cfg.tau > 0 and cfg.max_margin >= 0 and cfg.margin_warmup >= 0):
        raise common.UserError("--tau must be above 0, --max_margin and --margin_warmup at least 0.")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(hours=1))

    model_name = common.resolve_model(cfg.model)
    tokenizer = common.load_tokenizer(model_name)
    policy = common.Policy(common.load_model(model_name))
    common.check_window(policy.model.config, cfg)
    if cfg.gradient_checkpointing:
        policy.model.train().gradient_checkpointing_enable({"use_reentrant": False})      # works in train mode only
    shard(policy, device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, betas=(cfg.beta1, cfg.beta2),
                                  weight_decay=cfg.weight_decay, fused=True)

    train_set = common.load_problems(cfg.dataset, "train")
    test_set = common.load_problems(cfg.eval_dataset, "test", cfg.eval_problems)
    problems, prompts = common.encode_prompts(train_set, tokenizer, cfg.max_prompt_tokens)
    held_out, held_out_prompts = common.encode_prompts(test_set, tokenizer, cfg.max_prompt_tokens)

    # Every process generates with an engine and weights of its own, so generation waits for nobody.
    log = common.RunLog(Path(__file__).stem, cfg, world_size)
    engine = common.make_engine(cfg, model_name, tokenizer, device)
    if log.start > 0:
        common.load_checkpoint(log.dir, policy, optimizer)
        engine.load_weights(common.named_weights(policy.model))
    else:
        log.write(0, common.evaluate_step(engine, held_out, held_out_prompts, cfg, log, 0))

    for step in range(log.start + 1, cfg.steps + 1):
        # 1. rollout. Prompts are dealt so that a mini-batch holds the same ones on any number of processes.
        clock = common.Clock()
        order = common.data_order(len(problems), cfg.prompts_per_step, step, cfg.seed)
        places = torch.arange(cfg.prompts_per_step).view(cfg.updates_per_rollout, world_size, -1)[:, rank].flatten()
        batch = [problems[order[place]] for place in places]
        seeds = [common.stream_seed(cfg.seed, "rollout", step, int(place)) for place in places]
        engine.wake()
        rollout = engine.generate([prompts[order[place]] for place in places], cfg.group_size, cfg.max_new_tokens,
                                  cfg.temperature, seeds)
        engine.sleep()
        clock.lap("rollout_s")

        # 2. reward
        rewards = common.score(rollout.texts, [problem.answer for problem in batch for _ in range(cfg.group_size)])
        rewards_PG = torch.tensor(rewards).view(-1, cfg.group_size)
        clock.lap("reward_s")

        # 3. groups, margin. The coefficients follow in 4, since each update needs new ones.
        moving_B = split_groups(rewards_PG)[1].repeat_interleave(cfg.group_size)    # the gradient of the others is 0
        margin = margin_at((step - 1) / cfg.steps, cfg.max_margin, cfg.margin_warmup)
        scores_PG = torch.zeros_like(rewards_PG)

        # 4. update
        for group in optimizer.param_groups:
            group["lr"] = common.learning_rate(cfg, step)
        means = common.Means()
        for mini_batch in torch.arange(len(rewards)).chunk(cfg.updates_per_rollout):
            moving = mini_batch[moving_B[mini_batch]]       # whole groups
            count, = common.all_sum(len(moving) // cfg.group_size)
            # The scores as they are now: earlier updates of this rollout have moved the policy.
            now_BT = common.policy_logp(policy, rollout, moving, cfg, device)
            scores_PG.view(-1)[moving] = masked_mean(now_BT, rollout.mask_BT)[moving]
            coefficients_B = score_coefficients(scores_PG, rewards_PG, margin, cfg.tau).flatten()
            for rows, micro in common.micro_batches(rollout, mini_batch[moving_B[mini_batch]], cfg, device):
                logp_BT = policy(micro.tokens_BL, micro.prompt_len_B, micro.completion_len_B, cfg.temperature)
                # Not -J_m, but its gradient: the coefficients carry what the rest of the group contributes.
                scores_B = masked_mean(logp_BT, micro.mask_BT)
                loss = -(coefficients_B[rows].to(device) * scores_B).sum() / max(count, 1)
                (loss * world_size).backward()      # FSDP averages over processes; global counts call for the sum
                means.add(micro.mask_BT, engine_gap=(logp_BT - micro.logp_BT).abs())
            grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
        engine.load_weights(common.named_weights(policy.model))
        clock.lap("update_s")

        # 5. log, evaluate, save
        positive_PG, valid_P = split_groups(rewards_PG)
        objective_P, _ = contrastive_objective(scores_PG, rewards_PG, margin, cfg.tau)
        up_P, down_P = masked_mean(scores_PG, positive_PG), masked_mean(scores_PG, ~positive_PG)
        means.add(valid_P, loss=-objective_P, score_pos=up_P, score_neg=down_P, score_gap=up_P - down_P)
        metrics = common.rollout_metrics(rollout, rewards_PG, clock) | means.over_ranks()
        metrics |= {"margin": margin, "valid_groups": common.all_sum(valid_P.sum())[0],
                    "grad_norm": common.full(grad_norm).item()}
        if step % cfg.eval_every == 0 or step == cfg.steps:
            metrics |= common.evaluate_step(engine, held_out, held_out_prompts, cfg, log, step)
        log.samples(step, "train", batch[:1], rollout.texts[:1], rewards[:1])
        log.write(step, metrics)
        if step % cfg.save_every == 0 or step == cfg.steps:
            common.save_checkpoint(log.dir, step, policy, optimizer)

    common.export(policy.model, tokenizer, log.dir / "final", torch.bfloat16 if cuda else torch.float32)
    log.report(cfg.steps)


if __name__ == "__main__":
    try:
        main()
    except common.UserError as error:       # one sentence, no traceback, exit status 1, on every process
        raise SystemExit(f"error: {error}")
    if dist.is_initialized():       # after success only: with a failed peer, NCCL's own end may wait forever
        dist.destroy_process_group()
