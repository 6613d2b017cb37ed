"""Does a scaffold beat plain luck? grpo.py, lspo.py and lspo.py --scaffold_steps 0 on the built-in task, five seeds.

    python benchmarks/lspo_cliffs.py                        # 15 runs, on the CPU; broken off, it goes on next time
    python benchmarks/lspo_cliffs.py --seeds 1 --steps 10 --results /tmp/try --runs /tmp/try/runs     # does it work?

All arms train on chains of 3 to 8 terms, of which most of 7 and 8 are cliffs at first, with the same prompts, steps
and learning rate, and are evaluated on held-out chains of 2 to 8. grpo.py samples every prompt once; the other two
sample the cliffs twice. So lspo.py against grpo.py shows what scaffold and second samples do together, and lspo.py
against lspo.py --scaffold_steps 0 what the scaffold does.

Writes lspo_cliffs.csv (a row per arm, seed and number of terms) and lspo_cliffs.md, anew after each run.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
ARMS = {"GRPO": ["grpo.py"], "re-roll alone": ["lspo.py", "--scaffold_steps", "0"], "LSPO": ["lspo.py"]}
COLUMNS = ["arm", "seed", "steps", "terms", "before", "after", "cliffs", "rescued", "rerolled", "successes", "seconds"]


def train(arm, folder, seed, steps):
    """Run an arm into `folder`; a run that was broken off goes on, a finished one is left as it is."""
    if (folder / "final").exists():
        return
    script, *flags = ARMS[arm]
    flags += ["--model", "tiny", "--dataset", "arithmetic:3-8", "--eval_dataset", "arithmetic:2-8", "--group_size", "8",
              "--eval_problems", "400", "--eval_every", str(min(50, steps)), "--steps", str(steps), "--seed", str(seed),
              "--save_every", "50", "--run_dir", str(folder)]
    if (folder / "config.json").exists():
        flags = ["--resume", str(folder)]
    done = subprocess.run([sys.executable, str(REPO / script), *flags], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout[-3000:]}\n{script} {' '.join(flags)}\nended with status {done.returncode}; "
                 "the runs before it are kept.")


def read(arm, folder, seed, steps):
    """A finished run as rows of the CSV: one per number of terms, and "all" over all held-out problems."""
    first, *after = map(json.loads, open(folder / "metrics.jsonl"))
    group_size = json.loads((folder / "config.json").read_text())["group_size"]
    counts = dict.fromkeys(("cliffs", "rescued", "rerolled", "successes"), "")
    if "cliffs" in after[0]:        # grpo.py doesn't count them
        rerolled = [(row["cliffs"] - row["cliffs_left"]) * group_size for row in after]
        counts = {"cliffs": sum(row["cliffs"] for row in after), "rescued": sum(row["rescued"] for row in after),
                  "rerolled": sum(rerolled),
                  "successes": sum(row["reroll_success"] * n for row, n in zip(after, rerolled))}
        counts = {key: round(value) for key, value in counts.items()}
    seconds = sum(value for row in after for key, value in row.items() if key.endswith("_s") and "per" not in key)
    return [{"arm": arm, "seed": seed, "steps": steps, "terms": key.partition("/")[2] or "all", "before": first[key],
             "after": after[-1][key], "seconds": round(seconds, 1), **counts}
            for key in first if key.startswith("eval_pass@1")]


def mean_and_error(values):
    """"0.812 ± 0.004": the mean and its standard error; the mean alone where there is one value."""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{error}"


def table(rows):
    """The markdown report of the CSV's rows."""
    value = {(row["arm"], row["seed"], row["terms"]): row for row in rows}
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    seeds = {arm: sorted({row["seed"] for row in rows if row["arm"] == arm}) for arm in arms}
    common = [seed for seed in seeds[arms[0]] if all(seed in seeds[arm] for arm in arms)]
    terms = sorted({row["terms"] for row in rows}, key=lambda name: (name == "all", name))
    pairs = [("LSPO", other) for other in ("re-roll alone", "GRPO") if {"LSPO", other} <= set(arms)]
    lines = [f"Held-out pass@1 after {rows[0]['steps']} steps, mean over seeds ± standard error; differences are of "
             "runs with the same seed.", "",
             "| terms | before | " + " | ".join(f"{arm} ({len(seeds[arm])})" for arm in arms)
             + "".join(f" | {a} - {b}" for a, b in pairs) + " |", "|---" * (2 + len(arms) + len(pairs)) + "|"]
    for name in terms:
        cells = [name, mean_and_error([row["before"] for row in rows if row["terms"] == name])[:5]]
        cells += [mean_and_error([value[arm, seed, name]["after"] for seed in seeds[arm]]) for arm in arms]
        cells += [mean_and_error([value[a, seed, name]["after"] - value[b, seed, name]["after"] for seed in common])
                  if common else "" for a, b in pairs]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| arm | cliffs met | rescued | share rescued | re-roll success | seconds a run |", "|---" * 6 + "|"]
    for arm in arms:
        runs = [value[arm, seed, "all"] for seed in seeds[arm]]
        seconds = f"{statistics.mean(run['seconds'] for run in runs):.0f}"
        if runs[0]["cliffs"] == "":
            lines.append(f"| {arm} | not counted | | | | {seconds} |")
            continue
        cliffs, rescued, rerolled, successes = (
            sum(run[key] for run in runs) for key in ("cliffs", "rescued", "rerolled", "successes"))
        lines.append(f"| {arm} | {cliffs} | {rescued} | {rescued / max(cliffs, 1):.3f} | "
                     f"{successes / max(rerolled, 1):.3f} | {seconds} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 .. N-1")
    parser.add_argument("--steps", type=int, default=200, help="steps of each run")
    parser.add_argument("--results", type=Path, default=REPO / "benchmarks" / "results", help="folder of the tables")
    parser.add_argument("--runs", type=Path, default=REPO / "runs" / "lspo_cliffs", help="folder of the runs")
    args = parser.parse_args()
    jobs = [(seed, arm) for seed in range(args.seeds) for arm in ARMS]
    args.results.mkdir(parents=True, exist_ok=True)
    rows, began, trained = [], time.time(), 0
    for number, (seed, arm) in enumerate(jobs, start=1):
        folder = args.runs / f"{arm.replace(' ', '-')}-{args.steps}-steps-seed-{seed}"
        finished = (folder / "final").exists()
        train(arm, folder, seed, args.steps)
        trained += not finished
        rows += read(arm, folder, seed, args.steps)
        with open(args.results / "lspo_cliffs.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        (args.results / "lspo_cliffs.md").write_text(table(rows))
        left = (time.time() - began) / max(trained, 1) * (len(jobs) - number)
        overall = next(row["after"] for row in rows[::-1] if row["terms"] == "all")
        print(f"{number}/{len(jobs)}  {arm}, seed {seed}: held-out pass@1 {overall:.3f}"
              f"{'  (was finished)' if finished else ''}  about {left // 60:.0f}:{left % 60:02.0f} left", flush=True)
    print(f"\n{table(rows)}\n{args.results / 'lspo_cliffs.csv'} and .md")


if __name__ == "__main__":
    main()
