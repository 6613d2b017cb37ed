"""mu-GRPO: a few huge stages of stale data in place of a rollout every few updates.

Paper: "How Off-Policy Can GRPO Be? mu-GRPO for Efficient LLM Reinforcement Learning" (arXiv 2605.17570). The authors'
code is not released; what neither paper nor project page says is marked "ours" in Config.

mu is the number of optimizer updates made on one set of rollouts before it is refreshed: 1 to 4 in a usual run, 1024
here. A run of U updates is cut into S stages; each freezes the policy, generates the data of all its updates in one go,
and then trains on them with ratios against the log-probabilities recorded while sampling, which never change within
the stage. Stale data would be clipped away or would tear the policy apart, so the clip range is wide, and a negative
response that the policy has left behind is taken out of the loss.

    U = n_1 + ... + n_S, n_s = U/S           U = 4096, S = 4: rollouts at 0, 1024, 2048, 3072          [mu-GRPO stages]
    A_i   = (R_i - mean(R)) / (std(R) + 1e-4)                over the G answers to one prompt             [GRPO eq. 1]
    rho   = pi_theta(y_t) / pi_engine(y_t)                   as the engine recorded it at the stage's start
    J     = 1/N sum_i sum_t M (min(rho A_i, clip(rho, 0, 5) A_i) - beta k3)                              [mu-GRPO clip]
    M     = 0 on all of a response with A_i < 0 in which a token has rho < 1e-4, else 1                  [mu-GRPO veto]
    k3    = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1       beta = 0 here                                [GRPO eq. 4]

N counts the tokens of the update that M keeps, over all processes and micro-batches, at least 1      [mu-GRPO count]

With the other two of --loss_agg the rows are counted as in grpo.py.

What happens to the gradient: inside the range a token's gradient is rho A grad log pi. GRPO's [0.8, 1.2] drops every
positive token above 1.2 and every negative token below 0.8, which is most of them once the policy has moved. [0, 5]
keeps positive tokens up to a ratio of 5 and never clips a negative one; those below 0.8 are still pushed down, by rho
|A|. A token with rho < 1e-4, a trigger, has hardly a gradient of its own; the harm is done by the tokens around it,
pushed down in a context that the policy would not write any more. --veto_scope says which tokens go: none; trigger,
the triggers alone; suffix, those strictly after the first trigger; suffix_non_trigger, the suffix without triggers;
sequence, the whole response. The veto is decided anew at each update, by that update's ratios. Responses with A >= 0
are never touched, and advantages are not centred again. Right after a rollout rho is 1, but for the engine's numerics:
nothing is clipped or vetoed, and the gradient is GRPO's.

N can't be counted before the ratios are known, and they come from the forward pass that the gradient needs anyway. So
the loss is divided by all tokens first, and where some were vetoed the summed gradient is multiplied by all / kept
before it is clipped: exact, since the gradient is linear in 1/N, and it costs no second forward pass.

What differs from grpo.py: a step, a row of the log, is one update on prompts_per_step prompts, not one rollout. The
engine gets weights at a stage's start, not after each update; an evaluation loads the current ones and leaves the
stage's stored data as they are. There is no importance weight, for pi_old is the engine itself. The prompts come in a
random order, so a stage is one shuffled pass over its data with whole groups together. With clip range [0.8, 1.2],
veto_scope none, stages = steps / 4 and a constant rate without warm-up (0 or 1 steps: a rate holds for one update here
and for all four there) this is grpo.py at a quarter of the steps, 4 times the prompts, updates_per_rollout 4,
clip_high 0.2 and old_logp engine, bit for bit. Rewards and advantages are functions of the stored texts and are
computed at the update that uses them. The stage's rollouts are saved with the checkpoint, so a killed run goes on
inside its stage, with the same number of processes. At the published size a stage has 524,288 completions: up to 20 GB
in the memory of the host or hosts, and in each checkpoint.

The published setting: U = 4096, S = 4, the clip range, the threshold and the scopes. Not published: learning rate,
batch, group size, data, lengths; those here are ours. The abstract vetoes the suffix, while the reported runs match
the scope sequence (their curves coincide), hence the default. Averages over math benchmarks, GRPO (mu = 4) -> mu-GRPO:
Llama-3.2-3B 22.6 -> 22.9, Qwen2.5-Math-7B 47.3 -> 48.0, Qwen3-1.7B 29.5 -> 29.7, Qwen3-8B 50.3 -> 48.2 (a loss),
DeepSeek-7B 66.1 -> 68.6; rollouts 1.82x and the run 1.53x faster, the mean of these five. As many completions are
generated as before: the gain is 4 engine switches instead of 1024, and larger generation batches. It is not free: on
the built-in task 4 stages at grpo.py's learning rate end at 0.57 held-out pass@1, at a third of it at 0.82, where
on-policy updates reach 0.82 and 0.85 (means of five seeds, benchmarks/results/mu_grpo_stages.md).

    python mu_grpo.py                                                 # a laptop: the built-in task, two minutes
    python mu_grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k --steps 512                      # one GPU
    torchrun --nproc_per_node 8 mu_grpo.py --model Qwen/Qwen2.5-Math-7B --dataset deepscaler              # eight GPUs
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 mu_grpo.py ...  # on each node
    python mu_grpo.py --resume runs/NAME                                             # go on from the last checkpoint

Logged besides what every file logs (README); reward, length and the like are those of the update's own prompts:
staleness, the updates since these data were generated, 0 to n_s - 1; clip_frac, the share of tokens whose ratio is
outside the clip range; veto_frac, the share of the A < 0 tokens that are vetoed; negative_ratio, the mean ratio of the
A < 0 tokens, which drops towards 0 before a collapse; kl, the mean k3 (with beta > 0); engine_gap, on a stage's first
row, where it is not yet the policy's own movement; entropy is that at sampling.
rollout_s and sync_s, the generation of a whole stage and the loading of its engine's weights, stand on the stage's
first row and are about 0 on the others; tokens_per_s divides the row's tokens by the row's seconds, so it dips there.
"""

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
    model: str = arg("Qwen/Qwen2.5-Math-7B", "folder or hub name of a causal LM, or tiny (paper: one of five)")
    dataset: str = arg("deepscaler", "training problems: a name or a file, see README (not published; ours)")
    eval_dataset: str = arg("math500", "held-out problems (not published; ours)")
    steps: int = arg(4096, "updates in all, U (paper)")
    stages: int = arg(4, "rollouts in all, S, each for steps / stages updates, mu (paper)")
    prompts_per_step: int = arg(64, "prompts per update, over all processes (not published; ours)")
    group_size: int = arg(8, "completions per prompt, G (not published; ours)")
    updates_per_rollout: int = arg(1, "stays 1 here: a rollout is cut by --steps and --stages")
    max_prompt_tokens: int = arg(1024, "longer prompts are dropped, never cut")
    max_new_tokens: int = arg(2560, "completion length limit (not published; ours)")
    temperature: float = arg(1.0, "sampling temperature, in training and evaluation (papers: 1)")
    lr: float = arg(1e-6, "AdamW learning rate (not published; ours)")
    lr_schedule: Literal["constant", "linear", "cosine"] = arg("constant", "after warm-up (not published; ours)")
    warmup_steps: int = arg(10, "steps of linear learning-rate warm-up (not published; ours)")
    beta1: float = arg(0.9, "AdamW beta 1 (not published; ours)")
    beta2: float = arg(0.95, "AdamW beta 2 (not published; ours)")
    weight_decay: float = arg(0.0, "AdamW weight decay (not published; ours)")
    grad_clip: float = arg(1.0, "largest gradient norm (not published; ours)")
    clip_min: float = arg(0.0, "smallest ratio with a gradient where A < 0 (paper; GRPO: 0.8)")
    clip_max: float = arg(5.0, "largest ratio with a gradient where A > 0 (paper; GRPO: 1.2)")
    veto_scope: Literal["none", "trigger", "suffix", "suffix_non_trigger", "sequence"] = arg(
        "sequence", "what leaves the loss of a response with A < 0 that holds a trigger (paper's runs)")
    veto_threshold: float = arg(1e-4, "a trigger is a token whose ratio is below this (paper)")
    kl_coef: float = arg(0.0, "beta of the KL penalty; above 0 a frozen reference model is loaded (DAPO: 0)")
    loss_agg: Literal["token", "sequence", "constant"] = arg(
        "token", "mean over tokens (DAPO), over rows of row means (GRPO), or sum / (rows * max_new_tokens) (Dr. GRPO)")
    normalize_std: bool = arg(True, "divide advantages by the group's standard deviation (Dr. GRPO: no)")
    mask_truncated: bool = arg(False, "leave unfinished completions out of the loss")
    seed: int = arg(0, "names every random stream of the run")
    micro_batch_tokens: int = arg(16384, "tokens per forward and backward, padding included: for memory only")
    gradient_checkpointing: bool = arg(False, "recompute activations in backward: less memory, a third more time")
    engine: Literal["auto", "vllm", "hf"] = arg("auto", "what generates; auto: vLLM on CUDA if installed, else hf")
    engine_rows: int = arg(512, "completions that the engine works on at a time")
    engine_memory: float = arg(0.45, "share of the GPU's memory that vLLM may take while it generates")
    engine_parallel: int = arg(1, "GPUs of a node that share one vLLM engine (tensor parallelism)")
    eval_every: int = arg(128, "steps between evaluations; each loads the weights into the engine")
    eval_samples: int = arg(1, "completions per held-out problem")
    eval_problems: int = arg(256, "the first so many held-out problems")
    save_every: int = arg(50, "steps between checkpoints; one more at the end")
    run_dir: str = arg("", "the run's folder (default runs/<algorithm>-<model>-<dataset>-<time>)")
    resume: str = arg("", "continue the run in this folder, with its settings")
    tensorboard: bool = arg(False, "also log to TensorBoard")
    wandb: bool = arg(False, "also log to Weights & Biases")


# The built-in task, on a CPU: 2 minutes on two cores. Stale data call for a smaller rate than grpo.py's 3e-4.
TINY = dict(model="tiny", dataset="arithmetic", eval_dataset="arithmetic", steps=300, prompts_per_step=16,
            max_prompt_tokens=64, max_new_tokens=96, lr=1e-4, beta2=0.99, eval_every=20,
            eval_samples=4)


def stage_lengths(updates, stages):
    """The number of updates of each stage, a list; a remainder goes to the first stages.  [mu-GRPO stages]"""
    return [updates // stages + (stage < updates % stages) for stage in range(stages)]


def group_advantages(rewards_PG, normalize_std=True):
    """Rewards (P, G) -> advantages (P, G), each against its own group; equal rewards give exactly 0.  [GRPO eq. 1]

    The standard deviation is the unbiased one (divided by G - 1). A group of one gets 0.
    """
    centered_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    equal_P1 = (rewards_PG == rewards_PG[:, :1]).all(dim=1, keepdim=True)      # their float mean may be a little off
    if normalize_std and rewards_PG.shape[1] > 1:
        centered_PG = centered_PG / (rewards_PG.std(dim=1, keepdim=True) + 1e-4)
    return torch.where(equal_P1, 0.0, centered_PG)


def relaxed_token_loss(logp_BT, old_logp_BT, advantages_B, clip_min=0.0, clip_max=5.0):
    """-min(rho A, clip(rho) A) of every token (B, T), neither masked nor averaged.  [mu-GRPO clip]"""
    ratio_BT = (logp_BT - old_logp_BT).exp()
    advantages_B1 = advantages_B[:, None]
    return -torch.min(ratio_BT * advantages_B1, ratio_BT.clamp(clip_min, clip_max) * advantages_B1)


def veto_mask(ratio_BT, advantages_B, mask_BT, threshold=1e-4, scope="sequence"):
    """mask_BT without the vetoed tokens of responses with A < 0: 1 on what the loss keeps, else 0.  [mu-GRPO veto]"""
    trigger_BT = (ratio_BT < threshold) & (mask_BT > 0) & (advantages_B[:, None] < 0)
    suffix_BT = trigger_BT.cumsum(1) > trigger_BT.long()        # one of the tokens before this one is a trigger
    vetoed_BT = {"none": torch.zeros_like(trigger_BT), "trigger": trigger_BT, "suffix": suffix_BT,
                 "suffix_non_trigger": suffix_BT & ~trigger_BT, "sequence": trigger_BT.any(1, keepdim=True)}[scope]
    return mask_BT * ~vetoed_BT


def k3_kl(logp_BT, ref_logp_BT):
    """The k3 estimate of KL(pi_theta || pi_ref), per token (B, T), in nats: never negative.  [GRPO eq. 4]"""
    log_ratio_BT = ref_logp_BT - logp_BT
    return log_ratio_BT.exp() - log_ratio_BT - 1


def aggregate(loss_BT, mask_BT, how, denominator):
    """Token losses (B, T) -> the micro-batch's share of the step's loss, a scalar.  [mu-GRPO clip]

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
    if cfg.updates_per_rollout != 1:
        raise common.UserError("--updates_per_rollout must be 1 here: --stages says how often there is a rollout.")
    if not 1 <= cfg.stages <= cfg.steps:
        raise common.UserError(f"--stages {cfg.stages} must be between 1 and --steps {cfg.steps}.")
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
    reference = shard(common.Policy(common.load_model(model_name)), device) if cfg.kl_coef > 0 else None

    train_set = common.load_problems(cfg.dataset, "train")
    test_set = common.load_problems(cfg.eval_dataset, "test", cfg.eval_problems)
    problems, prompts = common.encode_prompts(train_set, tokenizer, cfg.max_prompt_tokens)
    held_out, held_out_prompts = common.encode_prompts(test_set, tokenizer, cfg.max_prompt_tokens)

    # Every process generates with an engine and weights of its own, so generation waits for nobody.
    log = common.RunLog(Path(__file__).stem, cfg, world_size)
    engine = common.make_engine(cfg, model_name, tokenizer, device)
    if log.start > 0:
        processes, stage_rollout = common.load_checkpoint(log.dir, policy, optimizer) or (world_size, None)
        common.agree(None if processes == world_size else f"--resume {log.dir}: the checkpoint is inside a stage whose "
                     f"rollout lies with {processes} processes, and there are {world_size} now: start {processes}.")
    else:
        log.write(0, common.evaluate_step(engine, held_out, held_out_prompts, cfg, log, 0))

    # Of each step: the number of its stage, that stage's length, and how many updates its data are old.
    lengths = stage_lengths(cfg.steps, cfg.stages)
    plan = [(stage, length, staleness) for stage, length in enumerate(lengths, 1) for staleness in range(length)]
    for step in range(log.start + 1, cfg.steps + 1):
        # 1. rollout, of a whole stage on its first step; each step then takes its own part. Prompts are dealt so that a
        # step holds the same ones on any number of processes.
        clock = common.Clock()
        stage, length, staleness = plan[step - 1]
        order = common.data_order(len(problems), lengths[0] * cfg.prompts_per_step, stage, cfg.seed)
        places = torch.arange(length * cfg.prompts_per_step).view(length, world_size, -1)[:, rank]
        batch = [problems[order[place]] for place in places[staleness]]
        if staleness == 0:
            engine.load_weights(common.named_weights(policy.model))
            clock.lap("sync_s")
            seeds = [common.stream_seed(cfg.seed, "rollout", stage, int(place)) for place in places.flatten()]
            engine.wake()
            stage_rollout = engine.generate([prompts[order[place]] for place in places.flatten()], cfg.group_size,
                                            cfg.max_new_tokens, cfg.temperature, seeds)
        engine.sleep()      # on later steps too: an evaluation or a resume inside a stage leaves it awake
        rollout = stage_rollout.select(torch.arange(len(stage_rollout.texts)).chunk(length)[staleness])
        clock.lap("rollout_s")

        # 2. reward
        rewards = common.score(rollout.texts, [problem.answer for problem in batch for _ in range(cfg.group_size)])
        rewards_PG = torch.tensor(rewards).view(-1, cfg.group_size)
        clock.lap("reward_s")

        # 3. advantage
        advantages_B = group_advantages(rewards_PG, cfg.normalize_std).flatten()
        counted_B = rollout.finished_B | (not cfg.mask_truncated)           # rows that the loss counts
        moving_B = counted_B & ((advantages_B != 0) | (cfg.kl_coef > 0))    # the gradient of the others is exactly 0

        # 4. update
        for group in optimizer.param_groups:
            group["lr"] = common.learning_rate(cfg, step)
        means, loss_sum, n_vetoed = common.Means(), 0.0, 0.0
        for mini_batch in torch.arange(len(rewards)).chunk(cfg.updates_per_rollout):
            counted = mini_batch[counted_B[mini_batch]]
            n_tokens, n_rows = common.all_sum(rollout.completion_len_B[counted].sum(), len(counted))
            count = {"token": n_tokens, "sequence": n_rows, "constant": n_rows * cfg.max_new_tokens}[cfg.loss_agg]
            for rows, micro in common.micro_batches(rollout, mini_batch[moving_B[mini_batch]], cfg, device):
                logp_BT = policy(micro.tokens_BL, micro.prompt_len_B, micro.completion_len_B, cfg.temperature)
                ratio_BT = (logp_BT.detach() - micro.logp_BT).exp()
                signed_B = advantages_B[rows].to(device)
                kept_BT = veto_mask(ratio_BT, signed_B, micro.mask_BT, cfg.veto_threshold, cfg.veto_scope)
                loss_BT = relaxed_token_loss(logp_BT, micro.logp_BT, signed_B, cfg.clip_min, cfg.clip_max)
                if reference is not None:
                    with torch.no_grad():
                        ref_BT = reference(micro.tokens_BL, micro.prompt_len_B, micro.completion_len_B, cfg.temperature)
                    kl_BT = k3_kl(logp_BT, ref_BT)
                    loss_BT = loss_BT + cfg.kl_coef * kl_BT
                    means.add(micro.mask_BT, kl=kl_BT)
                loss = aggregate(loss_BT, kept_BT, cfg.loss_agg, max(count, 1))
                (loss * world_size).backward()      # FSDP averages over processes; global counts call for the sum
                loss_sum += loss.item() / cfg.updates_per_rollout
                n_vetoed += (micro.mask_BT - kept_BT).sum().item()
                clipped_BT = (ratio_BT < cfg.clip_min) | (ratio_BT > cfg.clip_max)
                means.add(micro.mask_BT, clip_frac=clipped_BT, engine_gap=(logp_BT - micro.logp_BT).abs())
                means.add(micro.mask_BT * (signed_B < 0)[:, None], negative_ratio=ratio_BT, veto_frac=1 - kept_BT)
            # Only now is it known how many tokens are vetoed. The gradient is linear in 1/N: put N right afterwards.
            vetoed, = common.all_sum(n_vetoed)
            if vetoed and cfg.loss_agg == "token":
                rescale = count / max(count - vetoed, 1)                                        # [mu-GRPO count]
                loss_sum *= rescale
                for parameter in policy.parameters():
                    parameter.grad *= rescale
            grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
        clock.lap("update_s")

        # 5. log, evaluate, save
        metrics = common.rollout_metrics(rollout, rewards_PG, clock) | means.over_ranks()
        metrics |= {"loss": common.all_sum(loss_sum)[0], "grad_norm": common.full(grad_norm).item()}
        metrics |= {"staleness": staleness, "sync_s": clock.seconds.get("sync_s", 0.0)}
        if staleness > 0:       # then the policy itself has moved
            del metrics["engine_gap"]
        if step % cfg.eval_every == 0 or step == cfg.steps:
            engine.load_weights(common.named_weights(policy.model))
            metrics |= common.evaluate_step(engine, held_out, held_out_prompts, cfg, log, step)
        log.samples(step, "train", batch[:1], rollout.texts[:1], rewards[:1])
        log.write(step, metrics)
        if step % cfg.save_every == 0 or step == cfg.steps:
            unfinished = (world_size, stage_rollout) if staleness < length - 1 else None
            common.save_checkpoint(log.dir, step, policy, optimizer, unfinished)

    common.export(policy.model, tokenizer, log.dir / "final", torch.bfloat16 if cuda else torch.float32)
    log.report(cfg.steps)


if __name__ == "__main__":
    try:
        main()
    except common.UserError as error:       # one sentence, no traceback, exit status 1, on every process
        raise SystemExit(f"error: {error}")
    if dist.is_initialized():       # after success only: with a failed peer, NCCL's own end may wait forever
        dist.destroy_process_group()
