"""common.py: what every algorithm here shares and none is about.

    1. flags, random streams, sums over ranks   arg, parse_config, check_config, stream_seed, data_order, all_sum
    2. the built-in model                       tiny_model
    3. policy                                   load_model, Policy, completion_states, token_logp
    4. rollout                                  Rollout, HFEngine, VLLMEngine, micro_batches
    5. evaluation                               evaluate, pass_at_1
    6. run log and checkpoints                  RunLog, save_checkpoint, load_checkpoint, export

Problems, prompts and rewards (load_problems, encode_prompts, math_reward, score) are in tasks.py and passed on here.

Names carry shapes as suffixes: P prompts on this rank, G completions per prompt, B = P*G rows, L token positions of a
row (prompt + completion), T completion positions, N completion tokens of a batch laid end to end, C a chunk of them,
D hidden size, V vocabulary.
"""

import copy
import hashlib
import importlib.util
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, HfArgumentParser, Qwen2Config,
                          Qwen2ForCausalLM, Qwen2Tokenizer)

from tasks import (INSTRUCTION, Problem, UserError, arithmetic_problems, encode_prompt, encode_prompts, extract_answer,
                   load_problems, math_reward, parsable, print0, score, worked_solution)

LOGITS_PER_CHUNK = 2 ** 26      # float32 logits held at a time by token_logp: 256 MB

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


# --- 1. flags, random streams, sums over ranks -----------------------------------------------------------------------

def arg(default, help):
    """One line of a Config: its default and its help text."""
    return field(default=default, metadata={"help": help})


def parse_config(config_class, tiny, argv=None):
    """The command line as a config_class: flags win over `tiny`, `tiny` over the published defaults.

    `tiny` (the built-in CPU task) applies to --model tiny, to --dataset arithmetic without a model, and where there is
    no CUDA device and neither is named. --resume RUN_DIR reads every setting from RUN_DIR/config.json instead.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = HfArgumentParser(config_class, allow_abbrev=False)
    published = {name: parser.get_default(name) for name in ("model", "dataset", "resume")}
    parser.set_defaults(model=None, dataset=None, resume=None)
    named = parser.parse_args(argv)
    if named.resume is not None:
        if len(argv) != (1 if "=" in argv[0] else 2):
            raise UserError("--resume takes every setting from the run's config.json: drop the other flags.")
        return load_run_config(config_class, named.resume)
    unnamed = named.model is None and named.dataset is None
    arithmetic_only = named.model is None and (named.dataset or "").startswith("arithmetic")
    use_tiny = (unnamed and not torch.cuda.is_available()) or arithmetic_only or named.model == "tiny"
    parser.set_defaults(**{**published, **(tiny if use_tiny else {})})
    if unnamed:
        which = "No CUDA device, so the built-in task" if use_tiny else "CUDA found, so the published setting"
        print0(f"{which} runs. To choose: --model tiny for the built-in task; for the published setting "
               f"--model {published['model']} --dataset {published['dataset']}.")
    return config_class(**vars(parser.parse_args(argv)))


def load_run_config(config_class, run_dir):
    """The Config in RUN_DIR/config.json, with `resume` and `run_dir` set to RUN_DIR."""
    try:
        saved = json.loads((Path(run_dir) / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--resume {run_dir}: can't read its config.json ({error}): name a run's folder.") from None
    algorithm = Path(sys.argv[0]).stem
    if saved.get("algorithm") != algorithm:
        raise UserError(f"--resume {run_dir}: that is a run of {saved.get('algorithm')}.py, not of {algorithm}.py.")
    if (Path(run_dir) / "final").exists():
        print0(f"{run_dir} is finished: there is nothing to resume.")
        raise SystemExit(0)
    settings = {f.name: saved[f.name] for f in fields(config_class) if f.name in saved}
    return config_class(**{**settings, "run_dir": str(run_dir), "resume": str(run_dir)})


def check_config(cfg, world_size):
    """Refuse settings that can't work, before anything is loaded or written. Raises UserError."""
    for name in ("steps", "prompts_per_step", "updates_per_rollout", "max_prompt_tokens", "max_new_tokens", "lr",
                 "temperature", "grad_clip", "micro_batch_tokens", "eval_every", "eval_samples", "eval_problems",
                 "save_every", "engine_rows", "engine_memory", "engine_parallel"):
        if not getattr(cfg, name) > 0:
            raise UserError(f"--{name} is {getattr(cfg, name)}: it must be above 0.")
    if min(cfg.warmup_steps, cfg.weight_decay, cfg.beta1, cfg.beta2) < 0 or max(cfg.beta1, cfg.beta2) >= 1:
        raise UserError("--warmup_steps and --weight_decay must not be below 0, --beta1 and --beta2 in [0, 1).")
    if cfg.group_size < 2:
        raise UserError(f"--group_size is {cfg.group_size}: it must be at least 2, to compare completions.")
    if cfg.prompts_per_step % (world_size * cfg.updates_per_rollout):
        raise UserError(f"--prompts_per_step {cfg.prompts_per_step} must be a multiple of {world_size} processes x "
                        f"{cfg.updates_per_rollout} updates per rollout.")
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) % cfg.engine_parallel:
        raise UserError(f"--engine_parallel {cfg.engine_parallel} must divide the number of processes on a node.")


def stream_seed(*parts):
    """A 63-bit seed for the random stream that `parts` name, e.g. (seed, "rollout", step, prompt).

    Every random number of a run comes from a stream with a name, never from a state that moves on. So samples do not
    depend on how prompts are spread over processes, and a resumed run has no generator to restore.
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def data_order(n_problems, prompts_per_step, step, seed):
    """The step's problem indices, the same on every rank. Each epoch is a fresh permutation of all problems."""
    positions = range(step * prompts_per_step, (step + 1) * prompts_per_step)
    epochs = {}
    for epoch in {position // n_problems for position in positions}:
        generator = torch.Generator().manual_seed(stream_seed(seed, "order", epoch))
        epochs[epoch] = torch.randperm(n_problems, generator=generator).tolist()
    return [epochs[position // n_problems][position % n_problems] for position in positions]


def learning_rate(cfg, step):
    """The rate of a step, 1 being the first: linear warm-up, then constant, linear or cosine decay towards 0."""
    progress = (step - 1) / cfg.steps
    decay = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 + 0.5 * math.cos(math.pi * progress)}
    return cfg.lr * min(1.0, step / max(cfg.warmup_steps, 1)) * decay[cfg.lr_schedule]


def all_sum(*values):
    """Each value summed over all ranks, as a float (float64 on the way)."""
    totals = torch.tensor([float(value) for value in values], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(totals)
    return totals.tolist()


def all_gather(value):
    """A list of every rank's picklable `value`, in rank order, on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# --- 2. the built-in model: small enough to train on a laptop ---------------------------------------------------------

def tiny_tokenizer():
    """One token a character, and one for the opening of a box. instruction "": the model knows its only task."""
    vocabulary = ["<pad>", "<eos>", "Ċ", *"0123456789+-=?}"]       # Ċ is how byte-level tokenizers write a newline
    tokenizer = Qwen2Tokenizer(vocab={text: i for i, text in enumerate(vocabulary)}, merges=[], pad_token="<pad>",
                               eos_token="<eos>", unk_token=None, instruction="")
    tokenizer.add_tokens(["\\boxed{"])
    return tokenizer


def tiny_model(steps=700, rows=64, lr=4e-3):
    """The folder of the built-in model: pre-trained at first use (40 s on one core), then cached.

    A Qwen2 of 134k parameters. Its initializer range decides everything: at transformers' default of 0.02 it learns
    nothing useful in this time. It learns from texts of mixed quality, as the web is: half of them guess the answer
    outright, half reason line by line and slip now and then. The cache is $RLVR_CACHE, else ~/.cache/rlvr.
    """
    cache = Path(os.environ.get("RLVR_CACHE", Path.home() / ".cache" / "rlvr"))
    folder = cache / f"tiny-v4-{steps}x{rows}"
    if folder.exists():
        return str(folder)
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.1, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0}, bos_token_id=None, pad_token_id=0,
        eos_token_id=tokenizer.eos_token_id))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.03)
    problems, rng = arithmetic_problems("arithmetic:2-6", "train"), random.Random(0)
    for _ in tqdm(range(steps), desc="pre-training the built-in model, once", mininterval=1):
        drawn = rng.choices(problems, k=rows)
        demonstrations = []
        for problem in drawn:
            first, *operations = map(int, re.findall(r"[+-]?\d+", problem.prompt))
            guess = f"\\boxed{{{problem.answer}}}"
            reasoned = worked_solution(first, operations, rng, slip=0.06)
            demonstrations.append((guess if rng.random() < 0.5 else reasoned) + tokenizer.eos_token)
        prompts = tokenizer([problem.prompt + "\n" for problem in drawn]).input_ids
        completions = tokenizer(demonstrations).input_ids
        pairs = sorted(zip(prompts, completions), key=lambda pair: len(pair[0]) + len(pair[1]))
        for half in (pairs[:rows // 2], pairs[rows // 2:]):     # short and long texts apart, to pad less
            tokens_BL = pad_sequence([torch.tensor(p + c) for p, c in half], batch_first=True)
            labels_BL = pad_sequence([torch.tensor([-100] * len(p) + c) for p, c in half], True, -100)
            model(input_ids=tokens_BL, labels=labels_BL, use_cache=False,
                  num_items_in_batch=sum(map(len, completions))).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    cache.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=cache))
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    try:
        part.rename(folder)
    except OSError:     # another run was faster
        shutil.rmtree(part)
    return str(folder)


# --- 3. policy --------------------------------------------------------------------------------------------------------

def resolve_model(name):
    """The folder or hub name to load: "tiny" is built at first use, by rank 0 while the others wait."""
    if name != "tiny":
        return name
    torch.set_num_threads(1)    # a second thread gains little on so small a model, and loses much when it has to wait
    if int(os.environ.get("RANK", 0)) == 0:
        tiny_model()
    if dist.is_initialized():
        dist.barrier()
    return tiny_model()


def load_pretrained(auto_class, name, **kwargs):
    """auto_class.from_pretrained(name). Raises UserError where there is nothing to load."""
    if not Path(name).exists() and (name.count("/") != 1 or name[0] in "./~"):
        raise UserError(f"model {name}: there is no such folder, and names on the hub look like owner/model.")
    try:
        return auto_class.from_pretrained(name, **kwargs)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UserError(f"model {name}: it can't be loaded ({str(error).splitlines()[0]}). Give a folder written by "
                        "save_pretrained, a name on the Hugging Face hub, or tiny.") from None


def load_tokenizer(name):
    """The tokenizer that belongs to a model."""
    return load_pretrained(AutoTokenizer, name)


def load_model(name, dtype=torch.float32):
    """A causal LM on the CPU whose dropout is 0 in every mode, so that two forwards of one text agree."""
    config = load_pretrained(AutoConfig, name)
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    return load_pretrained(AutoModelForCausalLM, name, config=config, dtype=dtype, attn_implementation="sdpa").eval()


def stop_token_ids(model, tokenizer):
    """All ids that end a completion: the tokenizer's, the config's and the generation config's often differ."""
    ids = {tokenizer.eos_token_id}
    for config in (model.config, model.generation_config):
        eos = getattr(config, "eos_token_id", None)
        ids.update(eos if isinstance(eos, list) else [eos])
    if ids == {None}:
        raise UserError("The tokenizer has no stop token: set its eos_token, or no completion can ever end.")
    return sorted(ids - {None})


def check_vocabulary(tokenizer, ref_name):
    """Raises UserError when another model's token ids mean something else, so that its logits can't be used."""
    if load_tokenizer(ref_name).get_vocab() != tokenizer.get_vocab():
        raise UserError(f"--ref_model {ref_name}: its vocabulary is not that of --model, so their logits can't be "
                        "averaged: name a model with the same tokenizer.")


def window(model_config):
    """How many tokens the model can take in, prompt and completion together; None when it doesn't say."""
    return getattr(model_config, "max_position_embeddings", None)


def check_window(model_config, cfg):
    """Raises UserError when a prompt and its completion may exceed the model's window."""
    if cfg.max_prompt_tokens + cfg.max_new_tokens > (window(model_config) or math.inf):
        raise UserError(f"--max_prompt_tokens {cfg.max_prompt_tokens} + --max_new_tokens {cfg.max_new_tokens} exceed "
                        f"the model's window of {window(model_config)} tokens: lower one of them.")


def completion_states(model, tokens_BL, prompt_len_B, completion_len_B):
    """The final hidden states that predict the completion tokens, rows laid end to end: all that the head must see.

    Returns hidden_ND, targets_N, row_N, t_N: token t_N of row_N's completion is targets_N. Rows are right-padded and
    there is no attention mask: causal attention never looks at what comes after.
    """
    hidden_BLD = model.base_model(input_ids=tokens_BL, use_cache=False).last_hidden_state
    t_T = torch.arange(int(completion_len_B.max()), device=tokens_BL.device)
    row_N, t_N = (t_T < completion_len_B[:, None]).nonzero(as_tuple=True)
    position_N = prompt_len_B[row_N] + t_N
    return hidden_BLD[row_N, position_N - 1], tokens_BL[row_N, position_N], row_N, t_N


def in_chunks(function, vocabulary, *tensors_N):
    """function(*tensors) -> a tuple of (C,) tensors, for all N tokens: a tuple of (N,) tensors.

    `function` makes logits over `vocabulary` ids. It is applied to chunks of tokens and computed anew in backward, so
    memory holds one chunk's float32 logits, however many tokens there are.
    """
    chunk = max(1, LOGITS_PER_CHUNK // vocabulary)
    if len(tensors_N[0]) <= chunk:      # one chunk is kept as it is
        return function(*tensors_N)
    chunks = zip(*(tensor_N.split(chunk) for tensor_N in tensors_N))
    parts = [checkpoint(function, *tensors_C, use_reentrant=False) for tensors_C in chunks]
    return tuple(torch.cat(part) for part in zip(*parts))


def token_logp(head, hidden_ND, targets_N, temperature=1.0, with_entropy=False):
    """Log-probability of each target, at `temperature`, over the full vocabulary, in float32: (N,).

    `head` is the output layer, D -> V. With `with_entropy` returns (logp_N, entropy_N): entropy_N is the entropy of
    each token's distribution, in nats, with gradient.
    """
    def chunk_logp(hidden_CD, targets_C):
        logp_CV = F.log_softmax(head(hidden_CD).float() / temperature, dim=-1)
        logp_C = logp_CV.gather(1, targets_C[:, None])[:, 0]
        return logp_C, -(logp_CV.exp() * logp_CV).sum(-1) if with_entropy else torch.zeros_like(logp_C)

    logp_N, entropy_N = in_chunks(chunk_logp, head.weight.shape[0], hidden_ND, targets_N)
    return (logp_N, entropy_N) if with_entropy else logp_N


def lay_out(values_N, row_N, t_N, completion_len_B):
    """Values of the completion tokens, end to end -> (B, T), 0 on padding."""
    shape = len(completion_len_B), int(completion_len_B.max())
    return values_N.new_zeros(shape).index_put((row_N, t_N), values_N)


class Policy(nn.Module):
    """A causal LM whose forward is the log-probability of completions, so that FSDP's hooks fire on what is called."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    @property
    def layers(self):
        """The decoder layers: FSDP gathers one at a time."""
        return next(m for m in self.model.base_model.modules() if isinstance(m, nn.ModuleList))

    def forward(self, tokens_BL, prompt_len_B, completion_len_B, temperature=1.0):
        """Rows prompt + completion, right-padded -> log-probabilities (B, T) of the completion tokens, 0 on padding."""
        with torch.autocast("cuda", torch.bfloat16, enabled=tokens_BL.is_cuda):
            hidden_ND, targets_N, row_N, t_N = completion_states(self.model, tokens_BL, prompt_len_B, completion_len_B)
            logp_N = token_logp(self.model.get_output_embeddings(), hidden_ND, targets_N, temperature)
        return lay_out(logp_N, row_N, t_N, completion_len_B)


def full(tensor):
    """The whole of a tensor that FSDP may have sharded: a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def named_weights(module):
    """(name, whole tensor) of a possibly sharded module, one at a time: every rank must run through all of them."""
    for name, tensor in module.state_dict().items():
        yield name, full(tensor)


@torch.no_grad()
def policy_logp(policy, rollout, rows, cfg, device):
    """The policy's log-probabilities of the given rows, (B, T) on the CPU; other rows and padding hold 0."""
    logp_BT = torch.zeros_like(rollout.logp_BT)
    for rows, micro in micro_batches(rollout, rows, cfg, device):
        micro_BT = policy(micro.tokens_BL, micro.prompt_len_B, micro.completion_len_B, cfg.temperature)
        logp_BT[rows, :micro_BT.shape[1]] = micro_BT.cpu()
    return logp_BT


@torch.no_grad()
def old_logp(policy, rollout, rows, cfg, device):
    """log pi_old (B, T) of the given rows: who sampled them. None where that is the policy as it stands.

    That is so with one update per rollout. With more, the policy as it is now, before the first; with --old_logp engine
    what the engine recorded, in its own numerics.
    """
    if cfg.old_logp == "engine":
        return rollout.logp_BT
    return policy_logp(policy, rollout, rows, cfg, device) if cfg.updates_per_rollout > 1 else None


# --- 4. rollout -------------------------------------------------------------------------------------------------------

@dataclass
class Rollout:
    """Completions as sampled, prompt-major: rows i*n .. i*n+n-1 belong to prompt i."""
    tokens_BL: torch.Tensor             # prompt + completion ids, right-padded; never re-tokenized text
    prompt_len_B: torch.Tensor
    completion_len_B: torch.Tensor      # the stop token included, where there is one
    logp_BT: torch.Tensor               # of the sampled tokens, as the engine recorded them; 0 on padding
    finished_B: torch.Tensor            # ended by a stop token; False: cut at max_new_tokens
    texts: list                         # decoded completions, without special tokens

    @property
    def mask_BT(self):
        """1.0 on completion tokens, the stop token included. From lengths: padding may well equal the stop token."""
        t_T = torch.arange(self.logp_BT.shape[1], device=self.logp_BT.device)
        return (t_T < self.completion_len_B[:, None]).float()

    def select(self, rows, device="cpu"):
        """These rows on `device`, cut to the longest of them."""
        prompt_len_B, completion_len_B = self.prompt_len_B[rows], self.completion_len_B[rows]
        longest, longest_completion = int((prompt_len_B + completion_len_B).max()), int(completion_len_B.max())
        tensors = (self.tokens_BL[rows, :longest], prompt_len_B, completion_len_B,
                   self.logp_BT[rows, :longest_completion], self.finished_B[rows])
        return Rollout(*(tensor.to(device) for tensor in tensors), [self.texts[row] for row in rows])


def pack_rollout(prompts, completion_BT, logp_BT, completion_len_B, stop_ids, tokenizer):
    """A Rollout from the prompts' ids, (n completions each) and the engine's padded tensors, all on the CPU."""
    n = len(completion_BT) // len(prompts)
    completions = [row[:length] for row, length in zip(completion_BT.tolist(), completion_len_B.tolist())]
    rows = [torch.tensor(prompts[i // n] + completion) for i, completion in enumerate(completions)]
    prompt_len_B = torch.tensor([len(prompt) for prompt in prompts]).repeat_interleave(n)
    finished_B = torch.tensor([completion[-1] in stop_ids for completion in completions])
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    logp_BT = logp_BT[:, :int(completion_len_B.max())]
    return Rollout(pad_sequence(rows, batch_first=True), prompt_len_B, completion_len_B, logp_BT, finished_B, texts)


class HFEngine:
    """Sampling with a Hugging Face model of its own: a decode loop over a KV cache.

    Each prompt is read once for all its completions, and rows leave the batch as they end. Tokens are sampled from the
    full distribution at `temperature`; the checkpoint's generation_config (top_k, top_p, ...) is not read.

    With a `reference` model the distribution is softmax(ref_weight * its logits + (1 - ref_weight) * the model's), each
    model with a KV cache of its own. `ref_weight` may be set at any time between two calls of generate.
    """

    def __init__(self, model, tokenizer, device="cpu", rows_at_once=512, reference=None, ref_weight=0.0):
        self.model, self.tokenizer, self.device, self.rows_at_once = model.to(device), tokenizer, device, rows_at_once
        self.reference, self.ref_weight = reference.to(device) if reference else None, ref_weight
        self.stop_ids = stop_token_ids(model, tokenizer)

    def load_weights(self, named_tensors):
        """Copy weights in by name. Raises KeyError on a name that the model lacks or that is missing."""
        own = self.model.state_dict()
        for name, tensor in named_tensors:
            own.pop(name).copy_(tensor)
        if own:
            raise KeyError(f"weights missing: {sorted(own)}")

    def at(self, ref_weight):
        """This engine at another weight of the reference: 0 is the model alone, 1 the reference alone."""
        other = copy.copy(self)
        other.ref_weight = ref_weight
        return other

    def sleep(self):
        """Make room for the update. This engine has nothing to free."""

    def wake(self):
        """Get ready to generate again."""

    @torch.no_grad()
    def generate(self, prompts, n, max_new_tokens, temperature=1.0, seed=0):
        """n completions of each prompt (a list of token ids), prompt-major, as a Rollout on the CPU.

        seed: one integer for the call, or one per prompt. A row's random numbers depend on its prompt's seed alone, not
        on what else is in the batch. temperature 0 takes the likeliest token (log-probabilities are then at 1).
        """
        seeds = seed if isinstance(seed, list) else [stream_seed(seed, i) for i in range(len(prompts))]
        per_batch = max(1, self.rows_at_once // n)
        parts = [self.decode(prompts[i:i + per_batch], n, max_new_tokens, temperature, seeds[i:i + per_batch])
                 for i in range(0, len(prompts), per_batch)]
        completion_BT, logp_BT, completion_len_B = (torch.cat(part).cpu() for part in zip(*parts))
        return pack_rollout(prompts, completion_BT, logp_BT, completion_len_B, self.stop_ids, self.tokenizer)

    def decode(self, prompts, n, max_new_tokens, temperature, seeds):
        """One batch of `generate`: completion_BT, logp_BT (both padded with 0 to max_new_tokens), completion_len_B."""
        shape = len(prompts) * n, max_new_tokens
        uniform_BT = torch.cat([torch.rand(n, max_new_tokens, dtype=torch.float64,
                                           generator=torch.Generator().manual_seed(s)) for s in seeds]).to(self.device)
        completion_BT = torch.zeros(shape, dtype=torch.long, device=self.device)
        logp_BT = torch.zeros(shape, device=self.device)
        completion_len_B = torch.full(shape[:1], max_new_tokens, device=self.device)
        stop_ids = torch.tensor(self.stop_ids, device=self.device)
        rows = torch.arange(shape[0], device=self.device)       # the rows still in the batch

        # Prompts are padded on the left, so that the next position of every row is the last one.
        texts = [torch.tensor(prompt, device=self.device) for prompt in prompts]
        tokens = pad_sequence(texts, batch_first=True, padding_side="left")
        seen = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True, padding_side="left")
        shares = [(self.model, 1 - self.ref_weight), (self.reference, self.ref_weight)]
        parts = [(model, share, DynamicCache(config=model.config)) for model, share in shares if share > 0]
        logits = self.next_logits(tokens, seen, parts).repeat_interleave(n, dim=0)
        for _, _, cache in parts:
            cache.batch_repeat_interleave(n)
        seen = seen.repeat_interleave(n, dim=0)
        for t in range(max_new_tokens):
            logp_BV = F.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
            if temperature == 0:
                token_B = logp_BV.argmax(-1)
            else:   # the first token at which the cumulative probability exceeds the row's uniform number
                cdf_BV = logp_BV.double().exp().cumsum(-1)
                token_B = torch.searchsorted(cdf_BV, uniform_BT[rows, t, None] * cdf_BV[:, -1:], right=True)[:, 0]
            completion_BT[rows, t] = token_B
            logp_BT[rows, t] = logp_BV.gather(1, token_B[:, None])[:, 0]
            ended = torch.isin(token_B, stop_ids)
            if ended.any():
                completion_len_B[rows[ended]] = t + 1
                kept = (~ended).nonzero()[:, 0]
                rows, token_B, seen = rows[kept], token_B[kept], seen[kept]
                for _, _, cache in parts:
                    cache.batch_select_indices(kept)
            if len(rows) == 0 or t + 1 == max_new_tokens:
                break
            seen = F.pad(seen, (0, 1), value=1)
            logits = self.next_logits(token_B[:, None], seen, parts)
        return completion_BT, logp_BT, completion_len_B

    def next_logits(self, tokens, seen, parts):
        """Logits (B, V) after `tokens`; `seen` is 1 on every position so far that is no padding.

        parts: (model, its share of the logits, its cache) of each model; vocabularies are cut to the shortest.
        """
        positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1]:]
        logits = [share * model(input_ids=tokens, attention_mask=seen, position_ids=positions, past_key_values=cache,
                                use_cache=True, logits_to_keep=1).logits[:, -1].float()
                  for model, share, cache in parts]
        vocabulary = min(part_BV.shape[1] for part_BV in logits)
        return sum(part_BV[:, :vocabulary] for part_BV in logits)


class VLLMEngine:
    """Sampling with vLLM, inside this process: every process drives its own engine, on its own device.

    With cfg.engine_parallel > 1, that many neighbouring processes hold one copy of the weights between them and answer
    each other's prompts: all of them must call generate equally often, with prompts or without.

    On CUDA, sleep() hands the memory of weights and KV cache to the update. The weights are then lost: load_weights()
    comes before the next wake(), or that raises RuntimeError. On a CPU nothing is handed over.
    """

    reference = None        # a mixture of two models has one

    def __init__(self, model_name, tokenizer, cfg, device, **options):
        """`options` go to vllm.LLM as they are, and win over what is set here."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"      # another process could not be handed weights
        os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", **os.environ})    # if not set
        import vllm.distributed

        self.tokenizer, self.window, self.asleep = tokenizer, cfg.max_prompt_tokens + cfg.max_new_tokens, []
        self.cuda = cuda = device.type == "cuda"
        if not dist.is_initialized():       # vLLM would start a group of its own, that can't sum CPU tensors on CUDA
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        settings = {
            "model": model_name, "max_num_seqs": cfg.engine_rows, "tensor_parallel_size": cfg.engine_parallel,
            "max_model_len": self.window, "skip_tokenizer_init": True, "use_tqdm_on_load": False,
            "distributed_executor_backend": "external_launcher" if dist.get_world_size() > 1 else None,
            "seed": stream_seed(cfg.seed, "engine", dist.get_rank() // cfg.engine_parallel) % 2 ** 32,
            "generation_config": "vllm",                # ignores the checkpoint's own top_k, top_p, ...
            "logprobs_mode": "processed_logprobs"}      # those of the distribution sampled from, at the temperature
        if cuda:
            settings |= {"dtype": "bfloat16", "gpu_memory_utilization": cfg.engine_memory, "enable_sleep_mode": True}
        else:       # a prompt in parts needs generators that can be set back, as a CPU's can't: prompts are read whole
            settings |= {"dtype": "float32", "kv_cache_memory_bytes": 2 ** 30, "enforce_eager": True,
                         "enable_chunked_prefill": False, "max_num_batched_tokens": max(self.window, 8192)}
            torch.compiler.set_stance("force_eager")    # compiling takes longer than it saves
        # LLM() seeds this process's random numbers and, on a CPU, disables torch.set_num_threads: both are put back.
        set_num_threads, random_state = torch.set_num_threads, random.getstate()
        try:
            with torch.random.fork_rng([device] if cuda else []):
                self.llm = vllm.LLM(**settings | options)
        except ValueError as error:
            raise UserError(f"vLLM can't start ({str(error).splitlines()[0]}): see --engine_memory.") from None
        torch.set_num_threads = set_num_threads
        random.setstate(random_state)
        # vLLM would destroy the default process group with itself, or fail at exit if main has: no clean-up of its own.
        self.llm.llm_engine.engine_core._finalizer.detach()

        self.dtype, self.group = self.llm.model_config.dtype, vllm.distributed.get_tp_group().cpu_group
        with torch.device("meta"):          # no weights: only its names and stop tokens are of interest
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_name))
        model.generation_config = SimpleNamespace(**self.llm.model_config.try_get_generation_config())
        self.names, self.stop_ids = set(model.state_dict()), stop_token_ids(model, tokenizer)

    def load_weights(self, named_tensors):
        """Copy weights in by name, one at a time. Raises KeyError on a name that the model lacks or that is missing."""
        missing = set(self.names)

        def cast():
            for name, tensor in named_tensors:
                missing.remove(name)
                yield name, tensor.to(self.dtype)

        self.rouse("weights")
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": cast()})
        if missing:
            raise KeyError(f"weights missing: {sorted(missing)}")
        if not self.llm.reset_prefix_cache():           # keys and values of prompts, computed with other weights
            raise RuntimeError("vLLM did not reset its prefix cache: it would go on with keys of older weights.")

    def sleep(self):
        """Make room for the update, which load_weights must follow."""
        if self.cuda and not self.asleep:
            self.llm.sleep(level=2)
            self.asleep = ["weights", "kv_cache"]

    def wake(self):
        """Get ready to generate again. Raises RuntimeError when no weights were loaded since sleep()."""
        if "weights" in self.asleep:
            raise RuntimeError("The engine lost its weights when it went to sleep: call load_weights first.")
        self.rouse("kv_cache")

    def rouse(self, tag):
        """Take back the memory that was handed over under `tag`."""
        if tag in self.asleep:
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=[tag])
            self.asleep.remove(tag)

    def generate(self, prompts, n, max_new_tokens, temperature=1.0, seed=0):
        """As HFEngine.generate, with other random numbers."""
        from vllm import SamplingParams

        self.wake()
        seeds = seed if isinstance(seed, list) else [stream_seed(seed, i) for i in range(len(prompts))]
        # One request a completion: with n > 1 in one, seeds would be neighbours, and temperature 0 would be refused.
        requests = [(prompt, stream_seed(s, j)) for prompt, s in zip(prompts, seeds) for j in range(n)]
        parts, own = [None] * dist.get_world_size(self.group), dist.get_rank(self.group)
        dist.all_gather_object(parts, requests, group=self.group)       # those that share an engine tell it the same
        inputs, params = [], []
        for prompt, row_seed in (request for part in parts for request in part):
            if len(prompt) + max_new_tokens > self.window:
                raise ValueError(f"{len(prompt)} + {max_new_tokens} tokens exceed the engine's window, {self.window}.")
            inputs.append({"prompt_token_ids": prompt})
            params.append(SamplingParams(
                temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, detokenize=False,
                seed=row_seed, max_tokens=max_new_tokens, stop_token_ids=self.stop_ids, logprobs=0, flat_logprobs=True))
        outputs, first = self.llm.generate(inputs, params, use_tqdm=False), sum(map(len, parts[:own]))
        rows = [output.outputs[0] for output in outputs[first:first + len(requests)]]
        tokens = [torch.tensor(row.token_ids) for row in rows]
        logps = [torch.tensor(row.logprobs.logprobs) for row in rows]
        return pack_rollout(prompts, pad_sequence(tokens, batch_first=True), pad_sequence(logps, batch_first=True),
                            torch.tensor([len(row) for row in tokens]), self.stop_ids, self.tokenizer)


def make_engine(cfg, model_name, tokenizer, device, ref_name=None, ref_weight=0.0):
    """The engine that --engine names, with weights of its own: auto is vLLM on CUDA where installed, else Hugging Face.

    With `ref_name` it samples from the mixture of two models.
    """
    installed = importlib.util.find_spec("vllm") is not None
    if cfg.engine == "vllm" and not installed:
        raise UserError("--engine vllm: vLLM is not installed: pip install -r requirements.txt on CUDA, "
                        "or take --engine hf.")
    if cfg.engine == "vllm" or (cfg.engine == "auto" and installed and device.type == "cuda"):
        if ref_name:
            from vllm_mixture import VLLMMixtureEngine
            engine = VLLMMixtureEngine(model_name, ref_name, tokenizer, cfg, device, ref_weight)
        else:
            engine = VLLMEngine(model_name, tokenizer, cfg, device)
        print0(f"engine: vLLM, {engine.dtype}")
        return engine
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    print0(f"engine: Hugging Face, {dtype}")
    reference = load_model(ref_name, dtype) if ref_name else None
    return HFEngine(load_model(model_name, dtype), tokenizer, device, cfg.engine_rows, reference, ref_weight)


def load_engine(cfg, folder, tokenizer, device, policy="mixture"):
    """The engine of a model's folder. Of logit_avg_grpo.py's final/ it samples `policy`: mixture, theta or reference.

    final/ itself is theta, final/reference/ the reference, and final/mixture.json holds the weight of the reference.
    """
    mixture, reference = Path(folder) / "mixture.json", str(Path(folder) / "reference")
    if policy == "mixture" and mixture.exists():
        ref_weight = json.loads(mixture.read_text())["ref_weight"]
        return make_engine(cfg, str(folder), tokenizer, device, reference, ref_weight)
    return make_engine(cfg, reference if policy == "reference" else str(folder), tokenizer, device)


def micro_batches(rollout, rows, cfg, device):
    """The given rows (a tensor of row numbers) in micro-batches of similar length: yields (rows, Rollout on `device`).

    A micro-batch is one row, or more within cfg.micro_batch_tokens, padding included. Each forward and backward is a
    collective, so every rank gets the same number, at least one: one that runs out repeats row 0 with length 0.
    """
    lengths = (rollout.prompt_len_B + rollout.completion_len_B).tolist()
    batches = []
    for row in sorted(rows.tolist(), key=lambda row: -lengths[row]):     # longest first: what is too large fails early
        if not batches or lengths[batches[-1][0]] * (len(batches[-1]) + 1) > cfg.micro_batch_tokens:
            batches.append([])
        batches[-1].append(row)
    most = max(1, *all_gather(len(batches)))
    for batch in batches:
        yield batch, rollout.select(batch, device)
    for _ in range(most - len(batches)):
        filler = rollout.select([0], device)
        filler.completion_len_B, filler.logp_BT = filler.completion_len_B * 0, filler.logp_BT[:, :0]
        yield [0], filler


class Clock:
    """Seconds of each phase of a step."""

    def __init__(self):
        self.seconds, self.last = {}, time.perf_counter()

    def lap(self, name):
        """Book the time since the last lap under `name`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[name], self.last = now - self.last, now


class Means:
    """Means over a step's tokens, micro-batch after micro-batch and over all ranks. For the log only."""

    def __init__(self):
        self.sums, self.tokens = {}, {}

    def add(self, mask_BT, **values_BT):
        """Take in values of the tokens where mask_BT is 1, under the names that the log shows."""
        for name, value_BT in values_BT.items():
            self.sums[name] = self.sums.get(name, 0.0) + (value_BT.detach() * mask_BT).sum().item()
            self.tokens[name] = self.tokens.get(name, 0.0) + mask_BT.sum().item()

    def over_ranks(self):
        """{name: mean}; 0 where no token was taken in."""
        sums, tokens = all_sum(*self.sums.values()), all_sum(*self.tokens.values())
        return {name: total / max(count, 1.0) for name, total, count in zip(self.sums, sums, tokens)}


def rollout_metrics(rollout, rewards_PG, clock):
    """What every file logs of a rollout, over all ranks; the seconds are this rank's."""
    rows = rewards_PG.numel()
    unanswered = sum(extract_answer(text) is None for text in rollout.texts)
    equal = (rewards_PG == rewards_PG[:, :1]).all(1).sum()
    reward, tokens, cut, no_signal, no_answer, nats, rows, groups = all_sum(
        rewards_PG.sum(), rollout.completion_len_B.sum(), (~rollout.finished_B).sum(), equal, unanswered,
        -rollout.logp_BT.sum(), rows, len(rewards_PG))
    return {"reward": reward / rows, "length": tokens / rows, "truncated": cut / rows, "no_answer": no_answer / rows,
            "no_signal": no_signal / groups, "entropy": nats / tokens, **clock.seconds,
            "tokens_per_s": tokens / sum(clock.seconds.values())}


# --- 5. evaluation ----------------------------------------------------------------------------------------------------

def evaluate(engine, problems, prompts, samples, max_new_tokens, temperature=1.0, seed=0):
    """Samples and scores `samples` completions of each problem; the problems are split over the ranks.

    Returns the same list on every rank, one dict a problem, in order: level, answer, and per sample rewards, lengths,
    finished, texts. The samples of a problem depend on seed and its place in the list, not on the number of ranks.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine, results = list(range(rank, len(problems), world_size)), []
    asked = mine or [0]     # processes that share an engine must all ask it something
    seeds = [stream_seed(seed, "eval", i) for i in asked]
    rollout = engine.generate([prompts[i] for i in asked], samples, max_new_tokens, temperature, seeds)
    rewards = score(rollout.texts, [problems[i].answer for i in asked for _ in range(samples)])
    for k, i in enumerate(mine):
        rows = slice(k * samples, (k + 1) * samples)
        results.append({"index": i, "level": problems[i].level, "answer": problems[i].answer,
                        "rewards": rewards[rows], "lengths": rollout.completion_len_B[rows].tolist(),
                        "finished": rollout.finished_B[rows].tolist(), "texts": rollout.texts[rows]})
    return sorted((result for part in all_gather(results) for result in part), key=lambda result: result["index"])


def pass_at_1(results):
    """eval_pass@1, the mean over problems of their mean reward, and eval_pass@1/<level> where problems have levels."""
    groups = {"eval_pass@1": results}
    for level in sorted({result["level"] for result in results} - {""}):
        groups[f"eval_pass@1/{level}"] = [result for result in results if result["level"] == level]
    mean = {result["index"]: sum(result["rewards"]) / len(result["rewards"]) for result in results}
    return {key: sum(mean[result["index"]] for result in group) / len(group) for key, group in groups.items()}


def evaluate_step(engine, problems, prompts, cfg, log, step):
    """The held-out metrics of a step; the first completion of the first three problems goes to samples.jsonl.

    A mixture's halves are measured alone too: eval_theta, and eval_reference, which never changes, at step 0. The
    engine stays awake: a rollout, which comes next, puts it to sleep.
    """
    settings = problems, prompts, cfg.eval_samples, cfg.max_new_tokens, cfg.temperature, cfg.seed
    engine.wake()
    started = time.perf_counter()
    results = evaluate(engine, *settings)
    seconds = time.perf_counter() - started
    alone = {}
    if engine.reference is not None:
        for name, ref_weight in [("eval_theta", 0.0)] + [("eval_reference", 1.0)] * (step == 0):
            alone[name] = pass_at_1(evaluate(engine.at(ref_weight), *settings))["eval_pass@1"]
    log.samples(step, "held-out", problems[:3], [r["texts"][0] for r in results], [r["rewards"][0] for r in results])
    metrics = pass_at_1(results) | alone
    if step == 0:       # nothing was trained yet: the row's other numbers are those of the evaluation
        lengths = [length for r in results for length in r["lengths"]]
        cut = [not finished for r in results for finished in r["finished"]]
        metrics |= {"reward": metrics["eval_pass@1"], "length": sum(lengths) / len(lengths),
                    "truncated": sum(cut) / len(cut), "grad_norm": 0.0, "loss": 0.0, "rollout_s": seconds,
                    "reward_s": 0.0, "update_s": 0.0, "tokens_per_s": sum(lengths) / seconds}
    return metrics


# --- 6. run log and checkpoints ---------------------------------------------------------------------------------------

class RunLog:
    """A run's folder: config.json, metrics.jsonl, samples.jsonl, and the line a step that a person reads.

    `dir` is the folder, `start` the step of the checkpoint to go on from (0 without one). Rank 0 writes; when it can't,
    every rank raises the same UserError.
    """

    def __init__(self, algorithm, cfg, world_size):
        self.cfg, self.rank, self.warned, self.writers = cfg, int(os.environ.get("RANK", 0)), set(), []
        name = "-".join([algorithm, Path(cfg.model).name, Path(cfg.dataset).stem, time.strftime("%Y%m%d-%H%M%S")])
        self.dir, problem = Path(cfg.run_dir or Path("runs") / name), None
        if self.rank == 0:
            try:
                self.prepare(algorithm, world_size)
            except ImportError as error:
                problem = f"{error.name} is not installed: pip install it, or leave --tensorboard and --wandb out."
            except (OSError, UserError) as error:
                problem = f"--run_dir {self.dir}: {error}."
        self.dir, problem = all_gather((self.dir, problem))[0]
        agree(problem)
        agree(None if (self.dir / "config.json").exists() else
              f"--run_dir {self.dir}: not every node sees this folder; name one on a disk that all nodes share.")
        self.start, self.began = latest_checkpoint(self.dir)[0], time.time()

    def prepare(self, algorithm, world_size):
        """Make the folder, or cut the logs of a resumed run back to its checkpoint."""
        if self.cfg.tensorboard:        # first, so that a missing package leaves no folder behind
            from torch.utils.tensorboard import SummaryWriter
        if self.cfg.wandb:
            import wandb
        if self.cfg.resume:
            start, _ = latest_checkpoint(self.dir)
            for path in (self.dir / "metrics.jsonl", self.dir / "samples.jsonl"):
                lines = path.read_text().splitlines(keepends=True) if start and path.exists() else []
                kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= start]
                path.with_suffix(".part").write_text("".join(kept))
                path.with_suffix(".part").rename(path)
        elif (self.dir / "config.json").exists():
            raise UserError("it already holds a run; name another folder, or continue that run with --resume")
        else:
            self.dir.mkdir(parents=True, exist_ok=True)
            git = shutil.which("git") and subprocess.run(
                ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
            device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
            versions = {"python": sys.version.split()[0], "torch": torch.__version__,
                        "transformers": transformers.__version__}
            record = {"algorithm": algorithm, **asdict(self.cfg), "git_commit": git.stdout.strip() if git else "",
                      "versions": versions, "processes": world_size, "device": device}
            (self.dir / "config.json").write_text(json.dumps(record, indent=2) + "\n")
        if self.cfg.tensorboard:
            board = SummaryWriter(self.dir)
            self.writers.append(lambda step, metrics: [board.add_scalar(k, v, step) for k, v in metrics.items()])
        if self.cfg.wandb:
            wandb.init(project="rlvr", name=self.dir.name, id=self.dir.name, resume="allow", config=asdict(self.cfg))
            self.writers.append(lambda step, metrics: wandb.log(metrics, step=step))

    def append(self, file, row):
        """Add a line of JSON to a file of the run."""
        if self.rank == 0:
            with open(self.dir / file, "a") as out:
                out.write(json.dumps(row) + "\n")

    def samples(self, step, kind, problems, texts, rewards):
        """Keep some completions to read: kind is "train" or "held-out"."""
        for problem, text, reward in zip(problems, texts, rewards):
            self.append("samples.jsonl", {"step": step, "kind": kind, "prompt": problem.prompt, "completion": text,
                                          "answer": problem.answer, "reward": reward})

    def write(self, step, metrics):
        """Append the step's metrics, print their line, and warn, once each, of what a person should look at."""
        self.append("metrics.jsonl", {"step": step, **metrics})
        if self.rank != 0:
            return
        for writer in self.writers:
            writer(step, metrics)
        seconds = (time.time() - self.began) / max(step - self.start, 1) * (self.cfg.steps - step)
        eta = f"  ETA {int(seconds) // 60}:{int(seconds) % 60:02}" if step > self.start else ""
        held_out = f"{metrics['eval_pass@1']:.3f}" if "eval_pass@1" in metrics else "  -  "
        print0(f"step {step:>{len(str(self.cfg.steps))}}/{self.cfg.steps}  reward {metrics['reward']:.3f}  "
               f"held-out pass@1 {held_out}  length {metrics['length']:5.1f}  grad {metrics['grad_norm']:.3f}  "
               f"rollout {metrics['rollout_s']:.2f} reward {metrics['reward_s']:.2f} "
               f"update {metrics['update_s']:.2f} s  {metrics['tokens_per_s']:,.0f} tok/s{eta}")
        for text in cautions(step, metrics):
            if text not in self.warned:
                self.warned.add(text)
                print0(f"note: {text}")

    def report(self, steps):
        """The before/after table of held-out pass@1, and three completions before and after."""
        if self.rank != 0:
            return
        rows = {row["step"]: row for row in map(json.loads, open(self.dir / "metrics.jsonl"))}
        before, after = rows[0], rows[steps]
        print0(f"\nheld-out pass@1      before   after {steps} steps")
        for key in sorted((k for k in after if k.startswith("eval_pass@1")), key=lambda k: (len(k), k)):
            label = key.partition("/")[2] or "all"
            print0(f"{'  ' + label:<20} {before[key]:6.3f}   {after[key]:6.3f}")
        samples = [s for s in map(json.loads, open(self.dir / "samples.jsonl")) if s["kind"] == "held-out"]
        for old, new in zip([s for s in samples if s["step"] == 0], [s for s in samples if s["step"] == steps]):
            print0(f"\n{str(old['prompt'])[:400]}   (answer {old['answer']})")
            for when, sample in (("before", old), ("after", new)):
                text = sample["completion"].replace("\n", "\n          ")
                print0(f"  {when:<7} {text[:600]}   [reward {sample['reward']:.0f}]")
        print0(f"\n{self.dir}: metrics.jsonl, samples.jsonl, checkpoints/, and final/, the trained model.")


def cautions(step, metrics):
    """What a person should know about a step's metrics, in sentences."""
    if step == 0:
        return []
    found = []
    if metrics["no_signal"] == 1:
        found.append("every group has equal rewards, so no answer stands out from its group: the problems may be "
                     "too easy or too hard for this model.")
    if metrics["truncated"] > 0.5:
        found.append("more than half of the completions were cut at --max_new_tokens: raise it.")
    if metrics["no_answer"] > 0.5:
        found.append("most completions contain no \\boxed{} answer: look at samples.jsonl.")
    if metrics.get("engine_gap", 0) > 0.1:
        found.append(f"engine and trainer log-probabilities differ by {metrics['engine_gap']:.2f} on average: "
                     "stale weights in the engine, another temperature, or too coarse a dtype.")
    if metrics["grad_norm"] == 0:
        found.append("the gradient is exactly 0: no completion of this step can move the weights.")
    if abs(metrics["loss"]) < 1e-3 and metrics["grad_norm"] > 0:
        found.append("a loss of about 0 is normal: advantages are centred and the ratio is 1. Look at reward and grad.")
    return found


def latest_checkpoint(run_dir):
    """(step, folder) of the newest complete checkpoint, or (0, None). Unfinished ones bear another name."""
    found = sorted(Path(run_dir).glob("checkpoints/step-*"))
    return (int(found[-1].name.removeprefix("step-")), found[-1]) if found else (0, None)


def agree(problem):
    """A barrier that also raises, on every rank, the first rank's problem (a string, or None)."""
    problem = next((p for p in all_gather(problem) if p), None)
    if problem:
        raise UserError(problem)


def save_checkpoint(run_dir, step, module, optimizer, extra=None):
    """Sharded weights and optimizer state, and `extra` of each rank (anything torch.save takes).

    Written under another name and renamed, so that a folder named step-* is complete; older ones are then removed.
    Raises UserError on every rank when the disk is full or can't be written.
    """
    folder = Path(run_dir) / "checkpoints" / f"step-{step:06d}"
    part, rank, problem = folder.with_name("part"), int(os.environ.get("RANK", 0)), None
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)
    agree(None)
    try:
        weights, optimizer_state = get_state_dict(module, optimizer)
        dcp.save({"module": weights, "optimizer": optimizer_state}, checkpoint_id=part)
        torch.save(extra, part / f"extra-{rank}.pt")
    except (OSError, RuntimeError, dcp.CheckpointException) as error:
        cause = str(error).strip().splitlines()[-1]
        problem = f"The checkpoint {folder} could not be written ({cause}): free some space, then --resume {run_dir}."
    agree(problem)
    if rank == 0:
        part.rename(folder)
        for old in sorted(folder.parent.glob("step-*"))[:-1]:
            shutil.rmtree(old)
    agree(None)


def load_checkpoint(run_dir, module, optimizer):
    """Load the newest complete checkpoint in place; returns this rank's `extra`. The number of ranks may change."""
    _, folder = latest_checkpoint(run_dir)
    weights, optimizer_state = get_state_dict(module, optimizer)
    dcp.load({"module": weights, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state)
    extra = folder / f"extra-{os.environ.get('RANK', 0)}.pt"
    return torch.load(extra, weights_only=False) if extra.exists() else None


def export(model, tokenizer, folder, dtype=torch.float32, reference=None, ref_weight=0.0):
    """Write `model` (possibly sharded) as a Hugging Face folder that from_pretrained loads.

    A `reference` goes into the subfolder reference/, and its weight into mixture.json, as load_engine reads them.
    """
    rank, part = int(os.environ.get("RANK", 0)), Path(folder).with_name("final.part")
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)
    for module, place in ((model, part), (reference, part / "reference")):
        weights = {}
        for name, tensor in named_weights(module) if module is not None else ():
            if rank == 0:
                weights[name] = tensor.to("cpu", dtype)
        if weights:
            if module.generation_config is not None:
                module.generation_config.do_sample = True       # or one that names a temperature is refused
            module.save_pretrained(place, state_dict=weights)
            tokenizer.save_pretrained(place)
            config = json.loads((place / "config.json").read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
            (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if rank == 0:
        if reference is not None:
            (part / "mixture.json").write_text(json.dumps({"ref_weight": ref_weight}) + "\n")
        part.rename(folder)
    agree(None)
