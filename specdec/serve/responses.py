"""``/v1/responses``: its requests as chats, and its answers."""

from __future__ import annotations

from secrets import token_hex
from typing import Any, ClassVar, Literal

from pydantic import Field

from specdec.errors import shown
from specdec.serve.answers import Json, Speaker
from specdec.serve.blocks import Block, Blocks, Change
from specdec.serve.chat import ChatAnswer
from specdec.serve.choices import Choice, Piece
from specdec.serve.errors import ApiError
from specdec.serve.field_types import Bounded, Int
from specdec.serve.fields import Body, Speculation
from specdec.serve.parts import text_of
from specdec.serve.plan import Plan
from specdec.serve.stored import Stored, StoredResponses

__all__ = ["ResponsesAnswer", "ResponsesRequest"]

_TEXTS = ("input_text", "output_text", "text")


class ResponsesRequest(Body):
    """The body of ``/v1/responses``."""

    ignored = frozenset(("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "include")) | {
        *("prompt_cache_retention", "stream_options", "max_tool_calls", "client_metadata")
    }
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False,),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        **dict.fromkeys(("conversation", "prompt", "context_management"), ()),
    }
    keeps_empty = False

    input: str | Bounded[dict[str, Any]] = Field()
    instructions: str | None = None
    max_output_tokens: Int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: Int | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    tools: Bounded[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    speculation: Speculation | None = None

    def chat(self, before: list[Json]) -> Json:
        """The same as the values of a chat's fields, behind the messages of earlier responses."""
        opening = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        tools = [_tool(tool, f"tools.{place}") for place, tool in enumerate(self.tools or ())]
        choice: Any = self.tool_choice
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        effort = (self.reasoning or {}).get("effort")
        return {
            "model": self.model,
            "messages": [*opening, *before, *_messages(self.input)],
            "max_tokens": self.max_output_tokens,
            **{name: getattr(self, name) for name in ("temperature", "top_p", "seed", "stream", "parallel_tool_calls")},
            "tools": tools,
            "tool_choice": choice if tools else None,
            "response_format": _form((self.text or {}).get("format")),
            "reasoning_effort": effort,
            "speculation": None if self.speculation is None else self.speculation.model_dump(exclude_none=True),
        }


def _messages(items: str | list[Json]) -> list[Json]:
    """Items of an input or output as messages of a chat."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    found: list[Json] = []
    for place, item in enumerate(items):
        kind, where = item.get("type", "message"), f"input.{place}"
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _assistant(found).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = text_of(item.get("output"), f"{where}.output", _TEXTS)
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": result})
        elif kind == "reasoning":
            thought = "".join(part.get("text", "") for part in item.get("content") or ())
            found.append({"role": "assistant", "content": "", "reasoning_content": thought})
        elif kind == "message" and item.get("role") == "assistant":
            own = _assistant(found)
            own["content"] += text_of(item.get("content"), f"{where}.content", _TEXTS)
        elif kind == "message":
            content = text_of(item.get("content"), f"{where}.content", _TEXTS)
            found.append({"role": item.get("role"), "content": content})
        else:
            raise ApiError(
                f"{where} is of type {shown(kind)}; this server takes messages, function calls and their outputs",
                param=where,
                code="unsupported_content",
            )
    return found


def _assistant(messages: list[Json]) -> Json:
    """The assistant's message that the next item is a part of; thinking, text and calls of one turn are items."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _tool(tool: Json, param: str) -> Json:
    if tool.get("type") != "function":
        raise ApiError(
            f"{param} is of type {shown(tool.get('type'))}, and this server has no tools of its own; give functions",
            param="tools",
            code="unsupported_parameter",
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _form(form: Any) -> Any:
    """``text.format`` as ``response_format``."""
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    names = ("name", "description", "schema", "strict")
    return {"type": "json_schema", "json_schema": {name: form[name] for name in names if form.get(name) is not None}}


class ResponsesAnswer(ChatAnswer):
    """The answer to ``/v1/responses``.

    Args:
        request: the request as it came.
        before: messages of earlier responses.
        stored: keeps the response, unless the request asks for it not to be kept.
        owner: whose it is.
        plan, speaker: see :class:`specdec.serve.answers.Answer`.
    """

    prefix, kind = "resp", "response"

    def __init__(
        self,
        request: ResponsesRequest,
        before: list[Json],
        stored: StoredResponses,
        owner: str,
        plan: Plan,
        speaker: Speaker,
    ) -> None:
        super().__init__(plan, speaker)
        self._asked, self._before, self._stored, self._owner = request, before, stored, owner
        self._id, self._blocks, self._ids, self._number = f"resp_{token_hex(16)}", Blocks(), dict[int, str](), 0

    def opening(self) -> list[Json]:
        begun = self._response("in_progress")
        return self._numbered([{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")])

    def chunks(self, choice: Choice, piece: Piece) -> list[Json]:
        return self._events(self._readers[0].read(piece.text, piece.last))

    def ending(self) -> list[Json]:
        events = self._numbered([event for change in self._blocks.end() for event in self._of(change)])
        found = self._finished()
        return events + self._numbered([{"type": f"response.{found['status']}", "response": found}])

    def whole(self) -> Json:
        self._events(self._readers[0].read(self.choices[0].text, True))
        return self._finished()

    def _events(self, deltas: list[Json]) -> list[Json]:
        return self._numbered([event for change in self._blocks.add(deltas) for event in self._of(change)])

    def _numbered(self, events: list[Json]) -> list[Json]:
        first, self._number = self._number, self._number + len(events)
        return [{**event, "sequence_number": first + place} for place, event in enumerate(events)]

    def _finished(self) -> Json:
        """The whole response, which is stored."""
        cut = self.choices[0].finish_reason == "length"
        found = self._response("incomplete" if cut else "completed")
        found["output"] = [self._item(block, "completed") for block in self._blocks.all]
        found["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        figures = self._figures()
        usage = figures.pop("usage")
        found |= figures
        found["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
        }
        if self._asked.store is not False:
            talk = [*self._before, *_messages(self._asked.input), *_messages(found["output"])]
            self._stored.put(self._owner, Stored(found, talk))
        return found

    def _response(self, status: Literal["in_progress", "incomplete", "completed"]) -> Json:
        asked = self._asked
        names = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "incomplete_details": None,  # without "error": clients take a body that has one for an error
            "model": self._head["model"],
            "output": [],
            **{name: getattr(asked, name) for name in names},
            "parallel_tool_calls": bool(asked.parallel_tool_calls),
            "reasoning": asked.reasoning or {"effort": None, "summary": None},
            "store": asked.store is not False,
            "text": {"format": {"type": "text"}, **(asked.text or {})},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "truncation": "disabled",
            "usage": None,
            "metadata": {},
        }

    def _item(self, block: Block, status: str) -> Json:
        """A block as an item of the output."""
        prefix = {"call": "fc", "text": "msg", "thinking": "rs"}[block.kind]
        own = {"id": self._ids.setdefault(block.index, f"{prefix}_{token_hex(12)}")}
        done = status == "completed"
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text if done else ""}
            return {"type": "function_call", **own, **call, "status": status}
        content = [_part(block, block.text)] if done else []
        if block.kind == "thinking":
            return {"type": "reasoning", **own, "summary": [], "content": content, "status": status}
        return {"type": "message", **own, "role": "assistant", "content": content, "status": status}

    def _of(self, change: Change) -> list[Json]:
        """The events of a change."""
        what, block, text = change
        item = self._item(block, "completed" if what == "end" else "in_progress")
        place = {"output_index": block.index}
        named = {**place, "item_id": item["id"]}
        if block.kind == "call":
            name, whole = "response.function_call_arguments", {"arguments": block.text}
        else:
            named["content_index"] = 0
            name, whole = f"response.{'output' if block.kind == 'text' else 'reasoning'}_text", {"text": block.text}
        more: Json = {"logprobs": []} if block.kind == "text" else {}
        if what == "text":
            return [{"type": f"{name}.delta", **named, "delta": text, **more}]
        parts = [] if block.kind == "call" else [_part(block, block.text if what == "end" else "")]
        if what == "begin":
            added = [{"type": "response.content_part.added", **named, "part": part} for part in parts]
            return [{"type": "response.output_item.added", **place, "item": item}, *added]
        done = [{"type": "response.content_part.done", **named, "part": part} for part in parts]
        last = {"type": "response.output_item.done", **place, "item": item}
        told = {"name": block.name} if block.kind == "call" else {}
        return [{"type": f"{name}.done", **named, **told, **whole, **more}, *done, last]


def _part(block: Block, text: str) -> Json:
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
