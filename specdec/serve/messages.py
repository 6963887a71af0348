"""``/v1/messages``: Anthropic's API as a chat, and its answers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import from_json, to_json

from specdec.serve.answers import Json
from specdec.serve.blocks import Block, Blocks, Change
from specdec.serve.chat import ChatAnswer
from specdec.serve.choices import Choice, Piece
from specdec.serve.field_types import STOPS, Bounded, Int, bounded
from specdec.serve.fields import Body, Fields, Speculation
from specdec.serve.parts import text_of, text_of_part

__all__ = ["CountRequest", "MessagesAnswer", "MessagesRequest"]


class AnthropicTool(Fields):
    ignored = frozenset({"cache_control", "eager_input_streaming", "defer_loading", "input_examples"})

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class AnthropicChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicMessage(Fields):
    role: Literal["user", "assistant", "system"]
    content: str | Bounded[dict[str, Any]]


class CountRequest(Body):
    """The body of ``/v1/messages/count_tokens``."""

    ignored = frozenset({"metadata", "service_tier", "cache_control", "context_management", "output_config"})
    keeps_empty = False

    messages: Bounded[AnthropicMessage] = Field(min_length=1)
    system: str | Bounded[dict[str, Any]] | None = None
    tools: Bounded[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: dict[str, Any] | None = None

    def chat(self) -> Json:
        """The same as the values of a chat's fields."""
        messages = [] if self.system is None else [{"role": "system", "content": text_of(self.system, "system")}]
        for place, message in enumerate(self.messages):
            messages += _messages(message, f"messages.{place}.content")
        values: Json = {"model": self.model, "messages": messages, "thinking": self.thinking}
        if self.tools:
            values["tools"] = [
                {
                    "type": "function",
                    "function": {"name": one.name, "parameters": one.input_schema}
                    | ({} if one.description is None else {"description": one.description})
                    | {"strict": bool(one.strict)},
                }
                for one in self.tools
            ]
        choice = self.tool_choice
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name or ""}}
            values["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
            values["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return values


class MessagesRequest(CountRequest):
    """The body of ``/v1/messages``."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = dict.fromkeys(("mcp_servers", "container"), ())

    max_tokens: Int = Field(ge=1)
    stop_sequences: Annotated[list[str], bounded(STOPS)] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Int | None = Field(None, ge=-1, lt=2**31)
    speculation: Speculation | None = None

    def chat(self) -> Json:
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        speculation = None if self.speculation is None else self.speculation.model_dump(exclude_none=True)
        own = {"stop": self.stop_sequences, "speculation": speculation}
        return {**super().chat(), **{name: getattr(self, name) for name in names}, **own}


def _messages(message: AnthropicMessage, param: str) -> list[Json]:
    """A message as messages of a chat: results of tools come first, as messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    found: list[Json] = []
    own: Json = {"role": message.role, "content": []}
    for place, block in enumerate(message.content):
        kind, where = block.get("type"), f"{param}.{place}"
        if kind == "tool_result":
            result = text_of(block.get("content"), f"{where}.content")
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif kind == "tool_use" and isinstance(block.get("input"), dict):
            function = {"name": block.get("name"), "arguments": to_json(block["input"]).decode()}
            call = {"id": block.get("id"), "type": "function", "function": function}
            own.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            own["reasoning_content"] = own.get("reasoning_content", "") + str(block.get("thinking", ""))
        elif kind != "redacted_thinking":
            own["content"].append({"type": "text", "text": text_of_part(block, where)})
    if own["content"] or "tool_calls" in own or not found:
        found.append(own)
    return found


class MessagesAnswer(ChatAnswer):
    """The answer to ``/v1/messages``."""

    prefix, kind = "msg", "message"

    _blocks: Blocks

    def opening(self) -> list[Json]:
        self._blocks = Blocks()
        usage = {**self._usage(), "output_tokens": 0}
        return [{"type": "message_start", "message": {**self._message([]), "usage": usage}}]

    def chunks(self, choice: Choice, piece: Piece) -> list[Json]:
        return [*map(_event, self._blocks.add(self._readers[0].read(piece.text, piece.last)))]

    def ending(self) -> list[Json]:
        changes = [*map(_event, self._blocks.end())]
        reason = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return [*changes, reason, {"type": "message_stop"}]

    def whole(self) -> Json:
        blocks = Blocks()
        for _ in blocks.add(self._readers[0].read(self.choices[0].text, True)):
            pass
        figures = {name: value for name, value in self._figures().items() if name != "usage"}
        return {**self._message([*map(_content, blocks.all)]), **self._stop(), "usage": self._usage(), **figures}

    def _message(self, content: list[Json]) -> Json:
        head = {"id": str(self._head["id"]).replace("-", "_"), "type": "message", "role": "assistant"}
        return {**head, "model": self._head["model"], "content": content, "stop_reason": None, "stop_sequence": None}

    def _usage(self) -> Json:
        usage = self._figures()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = {"input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"]}
        return {**counts, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}

    def _stop(self) -> Json:
        choice = self.choices[0]
        tail = self._tokenizer.decode(choice.tokens[-64:]) if choice.stopped else ""
        stop = next((text for text in self._plan.stops if text in tail), None)
        reason = "max_tokens" if choice.finish_reason == "length" else "end_turn" if stop is None else "stop_sequence"
        if self._readers[0].called and choice.finish_reason == "stop":
            reason, stop = "tool_use", None
        return {"stop_reason": reason, "stop_sequence": stop}


def _content(block: Block) -> Json:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": from_json(block.text or "{}")}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


_PARTS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _event(change: Change) -> Json:
    what, block, text = change
    if what == "begin":
        empty = _content(Block(block.kind, block.index, block.name, block.call_id))
        return {"type": "content_block_start", "index": block.index, "content_block": empty}
    if what == "end":
        return {"type": "content_block_stop", "index": block.index}
    kind, name = _PARTS[block.kind]
    return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}
