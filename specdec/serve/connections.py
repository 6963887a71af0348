"""Connections: HTTP/1.1 by uvicorn and h11, with a time for headers and a bound on open connections."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["HEADER_SECONDS", "Connection", "most_connections"]

_log = logging.getLogger("specdec.serve")

HEADER_SECONDS = 10.0
"""Seconds in which a request's headers arrive, from the connection's begin or the request's first byte."""

_SILENCE = 60.0  # seconds between two log lines
_SPARED = 128  # descriptors for the model's files, the log and the listening socket


def most_connections() -> int:
    """The number of connections for which the process has descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(16, soft - _SPARED)


class Connection(H11Protocol):
    """One client's connection.

    It is closed where a request's headers do not arrive in time, as connections that stay open without a request take
    the descriptors of others. Where descriptors run out, a new connection is closed at once; without that, accepting it
    would fail, and be tried and logged again without end.
    """

    _most = most_connections()
    _told = 0.0  # the loop's time from which on the bound may be logged again
    _headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= self._most:
            if Connection._told <= self.loop.time():
                Connection._told = self.loop.time() + _SILENCE
                _log.warning(
                    "%d connections are open, as many as the limit of open files allows; further ones are closed. "
                    "Raise the limit by `ulimit -n`",
                    len(self.connections),
                )
            transport.abort()
            self.transport, self.flow = transport, None  # type: ignore[assignment]
            return
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[0]:  # the beginning of a next request
            self._unset_keepalive_if_required()
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_headers()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        """Give the request that has not begun, or not all of its headers, its time; a timer that runs goes on."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._have_headers()
        elif self._headers_due is None:
            self._headers_due = self.loop.call_later(HEADER_SECONDS, self._too_late)

    def _have_headers(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _too_late(self) -> None:
        self._headers_due = None
        self.transport.close()
