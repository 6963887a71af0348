"""Spans: which characters of a conversation's text are its answers, by the template's output and not by their words.

An answer is what the model would write: it begins behind its prompt, which is the earlier turns with the template's
generation prompt, and ends with the token that ends its turn. Both places are found by rendering the conversation
again, up to the answer, and with a mark in the answer's place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from specdec.engine.conversations import vicuna
from specdec.errors import first_line

__all__ = ["Message", "Span", "Writer", "answer_spans", "chat_spans", "plain", "trained_tokens", "vicuna_writer"]

Message = dict[str, Any]
"""``role`` and ``content``, both text, and the assistant's ``tool_calls``, if it makes some."""

Span = tuple[int, int]
"""The index of the first character, and the one behind the last."""

Writer = Callable[[Sequence[Message], bool], str]
"""Renders messages as one text; with True, as a prompt for an answer. Raises ValueError where it refuses them."""


class _Answer(NamedTuple):
    """Where an answer begins, where its words end, and the end of the token that ends its turn."""

    start: int
    words: int
    end: int


def vicuna_writer(eos: str) -> Writer:
    """A writer in the format of Vicuna's version 1.1."""

    def write(messages: Sequence[Message], prompt: bool) -> str:
        said = [{**message, "content": message["content"].strip()} for message in messages]
        return vicuna(said, eos) + "ASSISTANT:" * prompt

    return write


def plain(messages: Sequence[Message], prompt: bool) -> str:
    """Turns without separators."""
    return "".join(message["content"] for message in messages)


def chat_spans(messages: Sequence[Message], tokenizer: Any, ends: Collection[str]) -> tuple[str, list[Span]]:
    """``answer_spans`` with the tokenizer's chat template.

    Where the template itself marks the assistant's text (``{% generation %}``), that is used, by characters, as in
    transformers' ``return_assistant_tokens_mask``, plus the token that ends an answer, if the mark leaves it out.
    """

    def write(messages: Sequence[Message], prompt: bool) -> str:
        try:
            text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template is the checkpoint's code and may raise anything
            raise ValueError(f"the chat template refused it: {first_line(error)}") from error
        return text

    text = write(messages, False)
    marks = _marks(messages, tokenizer, text)
    if not marks:
        return answer_spans(messages, write, ends)
    try:
        answers = _answers(messages, text, write, ends)
    except ValueError:
        answers = []
    return text, [
        (start, max([end, *(answer.end for answer in answers if answer.words <= end <= answer.end)]))
        for start, end in marks
    ]


def answer_spans(messages: Sequence[Message], write: Writer, ends: Collection[str]) -> tuple[str, list[Span]]:
    """A conversation's text, and the span of each answer with the token that ends it.

    Args:
        messages: messages with ``role`` and ``content``.
        write: renders messages.
        ends: texts of the tokens that can end a turn.

    Raises:
        ValueError: the writer refuses the messages, or an answer's place is not certain.

    Example: for a question "Hi" and an answer "Yes", rendered as ``<|user|>Hi<|end|>\\n<|assistant|>Yes<|end|>\\n``,
    the span is that of ``Yes<|end|>``.
    """
    text = write(messages, False)
    return text, [(answer.start, answer.end) for answer in _answers(messages, text, write, ends)]


def trained_tokens(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """For each token, whether it has a character in a span.

    Args:
        offsets: the characters of each token. A token of spaces can be empty and lie behind them: GPT-2's are trimmed.
        spans: the spans, ascending.

    Example: of tokens at (0, 2), (2, 3), (3, 4), (4, 8), the second and third are in the span (2, 4).
    """
    trained: list[bool] = []
    number = 0
    for start, end in offsets:
        first = min(start, end - 1)
        while number < len(spans) and first >= spans[number][1]:
            number += 1
        trained.append(number < len(spans) and end > spans[number][0])
    return trained


def _answers(messages: Sequence[Message], text: str, write: Writer, ends: Collection[str]) -> list[_Answer]:
    tokens = "|".join(re.escape(token) for token in sorted(ends, key=len, reverse=True) if token.strip())
    end_token = re.compile(rf"\s*(?:{tokens})" if tokens else "(?!)")
    mark = _mark(text)
    answers: list[_Answer] = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        answer = (
            _call(messages, place, text, write)
            if "tool_calls" in message
            else _answer(messages, place, text, write, mark, end_token)
        )
        if answers and answer.start < answers[-1].end:
            raise ValueError("the chat template writes turns in another order")
        answers.append(answer)
    return answers


def _answer(
    messages: Sequence[Message], place: int, text: str, write: Writer, mark: str, end_token: re.Pattern[str]
) -> _Answer:
    earlier, later = messages[:place], messages[place + 1 :]
    marked = {**messages[place], "content": mark}
    before, *behind = write([*earlier, marked, *later], False).split(mark)
    if len(behind) != 1 or not text.endswith(behind[0]):
        raise ValueError("the chat template writes an answer twice or not at all, or what follows it depends on it")
    words = len(text) - len(behind[0])
    start = _start(earlier, before, text, write)
    said, wanted = ("".join(part.split()) for part in (text[start:words], messages[place]["content"]))
    # The text can have more, such as an empty block of reasoning that the model writes; or less, without reasoning.
    if not said or not (said.endswith(wanted) or wanted.endswith(said)):
        raise ValueError("the chat template changed the assistant's words")
    ending = end_token.match(behind[0])
    # A token that only begins the next turn does not end an answer.
    if ending and later and not end_token.match(write([*earlier, marked], False).partition(mark)[2]):
        ending = None
    return _Answer(start, words, words + (ending.end() if ending else 0))


def _call(messages: Sequence[Message], place: int, text: str, write: Writer) -> _Answer:
    """The span of an assistant's tool calls, with what it says beside them, as the writer ends such a message."""
    earlier, calls = messages[:place], messages[place]["tool_calls"]
    prompt, said = write(earlier, True), write(messages[: place + 1], False).rstrip()
    written = said[len(prompt) :]
    names = [(call.get("function") or {}).get("name") if isinstance(call, Mapping) else None for call in calls]
    if not all(isinstance(name, str) and name in written for name in names):
        raise ValueError("the chat template leaves a tool call out")
    if not said.startswith(prompt) or not text.startswith(said):
        raise ValueError("the chat template writes a tool call otherwise than its prompt, or what follows changes it")
    return _Answer(len(prompt), len(said), len(said))


def _start(earlier: Sequence[Message], before: str, text: str, write: Writer) -> int:
    """The place where the model begins to write; ``before`` is the text before a mark in the answer's place."""
    prompt = write(earlier, True)
    follows = text.startswith(prompt)
    if follows and (prompt == before or prompt != write(earlier, False)):
        return len(prompt)
    if text.startswith(before):  # no generation prompt, or one that opens reasoning that this answer lacks
        return len(before)
    raise ValueError("the chat template writes a conversation otherwise than the prompts for its answers")


def _mark(text: str) -> str:
    """Characters that are not in a text and have no meaning for any template."""
    size = 1
    while (mark := "\ue000" * size + "\ue001") in text:
        size += 1
    return mark


def _marks(messages: Sequence[Message], tokenizer: Any, text: str) -> list[Span]:
    """The spans that the chat template marks as the assistant's."""
    template = tokenizer.get_chat_template()
    if not re.search(r"\{%-?\s*generation\s*-?%\}", template):
        return []
    [written], [marks] = render_jinja_template(
        [list(messages)], chat_template=template, return_assistant_tokens_mask=True, **tokenizer.special_tokens_map
    )
    return [(start, end) for start, end in marks if start < end] if written == text else []
