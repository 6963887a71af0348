"""What other clients' requests do to one that only streams: its median and its longest gap beside each of twenty.

    python scripts/serve_stalls.py --model smollm2             # starts a server
    python scripts/serve_stalls.py --url http://127.0.0.1:8000

The honest client streams a text of ``--tokens`` tokens without a drafter. In turns it is alone and beside one of the
requests below, which is sent once its first token is there. A gap is the time between two events.
Prints a table of each request's status, the median gap as a multiple of the quiet one, and the longest gap in
milliseconds; ends with 1 where a median is above 1.5 times, or a gap above a second.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from statistics import median
from typing import Any
from urllib.parse import urlsplit

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = "!" * 8_000_000
HI: Any = [{"role": "user", "content": "hi"}]
SHORT: dict[str, Any] = {"prompt": "x = 1\n", "max_tokens": 8}


def _schema(inner: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": inner}}
    return {"messages": HI, "max_tokens": 8, "response_format": form}


def requests() -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Name -> path and body; bodies are made when they are needed, as some are large."""
    enum = {"type": "object", "properties": {"a": {"enum": [f"value {place}" for place in range(20_000)]}}}
    told = {"type": "content", "content": LONG[:3_000_000]}
    words = "The quick brown fox jumps over the lazy dog. " * 300
    bodies: dict[str, tuple[str, Any]] = {
        "8 MB of text": (COMPLETIONS, {**SHORT, "prompt": LONG}),
        "8 MB of spaces": (COMPLETIONS, {**SHORT, "prompt": " " * 8_000_000}),
        "8 MB in a message": (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
        "2 million tokens": (COMPLETIONS, {**SHORT, "prompt": [5] * 2_000_000}),
        "a million prompts": (COMPLETIONS, {**SHORT, "prompt": ["a"] * 1_000_000}),
        "20,000 prompts times 128": (COMPLETIONS, {**SHORT, "prompt": [[5]] * 20_000, "n": 128}),
        "a million tokens and a text": (COMPLETIONS, {**SHORT, "prompt": [5] * 1_000_000 + ["x"]}),
        "a million messages": (CHAT, {"messages": [5] * 1_000_000}),
        "a million parts": (CHAT, {"messages": [{"role": "user", "content": [5] * 1_000_000}]}),
        "200,000 unknown fields": (COMPLETIONS, {**SHORT, **{f"new{place}": 1 for place in range(200_000)}}),
        "400,000 biases": (COMPLETIONS, {**SHORT, "logit_bias": {str(place): "x" for place in range(400_000)}}),
        "a stop string of 100 KB": (COMPLETIONS, {**SHORT, "stop": "z" * 100_000, "stream": True}),
        "64 stop strings of 1,024": (COMPLETIONS, {**SHORT, "stop": [f"{n:02}" * 512 for n in range(64)]}),
        "a prediction of 3 MB": (COMPLETIONS, {**SHORT, "prediction": told}),
        "a schema with 20,000 values": (CHAT, _schema(enum)),
        "a pattern of 200 KB": (CHAT, _schema({"type": "string", "pattern": "a?" * 100_000})),
        "arguments of 100,000 brackets": (
            CHAT,
            {"messages": [*HI, {"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 100_000}}]}, *HI]},
        ),
        "a prompt of 3,000 tokens": (COMPLETIONS, {**SHORT, "prompt": words}),
        "8 MB to /tokenize": ("/tokenize", {"prompt": LONG}),
        "2 million tokens to /detokenize": ("/detokenize", {"tokens": [5] * 2_000_000}),
    }
    return {name: (path, lambda body=body: json.dumps(body).encode()) for name, (path, body) in bodies.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--url", help="a server that runs, in place of one that is started here")
    parser.add_argument("--tokens", type=int, default=200)
    given = parser.parse_args()
    with _server(given.url, given.model) as url:
        gaps(url, given.tokens)  # warms up
        bad = False
        print(f"{'beside':34} {'status':>6} {'median gap':>12} {'longest':>10}")
        for name, (path, body) in requests().items():
            quiet = median(gaps(url, given.tokens))
            beside, status = with_neighbour(url, given.tokens, path, body())
            ratio, longest = median(beside) / quiet, 1000 * max(beside)
            wrong = ratio > 1.5 or longest > 1000
            bad |= wrong
            print(f"{name:34} {status:>6} {ratio:>10.2f} x {longest:>7.0f} ms{'  !' if wrong else ''}", flush=True)
    sys.exit(bad)


def gaps(url: str, tokens: int, on_first: Callable[[], None] = lambda: None) -> list[float]:
    """Seconds between the events of a stream."""
    body: dict[str, Any] = {
        "prompt": "def f(",
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    body["speculation"] = {"drafter": "none"}
    link = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    link.request("POST", COMPLETIONS, json.dumps(body))
    answer, times = link.getresponse(), list[float]()
    for line in answer:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
            if len(times) == 1:
                on_first()
    link.close()
    return [after - before for before, after in pairwise(times)]


def with_neighbour(url: str, tokens: int, path: str, body: bytes) -> tuple[list[float], Any]:
    """The gaps beside another client's request, which is sent by a process of its own, and its status."""
    statuses: multiprocessing.SimpleQueue[Any] = multiprocessing.SimpleQueue()
    other = multiprocessing.Process(target=_ask, args=(url, path, body, statuses), daemon=True)
    found = gaps(url, tokens, other.start)
    other.join(300)
    return found, "-" if statuses.empty() else statuses.get()


def _ask(url: str, path: str, body: bytes, statuses: Any) -> None:
    link = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    with suppress(OSError, http.client.HTTPException):
        link.request("POST", path, body)
        answer = link.getresponse()
        answer.read()
        statuses.put(answer.status)
    link.close()


@contextmanager
def _server(url: str | None, model: str) -> Iterator[str]:
    if url is not None:
        yield url.rstrip("/")
        return
    command = [sys.executable, "-m", "specdec", "serve", "--model", model, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"(http://\S+) serves", line):
                threading.Thread(target=process.stderr.read, daemon=True).start()  # else the pipe fills up
                yield found[1]
                return
        sys.exit("the server did not start")
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main()
