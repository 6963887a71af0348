"""Plans of requests: each protocol's body becomes the fields of a chat or a completion."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from specdec.serve.fields import ChatRequest, CompletionRequest
from specdec.serve.lanes import Lane
from specdec.serve.messages import CountRequest, MessagesAnswer, MessagesRequest
from specdec.serve.plan import Plan
from specdec.serve.reading import checked, read
from specdec.serve.responses import ResponsesAnswer, ResponsesRequest
from specdec.serve.service import Service

__all__ = ["Protocols"]


class Protocols:
    """Reads bodies, in a lane.

    Args:
        service: the service whose models and stored responses they may name.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._ignores = service, service.config.unknown_fields == "ignore"

    def chat(self, lane: Lane, body: bytes, owner: str) -> Plan:
        """The plan of ``/v1/chat/completions``."""
        fields, ignored = read(ChatRequest, body, ignores=self._ignores)
        self._service.check_model(fields.model)
        return replace(lane.planner.chat(fields), ignored=ignored)

    def completion(self, lane: Lane, body: bytes, owner: str) -> Plan:
        """The plan of ``/v1/completions``."""
        fields, ignored = read(CompletionRequest, body, ignores=self._ignores)
        self._service.check_model(fields.model)
        return replace(lane.planner.completion(fields), ignored=ignored)

    def responses(self, lane: Lane, body: bytes, owner: str) -> Plan:
        """The plan of ``/v1/responses``."""
        asked, ignored = read(ResponsesRequest, body, ignores=self._ignores)
        self._service.check_model(asked.model)
        stored, before = self._service.responses, list[dict[str, Any]]()
        if asked.previous_response_id is not None:
            before = stored.get(owner, asked.previous_response_id, param="previous_response_id").messages
        fields, more = checked(ChatRequest, asked.chat(before), ignores=self._ignores)
        answer = partial(ResponsesAnswer, asked, before, stored, owner)
        return replace(lane.planner.chat(fields), ignored=ignored + more, answer=answer)

    def messages(self, lane: Lane, body: bytes, owner: str) -> Plan:
        """The plan of ``/v1/messages``."""
        asked, ignored = read(MessagesRequest, body, ignores=self._ignores)
        self._service.check_model(asked.model)
        fields, more = checked(ChatRequest, asked.chat(), ignores=self._ignores)
        return replace(lane.planner.chat(fields), ignored=ignored + more, answer=MessagesAnswer)

    def count(self, lane: Lane, body: bytes) -> dict[str, int]:
        """The answer to ``/v1/messages/count_tokens``."""
        asked, _ = read(CountRequest, body, ignores=self._ignores)
        self._service.check_model(asked.model)
        fields, _ = checked(ChatRequest, asked.chat(), ignores=self._ignores)
        tools = None if fields.tool_choice == "none" else fields.tools
        return {"input_tokens": len(lane.encoder.chat(fields.messages, tools, more=fields.chat_template_kwargs))}
