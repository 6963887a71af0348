"""Choices: the ``n`` answers to one HTTP request, each fed by a sequence that is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.engine.text_stream import TextStream
from specdec.results import Statistics, Step, TokenLogprobs
from specdec.serve.engine_thread import Update

__all__ = ["Choice"]

# The engine's finish reasons -> OpenAI's.
_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


class Choice:
    """One answer. Its text is decoded here, on the event loop, to keep that work out of the engine's thread.

    Attributes:
        index: the choice's index in the answer.
        prompt_tokens: the number of tokens of its prompt.
        logprobs: log-probabilities of its tokens, where the request asked for them.
        finish_reason: OpenAI's finish reason; None while the choice is decoded.
        stats: statistics of the generation; None until it ends.
        first, last: times of the first and the latest token, in seconds of ``perf_counter``.
    """

    def __init__(
        self, index: int, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str], min_tokens: int = 0
    ) -> None:
        self.index, self.prompt_tokens = index, len(prompt)
        self._text = TextStream(tokenizer, stops, prompt, min_tokens=min_tokens)
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stats: Statistics | None = None
        self.first: float | None = None
        self.last = 0.0

    def add(self, update: Update) -> Step:
        """Add the tokens of a step."""
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
        """The text that became final since the last call."""
        return self._text.take() if self.finish_reason is None else self._text.finish()

    @property
    def text(self) -> str:
        """The whole text so far."""
        return self._text.text
