"""Answers to ``/v1/completions``: texts."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.results import TokenLogprobs
from specdec.serve.answers import Answer, Json, Speaker
from specdec.serve.choices import Choice, Piece
from specdec.serve.fields import CompletionRequest
from specdec.serve.logprobs import Offsets
from specdec.serve.plan import Plan

__all__ = ["CompletionAnswer"]


class CompletionAnswer(Answer):
    """The answer to a completion, for arguments of :class:`specdec.serve.answers.Answer`."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, plan: Plan, speaker: Speaker) -> None:
        super().__init__(plan, speaker)
        tokenizer, self._echo = speaker.tokenizer, isinstance(plan.fields, CompletionRequest) and plan.fields.echo
        self._texts = [
            tokenizer.decode(prompt, skip_special_tokens=True) if self._echo else "" for prompt in plan.prompts
        ]
        told = self.choices if plan.logprobs is not None else ()
        before = [() if self._echo else prompt for prompt in plan.prompts]
        self._offsets = [Offsets(speaker.names, tokenizer, before[choice.index // plan.n]) for choice in told]

    def opening(self) -> list[Json]:
        told = [choice for choice in self.choices if choice.finish_reason is not None or self._echo]
        return [self._chunk([_piece(choice, self._text(choice), choice.finish_reason)]) for choice in told]

    def _pieces(self, choice: Choice, piece: Piece) -> list[Json]:
        logprobs = self._logprobs(choice, piece.logprobs)
        if not (piece.text or piece.last or piece.traced or logprobs is not None):
            return []
        return [_piece(choice, piece.text, choice.finish_reason, logprobs)]

    def _choice(self, choice: Choice) -> Json:
        found = _piece(choice, self._text(choice) + choice.text, choice.finish_reason)
        if self._echo and self._plan.logprobs is not None:
            found["logprobs"] = self._echoed(choice)
        else:
            found["logprobs"] = self._logprobs(choice, choice.logprobs)
        if self._plan.fields.prompt_logprobs is not None:
            found["prompt_logprobs"] = self._prompt_logprobs(choice)
        return found

    def _text(self, choice: Choice) -> str:
        """The prompt's text where it is a part of the answer, else an empty one."""
        return str(self._texts[choice.index // self._plan.n])

    def _echoed(self, choice: Choice) -> Json:
        """Log-probabilities of the prompt's tokens, of which the first has none, and the answer's."""
        first = TokenLogprobs(self._plan.prompts[choice.index // self._plan.n][0], 0.0)
        all_ = [first, *choice.prompt_logprobs, *choice.logprobs]
        most = self._plan.logprobs
        cut = [TokenLogprobs(one.token_id, one.logprob, one.top[:most]) for one in all_]
        told = self._names.completion(cut, self._offsets[choice.index].of([one.token_id for one in cut]))
        told["token_logprobs"][0] = told["top_logprobs"][0] = None
        return told

    def _logprobs(self, choice: Choice, found: Sequence[TokenLogprobs]) -> Json | None:
        if self._plan.logprobs is None:
            return None
        return self._names.completion(found, self._offsets[choice.index].of([one.token_id for one in found]))


def _piece(choice: Choice, text: str, reason: str | None, logprobs: Json | None = None) -> Json:
    return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason}
