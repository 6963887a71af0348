"""Answers: a generation's events as the JSON of a protocol, whole or streamed, with figures of speculation beside it.

A protocol is one subclass of :class:`Answer`. All read the same events: a :class:`specdec.serve.choices.Piece` for each
update of a choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from secrets import token_hex
from time import time
from typing import Any

import pydantic_core

from specdec.serve.call_styles import Style
from specdec.serve.choices import Choice, Piece
from specdec.serve.figures import acceptance_of, timings_of, trace_json, usage_of
from specdec.serve.logprobs import TokenNames
from specdec.serve.marks import special_tokens
from specdec.serve.plan import Plan

__all__ = ["Answer", "Json", "Speaker", "to_json"]

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Speaker:
    """What all answers have in common.

    Attributes:
        model: the model's name for clients.
        tokenizer: decodes tokens to texts.
        names: names of tokens.
        max_rows: the most rows of a step, a limit of the server.
        style: how the model marks tool calls in its text; None where it does not.
    """

    model: str
    tokenizer: Any
    names: TokenNames
    max_rows: int
    style: Style | None


class Answer(ABC):
    """The answer to one HTTP request, built while its sequences are decoded.

    Args:
        plan: the checked request.
        speaker: what answers.
        hidden: see :class:`specdec.serve.choices.Choice`.

    Attributes:
        choices: the ``n`` answers to each prompt, in order.
    """

    prefix: str
    """What the answer's id begins with."""
    kind: str
    """The ``object`` of a whole answer."""
    chunk_kind: str
    """The ``object`` of a stream's chunk."""

    def __init__(self, plan: Plan, speaker: Speaker, hidden: Collection[int] | None = None) -> None:
        self._plan, self._names, self._max_rows = plan, speaker.names, speaker.max_rows
        self._tokenizer = tokenizer = speaker.tokenizer
        self._head = {
            "id": f"{self.prefix}-{token_hex(12)}",
            "object": self.kind,
            "created": int(time()),
            "model": speaker.model,
        }
        prompts = [prompt for prompt in plan.prompts for _ in range(plan.n)]
        stops = plan.stops, plan.fields.min_tokens or 0
        told = plan.prompt_tops is not None
        if told and hidden is None:
            hidden = special_tokens(tokenizer)
        self.choices = [
            Choice(place, tokenizer, prompt, hidden, stops, len(prompt) - 1 if told else 0, plan.empty)
            for place, prompt in enumerate(prompts)
        ]
        if not plan.requests:  # max_tokens is 0
            for choice in self.choices:
                choice.finish_reason = "length"
        options = plan.fields.stream_options
        self._tells_usage = options is not None and bool(options.continuous_usage_stats)

    @property
    def done(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    @abstractmethod
    def opening(self) -> list[Json]:
        """The chunks that begin a stream, and end those of its choices that are to have no token."""

    @abstractmethod
    def _pieces(self, choice: Choice, piece: Piece) -> list[Json]:
        """The pieces of a choice that an event adds to a stream; empty where it makes no text final."""

    @abstractmethod
    def _choice(self, choice: Choice) -> Json:
        """A choice of the whole answer."""

    def chunks(self, choice: Choice, piece: Piece) -> list[Json]:
        """The chunks that an event of a choice adds to a stream."""
        chunks = [self._chunk([one]) for one in self._pieces(choice, piece)]
        if chunks and self._tells_usage:
            chunks[-1]["usage"] = self._counts()
        if piece.traced:
            chunks[0]["specdec"] = trace_json(piece.step, self._tokenizer)
        return chunks

    def _prompt_logprobs(self, choice: Choice) -> list[Json | None]:
        """vLLM's ``prompt_logprobs``: of each token of the prompt, the first of which has none."""
        found: list[Json | None] = [None]
        for one in choice.prompt_logprobs:
            tops = [(token, value, rank) for rank, (token, value) in enumerate(one.top[: self._plan.prompt_tops], 1)]
            if all(token != one.token_id for token, _, _ in tops):
                tops.insert(0, (one.token_id, one.logprob, 0))
            found.append(
                {
                    str(token): {
                        "logprob": max(value, -9999.0),
                        "rank": rank or None,
                        "decoded_token": self._names.text(token),
                    }
                    for token, value, rank in tops
                }
            )
        return found

    def closing(self) -> Json:
        """The last chunk: the token usage, where the request asked for it."""
        return {**self._chunk([]), **self._figures()}

    def ending(self) -> list[Json]:
        """The values that end a stream, once all choices have ended."""
        options = self._plan.fields.stream_options
        return [self.closing()] if options is not None and options.include_usage else []

    def whole(self) -> Json:
        """The JSON of the whole answer, once all choices have ended."""
        return {**self._head, "choices": [self._choice(choice) for choice in self.choices], **self._figures()}

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "object": self.chunk_kind, "choices": choices}

    def _counts(self) -> Json:
        prompt, new = sum(map(len, self._plan.prompts)), sum(len(choice.tokens) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _reasoning_tokens(self) -> int:
        """The number of tokens of the answers' thinking."""
        return 0

    def _figures(self) -> Json:
        plan, stats = self._plan, [choice.stats for choice in self.choices if choice.stats is not None]
        counts = self._counts()
        acceptance = acceptance_of(stats, self._max_rows, per_step=plan.speculation.per_step)
        return {
            "usage": usage_of(
                counts["prompt_tokens"], counts["completion_tokens"], stats, plan.n, self._reasoning_tokens()
            ),
            "metrics": {"speculative_decoding": acceptance},
            "timings": timings_of(stats),
        }


def to_json(value: Any) -> bytes:
    """The value as compact JSON."""
    return pydantic_core.to_json(value)  # takes a third of json.dumps' time, at every event of every stream
