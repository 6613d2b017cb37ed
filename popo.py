"""POPO, positive-only policy optimization: imitate correct answers alone, held near a slow copy of the policy.

Paper: Beyond Negative Rollouts (arXiv 2605.06650). The tags below are names of ours, not the paper's numbers.

Each prompt is answered G times; answers with a reward above 0, S+, are imitated, the others are left out. To make some
answers likelier is to make all others less likely, so negatives sink without being in the loss. Instead of a KL
penalty, a prediction from the policy's hidden states is held close to those of an anchor, an exponential moving average
(EMA) of the policy, as self-supervised vision models do.

    L     = L_NLL + alpha L_sim + beta L_ent                  alpha 0.1, beta 0.01                  [POPO loss]
    w_i   = softmax over S+ of 1/|y_i| log pi(y_i)            detached; they sum to 1 per prompt    [POPO weights]
    L_NLL = - mean over prompts with positives of  sum_i w_i 1/|y_i| log pi(y_i)                    [POPO NLL]
    L_sim = - sum_i w_i cos(h(f_theta(y_i)), f_xi(y_i) + noise) / sum_i w_i       sigma 0.01        [POPO similarity]
    L_ent = - mean entropy of pi over all completion tokens, those of negatives too                 [POPO entropy]
    xi    = tau xi + (1 - tau) theta                          after each step; tau 0.999            [POPO EMA]

f is the hidden state after the final norm, averaged over the completion: the states at its own tokens, not those one
position earlier that predict them. h is the predictor (Linear, LayerNorm, ReLU, Linear). It is trained with the policy,
by the same optimizer, but what samples and what is exported is the policy's model alone. The anchor gets no gradient.

What happens to the gradient: the coefficient on an answer's score is exactly -w_i, which the paper calls bounded
importance sampling; there is no ratio and no clip, so a rollout allows one update only. Over a softmax with logits z,
dL_NLL/dz = pi - w: with pi = (.1, .2, .3, .4), S+ the first two and w = (1/3, 2/3) it is (-.23, -.47, .3, .4), and
descent lowers the logits of the negatives. With the manuscript's weights and sums (--weight_mode softmax_sum) it is the
gradient of -log(sum of the positives' probabilities); with uniform weights POPO is rejection-sampling fine-tuning.

What differs from grpo.py: no advantage, ratio, clip, engine correction or reference model. Groups that are all correct
still train. A prompt without positives gives nothing to L_NLL and L_sim; a step without any positive makes no update,
and the anchor still moves. Negatives go through the model for their entropy only: with --entropy_coef 0 not at all.

Published settings are marked in each flag's help. Not published: batch size, Adam's betas, which Xavier initialisation
(here uniform). Manuscript and authors' code differ in the score (sum, mean). The code divides the NLL by the positive
tokens of a micro-batch, so how a batch is split changes its step; here every count is the whole step's, over all
processes. Reported against GRPO: Qwen2.5-Math-7B on AIME25 30.00 -> 36.67 (two of its 30 problems), Qwen2.5-Math-1.5B
on five benchmarks 50.22 -> 53.06, R1-Distill-7B 66.22 -> 65.60 (a loss).

Caveats. A lucky guess that is its group's only positive is imitated with weight 1. With --nll_norm length a token of a
short answer pulls harder than one of a long answer (by 1/|y_i|): on the built-in task, where a model may guess or
reason, it learned to guess (one run: held-out pass@1 from 0.50 to 0.36, at 8 tokens an answer; `tokens`, which TINY
takes, reached 0.81). Mean log-probabilities of a prompt's answers differ little, so the default weights are nearly
uniform (see max_weight).

    python popo.py                                                         # a laptop: the built-in task, two minutes
    python popo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k --eval_dataset gsm8k --lr 1e-6         # one GPU
    torchrun --nproc_per_node 8 popo.py                                           # eight GPUs: the published setting
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 popo.py ...  # on each node
    python popo.py --resume runs/NAME                                             # go on from the last checkpoint

Logged besides what every file logs (README), 0 where a coefficient of 0 skips a term; anchor_distance is then left out,
as is engine_gap on a step without positives:
    positives        share of completions with a reward above 0
    active_prompts   number of prompts with a positive
    nll              L_NLL
    similarity       weighted mean cosine of prediction and anchor, -L_sim
    token_entropy    mean entropy of pi in nats, -L_ent: exact, while entropy is estimated from the sampled tokens
    max_weight       largest weight of a prompt, mean over active prompts; 1: one answer decides
    anchor_distance  Euclidean distance between the parameters of policy and anchor, output heads aside
    engine_gap       mean difference between the engine's and the policy's log-probabilities
"""

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

import common
from common import arg


@dataclass
class Config:
    model: str = arg("Qwen/Qwen2.5-Math-7B", "folder or hub name of a causal LM, or tiny (paper)")
    dataset: str = arg("deepscaler", "training problems: a name or a file, see README (paper)")
    eval_dataset: str = arg("aime25", "held-out problems (paper, among others)")
    steps: int = arg(1500, "rollouts in all (paper)")
    prompts_per_step: int = arg(128, "prompts per rollout, over all processes (not published; ours)")
    group_size: int = arg(8, "completions per prompt, G (paper)")
    updates_per_rollout: int = arg(1, "only 1: strictly on-policy (paper)")
    max_prompt_tokens: int = arg(1024, "longer prompts are dropped, never cut")
    max_new_tokens: int = arg(1024, "completion length limit (paper)")
    temperature: float = arg(1.0, "sampling temperature, in training and evaluation (not published; ours)")
    lr: float = arg(1e-7, "AdamW learning rate (paper, 7B run; authors' code: 1e-6)")
    lr_schedule: Literal["constant", "linear", "cosine"] = arg("cosine", "after warm-up (paper)")
    warmup_steps: int = arg(150, "steps of linear learning-rate warm-up (paper: 0.1 of the steps)")
    beta1: float = arg(0.9, "AdamW beta 1 (not published; ours)")
    beta2: float = arg(0.95, "AdamW beta 2 (not published; ours)")
    weight_decay: float = arg(0.01, "AdamW weight decay (paper)")
    grad_clip: float = arg(1.0, "largest gradient norm (paper)")
    weight_mode: Literal["softmax", "softmax_sum", "uniform"] = arg(
        "softmax", "of mean log-probabilities (authors' code), of sums (paper), or 1 / number of positives (ours)")
    nll_norm: Literal["length", "tokens"] = arg("length", "of L_NLL (ours); tokens: per positive token (authors' code)")
    similarity_coef: float = arg(0.1, "alpha; 0: neither anchor nor predictor is made (paper)")
    entropy_coef: float = arg(0.01, "beta; 0: negatives are left out of forward and backward (paper)")
    ema_decay: float = arg(0.999, "tau of the anchor (paper, 7B run; authors' code: 0.995)")
    noise_std: float = arg(0.01, "sigma of the noise on the anchor's state (paper)")
    predictor_width: int = arg(4096, "width of the predictor's hidden layer (paper)")
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


# The built-in task, on a CPU: two minutes on two cores. Per positive token the NLL is several times smaller than per
# prompt, so alpha is, too.
TINY = dict(model="tiny", dataset="arithmetic", eval_dataset="arithmetic", steps=200, prompts_per_step=32,
            max_prompt_tokens=64, max_new_tokens=96, lr=5e-4, warmup_steps=30, beta2=0.99, nll_norm="tokens",
            similarity_coef=0.03, ema_decay=0.99, predictor_width=128, eval_every=20, eval_samples=4)


def positive_weights(scores_PG, rewards_PG, mode="softmax"):
    """Scores and rewards (P, G) -> detached weights (P, G), 0 for all but the positives.  [POPO weights]

    The softmax of the scores over a prompt's positives, or equal shares (mode "uniform"). A prompt's weights sum to 1,
    or to 0 if it has no positive.
    """
    positive_PG = rewards_PG > 0
    scores_PG = torch.zeros_like(scores_PG) if mode == "uniform" else scores_PG.detach()
    return torch.where(positive_PG, scores_PG.masked_fill(~positive_PG, float("-inf")).softmax(dim=1), 0.0)


def nll_loss(logp_BT, mask_BT, weights_B, norm="length", active_prompts=None, positive_tokens=None):
    """Weighted negative log-likelihood of the positives, a scalar: a micro-batch's share of the step's.  [POPO NLL]

    active_prompts (norm "length") and positive_tokens (norm "tokens") are the step's counts over all processes; by
    default those of the rows given.
    """
    lengths_B = mask_BT.sum(1)
    logp_B = (logp_BT * mask_BT).sum(1)
    if norm == "tokens":
        count = lengths_B[weights_B > 0].sum() if positive_tokens is None else positive_tokens
    else:
        count = weights_B.sum().round() if active_prompts is None else active_prompts
        logp_B = logp_B / lengths_B.clamp(min=1)
    return -(weights_B * logp_B).sum() / max(count, 1)


def similarity_loss(online_BH, target_BH, weights_B, weight_sum=None):
    """Minus the weighted mean cosine of two sets of states (B, H), in [-1, 1]; only the first gets a gradient.

    weight_sum: the step's sum of weights over all processes, by default that of the rows given.  [POPO similarity]
    """
    cosine_B = torch.cosine_similarity(online_BH, target_BH.detach(), dim=1)
    weight_sum = weights_B.sum() if weight_sum is None else weight_sum
    return -(weights_B * cosine_B).sum() / (weight_sum if weight_sum > 0 else 1)


class Predictor(nn.Module):
    """h, on the policy's side only: without it the similarity would pull states straight back.  [POPO similarity]"""

    def __init__(self, hidden, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(hidden, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, hidden))
        for linear in (self.layers[0], self.layers[3]):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, state_BH):
        return self.layers(state_BH)


@torch.no_grad()
def ema_update(target_module, online_module, decay):
    """target <- decay * target + (1 - decay) * online, in place, for every parameter by name.  [POPO EMA]

    Both modules are sharded alike, so each process moves its own shards: state_dict() puts away what FSDP has gathered.
    The copy is float32: in bf16 so small a move would be rounded away.
    """
    target, online = target_module.state_dict(), online_module.state_dict()
    for name, _ in target_module.named_parameters():        # has a tied weight once, unlike state_dict()
        target[name].lerp_(online[name], 1 - decay)


@torch.no_grad()
def distance(target_module, online_module):
    """Euclidean distance between the parameters of two modules that are sharded alike."""
    pairs = zip(target_module.parameters(), online_module.parameters())
    return common.full(torch.stack([(target - online).norm() for target, online in pairs]).norm())


def pool(hidden_BLD, prompt_len_B, completion_len_B):
    """f: the mean of the hidden states at the completion tokens -> (B, D); 0 for an empty completion."""
    position_L = torch.arange(hidden_BLD.shape[1], device=hidden_BLD.device)
    end_B1 = (prompt_len_B + completion_len_B)[:, None]
    mask_BL = (position_L >= prompt_len_B[:, None]) & (position_L < end_B1)
    return (hidden_BLD * mask_BL[:, :, None]).sum(1) / completion_len_B.clamp(min=1)[:, None]


class PredictingPolicy(common.Policy):
    """A policy and its predictor, trained and saved together. What samples and is exported is .model alone."""

    def __init__(self, model, predictor_width):
        super().__init__(model)
        self.predictor = Predictor(model.config.hidden_size, predictor_width) if predictor_width > 0 else None

    def forward(self, tokens_BL, prompt_len_B, completion_len_B, temperature=1.0, loss_terms=False, with_entropy=True):
        """As common.Policy; with `loss_terms` (logp_BT, entropy_BT, online_BD), of which the last is h(f) or None."""
        if not loss_terms:
            return super().forward(tokens_BL, prompt_len_B, completion_len_B, temperature)
        with torch.autocast("cuda", torch.bfloat16, enabled=tokens_BL.is_cuda):
            hidden_BLD = self.model.base_model(input_ids=tokens_BL, use_cache=False).last_hidden_state
            t_T = torch.arange(int(completion_len_B.max()), device=tokens_BL.device)
            row_N, t_N = (t_T < completion_len_B[:, None]).nonzero(as_tuple=True)
            position_N = prompt_len_B[row_N] + t_N
            terms = common.token_logp(self.model.get_output_embeddings(), hidden_BLD[row_N, position_N - 1],
                                      tokens_BL[row_N, position_N], temperature, with_entropy)
            logp_N, entropy_N = terms if with_entropy else (terms, torch.zeros_like(terms))
            online_BD = None
            if self.predictor is not None:
                online_BD = self.predictor(pool(hidden_BLD.float(), prompt_len_B, completion_len_B)).float()
        logp_BT = common.lay_out(logp_N, row_N, t_N, completion_len_B)
        return logp_BT, common.lay_out(entropy_N, row_N, t_N, completion_len_B), online_BD


class Anchor(common.Policy):
    """xi: a copy of the policy's model, without its head, whose forward is f. It follows the policy."""

    def forward(self, tokens_BL, prompt_len_B, completion_len_B):
        with torch.autocast("cuda", torch.bfloat16, enabled=tokens_BL.is_cuda):
            hidden_BLD = self.model(input_ids=tokens_BL, use_cache=False).last_hidden_state
        return pool(hidden_BLD.float(), prompt_len_B, completion_len_B)


@torch.no_grad()
def anchor_states(anchor, rollout, rows, cfg, device):
    """The anchor's f of the given rows, (B, D) on the CPU; other rows hold 0."""
    state_BD = torch.zeros(len(rollout.texts), anchor.model.config.hidden_size)
    for rows, micro in common.micro_batches(rollout, rows, cfg, device):
        # += and not =, since an empty filler row, whose f is 0, bears the number of a real one.
        state_BD[rows] += anchor(micro.tokens_BL, micro.prompt_len_B, micro.completion_len_B).cpu()
    return state_BD


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
        raise common.UserError("--updates_per_rollout must be 1: there is no ratio to correct for a moved policy.")
    if min(cfg.similarity_coef, cfg.entropy_coef, cfg.noise_std, 1 - cfg.ema_decay, cfg.ema_decay) < 0:
        raise common.UserError("--similarity_coef, --entropy_coef, --noise_std must be at least 0, --ema_decay 0 to 1.")
    if cfg.similarity_coef > 0 and cfg.predictor_width < 1:
        raise common.UserError("--predictor_width must be at least 1, unless --similarity_coef is 0.")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(hours=1))

    model_name = common.resolve_model(cfg.model)
    tokenizer = common.load_tokenizer(model_name)
    torch.manual_seed(common.stream_seed(cfg.seed, "predictor"))        # every process starts with the same predictor
    policy = PredictingPolicy(common.load_model(model_name), cfg.predictor_width if cfg.similarity_coef > 0 else 0)
    common.check_window(policy.model.config, cfg)
    if cfg.gradient_checkpointing:
        policy.model.train().gradient_checkpointing_enable({"use_reentrant": False})      # works in train mode only
    shard(policy, device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, betas=(cfg.beta1, cfg.beta2),
                                  weight_decay=cfg.weight_decay, fused=True)
    anchor = shard(Anchor(common.load_model(model_name).base_model), device) if cfg.similarity_coef > 0 else None
    trained = nn.ModuleDict({"policy": policy, "anchor": anchor})       # what a checkpoint holds

    train_set = common.load_problems(cfg.dataset, "train")
    test_set = common.load_problems(cfg.eval_dataset, "test", cfg.eval_problems)
    problems, prompts = common.encode_prompts(train_set, tokenizer, cfg.max_prompt_tokens)
    held_out, held_out_prompts = common.encode_prompts(test_set, tokenizer, cfg.max_prompt_tokens)

    # Every process generates with an engine and weights of its own, so generation waits for nobody.
    log = common.RunLog(Path(__file__).stem, cfg, world_size)
    engine = common.make_engine(cfg, model_name, tokenizer, device)
    if log.start > 0:
        common.load_checkpoint(log.dir, trained, optimizer)
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

        # 3. weights
        positive_B = rewards_PG.flatten() > 0
        n_positives, n_active, n_tokens, n_positive_tokens = common.all_sum(
            positive_B.sum(), (rewards_PG > 0).any(1).sum(), rollout.completion_len_B.sum(),
            rollout.completion_len_B[positive_B].sum())
        scores_B = torch.zeros(len(rewards))
        if cfg.weight_mode != "uniform":
            logp_BT = common.policy_logp(policy, rollout, torch.where(positive_B)[0], cfg, device)
            scores_B = logp_BT.sum(1) / (rollout.completion_len_B if cfg.weight_mode == "softmax" else 1)
        weights_PG = positive_weights(scores_B.view(-1, cfg.group_size), rewards_PG, cfg.weight_mode)
        weights_B = weights_PG.flatten()
        moving_B = (weights_B > 0) | (cfg.entropy_coef > 0)                 # the gradient of the others is exactly 0

        # 4. update
        for group in optimizer.param_groups:
            group["lr"] = common.learning_rate(cfg, step)
        means, sums = common.Means(), dict.fromkeys(("loss", "nll", "similarity", "token_entropy"), 0.0)
        grad_norm = torch.zeros(())
        if anchor is not None and n_active > 0:
            target_BD = anchor_states(anchor, rollout, torch.where(weights_B > 0)[0], cfg, device)
            generator = torch.Generator().manual_seed(common.stream_seed(cfg.seed, "noise", step))
            noise_PGD = torch.randn(cfg.prompts_per_step, cfg.group_size, target_BD.shape[1], generator=generator)
            target_BD += cfg.noise_std * noise_PGD[places].flatten(0, 1)        # the same on any number of processes
        for mini_batch in torch.arange(len(rewards)).chunk(cfg.updates_per_rollout):
            if n_active == 0:       # a step without any positive skips all three terms
                break
            for rows, micro in common.micro_batches(rollout, mini_batch[moving_B[mini_batch]], cfg, device):
                logp_BT, entropy_BT, online_BD = policy(
                    micro.tokens_BL, micro.prompt_len_B, micro.completion_len_B, cfg.temperature,
                    loss_terms=True, with_entropy=cfg.entropy_coef > 0)
                weight_B = weights_B[rows].to(device) * (micro.completion_len_B > 0)    # an empty filler row weighs 0
                nll = nll_loss(logp_BT, micro.mask_BT, weight_B, cfg.nll_norm, n_active, n_positive_tokens)
                entropy = (entropy_BT * micro.mask_BT).sum() / n_tokens             # [POPO entropy]
                loss = nll - cfg.entropy_coef * entropy                             # [POPO loss]
                if anchor is not None:
                    # The weights of an active prompt sum to 1, so all weights of the step sum to n_active.
                    similarity = similarity_loss(online_BD, target_BD[rows].to(device), weight_B, n_active)
                    loss = loss + cfg.similarity_coef * similarity
                    sums["similarity"] -= similarity.item()
                (loss * world_size).backward()      # FSDP averages over processes; global counts call for the sum
                sums["loss"] += loss.item()
                sums["nll"] += nll.item()
                sums["token_entropy"] += entropy.item()
                means.add(micro.mask_BT, engine_gap=(logp_BT - micro.logp_BT).abs())
            grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
        if anchor is not None:  # moves on every step, also on those without a positive
            ema_update(anchor.model, policy.model.base_model, cfg.ema_decay)
        engine.load_weights(common.named_weights(policy.model))
        clock.lap("update_s")

        # 5. log, evaluate, save
        means.add((rewards_PG > 0).any(1), max_weight=weights_PG.max(1).values)
        metrics = common.rollout_metrics(rollout, rewards_PG, clock) | means.over_ranks()
        metrics |= dict(zip(sums, common.all_sum(*sums.values()))) | {"grad_norm": common.full(grad_norm).item()}
        metrics |= {"positives": n_positives / (cfg.prompts_per_step * cfg.group_size), "active_prompts": n_active}
        if anchor is not None:
            metrics["anchor_distance"] = distance(anchor.model, policy.model.base_model).item()
        if step % cfg.eval_every == 0 or step == cfg.steps:
            metrics |= common.evaluate_step(engine, held_out, held_out_prompts, cfg, log, step)
        log.samples(step, "train", batch[:1], rollout.texts[:1], rewards[:1])
        log.write(step, metrics)
        if step % cfg.save_every == 0 or step == cfg.steps:
            common.save_checkpoint(log.dir, step, trained, optimizer)

    common.export(policy.model, tokenizer, log.dir / "final", torch.bfloat16 if cuda else torch.float32)
    log.report(cfg.steps)


if __name__ == "__main__":
    try:
        main()
    except common.UserError as error:       # one sentence, no traceback, exit status 1, on every process
        raise SystemExit(f"error: {error}")
    if dist.is_initialized():       # after success only: with a failed peer, NCCL's own end may wait forever
        dist.destroy_process_group()
