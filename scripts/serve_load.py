"""Load on a server, beside ``generate_batch`` and llama.cpp's server: throughput, and times to and between tokens.

    python scripts/serve_load.py --model smollm2                           # the server and generate_batch
    python scripts/serve_load.py --model smollm2 --llama-cpp --out runs/load
    python scripts/serve_load.py --model smollm2 --gguf smollm2-bf16.gguf  # a file of the same weights, made elsewhere
    python scripts/serve_load.py --model smollm2 --before ../before --rounds 9 --clients 1,4,16  # and another checkout

All systems are started once, and take turns: each round goes through the numbers of clients, and each number through
the systems, whose order moves on from round to round. A number of clients sends a bounded number of requests, each
client the next one as its answer ends; on loopback, greedy, as streams. The client only notes when bytes come, and
reads them after the run, so that it takes little of the processor. ``generate_batch`` has the same prompts, as many at
once. With ``--llama-cpp`` the model's weights are written as a GGUF file of Q8_0 (``specdec quantize``), which both
servers and ``generate_batch`` load; llama.cpp is the package xllamacpp. With ``--before`` another checkout's server
takes the place of ``generate_batch``. Prints a table, in which a share is the geometric mean of the rounds' with its
90 % interval; ``--out`` also writes JSON and a figure there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import h11
from checkout_pairs import interval

ROOT = Path(__file__).resolve().parent.parent
SERVER, BEFORE = "specdec serve", "specdec serve before"
BATCH, LLAMA = "generate_batch", "llama.cpp's server"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--plain", action="store_true", help="also the server with plain decoding")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="another checkout, whose server runs as well")
    parser.add_argument("--clients", default="1,4,16,64", help="numbers of clients, with commas")
    parser.add_argument(
        "--requests",
        type=int,
        default=32,
        help="of a run, where clients are fewer: three of each, 8 at least, this at most",
    )
    parser.add_argument("--tokens", type=int, default=48, help="most of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=Path, help="JSON lines with a prompt each (default the six kinds' questions)")
    parser.add_argument("--llama-cpp", action="store_true", help="also llama.cpp's server, on Q8_0 weights as ours")
    parser.add_argument("--gguf", metavar="FILE", help="also llama.cpp's server, on this file; ours keeps --model")
    parser.add_argument("--llama-folder", metavar="FOLDER", help="where xllamacpp is, if it is not installed")
    parser.add_argument("--threads", type=int, default=None, help="of each system (default torch's number)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where load.json and load.png go")
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.clients.split(",")]
    prompts = read_prompts(arguments.prompts)
    if arguments.llama_cpp and not arguments.gguf:
        arguments.model = arguments.gguf = quantised(arguments.model, arguments.out or Path("runs/load"))
    runs: dict[tuple[str, int], list[Run]] = {}
    with ExitStack() as stack:
        systems = started(stack, arguments, max(counts))
        for turn in range(-1, arguments.rounds):  # the first one has everything loaded and compiled
            for count in counts:
                most = max(count, min(arguments.requests, 3 * count), 8) if turn >= 0 else count
                asked = [prompts[place % len(prompts)] for place in range(most)]
                for place in range(len(systems)):
                    name = [*systems][(place + turn) % len(systems)]
                    run = systems[name].run(asked, count, arguments.tokens if turn >= 0 else 8)
                    if turn >= 0:
                        runs.setdefault((name, count), []).append(run)
    outcomes = [summary(name, count, runs[name, count]) for count in counts for name in systems]
    table(outcomes)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        given = {name: str(value) for name, value in vars(arguments).items()}
        found = {"arguments": given, "outcomes": [asdict(one) for one in outcomes]}
        (arguments.out / "load.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        draw(outcomes, arguments.out / "load.png")


def read_prompts(file: Path | None) -> list[str]:
    if file is not None:
        return [json.loads(line)["prompt"] for line in file.read_text("utf-8").splitlines() if line.strip()]
    from specdec.engine.questions import find_questions, read_questions

    return [question.turns[0] for question in read_questions(find_questions("six_kinds"))]


def quantised(model: str, folder: Path) -> str:
    """A GGUF file of the model in Q8_0; that of an earlier run is taken as it is."""
    file = folder / f"{Path(model).name}-q8_0.gguf"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        made = file.with_suffix(".part.gguf")
        subprocess.run([sys.executable, "-m", "specdec", "quantize", model, "--out", str(made)], check=True)
        made.rename(file)
    return str(file)


@dataclass
class Run:
    """One run: seconds from the first request to the last answer, tokens of all answers, and seconds of its events."""

    seconds: float
    tokens: int
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


def _chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


# The systems.


class Http:
    """A server at an address."""

    def __init__(self, url: str, fields: dict[str, Any]) -> None:
        self._url, self._fields = url, fields

    def run(self, prompts: Sequence[str], clients: int, tokens: int) -> Run:
        fields = {"max_tokens": tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        bodies = [json.dumps({"messages": _chat(prompt), **fields, **self._fields}).encode() for prompt in prompts]
        began = perf_counter()
        answers = asyncio.run(load(self._url, bodies, clients))
        run = Run(perf_counter() - began, 0)
        for asked, arrivals in answers:
            times, count = read(arrivals)
            run.tokens += count
            run.first += [times[0] - asked] if times else []
            run.between += [after - before for before, after in pairwise(times)]
        return run


class Batch:
    """A process that has ``generate_batch`` decode what it is sent."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, prompts: Sequence[str], clients: int, tokens: int) -> Run:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([[_chat(prompt) for prompt in prompts], clients, tokens]) + "\n")
        self._process.stdin.flush()
        return Run(*json.loads(self._process.stdout.readline()))


_BATCH = """
import json, sys
from time import perf_counter
from specdec.engine.config import ModelOptions
from specdec.engine.load import load
model, drafter, threads = json.loads(sys.argv[1])
engine = load(ModelOptions(model=model, threads=threads), drafter)
print("ready", flush=True)
for line in sys.stdin:
    prompts, count, tokens = json.loads(line)
    began = perf_counter()
    results = engine.generate_batch(prompts, tokens, batch=count)
    print(json.dumps([perf_counter() - began, sum(len(one.token_ids) for one in results)]), flush=True)
"""

_LLAMA = """
import json, sys
file, folder, slots, threads = json.loads(sys.argv[1])
sys.path[:0] = [folder] if folder else []
import xllamacpp
options = xllamacpp.CommonParams()
options.model.path = file
options.n_ctx, options.n_parallel, options.kv_unified = 1024 * slots, slots, False
options.n_gpu_layers, options.warmup, options.verbosity, options.port = 0, True, -1, 0
options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(options)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


def started(stack: ExitStack, arguments: argparse.Namespace, most: int) -> dict[str, Http | Batch]:
    """All systems, ready; they end with the stack."""
    threads = [] if arguments.threads is None else ["--threads", str(arguments.threads)]

    def serve(drafter: str, checkout: Path = ROOT) -> Http:
        options = ["--model", arguments.model, "--drafter", drafter, "--max-num-seqs", str(most), *threads]
        command = ["-m", "specdec", "serve", "--port", "0", "--prefix-bytes", "0", "--request-timeout", "0", *options]
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}  # -P: and not this folder before it
        process = stack.enter_context(running(["-P", *command], stderr=subprocess.PIPE, env=environment))
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("http://"):
                stack.enter_context(drained(process.stderr))
                return Http(line.split()[0], {})
        raise SystemExit("the server did not start")

    def batch() -> Batch:
        given = json.dumps([arguments.model, arguments.drafter, arguments.threads])
        process = stack.enter_context(running(["-c", _BATCH, given], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit("generate_batch did not start")
        return Batch(process)

    def llama() -> Http:
        import torch

        given = json.dumps([arguments.gguf, arguments.llama_folder, most, arguments.threads or torch.get_num_threads()])
        process = stack.enter_context(running(["-c", _LLAMA, given], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("http://"):
                return Http(line.strip(), {"cache_prompt": False})
        raise SystemExit("llama.cpp's server did not start; is xllamacpp installed?")

    systems: dict[str, Http | Batch] = {SERVER: serve(arguments.drafter)}
    if arguments.before is None:
        systems[BATCH] = batch()
    else:
        systems[BEFORE] = serve(arguments.drafter, arguments.before)
    if arguments.plain:
        systems[f"{SERVER}, plain"] = serve("none")
    if arguments.gguf:
        systems[LLAMA] = llama()
    return systems


@contextmanager
def running(command: list[str], **pipes: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, *command], text=True, **pipes)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def drained(log: Any) -> Iterator[None]:
    """Have a log read, so that the process that writes it never waits."""
    from threading import Thread

    Thread(target=lambda: [None for _ in log], daemon=True).start()
    yield


# The client.

Arrivals = list[tuple[float, bytes]]


async def load(url: str, bodies: Sequence[bytes], clients: int) -> list[tuple[float, Arrivals]]:
    """When each request was sent, and what came of it when."""
    place, waiting = urlsplit(url), iter(bodies)
    answers: list[tuple[float, Arrivals]] = []

    async def client() -> None:
        for body in waiting:
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
            asked, arrivals = perf_counter(), Arrivals()
            writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            while data := await reader.read(1 << 16):
                arrivals.append((perf_counter(), data))
            writer.close()
            answers.append((asked, arrivals))

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


def read(arrivals: Arrivals) -> tuple[list[float], int]:
    """When each event with text came, and the number of tokens."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
    connection.send(h11.EndOfMessage())
    times, count, held = list[float](), 0, b""
    for moment, data in [*arrivals, (0.0, b"")]:
        connection.receive_data(data)
        while isinstance(event := connection.next_event(), h11.Response | h11.Data):
            if isinstance(event, h11.Response) and event.status_code != 200:
                raise SystemExit(f"the server answered {event.status_code}: {arrivals}")
            *lines, held = (held + bytes(getattr(event, "data", b""))).split(b"\n")
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                piece = json.loads(line[6:])
                if piece.get("usage"):
                    count = piece["usage"]["completion_tokens"]
                if piece["choices"] and piece["choices"][0]["delta"].get("content"):
                    times.append(moment)
    return times, count


# Results and their table.


@dataclass(frozen=True)
class Outcome:
    """Tokens a second are the median of the rounds; milliseconds are those of all events together, None where none.

    ``first_rounds``: each round's median of milliseconds to the first token; empty where there are none.
    """

    system: str
    clients: int
    tokens: int
    tokens_per_second: float
    rounds: list[float]
    first_rounds: list[float]
    first_p50: float | None
    first_p99: float | None
    between_p50: float | None
    between_p99: float | None


def summary(system: str, clients: int, runs: Sequence[Run]) -> Outcome:
    rounds = [run.tokens / run.seconds for run in runs]
    first, between = ([1000 * one for run in runs for one in getattr(run, name)] for name in ("first", "between"))
    tokens = sum(run.tokens for run in runs)
    firsts = [1000 * median(run.first) for run in runs if run.first]
    spread = *_percentiles(first), *_percentiles(between)
    return Outcome(system, clients, tokens, median(rounds), rounds, firsts, *spread)


def _percentiles(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The 50th and the 99th."""
    if len(values) < 2:
        return None, None
    cuts = quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]


def table(outcomes: Sequence[Outcome]) -> None:
    print(
        "\n| clients | | tokens/s | server : this | first token p50 / p99, ms | server : this | between p50 / p99, ms |"
    )
    print("|---|---|---|---|---|---|---|")
    for one in outcomes:
        server = next(other for other in outcomes if other.clients == one.clients and other.system == SERVER)
        share, first = "", ""
        if one is not server:
            share, first = _share(server.rounds, one.rounds), _share(server.first_rounds, one.first_rounds)
        figures = [f"{one.tokens_per_second:.1f}", share, _pair(one.first_p50, one.first_p99), first]
        figures.append(_pair(one.between_p50, one.between_p99))
        print(f"| {one.clients} | {one.system} | {' | '.join(figures)} |")


def _share(own: Sequence[float], others: Sequence[float]) -> str:
    """The server's share of each round, whose runs stand next to each other."""
    if len(own) != len(others) or len(own) < 2:
        return ""
    low, middle, high = interval([math.log(one / other) for one, other in zip(own, others, strict=True)])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _pair(one: float | None, other: float | None) -> str:
    return "" if one is None or other is None else f"{one:.1f} / {other:.1f}"


def draw(outcomes: Sequence[Outcome], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    wanted = (
        ("tokens_per_second", "tokens per second"),
        ("first_p50", "first token, median, ms"),
        ("between_p99", "between events, 99th percentile, ms"),
    )
    for axis, (name, title) in zip(axes, wanted, strict=True):
        for system in dict.fromkeys(one.system for one in outcomes):
            points = [(one.clients, getattr(one, name)) for one in outcomes if one.system == system]
            points = [(clients, value) for clients, value in points if value is not None]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=system)
        axis.set(title=title, xlabel="clients", xscale="log", ylim=(0, None))
        counts = sorted({one.clients for one in outcomes})
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.minorticks_off()
    axes[0].legend()
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"\n{time.perf_counter() - began:.0f} s in all")
