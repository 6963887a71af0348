"""Answers: the JSON of OpenAI's chats and completions, whole or streamed, with figures of speculation beside it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from secrets import token_hex
from time import time
from typing import Any

import pydantic_core
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specdec.results import Statistics, TokenLogprobs
from specdec.serve.calls import CallReader, Delta
from specdec.serve.choices import Choice
from specdec.serve.engine_thread import Update
from specdec.serve.fields import ChatRequest
from specdec.serve.plan import Plan
from specdec.serve.trace import trace_json

__all__ = ["Answer", "Json", "acceptance_of", "to_json"]

Json = dict[str, Any]

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # SentencePiece's tokens of single bytes
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]


class Answer:
    """The answer to one HTTP request, built while its sequences are decoded.

    Args:
        plan: the checked request.
        model: the model's name for clients.
        tokenizer: decodes tokens to texts.
        max_rows: the most rows of a step, a limit of the server.
        marks_calls: whether the chat template asks the model to mark tool calls in its text.
    """

    def __init__(self, plan: Plan, model: str, tokenizer: Any, max_rows: int, *, marks_calls: bool = False) -> None:
        self._plan, self._tokenizer, self._max_rows = plan, tokenizer, max_rows
        self.chat = isinstance(plan.fields, ChatRequest)
        kind = "chat.completion" if self.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{token_hex(12)}",
            "object": kind,
            "created": int(time()),
            "model": model,
        }
        marked = marks_calls and plan.forced is None and bool(plan.fields.tools if self.chat else None)  # type: ignore[union-attr]
        self.choices = [
            Choice(place, tokenizer, plan.prompts[place // plan.n], plan.stops, plan.fields.min_tokens or 0)
            for place in range(len(plan.requests))
        ]
        self._readers = [CallReader(plan.forced, marked) for _ in self.choices]
        self._offsets = [0 for _ in self.choices]
        options = plan.fields.stream_options
        self._tells_usage = options is not None and bool(options.continuous_usage_stats)

    @property
    def done(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    # Chunks of a stream.

    def opening(self) -> list[Json]:
        """The first chunk of a stream; for a chat, it holds the assistant's role."""
        if not self.chat:
            return []
        return [
            self._chunk([self._piece(choice, {"role": "assistant", "content": ""}, None, None)])
            for choice in self.choices
        ]

    def pieces(self, choice: Choice, update: Update) -> list[Json]:
        """The chunks that a choice's update adds to a stream; empty where it makes no text final."""
        text, ended = choice.new_text(), choice.finish_reason is not None
        logprobs = self._logprobs(choice, update.logprobs) if self._plan.logprobs is not None else None
        traced = update.step is not None and update.step.trace is not None
        always = logprobs is not None or traced
        if not self.chat:
            found = [self._piece(choice, text, choice.finish_reason, logprobs)] if text or ended or always else []
        else:
            deltas = self._readers[choice.index].read(text, ended) or ([{"content": ""}] if always else [])
            found = [self._piece(choice, delta, None, None) for delta in deltas]
            if found and logprobs is not None:
                found[0]["logprobs"] = logprobs
            if ended:
                found.append(self._piece(choice, {}, self._reason(choice), None))
        chunks = [self._chunk([piece]) for piece in found]
        if chunks and self._tells_usage:
            chunks[-1]["usage"] = self._counts()
        if traced:
            assert update.step is not None
            chunks[0]["specdec"] = trace_json(update.step, self._tokenizer)
        return chunks

    def closing(self) -> Json:
        """The last chunk: the token usage, where the request asked for it."""
        return {**self._chunk([]), **self._figures()}

    def _chunk(self, choices: list[Json]) -> Json:
        head = {**self._head, "object": "chat.completion.chunk"} if self.chat else self._head
        return {**head, "choices": choices}

    def _piece(self, choice: Choice, said: Any, reason: str | None, logprobs: Any) -> Json:
        return {
            "index": choice.index,
            "delta" if self.chat else "text": said,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    # The whole answer.

    def whole(self) -> Json:
        """The JSON of the whole answer, once all choices have ended."""
        return {**self._head, "choices": [self._choice(choice) for choice in self.choices], **self._figures()}

    def _choice(self, choice: Choice) -> Json:
        logprobs = self._logprobs(choice, choice.logprobs) if self._plan.logprobs is not None else None
        if not self.chat:
            return self._piece(choice, choice.text, choice.finish_reason, logprobs)
        message = _message(self._readers[choice.index].read(choice.text, True))
        reason = self._reason(choice)
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _reason(self, choice: Choice) -> str | None:
        calls = self._readers[choice.index].count > 0
        return (
            "tool_calls" if calls and choice.finish_reason == "stop" and not self._plan.forced else choice.finish_reason
        )

    # Log-probabilities.

    def _logprobs(self, choice: Choice, found: Sequence[TokenLogprobs]) -> Json:
        if self.chat:
            return {"content": [self._with_top(one) for one in found]}
        texts = [self._token(one.token_id) for one in found]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[choice.index])
            self._offsets[choice.index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(one.logprob) for one in found],
            "top_logprobs": [{self._token(token): _finite(value) for token, value in one.top} for one in found],
            "text_offset": offsets,
        }

    def _with_top(self, one: TokenLogprobs) -> Json:
        top = [self._named(token, value) for token, value in one.top]
        return {**self._named(one.token_id, one.logprob), "top_logprobs": top}

    def _named(self, token: int, value: float) -> Json:
        return {"token": self._token(token), "logprob": _finite(value), "bytes": self._bytes(token)}

    def _token(self, token: int) -> str:
        text: str = self._tokenizer.decode([token])
        return text

    def _bytes(self, token: int) -> list[int]:
        """The bytes of a token; a token can hold a part of a character's bytes."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        text = self._token(token)
        if "\N{REPLACEMENT CHARACTER}" in text and piece:
            if byte := _BYTE.fullmatch(piece):
                return [int(byte[1], 16)]
            if all(character in _BYTES for character in piece):
                return [_BYTES[character] for character in piece]
        return list(text.encode())

    # Figures of speculation.

    def _counts(self) -> Json:
        prompt, new = sum(map(len, self._plan.prompts)), sum(len(choice.tokens) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _figures(self) -> Json:
        plan, stats = self._plan, [choice.stats for choice in self.choices if choice.stats is not None]
        cached = sum(one.reused_tokens for one in stats[:: plan.n])
        accepted = sum(getattr(one, "accepted_prediction_tokens", 0) for one in stats)
        rejected = sum(getattr(one, "rejected_prediction_tokens", 0) for one in stats)
        return {
            "usage": {
                **self._counts(),
                "prompt_tokens_details": {"cached_tokens": cached},
                "completion_tokens_details": {
                    "accepted_prediction_tokens": accepted,
                    "rejected_prediction_tokens": rejected,
                    "reasoning_tokens": 0,
                },
            },
            "metrics": {
                "speculative_decoding": acceptance_of(stats, self._max_rows, per_step=plan.speculation.per_step)
            },
            "timings": _timings(stats),
        }


def acceptance_of(stats: Sequence[Statistics], max_rows: int, *, per_step: bool = False) -> Json:
    """vLLM's acceptance figures of a request; the bonus token counts in the mean length alone.

    A draft is a step that verified more rows than the root. With ``per_step``, each draft's accepted and drafted
    tokens are listed.
    """
    pairs = [
        (length - 1, rows - 1)
        for one in stats
        for length, rows in zip(one.acceptance_lengths, one.rows, strict=True)
        if rows > 1
    ]
    accepted, drafted = sum(one for one, _ in pairs), sum(rows for _, rows in pairs)
    found: Json = {
        "mean_acceptance_length": 1 + accepted / len(pairs) if pairs else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": {str(count): many for count, many in sorted(Counter(one for one, _ in pairs).items())},
        "num_spec_steps": len(pairs),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max_rows - 1,
    }
    if per_step:
        found["per_step_accepted"] = [one for one, _ in pairs]
        found["per_step_drafted"] = [rows for _, rows in pairs]
    return found


def _timings(stats: Sequence[Statistics]) -> Json:
    """llama-server's ``timings``: milliseconds of the request's own rows, without the time of rows beside them."""
    cached = sum(one.reused_tokens for one in stats)
    prompt = sum(one.prompt_tokens for one in stats) - cached
    new = sum(one.new_tokens for one in stats)
    prompt_ms = 1000 * sum(one.seconds.prefill for one in stats)
    new_ms = 1000 * sum(one.seconds.decode for one in stats)
    drafted = acceptance_of(stats, 0)
    return {
        "cache_n": cached,
        "prompt_n": prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt if prompt else 0.0,
        "prompt_per_second": 1000 * prompt / prompt_ms if prompt_ms else 0.0,
        "predicted_n": new,
        "predicted_ms": new_ms,
        "predicted_per_token_ms": new_ms / new if new else 0.0,
        "predicted_per_second": 1000 * new / new_ms if new_ms else 0.0,
        "draft_n": drafted["num_draft_tokens"],
        "draft_n_accepted": drafted["num_accepted_draft_tokens"],
    }


def _finite(logprob: float) -> float:
    """The log-probability, or OpenAI's -9999 in place of minus infinity, for which JSON has no number."""
    return max(logprob, -9999.0)


def _message(deltas: Sequence[Delta]) -> Json:
    """The whole message that a stream's pieces add up to."""
    said = [delta["content"] for delta in deltas if "content" in delta]
    calls: list[Json] = []
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            calls.append({name: value for name, value in call.items() if name != "index"})
    message: Json = {"role": "assistant", "content": "".join(said) if said or not calls else None}
    return {**message, "tool_calls": calls} if calls else message


def to_json(value: Any) -> bytes:
    """The value as compact JSON."""
    return pydantic_core.to_json(value)  # takes a third of json.dumps' time, at every event of every stream
