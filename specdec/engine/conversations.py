"""Conversations: ShareGPT records as people have them, Vicuna's way to write them, and what tokenizers know of them.

A record is ``{"conversations": [{"from": "human", "value": ...}, ...]}``, or has ``messages`` with ``role`` and
``content``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["MARK", "VICUNA", "Turn", "answer_end", "is_text", "turns_of", "vicuna", "writes_chats"]

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
"""The opening that the Vicuna models were tuned with."""

MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
"""A message's content that is found again in what a chat template writes."""

Turn = tuple[Any, Any]
"""Who speaks (``user``, ``assistant``, ``system``, ``tool``, or what stands in the file) and what, as it stands there;
of a content of text parts alone, their text, a part a line."""

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
}
_TEXT_PARTS = ("text", "input_text", "output_text")


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
    texts = [_text(turn.get("value", turn.get("content"))) for turn in named]
    return [(_ROLES.get(str(speaker).lower(), speaker), text) for speaker, text in zip(speakers, texts, strict=True)]


def _text(content: Any) -> Any:
    """The text of a content in parts, where all are text; any other content as it is."""
    if not isinstance(content, list) or not content:
        return content
    parts = [part for part in content if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS]
    texts = [text for part in parts if isinstance(text := part.get("text"), str)]
    return "\n".join(texts) if len(texts) == len(content) else content


def writes_chats(tokenizer: Any) -> bool:
    """Whether a tokenizer turns messages into a prompt: by a chat template, or in a way of its own, as Mistral's do."""
    if getattr(tokenizer, "chat_template", None):
        return True
    render = getattr(tokenizer, "apply_chat_template", None)
    if render is None:
        return False
    try:
        return bool(render([{"role": "user", "content": "a"}], add_generation_prompt=True, return_dict=True))
    except Exception:  # transformers' own has no template to go by
        return False


def answer_end(tokenizer: Any) -> int | None:
    """The special or added token that a chat template writes behind an assistant's answer; None where there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}]
    try:
        text: str = tokenizer.apply_chat_template(talk, tokenize=False)
        behind = list(tokenizer(text.rpartition(MARK)[2], add_special_tokens=False)["input_ids"])
        added = set(tokenizer.get_added_vocab().values())
        first = next((token for token in behind if token in added or tokenizer.decode([token]).strip()), None)
    except Exception:  # a template is code of others: it may raise anything, and take no such talk
        return None
    return first if MARK in text and first in added else None


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
