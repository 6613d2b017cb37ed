"""LSPO, policy optimization with LoRA scaffolds: it also learns from the prompts that the policy always fails.

Paper: Ding, arXiv 2607.27787. There is no public code.

A group of answers that all fail is a cliff: its advantages are 0, so GRPO learns nothing from the hardest prompts. At
a cliff LSPO fits a throw-away LoRA adapter phi to the prompt's worked solution, samples the prompt again with it, and
puts the successes in the place of failures. Then phi is off, and the base theta takes GRPO's clipped step on the mended
groups, whose ratio says how likely the base itself finds what the scaffold wrote.

    cliff     max_i R_i < 1                                   over the G answers to one prompt                 [LSPO 1]
    fit       min_phi -mean_t log pi_{theta+phi}(s_t)         n AdamW steps per cliff on its solution s; theta is
              weights W + (alpha / r) B A, phi = all A and B  frozen, phi new at each step, B = 0 at first     [LSPO 2]
    re-roll   y'_1 .. y'_G ~ pi_{theta+phi}                   for each cliff; failures are dropped             [LSPO 3]
    splice    y_i <- y'_j, R_i <- 1                           lowest i, first j; at most G - 1 rows           [LSPO 4]
    A_i   = (R_i - mean(R)) / (std(R) + 1e-4)                 of the spliced group                         [GRPO eq. 1]
    rho   = pi_theta(y_t) / pi_{theta+phi}(y_t)               on spliced rows                                  [LSPO 5]
    rho   = pi_theta(y_t) / pi_old(y_t)                       on all others                                [GRPO eq. 2]
    J     = 1/N sum_i sum_t w min(rho A_i, clip(rho, 1 - eps_low, 1 + eps_high) A_i) - beta k3             [GRPO eq. 3]
    k3    = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1        as in grpo.py, off by default                [GRPO eq. 4]
    w     = min(pi_old(y_t) / pi_engine(y_t), cap)            pi_old is pi_{theta+phi} on spliced rows            [TIS]

Only G - 1 rows can go: with all G replaced the rewards are equal and the advantages 0 again. In a group of 16, one
success gets A = 3.75 against -0.25 for each failure, four get 1.68 against -0.56.

The gradient. A spliced row has A > 0, so each of its tokens contributes rho A grad log pi as long as rho is at most
1 + eps_high, and nothing above. What the base itself would hardly say (rho near 0) moves it hardly; what it would say
counts as if it had. phi gets no gradient from J, theta none from the fit. Without a cliff, or without a success, the
step is grpo.py's, bit for bit.

Different from grpo.py: the adapter (LoRALinear ... merged_weights), its fit, block 3 of main(), and the two rho in
block 4. The engine knows nothing of LoRA: it samples from merged weights, and gets the base's back after the update.

Published: rank 16, alpha 64, n = 4, scaffold lr 2.5e-5, lr 1e-6, clip .2/.28, no KL, 32 prompts x 16, 1000 steps, the
model, the data. Not published, ours: the target modules; one example per scaffold step; no dropout, weight decay or
gradient clipping in the fit; at most G - 1 rows; lengths.

Published results: 15 of 16 (benchmark, k) cells won and one tied against DAPO over five seeds, +3.8 points on average;
43% of 10,864 cliffs rescued, at a pass rate of 5.8%. Caveats: LSPO reads solutions and samples cliffs twice, and GRPO
does neither. Plain luck rescues too: a prompt that succeeds with probability .03 is a cliff of 16 with .61, and 16 more
plain samples rescue it with .39. So compare with the control arm below, never with grpo.py alone. A scaffold may also
teach how the data set words its solutions instead of how to solve; rho is all that holds this back.

    python lspo.py                                                    # a laptop: the built-in task, two minutes
    python lspo.py --scaffold_steps 0                                 # the control arm: cliffs re-rolled by the policy
    python lspo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset math --eval_dataset math500 --max_new_tokens 2048
    torchrun --nproc_per_node 8 lspo.py --model deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B                 # eight GPUs
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 lspo.py ...     # on each node
    python lspo.py --resume runs/NAME                                                # go on from the last checkpoint

Logged besides grpo.py's metrics, of which reward, length, entropy and the like describe the policy's own answers,
before the splice, and loss, clip_frac, kl and engine_gap the spliced groups: cliffs; cliffs_left, those
among them without a solution of at most max_new_tokens tokens, which are left alone; rescued, the groups with a spliced
row; swapped, the spliced rows; reroll_success, the share of re-rolled answers that succeed; splice_log_rho and
splice_log_rho_max, the mean and the largest |log rho| over the tokens of spliced rows; splice_clip_frac, the share of
them with rho above 1 + eps_high, which teach nothing; scaffold_loss_before and scaffold_loss_after, the solutions' mean
cross-entropy in the first and the last pass of the fit (where there was one); scaffold_s, the seconds of block 3.
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
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import common
from common import arg

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")    # not published; ours


@dataclass
class Config:
    model: str = arg("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "folder or hub name of a causal LM, or tiny (paper)")
    dataset: str = arg("deepmath", "training problems with solutions: a name or a file, see README (paper)")
    eval_dataset: str = arg("math500", "held-out problems")
    steps: int = arg(1000, "rollouts in all (paper)")
    prompts_per_step: int = arg(32, "prompts per rollout, over all processes (paper)")
    group_size: int = arg(16, "completions per prompt, G (paper)")
    updates_per_rollout: int = arg(1, "mini-batches, one optimizer step each, that a rollout is cut into")
    max_prompt_tokens: int = arg(1024, "longer prompts are dropped, never cut")
    max_new_tokens: int = arg(8192, "completion length limit (not published; ours)")
    temperature: float = arg(1.0, "sampling temperature, in training and evaluation (papers: 1)")
    lr: float = arg(1e-6, "AdamW learning rate of the base (paper)")
    lr_schedule: Literal["constant", "linear", "cosine"] = arg("constant", "after warm-up (DAPO: constant)")
    warmup_steps: int = arg(10, "steps of linear learning-rate warm-up (not published; ours)")
    beta1: float = arg(0.9, "AdamW beta 1 (not published; ours)")
    beta2: float = arg(0.95, "AdamW beta 2 (not published; ours)")
    weight_decay: float = arg(0.0, "AdamW weight decay (not published; ours)")
    grad_clip: float = arg(1.0, "largest gradient norm (not published; ours)")
    clip_low: float = arg(0.2, "eps_low (paper)")
    clip_high: float = arg(0.28, "eps_high (paper)")
    kl_coef: float = arg(0.0, "beta of the KL penalty; above 0 a frozen reference model is loaded (DAPO: 0)")
    loss_agg: Literal["token", "sequence", "constant"] = arg(
        "token", "mean over tokens (DAPO), over rows of row means (GRPO), or sum / (rows * max_new_tokens) (Dr. GRPO)")
    normalize_std: bool = arg(True, "divide advantages by the group's standard deviation (Dr. GRPO: no)")
    mask_truncated: bool = arg(False, "leave unfinished completions out of the loss")
    importance_cap: float = arg(2.0, "cap of the engine correction w (TIS: 2)")
    old_logp: Literal["trainer", "engine"] = arg("trainer", "pi_old of unspliced rows: the trainer's or the engine's")
    lora_rank: int = arg(16, "rank r of the scaffold (paper)")
    lora_alpha: float = arg(64.0, "the scaffold adds alpha / r B A to a matrix (paper)")
    scaffold_steps: int = arg(4, "n, scaffold steps per cliff; 0: sample cliffs again without a scaffold (paper: 4)")
    scaffold_lr: float = arg(2.5e-5, "AdamW learning rate of the scaffold (paper)")
    allow_missing_solutions: bool = arg(False, "accept a data set without solutions: the run is then one of grpo.py")
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


# The built-in task, on a CPU: under two minutes on two cores. Chains of 7 and 8 terms are cliffs at first.
TINY = dict(model="tiny", dataset="arithmetic:3-8", eval_dataset="arithmetic", steps=200, prompts_per_step=16,
            max_prompt_tokens=64, max_new_tokens=96, lr=3e-4, lr_schedule="linear", beta2=0.99, eval_every=20,
            eval_samples=4, group_size=8, scaffold_lr=3e-3)


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


def find_cliffs(rewards_PG, success=1.0):
    """The groups without one success: (P,), True where every reward of a group is below `success`.  [LSPO 1]"""
    return (rewards_PG < success).all(dim=1)


def splice_plan(failed_rows, reroll_rewards, max_swaps, success=1.0):
    """Which row of a group is replaced by which re-rolled answer: [(row, index of the answer)].  [LSPO 4]

    The lowest failed row takes the first success, and so on, at most max_swaps times.
    """
    successes = [index for index, reward in enumerate(reroll_rewards) if reward >= success]
    return list(zip(sorted(failed_rows), successes))[:max_swaps]


def splice(rollout, reroll, swaps):
    """The rollout with row i of it replaced by row j of `reroll` for each (i, j) of `swaps`.  [LSPO 4]"""
    rows = list(range(len(rollout.texts)))
    for row, index in swaps:
        rows[row] = len(rollout.texts) + index
    both = common.Rollout(pad_sequence([*rollout.tokens_BL, *reroll.tokens_BL], batch_first=True),
                          torch.cat([rollout.prompt_len_B, reroll.prompt_len_B]),
                          torch.cat([rollout.completion_len_B, reroll.completion_len_B]),
                          pad_sequence([*rollout.logp_BT, *reroll.logp_BT], batch_first=True),
                          torch.cat([rollout.finished_B, reroll.finished_B]), rollout.texts + reroll.texts)
    return both.select(rows)


class LoRALinear(nn.Module):
    """A linear layer with a low-rank term beside it, W x + b + scale B A x; at scale 0 it is the layer.  [LSPO 2]

    Weight and bias are the layer's own and keep their names. A and B are buffers that no state dict holds: optimizer,
    gradient norm, FSDP, checkpoint, export and engine all see the model as it was. So every process has a whole phi;
    at 1% of the weights that is no burden.
    """

    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.weight, self.bias, self.scale = linear.weight, linear.bias, alpha / rank
        self.register_buffer("lora_A", linear.weight.new_zeros(rank, linear.in_features), persistent=False)
        self.register_buffer("lora_B", linear.weight.new_zeros(linear.out_features, rank), persistent=False)

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return y if self.scale == 0 else y + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)


def lora_layers(model):
    return [module for module in model.modules() if isinstance(module, LoRALinear)]


def add_lora(model, rank, alpha, targets):
    """Put a LoRALinear in the place of every linear layer that bears a name of `targets`; returns phi."""
    for name, module in list(model.named_modules()):
        parent, _, child = name.rpartition(".")
        if child in targets and isinstance(module, nn.Linear):
            setattr(model.get_submodule(parent), child, LoRALinear(module, rank, alpha))
    if not lora_layers(model):
        raise common.UserError(f"The model has no linear layer named {', '.join(targets)}: change LORA_TARGETS.")
    return reset_lora(model)


def reset_lora(model, seed=0):
    """Make phi new: A uniform in +-1 / sqrt(columns), as nn.Linear begins, and B = 0. Returns all A and B.  [LSPO 2]"""
    generator = torch.Generator().manual_seed(seed)
    for layer in lora_layers(model):
        bound = layer.lora_A.shape[1] ** -0.5
        fresh_A = torch.empty(layer.lora_A.shape).uniform_(-bound, bound, generator=generator)
        layer.lora_A = fresh_A.to(layer.lora_A).requires_grad_()
        layer.lora_B = torch.zeros_like(layer.lora_B, requires_grad=True)
    return [tensor for layer in lora_layers(model) for tensor in (layer.lora_A, layer.lora_B)]


def set_lora_scale(model, scale):
    """Make the model pi_{theta+phi}, with alpha / rank, or pi_theta, bit for bit, with 0."""
    for layer in lora_layers(model):
        layer.scale = scale


@torch.no_grad()
def merged_weights(model):
    """As named_weights, with W + scale B A where an adapter is: a model without LoRA that says the same.  [LSPO 2]"""
    layers = dict(model.named_modules())
    for name, weight in common.named_weights(model):
        layer = layers[name.rpartition(".")[0]]
        if isinstance(layer, LoRALinear) and name.endswith(".weight"):
            weight = weight + layer.scale * layer.lora_B @ layer.lora_A
        yield name, weight


def solution_ids(problem, tokenizer, limit):
    """The worked solution and a stop token as token ids; None where there is no solution, or one of over `limit`."""
    ids = tokenizer(problem.solution or "", add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
    return ids if problem.solution and len(ids) <= limit else None


def fit_scaffold(policy, examples, cfg, step, device):
    """Fit a new phi to examples [(prompt ids, solution ids)] and leave it on. Returns each pass's mean loss.  [LSPO 2]

    One example a step leaves nothing to share out: all processes go through the same ones, in the same order.
    """
    phi = reset_lora(policy.model, common.stream_seed(cfg.seed, "phi", step))
    optimizer = torch.optim.AdamW(phi, lr=cfg.scaffold_lr, weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(common.stream_seed(cfg.seed, "scaffold", step))
    set_lora_scale(policy.model, cfg.lora_alpha / cfg.lora_rank)
    policy.requires_grad_(False)        # theta; phi are no parameters
    passes = []
    for _ in range(cfg.scaffold_steps):
        total = 0.0
        for i in torch.randperm(len(examples), generator=generator).tolist():
            prompt, solution = examples[i]
            lengths = torch.tensor([[len(prompt)], [len(solution)]], device=device)
            loss = -policy(torch.tensor([prompt + solution], device=device), *lengths).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        passes.append(total / len(examples))
    policy.requires_grad_(True)
    if dist.is_initialized():
        for tensor in phi:              # GPUs may differ in the last bit: all processes go on with rank 0's
            dist.broadcast(tensor.detach(), src=0)
    return passes


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
    if cfg.lora_rank < 1 or cfg.scaffold_steps < 0 or not cfg.scaffold_lr > 0:
        raise common.UserError("--lora_rank must be at least 1, --scaffold_steps at least 0 and --scaffold_lr above 0.")
    if cfg.engine_parallel > 1:
        raise common.UserError("--engine_parallel must be 1: processes without a cliff do not sample again.")
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
    add_lora(policy.model, cfg.lora_rank, cfg.lora_alpha, LORA_TARGETS)
    set_lora_scale(policy.model, 0)
    shard(policy, device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, betas=(cfg.beta1, cfg.beta2),
                                  weight_decay=cfg.weight_decay, fused=True)
    reference = shard(common.Policy(common.load_model(model_name)), device) if cfg.kl_coef > 0 else None

    train_set = common.load_problems(cfg.dataset, "train")
    if not (cfg.allow_missing_solutions or any(problem.solution for problem in train_set)):
        raise common.UserError(f"--dataset {cfg.dataset} has no worked solutions to fit a scaffold on: take one that "
                               "has, or give --allow_missing_solutions to train as grpo.py does.")
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

        # 3. scaffold, advantage
        sampled, sampled_PG = rollout, rewards_PG.clone()       # the policy's own answers, for the log
        cliffs = torch.where(find_cliffs(rewards_PG))[0].tolist()                                       # [LSPO 1]
        solutions = {p: solution_ids(batch[p], tokenizer, cfg.max_new_tokens) for p in cliffs}
        mine = [p for p in cliffs if solutions[p]]
        parts = common.all_gather([(int(places[p]), prompts[order[places[p]]], solutions[p]) for p in mine])
        examples = [example for _, *example in sorted(sum(parts, []))]      # all processes' cliffs, in one order
        passes, swaps, successes = [], [], 0
        if examples:
            passes = fit_scaffold(policy, examples, cfg, step, device)
            engine.load_weights(merged_weights(policy.model))
            engine.wake()
        if mine:
            seeds = [common.stream_seed(cfg.seed, "reroll", step, int(places[p])) for p in mine]
            reroll = engine.generate([prompts[order[places[p]]] for p in mine], cfg.group_size, cfg.max_new_tokens,
                                     cfg.temperature, seeds)                                            # [LSPO 3]
            answers = [batch[p].answer for p in mine for _ in range(cfg.group_size)]
            reroll_PG = torch.tensor(common.score(reroll.texts, answers)).view(-1, cfg.group_size)
            successes = (reroll_PG >= 1).sum()
            for i, p in enumerate(mine):
                for row, index in splice_plan(range(cfg.group_size), reroll_PG[i], cfg.group_size - 1):
                    swaps.append((p * cfg.group_size + row, i * cfg.group_size + index))
            rollout = splice(rollout, reroll, swaps)
        spliced = torch.tensor([row for row, _ in swaps], dtype=torch.long)
        rewards_PG.view(-1)[spliced] = 1.0
        if examples:
            engine.sleep()
            scaffold_logp_BT = common.policy_logp(policy, rollout, spliced, cfg, device)
            set_lora_scale(policy.model, 0)
        clock.lap("scaffold_s")
        advantages_B = group_advantages(rewards_PG, cfg.normalize_std).flatten()
        counted_B = rollout.finished_B | (not cfg.mask_truncated)           # rows that the loss counts
        moving_B = counted_B & ((advantages_B != 0) | (cfg.kl_coef > 0))    # the gradient of the others is exactly 0

        # 4. update
        old_logp_BT = common.old_logp(policy, rollout, torch.where(moving_B)[0], cfg, device)   # None: the policy
        for group in optimizer.param_groups:
            group["lr"] = common.learning_rate(cfg, step)
        means, loss_sum = common.Means(), 0.0
        log_rhos = []       # of every token of the spliced rows
        for mini_batch in torch.arange(len(rewards)).chunk(cfg.updates_per_rollout):
            counted = mini_batch[counted_B[mini_batch]]
            n_tokens, n_rows = common.all_sum(rollout.completion_len_B[counted].sum(), len(counted))
            count = {"token": n_tokens, "sequence": n_rows, "constant": n_rows * cfg.max_new_tokens}[cfg.loss_agg]
            for rows, micro in common.micro_batches(rollout, mini_batch[moving_B[mini_batch]], cfg, device):
                logp_BT = policy(micro.tokens_BL, micro.prompt_len_B, micro.completion_len_B, cfg.temperature)
                old_BT = logp_BT.detach() if old_logp_BT is None else old_logp_BT[rows, :logp_BT.shape[1]].to(device)
                if examples:
                    spliced_B1 = torch.isin(torch.tensor(rows), spliced)[:, None].to(device)
                    scaffold_BT = scaffold_logp_BT[rows, :logp_BT.shape[1]].to(device)
                    old_BT = torch.where(spliced_B1, scaffold_BT, old_BT)                               # [LSPO 5]
                    log_rhos += (logp_BT.detach() - old_BT)[spliced_B1 & micro.mask_BT.bool()].tolist()
                weight_BT = (old_BT - micro.logp_BT).exp().clamp(max=cfg.importance_cap)        # [TIS]
                loss_BT = weight_BT * token_loss(logp_BT, old_BT, advantages_B[rows].to(device),
                                                 cfg.clip_low, cfg.clip_high)
                if reference is not None:
                    with torch.no_grad():
                        ref_BT = reference(micro.tokens_BL, micro.prompt_len_B, micro.completion_len_B, cfg.temperature)
                    kl_BT = k3_kl(logp_BT, ref_BT)
                    loss_BT = loss_BT + cfg.kl_coef * kl_BT
                    means.add(micro.mask_BT, kl=kl_BT)
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
        metrics = common.rollout_metrics(sampled, sampled_PG, clock) | means.over_ranks()
        metrics |= {"loss": common.all_sum(loss_sum)[0], "grad_norm": common.full(grad_norm).item()}
        n_cliffs, left, rescued, swapped, successes, above, log_rho, n = common.all_sum(
            len(cliffs), len(cliffs) - len(mine), len({row // cfg.group_size for row, _ in swaps}), len(swaps),
            successes, sum(x > math.log(1 + cfg.clip_high) for x in log_rhos), sum(map(abs, log_rhos)), len(log_rhos))
        metrics |= {"cliffs": n_cliffs, "cliffs_left": left, "rescued": rescued, "swapped": swapped,
                    "reroll_success": successes / max(len(examples) * cfg.group_size, 1),
                    "splice_log_rho": log_rho / max(n, 1), "splice_clip_frac": above / max(n, 1),
                    "splice_log_rho_max": max(common.all_gather(max(map(abs, log_rhos), default=0.0)))}
        if passes:
            metrics |= {"scaffold_loss_before": passes[0], "scaffold_loss_after": passes[-1]}
        if step % cfg.eval_every == 0 or step == cfg.steps:
            metrics |= common.evaluate_step(engine, held_out, held_out_prompts, cfg, log, step)
        log.samples(step, "train", batch[:1], sampled.texts[:1], rewards[:1])
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
