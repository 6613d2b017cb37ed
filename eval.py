"""eval.py: pass@k and majority vote of any checkpoint on any data set, with error bars.

    python eval.py --model runs/NAME --dataset arithmetic --samples 8 --k 1,4,8            # what a run has trained
    python eval.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset math500,aime25 --samples 16 --k 1,4,16
    torchrun --nproc_per_node 8 eval.py --model ... --dataset ...                           # problems split over 8 GPUs
    python eval.py --compare a.json b.json                                                  # paired difference b - a
    python eval.py --model runs/logit_avg_grpo-... --policy theta                           # a mixture's halves alone

With n samples of a problem, c of them right:

    pass@k   1 - C(n-c, k) / C(n, k), the chance that k of the samples hold a right one, unbiased (Chen et al., 2021,
             arXiv 2107.03374), averaged over problems. pass@1 is also called mean@n.
    maj@n    whether the answer that most samples give is right; tied answers share the point. Answers are the same when
             written alike, spaces and \\dfrac or \\frac aside. A sample without a boxed answer has no vote.
    ci95     mean +- 1.96 standard errors over problems: how far another draw of problems could move the score.

Prompts, sampling and reward are those of training (common.evaluate), so a score here and in the training log agree.
--out holds {dataset: {"pass@1": .., "ci95": [lo, hi], ...}}, with the number of right samples of each problem.
"""

import json
import math
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from transformers import AutoConfig, HfArgumentParser

import common
from common import UserError, arg, print0


@dataclass
class Config:
    model: str = arg("tiny", "a run's folder, a folder written by save_pretrained, a hub name, or tiny")
    dataset: str = arg("arithmetic", "data sets, separated by commas: names or files, see README")
    split: Literal["test", "train"] = arg("test", "which split of them")
    samples: int = arg(8, "completions per problem, n")
    k: str = arg("1", "pass@k for these k, separated by commas, each at most --samples")
    temperature: float = arg(1.0, "sampling temperature; 0 is greedy, with --samples 1")
    max_prompt_tokens: int = arg(1024, "longer prompts are dropped, never cut")
    max_new_tokens: int = arg(0, "completion length limit; 0: the run's own, else what the window leaves, at most 2048")
    limit: int = arg(0, "evaluate the first so many problems; 0: all")
    seed: int = arg(0, "names the random streams")
    out: str = arg("", "the JSON file (default eval-<model>.json)")
    policy: Literal["mixture", "theta", "reference"] = arg("mixture", "which policy of a logit_avg_grpo.py run")
    engine: Literal["auto", "vllm", "hf"] = arg("auto", "what generates; auto: vLLM on CUDA if installed, else hf")
    engine_rows: int = arg(512, "completions that the engine works on at a time")
    engine_memory: float = arg(0.85, "share of the GPU's memory that vLLM may take")
    engine_parallel: int = arg(1, "GPUs of a node that share one vLLM engine (tensor parallelism)")
    compare: list[str] = field(default_factory=list, metadata={"help": "two JSON files: print the difference instead"})


def pass_at_k(n, c, k):
    """The chance that k of n samples, c of them right, hold a right one. Raises ValueError for k > n."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_reward(answers, rewards):
    """The reward of the most frequent answer; tied answers share it. answers: strings, or None (which has no vote)."""
    votes, reward_of = Counter(), {}
    for answer, reward in zip(answers, rewards):
        if answer is not None:
            key = "".join(answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").split()).rstrip(".")
            votes[key] += 1
            reward_of.setdefault(key, reward)
    top = [reward_of[key] for key, count in votes.items() if count == max(votes.values())]
    return sum(top) / len(top) if top else 0.0


def mean_and_ci(values):
    """Mean over problems and its 95% confidence interval (mean +- 1.96 standard errors); one problem tells nothing."""
    n, mean = len(values), sum(values) / len(values)
    if n == 1:
        return mean, [-math.inf, math.inf]
    half = 1.96 * math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
    return mean, [mean - half, mean + half]


def clamp(interval):
    """An interval of a share, cut to 0..1."""
    return [min(1.0, max(0.0, bound)) for bound in interval]


def measure(results, ks):
    """The scores of one data set from common.evaluate's results (one dict a problem)."""
    n = len(results[0]["rewards"])
    correct = [sum(reward > 0.5 for reward in result["rewards"]) for result in results]
    answers = [[common.extract_answer(text) for text in result["texts"]] for result in results]
    scores = {}
    for k in sorted({1, *ks}):
        scores[f"pass@{k}"], interval = mean_and_ci([pass_at_k(n, c, k) for c in correct])
        scores["ci95" if k == 1 else f"ci95_pass@{k}"] = clamp(interval)
    scores[f"maj@{n}"] = sum(majority_reward(a, r["rewards"]) for a, r in zip(answers, results)) / len(results)
    share = len(results) * n
    scores |= {"truncated": sum(not done for r in results for done in r["finished"]) / share,
               "no_answer": sum(answer is None for row in answers for answer in row) / share,
               "length": sum(length for r in results for length in r["lengths"]) / share,
               "samples": n, "problems": len(results)}
    levels = {key: value for key, value in common.pass_at_1(results).items() if "/" in key}
    return scores | {key.removeprefix("eval_"): value for key, value in levels.items()} | {"correct": correct}


def print_scores(name, scores):
    """A data set's scores as a small table."""
    rows = [(key, scores[key], scores["ci95" if key == "pass@1" else f"ci95_{key}"])
            for key in scores if key.startswith("pass@") and "/" not in key]
    print0(f"\n{name}: {scores['problems']} problems x {scores['samples']} samples")
    for key, value, (low, high) in rows:
        print0(f"  {key:<12} {value:7.4f}   95% [{low:.4f}, {high:.4f}]")
    for key in (f"maj@{scores['samples']}", *(key for key in scores if "/" in key), "truncated", "no_answer"):
        print0(f"  {key:<12} {scores[key]:7.4f}")
    print0(f"  {'length':<12} {scores['length']:7.1f} tokens")


def compare(paths):
    """Print the paired difference, second file minus first, of pass@1 on each data set that both files hold."""
    if len(paths) != 2:
        raise UserError("--compare takes two JSON files that eval.py wrote.")
    try:
        first, second = (json.loads(Path(path).read_text()) for path in paths)
    except (OSError, ValueError) as error:
        raise UserError(f"--compare: {error}; give two JSON files that eval.py wrote.") from None
    shared = [name for name in first if name in second]
    if not shared:
        raise UserError(f"--compare: no data set is in both; {paths[0]} has {', '.join(first)}, {paths[1]} has "
                        f"{', '.join(second)}.")
    for name in shared:
        a, b = first[name], second[name]
        if a["questions"] != b["questions"]:
            raise UserError(f"--compare: the two files hold different problems of {name}: evaluate both with the same "
                            "--limit, --split and --max_prompt_tokens.")
        difference, (low, high) = mean_and_ci([y / b["samples"] - x / a["samples"]
                                               for x, y in zip(a["correct"], b["correct"])])
        print0(f"{name}: pass@1 {a['pass@1']:.4f} -> {b['pass@1']:.4f}, paired difference {difference:+.4f}, "
               f"95% [{low:+.4f}, {high:+.4f}] over {a['problems']} problems")
        differing = [key for key in a["settings"] if a["settings"][key] != b["settings"].get(key) and key != "model"]
        if differing:
            print0(f"  note: the settings differ in {', '.join(differing)}")


def run_name(model):
    """The last part of a model's name; of a run's final/ the run's."""
    return Path(model).parent.name if Path(model).name == "final" else Path(model).name


def settle(cfg):
    """Check the settings and fill in those that were left open. Returns (cfg, ks, the folder or name to load)."""
    try:
        ks = [int(k) for k in cfg.k.split(",")]
    except ValueError:
        raise UserError(f"--k {cfg.k}: write whole numbers separated by commas, such as 1,4,16.") from None
    if cfg.samples < 1 or min(ks) < 1 or max(ks) > cfg.samples:
        raise UserError(f"--k {cfg.k} with --samples {cfg.samples}: pass@k needs at least k samples; raise --samples.")
    if cfg.temperature < 0 or cfg.max_new_tokens < 0 or cfg.max_prompt_tokens < 1 or cfg.limit < 0:
        raise UserError("--temperature, --max_new_tokens, --max_prompt_tokens and --limit must not be negative.")
    if cfg.temperature == 0 and cfg.samples > 1:
        raise UserError(f"--temperature 0 with --samples {cfg.samples}: greedy samples are all alike; use --samples 1.")
    if min(cfg.engine_rows, cfg.engine_memory, cfg.engine_parallel) <= 0 or (
            int(os.environ.get("LOCAL_WORLD_SIZE", 1)) % cfg.engine_parallel):
        raise UserError("--engine_rows and --engine_memory must be above 0, and --engine_parallel must divide the "
                        "number of processes on a node.")
    folder = Path(cfg.model)
    run = folder.parent if folder.name == "final" else folder
    if (folder / "metrics.jsonl").exists():
        folder = folder / "final"
        if not folder.exists():
            raise UserError(f"--model {cfg.model}: that run has no final/ yet; finish it with --resume {cfg.model}.")
    if cfg.max_new_tokens == 0 and (run / "metrics.jsonl").exists():
        cfg.max_new_tokens = json.loads((run / "config.json").read_text())["max_new_tokens"]
    return ks, str(folder) if folder.exists() else cfg.model


def main():
    cfg, = HfArgumentParser(Config, allow_abbrev=False).parse_args_into_dataclasses(look_for_args_file=False)
    if cfg.compare:
        return compare(cfg.compare)
    ks, name = settle(cfg)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(hours=4))
    data = {dataset: common.load_problems(dataset, cfg.split, cfg.limit or None) for dataset in cfg.dataset.split(",")}
    name = common.resolve_model(name)
    tokenizer = common.load_tokenizer(name)
    model_config = common.load_pretrained(AutoConfig, name)
    if cfg.max_new_tokens == 0:
        cfg.max_new_tokens = max(1, min(2048, (common.window(model_config) or 4096) - cfg.max_prompt_tokens))
    common.check_window(model_config, cfg)
    engine = common.load_engine(cfg, name, tokenizer, device, cfg.policy)

    settings = {key: value for key, value in asdict(cfg).items() if key not in ("dataset", "out", "compare", "k")}
    print0("settings: " + ", ".join(f"{key} {value}" for key, value in settings.items()) + ", top_p 1, top_k off")
    label = f"{run_name(cfg.model)}{'' if cfg.policy == 'mixture' else '-' + cfg.policy}"
    out, report = Path(cfg.out or f"eval-{label}.json"), {}
    if rank == 0:
        out.parent.mkdir(parents=True, exist_ok=True)
    for dataset, problems in data.items():
        problems, prompts = common.encode_prompts(problems, tokenizer, cfg.max_prompt_tokens)
        engine.wake()
        results = common.evaluate(engine, problems, prompts, cfg.samples, cfg.max_new_tokens, cfg.temperature, cfg.seed)
        scores = measure(results, ks)
        print_scores(dataset, scores)
        questions = common.stream_seed(*(str(problem.prompt) for problem in problems))       # tells problem sets apart
        report[dataset] = scores | {"questions": questions, "settings": settings}
    if rank == 0:
        out.write_text(json.dumps(report, indent=1) + "\n")
        print0(f"\nwritten to {out}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:      # one sentence, no traceback, exit status 1, on every process
        raise SystemExit(f"error: {error}")
    if dist.is_initialized():       # after success only: with a failed peer, NCCL's own end may wait forever
        dist.destroy_process_group()
