"""Logit-averaged GRPO: the policy is the average of a frozen reference and a trained model, in logits.

Paper: Logit-averaged GRPO, Gan and Zhu (arXiv 2605.20555). No code of the authors is public.

GRPO without a KL penalty may drift far from the model that it started from, and lose what no reward asks to keep, such
as the format. Here the policy itself holds on to the reference: the logits of the two models are averaged at each
token, and rollouts, ratios, evaluation and the exported policy are all those of the average, never of one model alone.
Only theta, the second model, trains; neither a KL penalty nor a critic is needed.

    z_mix    = w z_ref + (1 - w) z_theta                     at every token, 0 <= w < 1                  [LA eq. 1]
    pi_mix   = softmax(z_mix / T) = pi_ref^w pi_theta^(1-w) / Z
    A_i      = (R_i - mean(R)) / (std(R) + 1e-4)             over the G answers to one prompt            [GRPO eq. 1]
    rho      = pi_mix(y_t) / pi_mix,old(y_t)                 per token, at the sampling temperature T    [GRPO eq. 2]
    J        = 1/N sum_i sum_t v min(rho A_i, clip(rho, 1 - eps_low, 1 + eps_high) A_i)                  [GRPO eq. 3]
    v        = min(pi_mix,old(y_t) / pi_engine(y_t), cap)    detached: the engine's own numerics         [TIS]
    w        = clip(sigmoid(10 (gain - forget) + logit(w_0)), 0.1, 0.9)    every adapt_every steps       [LA adapt]

w_0 = ref_weight = 0.5 is where the paper's study peaks. Z differs from token to token and depends on theta: averaged
log-probabilities without it are no distribution. A zero of either model is a zero of the average, so the reference can
veto a token but never make theta's vetoed one likely. N counts the completion tokens of the whole step.

The gradient. d log pi_mix(a) / d z_theta = (1 - w) (e_a - pi_mix): it carries the factor 1 - w, and is 0 at w = 1.
AdamW divides that factor out again, but a change of z_theta moves z_mix by 1 - w of it: at the same lr the policy's
step is 1 - w times GRPO's (with plain gradient descent it would be (1 - w)^2 times). So compare with grpo.py at
(1 - w) lr too, as benchmarks/logit_avg_drift.py does. Gradient clipping sees the smaller gradient.

Against grpo.py: MixturePolicy in place of Policy, an engine that decodes both models side by side, each with a KV cache
of its own, no KL penalty, and the adaptive w. With --ref_weight 0 it is grpo.py, bit for bit. A step costs one more
forward pass in the update, and twice the decoding.

Adaptive w (--ref_weight_mode adaptive): gain is P(the mixture is right, theta alone is wrong), forget the reverse, on
about as many problems as --eval_problems (at most half of the training set), which are kept out of training and are not
the test problems. gain - forget is the difference of the two accuracies, however the samples are paired. w changes
before a rollout and stays until the next adaptation, so no ratio ever mixes two. The paper has the idea; the form, and
10, 0.1 and 0.9, are ours.

final/ is theta, final/reference/ the reference, final/mixture.json the weight: the policy that was trained is the three
together, at twice the cost of serving one model. Theta alone was never sampled and may be better or worse.

Published: Qwen2.5-Instruct 1.5B, 3B and 7B on MATH, cn-k12 and MMLU, at least level with GRPO with a KL penalty in all
nine cells. Not published: learning rate, batch, lengths and the penalty's coefficient, so those here are grpo.py's, and
the size of the gain can't be checked. The gain is over a baseline that is itself unpublished.

    python logit_avg_grpo.py                                          # a laptop: the built-in task, two minutes
    python logit_avg_grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k                           # one GPU
    torchrun --nproc_per_node 8 logit_avg_grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset math       # eight GPUs
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 logit_avg_grpo.py ...
    python logit_avg_grpo.py --resume runs/NAME                                      # go on from the last checkpoint

Logged besides what every file logs (README): clip_frac, the share of tokens whose ratio is clipped; kl, the mean k3
estimate of KL(pi_mix || pi_ref) [GRPO eq. 4] over the tokens that were trained on, which is not part of the loss;
ref_weight, the w of the step; adapt_s, the seconds of an adaptation of w, on steps that have one; at evaluations
eval_theta, held-out pass@1 of theta alone, and at step 0 eval_reference, that of the reference alone.
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
    model: str = arg("Qwen/Qwen2.5-1.5B-Instruct", "folder or hub name of a causal LM, or tiny (not published; ours)")
    dataset: str = arg("gsm8k", "training problems: a name or a file, see README (not published; ours)")
    eval_dataset: str = arg("gsm8k", "held-out problems")
    steps: int = arg(200, "rollouts in all (not published; ours)")
    prompts_per_step: int = arg(128, "prompts per rollout, over all processes (not published; ours)")
    group_size: int = arg(8, "completions per prompt, G (not published; ours)")
    updates_per_rollout: int = arg(1, "mini-batches, one optimizer step each, that a rollout is cut into")
    max_prompt_tokens: int = arg(1024, "longer prompts are dropped, never cut")
    max_new_tokens: int = arg(1024, "completion length limit")
    temperature: float = arg(1.0, "sampling temperature, in training and evaluation (papers: 1)")
    lr: float = arg(1e-6, "AdamW learning rate (DeepSeekMath, DAPO: 1e-6)")
    lr_schedule: Literal["constant", "linear", "cosine"] = arg("constant", "after warm-up (DAPO: constant)")
    warmup_steps: int = arg(10, "steps of linear learning-rate warm-up (not published; ours)")
    beta1: float = arg(0.9, "AdamW beta 1 (not published; ours)")
    beta2: float = arg(0.95, "AdamW beta 2 (not published; ours)")
    weight_decay: float = arg(0.0, "AdamW weight decay (not published; ours)")
    grad_clip: float = arg(1.0, "largest gradient norm (not published; ours)")
    clip_low: float = arg(0.2, "eps_low (DAPO)")
    clip_high: float = arg(0.28, "eps_high (DAPO)")
    ref_model: str = arg("", "the frozen reference: folder or hub name (default: --model as loaded; ours)")
    ref_weight: float = arg(0.5, "w, the reference's share of the logits, in [0, 1) (paper: its study peaks at 0.5)")
    ref_weight_mode: Literal["fixed", "adaptive"] = arg("fixed", "adaptive: w follows the gain (paper; form ours)")
    adapt_every: int = arg(10, "steps between adaptations of w (not published; ours)")
    loss_agg: Literal["token", "sequence", "constant"] = arg(
        "token", "mean over tokens (DAPO), over rows of row means (GRPO), or sum / (rows * max_new_tokens) (Dr. GRPO)")
    normalize_std: bool = arg(True, "divide advantages by the group's standard deviation (Dr. GRPO: no)")
    mask_truncated: bool = arg(False, "leave unfinished completions out of the loss")
    importance_cap: float = arg(2.0, "cap of the engine correction w (TIS: 2)")
    old_logp: Literal["trainer", "engine"] = arg("trainer", "pi_old: the trainer's own, or as the engine recorded them")
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


def mix_logits(policy_logits, ref_logits, ref_weight):
    """w z_ref + (1 - w) z_theta, of logits (..., V); padded vocabularies are cut to the shorter.  [LA eq. 1]"""
    vocabulary = min(policy_logits.shape[-1], ref_logits.shape[-1])
    return ref_weight * ref_logits[..., :vocabulary] + (1 - ref_weight) * policy_logits[..., :vocabulary]


def mixed_logp(policy_logits_BTV, ref_logits_BTV, targets_BT, ref_weight, temperature=1.0):
    """log pi_mix of the targets (B, T); any leading shape will do. log Z is part of the log_softmax.  [LA eq. 1]"""
    logits_BTV = mix_logits(policy_logits_BTV, ref_logits_BTV, ref_weight) / temperature
    return logits_BTV.log_softmax(-1).gather(-1, targets_BT[..., None])[..., 0]


def adapt_ref_weight(gain, forget, base_weight=0.5, kappa=10.0, low=0.1, high=0.9):
    """The next w, a float: above base_weight where averaging gains more problems than it forgets.  [LA adapt]"""
    logit = kappa * (gain - forget) + math.log(base_weight / (1 - base_weight))
    return min(max(1 / (1 + math.exp(-logit)), low), high)


class MixturePolicy(common.Policy):
    """pi_mix: the trained model and the frozen reference, as one module for FSDP, checkpoints and log-probabilities."""

    def __init__(self, model, reference, ref_weight):
        super().__init__(model)
        self.reference = reference.requires_grad_(False)
        self.register_buffer("ref_weight", torch.tensor(ref_weight, dtype=torch.float64))   # so checkpoints hold it

    @property
    def layers(self):
        """The decoder layers of both models."""
        return [*super().layers, *common.Policy(self.reference).layers]

    def forward(self, tokens_BL, prompt_len_B, completion_len_B, temperature=1.0):
        """As common.Policy's, of the mixture. ref_logp_BT, for the metric kl, is the reference's own.  [LA eq. 1]"""
        head, ref_head = self.model.get_output_embeddings(), self.reference.get_output_embeddings()

        def chunk_logp(hidden_CD, ref_hidden_CD, targets_C):
            logits_CV, ref_logits_CV = head(hidden_CD).float(), ref_head(ref_hidden_CD).float()
            logp_C = mixed_logp(logits_CV, ref_logits_CV, targets_C, self.ref_weight, temperature)
            return logp_C, mixed_logp(logits_CV.detach(), ref_logits_CV, targets_C, 1.0, temperature)

        rows = tokens_BL, prompt_len_B, completion_len_B
        with torch.autocast("cuda", torch.bfloat16, enabled=tokens_BL.is_cuda):
            hidden_ND, targets_N, row_N, t_N = common.completion_states(self.model, *rows)
            ref_hidden_ND = common.completion_states(self.reference, *rows)[0]      # frozen, so it builds no graph
            logp_N, ref_logp_N = common.in_chunks(chunk_logp, head.weight.shape[0], hidden_ND, ref_hidden_ND, targets_N)
        self.ref_logp_BT = common.lay_out(ref_logp_N, row_N, t_N, completion_len_B)
        return common.lay_out(logp_N, row_N, t_N, completion_len_B)


def gain_and_forget(engine, problems, prompts, cfg):
    """(P(mix right, theta alone wrong), P(mix wrong, theta alone right)) over held-out problems.  [LA adapt]"""
    settings = problems, prompts, cfg.eval_samples, cfg.max_new_tokens, cfg.temperature, cfg.seed
    mix_NS, theta_NS = (torch.tensor([result["rewards"] for result in common.evaluate(half, *settings)])
                        for half in (engine, engine.at(0.0)))
    return (mix_NS * (1 - theta_NS)).mean().item(), (theta_NS * (1 - mix_NS)).mean().item()


def group_advantages(rewards_PG, normalize_std=True):
    """Rewards (P, G) -> advantages (P, G), each against its own group; equal rewards give exactly 0.  [GRPO eq. 1]

    The standard deviation is the unbiased one (divided by G - 1). A group of one gets 0.
    """
    centered_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    equal_P1 = (rewards_PG == rewards_PG[:, :1]).all(dim=1, keepdim=True)      # their float mean may be a little off
    if normalize_std and rewards_PG.shape[1] > 1:
        centered_PG = centered_PG / (rewards_PG.std(dim=1, keepdim=True) + 1e-4)
    return torch.where(equal_P1, 0.0, centered_PG)


def token_loss(logp_BT, old_logp_BT, advantages_B, clip_low=0.2, clip_high=0.28):
    """-min(rho A, clip(rho) A) of every token (B, T), neither masked nor averaged.  [GRPO eq. 2, 3]"""
    ratio_BT = (logp_BT - old_logp_BT).exp()
    advantages_B1 = advantages_B[:, None]
    return -torch.min(ratio_BT * advantages_B1, ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_B1)


def k3_kl(logp_BT, ref_logp_BT):
    """The k3 estimate of KL(pi_theta || pi_ref), per token (B, T), in nats: never negative.  [GRPO eq. 4]"""
    log_ratio_BT = ref_logp_BT - logp_BT
    return log_ratio_BT.exp() - log_ratio_BT - 1


def aggregate(loss_BT, mask_BT, how, denominator):
    """Token losses (B, T) -> the micro-batch's share of the step's loss, a scalar.  [GRPO eq. 3]

    denominator: the count over the whole step, all processes: of tokens (how = "token"), of rows ("sequence"), or of
    rows * max_new_tokens ("constant"). So the shares add up to the same loss however the rows are split.
    """
    if how == "sequence":
        return ((loss_BT * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)).sum() / denominator
    return (loss_BT * mask_BT).sum() / denominator


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
    if not (0 if cfg.ref_weight_mode == "fixed" else 1e-6) <= cfg.ref_weight < 1 or cfg.adapt_every < 1:
        raise common.UserError("--ref_weight must be in [0, 1), above 0 if adaptive, and --adapt_every above 0.")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(hours=1))

    model_name = common.resolve_model(cfg.model)
    tokenizer = common.load_tokenizer(model_name)
    ref_name = common.resolve_model(cfg.ref_model or cfg.model)
    common.check_vocabulary(tokenizer, ref_name)
    policy = MixturePolicy(common.load_model(model_name), common.load_model(ref_name), cfg.ref_weight)
    common.check_window(policy.model.config, cfg)
    common.check_window(policy.reference.config, cfg)
    if cfg.gradient_checkpointing:
        policy.model.train().gradient_checkpointing_enable({"use_reentrant": False})      # works in train mode only
    shard(policy, device)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=cfg.lr, betas=(cfg.beta1, cfg.beta2),
                                  weight_decay=cfg.weight_decay, fused=True)

    train_set = common.load_problems(cfg.dataset, "train")
    test_set = common.load_problems(cfg.eval_dataset, "test", cfg.eval_problems)
    problems, prompts = common.encode_prompts(train_set, tokenizer, cfg.max_prompt_tokens)
    if cfg.ref_weight_mode == "adaptive":       # w is adapted on problems that are kept out of training and of the test
        stride = max(2, len(problems) // cfg.eval_problems)
        spare, spare_prompts = problems[::stride], prompts[::stride]
        del problems[::stride], prompts[::stride]
    held_out, held_out_prompts = common.encode_prompts(test_set, tokenizer, cfg.max_prompt_tokens)

    # Every process generates with an engine and weights of its own, so generation waits for nobody.
    log = common.RunLog(Path(__file__).stem, cfg, world_size)
    engine = common.make_engine(cfg, model_name, tokenizer, device, ref_name, cfg.ref_weight)
    if log.start > 0:
        common.load_checkpoint(log.dir, policy, optimizer)
        engine.ref_weight = policy.ref_weight.item()
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
        if cfg.ref_weight_mode == "adaptive" and step > 1 and (step - 1) % cfg.adapt_every == 0:
            gain, forget = gain_and_forget(engine, spare, spare_prompts, cfg)
            engine.ref_weight = adapt_ref_weight(gain, forget, cfg.ref_weight)
            policy.ref_weight.fill_(engine.ref_weight)
            clock.lap("adapt_s")
        rollout = engine.generate([prompts[order[place]] for place in places], cfg.group_size, cfg.max_new_tokens,
                                  cfg.temperature, seeds)
        engine.sleep()
        clock.lap("rollout_s")

        # 2. reward
        rewards = common.score(rollout.texts, [problem.answer for problem in batch for _ in range(cfg.group_size)])
        rewards_PG = torch.tensor(rewards).view(-1, cfg.group_size)
        clock.lap("reward_s")

        # 3. advantage
        advantages_B = group_advantages(rewards_PG, cfg.normalize_std).flatten()
        counted_B = rollout.finished_B | (not cfg.mask_truncated)           # rows that the loss counts
        moving_B = counted_B & (advantages_B != 0)      # the gradient of the others is exactly 0

        # 4. update
        old_logp_BT = common.old_logp(policy, rollout, torch.where(moving_B)[0], cfg, device)   # None: the policy
        for group in optimizer.param_groups:
            group["lr"] = common.learning_rate(cfg, step)
        means, loss_sum = common.Means(), 0.0
        for mini_batch in torch.arange(len(rewards)).chunk(cfg.updates_per_rollout):
            counted = mini_batch[counted_B[mini_batch]]
            n_tokens, n_rows = common.all_sum(rollout.completion_len_B[counted].sum(), len(counted))
            count = {"token": n_tokens, "sequence": n_rows, "constant": n_rows * cfg.max_new_tokens}[cfg.loss_agg]
            for rows, micro in common.micro_batches(rollout, mini_batch[moving_B[mini_batch]], cfg, device):
                logp_BT = policy(micro.tokens_BL, micro.prompt_len_B, micro.completion_len_B, cfg.temperature)
                old_BT = logp_BT.detach() if old_logp_BT is None else old_logp_BT[rows, :logp_BT.shape[1]].to(device)
                weight_BT = (old_BT - micro.logp_BT).exp().clamp(max=cfg.importance_cap)        # [TIS]
                loss_BT = weight_BT * token_loss(logp_BT, old_BT, advantages_B[rows].to(device),
                                                 cfg.clip_low, cfg.clip_high)
                means.add(micro.mask_BT, kl=k3_kl(logp_BT, policy.ref_logp_BT))
                loss = aggregate(loss_BT, micro.mask_BT, cfg.loss_agg, max(count, 1))
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
        metrics = common.rollout_metrics(rollout, rewards_PG, clock) | means.over_ranks()
        metrics |= {"loss": common.all_sum(loss_sum)[0], "grad_norm": common.full(grad_norm).item()}
        metrics["ref_weight"] = policy.ref_weight.item()
        if step % cfg.eval_every == 0 or step == cfg.steps:
            metrics |= common.evaluate_step(engine, held_out, held_out_prompts, cfg, log, step)
        log.samples(step, "train", batch[:1], rollout.texts[:1], rewards[:1])
        log.write(step, metrics)
        if step % cfg.save_every == 0 or step == cfg.steps:
            common.save_checkpoint(log.dir, step, policy, optimizer)

    common.export(policy.model, tokenizer, log.dir / "final", torch.bfloat16 if cuda else torch.float32,
                  policy.reference, policy.ref_weight.item())
    log.report(cfg.steps)


if __name__ == "__main__":
    try:
        main()
    except common.UserError as error:       # one sentence, no traceback, exit status 1, on every process
        raise SystemExit(f"error: {error}")
    if dist.is_initialized():       # after success only: with a failed peer, NCCL's own end may wait forever
        dist.destroy_process_group()
