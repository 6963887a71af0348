"""Serving with uvicorn: it binds the socket, then loads the model, then answers requests until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from specdec.engine.engine import Engine
from specdec.errors import ConfigError, shown
from specdec.serve.app import make_app
from specdec.serve.config import ServeConfig
from specdec.serve.connections import Connection
from specdec.serve.errors import ApiError
from specdec.serve.guard import HEADER_BYTES
from specdec.serve.service import Service

__all__ = ["Server", "address_of", "bound_socket", "serve"]

_TICK = 0.05  # seconds between two looks at whether requests still run
_LAST_SECONDS = 5  # after the grace period, for the last errors to be sent


class Server(uvicorn.Server):
    """A uvicorn server for one service.

    After a first signal, it answers new requests with 503, so that whoever asks ``/health`` sees that it ends, and ends
    when the running ones have ended; when the grace period is over, these end with an error. A second signal ends it at
    once.

    Args:
        service: the service behind the application.
        on_ready: called once the server accepts requests.

    Attributes:
        service: the service behind the application.
    """

    def __init__(self, service: Service, on_ready: Callable[[], None] = lambda: None) -> None:
        config = uvicorn.Config(
            make_app(service),
            http=Connection,
            timeout_keep_alive=math.ceil(service.config.keep_alive),
            h11_max_incomplete_event_size=HEADER_BYTES,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_LAST_SECONDS,
        )
        super().__init__(config)
        self.service, self._on_ready = service, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the graceful end, or end at once where it had started.

        The signal is not raised again once the server has ended, as uvicorn would do: it was followed.
        """
        self.force_exit = self.service.forced = self.should_exit
        self.should_exit = True
        self.service.draining = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.draining = True
        loop, grace = asyncio.get_running_loop(), self.service.config.grace
        late, end = loop.call_later(grace, self._abort), loop.time() + grace + _LAST_SECONDS
        try:
            while self.service.answering and not self.force_exit and loop.time() < end:
                await asyncio.sleep(_TICK)
            await super().shutdown(sockets)
            if self.force_exit:  # which uvicorn leaves out; cancelled instead, the application would log a traceback
                await self.lifespan.shutdown()
        finally:
            late.cancel()

    def _abort(self) -> None:
        self.service.thread.abort(
            ApiError(
                "the server shut down before this request was done; send it to another, or later",
                status=503,
                code="shutting_down",
            )
        )


def serve(load: Callable[[], Engine], config: ServeConfig, on_ready: Callable[[str], None]) -> None:
    """Load the engine and serve it until a signal ends it; ``on_ready`` receives the address.

    A second signal ends the process, whatever its threads do.

    Raises:
        ConfigError: the server cannot listen on the address.
    """
    with bound_socket(config.host, config.port) as listening, _log_to_stderr():  # before the model loads
        address = address_of(listening)
        server = Server(Service(load(), config), lambda: on_ready(address))
        try:
            server.run(sockets=[listening])
        except OSError as error:  # another program took the port in the meantime
            raise _cannot_listen(config.host, config.port, error) from error
    if server.force_exit:  # a step may run on, and an interpreter that ends while torch runs in a thread aborts
        os._exit(0)


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to an address.

    Raises:
        ConfigError: the address does not exist, is in use or is not allowed.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            f"host {shown(host)} is no address of this machine: {error.strerror}; give another"
        ) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
    except OSError as error:
        bound.close()
        raise _cannot_listen(host, port, error) from error
    return bound


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host}, port {port}: {error.strerror}; give another --port (0 takes a free one), or --host"
    )


def address_of(bound: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Write the log to standard error, with times, while the context is open."""
    logger, handler = logging.getLogger("specdec.serve"), logging.StreamHandler()
    uvicorn_log = logging.getLogger("uvicorn.error")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    uvicorn_log.addFilter(_not_cancelled)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        uvicorn_log.removeFilter(_not_cancelled)


def _not_cancelled(record: logging.LogRecord) -> bool:
    """Whether a record is to be logged: a second signal cancels what runs, and no traceback says so."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
