"""Thinking: what a model writes between ``<think>`` and ``</think>`` before its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from specdec.serve.marks import beginning

__all__ = ["THINK_MARKS", "Split", "Thinking", "thinking_grammar", "thinking_of"]

THINK_MARKS = "<think>", "</think>"

Thinking = Literal["open", "may"] | None
"""Whether an answer begins within its thinking, as the prompt opened it, or may begin with a mark; None: neither."""


def thinking_of(tokenizer: Any, prompt: Sequence[int], *, continues: bool = False) -> Thinking:
    """How an answer to a chat's prompt begins; the prompt's last tokens say it.

    Args:
        tokenizer: whose chat template made the prompt.
        prompt: its tokens.
        continues: whether the answer goes on with the last message.
    """
    template = getattr(tokenizer, "chat_template", None)
    begin, close = THINK_MARKS
    if not (isinstance(template, str) and (begin in template or close in template)):
        return None
    if continues:
        said: str = tokenizer.decode(list(prompt))
        return "open" if said.rfind(begin) > said.rfind(close) else None
    end: str = tokenizer.decode(list(prompt[-16:])).rstrip()
    if end.endswith(begin):
        return "open"
    return None if end.endswith(close) else "may"  # the template closes it where it is to be left out


def thinking_grammar(thinking: Thinking, added: Sequence[str]) -> str:
    """What stands before an answer of a certain form, as rules of llguidance's Lark, the first of which is ``thought``.

    Args:
        thinking: how the answer begins.
        added: the vocabulary's added tokens; a mark that is one of them is that token, and no text.
    """
    begin, close = (mark if mark in added else f'"{mark}"' for mark in THINK_MARKS)
    body = "thinking: THOUGHT? " + close if close == THINK_MARKS[1] else f"thinking[suffix={close}]: /(.|\\n)*/"
    opened = f"{begin} " if thinking == "may" else ""
    thought = f"thought: {opened}thinking BREAK?" if opened == "" else f"thought: ({opened}thinking BREAK?)?"
    return "\n".join([thought, body, "THOUGHT: /(.|\\n)+/", "BREAK: /\\n{1,2}/"])


class Split:
    """Splits an answer's text, which comes in pieces, into its thinking and the rest.

    White space around the thinking is of neither.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._held, self._begun = "", False
        self._within: bool | None = {"open": True, "may": None, None: False}[thinking]  # None: not known yet
        self._trims = False  # whether white space is left out of what comes next

    @property
    def waits(self) -> bool:
        """Whether the text behind the thinking has not begun."""
        return self._within is not False or self._trims

    def read(self, text: str, last: bool) -> tuple[str, str]:
        """The thinking and the other text that a further piece completes; with ``last``, no text follows it."""
        if self._within is False and not self._trims:
            return "", text
        self._held += text
        begin, close = THINK_MARKS
        if self._within is None:
            known = self._held.lstrip()
            if known.startswith(begin):
                self._held, self._within = known[len(begin) :], True
            elif last or not begin.startswith(known):
                self._within = False
            else:
                return "", ""
        return self._split(close, last) if self._within else ("", self._rest())

    def _split(self, close: str, last: bool) -> tuple[str, str]:
        if not self._begun:
            self._held = self._held.lstrip()
        thought, mark, rest = self._held.partition(close)
        if mark:
            self._held, self._within, self._trims = rest, False, True
            return thought.rstrip(), self._rest()
        open_ = 0 if last else beginning(self._held, close)
        end = len(self._held[: len(self._held) - open_].rstrip())
        thought, self._held = self._held[:end], self._held[end:]
        self._begun |= bool(thought)
        return thought, ""

    def _rest(self) -> str:
        text, self._held = self._held, ""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text
