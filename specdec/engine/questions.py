"""Questions: Spec-Bench's, MT-bench's, HumanEval's and GSM8K's files, and plain prompts, as one type."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen, Predicate

from specdec.engine.conversations import is_text, vicuna, writes_chats
from specdec.errors import ConfigError, PromptError, check_choice, shown
from specdec.settings.files import cache_folder
from specdec.settings.formats import Record, read_content
from specdec.settings.validation import fitting

__all__ = [
    "FORMATS",
    "MT_BENCH",
    "Question",
    "QuestionId",
    "build_prompt",
    "find_questions",
    "form_of",
    "group_of",
    "read_questions",
    "select",
    "spec_bench_path",
]

FORMATS = ("auto", "plain", "chat", "vicuna")

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")

QuestionId = int | str

_WHOLE = "without halves of surrogate pairs"
_Text = Annotated[str, MinLen(1), Predicate(is_text), f"a non-empty text {_WHOLE}"]
_Id = Annotated[int | _Text, f"an integer, or a text {_WHOLE}"]
_Turns = Annotated[list[_Text], MinLen(1), f"a list of at least one non-empty text {_WHOLE}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question; ``format`` is how its turns become a prompt, None where the file does not say."""

    id: QuestionId
    category: str
    turns: tuple[str, ...]
    format: str | None = None


def spec_bench_path() -> Path:
    """Where Spec-Bench's question file is kept."""
    return cache_folder() / "spec_bench" / "question.jsonl"


def group_of(category: str) -> str:
    """Spec-Bench's subtask: MT-bench's eight categories count as one."""
    return "mt_bench" if category in MT_BENCH else category


def find_questions(name: str) -> Path:
    """The file that a name or a path stands for.

    ``tiny`` (code, for the embedded model) and ``six_kinds`` (of Spec-Bench's six kinds, ten each, for models that
    follow instructions) are in this package; ``spec_bench`` is downloaded.

    Raises:
        ConfigError: no such file.
    """
    data = Path(__file__).parents[1] / "assets" / "questions"
    named = {"tiny": data / "tiny_questions.jsonl", "six_kinds": data / "six_kinds.jsonl"}
    path = spec_bench_path() if name == "spec_bench" else named.get(name, Path(name))
    if not path.is_file():
        hint = (
            "run `specdec bench --download`"
            if name == "spec_bench"
            else f"give {', '.join(named)}, spec_bench or a file"
        )
        raise ConfigError(f"there is no question file {str(path)!r}; {hint}")
    return path


def read_questions(path: Path) -> list[Question]:
    """Read a file: JSON of any of the known kinds, a list or lines, or text with prompts between lines of ``---``.

    Raises:
        ConfigError: a malformed question, by number and reason, or a question number that occurs twice.
    """
    content = read_content(path, "the questions")
    questions = _prompts(path, content) if isinstance(content, str) else _records(path, content)
    if not questions:
        raise ConfigError(f"the question file {str(path)!r} holds no question; it must hold at least one")
    return questions


def _records(path: Path, records: Sequence[Record]) -> list[Question]:
    by_id: dict[QuestionId, Question] = {}
    for record in records:
        try:
            question = _question(record.value, record.number)
            if question.id in by_id:
                raise ValueError(f"question_id {shown(question.id)} occurs a second time")
        except ValueError as error:
            raise ConfigError(
                f"{path.name}, {record.place}: {error}; each is a JSON object such as "
                '{"question_id": 1, "category": "qa", "turns": ["..."]}'
            ) from error
        by_id[question.id] = question
    return list(by_id.values())


def _question(line: Any, number: int) -> Question:
    """A record of any known kind; ValueError says what is wrong with it."""
    if not isinstance(line, dict):
        raise ValueError(f"it holds {type(line).__name__}, not an object")

    def read(key: str, kind: Any = _Text, default: Any = None) -> Any:
        return fitting(key, line.get(key, default), kind)

    if "turns" in line:
        form = line.get("format")
        if form is not None:
            check_choice("prompt format", str(form), FORMATS)
        turns = tuple(read("turns", _Turns))
        return Question(id=read("question_id", _Id), category=read("category"), turns=turns, format=form)
    if "prompt" in line:  # HumanEval's code to be completed, or any other
        category = read("category", default="humaneval" if "task_id" in line else "prompts")
        return Question(id=read("task_id", _Id, number), category=category, turns=(read("prompt"),), format="plain")
    if "question" in line:
        return Question(id=read("question_id", _Id, number), category="gsm8k", turns=(read("question"),))
    raise ValueError(f"it has none of the keys turns, prompt and question, but {shown(sorted(line))}")


def _prompts(path: Path, text: str) -> list[Question]:
    prompts = [prompt for prompt in re.split(r"(?m)^[^\S\n]*---[^\S\n]*(?:\n|\Z)", text) if prompt.strip()]
    return [Question(id=n, category=path.stem, turns=(prompt,), format="plain") for n, prompt in enumerate(prompts, 1)]


def select(questions: Sequence[Question], categories: Sequence[str], limit: int | None) -> list[Question]:
    """Those of some categories (a name, or Spec-Bench's ``mt_bench``), at most ``limit``, evenly from each group.

    Raises:
        ConfigError: a category that no question has.
    """
    known = {q.category for q in questions} | {group_of(q.category) for q in questions}
    for category in categories:
        check_choice("category", category, known)
    chosen = [q for q in questions if not categories or {q.category, group_of(q.category)} & set(categories)]
    if limit is None or limit >= len(chosen):
        return chosen
    rank: Counter[str] = Counter()
    ranks = []
    for place, question in enumerate(chosen):
        ranks.append((rank[group_of(question.category)], place))
        rank[group_of(question.category)] += 1
    return [chosen[place] for place in sorted(place for _, place in sorted(ranks)[:limit])]


def form_of(question: Question, form: str, tokenizer: Any) -> str:
    """How a question's turns become a prompt, where ``form`` may be ``auto``, see ``build_prompt``."""
    if form == "auto":
        form = question.format or "auto"
    if form == "auto":
        form = "chat" if writes_chats(tokenizer) else "vicuna"
    return form


def build_prompt(question: Question, answers: Sequence[str], form: str, tokenizer: Any) -> str | list[dict[str, str]]:
    """The prompt of turn ``len(answers)``: text, or messages for the tokenizer's chat template.

    Args:
        question: its turns.
        answers: the system's own answers to the earlier turns.
        form: ``auto`` takes what the question says, else the tokenizer's chats where it writes such, else Vicuna's.
        tokenizer: transformers'.

    Raises:
        PromptError: ``chat`` without a chat template.
    """
    form = form_of(question, form, tokenizer)
    turns = question.turns[: len(answers) + 1]
    if form == "plain":
        turns_so_far = [part for pair in zip(turns, answers, strict=False) for part in pair]
        return "\n".join([*turns_so_far, turns[-1]])
    messages = []
    for place, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        if place < len(answers):
            messages.append({"role": "assistant", "content": answers[place]})
    if form == "vicuna":
        return vicuna(messages, getattr(tokenizer, "eos_token", None) or "</s>") + "ASSISTANT:"
    if not writes_chats(tokenizer):
        raise PromptError("the tokenizer has no chat template; use --format vicuna or --format plain")
    return messages
