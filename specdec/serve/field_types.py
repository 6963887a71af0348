"""Types of request fields whose size is bounded before they are validated.

Validation makes an object or an error of each item, and holds Python's lock meanwhile: a list of a million items of
the wrong type takes a minute, in which no other request is looked at. So lists and maps are measured first, and a list
fails at its first item that does not fit.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag
from pydantic_core import PydanticCustomError

__all__ = ["MESSAGES", "STOPS", "STOP_CHARACTERS", "Biases", "Bounded", "Int", "Prompts", "Stops", "Tokens", "bounded"]

STOPS, STOP_CHARACTERS = 64, 1024
"""Most stop strings of a request, and most characters of each."""
BIASES = 1024
"""Most tokens of ``logit_bias``: its processor looks at each for every row."""
MESSAGES = 16_384
"""Most messages of a chat, and most parts of a message."""
STOP_TOKENS = 1 << 18
"""Most ids of ``stop_token_ids``, more than most vocabularies have."""

Item = TypeVar("Item")


def bounded(most: int) -> BeforeValidator:
    """The check that a list, a map or a text has at most ``most`` items, before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict | str) and len(value) > most:
            what = "characters" if isinstance(value, str) else "items"
            raise PydanticCustomError(
                "too_long",
                "{count} {what}; it must have at most {most}",
                {"count": len(value), "what": what, "most": most},
            )
        return value

    return BeforeValidator(check)


class _First(FailFast):
    """The same, hashable, as unions of annotated types need it."""

    __hash__ = object.__hash__


Bounded = Annotated[list[Item], _First(), bounded(MESSAGES)]
"""A list of at most :data:`MESSAGES` items."""


def _whole(value: Any) -> Any:
    """A number without a fraction as an integer, as JavaScript and Lua write 16 as 16.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]


def _stops(value: Any) -> Any:
    """The stop strings as a list; an empty one asks for nothing."""
    texts = [value] if isinstance(value, str) else value
    return [one for one in texts if one != ""] if isinstance(texts, list) else texts


Stops = Annotated[list[Annotated[str, bounded(STOP_CHARACTERS)]], _First(), bounded(STOPS), BeforeValidator(_stops)]


Tokens = Annotated[list[Annotated[int, Field(ge=0)]], _First()]
"""Token ids."""


def _kind(value: Any) -> str | None:
    """The form of a completion's prompts: that of their first one."""
    first = value[0] if isinstance(value, list) and value else ""
    if isinstance(value, list):
        return "[texts]" if isinstance(first, str) else "[lists]" if isinstance(first, list) else "[ids]"
    return "[text]" if isinstance(value, str) else None


Prompts = Annotated[
    Annotated[str, Tag("[text]")]
    | Annotated[list[str], _First(), Tag("[texts]")]
    | Annotated[Tokens, Tag("[ids]")]
    | Annotated[list[Tokens], _First(), Tag("[lists]")],
    Discriminator(_kind, "prompt_type", "give a text, token ids, or a list of either"),
]
"""The prompts of a completion."""

Biases = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], bounded(BIASES)]
"""``logit_bias``; an empty list, as some clients send, is left out before."""
