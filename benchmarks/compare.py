"""All seven algorithms on the built-in task, side by side: what they learn, what it costs, and how sure that is.

    python benchmarks/compare.py                    # 5 seeds, two runs at a time (one at a time: 103 minutes, measured)
    python benchmarks/compare.py --quick            # does it work? 1 seed, 40 steps, five minutes

Broken off, it goes on next time where it was. Three stages, each through the files' own command lines:

    1. the grid   Each file is trained with each learning rate of LRS on problems and seeds of its own, which nothing
                  else uses. The rate with the best held-out accuracy is the file's rate from then on.
    2. training   Each file, five seeds. The same base; per seed the same problems (2 to 8 terms) in the same order;
                  equal prompts, completions and steps; the same held-out problems of 2 to 10 terms every 25 steps.
    3. pass@k     The base and each final policy answer the held-out problems 32 times (eval.py).

All settings but these are the file's TINY, and those were set by hand on this task: POPO's and LSPO's own flags, above
all. Nothing was chosen by looking at 9 and 10 terms, which are never trained on.

Writes into benchmarks/results/: compare_grid.csv, compare.csv (every evaluation), compare_pass_at_k.csv, compare.md (the
tables) and compare.png (needs matplotlib). With --quick they stay under runs/compare-quick/.
"""

import argparse
import csv
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from eval import pass_at_k  # noqa: E402
from tasks import arithmetic_problem, arithmetic_problems  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
ALGORITHMS = ("grpo", "logit_avg_grpo", "mu_grpo", "conspo", "lpo", "lspo", "popo")
LRS, GRID_SEEDS, GRID_STEPS = ("1e-4", "3e-4", "1e-3"), (100, 101), 200
KS = (1, 2, 4, 8, 16, 32)
PHASES = {"rollout_s": "rollout", "reward_s": "reward", "update_s": "update", "scaffold_s": "scaffold", "sync_s": "sync"}
RANGES = {"2-6": range(2, 7), "7-8": range(7, 9), "9-10": range(9, 11)}
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}     # Student's t for n seeds


# --- running --------------------------------------------------------------------------------------------------------

def command(script, *flags):
    """One command of the repository on one thread; its output if it fails."""
    done = subprocess.run([sys.executable, script, *map(str, flags)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(map(str, flags))}\n{done.stdout[-2000:]}")


def train(script, folder, *flags):
    """A run to its end: a finished one is left as it is, a broken-off one goes on."""
    if (folder / "config.json").exists():
        if not (folder / "final").exists():
            command(script, "--resume", folder)
    else:
        command(script, "--model", "tiny", "--prompts_per_step", 16, "--group_size", 8, "--save_every", 100,
                "--run_dir", folder, *flags)


def run_all(title, jobs, at_a_time):
    """Calls of `train` or `command`, given as (name, function, *arguments), with a progress line each."""
    began = time.time()
    with ThreadPoolExecutor(at_a_time) as pool:
        for n, (job, _) in enumerate(zip(jobs, pool.map(lambda job: job[1](*job[2:]), jobs)), 1):
            left = (time.time() - began) / n * (len(jobs) - n) / 60
            print(f"{title} {n}/{len(jobs)}  {job[0]}   about {left:.0f} min left", flush=True)


def tuning_problems(folder):
    """Writes the grid's own problems, 3 to 8 terms, none of which the comparison has: (train file, test file)."""
    used = {p.prompt for name, split in (("arithmetic:2-8", "train"), ("arithmetic:2-10", "test"))
            for p in arithmetic_problems(name, split)}
    rng, rows = random.Random("compare.py, the grid"), {"train": [], "test": []}
    for _ in range(1200):
        for terms in range(3, 9):
            problem = arithmetic_problem(rng, terms)
            # The checksum is tasks.py's: pre-training has not seen the quarter that is held out.
            split = "test" if zlib.crc32(problem.prompt.encode()) % 4 == 0 else "train"
            if problem.prompt not in used:
                used.add(problem.prompt)
                rows[split].append({"problem": problem.prompt, "answer": problem.answer, "solution": problem.solution,
                                    "level": problem.level})
    folder.mkdir(parents=True, exist_ok=True)
    for split in rows:
        (folder / f"tune-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[split]))
    return folder / "tune-train.jsonl", folder / "tune-test.jsonl"


def settings(steps, problems, lr, seed):
    """The flags of a run of stage 2."""
    return ["--dataset", "arithmetic:2-8", "--eval_dataset", "arithmetic:2-10", "--steps", steps, "--eval_every",
            min(25, steps), "--eval_problems", problems, "--eval_samples", 2, "--lr", lr, "--seed", seed]


def choose_rates(args):
    """{algorithm: learning rate} and the grid's rows (algorithm, lr, seed, pass@1 on 3 to 6 terms)."""
    train_file, test_file = tuning_problems(args.runs)
    runs = [(algorithm, lr, seed) for seed in GRID_SEEDS for lr in LRS for algorithm in ALGORITHMS]
    folders = {run: args.runs / "grid-{}-{}-{}".format(*run) for run in runs}
    run_all("grid", [(f"{run[0]}, lr {run[1]}, seed {run[2]}", train, f"{run[0]}.py", folders[run], "--dataset",
                      train_file, "--eval_dataset", test_file, "--steps", GRID_STEPS, "--eval_every", GRID_STEPS,
                      "--eval_problems", 400, "--eval_samples", 4, "--lr", run[1], "--seed", run[2])
                     for run in runs], args.jobs)
    rows = []
    for run in runs:
        last = json.loads((folders[run] / "metrics.jsonl").read_text().splitlines()[-1])
        rows.append((*run, statistics.mean(last[f"eval_pass@1/{terms}"] for terms in range(3, 7))))

    def score(algorithm, lr):
        return statistics.mean(row[3] for row in rows if row[:2] == (algorithm, lr))
    return {algorithm: max(LRS, key=lambda lr: score(algorithm, lr)) for algorithm in ALGORITHMS}, rows


# --- reading --------------------------------------------------------------------------------------------------------

class Run:
    """A finished run: curve {(step, terms): pass@1}, length {step: mean tokens since the last evaluation}, seconds
    {phase: s}, seconds_to {step: s of training so far}."""

    def __init__(self, folder):
        rows = [json.loads(line) for line in open(folder / "metrics.jsonl")]
        self.curve, self.length, self.seconds_to = {}, {}, {}
        self.seconds = dict.fromkeys(PHASES, 0.0)
        lengths = []
        for row in rows:
            if row["step"] > 0:         # row 0 describes the evaluation of the base
                lengths.append(row["length"])
                for phase in PHASES:
                    self.seconds[phase] += row.get(phase, 0.0)
            for key in row:
                if key.startswith("eval_pass@1/"):
                    self.curve[row["step"], int(key.partition("/")[2])] = row[key]
                    self.seconds_to[row["step"]] = sum(self.seconds.values())
                    self.length[row["step"]] = statistics.mean(lengths) if lengths else row["length"]
            if "eval_pass@1" in row:
                lengths = []

    def accuracy(self, step, terms=RANGES["2-6"]):
        return statistics.mean(self.curve[step, t] for t in terms)

    def time_to(self, target):
        """(step, seconds) of the first evaluation with at least this accuracy on 2 to 6 terms, or None."""
        reached = [step for step in sorted(self.seconds_to) if self.accuracy(step) >= target]
        return (reached[0], self.seconds_to[reached[0]]) if reached else None


def read_pass_at_k(path):
    """{(terms, k): pass@k} of a JSON that eval.py wrote."""
    report = json.loads(path.read_text())["arithmetic:2-10"]
    levels = [int(problem.level) for problem in arithmetic_problems("arithmetic:2-10", "test")][:report["problems"]]
    return {(terms, k): statistics.mean(pass_at_k(report["samples"], c, k)
                                        for level, c in zip(levels, report["correct"]) if level == terms)
            for terms in range(2, 11) for k in KS}


# --- writing --------------------------------------------------------------------------------------------------------

def half_width(values):
    """Half the 95% interval of a mean over seeds, by Student's t, a little wide over ten seeds; nan for one."""
    if len(values) == 1:
        return math.nan
    return T_95.get(len(values), 2.26) * statistics.stdev(values) / math.sqrt(len(values))


def mean_ci(values, form=".3f"):
    """Their mean as text, with ± half the 95% interval where there are several."""
    text = f"{statistics.mean(values):{form}}"
    return text if len(values) == 1 else f"{text} ± {half_width(values):{form.lstrip('+')}}"


def verdict(differences):
    """What a paired difference from grpo.py allows to say."""
    if len(differences) == 1:
        return "one seed: none"
    mean, half = statistics.mean(differences), half_width(differences)
    return "none: the interval holds 0" if abs(mean) <= half else "better" if mean > 0 else "worse"


def markdown(header, rows):
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in (header, ["---"] * len(header), *rows))


def tables(args, rates, grid, runs, passes, config):
    """compare.md."""
    seeds, steps = range(args.seeds), args.steps

    def over(algorithm, value):
        return [value(algorithm, seed) for seed in seeds]

    def final(algorithm, terms, k=1):
        return over(algorithm, lambda a, seed: statistics.mean(passes[a, seed][t, k] for t in terms))

    base = {name: statistics.mean(passes["base"][t, 1] for t in terms) for name, terms in RANGES.items()}
    rows = [["base", "", *(f"{base[name]:.3f}" for name in RANGES), "", "", ""]]
    for algorithm in ALGORITHMS:
        against = [a - b for a, b in zip(final(algorithm, RANGES["2-6"]), final("grpo", RANGES["2-6"]))]
        reached = [run.time_to(0.8) for run in (runs[algorithm, seed] for seed in seeds)]
        times = [f"{statistics.mean(r[1] for r in reached if r):.0f} s" if any(reached) else "",
                 f"({sum(r is not None for r in reached)} of {len(reached)})"]
        rows.append([f"{algorithm}.py", rates[algorithm], *(mean_ci(final(algorithm, terms)) for terms in RANGES.values()),
                     "-" if algorithm == "grpo" else mean_ci(against, "+.3f"),
                     "-" if algorithm == "grpo" else verdict(against), " ".join(times).strip()])
    parts = [f"`python benchmarks/compare.py --seeds {args.seeds} --steps {steps} --jobs {args.jobs}`: commit "
             f"{config['git_commit'][:10]}, torch {config['versions']['torch']}, transformers "
             f"{config['versions']['transformers']}, Python {platform.python_version()}, {config['device']}, runs "
             f"of a thread each, {args.jobs} at a time. ± is half a 95% interval over seeds (Student's t).",
             "## After training",
             f"Held-out pass@1 at temperature 1 after {steps} steps of 16 prompts x 8, from 32 samples a problem. Verdicts "
             "rest on the paired difference on 2-6 terms; with six of them, one in four such tables would show a false one.",
             markdown(["file", "learning rate", "2-6 terms", "7-8", "9-10, not trained on", "against grpo.py, paired",
                       "verdict", "training time to 0.8"], rows),
             "## pass@k",
             "Over the difficulties trained on, 2 to 8 terms, and over 9 and 10.",
             markdown(["policy", *(f"pass@{k}" for k in KS), "9-10: pass@1", "9-10: pass@32"],
                      [["base", *(f"{statistics.mean(passes['base'][t, k] for t in range(2, 9)):.3f}" for k in KS),
                        *(f"{statistics.mean(passes['base'][t, k] for t in RANGES['9-10']):.3f}" for k in (1, 32))],
                       *([f"{a}.py", *(mean_ci(final(a, range(2, 9), k)) for k in KS),
                          *(mean_ci(final(a, RANGES["9-10"], k)) for k in (1, 32))] for a in ALGORITHMS)]),
             "## By difficulty",
             "pass@1 before (base) and after, by the number of terms.",
             markdown(["policy", *range(2, 11)],
                      [["base", *(f"{passes['base'][t, 1]:.2f}" for t in range(2, 11))],
                       *([f"{a}.py", *(f"{statistics.mean(final(a, [t])):.2f}" for t in range(2, 11))]
                         for a in ALGORITHMS)]),
             "## Seconds a step, by phase, and tokens a completion",
             "Seconds depend on how long the answers become. Evaluations are not counted.",
             markdown(["file", *PHASES.values(), "all", "tokens, last 25 steps"],
                      [[f"{a}.py", *(f"{statistics.mean(over(a, lambda a, s: runs[a, s].seconds[p])) / steps:.3f}"
                                     for p in PHASES),
                        f"{statistics.mean(over(a, lambda a, s: sum(runs[a, s].seconds.values()))) / steps:.3f}",
                        mean_ci(over(a, lambda a, s: runs[a, s].length[steps]), ".1f")] for a in ALGORITHMS])]
    if grid:
        scores = {a: [[row[3] for row in grid if row[:2] == (a, lr)] for lr in LRS] for a in ALGORITHMS}
        parts += ["## The grid",
                  f"Held-out pass@1 on 3-6 terms after {GRID_STEPS} steps, mean of seeds "
                  f"{' and '.join(map(str, GRID_SEEDS))}, problems of its own. mu_grpo.py keeps its rate constant, "
                  "the others let it fall to 0: popo.py as a cosine, the rest as a line.",
                  markdown(["file", *(f"lr {lr}" for lr in LRS)],
                           [[f"{a}.py", *(f"{'**' * (lr == rates[a])}{statistics.mean(values):.3f}{'**' * (lr == rates[a])}"
                                          for lr, values in zip(LRS, scores[a]))] for a in ALGORITHMS])]
    return "\n\n".join(parts) + "\n"


def draw(args, runs, passes, path):
    """Six panels: learning curves, difficulty, length, pass@k, time to 0.8, seconds by phase."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no figure: pip install matplotlib")
        return
    seeds = range(args.seeds)
    figure, ((curves, difficulty, at_k), (length, reach, phases)) = pyplot.subplots(2, 3, figsize=(15, 8))
    color = dict(zip(ALGORITHMS, pyplot.get_cmap("tab10").colors))

    def band(axes, x, per_seed, algorithm, **style):
        """Mean and range over seeds; per_seed: a list of values for each seed."""
        columns = list(zip(*per_seed))
        axes.plot(x, [statistics.mean(c) for c in columns], color=color[algorithm], label=f"{algorithm}.py", **style)
        axes.fill_between(x, list(map(min, columns)), list(map(max, columns)), color=color[algorithm], alpha=0.12, lw=0)

    steps = sorted(runs["grpo", 0].length)
    for a in ALGORITHMS:
        of_seed = [runs[a, seed] for seed in seeds]
        band(curves, steps, [[run.accuracy(step) for step in steps] for run in of_seed], a)
        band(length, steps, [[run.length[step] for step in steps] for run in of_seed], a)
        band(difficulty, range(2, 11), [[passes[a, seed][t, 1] for t in range(2, 11)] for seed in seeds], a)
        band(at_k, KS, [[statistics.mean(passes[a, seed][t, k] for t in range(2, 9)) for k in KS] for seed in seeds], a)
        for seed in seeds:
            reached = runs[a, seed].time_to(0.8)
            reach.plot(reached[1] if reached else 0, ALGORITHMS.index(a), "o" if reached else "x", color=color[a])
    difficulty.plot(range(2, 11), [passes["base"][t, 1] for t in range(2, 11)], "k--", label="base")
    at_k.plot(KS, [statistics.mean(passes["base"][t, k] for t in range(2, 9)) for k in KS], "k--", label="base")
    left = [0.0] * len(ALGORITHMS)
    for phase, name in PHASES.items():
        width = [statistics.mean(runs[a, s].seconds[phase] for s in seeds) / args.steps for a in ALGORITHMS]
        phases.barh(ALGORITHMS, width, left=left, label=name)
        left = [a + b for a, b in zip(left, width)]
    curves.set(title="held-out pass@1, 2 to 6 terms", xlabel="step", ylim=(0.3, 1))
    difficulty.set(title="pass@1 by difficulty; 9 and 10 are not trained on", xlabel="terms", ylim=(0, 1))
    at_k.set(title="pass@k, 2 to 8 terms", xlabel="k", xticks=KS)
    at_k.set_xscale("log", base=2)
    length.set(title="tokens a completion, in training", xlabel="step")
    reach.set(title="training time to 0.8 on 2 to 6 terms; x at 0: never", xlabel="s", yticks=range(len(ALGORITHMS)),
              yticklabels=ALGORITHMS)
    phases.set(title="seconds a step", xlabel="s")
    for axes in (reach, phases):
        axes.invert_yaxis()
    for axes in (curves, difficulty, at_k, length, reach, phases):
        axes.grid(alpha=0.3)
    difficulty.legend(fontsize=8)
    phases.legend(fontsize=8)
    figure.suptitle(f"Built-in task, {args.seeds} seed{'s' * (args.seeds > 1)}: mean and range")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def write_csv(path, header, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "compare", help="where the runs are kept")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="1 seed, 40 steps, no grid (lr 3e-4), few problems")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps, args.runs = 1, 40, args.runs.with_name("compare-quick")
        args.results = args.runs
    args.runs, args.results = args.runs.resolve(), args.results.resolve()       # the scripts start in ROOT
    for folder in (args.runs, args.results):
        folder.mkdir(parents=True, exist_ok=True)
    problems, samples = (64, 32) if args.quick else (400, 32)

    base = args.runs / "base.json"
    command("eval.py", "--model", "tiny", "--dataset", "arithmetic:2-10", "--limit", problems, "--samples", samples, "--k",
            ",".join(map(str, KS)), "--max_new_tokens", 96, "--out", base)        # pre-trains the base, too, once
    rates, grid = (dict.fromkeys(ALGORITHMS, "3e-4"), []) if args.quick else choose_rates(args)
    runs = [(algorithm, seed) for seed in range(args.seeds) for algorithm in ALGORITHMS]
    folders = {run: args.runs / f"{run[0]}-{args.steps}-{rates[run[0]]}-{run[1]}" for run in runs}
    run_all("training", [(f"{run[0]}, seed {run[1]}", train, f"{run[0]}.py", folders[run],
                          *settings(args.steps, problems, rates[run[0]], run[1])) for run in runs], args.jobs)
    reports = {run: folders[run] / "pass_at_k.json" for run in runs}
    run_all("pass@k", [(f"{run[0]}, seed {run[1]}", command, "eval.py", "--model", folders[run], "--dataset",
                        "arithmetic:2-10", "--limit", problems, "--samples", samples, "--k", ",".join(map(str, KS)),
                        "--seed", run[1], "--out", reports[run])
                       for run in runs if not reports[run].exists()], args.jobs)

    config = json.loads((folders[runs[0]] / "config.json").read_text())
    passes = {"base": read_pass_at_k(base)} | {run: read_pass_at_k(reports[run]) for run in runs}
    runs = {run: Run(folders[run]) for run in runs}
    if grid:
        write_csv(args.results / "compare_grid.csv", ["algorithm", "lr", "seed", "pass@1 on 3-6 terms"], grid)
    write_csv(args.results / "compare.csv", ["algorithm", "seed", "step", "terms", "pass@1", "length", "seconds"],
              [(*name, step, terms, value, round(run.length[step], 2), round(run.seconds_to[step], 2))
               for name, run in runs.items() for (step, terms), value in run.curve.items()])
    write_csv(args.results / "compare_pass_at_k.csv", ["algorithm", "seed", "terms", "k", "pass@k"],
              [(*(("base", "") if name == "base" else name), terms, k, round(value, 5))
               for name, found in passes.items() for (terms, k), value in found.items()])
    text = tables(args, rates, grid, runs, passes, config)
    (args.results / "compare.md").write_text(text)
    draw(args, runs, passes, args.results / "compare.png")
    print("\n" + text)


if __name__ == "__main__":
    main()
