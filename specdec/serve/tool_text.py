"""The default place of tools, for chat templates that have none: their descriptions and calls as text of messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

__all__ = ["as_text"]

_ASK = """You can call these functions, described one a line:
<tools>
{tools}
</tools>
To call one, write a block like this, with the function's name and an object of its arguments:
<tool_call>
{{"name": "NAME", "arguments": {{}}}}
</tool_call>
Its result comes back between <tool_response> and </tool_response>."""


def as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, system: bool = True
) -> list[dict[str, Any]]:
    """The messages of a chat, whose tools, calls and their results are text.

    Args:
        messages: the chat, as templates take it.
        tools: the tools' descriptions.
        system: whether the template takes a system message; else its text, with the tools, opens the first message.
    """
    written: list[dict[str, Any]] = []
    for results, group in groupby(messages, lambda message: message["role"] == "tool"):
        if results:  # of one turn, which is one message, as roles may have to alternate
            texts = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            written.append({"role": "user", "content": "\n".join(texts)})
        else:
            written += map(_said, group)
    opening = [_ASK.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))] if tools else []
    if written and written[0]["role"] == "system":
        opening.insert(0, written.pop(0)["content"])
    if opening and (system or not written):
        return [{"role": "system", "content": "\n\n".join(opening)}, *written]
    if opening:
        written[0] = {**written[0], "content": "\n\n".join([*opening, written[0]["content"]])}
    return written


def _said(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls are in its content."""
    calls = [one["function"] for one in message.get("tool_calls", ()) if isinstance(one.get("function"), Mapping)]
    said = [message["content"]] if message["content"] else []
    for call in calls:
        text = json.dumps({"name": call.get("name"), "arguments": call.get("arguments", {})}, ensure_ascii=False)
        said.append(f"<tool_call>\n{text}\n</tool_call>")
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": "\n".join(said)}
