"""All seven algorithms on the built-in task, side by side, over several seeds: learning curves, difficulty, a table.

    python benchmarks/compare.py                    # 5 seeds, 35 runs, two at a time; broken off, it goes on next time
    python benchmarks/compare.py --quick            # 1 seed, 60 steps: does it work?

The same base, the same problems in the same order per seed (16 prompts x 8 completions a step, chains of 2 to 8 terms),
the same 300 steps and the same held-out problems of 2 to 10 terms, of which 9 and 10 are never trained on. Each file
runs through its command line with its own TINY settings otherwise: learning rates were set by hand per file, on the
same task, so the differences between files are not free of that choice.

Writes benchmarks/results/compare.csv (every evaluation), compare.md (the table) and compare.png (needs matplotlib).
"""

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ALGORITHMS = ("grpo", "logit_avg_grpo", "mu_grpo", "conspo", "lpo", "lspo", "popo")
TRAINED = [str(terms) for terms in range(2, 7)]     # the terms of "held-out pass@1" elsewhere
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}      # Student's t for n seeds


def train(algorithm, seed, steps, folder):
    """One run through the command line. A finished one is left as it is, a broken-off one goes on."""
    if (folder / "final").exists():
        return
    flags = ["--model", "tiny", "--dataset", "arithmetic:2-8", "--eval_dataset", "arithmetic:2-10", "--steps", steps,
             "--prompts_per_step", 16, "--group_size", 8, "--eval_problems", 400, "--eval_samples", 2, "--eval_every",
             min(25, steps), "--save_every", 100, "--seed", seed, "--run_dir", folder]
    if (folder / "config.json").exists():
        flags = ["--resume", folder]
    done = subprocess.run([sys.executable, f"{algorithm}.py", *map(str, flags)], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{algorithm}, seed {seed}:\n{done.stdout[-2000:]}")


def read(folder):
    """(evaluations [(step, terms, pass@1, length)], seconds of each phase) of a finished run."""
    rows = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    evaluations = [(row["step"], key.partition("/")[2], row[key], row["length"])
                   for row in rows for key in row if key.startswith("eval_pass@1/")]
    return evaluations, {phase: sum(row.get(phase, 0.0) for row in rows[1:])
                         for phase in ("rollout_s", "reward_s", "update_s", "scaffold_s", "sync_s")}


def mean_ci(values, sign=""):
    """The mean over seeds as text, with the half width of its 95% interval where there are several."""
    n, text = len(values), f"{statistics.mean(values):{sign}.3f}"
    return text if n == 1 else f"{text} +- {T_95.get(n, 1.96) * statistics.stdev(values) / math.sqrt(n):.3f}"


def table(curves, seconds, steps, seeds):
    """The summary as markdown; differences from GRPO are paired by seed."""
    def final(algorithm, terms, at=steps):
        return [statistics.mean(curves[algorithm, seed][at, t] for t in terms) for seed in seeds]

    lines = [f"Seeds: {len(seeds)}. {steps} steps, held-out pass@1 at temperature 1, +- 95% interval over seeds.", "",
             "| file | before, 2-6 terms | after, 2-6 | against grpo.py, paired | 7-8 | 9-10, not trained on | s a run |",
             "|---|---|---|---|---|---|---|"]
    for algorithm in ALGORITHMS:
        cells = [mean_ci(final(algorithm, TRAINED, 0)), mean_ci(final(algorithm, TRAINED))]
        pairs = [a - b for a, b in zip(final(algorithm, TRAINED), final("grpo", TRAINED))]
        cells.append("-" if algorithm == "grpo" else mean_ci(pairs, "+"))
        cells += [mean_ci(final(algorithm, terms)) for terms in (["7", "8"], ["9", "10"])]
        cells.append(f"{statistics.mean(sum(seconds[algorithm, seed].values()) for seed in seeds):.0f}")
        lines.append(f"| {algorithm}.py | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(curves, steps, seeds, path):
    """Learning curves, mean and range over seeds, on 2 to 6 terms."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no figure: pip install matplotlib")
        return
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for algorithm in ALGORITHMS:
        at = sorted({step for step, _ in curves[algorithm, seeds[0]]})
        runs = [[statistics.mean(curves[algorithm, seed][step, t] for t in TRAINED) for step in at] for seed in seeds]
        line, = axes.plot(at, [statistics.mean(column) for column in zip(*runs)], label=algorithm)
        low, high = [min(column) for column in zip(*runs)], [max(column) for column in zip(*runs)]
        axes.fill_between(at, low, high, alpha=0.12, color=line.get_color())
    axes.set(xlabel="step", ylabel="held-out pass@1, 2 to 6 terms", xlim=(0, steps), ylim=(0.3, 1.0))
    axes.legend(ncols=2, fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "compare")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    seeds, steps = (range(1), 60) if args.quick else (range(args.seeds), args.steps)
    results = args.runs if args.quick else RESULTS
    runs = [(algorithm, seed) for seed in seeds for algorithm in ALGORITHMS]
    folder = {run: args.runs / f"{run[0]}-{steps}-{run[1]}" for run in runs}
    began, finished = time.time(), 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for run, _ in zip(runs, pool.map(lambda run: train(*run, steps, folder[run]), runs)):
            finished += 1
            left = (time.time() - began) / finished * (len(runs) - finished)
            print(f"{finished}/{len(runs)}  {run[0]}, seed {run[1]}   about {left / 60:.0f} min left", flush=True)
    results.mkdir(parents=True, exist_ok=True)
    curves, seconds = {}, {}
    with open(results / "compare.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["algorithm", "seed", "step", "terms", "pass@1", "length"])
        for run in runs:
            evaluations, seconds[run] = read(folder[run])
            curves[run] = {(step, terms): value for step, terms, value, _ in evaluations}
            out.writerows([*run, *row] for row in evaluations)
    config = json.loads((folder[runs[0]] / "config.json").read_text())
    text = table(curves, seconds, steps, seeds)
    text += (f"\nCommit {config['git_commit'][:10]}, torch {config['versions']['torch']}, {config['device']}, "
             f"{args.jobs} runs at a time with a thread each. "
             f"`python benchmarks/compare.py --seeds {len(seeds)} --jobs {args.jobs}`\n")
    (results / "compare.md").write_text(text)
    draw(curves, steps, list(seeds), results / "compare.png")
    print("\n" + text)


if __name__ == "__main__":
    main()
