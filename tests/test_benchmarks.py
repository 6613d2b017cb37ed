"""What the committed comparisons rest on: problems that are kept apart, intervals, verdicts."""

import json
import math
import sys
import zlib

import pytest
from conftest import ROOT

from tasks import arithmetic_problems

sys.path.insert(0, str(ROOT / "benchmarks"))
import compare  # noqa: E402


def test_the_grid_has_problems_of_its_own(tmp_path):
    train, test = ({json.loads(line)["problem"] for line in open(path)} for path in compare.tuning_problems(tmp_path))
    used = {problem.prompt for name, split in (("arithmetic:2-8", "train"), ("arithmetic:2-10", "test"))
            for problem in arithmetic_problems(name, split)}
    assert len(train) > 4000 and len(test) > 400
    assert not train & test and not (train | test) & used
    assert all(zlib.crc32(prompt.encode()) % 4 == 0 for prompt in test)     # pre-training has not seen these
    assert not any(zlib.crc32(prompt.encode()) % 4 == 0 for prompt in train)


def test_intervals_and_verdicts():
    assert compare.half_width([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=2e-3)
    assert compare.half_width([0.0, 2.0]) == pytest.approx(12.71, rel=1e-3)
    assert compare.mean_ci([0.25]) == "0.250"
    assert compare.mean_ci([1.0, 2.0, 3.0, 4.0, 5.0], "+.1f") == "+3.0 ± 2.0"
    assert compare.verdict([0.1, 0.11, 0.12]) == "better"
    assert compare.verdict([-0.1, -0.11, -0.12]) == "worse"
    assert compare.verdict([0.1, -0.1, 0.2]) == "none: the interval holds 0"
    assert compare.verdict([0.3]) == "one seed: none"


def test_a_run_is_read(tmp_path):
    rows = [{"step": 0, "length": 9, "rollout_s": 5.0, "eval_pass@1": 0.5,
             **{f"eval_pass@1/{terms}": 0.5 for terms in range(2, 7)}},
            {"step": 1, "length": 10, "rollout_s": 1.0, "update_s": 2.0},
            {"step": 2, "length": 20, "rollout_s": 1.0, "update_s": 2.0, "scaffold_s": 0.5,
             **{f"eval_pass@1/{terms}": terms / 5 for terms in range(2, 7)}, "eval_pass@1": 0.8}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = compare.Run(tmp_path)
    assert run.accuracy(0) == 0.5 and run.accuracy(2) == pytest.approx(0.8)
    assert run.length == {0: 9, 2: 15}
    assert run.time_to(0.79) == (2, 6.5) and run.time_to(0.9) is None      # the base's evaluation is no training time


def test_pass_at_k_is_split_by_difficulty(tmp_path):
    problems = arithmetic_problems("arithmetic:2-10", "test")[:60]
    correct = [32 if problem.level == "4" else 1 for problem in problems]
    (tmp_path / "a.json").write_text(json.dumps({"arithmetic:2-10": {"samples": 32, "problems": 60, "correct": correct}}))
    found = compare.read_pass_at_k(tmp_path / "a.json")
    assert found[4, 1] == 1 and found[5, 1] == pytest.approx(1 / 32) and found[5, 32] == 1
