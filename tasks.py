"""tasks.py: problems, prompts and rewards: the side of a run that is text and needs no torch.

    1. data                 Problem, load_problems, encode_prompts
    2. the built-in task    arithmetic_problems
    3. reward               extract_answer, math_reward, score, parsable

common.py passes these names on, so that algorithm files import common alone. This file is apart so that the processes
that check answers start fast and small.
"""

import csv
import json
import logging
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import threading
import time
import types
import zlib
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

try:
    import sympy
    from antlr4.atn.ParserATNSimulator import ParserATNSimulator, PredictionMode
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException
    from sympy.core.relational import Relational
except ImportError:     # answers that are plain integers, as the built-in task's, need none of these
    sympy = None

logging.getLogger("math_verify").setLevel(logging.ERROR)    # it would warn that its own timeouts are off


class UserError(Exception):
    """Bad input. Its text is one sentence that says what is wrong and what to change."""


def print0(*args, **kwargs):
    """print on rank 0 only, at once."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(*args, **kwargs, flush=True)


# --- 1. data: every data set becomes a list of Problem, every problem a list of token ids -----------------------------

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass
class Problem:
    prompt: str | list[dict]  # the problem's text, or chat messages [{"role": ..., "content": ...}]
    answer: str  # the gold answer
    solution: str | None = None  # worked solution, if the data has one
    level: str = ""  # difficulty: "Level 5" on MATH, the number of terms on the built-in task


# name: (hub id, with @revision where other projects pin the same one; config; the hub's split to train on; the hub's
#        split to evaluate on, which may be called "train"; the columns of problem, answer [, solution [, level]]).
# MATH has no answer column: the answer is the last box of its solution.
HUB_SETS = {
    "gsm8k": ("openai/gsm8k@740312add88f781978c0658806c59bc2815b9866", "main", "train", "test", "question", "answer"),
    "math": ("DigitalLearningGmbH/MATH-lighteval@0530c78699ea5e8eb5530600900e1f328b48acad", "default", "train", "test",
             "problem", "solution", "solution", "level"),
    "dapo17k": ("open-r1/DAPO-Math-17k-Processed", "all", "train", None, "prompt", "solution"),
    "deepmath": ("zwhe99/DeepMath-103K", "default", "train", None,
                 "question", "final_answer", "r1_solution_1", "difficulty"),
    "deepscaler": ("agentica-org/DeepScaleR-Preview-Dataset", "default", "train", None,
                   "problem", "answer", "solution"),
    "cn_k12": ("AI-MO/NuminaMath-1.5", "default", "train", None, "problem", "answer", "solution"),
    "math500": ("HuggingFaceH4/MATH-500", "default", None, "test", "problem", "answer", "solution", "level"),
    "aime24": ("HuggingFaceH4/aime_2024", "default", None, "train", "problem", "answer"),
    "aime25": ("math-ai/aime25", "default", None, "test", "problem", "answer"),
    "aime26": ("MathArena/aime_2026", "default", None, "train", "problem", "answer"),
    "amc23": ("math-ai/amc23", "default", None, "test", "question", "answer"),
    "minerva": ("math-ai/minervamath", "default", None, "test", "question", "answer"),
    "olympiad": ("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", None, "train", "question", "final_answer"),
    "mmlu": ("cais/mmlu", "all", "auxiliary_train", "test", "question", "answer"),
}
FILE_TYPES = (".jsonl", ".json", ".csv", ".parquet")

# DAPO wraps its problems in these words, which ask for another answer format than INSTRUCTION does.
DAPO_PREFIX = ("Solve the following math problem step by step. The last line of your response should be of the form "
               "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n")
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'


def load_problems(name: str, split: str = "train", limit: int | None = None) -> list[Problem]:
    """Loads the built-in task ("arithmetic", "arithmetic:3-8"), a data set of HUB_SETS by its name, or a local file.

    A local .jsonl, .json, .csv or .parquet file has a column problem, question or prompt (text or chat messages), a
    column answer or final_answer (a bare answer, or worked text that ends in `#### 18` or holds a box) and, optionally,
    solution and level. Without an answer column the solution must hold the answer. A file is all one split.
    Rows that cannot be used are dropped and counted in one printed line; limit keeps the first rows after that.

    Raises UserError for an unknown name, a split that the set does not have, a hub that cannot be reached, a file that
    cannot be read or lacks a column, and a set without one usable row.
    """
    if name.split(":")[0] == "arithmetic":
        return arithmetic_problems(name, split)[:limit]
    if name in HUB_SETS:
        return drop_unusable(hub_problems(name, split), f"{name}/{split}")[:limit]
    if Path(name).suffix in FILE_TYPES:
        return drop_unusable(file_problems(Path(name)), name)[:limit]
    raise UserError(f"{name!r} is no data set: use arithmetic, {', '.join(HUB_SETS)}, or the path of a local file "
                    f"that ends in {', '.join(FILE_TYPES)}.")


def hub_problems(name, split):
    hub_id, config, train, test, *columns = HUB_SETS[name]
    hub_id, _, revision = hub_id.partition("@")
    hub_split = train if split == "train" else test
    if hub_split is None:
        raise UserError(f"{name} has no {split} split, only {'train' if train else 'test'}: choose another data set.")
    import datasets     # here, because it is slow to import and the built-in task does not need it

    try:
        rows = datasets.load_dataset(hub_id, config, split=hub_split, revision=revision or None)
    except Exception as error:  # offline, gated, moved: each of the libraries below raises types of its own
        reason = str(error.__cause__ or error).split("\n")[0]
        raise UserError(f"{name} cannot be loaded from the hub ({hub_id}: {reason}): check network and access, "
                        "or give a local file instead.") from error
    if name == "mmlu":
        rows = map(mmlu_row, rows)
    if name == "cn_k12":
        print0(f"cn_k12/train: a part of NuminaMath-1.5's {len(rows):,} rows")
        rows = filter(is_sound_cn_k12, rows)
    return [read_row(row, *columns) for row in rows]


def mmlu_row(row):
    """Puts the four choices into the question, and turns the answer's index into its letter."""
    choices = [f"{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"])]
    return {"question": "\n".join([row["question"], *choices]), "answer": "ABCD"[row["answer"]]}


def is_sound_cn_k12(row):
    """True for the school problems in NuminaMath that were checked, written by people, and ask for no proof."""
    checked = row["problem_is_valid"] == "Yes" and row["solution_is_valid"] == "Yes"
    return row["source"] == "cn_k12" and checked and not row["synthetic"] and row["question_type"] != "proof"


def file_problems(path):
    try:
        rows = file_rows(path)
    except (OSError, ValueError, csv.Error) as error:  # a ValueError: what json and pyarrow raise on a broken file
        raise UserError(f"{path} cannot be used ({error}): give a sound {', '.join(FILE_TYPES)} file.") from error
    columns = set().union(*rows)
    problem = next((column for column in ("problem", "question", "prompt") if column in columns), None)
    answer = next((column for column in ("answer", "final_answer", "solution") if column in columns), None)
    if problem is None or answer is None:
        raise UserError(f"{path} has only the columns {', '.join(sorted(columns))}: name one problem, question or "
                        "prompt, and one answer, final_answer or solution.")
    return [read_row(row, problem, answer, "solution", "level") for row in rows]


def file_rows(path):
    """Returns the file's rows as dicts, each value as it is written.

    datasets.load_dataset would guess one type per column and so change answers unasked: "025" to 25.0, "2008-05-03" to
    a date, 2**70 to a rounded float, "[1, 2]" to a list where the column has a number elsewhere.
    """
    if path.suffix == ".parquet":
        import pyarrow.parquet

        rows = pyarrow.parquet.ParquetFile(path).read().to_pylist()
    elif path.suffix == ".csv":
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file, strict=True))
    else:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".jsonl":  # made one array, so that an error names the line
            text = "[" + ",\n".join(line for line in text.split("\n") if line.strip()) + "]"
        rows = json.loads(text)
    if not rows or not isinstance(rows, list):
        raise ValueError("it holds no rows")
    if not all(isinstance(row, dict) and None not in row for row in rows):  # csv puts surplus cells under None
        raise ValueError("a row is not an object, or has more cells than the header")
    return rows


def read_row(row, problem, answer, solution="", level=""):
    """Makes a Problem of a row, given the names of its columns. What the row lacks stays empty."""
    prompt, gold, worked = row.get(problem), row.get(answer), tidy_solution(row.get(solution))
    if answer == solution or isinstance(gold, str) and re.search(r"####|\\boxed|\\fbox", gold):
        text = tidy_solution(gold)
        gold, worked = extract_answer(text), worked or text
    if isinstance(prompt, str):
        prompt = prompt.strip().removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX).strip()
    return Problem(prompt, clean_answer(gold), worked or None, str(row.get(level) or ""))


def tidy_solution(text):
    r"""Returns worked text with its answer in a \boxed{}, or "" if there is none.

    GSM8K's last line `#### 18` becomes a box, and its calculator marks <<48/2=24>> go. MATH's rarer \fbox{18} and
    \boxed 18 become \boxed{18}.
    """
    text = text.strip() if isinstance(text, str) else ""
    work, mark, gold = text.rpartition("####")
    if mark and "\n" not in gold.strip():  # otherwise #### is a heading
        gold = re.sub(r"(?<=\d),(?=\d{3})", "", clean_answer(extract_answer(gold) or gold))
        return re.sub(r"<<[^<>]*>>", "", work).strip() + f"\nThe answer is \\boxed{{{gold}}}"
    text = re.sub(r"\\(?:fbox|boxed)\s*\{", r"\\boxed{", text)
    return re.sub(r"\\boxed\s+([^\s{}$.,]+)", r"\\boxed{\1}", text)


def clean_answer(value):
    r"""Returns a gold answer as bare text: "025", 25.0, ["$25$"] and "25^\circ" all give "25"; "" if there is none."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    text = str(value) if isinstance(value, (str, int, float)) else ""
    text = re.sub(r"(?<!\\)\$", "", text).strip()  # \$ is an amount of money and stays
    if text in ("proof", "notfound", "nan"):  # NuminaMath's words for "no answer", and an empty number
        return ""
    integer = re.fullmatch(r"(-?)0*([0-9]+)(\.0+)?(\^\\circ|\^\{\\circ\})?", text)
    return integer[1] + integer[2] if integer else text


def drop_unusable(problems, label):
    """Returns the problems that can be trained on and compared with, and prints how many others there were."""
    golds = defaultdict(set)
    for problem, readable in zip(problems, parsable([problem.answer for problem in problems])):
        if problem.answer and readable:
            golds[str(problem.prompt)].add(problem.answer)
    kept, dropped = {}, Counter()
    for problem in problems:
        key = str(problem.prompt)
        if not problem.prompt or "![](" in key:
            dropped["without a text or with an image"] += 1
        elif problem.answer not in golds[key]:
            dropped["without a readable answer"] += 1
        elif len(golds[key]) > 1:  # nobody knows which one is right, so none stays
            dropped["with conflicting answers"] += 1
        elif key in kept:
            dropped["duplicate"] += 1
        else:
            kept[key] = problem
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
    counts = f"{label}: {len(problems):,} rows, {dropped.total():,} dropped" + (f" ({reasons})" if dropped else "")
    if not kept:
        raise UserError(f"{counts}, so nothing is left: check the columns of the problem and the answer.")
    print0(counts)
    return list(kept.values())


def encode_prompt(problem: Problem, tokenizer) -> list[int]:
    """Returns the prompt's token ids, the same in training and evaluation: the problem and, on a new line, INSTRUCTION.

    They go through the tokenizer's chat template if it has one. A tokenizer may bring an instruction of its own in its
    init_kwargs, as the built-in model's does (an empty one). Messages that mention \\boxed stay as they are.

    Raises UserError if the built-in model's tokenizer lacks a character of the problem.
    """
    instruction = tokenizer.init_kwargs.get("instruction", INSTRUCTION)
    is_chat = isinstance(problem.prompt, list)
    chat = problem.prompt if is_chat else [{"role": "user", "content": problem.prompt}]
    messages = [dict(message) for message in chat]
    has_own = is_chat and any("\\boxed" in message["content"] for message in messages)
    if instruction and not has_own:
        last_user = [message for message in messages if message["role"] == "user"][-1]
        last_user["content"] += "\n" + instruction
    if tokenizer.chat_template:
        # transformers 5 returns more than a list of ids unless told not to
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    else:
        text = "\n".join(message["content"] for message in messages) + "\n"
        ids = tokenizer(text, add_special_tokens=False).input_ids  # with them, some tokenizers end the prompt by EOS
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:1] != [bos] and tokenizer("1").input_ids[:1] == [bos]:  # it starts texts by BOS
        ids = [bos] + ids
    if instruction == "" and tokenizer.decode(ids) != text:
        raise UserError("The built-in tiny model reads only the arithmetic task: use --dataset arithmetic.")
    return ids


def encode_prompts(problems, tokenizer, max_prompt_tokens) -> tuple[list[Problem], list[list[int]]]:
    """Returns the problems whose prompts have at most max_prompt_tokens tokens, and those prompts; never a cut one.

    Raises UserError if there is none.
    """
    pairs = [(problem, encode_prompt(problem, tokenizer)) for problem in problems]
    kept = [(problem, ids) for problem, ids in pairs if len(ids) <= max_prompt_tokens]
    if not kept:
        raise UserError(f"All {len(pairs):,} prompts have more than {max_prompt_tokens} tokens: raise the limit.")
    if len(kept) < len(pairs):
        print0(f"{len(pairs) - len(kept):,} of {len(pairs):,} prompts dropped: more than {max_prompt_tokens} tokens")
    return [problem for problem, _ in kept], [ids for _, ids in kept]


# --- 2. the built-in task: arithmetic ---------------------------------------------------------------------------------

def worked_solution(first, steps, rng=None, slip=0.0):
    """One line per operation, then the box. With probability `slip` the result of a line is off by one or two."""
    total, lines = first, ""
    for step in steps:
        result = total + step
        if slip and rng.random() < slip:
            result = min(20, max(0, result + rng.choice([-2, -1, 1, 2])))
        lines += f"{total}{step:+d}={result}\n"
        total = result
    return f"{lines}\\boxed{{{total}}}"


def arithmetic_problem(rng, terms):
    """A chain of one-digit additions and subtractions whose running total stays in 0..20, e.g. 7+9-3=?"""
    first = total = rng.randint(1, 9)
    steps = []
    for _ in range(terms - 1):
        steps.append(rng.choice([d for d in range(-9, 10) if d != 0 and 0 <= total + d <= 20]))
        total += steps[-1]
    question = "".join([str(first), *(f"{step:+d}" for step in steps), "=?"])
    return Problem(question, str(total), worked_solution(first, steps), str(terms))


def arithmetic_problems(name, split):
    """Problems of "arithmetic" or "arithmetic:LO-HI" (LO to HI terms), with solutions; level = number of terms.

    By default 2 to 8 terms for train, 2 to 6 for test. A quarter of all chains, picked by a checksum of their text, is
    held out for the test split (at most 40 a length, no two alike): neither pre-training nor training sees one.
    """
    try:
        low, high = map(int, name.split(":")[1].split("-")) if ":" in name else (2, 8 if split == "train" else 6)
    except ValueError:
        low = high = 0
    if not 2 <= low <= high <= 40:
        raise UserError(f"--dataset {name}: write arithmetic or arithmetic:LO-HI with 2 <= LO <= HI <= 40 terms.")
    rng, problems = random.Random(f"{split} {low}-{high}"), []
    for terms in range(low, high + 1):
        drawn = [arithmetic_problem(rng, terms) for _ in range(1600)]
        held_out = [zlib.crc32(p.prompt.encode()) % 4 == 0 for p in drawn]
        if split == "test":
            problems += list({p.prompt: p for p, out in zip(drawn, held_out) if out}.values())[:40]
        else:
            problems += [p for p, out in zip(drawn, held_out) if not out]
    rng.shuffle(problems)       # so that the first few are of every length
    return problems


# --- 3. reward --------------------------------------------------------------------------------------------------------

BOX_TOKENS = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def extract_answer(text):
    """Return the content of the last complete \\boxed{...} (or \\fbox{...}) of `text`, None if there is none.

    Braces are matched and escaped braces skipped. Of nested boxes the innermost counts (it opens last). Prose is
    never read, and a box that is never closed is ignored. One pass with a stack: linear time on any text.
    """
    open_braces, last, content = [], -1, None
    for token in BOX_TOKENS.finditer(text or ""):
        if token[0] == "{":
            open_braces.append(-1)  # an ordinary brace
        elif token[0][0] == "\\" and len(token[0]) > 2:
            open_braces.append(token.end())  # a box: remember where its content starts
        elif token[0] == "}" and open_braces:
            start = open_braces.pop()
            if start > last:
                last, content = start, text[start : token.start()]
    return content


# -- different spellings of an answer are brought to one form

MAX_LENGTH = 2000  # characters; longer answers are only compared as plain integers
UNICODE = str.maketrans({
    "−": "-", "–": "-", "∞": r"\infty ", "π": r"\pi ", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "√": "sqrt ", "∪": r"\cup ", "∅": r"\emptyset ",
    "∈": r"\in ", "ℝ": r"\mathbb{R}", "°": r"^\circ ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "…": r"\ldots ",
})  # fmt: skip
FONT = r"\\(?:text(?:bf|it|rm|sf|normal)?|math(?:rm|bf|it|sf)|mbox|rm|bf)(?![a-zA-Z])"


def _repeating(match):
    """0.1\\overline{6} as a fraction: (16 - 1) / 90."""
    start, period = (match[1] or "0") + match[2], match[3] or match[4]
    return rf"\frac{{{int(start + period) - int(start)}}}{{{'9' * len(period) + '0' * len(match[2])}}}"


REWRITES = [(re.compile(pattern), replacement) for pattern, replacement in (
    (r"\\text\s*\{\s*\\?\$", r"\\text{\\$"),
    (r"(?<!\\)\$|(?<!\\)\\[()\[\]]|\\!|\\(?:display|text)style", ""),  # delimiters and marks without a meaning
    (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?", ""),  # \left( is (
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\varnothing", r"\\emptyset "),
    (r"(?<!\\)sqrt *(\d+)", r"\\sqrt{\1}"),  # √51 or sqrt51
    (r"\\hspace\*? *\{[^{}]*\}", r"\\quad "),
    (r"(?<!\\)\\[,;:> ]|~|\\(?:en|thin|med|thick)?space(?![a-zA-Z])|\s", " "),  # narrow spaces
    (r"(?<![\d.])[1-9]\d{0,2}(?:(?:\{,\}| +)\d{3})+(?!\d|\s*/)", lambda m: re.sub(r"\D", "", m[0])),  # 12\,345
    (r"\\(frac|binom) *(\d) *(\d)", r"\\\1{\2}{\3}"),
    (r"(?<![\d.^_])(\d+) +(\d+) */ *(\d+)", r"\1\\frac{\2}{\3}"),  # 1 1/4 is a mixed number
    (r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{?(\d+)\}?|\((\d+)\))", _repeating),
    (r"\.\.\.", r"\\ldots "),
    (rf"{FONT}\s*\{{[\s,]*(?:and|or)[\s,]*\}}|\b(?:and|or)\b|\\lor\b|\\vee\b|;|\\\\(?!.*\\end)", ","),  # a list
    (r"(?<=[\w)}\]])\s*\\q?quad(?:\s|\\q?quad)*(?=[\w({-]|\\(?:frac|sqrt|pi|\{))", ","),  # 1 \quad 2 is no product
    (r"(?<![_^]\d)(?<=\d) +(?=[\d.])|(?<=\d\}) +(?=\d)", ","),  # neither is 1 \; 2
    (r"(\\frac\{[^{}]*\}\{[^{}]*\}) +(?=\\frac|\d)", r"\1,"),
    (r"\\q?quad", " "),
    (r"(?:,\s*){2,}", ","),
)]  # fmt: skip
# A unit ends an item of the answer: words in a font command, bare words after a number, a percent or degree sign.
UNIT = re.compile(
    rf"(?<=[^\W_]|[}})\]!])\s*(?:{FONT}\s*\{{(?!\s*[eid]\s*\}}|[^{{}}]*\b(?:not|is)\b)[a-zA-Z\s./'()%\\-]*\}}"
    rf"(?:\^\{{?-?\d\}}?)?[\s/]*)+(?=,|$)"
    r"|(?<=[\d}])\s*(?!(?:[^,]*\s)?(?:not|is)\b)(?:(?:[a-zA-Z]{3,}|[ckm]m|[mk]g|m[lL]|ft|in|oz|lb|hr)(?![a-zA-Z])\.?"
    r"(?:\^\{?\d\}?)?(?:\s*/\s*[a-z]+)?\s*)+(?=,|$)"
    r"|\\\$|[$€£¥]|\s*\\?%(?=\s*(?:,|$))|\s*(?:\^\s*\{?\s*\\circ\s*\}?|\^?\\degree)\s*[CF]?(?=\s*(?:,|$))"
)
UNIT_NAMES = dict(pair.split("=") for pair in (
    "dollar=$ degree=circ percent=% percentage=% centimeter=cm meter=m kilometer=km inch=in inche=in feet=ft foot=ft "
    "mile=mi hour=h hr=h minute=min second=sec s=sec gram=g kilogram=kg pound=lb unit= squareunit="
).split())  # fmt: skip


@lru_cache(maxsize=4096)
def _normalise(text):
    """Split an answer into (core, unit): one spelling of the mathematics, and the unit as a short name or ''."""
    text = str(text).translate(UNICODE)
    text = text if extract_answer(text) is None else extract_answer(text)
    if len(text) > MAX_LENGTH:
        return text.strip(), ""
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(" .,:")
    units = {re.sub(rf"{FONT}|[\s{{}}\\.]|^\^", "", match[0]).lower() for match in UNIT.finditer(text)}
    units = {UNIT_NAMES.get(unit.rstrip("s"), unit.rstrip("s")) for unit in units}
    core = re.sub(rf"{FONT}\s*(?:\{{([^{{}}]*)\}}|)", r" \1 ", UNIT.sub("", text)).strip().rstrip(" .,:")
    core = re.sub(r"(?<![\\a-zA-Z])(pi|sqrt|infty)(?![a-zA-Z])", r"\\\1 ", core)
    return re.sub(r"^\(?([A-J])\)$", r"\1", core), "".join(sorted(units))


# -- two answers are compared

RELATIVE_TOLERANCE = 2e-6  # a decimal against a value that has no finite decimal: six digits, as in 0.333333 for 1/3
# Number bases, clock times, ellipses and words are compared as text: as mathematics they would lose their meaning.
LITERAL = re.compile(r"\d_|[A-F]{2,}_|:\d\d(?!\d)|:.*:|\\[lc]?dots|^(?:no|on)$", re.IGNORECASE)
WORDS = re.compile(r"[a-zA-Z][a-zA-Z0-9 .,'()?!-]*")


def _integer(core):
    """A plain integer as text without '+', leading zeros and thousands commas; None for anything else."""
    if not re.fullmatch(r"[-+]?\s*(?:\d+|\d{1,3}(?:,\d{3})+)", core, re.ASCII):
        return None
    digits = re.sub(r"\D", "", core).lstrip("0") or "0"
    return "-" + digits if core[0] == "-" and digits != "0" else digits


def _literal(core):
    """The text to compare if `core` is not mathematics, else None. Runs such as abc or xyz are products, not words."""
    runs = re.findall(r"[a-zA-Z]{3,}", core)
    is_words = any("".join(sorted(set(run.lower()))) not in "abcdefghijklmnopqrstuvwxyz" for run in runs)
    if LITERAL.search(core) or (is_words and WORDS.fullmatch(core)):
        return re.sub(r"[\s{}]|(?<![\d.])0+(?=\d)", "", core).casefold()
    return None


def _quick(gold, answer):
    """Decide without a worker process where that is possible: True, False or None. `answer` None: is gold usable?"""
    (gold, gold_unit), (answer, answer_unit) = gold, answer or gold
    units = {gold_unit, answer_unit} - {""}
    if not gold or not answer or len(units) == 2:
        return False
    if _integer(gold) and _integer(answer) and "%" not in units:
        return _integer(gold) == _integer(answer)
    if len(gold) > MAX_LENGTH or len(answer) > MAX_LENGTH:
        return False
    if _literal(gold) or _literal(answer):
        return _literal(gold) == _literal(answer)
    return None


@lru_cache(maxsize=1)
def _parser():
    """math-verify's parser of LaTeX. Its handling of units stays off: units are gone by then."""
    rules = NormalizationConfig(malformed_operators=True, nits=True, boxed="last")
    return LatexExtractionConfig(boxed_match_priority=0, normalization_config=rules)


@lru_cache(maxsize=4096)
def _expression(core):
    """Parse with math-verify; None if that fails. Decimals become exact fractions, i the imaginary unit."""
    expr = ""
    for mode in (PredictionMode.SLL, PredictionMode.LL):  # ANTLR's fast mode first: it is right or it fails
        if isinstance(expr, str):
            ParserATNSimulator.predictionMode = property(lambda self: mode, lambda self, value: None)
            expr = next(iter(parse(rf"\boxed{{{core}}}", (_parser(),), parsing_timeout=None)), "")
    if isinstance(expr, str):
        return None
    if isinstance(expr, sympy.Eq) and isinstance(expr.rhs, (sympy.Set, sympy.Tuple)):
        expr = expr.rhs  # n = 2, 3 or x \in [2, 3): the values are the answer
    elif isinstance(expr, sympy.Eq) and not expr.free_symbols:
        expr = expr.rhs if expr.lhs.equals(expr.rhs) else sympy.nan  # 2 + 2 = 4 counts as 4, 5 = 4 as nothing
    exact = {number: sympy.Rational(str(number)) for number in expr.atoms(sympy.Float)}
    real = None if any(s.name == "i" for s in expr.free_symbols) else True
    names = {s: sympy.I if s.name == "i" else sympy.Symbol(s.name, real=real) for s in expr.free_symbols}
    expr = expr.xreplace(exact | names)
    expr = expr if expr.has(Relational) else expr.doit()
    return None if expr in (sympy.true, sympy.false) or expr.has(sympy.nan, sympy.zoo) else expr


def _rounded(exact, decimal, text):
    """True if `text` is a decimal that rounds the constant `exact`, which itself has no finite decimal."""
    finite = [number.is_Rational and not 10 ** number.q.bit_length() % number.q for number in (exact, decimal)]
    if "." not in text or finite != [False, True] or not exact.is_number:
        return False
    return bool(abs(sympy.N(exact - decimal, 30)) <= RELATIVE_TOLERANCE * abs(sympy.N(exact, 30)))


def _equal(gold_core, answer_core, scale=1):
    """math-verify's verdict (gold first), guarded where it is too lenient or too strict; the answer times `scale`."""
    gold, answer = _expression(gold_core), _expression(answer_core)
    if gold is None or answer is None:
        return False
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        answer = answer * scale
        if _rounded(gold, answer, answer_core) or _rounded(answer, gold, gold_core):
            return True
        # math-verify drops tiny differences, so ask once more without any rounding.
        return verify(gold, answer, timeout_seconds=None) and gold.equals(answer) is not False
    in_braces = gold_core.startswith(r"\{"), answer_core.startswith(r"\{")
    ordered = [isinstance(side, (sympy.Tuple, sympy.Interval)) for side in (gold, answer)]
    if in_braces != (False, False) and ordered[0] != ordered[1]:
        return False  # \{1, 2\} is neither the pair nor the interval (1, 2)
    return verify(gold, answer, numeric_precision=100, timeout_seconds=None, allow_set_relation_comp=True)


def _judge(gold, answer):
    """What a worker computes: is `answer` equal to `gold` (both normalised)? With `answer` None: can gold be compared?

    Never raises on any input, whatever the libraries do with it; KeyboardInterrupt and SystemExit do pass.
    """
    try:
        if answer is None:
            return _expression(gold[0]) is not None
        if gold == answer and _expression(gold[0]) is not None:
            return True
        (gold, gold_unit), (answer, answer_unit) = gold, answer
        if gold_unit == "%" != answer_unit:  # 25% is both 25 and 0.25
            return _equal(gold, answer) or _equal(gold, answer, 100)
        if answer_unit == "%" != gold_unit:
            return _equal(gold, answer, sympy.Rational(1, 100)) or (bool(_integer(answer)) and _equal(gold, answer))
        return bool(_equal(gold, answer))
    except (Exception, TimeoutException):  # math-verify's TimeoutException is no Exception
        return False


# -- worker processes
#
# Big-integer arithmetic inside one C call cannot be interrupted by a signal or a thread. Only ending the process
# bounds it, so all parsing and comparing happens in processes that can be killed and replaced.

WORKERS = 4
FIRST_TRY, SECOND_TRY = 0.3, 2.0  # seconds per answer; who fails the first try waits until all others are done
BATCH_SECONDS, SECONDS_PER_ANSWER = 5.0, 0.02  # the batch deadline
WORKER_MEMORY = 2**29  # bytes a worker may allocate beyond what it starts with
HARD = re.compile(r"!|\^.*\^|\\(?:sum|prod|binom|int|gcd|log)|\d{6}|\^\{?\d{4}")  # likely slow, so tried last
# For the fork server only: where to find this very module (not one in the current folder), and the mark to warm up.
SERVER_ENV = "PYTHONPATH", "PYTHONSAFEPATH", "RLVR_REWARD_SERVER"
WARM_UP = (
    r"(1,\frac{2}{3}) # x^{2}-3x+\frac{1}{4} # y=2x+1 # (-\infty,1]\cup(2,3) # 3\sqrt{2}, -\frac{\pi}{6} # 1\le 4"
    r"# \begin{pmatrix}1&x\\-2&3\end{pmatrix} # \{1,x^2\} # -2\cdot 10^{-3} # e^{2i}+\log_{2}(3) # \pm 5! # ab_1 # |x|"
)
_idle = []  # (process, pipe) of each worker that waits for a job
_batch_lock, _start_lock = threading.Lock(), threading.Lock()


@lru_cache(maxsize=1)
def _warm_up():
    """ANTLR builds its tables as it parses: done once in the server, every worker forked from it inherits them."""
    for sample in WARM_UP.split("#"):
        _judge((sample, ""), (f"{sample}+1", ""))


def _limit(kind, value):
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _serve(pipe):
    """A worker's main loop: judge pairs until the parent closes its end of the pipe (or is gone)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + WORKER_MEMORY)
    _warm_up()
    try:
        pipe.send("ready")
        while True:
            job = pipe.recv()
            # If the parent is killed meanwhile, the kernel still ends this process after 20 s of work.
            _limit(resource.RLIMIT_CPU, int(time.process_time()) + 20)
            pipe.send(_judge(*job))
    except (EOFError, OSError):
        pass


def _start_worker():
    """Fork a worker off a clean server process that has this module loaded: quick, and safe where CUDA is in use."""
    if sympy is None:
        raise UserError("Answers other than plain integers need math-verify: pip install math-verify.")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pipe, child_pipe = context.Pipe()
    process = context.Process(target=_serve, args=(child_pipe,), daemon=True)
    with _start_lock:
        main, env = sys.modules["__main__"], {name: os.environ.get(name, "") for name in SERVER_ENV}
        sys.modules["__main__"] = types.ModuleType("__main__")  # or the child would run the user's script once more
        os.environ.update(zip(SERVER_ENV, (os.pathsep.join(sys.path), "1", "1")))
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main
            os.environ.update(env)
    child_pipe.close()
    pipe.recv()
    return process, pipe


def _ask(job, bound, deadline):
    """Have an idle worker judge one job within `bound` seconds. None if it is too slow: the worker is then killed."""
    if time.monotonic() > deadline:
        return None
    process, pipe = _idle.pop() if _idle else _start_worker()
    verdict = None
    try:
        pipe.send(job)
        if pipe.poll(max(0, min(bound, deadline - time.monotonic()))):
            verdict = pipe.recv()
    except (EOFError, OSError):
        verdict = False  # the worker died: out of memory or stack
    if process.is_alive() and verdict is not None:
        _idle.append((process, pipe))
    else:
        process.kill()
        process.join()
        pipe.close()
    return verdict


def _run(jobs):
    """Judge all (gold, answer) jobs; False for those that fail, take too long or miss the deadline."""
    jobs = sorted(jobs, key=lambda job: bool(HARD.search(f"{job}")))
    verdicts = {}
    with _batch_lock, ThreadPoolExecutor(WORKERS) as threads:
        _idle[:] = [worker for worker in _idle if worker[0].is_alive()]
        while len(_idle) < min(WORKERS, len(jobs)):
            _idle.append(_start_worker())
        deadline = time.monotonic() + BATCH_SECONDS + SECONDS_PER_ANSWER * len(jobs)
        for bound in (FIRST_TRY, SECOND_TRY):
            todo = [job for job in jobs if verdicts.get(job) is None]
            verdicts.update(zip(todo, threads.map(lambda job: _ask(job, bound, deadline), todo), strict=True))
    return {job: bool(verdict) for job, verdict in verdicts.items()}


# -- the reward


def _judge_all(pairs):
    """Judge (gold, answer) pairs of normalised texts, each distinct pair once."""
    verdicts = {pair: _quick(*pair) for pair in pairs}
    jobs = [pair for pair, verdict in verdicts.items() if verdict is None]
    if jobs:
        verdicts.update(_run(jobs))
    return [verdicts[pair] for pair in pairs]


def score(completions, answers):
    """Return the reward, 0.0 or 1.0, of each completion against the reference answer at the same place.

    Only the last complete box counts, and it must equal the reference as mathematics: exactly if both are exact.
    Equal pairs are computed once. An answer gets up to 2 seconds and a batch 5 seconds plus 0.02 per distinct pair
    (the first start of the workers not counted); what is not finished by then scores 0.0. No input makes it raise
    (ValueError only for lists of different lengths); it may be called from any thread, one batch runs at a time.
    """
    boxes = [extract_answer(completion) or "" for completion in completions]
    pairs = [(_normalise(answer), _normalise(box)) for answer, box in zip(answers, boxes, strict=True)]
    return [float(verdict) for verdict in _judge_all(pairs)]


def math_reward(completion, answer):
    """Return 1.0 if the last complete box of `completion` equals `answer`, else 0.0: `score` for a single pair."""
    return score([completion], [answer])[0]


def parsable(answers):
    """Return for each reference answer whether it can be compared at all. One that cannot never scores 1.0."""
    return _judge_all([(_normalise(answer), None) for answer in answers])


if os.environ.get("RLVR_REWARD_SERVER"):
    _warm_up()
