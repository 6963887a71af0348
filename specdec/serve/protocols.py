"""What becomes of a request's body: a plan of its answers, or for small requests the answer itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from specdec.serve.chat import ChatAnswer
from specdec.serve.completions import CompletionAnswer
from specdec.serve.errors import ApiError
from specdec.serve.fields import Body, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from specdec.serve.lanes import Lane
from specdec.serve.messages import CountRequest, MessagesAnswer, MessagesRequest
from specdec.serve.plan import Plan
from specdec.serve.reading import checked, read
from specdec.serve.responses import ResponsesAnswer, ResponsesRequest
from specdec.serve.service import Service

__all__ = ["Protocols"]

Json = dict[str, Any]
Kind = TypeVar("Kind", bound=Body)


class Protocols:
    """Reads bodies, in a lane.

    Args:
        service: the service whose models and stored responses they may name.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._ignores = service, service.config.unknown_fields == "ignore"

    def _read(self, kind: type[Kind], body: bytes) -> tuple[Kind, list[str]]:
        """The fields of a body, whose model is served here, and the names of those that are ignored."""
        fields, ignored = read(kind, body, ignores=self._ignores)
        self._service.check_model(fields.model)
        return fields, ignored

    def _chat(self, lane: Lane, values: Json, ignored: list[str], answer: Callable[..., Any]) -> Plan:
        """The plan of another protocol's request, as the values of a chat's fields."""
        fields, more = checked(ChatRequest, values, ignores=self._ignores)
        return replace(lane.planner.chat(fields), ignored=ignored + more, answer=answer)

    def chat(self, lane: Lane, body: bytes, owner: str) -> Plan:
        """The plan of ``/v1/chat/completions``."""
        fields, ignored = self._read(ChatRequest, body)
        return replace(lane.planner.chat(fields), ignored=ignored, answer=ChatAnswer)

    def completion(self, lane: Lane, body: bytes, owner: str) -> Plan:
        """The plan of ``/v1/completions``."""
        fields, ignored = self._read(CompletionRequest, body)
        return replace(lane.planner.completion(fields), ignored=ignored, answer=CompletionAnswer)

    def responses(self, lane: Lane, body: bytes, owner: str) -> Plan:
        """The plan of ``/v1/responses``."""
        asked, ignored = self._read(ResponsesRequest, body)
        stored, before = self._service.responses, list[Json]()
        if asked.previous_response_id is not None:
            before = stored.get(owner, asked.previous_response_id, param="previous_response_id").messages
        answer = partial(ResponsesAnswer, asked, before, stored, owner)
        return self._chat(lane, asked.chat(before), ignored, answer)

    def messages(self, lane: Lane, body: bytes, owner: str) -> Plan:
        """The plan of ``/v1/messages``."""
        asked, ignored = self._read(MessagesRequest, body)
        return self._chat(lane, asked.chat(), ignored, MessagesAnswer)

    def count(self, lane: Lane, body: bytes) -> Json:
        """The answer to ``/v1/messages/count_tokens``."""
        fields, _ = checked(ChatRequest, self._read(CountRequest, body)[0].chat(), ignores=self._ignores)
        return {"input_tokens": len(lane.encoder.chat(fields))}

    def tokenize(self, lane: Lane, body: bytes) -> Json:
        """The answer to ``/tokenize``."""
        fields, _ = self._read(TokenizeRequest, body)
        text, special = fields.prompt, fields.add_special_tokens
        if fields.content is not None and text is None:  # llama-server's names, and its default
            text, special = fields.content, bool(fields.add_special)
        if (text is None) == (fields.messages is None):
            raise ApiError("a prompt, or messages, are to be tokenized; give one of them", param="prompt")
        encoder = lane.encoder
        tokens = encoder.chat(fields) if text is None else encoder.prompt(text, special=special is not False)
        found: Json = {"tokens": tokens, "count": len(tokens), "max_model_len": self._service.context}
        if fields.return_token_strs:
            found["token_strs"] = encoder.pieces(tokens)
        if fields.with_pieces:
            found["tokens"] = [{"id": token, "piece": encoder.text([token])} for token in tokens]
        return found

    def detokenize(self, lane: Lane, body: bytes) -> Json:
        """The answer to ``/detokenize``."""
        text = lane.encoder.text(self._read(DetokenizeRequest, body)[0].tokens)
        return {"prompt": text, "content": text}  # vLLM's name, and llama-server's
