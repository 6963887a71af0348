"""Conversations: ShareGPT records as people have them, and Vicuna's way of writing them down.

A record is ``{"conversations": [{"from": "human", "value": ...}, ...]}``, or has ``messages`` with ``role`` and
``content``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["VICUNA", "Turn", "is_text", "turns_of", "vicuna"]

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
"""The opening that the Vicuna models were tuned with."""

Turn = tuple[Any, Any]
"""Who speaks (``user``, ``assistant``, ``system``, or what stands in the file) and what, as it stands there."""

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant"), "assistant"),
    "system": "system",
}


def is_text(value: Any) -> bool:
    """Whether a value is text: JSON may spell halves of surrogate pairs, which are none, and no tokenizer takes."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def turns_of(record: Any) -> list[Turn] | None:
    """The turns of a record; None where it is no conversation."""
    turns = record.get("conversations", record.get("messages")) if isinstance(record, Mapping) else None
    if not isinstance(turns, list):
        return None
    named = [turn if isinstance(turn, Mapping) else {} for turn in turns]
    speakers = [turn.get("from", turn.get("role")) for turn in named]
    texts = [turn.get("value", turn.get("content")) for turn in named]
    return [(_ROLES.get(str(who).lower(), who), text) for who, text in zip(speakers, texts, strict=True)]


def vicuna(messages: Sequence[Mapping[str, str]], eos: str) -> str:
    """Vicuna's version 1.1 prompt: ``system USER: question ASSISTANT: answer</s>USER: ...``."""
    system, rest = VICUNA, list(messages)
    if rest and rest[0]["role"] == "system":
        system = rest.pop(0)["content"]
    parts = [system + " "]
    for message in rest:
        content = message["content"]
        parts.append(f"USER: {content} " if message["role"] == "user" else f"ASSISTANT: {content}{eos}")
    return "".join(parts)
