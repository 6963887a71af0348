"""Load on a server: throughput, time to the first token and between tokens, at several numbers of clients.

    python scripts/serve_load.py --model smollm2 --clients 1,4,16,64 --requests 64 --tokens 64

Each number of clients sends the same requests, a bounded number of them, each client the next one as its answer ends;
only on loopback, greedy, as streams. Beside the server: ``generate_batch`` with as many sequences at once, in the same
run, and with ``--llama-cpp FILE`` llama.cpp's server (``pip install 'llama-cpp-python[server]'``) on a GGUF file of the
same weights. Prints a table, and JSON with --json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from time import perf_counter, sleep
from typing import Any

import httpx2

SECONDS = 1800


@dataclass(frozen=True)
class Outcome:
    """Seconds; those between tokens are of all clients together. NaN where nothing is measured."""

    system: str
    clients: int
    tokens: int
    tokens_per_second: float
    first_p50: float
    first_p99: float
    between_p50: float
    between_p99: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--clients", default="1,4,16,64", help="numbers of clients, with commas")
    parser.add_argument("--requests", type=int, default=64, help="in each run; at least as many as clients are sent")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument(
        "--prompts", type=Path, help="JSON lines with a prompt each; left out, the six kinds' questions"
    )
    parser.add_argument("--llama-cpp", metavar="FILE", help="a GGUF file of the same weights, for llama.cpp's server")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    arguments = parser.parse_args()
    clients = [int(count) for count in arguments.clients.split(",")]
    prompts = read_prompts(arguments.prompts)
    found: list[Outcome] = []
    for count in clients:
        asked = [prompts[place % len(prompts)] for place in range(max(arguments.requests, count))]
        for system, command in servers(arguments, count):
            with running(command) as url:
                asyncio.run(load(url, asked[:count], count, arguments.tokens))  # everything is loaded and compiled then
                found.append(summary(system, count, asyncio.run(load(url, asked, count, arguments.tokens))))
                show(found[-1])
        found.append(batch(arguments, asked, count))
        show(found[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


def read_prompts(file: Path | None) -> list[str]:
    if file is not None:
        return [json.loads(line)["prompt"] for line in file.read_text().splitlines() if line.strip()]
    from specdec.engine.questions import find_questions, read_questions

    return [question.turns[0] for question in read_questions(find_questions("six_kinds"))]


def servers(arguments: argparse.Namespace, count: int) -> Iterator[tuple[str, list[str]]]:
    threads = [] if arguments.threads is None else ["--threads", str(arguments.threads)]
    for drafter in dict.fromkeys([arguments.drafter, "none"]):
        options = ["--model", arguments.model, "--drafter", drafter, "--max-num-seqs", str(count), *threads]
        yield f"specdec serve, {drafter}", ["-m", "specdec", "serve", "--prefix-bytes", "0", *options]
    if arguments.llama_cpp:
        threads = [] if arguments.threads is None else ["--n_threads", str(arguments.threads)]
        yield "llama.cpp's server", ["-m", "llama_cpp.server", "--model", arguments.llama_cpp, *threads]


@contextmanager
def running(command: list[str]) -> Iterator[str]:
    """A server on a free port of loopback, once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, *command, "--port", str(port)], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                httpx2.get(f"{url}/v1/models").raise_for_status()
                break
            except httpx2.HTTPError:
                if process.poll() is not None:
                    raise SystemExit(f"{' '.join(command)} ended with {process.returncode}") from None
                sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


@dataclass(frozen=True)
class Load:
    """When a run began and ended, and for each answer when it was asked, when its events came, and its tokens."""

    began: float
    ended: float
    answers: list[tuple[float, list[float], int]]


async def load(url: str, prompts: Sequence[str], clients: int, tokens: int) -> Load:
    answers: list[tuple[float, list[float], int]] = []
    waiting = iter(prompts)
    limits = httpx2.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx2.AsyncClient(base_url=url, timeout=SECONDS, limits=limits) as http:

        async def client() -> None:
            for prompt in waiting:
                asked = perf_counter()
                answers.append((asked, *await answer(http, prompt, tokens)))

        began = perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return Load(began, perf_counter(), answers)


async def answer(http: httpx2.AsyncClient, prompt: str, tokens: int) -> tuple[list[float], int]:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    times, count = list[float](), 0
    async with http.stream(
        "POST", "/v1/completions", json={**body, "stream_options": {"include_usage": True}}
    ) as events:
        events.raise_for_status()
        async for line in events.aiter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line[6:])
            if piece.get("usage"):
                count = piece["usage"]["completion_tokens"]
            if piece["choices"] and piece["choices"][0]["text"]:
                times.append(perf_counter())
    return times, count or len(times)


def summary(system: str, clients: int, found: Load) -> Outcome:
    first = [times[0] - asked for asked, times, _ in found.answers if times]
    between = [after - before for _, times, _ in found.answers for before, after in pairwise(times)]
    total = sum(count for _, _, count in found.answers)
    speed = total / (found.ended - found.began)
    return Outcome(system, clients, total, speed, *_shares(first), *_shares(between))


def _shares(values: Sequence[float]) -> tuple[float, float]:
    """The 50th and the 99th percentile."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (float("nan"), float("nan"))
    cuts = quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]


def batch(arguments: argparse.Namespace, prompts: Sequence[str], count: int) -> Outcome:
    """``generate_batch`` on the same prompts, in a process of its own, as the servers are."""
    given = json.dumps([arguments.model, arguments.drafter, arguments.threads, list(prompts), count, arguments.tokens])
    command = [sys.executable, "-c", _BATCH]
    output = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True).stdout
    seconds, total = json.loads(output.splitlines()[-1])
    nothing = (float("nan"),) * 4
    return Outcome(f"generate_batch, {arguments.drafter}", count, total, total / seconds, *nothing)


_BATCH = """
import json, sys
from time import perf_counter
from specdec.engine.config import ModelOptions
from specdec.engine.load import load
model, drafter, threads, prompts, count, tokens = json.load(sys.stdin)
engine = load(ModelOptions(model=model, threads=threads), drafter)
engine.generate_batch(prompts[:count], tokens, batch=count)
began = perf_counter()
results = engine.generate_batch(prompts, tokens, batch=count)
print(json.dumps([perf_counter() - began, sum(len(one.token_ids) for one in results)]))
"""


def show(one: Outcome) -> None:
    times = f"first token {1000 * one.first_p50:8.1f} / {1000 * one.first_p99:8.1f} ms"
    between = f"between events {1000 * one.between_p50:7.2f} / {1000 * one.between_p99:7.2f} ms"
    print(
        f"{one.clients:3} clients  {one.system:26} {one.tokens_per_second:8.1f} tokens/s  {times}  {between}",
        flush=True,
    )


if __name__ == "__main__":
    main()
