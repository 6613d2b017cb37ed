"""LPO, listwise policy optimization.

Paper: "Listwise Policy Optimization: Group-based RLVR as Target-Projection on the LLM Response Simplex" (arXiv
2605.06139). There is no official code. (Not Linguistic-unit Policy Optimization, which shares the name.)

The K = G answers to a prompt are a list, and the policy is looked at as a distribution P over that list alone. Group
policy gradients such as GRPO move P towards a better distribution by a first-order step without ever naming it. LPO
names it, a softmax w* of the rewards over the answers, and projects P onto it by the exact gradient of a divergence.

    s_k  = mean_t log( pi_theta(y_t) / pi_old(y_t) )         pi_old drew the answers; length-normalised  [LPO eq. 3]
    P    = softmax(s)                                        the policy on the list                      [LPO eq. 4]
    w*   = softmax(R/tau + s_t)                              s_t: the s of the policy before this update [LPO eq. 8]
    c_k  = P_k - w*_k                                        d/ds_k of KL(w* || P), forward              [LPO eq. 10]
    c_k  = P_k (d_k - sum_j P_j d_j)                         d/ds_k of KL(P || w*), reverse              [LPO eq. 11]
           with d = log P - log w*, or for Jensen-Shannon d = 1/2 log(2 P / (P + w*))                [LPO remark C.6]
    loss = 1/prompts sum_x sum_k c_k mean_t clamp(log rho_t, log(1 - eps), log(1 + eps))                 [LPO app. D.3]
           with rho_t = pi_theta(y_t) / pi_old(y_t); c is detached and comes from the unclamped s

In every one of them c sums to 0 over a list and vanishes at P = w*, so that a step that went far enough stops itself;
forward, |c_k| <= 1 and sum |c_k| <= 2 whatever the rewards. The exact projection can't lower the expected reward over
the list: sum_k (w*_k - P_k) R_k = tau (KL(w* || P) + KL(P || w*)) >= 0 for the P before the update.

tau is matched to a policy gradient, so that both head for the same w*: GRPO's standard deviation of the rewards (the
population's), Dr. GRPO's 1, MaxRL's mean reward, RLOO's (K - 1)/K.                                      [LPO matching]
On samples of the policy itself (s = 0), reverse is that policy gradient: c_k = -A_k/K.

What differs from grpo.py. A list's coefficients need all of its s, but lists don't fit in one micro-batch. So where the
policy is no longer pi_old, a pass without gradient gives the s, and the update accumulates c_k * s_k: the gradient
through the whole list, at any micro-batch size. w* is fixed for all updates of a rollout, P and c are anew for each.
There is no advantage, no KL penalty and no weight for the engine's numerics. s_t is 0: pi_old is the policy as the
rollout begins. Lists with equal rewards stay: their c is exactly 0 in the first update, but in later ones it pulls the
policy back to where the rollout found it.

Published: K 8, AdamW lr 1e-6, betas .9 and .999, weight decay .1, temperature 1, no KL, eps .2, 256 prompts in 2
updates, 4096 tokens, MATH, Qwen3-1.7B-Base and Qwen3-8B-Base. Not published: steps, warm-up, gradient clipping. Where
app. D.3 leaves room (clamping each token's log-ratio, c from the unclamped ones), the reading above is ours. Mean
pass@1 / pass@k on 8B: GRPO 47.6/54.5, LPO forward 50.3/58.3, reverse 48.7/56.5; on 1.7B: 32.5/42.1, 35.3/46.1,
35.0/42.3.

To be honest about what drives it: s is a mean over tokens and steps are small, so P stays near 1/K, c is nearly that of
the first update, and forward LPO acts as a policy gradient with advantage K w*_k - 1. That favours hard prompts: with
tau the standard deviation and 1..7 of 8 answers right, the total push on right answers is
.621 .520 .451 .381 .304 .218 .118, where GRPO's is .331 .433 .484 .500 .484 .433 .331.

    python lpo.py                                                     # a laptop: the built-in task, two minutes
    python lpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k --max_new_tokens 1024                # one GPU
    torchrun --nproc_per_node 8 lpo.py --model Qwen/Qwen3-1.7B-Base                                       # eight GPUs
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 lpo.py ...      # on each node
    python lpo.py --resume runs/NAME                                                 # go on from the last checkpoint

Logged besides what every file logs (README): loss, the mean over prompts of sum_k c_k (clamped s_k), that backward runs
on, about 0 in a rollout's first update; target_kl, the mean over prompts of KL(w* || P) in nats; target_entropy, that
of the entropy of w* (log K: nothing to learn; 0: one answer takes all); coef_max, the largest |c_k|; coef_sum, the mean
of sum_k c_k, which is 0 but for rounding; clip_frac, the share of tokens outside the clamp. P and c are those just
before a list's own update.
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
    model: str = arg("Qwen/Qwen3-1.7B-Base", "folder or hub name of a causal LM, or tiny (paper; also 8B)")
    dataset: str = arg("math", "training problems: a name or a file, see README (paper)")
    eval_dataset: str = arg("math500", "held-out problems (not published; ours)")
    steps: int = arg(200, "rollouts in all (not published; ours)")
    prompts_per_step: int = arg(256, "prompts per rollout, over all processes (paper)")
    group_size: int = arg(8, "completions per prompt, G (paper: K, 8)")
    updates_per_rollout: int = arg(2, "mini-batches, one optimizer step each, that a rollout is cut into (paper)")
    max_prompt_tokens: int = arg(1024, "longer prompts are dropped, never cut")
    max_new_tokens: int = arg(4096, "completion length limit (paper)")
    temperature: float = arg(1.0, "sampling temperature, in training and evaluation (papers: 1)")
    lr: float = arg(1e-6, "AdamW learning rate (paper)")
    lr_schedule: Literal["constant", "linear", "cosine"] = arg("constant", "after warm-up (DAPO: constant)")
    warmup_steps: int = arg(10, "steps of linear learning-rate warm-up (not published; ours)")
    beta1: float = arg(0.9, "AdamW beta 1 (paper)")
    beta2: float = arg(0.999, "AdamW beta 2 (paper)")
    weight_decay: float = arg(0.1, "AdamW weight decay (paper)")
    grad_clip: float = arg(1.0, "largest gradient norm (not published; ours)")
    clip_low: float = arg(0.2, "eps below (paper)")
    clip_high: float = arg(0.2, "eps above (paper)")
    divergence: Literal["forward", "reverse", "js"] = arg("forward", "KL(w*||P), KL(P||w*) or Jensen-Shannon (paper)")
    match: Literal["grpo", "dr_grpo", "maxrl", "rloo"] = arg("grpo", "whose w* to aim at, by the choice of tau (paper)")
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
    """Mean of each row (B,) where the mask is 1, and 0 for an empty row: of log-ratios, the row's s.  [LPO eq. 3]"""
    return (values_BT * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)


def matched_temperature(rewards_PG, kind):
    """tau (P, 1), at which w* is the distribution that the policy gradient `kind` heads for.  [LPO matching]"""
    if kind == "grpo":
        return rewards_PG.std(1, correction=0, keepdim=True) + 1e-6
    if kind == "maxrl":
        return rewards_PG.mean(1, keepdim=True) + 1e-6
    k = rewards_PG.shape[1]
    return torch.full_like(rewards_PG[:, :1], (k - 1) / k if kind == "rloo" else 1.0)


def log_target(rewards_PG, tau_P1, prior_scores_PG=None):
    """log w* (P, G).  [LPO eq. 8]  Subtracting the best reward changes nothing but makes equal rewards exactly 0."""
    phi_PG = (rewards_PG - rewards_PG.amax(1, keepdim=True)) / tau_P1
    return (phi_PG if prior_scores_PG is None else phi_PG + prior_scores_PG).log_softmax(1)


def listwise_target(rewards_PG, tau_P1, prior_scores_PG=None):
    """w* (P, G), what each list is projected onto.  [LPO eq. 8]"""
    return log_target(rewards_PG, tau_P1, prior_scores_PG).exp()


def projection_coefficients(scores_PG, rewards_PG, tau_P1, divergence, prior_scores_PG=None):
    """c = d divergence / d s of every answer (P, G); exactly 0 where P = w*.  [LPO eq. 4, 10, 11, remark C.6]"""
    log_p_PG = scores_PG.log_softmax(1)
    log_w_PG = log_target(rewards_PG, tau_P1, prior_scores_PG)
    p_PG = log_p_PG.exp()
    if divergence == "forward":
        c_PG = p_PG - log_w_PG.exp()
    else:
        d_PG = log_p_PG - log_w_PG
        if divergence == "js":
            d_PG = 0.5 * (log_p_PG - torch.logaddexp(log_p_PG, log_w_PG))       # but for a constant, which cancels
        c_PG = p_PG * (d_PG - (p_PG * d_PG).sum(1, keepdim=True))
    return torch.where((log_p_PG == log_w_PG).all(1, keepdim=True), 0.0, c_PG)      # rounding would leave crumbs


def kl(a_PG, b_PG):
    """KL(a || b) of every list (P,), in nats; a probability that has underflowed to 0 does no harm."""
    tiny = torch.finfo(a_PG.dtype).tiny
    return (a_PG * (a_PG.clamp(min=tiny).log() - b_PG.clamp(min=tiny).log())).sum(1)


def divergence_value(scores_PG, target_PG, divergence):
    """KL(w* || P), KL(P || w*) or Jensen-Shannon of every list (P,): what c is the gradient of.  [LPO eq. 4]"""
    p_PG = scores_PG.softmax(1)
    if divergence == "forward":
        return kl(target_PG, p_PG)
    if divergence == "reverse":
        return kl(p_PG, target_PG)
    middle_PG = (p_PG + target_PG) / 2
    return (kl(p_PG, middle_PG) + kl(target_PG, middle_PG)) / 2


def clamped_log_ratio(logp_BT, old_logp_BT, clip_low=0.2, clip_high=0.2):
    """log(pi_theta / pi_old) of every token (B, T), without gradient outside the clamp.  [LPO app. D.3]"""
    return (logp_BT - old_logp_BT).clamp(math.log(1 - clip_low), math.log(1 + clip_high))


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
    if not (0 < cfg.clip_low < 1 and cfg.clip_high > 0):
        raise common.UserError("--clip_low must be between 0 and 1, and --clip_high above 0.")
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

        # 3. target, the same for all updates of this rollout
        tau_P1 = matched_temperature(rewards_PG, cfg.match)
        target_PG = listwise_target(rewards_PG, tau_P1)
        scores_PG = torch.zeros_like(rewards_PG)        # s; exactly 0 as long as the policy is pi_old

        # 4. update
        old_logp_BT = None      # the policy itself
        if cfg.updates_per_rollout > 1:
            old_logp_BT = common.policy_logp(policy, rollout, torch.arange(len(rewards)), cfg, device)
        for group in optimizer.param_groups:
            group["lr"] = common.learning_rate(cfg, step)
        means, loss_sum = common.Means(), 0.0
        for mini_batch in torch.arange(len(rewards)).chunk(cfg.updates_per_rollout):
            if mini_batch[0] > 0:       # earlier updates of this rollout have moved the policy
                now_BT = common.policy_logp(policy, rollout, mini_batch, cfg, device)
                scores_PG.view(-1)[mini_batch] = masked_mean(now_BT - old_logp_BT, rollout.mask_BT)[mini_batch]
            coefficients_B = projection_coefficients(scores_PG, rewards_PG, tau_P1, cfg.divergence).flatten()
            moving_B = coefficients_B != 0      # the gradient of the others is exactly 0
            count = cfg.prompts_per_step // cfg.updates_per_rollout         # prompts, all processes
            for rows, micro in common.micro_batches(rollout, mini_batch[moving_B[mini_batch]], cfg, device):
                logp_BT = policy(micro.tokens_BL, micro.prompt_len_B, micro.completion_len_B, cfg.temperature)
                old_BT = logp_BT.detach() if old_logp_BT is None else old_logp_BT[rows, :logp_BT.shape[1]].to(device)
                # Not the divergence, but its gradient: c carries what the rest of the list contributes.
                clamped_B = masked_mean(clamped_log_ratio(logp_BT, old_BT, cfg.clip_low, cfg.clip_high), micro.mask_BT)
                loss = (coefficients_B[rows].to(device) * clamped_B).sum() / count
                (loss * world_size).backward()      # FSDP averages over processes; global counts call for the sum
                loss_sum += loss.item() / cfg.updates_per_rollout
                ratio_BT = (logp_BT.detach() - old_BT).exp()
                clipped_BT = (ratio_BT < 1 - cfg.clip_low) | (ratio_BT > 1 + cfg.clip_high)
                means.add(micro.mask_BT, clip_frac=clipped_BT, engine_gap=(old_BT - micro.logp_BT).abs())
            grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
        engine.load_weights(common.named_weights(policy.model))
        clock.lap("update_s")

        # 5. log, evaluate, save
        everyone_P = torch.ones(len(rewards_PG))
        means.add(everyone_P, target_kl=divergence_value(scores_PG, target_PG, "forward"),
                  target_entropy=torch.special.entr(target_PG).sum(1),
                  coef_sum=coefficients_B.view_as(rewards_PG).sum(1))
        metrics = common.rollout_metrics(rollout, rewards_PG, clock) | means.over_ranks()
        metrics |= {"loss": common.all_sum(loss_sum)[0], "grad_norm": common.full(grad_norm).item()}
        metrics["coef_max"] = max(common.all_gather(coefficients_B.abs().max().item()))
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
