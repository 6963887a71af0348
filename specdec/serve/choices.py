"""Choices: the ``n`` answers to one HTTP request, each fed by a sequence that is decoded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.engine.text_stream import TextStream
from specdec.results import Statistics, Step, TokenLogprobs
from specdec.serve.engine_thread import Update

__all__ = ["Choice", "Piece"]

# The engine's finish reasons -> OpenAI's.
_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


@dataclass(frozen=True, slots=True)
class Piece:
    """An event of a choice: what an update adds to it.

    Attributes:
        text: the text that became final.
        step: the step that was taken.
        logprobs: log-probabilities of its tokens, where the request asked for them.
        last: whether the choice has ended.
    """

    text: str
    step: Step
    logprobs: Sequence[TokenLogprobs]
    last: bool

    @property
    def traced(self) -> bool:
        """Whether the step has a trace, so that the event is sent even without a text."""
        return self.step.trace is not None


class Choice:
    """One answer.

    Its text is decoded here, on the event loop, to keep that work out of the engine's thread. Only a text that has stop
    strings is decoded there, as each token may complete one, and comes with the updates.

    Args:
        index, tokenizer, prompt: its place in the answer, and what its text follows.
        hidden: special tokens that its text is to lack where others are in it, as marks; None: it lacks all.
        stops: with ``hidden``, the stop strings, and the tokens within which they do not count.
        forced: tokens of the prompt that are generated before the answer's, for their log-probabilities.
        empty: whether the answer is to have no token.

    Attributes:
        index: the choice's index in the answer.
        prompt_tokens: the number of tokens of its prompt.
        logprobs: log-probabilities of its tokens, where the request asked for them.
        prompt_logprobs: those of the prompt's tokens but the first.
        finish_reason: OpenAI's finish reason; None while the choice is decoded.
        stopped: whether a stop string or stop token ended it.
        stats: statistics of the generation; None until it ends.
        first, last: times of the first and the latest token, in seconds of ``perf_counter``.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Any,
        prompt: Sequence[int],
        hidden: Collection[int] | None = None,
        stops: tuple[Sequence[str], int] = ((), 0),
        forced: int = 0,
        empty: bool = False,
    ) -> None:
        self.index, self.prompt_tokens, self._hidden = index, len(prompt), hidden
        if hidden is None:
            self._stream = TextStream(tokenizer, prompt=prompt)
        else:
            self._stream = TextStream(tokenizer, stops[0], prompt, skip_special_tokens=False, min_tokens=stops[1])
        self._forced, self._empty, self.prompt_logprobs = forced, empty, list[TokenLogprobs]()
        self._latest: Sequence[TokenLogprobs] = ()
        self._texts, self._new = list[str](), 0  # pieces that came with updates, and the first not given out
        self._decoded = False
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stopped = False
        self.stats: Statistics | None = None
        self.first: float | None = None
        self.last = 0.0

    def add(self, update: Update) -> None:
        """Add the tokens of a step."""
        step = update.step
        assert step is not None
        cut = min(self._forced, len(step.tokens))
        self._forced -= cut
        self.prompt_logprobs += update.logprobs[:cut]
        end = cut if self._empty else None
        tokens, self._latest = step.tokens[cut:end], update.logprobs[cut:end]
        self.tokens += tokens
        self.logprobs += self._latest
        if self._hidden is not None:
            for token in tokens:
                if token not in self._hidden and not self._stream.stopped:
                    self._stream.push(token)
        elif update.text is None:
            self._stream.extend(step.tokens)
        else:
            self._decoded = True
            self._texts.append(update.text)
        self.first, self.last = self.first or update.at, update.at
        if update.finish_reason is not None:
            self.finish_reason, self.stopped = _REASONS[update.finish_reason], update.finish_reason == "stop"
            self.stats = update.stats

    def piece(self, update: Update) -> Piece:
        """The event of the update that was just added, for a stream."""
        assert update.step is not None
        return Piece(self._new_text(), update.step, self._latest, self.finish_reason is not None)

    def _new_text(self) -> str:
        """The text that became final since the last call."""
        if self._decoded:
            text, self._new = "".join(self._texts[self._new :]), len(self._texts)
            return text
        return self._stream.take() if self.finish_reason is None else self._stream.finish()

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self._texts) if self._decoded else self._stream.text
