import json
import os
import sys
from pathlib import Path

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tasks
from tasks import INSTRUCTION, Problem, UserError, clean_answer, encode_prompt, encode_prompts, load_problems
from tasks import tidy_solution

GSM8K = "Tom has 2,000 + 125.\nThat is <<2000+125=2125>>2125.\n#### 2,125"
DAPO = tasks.DAPO_PREFIX + "answer the problem: $x$.\nAnswer it." + tasks.DAPO_SUFFIX


def numina(problem, answer="4", source="cn_k12", question_type="math-word-problem", valid="Yes", solution_valid="Yes",
           synthetic=False):
    return dict(problem=problem, solution="$4$", answer=answer, problem_type="Algebra", question_type=question_type,
                problem_is_valid=valid, solution_is_valid=solution_valid, source=source, synthetic=synthetic)


@pytest.fixture
def hub(monkeypatch):
    """hub(rows) makes load_dataset return these rows; hub.asked then holds what it was asked for."""

    def set_rows(rows):
        def load_dataset(path, config, *, split, revision=None):
            set_rows.asked = (path, config, split, revision)
            return datasets.Dataset.from_list(rows)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    return set_rows


# name, use, what the hub must be asked for, one row of the real schema, the Problem expected of it
MAPPINGS = [
    ("gsm8k", "train", ("openai/gsm8k", "main", "train", "740312add88f781978c0658806c59bc2815b9866"),
     dict(question="Q?", answer=GSM8K),
     Problem("Q?", "2125", "Tom has 2,000 + 125.\nThat is 2125.\nThe answer is \\boxed{2125}")),
    ("gsm8k", "test", ("openai/gsm8k", "main", "test", "740312add88f781978c0658806c59bc2815b9866"),
     dict(question="Q?", answer="It falls.\n#### -3"), Problem("Q?", "-3", "It falls.\nThe answer is \\boxed{-3}")),
    ("math", "train", ("DigitalLearningGmbH/MATH-lighteval", "default", "train",
                       "0530c78699ea5e8eb5530600900e1f328b48acad"),
     dict(problem="P", level="Level 5", type="Algebra", solution=r"$\boxed{1}$, no, $\boxed{\frac{1}{\sqrt{2}}}$."),
     Problem("P", r"\frac{1}{\sqrt{2}}", r"$\boxed{1}$, no, $\boxed{\frac{1}{\sqrt{2}}}$.", "Level 5")),
    ("math", "test", ("DigitalLearningGmbH/MATH-lighteval", "default", "test",
                      "0530c78699ea5e8eb5530600900e1f328b48acad"),
     dict(problem="P", level="Level ?", type="Algebra", solution=r"so \fbox{7}"),
     Problem("P", "7", r"so \boxed{7}", "Level ?")),
    ("math500", "test", ("HuggingFaceH4/MATH-500", "default", "test", None),
     dict(problem="P", solution=r"so \boxed{\$32,\!348}", answer=r"\$32,\!348", subject="Algebra", level=3,
          unique_id="test/1"),
     Problem("P", r"\$32,\!348", r"so \boxed{\$32,\!348}", "3")),
    ("dapo17k", "train", ("open-r1/DAPO-Math-17k-Processed", "all", "train", None),
     dict(prompt=DAPO, solution="34", data_source="math_dapo", ability="MATH",
          source_prompt=[dict(role="user", content=DAPO)], reward_model=dict(ground_truth="34", style="rule"),
          extra_info=dict(index="u")),
     Problem("answer the problem: $x$.\nAnswer it.", "34")),
    ("deepmath", "train", ("zwhe99/DeepMath-103K", "default", "train", None),
     dict(question="Q?", final_answer=r"\infty", difficulty=5.0, topic="T", r1_solution_1=r"a \boxed{\infty}",
          r1_solution_2="b", r1_solution_3="c"),
     Problem("Q?", r"\infty", r"a \boxed{\infty}", "5.0")),
    ("deepscaler", "train", ("agentica-org/DeepScaleR-Preview-Dataset", "default", "train", None),
     dict(problem="P", answer="035", solution=""), Problem("P", "35")),
    ("cn_k12", "train", ("AI-MO/NuminaMath-1.5", "default", "train", None), numina("P", "B"), Problem("P", "B", "$4$")),
    ("aime24", "test", ("HuggingFaceH4/aime_2024", "default", "train", None),
     dict(id=60, problem="P", solution="s", answer="025", url="u", year="2024"), Problem("P", "25")),
    ("aime25", "test", ("math-ai/aime25", "default", "test", None), dict(problem="P", answer="70", id="0"),
     Problem("P", "70")),
    ("aime26", "test", ("MathArena/aime_2026", "default", "train", None),
     dict(problem_idx=1, answer=277, problem="P"), Problem("P", "277")),
    ("amc23", "test", ("math-ai/amc23", "default", "test", None),
     dict(id=0, question="Q?", answer=27.0, url="u"), Problem("Q?", "27")),
    ("minerva", "test", ("math-ai/minervamath", "default", "test", None),
     dict(question="Q?", answer="4.5e33\n"), Problem("Q?", "4.5e33")),
    ("olympiad", "test", ("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train", None),
     dict(id=1, question="Q?", solution=["s"], final_answer=["$69$,$84$"], is_multiple_answer=True, unit=None),
     Problem("Q?", "69,84")),
    ("mmlu", "test", ("cais/mmlu", "all", "test", None),
     dict(question="Q?", subject="s", choices=["w", "x", "y", "z"], answer=0),
     Problem("Q?\nA. w\nB. x\nC. y\nD. z", "A")),
    ("mmlu", "train", ("cais/mmlu", "all", "auxiliary_train", None),
     dict(question="Q?", subject="", choices=["w", "x", "y", "z"], answer=3),
     Problem("Q?\nA. w\nB. x\nC. y\nD. z", "D")),
]


@pytest.mark.parametrize("name, split, asked, row, expected", MAPPINGS, ids=[f"{m[0]}-{m[1]}" for m in MAPPINGS])
def test_hub_row_becomes_the_problem(hub, name, split, asked, row, expected):
    hub([row])
    assert load_problems(name, split) == [expected]
    assert hub.asked == asked


def test_every_hub_set_is_tested_and_pinned_by_full_revisions_only():
    assert {m[0] for m in MAPPINGS} == set(tasks.HUB_SETS)
    for row in tasks.HUB_SETS.values():
        assert len(row[0].partition("@")[2]) in (0, 40)


@pytest.mark.parametrize("name", ["math500", "aime24", "aime25", "aime26", "amc23", "minerva", "olympiad"])
def test_evaluation_sets_are_not_trained_on(hub, name):
    hub([])
    with pytest.raises(UserError, match=f"{name} has no train split, only test"):
        load_problems(name, "train")
    assert not hasattr(hub, "asked")


@pytest.mark.parametrize("name", ["dapo17k", "deepmath", "deepscaler", "cn_k12"])
def test_training_sets_without_a_test_split_say_so(name):
    with pytest.raises(UserError, match=f"{name} has no test split, only train"):
        load_problems(name, "test")


def test_mmlu_answer_after_a_real_classlabel(monkeypatch):
    features = datasets.Features(question=datasets.Value("string"), subject=datasets.Value("string"),
                                 choices=datasets.List(datasets.Value("string")),
                                 answer=datasets.ClassLabel(names=["A", "B", "C", "D"]))
    columns = dict(question=["Q?"], subject=[""], choices=[list("wxyz")], answer=["C"])
    data = datasets.Dataset.from_dict(columns, features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: data)
    assert load_problems("mmlu", "test")[0].answer == "C"


def test_numina_keeps_sound_cn_k12_rows(hub, capsys):
    hub([numina("kept"), numina("letter", "A"), numina("a", source="olympiads"), numina("b", question_type="proof"),
         numina("c", valid="Incomplete"), numina("d", solution_valid="No"), numina("e", synthetic=True),
         numina("f", "proof"), numina("g", "notfound"), numina("h", ""), numina("see ![](https://x/y.png)")])
    assert [p.prompt for p in load_problems("cn_k12")] == ["kept", "letter"]
    out = capsys.readouterr().out
    assert "NuminaMath-1.5's 11 rows" in out
    assert "cn_k12/train: 6 rows, 4 dropped (3 without a readable answer, 1 without a text or with an image)" in out


def test_duplicates_and_conflicting_golds_are_dropped_and_counted(hub, capsys):
    rows = [("a", "1"), ("b", "2"), ("a", "01"), ("c", "3"), ("c", "4"), ("d", None), (None, "5"), ("b", "")]
    hub([dict(prompt=prompt, solution=answer) for prompt, answer in rows])
    assert [(p.prompt, p.answer) for p in load_problems("dapo17k")] == [("a", "1"), ("b", "2")]
    out = capsys.readouterr().out
    assert "8 rows, 6 dropped" in out and "1 duplicate" in out and "2 with conflicting answers" in out
    assert "2 without a readable answer" in out and "1 without a text" in out


def test_unparsable_golds_are_asked_about_once(hub, monkeypatch):
    calls = []
    monkeypatch.setattr(tasks, "parsable", lambda answers: calls.append(answers) or [a != "bad" for a in answers])
    hub([dict(problem="a", answer="bad", solution=""), dict(problem="b", answer=None, solution=""),
         dict(problem="c", answer="1", solution="s")])
    assert load_problems("deepscaler") == [Problem("c", "1", "s")]
    assert calls == [["bad", "", "1"]]


def test_limit_counts_after_dropping(hub):
    hub([dict(problem=str(i), answer="" if i < 3 else "1") for i in range(9)])
    assert [p.prompt for p in load_problems("aime25", "test", limit=2)] == ["3", "4"]


def test_a_set_without_a_usable_row_is_an_error(hub):
    hub([dict(problem="P", answer="")])
    with pytest.raises(UserError, match="aime25/test: 1 rows, 1 dropped .1 without a readable answer"):
        load_problems("aime25", "test")


def test_hub_failure_is_one_clear_error(monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\nlong trace")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match="gsm8k cannot be loaded.*Couldn't reach.*local file") as error:
        load_problems("gsm8k")
    assert "long trace" not in str(error.value)


@pytest.mark.parametrize("name", ["gms8k", "openai/gsm8k", "data.txt", "arithmetics"])
def test_unknown_name_lists_what_there_is(name):
    with pytest.raises(UserError, match=f"'{name}'.*gsm8k.*mmlu.*jsonl"):
        load_problems(name)


def test_arithmetic_goes_to_the_builtin_task(monkeypatch):
    monkeypatch.setattr(tasks, "arithmetic_problems", lambda name, split: [Problem(name, split), Problem("", "")])
    assert load_problems("arithmetic:3-8", "test", limit=1) == [Problem("arithmetic:3-8", "test")]
    assert load_problems("arithmetic")[0] == Problem("arithmetic", "train")


# Answers and solutions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value, expected", [
    ("025", "25"), ("000", "0"), ("-07", "-7"), (25, "25"), (0, "0"), (27.0, "27"), ("27.0", "27"), (0.5, "0.5"),
    (["2"], "2"), (r"336^\circ", "336"), (r"$336^{\circ}$", "336"),
    (r"$\frac{1}{2 n+2}$", r"\frac{1}{2 n+2}"), ("7\n", "7"),
    (r"\$18", r"\$18"), ("58,500", "58,500"), ("1,-2", "1,-2"), ("2516_8", "2516_8"), (r"(C)", "(C)"), (True, "True"),
    (None, ""), (float("nan"), ""), ("", ""), ("proof", ""), ("notfound", ""),
    (["1", "2"], ""), ([], ""), ({"a": 1}, ""),
    (2**70, str(2**70)), ("0.50", "0.50"), ("1.05", "1.05"), ("2008-05-03", "2008-05-03"), (r"x^\circ", r"x^\circ"),
])
def test_clean_answer(value, expected):
    assert clean_answer(value) == expected


@pytest.mark.parametrize("text, expected", [
    ("2 < 3 << 4\n#### 1,234,567 ", "2 < 3 << 4\nThe answer is \\boxed{1234567}"),
    ("pay <<5*2=10>>10 #### $18", "pay 10\nThe answer is \\boxed{18}"),
    ("It is (1, 2).\n#### (1, 2)", "It is (1, 2).\nThe answer is \\boxed{(1, 2)}"),
    ("#### Step 1\nadd\n#### Step 2\nso \\boxed{5}", "#### Step 1\nadd\n#### Step 2\nso \\boxed{5}"),
    ("so\n#### \\boxed{5}", "so\nThe answer is \\boxed{5}"),
    ("so $\\boxed 2$.", "so $\\boxed{2}$."), ("so \\boxed {2}", "so \\boxed{2}"), ("\\fbox{2}", "\\boxed{2}"),
    ("x << y >> z", "x << y >> z"), ("  ", ""), (None, ""), (["s"], ""),
])
def test_tidy_solution(text, expected):
    assert tidy_solution(text) == expected


# Local files ----------------------------------------------------------------------------------------------------------


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".csv":
        datasets.Dataset.from_list(rows).to_csv(str(path), index=False)
    else:
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    return str(path)


@pytest.mark.parametrize("suffix", tasks.FILE_TYPES)
def test_local_file_of_each_type(tmp_path, suffix):
    rows = [dict(question="Q, 1?", answer=GSM8K, level="easy"), dict(question='Q "2"\n?', answer="025", level="hard")]
    problems = load_problems(write(tmp_path / f"data[1]{suffix}", rows))
    assert problems == [
        Problem("Q, 1?", "2125", "Tom has 2,000 + 125.\nThat is 2125.\nThe answer is \\boxed{2125}", "easy"),
        Problem('Q "2"\n?', "25", None, "hard"),
    ]


@pytest.mark.parametrize("row, expected", [
    (dict(problem="P", final_answer="5"), Problem("P", "5")),
    (dict(prompt="P", answer="5", solution="work"), Problem("P", "5", "work")),
    (dict(problem="P", question="Q", answer="5"), Problem("P", "5")),
    (dict(problem="P", answer="so \\boxed{5}"), Problem("P", "5", "so \\boxed{5}")),
    (dict(problem="P", solution="so \\boxed{5}"), Problem("P", "5", "so \\boxed{5}")),
    (dict(problem="P", solution="so\n#### 5"), Problem("P", "5", "so\nThe answer is \\boxed{5}")),
    (dict(problem="P", answer="5", solution="so <<2+3=5>>5\n#### 5"),
     Problem("P", "5", "so 5\nThe answer is \\boxed{5}")),
    (dict(problem="P", answer=5, level=3), Problem("P", "5", None, "3")),
])
def test_local_columns(tmp_path, row, expected):
    assert load_problems(write(tmp_path / "a.jsonl", [row])) == [expected]


def test_a_solution_without_an_answer_in_it_is_no_gold(tmp_path):
    rows = [dict(problem="P", solution="She sold 48 clips."), dict(problem="Q", solution="\\boxed{1}")]
    path = write(tmp_path / "a.jsonl", rows)
    assert [p.prompt for p in load_problems(path)] == ["Q"]


def test_local_chat_messages(tmp_path):
    chat = [dict(role="system", content="s"), dict(role="user", content="u")]
    for suffix in (".jsonl", ".parquet"):
        assert load_problems(write(tmp_path / f"a{suffix}", [dict(prompt=chat, answer="1")])) == [Problem(chat, "1")]


def test_text_is_kept_as_written_where_types_are_mixed(tmp_path):
    golds = ["2008-05-03", 2**70, "[1, 2]", "1e5", 3, 2.5, "true"]
    path = write(tmp_path / "a.jsonl", [dict(problem=f"P{i}", answer=gold) for i, gold in enumerate(golds)])
    assert [p.answer for p in load_problems(path)] == [str(gold) for gold in golds]
    (tmp_path / "a.csv").write_text("problem,answer\nP,0.10\nQ,NA\nR,12345678901234567890123\n")
    assert [p.answer for p in load_problems(str(tmp_path / "a.csv"))] == ["0.10", "NA", "12345678901234567890123"]


def test_a_changed_file_is_read_anew(tmp_path):
    path = tmp_path / "a.jsonl"
    for gold in "12":
        write(path, [dict(problem="P", answer=gold)])
        os.utime(path, (1, 1))  # the same size and time: a cache could not tell
        assert load_problems(str(path))[0].answer == gold


def test_line_breaks_in_a_csv_cell_are_kept(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'problem,answer\r\n"a\r\nb",1\r\n')
    assert load_problems(str(tmp_path / "a.csv")) == [Problem("a\r\nb", "1")]


def test_a_byte_order_mark_and_odd_line_separators_are_harmless(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"problem": "a\u2028b", "answer": "1"}\r\n', encoding="utf-8")
    assert load_problems(str(path)) == [Problem("a\u2028b", "1")]


@pytest.mark.parametrize("name, content, message", [
    ("a.jsonl", "", "holds no rows"),
    ("a.jsonl", "\n\n", "holds no rows"),
    ("a.json", "[]", "holds no rows"),
    ("a.json", "", "Expecting value"),
    ("a.json", '{"data": []}', "holds no rows"),
    ("a.csv", "", "holds no rows"),
    ("a.csv", "problem,answer\n", "holds no rows"),
    ("a.jsonl", '{"problem": "P", "answer": "1"}\n{"problem": "Q", "ans', "line 2"),
    ("a.json", '[{"problem": "P", "answer"', "line 1"),
    ("a.jsonl", "1\n2\n", "not an object"),
    ("a.csv", "problem,answer\nf(1, 2),3\n", "more cells"),
    ("a.csv", 'problem,answer\n"P,3\n', "end of data"),
    ("a.parquet", "nonsense", "Parquet"),
    ("a.jsonl", '{"text": "P", "label": "1"}', "columns label, text"),
    ("a.csv", "problem,label\nP,1\n", "columns label, problem"),
    ("a.jsonl", '{"problem": "P", "answer": ""}', "1 without a readable answer"),
])
def test_bad_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=message) as error:
        load_problems(str(path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", ["", *tasks.FILE_TYPES])
def test_folders_and_missing_files(tmp_path, suffix):
    folder, missing = tmp_path / f"folder{suffix}", tmp_path / f"missing{suffix}"
    folder.mkdir()
    for path in (folder, missing):
        with pytest.raises(UserError) as error:
            load_problems(str(path))
        assert str(path) in str(error.value)


def test_unsupported_suffix(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="a.txt.*jsonl"):
        load_problems(str(tmp_path / "a.txt"))


def test_not_utf8(tmp_path):
    (tmp_path / "a.csv").write_bytes("problem,answer\né,1\n".encode("latin1"))
    with pytest.raises(UserError, match="utf-8"):
        load_problems(str(tmp_path / "a.csv"))


def test_real_gsm8k_rows():
    path = Path(__file__).resolve().parents[2] / "shared/data/gsm8k_train_600.jsonl"
    if not path.exists():
        pytest.skip(f"no {path}")
    problems = load_problems(str(path))
    assert len(problems) == 600
    for problem in problems:
        assert problem.answer == str(int(problem.answer))
        assert problem.solution.endswith(f"\\boxed{{{problem.answer}}}") and "<<" not in problem.solution


# Prompts --------------------------------------------------------------------------------------------------------------

BOS, EOS, UNK = 0, 1, 2
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<go>{% endif %}"


def char_tokenizer(add="", chat_template=None, **kwargs):
    """One token per character; add: the special tokens that its post-processor puts around a text, "$A"."""
    vocab = {"<s>": BOS, "</s>": EOS, "<unk>": UNK, **{chr(c): c for c in [10, *range(32, 127)]}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    if add:
        special_tokens = [("<s>", BOS), ("</s>", EOS)]
        tokenizer.post_processor = processors.TemplateProcessing(single=add, special_tokens=special_tokens)
    special = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **kwargs)
    fast.chat_template = chat_template
    return fast


def spell(ids):
    assert type(ids) is list and all(type(i) is int for i in ids)
    return "".join({BOS: "<s>", EOS: "</s>", UNK: "<unk>"}.get(i, chr(i)) for i in ids)


@pytest.mark.parametrize("add, start", [("", ""), ("<s> $A", "<s>"), ("<s> $A </s>", "<s>"), ("$A </s>", "")])
def test_base_prompt_has_one_bos_and_no_eos(add, start):
    ids = encode_prompt(Problem("1+1?", "2"), char_tokenizer(add))
    assert spell(ids) == f"{start}1+1?\n{INSTRUCTION}\n"


@pytest.mark.parametrize("add", ["", "<s> $A", "<s> $A </s>"])
def test_chat_prompt_whose_template_emits_bos(add):
    ids = encode_prompt(Problem("1+1?", "2"), char_tokenizer(add, "{{ bos_token }}" + TEMPLATE))
    assert spell(ids) == f"<s><user>1+1?\n{INSTRUCTION}<go>"


@pytest.mark.parametrize("add, start", [("", ""), ("<s> $A", "<s>")])
def test_chat_prompt_whose_template_emits_none(add, start):
    ids = encode_prompt(Problem("1+1?", "2"), char_tokenizer(add, TEMPLATE))
    assert spell(ids) == f"{start}<user>1+1?\n{INSTRUCTION}<go>"


def test_messages():
    chat = [dict(role="system", content="s"), dict(role="user", content="a"), dict(role="assistant", content="b"),
            dict(role="user", content="c")]
    before = json.dumps(chat)
    text = f"<system>s<user>a<assistant>b<user>c\n{INSTRUCTION}<go>"
    assert spell(encode_prompt(Problem(chat, "1"), char_tokenizer(chat_template=TEMPLATE))) == text
    assert spell(encode_prompt(Problem(chat, "1"), char_tokenizer())) == f"s\na\nb\nc\n{INSTRUCTION}\n"
    assert json.dumps(chat) == before  # encoding leaves the problem as it is
    own = [dict(role="system", content="Use \\boxed{}."), dict(role="user", content="a")]
    ids = encode_prompt(Problem(own, "1"), char_tokenizer(chat_template=TEMPLATE))
    assert spell(ids) == "<system>Use \\boxed{}.<user>a<go>"


def test_an_instruction_of_its_own_survives_saving(tmp_path):
    char_tokenizer(instruction="").save_pretrained(tmp_path)
    for tokenizer in (AutoTokenizer.from_pretrained(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)):
        assert tokenizer.init_kwargs["instruction"] == ""
        assert spell(encode_prompt(Problem("7+9-3=?", "13"), tokenizer)) == "7+9-3=?\n"
    assert spell(encode_prompt(Problem("a", "1"), char_tokenizer(instruction="Go."))) == "a\nGo.\n"


def test_the_builtin_model_refuses_what_it_cannot_spell():
    with pytest.raises(UserError, match="--dataset arithmetic"):
        encode_prompt(Problem("é", "1"), char_tokenizer(instruction=""))
    assert UNK in encode_prompt(Problem("é", "1"), char_tokenizer())  # other tokenizers may have an unknown token


def test_training_and_evaluation_prompts_are_the_same(hub):
    hub([dict(question="Q?", answer=GSM8K)])
    for tokenizer in (char_tokenizer("<s> $A"), char_tokenizer(chat_template=TEMPLATE)):
        train, test = (encode_prompts(load_problems("gsm8k", split), tokenizer, 500)[1] for split in ("train", "test"))
        assert train == test


def test_long_prompts_are_dropped_never_cut(capsys):
    problems = [Problem("a" * n, "1") for n in (3, 9, 4)]
    kept, prompts = encode_prompts(problems, char_tokenizer(instruction=""), 5)
    assert kept == [problems[0], problems[2]] and [spell(ids) for ids in prompts] == ["aaa\n", "aaaa\n"]
    assert "1 of 3 prompts" in capsys.readouterr().out
    assert encode_prompts(problems, char_tokenizer(instruction=""), 10)[0] == problems
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match="3 tokens"):
        encode_prompts(problems, char_tokenizer(instruction=""), 3)
