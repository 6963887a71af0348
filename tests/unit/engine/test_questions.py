"""Question files, prompts and plans: what is read, and what is said of what cannot be."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from specdec.bench.plan import Plan
from specdec.bench.systems import check_specs
from specdec.engine.config import resolve
from specdec.engine.questions import Question, build_prompt, find_questions, group_of, read_questions, select
from specdec.errors import ConfigError, PromptError
from specdec.models.loading import embedded_model
from specdec.settings.options import Given

CONFIGS = Path(__file__).parents[3] / "configs" / "bench"
GOOD = '{"question_id": 1, "category": "qa", "turns": ["Why?"]}\n'


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_spec_bench_lines(tmp_path: Path) -> None:
    line = {"question_id": 7, "category": "writing", "turns": ["Write.", "Again."], "reference": ["x"]}
    file = write(tmp_path / "question.jsonl", GOOD + "\n" + json.dumps(line) + "\n")
    assert read_questions(file) == [
        Question(id=1, category="qa", turns=("Why?",)),
        Question(id=7, category="writing", turns=("Write.", "Again.")),
    ]


def test_human_eval_gsm8k_and_plain_prompts(tmp_path: Path) -> None:
    code = write(tmp_path / "a.jsonl", '{"task_id": "HumanEval/0", "prompt": "def f():\\n", "entry_point": "f"}\n')
    assert read_questions(code) == [
        Question(id="HumanEval/0", category="humaneval", turns=("def f():\n",), format="plain")
    ]
    maths = write(tmp_path / "b.jsonl", '{"question": "How many?", "answer": "4"}\n')
    assert read_questions(maths) == [Question(id=1, category="gsm8k", turns=("How many?",))]
    text = write(tmp_path / "mine.txt", "one\ntwo\n---\n\n---\nthree\n")
    assert read_questions(text) == [
        Question(id=1, category="mine", turns=("one\ntwo\n",), format="plain"),
        Question(id=2, category="mine", turns=("three\n",), format="plain"),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question_id": 2, "category": "qa"', "line 2 is no JSON: Expecting"),
        ("[1, 2]", "line 2: it holds list, not an object"),
        ('{"question_id": 2, "category": "qa"}', "line 2: it has none of the keys turns, prompt and question"),
        (
            '{"question_id": 2, "category": "qa", "turns": []}',
            "line 2: turns is [], of type list; it must be a list of",
        ),
        ('{"question_id": 2, "category": "qa", "turns": [3]}', "line 2: turns is [3], of type list; it must be a list"),
        ('{"question_id": 2, "turns": ["x"]}', "line 2: category is None"),
        ('{"question_id": null, "category": "qa", "turns": ["x"]}', "line 2: question_id is None"),
        ('{"question_id": 1, "category": "qa", "turns": ["x"]}', "line 2: question_id 1 occurs a second time"),
        ('{"question_id": 2, "category": "qa", "turns": ["x"], "format": "plane"}', "did you mean 'plain'"),
    ],
)
def test_malformed_line_is_named_with_its_reason(tmp_path: Path, line: str, reason: str) -> None:
    file = write(tmp_path / "question.jsonl", GOOD + line + "\n")
    with pytest.raises(ConfigError, match=r"question\.jsonl") as caught:
        read_questions(file)
    assert reason in str(caught.value)


def test_empty_and_absent_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="holds no question"):
        read_questions(write(tmp_path / "a.jsonl", "\n\n"))
    with pytest.raises(ConfigError, match="there is no question file"):
        find_questions(str(tmp_path / "absent.jsonl"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="specdec bench --download"):
        find_questions("spec_bench")


def test_shipped_questions_fit_the_embedded_model() -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model())
    questions = read_questions(find_questions("tiny"))
    counts = Counter(question.category for question in questions)
    assert set(counts) == {"completion", "docstrings", "tests", "tables", "editing", "retrieval"}
    assert set(counts.values()) == {7}
    for question in questions:
        assert question.format == "plain"
        assert 80 <= len(tokenizer(question.turns[0])["input_ids"]) <= 400


def questions_of(*categories: str) -> list[Question]:
    return [Question(id=n, category=category, turns=("?",)) for n, category in enumerate(categories)]


def test_select_takes_evenly_from_the_groups_in_file_order() -> None:
    questions = questions_of("qa", "qa", "qa", "math", "writing", "rag")
    assert [q.id for q in select(questions, (), 4)] == [0, 1, 3, 5]  # math and writing are both MT-bench's
    assert [q.id for q in select(questions, ["mt_bench"], None)] == [3, 4]
    assert [q.id for q in select(questions, ["rag", "math"], None)] == [3, 5]
    assert group_of("writing") == "mt_bench"


def test_unknown_category_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown category 'tabels'; did you mean 'tables'"):
        select(questions_of("tables", "tests"), ["tabels"], None)


TALK = Question(id=1, category="qa", turns=("One?", "Two?"))


def tokenizer_with(template: str | None) -> Any:
    return SimpleNamespace(chat_template=template, eos_token="</s>")


def test_prompt_of_the_second_turn_holds_the_own_answer() -> None:
    opening = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions."
    )
    assert build_prompt(TALK, [], "auto", tokenizer_with(None)) == f"{opening} USER: One? ASSISTANT:"
    vicuna = build_prompt(TALK, ["First."], "auto", tokenizer_with(None))
    assert vicuna == f"{opening} USER: One? ASSISTANT: First.</s>USER: Two? ASSISTANT:"
    assert build_prompt(TALK, ["First."], "auto", tokenizer_with("...")) == [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "First."},
        {"role": "user", "content": "Two?"},
    ]
    assert build_prompt(TALK, ["First."], "plain", tokenizer_with("...")) == "One?\nFirst.\nTwo?"


def test_format_of_the_file_holds_unless_another_is_asked_for() -> None:
    plain = Question(id=1, category="x", turns=("import os\n",), format="plain")
    assert build_prompt(plain, [], "auto", tokenizer_with("...")) == "import os\n"
    assert isinstance(build_prompt(plain, [], "chat", tokenizer_with("...")), list)
    with pytest.raises(PromptError, match="has no chat template; use --format vicuna"):
        build_prompt(plain, [], "chat", tokenizer_with(None))


# -------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats is 0; it must be an integer >= 1"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"format": "vicunia"}, "did you mean 'vicuna'"),
        ({"dtype": "float23"}, "unknown dtype 'float23'"),
        ({"attention": "split"}, "unknown attention 'split'; known: auto, flash"),
        ({"execution": "fusd"}, "unknown execution 'fusd'; did you mean 'fused'"),
        ({"drafters": ["none", "none"]}, "two systems are called 'none'"),
        ({"drafters": ["all", "none"]}, "'all' stands alone"),
        ({"drafters": [{"window": 3}]}, "has no name"),
        ({"acceptance": "typical", "temperature": 0.5}, "allow_lossy=True"),
        ({"batch": [1, 0]}, "batch is [1, 0], of type list; it must be a list of sizes of at least 1, such as 1,2,4,8"),
        ({"batch": [2], "keep_prefix": True}, "batch is [2], and --keep-prefix is for one question at a time"),
        ({"batch": [2], "parallel": "rows"}, "batch is [2], and --parallel is for one question at a time"),
        ({"drafters": [{"name": "none", "label": "none@2"}]}, "a system is called 'none@2', and @ stands before"),
    ],
)
def test_plan_checks_itself(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Plan(**options)


def plan_of(file: Path | None = None, settings: Sequence[str] = (), **values: Any) -> Plan:
    return resolve(Plan, Given(file=file, settings=settings, values=values), where="bench")


def test_options_are_stronger_than_the_file_and_settings_than_both(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "drafters: [lookahead]\nrepeats: 5\nlimit: 2\n")
    plan = plan_of(file, ["lookahead.window=5", "limit=3"], repeats=1)
    assert (plan.repeats, plan.limit) == (1, 3)
    assert plan.drafters == [{"name": "lookahead", "window": 5}]
    assert plan_of(file, ["lookahead.window=7"], drafters=["none", "lookahead"]).drafters == [
        "none", {"name": "lookahead", "window": 7},
    ]  # fmt: skip


def test_unknown_option_and_setting_of_an_absent_system(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown option of bench 'repeat'; did you mean 'repeats'"):
        plan_of(write(tmp_path / "a.yaml", "repeat: 5\n"))
    with pytest.raises(ConfigError, match="no system 'lookahead' is in this run"):
        plan_of(None, ["lookahead.window=5"], drafters=["none"])
    with pytest.raises(ConfigError, match="unknown option of bench 'window'"):
        plan_of(None, ["window=5"])


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_configs_are_plans(file: Path) -> None:
    check_specs(plan_of(file))
    assert file.read_text().startswith(f"# specdec bench --config configs/bench/{file.name}")
