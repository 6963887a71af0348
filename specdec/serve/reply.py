"""The reply to one HTTP request: a whole answer, or a stream of events."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Send

from specdec.serve.answers import to_json
from specdec.serve.errors import ApiError

__all__ = ["Reply"]

NAMED = ("/v1/responses", "/v1/messages")
"""Paths whose events have names, and no mark at their end."""

_SILENCE = 1.0, 10.0  # seconds until a stream that has no event yet begins all the same, and between its comments
_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # without it, nginx would buffer events
}


class Reply:
    """Sends an answer to the client, and keeps how much of it was sent.

    Args:
        send: ASGI's.
        path: the request's path, which decides the form of events and errors.
        owner: says whose key the request has.

    Attributes:
        status: the HTTP status that was sent.
        note: text for the log.
        stream_headers: headers that a stream has beside its own.
    """

    def __init__(self, send: Send, path: str = "", owner: str = "") -> None:
        self._send, self._path, self.owner = send, path, owner
        self._named = path in NAMED
        self.status, self.note = 0, ""
        self.stream_headers: dict[str, str] = {}
        self._streams = self._done = False
        self._sent = 0

    async def json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send a whole answer as JSON."""
        self._done = True
        body = to_json(value)
        sizes = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(status, {**sizes, **(headers or {})})
        await self._send({"type": "http.response.body", "body": body})

    async def begin_stream(self) -> None:
        """Send the headers of an event stream, once."""
        if not self._streams:
            self._streams = True
            await self._start(200, {**_STREAM, **self.stream_headers})

    async def keep_open(self) -> None:
        """Begin a stream that has waited for a second, and send comments while it has no events, until cancelled.

        Proxies and clients give up a connection that stays silent. An error that comes first has a status of its own.
        """
        first, each = _SILENCE
        await asyncio.sleep(first)
        while not self._done:
            if not self._sent:
                await self.begin_stream()
                await self._body(b": waiting\n\n", more=True)
            self._sent = 0
            await asyncio.sleep(each)

    async def events(self, values: list[dict[str, Any]]) -> None:
        """Send JSON values as events."""
        if values:
            self._sent += 1
            await self._body(b"".join(map(self._event, values)), more=True)

    def _event(self, value: dict[str, Any]) -> bytes:
        named = b"event: " + value["type"].encode() + b"\n" if self._named else b""
        return named + b"data: " + to_json(value) + b"\n\n"

    async def end_stream(self) -> None:
        """Send the event that ends a stream."""
        self._done = True
        await self._body(b"" if self._named else b"data: [DONE]\n\n", more=False)

    async def fail(self, error: ApiError) -> None:
        """Send an error, as an answer or as an event; nothing where the answer has already ended."""
        if self._done:
            return
        if self._streams:
            self._done = True
            value = error.body_of(self._path)
            await self._body(self._event({"type": "error", **value} if self._named else value), more=False)
        else:
            await self.json(error.body_of(self._path), error.status, error.headers)

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
