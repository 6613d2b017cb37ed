"""Tests of the math reward: what counts as the answer, which spellings are equal, and that no answer can stall it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tasks
from tasks import extract_answer, math_reward, parsable, score

ROOT = Path(__file__).resolve().parent.parent

EXTRACT = [
    (r"so \boxed{42}.", "42"),
    (r"\boxed{5}, no: \boxed{7}", "7"),
    (r"\boxed{\frac{1}{\sqrt{5}}}", r"\frac{1}{\sqrt{5}}"),
    (r"\boxed{\{2,5\}}", r"\{2,5\}"),
    (r"\boxed{a\}b}", r"a\}b"),
    (r"\boxed {12}", "12"),
    ("\\boxed{\n12\n}", "\n12\n"),
    (r"\fbox{4}", "4"),
    (r"\boxed{\boxed{8}}", "8"),
    (r"\boxed{3} then \boxed{4 and no end", "3"),
    (r"\boxed{x + \boxed{7}", "7"),
    (r"} } \boxed{1} {", "1"),
    (r"\boxed{5}{}", "5"),
    (r"\boxed{} 15", ""),
    (r"\boxed 15", None),
    (r"write it with \boxed, 15", None),
    (r"BOXED{7} **7** 7", None),
    ("", None),
    (None, None),
]


@pytest.mark.parametrize("text, expected", EXTRACT)
def test_extract_answer(text, expected):
    assert extract_answer(text) == expected


@pytest.mark.parametrize("text", ["$" * 10**5, r"\boxed{" * 10**5, "{" * 10**5, r"\boxed" + " " * 10**5, "\\" * 10**5])
def test_extract_answer_is_fast_on_hostile_text(text):
    start = time.monotonic()
    assert extract_answer(text + r" \boxed{7}") == "7"
    assert time.monotonic() - start < 1


# One line per pair: reference || answer.
EQUAL = r"""
42 || 42
9 || 009
0 || -0
7 || +7
7 || {7}
7 || \;7\;
7 || ~7~
7 || \quad 7 \quad
7 || \left(7\right)
7 || \mathbf 7
7 || $7$
7 || \(7\)
6 || 6.
6 || 6 .
D || \text{D}.
D || \textbf{(D)}
12345 || 12,345
12345 || 12\,345
12345 || 12\;345
12345 || 12~345
12,345 || 12345
1234567 || 1{,}234{,}567
1234567.5 || 1,234,567.5
10,080 || 10080
\$32,\!348 || 32,348
1800 || \$1{,}800
18 || \text{\$18}
\frac{14}{3} || 14/3
\frac{14}{3} || \dfrac{28}{6}
\dfrac{9}{7} || 9/7
$\frac12$ || 0.5
\boxed{11} || 11
\frac13 || 0.\overline{3}
\frac16 || 0.1\overline{6}
\frac17 || 0.\overline{142857}
\frac73 || 2.\bar{3}
\frac13 || 0.333333
0.3 || .3
5.10 || 5.1
\frac54 || 1 1/4
\frac54 || 1\frac14
\frac{11}{4} || 2 3/4
-\frac52 || -2\frac{1}{2}
3 || 4-1
42 || 6 \times 7 = 42
42 || x = 42
2^{100} || 1267650600228229401496703205376
2^{25}\cdot 26! || 26! \cdot 33554432
1.2 \times 10^{5} || 120,000
3\times 10^{-5} || 0.00003
25\% || 0.25
25\% || 25
12.5\% || \frac18
25\% || 25 \text{ percent}
1 || 100\%
35\text{ cm} || 35
35\text{ cm}^2 || 35 cm²
10 || 10~\mathrm{cm}
10 || 10\quad\text{cm}
60 || 60 \mathrm{~km} / \mathrm{h}
16 || 16 \text{ apples}
5.4 \text{ cents} || 5.4
8 \text{ feet} || 8 ft
90^\circ || 90
60° || 60 \text{ degrees}
-5 || −5
2\pi || 2π
(-\infty,3) || (−∞, 3)
3 \times 4 || 3 × 4
2\sqrt{3} || 2√3
x^2 || x²
\text{Evelyn} || evelyn
\text{Evelyn} || \textbf{EVELYN}
\text{June 20} || June 20
4210_{5} || 4210_5
9:05 || 09:05
2:3 || 2 : 3
p - q || -q+p
abc || cab
x^2+2x+1 || (x+1)^2
\tan^2(y)+1 || \sec^2(y)
11\sqrt2 || \sqrt{242}
14-i || 14.0-1.0i
\frac{1+i}{2} || 0.5+0.5i
1-\frac{1}{e} || 1-\frac{1}{\mathrm e}
\sqrt{2}+\sqrt{3} || \sqrt{5+2\sqrt{6}}
\emptyset || \varnothing
\emptyset || \{\}
\{1\pm\sqrt{5},-2\} || \{-2,1+\sqrt{5},1-\sqrt5\}
\pm 6 || -6,6
1,-2 || x=1 \text{ or } x=-2
1331 \text{ and } 1728 || 1331, 1728
n=2,3,4 || 2,3,4
(3,\frac{\pi}{2}) || \left( 3, \pi/2 \right)
(1,2),(3,4) || (3,4),(1,2)
x<3 || (-\infty,3)
[2,\infty) || x \in [2,+\infty)
-1<x<4 || (-1,4)
(-\infty, 2) \cup (3, \infty) || (3, \infty)\cup(-\infty, 2)
\mathbb{R} || (-\infty,\infty)
y = 2x + 3 || 2x - y + 3 = 0
z = -2 + 7i || -2+7i
\begin{pmatrix} -1/3 \\ 2 \end{pmatrix} || \begin{bmatrix}-\frac13\\2\end{bmatrix}
"""
DIFFERENT = r"""
-7 || 7
12 || 12,345
12 || 1,2
1200 || 1, 200
12345 || 12\,346
\frac13 || 0.33
\frac23 || 0.667
\pi || 3.1416
\pi || \frac{22}{7}
123456789.5 || 123456789.4
0.0000001 || 0.0000002
10^{-9} || 0
2^{-99} || 2^{-98}
6.6\times10^{-34} || 6.6\times10^{-35}
\frac{1}{304!} || \frac{1}{306!}
\frac{2^{1500}+1}{5\cdot 2^{1501}} || \frac{1}{5\cdot 2^{1501}}
\frac{\pi}{10^{20}} || \frac{\pi}{10^{21}}
10^{-20}x || 10^{-21}x
x=10^{-9} || x=10^{-10}
x > 10^{-20} || x > 10^{-21}
x=10^{-20} || x=10^{-21}
\sqrt{2}+10^{-20} || \sqrt{2}
10^{20} || 10^{20}+1
12_5 || 12_7
1010_2 || 1010_{3}
12 || 12_5
listen || silent
\text{evil} || \text{vile}
Stop || POTS
no || on
\text{undefined} || 0
6 || 1 \quad 2 \quad 3
6 || 2 \qquad 3
6 || 2 \; 3
6 || 2~3
6 || 2\ 3
6 || 2 \, 3
6 || 2 3
6 || 2 \\ 3
6 || 2 \hspace{1cm} 3
\frac16 || \frac12 \quad \frac13
\frac16 || \frac12 \; \frac13
(1,2) || \{1,2\}
\{1,2\} || (1,2)
(1,2) || [1,2]
(3,5,7) || \{3,5,7\}
(2,1) || (1,2)
(3,5) || (3,5,7)
1331, 1728 || 1728
5 || 5 \text{ or } 6
5 || 4, 5
5 || \text{not } 5
5 || 5 \text{ is wrong}
3 || 3 \vee 4
3 || 3; 4
3 || \{1,2,3\}
4 || 5 \neq 4
4 || 5 > 4
4 || 5 = 4
B || A, B
\pm 6 || 6
\text{yes} || \text{no}
5\text{ cm} || 5\text{ m}
35\text{ cm} || 34
25\% || 2500
0.5 || 0.5\%
5 || 5x
2d || 2
9:05 || 9:50
12:00 || 1:00
2:3 || 3:2
0 || \frac{0}{0}
\infty || -\infty
[0,1) || (0,1]
[1,2)\cup(2,3] || [1,3]
D=(0,1) || D=(0,1.5)
n=2,3,4 || n=1,2,3
3x-y+13=0 || 3x+4y+14=0
\frac{x^2}{4}+\frac{y^2}{3}=1 || \frac{x^2}{16}+\frac{y^2}{12}=1
1,2,\ldots,n || 1,3,\ldots,n
\frac{a}{b+c} || a/b+c
\begin{pmatrix}1&2\\3&4\end{pmatrix} || \begin{pmatrix}1&3\\2&4\end{pmatrix}
??? || ???
\frac{ || \frac{1}{2}
"""


def pairs(block):
    return [tuple(line.split(" || ")) for line in block.strip().splitlines()]


@pytest.mark.parametrize("gold, answer", pairs(EQUAL))
def test_equal(gold, answer):
    assert math_reward(rf"So \boxed{{{answer}}}.", gold) == 1.0


@pytest.mark.parametrize("gold, answer", pairs(DIFFERENT))
def test_different(gold, answer):
    assert math_reward(rf"So \boxed{{{answer}}}.", gold) == 0.0


@pytest.mark.parametrize("gold", sorted({gold for gold, _ in pairs(EQUAL)}))
def test_every_reference_equals_itself_and_is_parsable(gold):
    assert math_reward(rf"\boxed{{{gold}}}", gold) == 1.0
    assert parsable([gold]) == [True]


def test_parsable_and_empty_references():
    golds = ["7", r"\frac{1}{2}", "Monday", "", " ", r"\frac{", "$", r"\boxed{}"]
    assert parsable(golds) == [True, True, True, False, False, False, False, False]
    assert score([rf"\boxed{{{gold}}}" for gold in golds], golds)[3:] == [0.0] * 5
    assert score([r"\boxed{3}"] * len(golds), golds) == [0.0] * len(golds)


def test_only_the_last_box_is_read():
    assert math_reward(r"Of $2003^{2002^{2001}}$ the last digits are \boxed{009}<|im_end|>", "9") == 1.0
    assert math_reward(r"\boxed{1}, \boxed{2}, \boxed{3}", "2") == 0.0
    assert math_reward(r"Put it in \boxed{}. 15", "15") == 0.0
    assert math_reward("**15**", "15") == 0.0


def test_case_file():
    path = ROOT.parent / "shared" / "data" / "reward_cases.jsonl"
    if not path.exists():
        pytest.skip("the case file is not on this machine")
    cases = [json.loads(line) for line in path.read_text().splitlines()]
    rewards = score([case["completion"] for case in cases], [case["gold"] for case in cases])
    assert [case["id"] for case, reward in zip(cases, rewards) if reward != case["expected"]] == []


def test_plain_integers_need_no_worker(monkeypatch):
    monkeypatch.setattr(tasks, "_run", None)  # calling it would raise
    assert score([r"\boxed{1,234.}", r"\boxed{\$5}", "7", r"\boxed{" + "7" * 6000 + "}"], ["1234", "05", "7", "7"]) == [
        1.0, 1.0, 0.0, 0.0,
    ]  # fmt: skip


def test_a_pair_is_judged_once(monkeypatch):
    seen = []
    monkeypatch.setattr(tasks, "_run", lambda jobs: seen.extend(jobs) or dict.fromkeys(jobs, True))
    assert score([r"\boxed{x}", r"a \boxed{x}", r"\boxed{y}"] * 3, ["x", "$x$", "x"] * 3) == [1.0] * 9
    assert len(seen) == 2


def test_lengths_must_agree():
    with pytest.raises(ValueError):
        score(["a"], [])


HOSTILE = [r"9^{9^{%d}}", r"%d00000000!", r"\binom{10^9}{5\cdot10^8+%d}", r"\sum_{k=1}^{10^9} \frac{1}{k^2+%d}"]
HOSTILE += [r"2^{2^{4%d}}", r"((((1%d!)!)!)!)", r"\prod_{k=1}^{10^{8}} (k+%d)", r"(x+1)^{100000+%d}"]


def test_hostile_batch_is_bounded_and_hurts_no_other_row():
    rows = [(HOSTILE[i % 8] % (i + 10), "1", 0.0) for i in range(64)]
    rows[5::16] = [(rf"\frac{{{i}}}{{7}}", f"{i}/7", 1.0) for i in range(4)]
    rows[-1] = ("2x+1", "1+2x", 1.0)
    math_reward(r"\boxed{x}", "x+1")  # start the workers
    start = time.monotonic()
    rewards = score([rf"\boxed{{{answer}}}" for answer, _, _ in rows], [gold for _, gold, _ in rows])
    assert time.monotonic() - start < 10
    assert rewards == [expected for _, _, expected in rows]
    assert math_reward(r"\boxed{x+1}", "1+x") == 1.0


@pytest.mark.parametrize(
    "answer",
    ["{" * 900, r"\sqrt{" * 300 + "2" + "}" * 300, "\x00", "😀", "\ud800",
     "\\" * 1999, "(" * 500, "5 " + "abc " * 400 + "=",
     r"5 " + r"\text{a} " * 200 + "=", "1,000" * 300, r"__import__('os')", "0^{-1}", "9" * 5000 + ".5"],
)  # fmt: skip
def test_odd_answers_score_zero_quickly(answer):
    start = time.monotonic()
    assert math_reward(rf"\boxed{{{answer}}}", "1") == 0.0
    assert time.monotonic() - start < 5


def test_threads_get_the_same_rewards():
    results = {}

    def call(i):
        results[i] = score([rf"\boxed{{\frac{{{i}}}{{7}}}}", r"\boxed{x}"], [f"{i}/7", "y"])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join(20) for thread in threads]
    assert results == {i: [1.0, 0.0] for i in range(8)}


def test_an_outer_alarm_still_rings():
    rang = []
    previous = signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        assert math_reward(r"\boxed{x+2}", "2+x") == 1.0
        time.sleep(0.6)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert rang == [True]


def raiser(error):
    def fail(*_args, **_kwargs):
        raise error

    return fail


@pytest.mark.parametrize("error", [tasks.TimeoutException("late"), RecursionError(), MemoryError(), ValueError()])
@pytest.mark.parametrize("function", ["verify", "parse"])
def test_no_library_error_gets_out(monkeypatch, error, function):
    tasks._expression.cache_clear()
    monkeypatch.setattr(tasks, function, raiser(error))
    assert tasks._judge(("x+5", ""), ("5+x", "")) is False


def test_keyboard_interrupt_gets_out(monkeypatch):
    monkeypatch.setattr(tasks, "verify", raiser(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        tasks._judge(("x+5", ""), ("5+x", ""))
    monkeypatch.setattr(tasks, "_run", raiser(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        math_reward(r"\boxed{x}", "y")


def test_in_a_script_without_a_main_guard_from_another_folder(tmp_path):
    (tmp_path / "tasks.py").write_text("raise RuntimeError('the wrong module')")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "run.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from common import math_reward\nprint('once', math_reward(r'\\boxed{x+1}', '1+x'))\n"
    )
    result = subprocess.run(
        [sys.executable, str(scripts / "run.py")], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (result.stdout, result.stderr) == ("once 1.0\n", "")


def test_workers_leave_with_a_killed_parent():
    code = "import tasks, time; tasks.math_reward(r'\\boxed{x}', 'y'); "
    code += "print(*[process.pid for process, _ in tasks._idle], flush=True)"
    parent = subprocess.Popen(
        [sys.executable, "-c", code + "; time.sleep(60)"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert pids and not any(os.path.exists(f"/proc/{pid}") for pid in pids)
