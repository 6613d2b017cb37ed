"""What a few huge stages save, and what stale data cost: mu_grpo.py against grpo.py on the built-in task.

    python benchmarks/mu_grpo_stages.py                     # five seeds; on two cores of their own about an hour
    python benchmarks/mu_grpo_stages.py --seeds 1 --steps 8 # does it run at all

Every run trains on the same number of completions, --steps updates of 16 prompts x 8, and is started through its own
command line, one after the other, since they are timed. Started again it skips finished runs and resumes a killed one.
Writes benchmarks/results/mu_grpo_stages.csv, one line a run, and .md, the tables over seeds.

    a. seconds per update by phase, for grpo.py with one and with four updates per rollout and for 4 stages to one stage
       per four updates. grpo.py books the loading of the engine's weights under update.
    b. held-out pass@1 when the data of 4 stages are trained on with the classic clip, with the relaxed one, and with
       each scope of the veto, at two learning rates.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROMPTS = 16
PHASES = ("rollout_s", "reward_s", "update_s", "sync_s")
CLASSIC = ["--clip_min", "0.8", "--clip_max", "1.2", "--veto_scope", "none"]


def arms(steps):
    """name: (script, flags), in the order of the tables."""
    quarter = ["--steps", steps // 4, "--prompts_per_step", 4 * PROMPTS, "--updates_per_rollout", 4]
    single = ["--steps", steps, "--prompts_per_step", PROMPTS]
    found = {"GRPO, mu = 1": ("grpo.py", single), "GRPO, mu = 4": ("grpo.py", quarter)}
    for stages in dict.fromkeys((steps // 4, min(10, steps))):
        found[f"mu-GRPO, {stages} stages"] = ("mu_grpo.py", [*single, "--stages", stages])
    stale = [*single, "--stages", 4]
    found["4 stages, classic clip, no veto"] = ("mu_grpo.py", [*stale, *CLASSIC])
    found["4 stages, relaxed clip, no veto"] = ("mu_grpo.py", [*stale, "--veto_scope", "none"])
    for scope in ("trigger", "suffix", "suffix_non_trigger", "sequence"):
        found[f"4 stages, relaxed clip, veto {scope} < 1e-2"] = (
            "mu_grpo.py", [*stale, "--veto_scope", scope, "--veto_threshold", 1e-2])
    found["4 stages, relaxed clip, veto sequence < 1e-4"] = ("mu_grpo.py", stale)
    return found


def train(script, flags, run_dir):
    """Run to the end, or go on with what a killed benchmark left; nothing is done for a finished run."""
    if (run_dir / "final").exists():
        return
    start = ["--resume", run_dir] if (run_dir / "config.json").exists() else [*flags, "--run_dir", run_dir]
    log = run_dir.with_suffix(".log")
    with open(log, "a") as out:
        command = [sys.executable, HERE.parent / script, *start]
        code = subprocess.run(list(map(str, command)), stdout=out, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"{script} ended with exit status {code}: see {log}")


def measure(run_dir, updates):
    """One run's numbers, from its metrics.jsonl."""
    rows = [json.loads(line) for line in open(run_dir / "metrics.jsonl")][1:]
    held_out = [row["eval_pass@1"] for row in rows if "eval_pass@1" in row]

    def mean(key):
        return statistics.fmean(row[key] for row in rows) if key in rows[0] else None

    lowest = min((row["negative_ratio"] for row in rows if "negative_ratio" in row), default=None)
    found = {"pass@1": held_out[-1], "best_pass@1": max(held_out), "staleness": mean("staleness"),
             "clip_frac": mean("clip_frac"), "veto_frac": mean("veto_frac"), "lowest_negative_ratio": lowest}
    seconds = {phase: sum(row.get(phase, 0) for row in rows) / updates for phase in PHASES}
    return found | seconds | {"update_total_s": sum(seconds.values())}


def spread(results, key, digits=3):
    """mean and standard deviation over seeds, as text."""
    values = [result[key] for result in results if result[key] is not None]
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def table(header, lines):
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *lines))


def report(results, options):
    """The markdown page."""
    by_arm = {}
    for result in results:
        by_arm.setdefault((result["lr"], result["arm"]), []).append(result)
    acted = {lr: statistics.fmean(result["veto_frac"] for result in results
                                  if result["arm"].endswith("< 1e-4") and result["lr"] == lr) for lr in options.lrs}
    parts = [
        "# Stages: what they save, what stale data cost",
        f"`python benchmarks/mu_grpo_stages.py --seeds {options.seeds} --steps {options.steps}`, {os.cpu_count()} CPU "
        f"cores. Built-in task, {options.steps} updates of {PROMPTS} prompts x 8 completions in every run, constant "
        f"learning rate; mean ± standard deviation over {options.seeds} seeds.",
        f"## a. Seconds per update, at equal rollouts (learning rate {options.lrs[-1]})",
        table(["", "rollout", "reward", "update", "sync", "total"],
              [[arm, *(spread(found, phase, 4) for phase in PHASES), spread(found, "update_total_s", 4)]
               for (lr, arm), found in by_arm.items() if lr == options.lrs[-1]]),
        "grpo.py books sync under update. Runs whose answers grow or shrink differ in seconds for that reason too.",
        "## b. Held-out pass@1"]
    for lr in options.lrs:
        parts += [f"Learning rate {lr}:", table(
            ["", "at the end", "best", "staleness", "clip_frac", "veto_frac", "lowest negative_ratio"],
            [[arm, *(spread(found, key) for key in ("pass@1", "best_pass@1", "staleness", "clip_frac", "veto_frac",
                                                    "lowest_negative_ratio"))]
             for (rate, arm), found in by_arm.items() if rate == lr])]
    parts.append("The published threshold of 1e-4 is made for thousands of updates and long answers. Here it vetoes "
                 + " and ".join(f"{100 * share:.3f}% (learning rate {lr})" for lr, share in acted.items())
                 + " of the tokens with A < 0, so the scopes are compared at 1e-2, where more is vetoed.")
    return "\n\n".join(parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=240, help="updates of every run, a multiple of 4")
    parser.add_argument("--lrs", nargs="+", default=["3e-4", "1e-4"])
    parser.add_argument("--runs", type=Path, default=HERE / "runs" / "mu_grpo_stages", help="where the runs are kept")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where the tables are written")
    options = parser.parse_args()
    if options.steps < 4 or options.steps % 4:
        parser.error("--steps must be a multiple of 4, so that every run makes as many completions")
    plan = [(lr, seed, arm, *rest) for seed in range(options.seeds) for lr in options.lrs
            for arm, rest in arms(options.steps).items()]
    options.runs.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    results, began, skipped = [], time.time(), 0
    for number, (lr, seed, arm, script, flags) in enumerate(plan, 1):
        words = "".join(letter if letter.isalnum() else "-" for letter in arm)
        run_dir = options.runs / f"{options.steps}-{lr}-{words}-seed{seed}"
        skipped += (run_dir / "final").exists()
        rows = options.steps // 4 if flags[1] == options.steps // 4 else options.steps
        train(script, ["--model", "tiny", *flags, "--lr", lr, "--lr_schedule", "constant", "--seed", seed,
                       "--eval_every", max(1, rows // 10), "--save_every", max(1, rows // 4)], run_dir)
        results.append({"arm": arm, "lr": lr, "seed": seed, **measure(run_dir, options.steps)})
        left = round((time.time() - began) / max(number - skipped, 1) * (len(plan) - number))
        eta = f"ETA {left // 60}:{left % 60:02}" if number > skipped else "was done"
        print(f"[{number}/{len(plan)}] {arm}, lr {lr}, seed {seed}: pass@1 {results[-1]['pass@1']:.3f}, "
              f"{results[-1]['update_total_s']:.3f} s per update  {eta}", flush=True)
    with open(options.out / "mu_grpo_stages.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, results[0])
        writer.writeheader()
        writer.writerows(results)
    (options.out / "mu_grpo_stages.md").write_text(report(results, options))
    print(f"wrote {options.out / 'mu_grpo_stages.csv'} and .md")


if __name__ == "__main__":
    main()
