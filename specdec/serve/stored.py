"""Responses that are kept for later requests, in bounded memory: each belongs to the key that made it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from specdec.errors import shown
from specdec.serve.errors import ApiError

__all__ = ["Stored", "StoredResponses"]

_MOST, _MOST_BYTES = 1024, 64 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, and the messages of its conversation, its own last."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]


class StoredResponses:
    """The latest responses. The event loop alone changes them.

    Args:
        most, most_bytes: bounds of all of them, as JSON; the oldest are dropped first.
    """

    def __init__(self, most: int = _MOST, most_bytes: int = _MOST_BYTES) -> None:
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._all: OrderedDict[tuple[str, str], tuple[Stored, int]] = OrderedDict()

    def put(self, owner: str, one: Stored) -> None:
        """Keep a response of an owner."""
        size = len(to_json([one.response, one.messages]))
        self._all[owner, one.response["id"]] = one, size
        self._bytes += size
        while len(self._all) > self._most or self._bytes > self._most_bytes:
            _, (_, dropped) = self._all.popitem(last=False)
            self._bytes -= dropped

    def get(self, owner: str, name: str, *, param: str | None = None) -> Stored:
        """A response of the owner; raises ApiError, with the status 400 for a field ``param``, where it is not kept."""
        found = self._all.get((owner, name))
        if found is None:
            raise ApiError(
                f"there is no response {shown(name)} here; the server keeps the latest {self._most}, while it runs; "
                "send the conversation as input",
                status=404 if param is None else 400,
                param=param,
                code="not_found" if param is None else "previous_response_not_found",
            )
        return found[0]

    def delete(self, owner: str, name: str) -> None:
        """Forget a response of the owner; raises as :meth:`get` does."""
        self.get(owner, name)
        self._bytes -= self._all.pop((owner, name))[1]
