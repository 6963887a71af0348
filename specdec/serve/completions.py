"""Answers to ``/v1/completions``: texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.results import TokenLogprobs
from specdec.serve.answers import Answer, Json
from specdec.serve.choices import Choice, Piece
from specdec.serve.logprobs import Offsets, TokenNames
from specdec.serve.plan import Plan

__all__ = ["CompletionAnswer"]


class CompletionAnswer(Answer):
    """The answer to a completion.

    Args:
        plan, model, tokenizer, max_rows: see :class:`specdec.serve.answers.Answer`.
        names: names of tokens.
    """

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, plan: Plan, model: str, tokenizer: Any, max_rows: int, names: TokenNames) -> None:
        super().__init__(plan, model, tokenizer, max_rows)
        self._names = names
        told = self.choices if plan.logprobs is not None else ()
        self._offsets = [Offsets(names, tokenizer, plan.prompts[choice.index // plan.n]) for choice in told]

    def opening(self) -> list[Json]:
        ended = [choice for choice in self.choices if choice.finish_reason is not None]
        return [self._chunk([_piece(choice, "", choice.finish_reason)]) for choice in ended]

    def _pieces(self, choice: Choice, piece: Piece) -> list[Json]:
        logprobs = self._logprobs(choice, piece.logprobs)
        if not (piece.text or piece.last or piece.traced or logprobs is not None):
            return []
        return [_piece(choice, piece.text, choice.finish_reason, logprobs)]

    def _choice(self, choice: Choice) -> Json:
        return _piece(choice, choice.text, choice.finish_reason, self._logprobs(choice, choice.logprobs))

    def _logprobs(self, choice: Choice, found: Sequence[TokenLogprobs]) -> Json | None:
        if self._plan.logprobs is None:
            return None
        return self._names.completion(found, self._offsets[choice.index].of([one.token_id for one in found]))


def _piece(choice: Choice, text: str, reason: str | None, logprobs: Json | None = None) -> Json:
    return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason}
