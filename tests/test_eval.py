"""eval.py: estimators against hand-worked numbers and enumeration, refusals, and equality over processes."""

import itertools
import json

import pytest
from conftest import run

import common
from eval import majority_reward, mean_and_ci, measure, pass_at_k


@pytest.mark.parametrize("n, c, k, expected", [(4, 1, 4, 1.0), (4, 1, 2, .5), (10, 3, 5, .9167), (2, 0, 1, 0.0), (8, 8, 1, 1.0)])
def test_pass_at_k(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=5e-5)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if c <= n and k <= n:
            subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_needs_k_samples():
    with pytest.raises(ValueError):
        pass_at_k(2, 0, 5)


@pytest.mark.parametrize("answers, rewards, expected", [
    (["5", "5", "7"], [1, 1, 0], 1.0), (["5", "7", "7"], [1, 0, 0], 0.0), (["5", "7"], [1, 0], 0.5),
    ([None, None, "5"], [0, 0, 1], 1.0), ([None, None], [0, 0], 0.0), (["\\dfrac12", "\\frac 12", "3"], [1, 1, 0], 1.0),
])
def test_majority(answers, rewards, expected):
    assert majority_reward(answers, rewards) == expected


def test_interval():
    mean, (low, high) = mean_and_ci([0.0, 1.0, 1.0, 0.0])
    assert mean == 0.5 and high - mean == pytest.approx(mean - low) == pytest.approx(1.96 * (1 / 3 / 4) ** .5)


def test_scores_are_means_over_problems():
    results = [{"index": i, "level": "", "answer": "1", "rewards": rewards, "lengths": [3, 5], "finished": [True, False],
                "texts": ["\\boxed{1}" if r else "no" for r in rewards]} for i, rewards in enumerate([[1, 0], [0, 0], [1, 1]])]
    scores = measure(results, [2])
    assert scores["pass@1"] == pytest.approx(.5) and scores["pass@2"] == pytest.approx(2 / 3)
    assert scores["truncated"] == .5 and scores["no_answer"] == .5 and scores["length"] == 4
    assert scores["correct"] == [1, 0, 2] and scores["maj@2"] == pytest.approx(2 / 3)


class Oracle:
    """An engine that writes the right answer, or nothing."""

    def __init__(self, tokenizer, text):
        self.tokenizer, self.text = tokenizer, text

    def generate(self, prompts, n, *_):
        import torch
        ids = torch.tensor([self.tokenizer(self.text).input_ids or [5]] * len(prompts) * n)
        return common.pack_rollout(prompts, ids, torch.zeros(ids.shape), torch.full((len(ids),), ids.shape[1]), [1],
                                   self.tokenizer)


@pytest.mark.parametrize("text, expected", [("\\boxed{4}", 1.0), ("4", 0.0), ("\\boxed{4}\\boxed{5}", 0.0)])
def test_an_oracle_scores_one_and_silence_zero(tiny, text, expected):
    problems = [common.Problem("2+2=?", "4"), common.Problem("3+1=?", "4")]
    prompts = [common.encode_prompt(problem, tiny[1]) for problem in problems]
    results = common.evaluate(Oracle(tiny[1], text), problems, prompts, 2, 8)
    assert common.pass_at_1(results)["eval_pass@1"] == expected


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """eval.py on 10 problems with one process: (its output, its JSON, the file)."""
    out = tmp_path_factory.mktemp("eval") / "one.json"
    done = run("eval.py", "--dataset", "arithmetic", "--samples", 4, "--k", "1,4", "--limit", 10, "--max_new_tokens", 64,
               "--out", out)
    assert done.returncode == 0, done.stdout
    return done.stdout, json.loads(out.read_text()), out


def test_report(report):
    printed, scores, _ = report
    scores = scores["arithmetic"]
    assert scores["problems"] == 10 and scores["samples"] == 4 and 0 < scores["pass@1"] < scores["pass@4"] <= 1
    assert scores["ci95"][0] < scores["pass@1"] < scores["ci95"][1]
    assert "temperature 1.0" in printed and "maj@4" in printed


@pytest.mark.parametrize("processes, limit", [(4, 10), (2, 1)])
def test_processes_split_the_problems_without_duplicates(report, tmp_path, processes, limit):
    _, expected, _ = report
    out = tmp_path / "many.json"
    done = run("eval.py", "--dataset", "arithmetic", "--samples", 4, "--k", "1,4", "--limit", limit, "--max_new_tokens", 64,
               "--out", out, processes=processes)
    assert done.returncode == 0, done.stdout
    scores = json.loads(out.read_text())["arithmetic"]
    assert scores["correct"] == expected["arithmetic"]["correct"][:limit]
    if limit == 10:
        assert scores["pass@1"] == expected["arithmetic"]["pass@1"]


def test_compare(report):
    done = run("eval.py", "--compare", report[2], report[2])
    assert done.returncode == 0 and "+0.0000" in done.stdout


@pytest.mark.parametrize("flags, words", [
    (["--k", "9"], "at least k samples"), (["--temperature", "0"], "greedy"), (["--dataset", "nope"], "arithmetic, gsm8k"),
    (["--compare", "a.json", "b.json"], "two JSON files"), (["--model", "nope"], "owner/model"), (["--k", "x"], "whole numbers"),
])
def test_refusals(monkeypatch, flags, words):
    import eval as evaluation
    monkeypatch.setattr("sys.argv", ["eval.py", *flags])
    with pytest.raises(common.UserError, match=words):
        evaluation.main()
