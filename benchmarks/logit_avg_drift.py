"""Does logit averaging keep a policy near its reference where the learning rate is too high for GRPO?

    python benchmarks/logit_avg_drift.py                        # five seeds, 30 runs; may be stopped and started again
    python benchmarks/logit_avg_drift.py --seeds 1 --steps 20   # a quick look; the full run's results stay as they are

On the built-in task the reference answers in a format that no reward asks for: a line an operation, then \\boxed{}. All
arms see the same prompts at the same high learning rate, but for the one that scales it by 1 - w, the factor by which
averaging shortens the policy's step. Measured on held-out problems, by samples of the final policy: accuracy; boxed,
the share of answers in a box; worked, the share that has a line for each operation; and the mean log-ratio to the
reference, an estimate of KL(policy || reference), in nats a token and a completion.
"""

import argparse
import csv
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402

REF_WEIGHT, BETAS, SAMPLES = 0.5, (0.001, 0.01, 0.04), 8
COLUMNS = {"accuracy": "accuracy", "boxed": "boxed", "worked": "worked", "kl_token": "KL a token",
           "kl_completion": "KL a completion", "length": "length"}


def arms(lr):
    """Name -> (program, flags) of everything that is compared."""
    return {"grpo": ("grpo.py", ["--lr", str(lr)]),
            **{f"grpo-beta-{beta}": ("grpo.py", ["--lr", str(lr), "--kl_coef", str(beta)]) for beta in BETAS},
            "grpo-scaled-lr": ("grpo.py", ["--lr", str((1 - REF_WEIGHT) * lr)]),
            "logit-average": ("logit_avg_grpo.py", ["--lr", str(lr), "--ref_weight", str(REF_WEIGHT)])}


def train(program, flags, folder):
    """Run to the end, from wherever an earlier try stopped."""
    if (folder / "final").exists():
        return
    begun = (folder / "config.json").exists()
    flags = ["--resume", str(folder)] if begun else ["--model", "tiny", *flags, "--run_dir", str(folder)]
    result = subprocess.run([sys.executable, program, *flags], cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"{program} {' '.join(flags)} failed:\n{result.stderr}")


@torch.no_grad()
def measure(folder):
    """The numbers of a model's folder, from SAMPLES completions of each held-out problem.

    COLUMNS and, for claims.py, lucky: the share of the right answers that have no work line, guesses that came out right.
    """
    reference_name, device = common.tiny_model(), torch.device("cpu")
    tokenizer = common.load_tokenizer(reference_name)
    problems, prompts = common.encode_prompts(common.load_problems("arithmetic", "test"), tokenizer, 64)
    engine = common.load_engine(SimpleNamespace(engine="hf", engine_rows=512), folder, tokenizer, device)
    rollout = engine.generate(prompts, SAMPLES, 96, 1.0, 0)
    reference = common.Policy(common.load_model(reference_name))
    cfg = SimpleNamespace(micro_batch_tokens=16384, temperature=1.0)
    rows = torch.arange(len(rollout.texts))
    log_ratio_BT = rollout.logp_BT - common.policy_logp(reference, rollout, rows, cfg, device)
    asked = [problem for problem in problems for _ in range(SAMPLES)]
    rewards = common.score(rollout.texts, [problem.answer for problem in asked])
    boxed = [common.extract_answer(text) is not None for text in rollout.texts]
    lines = [len(re.findall(r"^\d+[+-]\d=\d+$", text, re.MULTILINE)) for text in rollout.texts]
    worked = [n == int(problem.level) - 1 for n, problem in zip(lines, asked)]
    guessed = [n == 0 for n, reward in zip(lines, rewards) if reward > 0.5]
    return {"accuracy": statistics.fmean(rewards), "boxed": statistics.fmean(boxed),
            "worked": statistics.fmean(worked), "lucky": sum(guessed) / max(len(guessed), 1),
            "kl_token": (log_ratio_BT.sum() / rollout.mask_BT.sum()).item(),
            "kl_completion": log_ratio_BT.sum(1).mean().item(), "length": rollout.mask_BT.sum(1).mean().item()}


def write_results(rows, stem, args):
    """Every run to CSV, means and standard deviations over seeds to Markdown."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    with open(stem.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, ["arm", "seed", "lr", "steps", *COLUMNS], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    grouped = {}
    for row in rows:
        grouped.setdefault(row["arm"], []).append(row)
    mean = {arm: statistics.fmean(row["accuracy"] for row in group) for arm, group in grouped.items()}
    penalised = [arm for arm in mean if arm.startswith("grpo-beta")]
    lines = [f"Built-in task, {args.steps} steps at lr {args.lr:g}, w {REF_WEIGHT}; mean over seeds, ± their standard "
             "deviation.", "", "| arm | seeds | " + " | ".join(COLUMNS.values()) + " |",
             "|---" * (len(COLUMNS) + 2) + "|"]
    for arm, group in grouped.items():
        cells = []
        for key in COLUMNS:
            values = [row[key] for row in group]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):.3f}{spread}")
        seeds = sum(row["seed"] != "" for row in group)
        lines.append(f"| {arm} | {seeds or '-'} | " + " | ".join(cells) + " |")
    if penalised:
        lines += ["", f"Best KL penalty by held-out accuracy: {max(penalised, key=mean.get)} (chosen on the test "
                      "problems, in its favour)."]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 .. SEEDS - 1")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-3, help="of all arms but the scaled one (usual: 3e-4)")
    parser.add_argument("--arms", nargs="*", help="only these (default all)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "logit_avg_drift", help="where the runs are kept")
    parser.add_argument("--results", default="", help="where CSV and Markdown go, without suffix")
    args = parser.parse_args()
    work = args.runs.resolve() / f"lr-{args.lr:g}-steps-{args.steps}"
    full = args == parser.parse_args([])
    stem = Path(args.results or (ROOT / "benchmarks" / "results" / "logit_avg_drift" if full else work / "drift"))

    common.tiny_model()
    rows = [{"arm": "reference", "seed": "", "lr": "", "steps": 0, **measure(common.tiny_model())}]
    jobs = [(arm, seed) for seed in range(args.seeds) for arm in arms(args.lr) if not args.arms or arm in args.arms]
    done, started = 0, time.time()
    for i, (arm, seed) in enumerate(jobs, 1):
        program, flags = arms(args.lr)[arm]
        folder = work / f"{arm}-seed-{seed}"
        if not (folder / "drift.json").exists():
            steps = str(args.steps)
            train(program, [*flags, "--steps", steps, "--eval_every", steps, "--seed", str(seed)], folder)
            part = folder / "drift.part"
            part.write_text(json.dumps(measure(folder / "final")))
            part.rename(folder / "drift.json")
            done += 1
        numbers = json.loads((folder / "drift.json").read_text())
        rows.append({"arm": arm, "seed": seed, "lr": flags[1], "steps": args.steps, **numbers})
        left = (time.time() - started) / max(done, 1) * (len(jobs) - i)
        print(f"run {i}/{len(jobs)}  {arm} seed {seed}: accuracy {numbers['accuracy']:.3f}, "
              f"boxed {numbers['boxed']:.3f}, KL a token {numbers['kl_token']:.3f}; "
              f"about {left / 60:.0f} min to go", flush=True)
        lines = write_results(rows, stem, args)
    print("\n" + "\n".join(lines))
    print(f"\n{stem}.csv, {stem}.md")


if __name__ == "__main__":
    main()
