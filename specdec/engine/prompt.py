"""Prompt: text, token ids or chat messages, read as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from specdec.engine.conversations import writes_chats
from specdec.errors import PromptError, first_line, shown

__all__ = ["Prompt", "is_chat", "token_ids"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | torch.Tensor


def token_ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    """The token ids of a prompt; text and messages need a tokenizer.

    Raises:
        PromptError: it is something else, there is no tokenizer for it, or it holds what is no text.
    """
    if isinstance(prompt, torch.Tensor):
        return _of_tensor(prompt)
    if isinstance(prompt, str):
        _check_text("the prompt", prompt)
        return list(_needed(tokenizer)(prompt)["input_ids"])
    items = _items(prompt)
    if is_chat(items):
        return _of_messages(items, _needed(tokenizer))
    return items if all(type(item) is int for item in items) else [_token(*place) for place in enumerate(items)]


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is chat messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def _needed(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise PromptError("this engine has no tokenizer; give token ids")
    return tokenizer


def _items(prompt: Any) -> list[Any]:
    array = isinstance(prompt, np.ndarray) and prompt.ndim > 0
    if not array and (not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview)):
        raise PromptError(
            f"the prompt is {shown(prompt)}, of type {type(prompt).__name__}; give text, token ids, or chat messages"
        )
    return list(prompt)


def _of_tensor(prompt: torch.Tensor) -> list[int]:
    if prompt.ndim == 2 and prompt.shape[0] == 1:
        prompt = prompt[0]
    if prompt.ndim != 1:
        raise PromptError(f"the prompt has shape {list(prompt.shape)}; give one sequence, [n] or [1, n]")
    if prompt.is_floating_point() or prompt.is_complex() or prompt.dtype is torch.bool:
        raise PromptError(f"the prompt is of {prompt.dtype}; token ids are integers")
    return [int(token) for token in prompt.tolist()]


def _token(place: int, item: Any) -> int:
    if isinstance(item, Integral) and not isinstance(item, bool):
        return int(item)
    raise _no_item(place, item)


def _no_item(place: int, item: Any) -> PromptError:
    return PromptError(
        f"the prompt's item {place} is {shown(item)}, of type {type(item).__name__}; give one sequence of token ids, "
        "which are integers, or of chat messages, which are mappings"
    )


def _of_messages(messages: Sequence[Any], tokenizer: Any) -> list[int]:
    if not writes_chats(tokenizer):
        raise PromptError("the tokenizer has no chat template; give text, or set tokenizer.chat_template")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _no_item(place, message)
        _check_message(f"message {place} of the prompt", message)
    try:
        encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
    except Exception as error:  # a template is code of others: it may raise anything
        raise PromptError(
            f"the tokenizer's chat template refuses these messages: {first_line(error)}; change them, or give text"
        ) from error
    return list(encoded["input_ids"])


def _check_message(what: str, message: Mapping[Any, Any]) -> None:
    """Raises PromptError for what no template makes sense of; some take parts for content, or tool calls instead."""
    for key, kinds in (("role", str), ("content", str | list | tuple)):
        if key not in message and not (key == "content" and "tool_calls" in message):
            raise PromptError(f"{what} has no {key!r}; a message is {{'role': 'user', 'content': 'text'}}")
        value = message.get(key, "")
        if not isinstance(value, kinds) and not (value is None and "tool_calls" in message):
            raise PromptError(f"{what} has the {key} {shown(value)}, of type {type(value).__name__}; give text")
        if isinstance(value, str):
            _check_text(what, value)


def _check_text(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{what} holds {text[error.start]!r} at character {error.start}, half a character that no tokenizer reads; "
            "decode its bytes with errors='replace'"
        ) from error
