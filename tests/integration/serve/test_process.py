"""The command itself, in a process of its own: it says that it is ready, ends by a signal, and does not grow."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import httpx2
import pytest

from tests.serving import SECONDS

pytestmark = pytest.mark.slow  # each loads torch and a model anew


@contextmanager
def started(*options: str) -> Iterator[tuple[subprocess.Popen[str], str, Future[str]]]:
    """The command, its address once it is ready, and what it says from then on to its end."""
    command = [sys.executable, "-m", "specdec", "serve", "--model", "tiny", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        late = Timer(SECONDS, process.kill)
        late.start()
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            ready = re.fullmatch(r"(http://127\.0\.0\.1:\d+) serves tiny, drafted by (\w+)\n", line)
            assert ready, line
            said: Future[str] = Future()
            read = process.stderr.read  # or a full pipe would stop the log, and all
            Thread(target=lambda: said.set_result(read()), daemon=True).start()
            yield process, ready[1], said
        finally:
            late.cancel()
            process.kill()


def test_a_signal_under_load_lets_requests_end() -> None:
    with started("--max-num-seqs", "2") as (process, url, _):

        async def ask(client: httpx2.AsyncClient, place: int, begun: asyncio.Event) -> int | None:
            body = {"prompt": f"x{place}", "max_tokens": 300, "temperature": 0, "stream": True, "ignore_eos": True}
            found: list[str] = []
            try:
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        begun.set()
                        found.append(line)
                    assert answer.status_code == 503 or found[-2] == "data: [DONE]"
                    return answer.status_code
            except httpx2.TransportError:  # the socket was closed before the server had it
                assert not found
                return None

        async def load() -> list[Any]:
            begun = asyncio.Event()
            async with httpx2.AsyncClient(base_url=url, timeout=SECONDS) as client:
                answers = [asyncio.ensure_future(ask(client, place, begun)) for place in range(8)]
                await begun.wait()
                process.send_signal(signal.SIGTERM)
                return await asyncio.gather(*answers)

        found = asyncio.run(load())
        assert found.count(200) >= 1
        assert process.wait(SECONDS) == 0


def test_a_second_signal_ends_it_at_once() -> None:
    """Of the other kind, which a terminal sends."""
    with started("--grace", "100") as (process, url, said):
        body = {"prompt": "x", "max_tokens": 2000, "temperature": 0, "stream": True, "ignore_eos": True}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            while httpx2.get(f"{url}/health", timeout=SECONDS).status_code == 200:
                pass
            process.send_signal(signal.SIGINT)
            with pytest.raises(httpx2.TransportError):
                assert list(lines)[-2] != "data: [DONE]", "it went on to the answer's end"
        assert process.wait(SECONDS) == 0
        assert "Traceback" not in said.result(SECONDS)


_NEVER_DONE = """
import torch
from specdec import Engine
from specdec.serve.config import ServeConfig
from specdec.serve.server import serve
from tests.fakes import Reciter

def rule(text):
    print("it runs", flush=True)
    while True:
        torch.mm(numbers, numbers)

numbers = torch.ones(500, 500)
engine = Engine(Reciter(rule, vocab_size=4096), Engine.from_pretrained("tiny").tokenizer, "none")
serve(lambda: engine, ServeConfig(model="tiny", port=0), lambda address: print(address, flush=True))
"""


def test_a_second_signal_waits_for_no_step() -> None:
    """An interpreter that ends while a thread is inside torch aborts."""
    with subprocess.Popen([sys.executable, "-c", _NEVER_DONE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            host, port = process.stdout.readline().strip().removeprefix("http://").split(":")
            with closing(HTTPConnection(host, int(port), timeout=SECONDS)) as client:
                client.request("POST", "/v1/completions", json.dumps({"prompt": [7]}))
                assert process.stdout.readline() == "it runs\n"
                for one in (signal.SIGTERM, signal.SIGINT):  # two of one kind may arrive as one
                    process.send_signal(one)
                assert process.wait(SECONDS) == 0
        finally:
            process.kill()


def test_memory_does_not_grow_with_requests() -> None:
    def resident(process: subprocess.Popen[str]) -> int:
        pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
        return int(pages) * 4096

    with started("--prefix-bytes", "2000000", "--max-num-seqs", "4", "--drafter", "prompt_lookup") as (process, url, _):

        async def some(count: int, first: int) -> None:
            async with httpx2.AsyncClient(base_url=url, timeout=SECONDS) as client:
                places = iter(range(first, first + count))

                async def one() -> None:
                    for place in places:
                        body: dict[str, Any] = {"prompt": f"x{place} = 1\n", "max_tokens": 4, "seed": place}
                        if place % 3 == 0:
                            async with client.stream(
                                "POST", "/v1/completions", json={**body, "stream": True}
                            ) as answer:
                                await answer.aiter_lines().__anext__()  # and away
                        else:
                            status = (await client.post("/v1/completions", json=body)).status_code
                            assert status == 200
                        if place % 50 == 0:
                            assert (await client.post("/v1/completions", json={"prompt": place})).status_code == 400

                await asyncio.gather(*(one() for _ in range(8)))

        asyncio.run(some(300, 0))
        before = resident(process)
        asyncio.run(some(1000, 300))
        assert resident(process) - before < 12 << 20, "12 KB a request"


def test_an_idle_server_takes_no_processor() -> None:
    def ticks(process: subprocess.Popen[str]) -> int:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    with started() as (process, url, _):
        httpx2.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 9}, timeout=SECONDS)
        before = ticks(process)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        assert ticks(process) - before < 30, "a tenth of the processor"
