"""Contents of messages: a text, or parts that are texts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from specdec.errors import shown
from specdec.serve.errors import ApiError

__all__ = ["text_of", "text_of_part"]


def text_of(
    content: str | Sequence[Any] | None, param: str, kinds: Collection[str] = ("text",), between: str = "\n"
) -> str:
    """The text of a content: its parts joined by ``between``, by default one part a line; empty where there is none.

    Raises:
        ApiError: a part is of none of the ``kinds``, or has no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return between.join(text_of_part(part, f"{param}.{place}", kinds) for place, part in enumerate(content))


def text_of_part(part: Any, param: str, kinds: Collection[str] = ("text",)) -> str:
    """The text of a part; raises as :func:`text_of` does."""
    if isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = shown(part.get("type") if isinstance(part, dict) else part)
    raise ApiError(
        f"{param} is a part of type {kind}; this server takes parts of type {' or '.join(map(repr, kinds))}, which "
        "have a text",
        param=param,
        code="unsupported_content",
    )
