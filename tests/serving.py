"""A server for tests: uvicorn on a free port of loopback, in a thread of the test's process, and clients for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

import httpx2
import openai

from specdec import Engine
from specdec.serve.config import ServeConfig
from specdec.serve.server import Server, address_of, bound_socket
from specdec.serve.service import Service

SECONDS = 120
"""What no answer takes, so that a server that hangs fails a test."""


@dataclass(frozen=True)
class Running:
    """A server that runs, and the clients that were made for it."""

    url: str
    server: Server
    service: Service
    thread: Thread
    clients: list[openai.OpenAI] = field(default_factory=list)

    def openai(self, key: str = "none") -> openai.OpenAI:
        """The official client, which never asks twice."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=SECONDS)
        self.clients.append(client)  # the collector would warn of its sockets, in whatever test it runs
        return client

    def async_openai(self) -> openai.AsyncOpenAI:
        """The same for asyncio."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=SECONDS)

    def http(self) -> httpx2.Client:
        """A plain client."""
        return httpx2.Client(base_url=self.url, timeout=SECONDS)

    def call(self, work: Any) -> Any:
        """Run a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(SECONDS)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        loop = self.service.thread.loop
        assert loop is not None
        return loop

    def settle(self) -> None:
        """Wait until nothing is decoded any more, and no request is open."""

        async def settled() -> None:
            while self.service.thread.unfinished or self.server.server_state.tasks or not self.service.thread.rests:
                await asyncio.sleep(0.005)

        self.call(asyncio.wait_for(settled(), SECONDS))


@contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[Running]:
    """A server of an engine, until the end of the block."""
    ready = Event()
    config = ServeConfig(**{"model": "tiny", "port": 0, "grace": 5.0, **options})
    with bound_socket(config.host, config.port) as listening:
        server = Server(Service(engine, config), ready.set)
        thread = Thread(target=server.run, kwargs={"sockets": [listening]}, name="server")
        thread.start()
        running = Running(address_of(listening), server, server.service, thread)
        try:
            assert ready.wait(SECONDS)
            yield running
        finally:
            server.should_exit = True
            thread.join(SECONDS)
            for client in running.clients:
                client.close()
            assert not thread.is_alive()
