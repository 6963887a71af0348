"""Choices: the answers of one HTTP request, as their sequences are decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.engine.text_stream import TextStream
from specdec.results import Statistics, Step, TokenLogprobs
from specdec.serve.engine_thread import Update

__all__ = ["Choice"]

# OpenAI's finish reasons by the engine's.
_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


class Choice:
    """One answer. Its text is made here, of the tokens that come, and not in the engine's thread.

    Attributes:
        index: its place among the request's answers.
        prompt_tokens: how many its prompt has.
        logprobs: of its tokens, if they were asked for.
        finish_reason: OpenAI's; None while it goes on.
        stats: with the finish reason.
        first, last: when its first and its latest token came, on the clock of ``perf_counter``.
    """

    def __init__(self, index: int, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self.index, self.prompt_tokens = index, len(prompt)
        self._text = TextStream(tokenizer, stops, prompt)
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stats: Statistics | None = None
        self.first: float | None = None
        self.last = 0.0

    def add(self, update: Update) -> Step:
        """Take what a step brought."""
        step = update.step
        assert step is not None
        self.tokens += step.tokens
        self.logprobs += update.logprobs
        if self._text.watches:
            for token in step.tokens:
                self._text.push(token)
        else:
            self._text.extend(step.tokens)
        self.first, self.last = self.first or update.at, update.at
        if update.finish_reason is not None:
            self.finish_reason = _REASONS[update.finish_reason]
            self.stats = update.stats
        return step

    def new_text(self) -> str:
        """Text that is final and was not taken yet."""
        return self._text.take() if self.finish_reason is None else self._text.finish()

    @property
    def text(self) -> str:
        """All of it."""
        return self._text.text
