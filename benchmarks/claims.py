"""The smallest experiments that could contradict what the papers claim, and runs that show where each method fails.

    python benchmarks/claims.py                     # after compare.py, whose runs it uses: 50 more, two at a time
    python benchmarks/claims.py --quick             # does it work? 1 seed, 40 steps, after compare.py --quick

Each arm is one file with a flag or two changed, trained as stage 2 of compare.py trains it: the same problems in the same
order per seed, equal prompts, completions and steps, the learning rate that the grid chose. It is compared with its
control by seed; a control that is a file's own setting is compare.py's run. Broken off, it goes on next time.

Measured by 8 samples of each held-out problem of 2 to 6 terms: accuracy; worked, the share of answers that have a line
for each operation, as half of the demonstrations have; lucky, the share of the right answers that have none: guesses
that came out right; kl_token, the mean log-ratio to the base in nats a token; length in tokens. From the run: entropy,
the mean over its last 50 steps.

Writes benchmarks/results/claims.csv, a line a run, and claims.md, arms against controls.
"""

import argparse
import json
import statistics
from pathlib import Path

from compare import RESULTS, ROOT, choose_rates, markdown, mean_ci, run_all, settings, train, verdict, write_csv
from logit_avg_drift import SAMPLES, measure

import common

# (arm, file, flags, control, the claim or the fault in question). A control without flags is the file as it stands.
FOUR = ["--updates_per_rollout", "4"]
ARMS = (
    ("grpo.py, 4 updates, clip 0.28", "grpo", FOUR, "grpo.py, 4 updates, clip 0.2", "DAPO: clip-higher keeps entropy up"),
    ("grpo.py, 4 updates, clip 0.2", "grpo", [*FOUR, "--clip_high", "0.2"], None, ""),
    ("grpo.py, lr 1e-3", "grpo", ["--lr", "1e-3"], "grpo.py", "fails: a rate that is too high"),
    ("conspo.py, tau 1", "conspo", ["--tau", "1"], "conspo.py", "ConSPO: a flat contrast, tau 10, is best"),
    ("conspo.py, tau 0.1", "conspo", ["--tau", "0.1"], "conspo.py", "fails: a contrast that is too sharp"),
    ("conspo.py, no margin", "conspo", ["--max_margin", "0"], "conspo.py", "ConSPO: without the margin less is learned"),
    ("lpo.py, reverse", "lpo", ["--divergence", "reverse"], "lpo.py", "LPO: reverse KL, GRPO's gradient on-policy, is worse"),
    ("popo.py, no similarity", "popo", ["--similarity_coef", "0"], "popo.py", "POPO: without the similarity loss less is learned"),
    ("popo.py, uniform weights", "popo", ["--weight_mode", "uniform"], "popo.py", "POPO: with uniform weights less is learned"),
    ("popo.py, NLL by length", "popo", ["--nll_norm", "length"], "popo.py", "fails: short guesses pull harder a token"),
    ("grpo.py", "grpo", [], None, ""), ("conspo.py", "conspo", [], None, ""), ("lpo.py", "lpo", [], None, ""),
    ("popo.py", "popo", [], "grpo.py", "fails: lucky guesses are imitated"),
)
COLUMNS = ("accuracy", "worked", "lucky", "kl_token", "entropy", "length")


def measure_run(folder):
    """measure() of a finished run and its entropy, kept in its folder."""
    kept = folder / "claims.json"
    if not kept.exists():
        rows = [json.loads(line) for line in open(folder / "metrics.jsonl")][1:]
        kept.write_text(json.dumps(measure(folder / "final") | {
            "entropy": statistics.fmean(row["entropy"] for row in rows[-50:])}))
    return json.loads(kept.read_text())


def tables(args, rates, base, found):
    """claims.md"""
    seeds = range(args.seeds)
    rows = [["base", "", *(f"{base[column]:.3f}" for column in COLUMNS[:4]), "", f"{base['length']:.1f}"]]
    rows += [[arm, rates[script] if "--lr" not in flags else flags[-1],
              *(mean_ci([found[arm, seed][column] for seed in seeds]) for column in COLUMNS[:5]),
              mean_ci([found[arm, seed]["length"] for seed in seeds], ".1f")] for arm, script, flags, *_ in ARMS]
    pairs = []
    for arm, _, _, control, about in ARMS:
        if control is not None:
            difference = {column: [found[arm, seed][column] - found[control, seed][column] for seed in seeds]
                          for column in COLUMNS}
            pairs.append([about, f"{arm} against {control}", mean_ci(difference["accuracy"], "+.3f"),
                          verdict(difference["accuracy"]), mean_ci(difference["entropy"], "+.3f"),
                          mean_ci(difference["lucky"], "+.3f")])
    return "\n\n".join([
        f"`python benchmarks/claims.py --seeds {args.seeds} --steps {args.steps}`. Held-out problems of 2 to 6 terms, "
        f"{SAMPLES} samples each; ± is half a 95% interval over seeds (Student's t).", "## Arms",
        markdown(["arm", "learning rate", *COLUMNS], rows), "## Against their controls, paired by seed",
        markdown(["about", "arms", "accuracy", "verdict on accuracy", "entropy", "lucky"], pairs)]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "compare", help="compare.py's runs; these go there too")
    parser.add_argument("--quick", action="store_true", help="1 seed, 40 steps, no grid (lr 3e-4), few problems")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps, args.runs = 1, 40, args.runs.with_name("compare-quick")
    args.runs = args.runs.resolve()
    args.runs.mkdir(parents=True, exist_ok=True)
    results, problems = (args.runs, 64) if args.quick else (RESULTS, 400)
    rates = {script: "3e-4" for _, script, *_ in ARMS} if args.quick else choose_rates(args)[0]
    arms = {arm: (script, flags) for arm, script, flags, *_ in ARMS}

    def folder(arm, seed):
        script, flags = arms[arm]
        name = "".join(letter if letter.isalnum() else "-" for letter in arm) if flags else script
        return args.runs / f"{name}-{args.steps}-{rates[script]}-{seed}"

    jobs = [(arm, seed) for seed in range(args.seeds) for arm in arms]
    run_all("training", [(f"{arm}, seed {seed}", train, f"{arms[arm][0]}.py", folder(arm, seed),
                          *settings(args.steps, problems, rates[arms[arm][0]], seed), *arms[arm][1])
                         for arm, seed in jobs], args.jobs)
    found = {(arm, seed): measure_run(folder(arm, seed)) for arm, seed in jobs}
    write_csv(results / "claims.csv", ["arm", "seed", *COLUMNS],
              [[arm, seed, *(round(found[arm, seed][column], 5) for column in COLUMNS)] for arm, seed in jobs])
    text = tables(args, rates, measure(common.tiny_model()), found)
    (results / "claims.md").write_text(text)
    print("\n" + text)


if __name__ == "__main__":
    main()
