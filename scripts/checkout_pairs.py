"""Speed of this checkout as a multiple of another one's, or of drafters as one of plain decoding, by interleaved pairs.

    git worktree add ../before COMMIT
    python scripts/checkout_pairs.py ../before --model smollm2 --drafters none,auto --rows 1,2,4,8,16
    SPECDEC_CFLAGS="-march=x86-64-v3" python scripts/checkout_pairs.py ../before --model tiny
    python scripts/checkout_pairs.py --model tiny --drafters kangaroo,medusa   # each beside none

Each checkout has a process of its own, and only one of them runs at a time. In every pair both do the same task, and
which comes first alternates. A figure is the geometric mean of the pairs' ratios, seconds before over seconds now, with
its 90 % interval (Student's t on the logarithms): above 1 this checkout is faster. Seconds are those of a token, or of
a forward of some rows. The last column says whether the first text is the same in both.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = (
    "import unittest\n\n\nclass TestStack(unittest.TestCase):\n    def test_push(self):\n",
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n",
)
REPEATS = 5  # forwards of a number of rows behind each other; the median counts


def serve(tasks: IO[str], answers: IO[str]) -> None:
    """What a checkout's process does: one JSON task a line, one answer a line."""
    import torch

    from specdec import Engine, SamplingParams

    setup = json.loads(tasks.readline())
    torch.set_num_threads(setup["threads"])
    how = {name: setup[name] for name in ("dtype", "execution")}
    plain = Engine.from_pretrained(setup["model"], drafter="none", **how)
    engines = {name: plain.with_drafter(name) for name in setup["drafters"]}
    target = plain.target

    def decode(drafter: str, temperature: float) -> tuple[float, Any]:
        seconds, texts = 0.0, []
        for seed, prompt in enumerate(PROMPTS):
            sampling = SamplingParams(temperature=temperature, seed=seed)
            out = engines[drafter].generate(prompt, setup["tokens"], sampling)
            seconds += out.stats.seconds.decode / out.stats.new_tokens / len(PROMPTS)
            texts.append(out.token_ids)
        return seconds, texts

    texts: dict[tuple[int, int], Any] = {}  # by rows and tokens before them: filled once, so that pairs follow closely

    def forward(rows: int, behind: int) -> tuple[float, Any]:
        from tests import seam  # of the checkout, whose way to make a forward it knows

        ids = [5 + i * 7919 % (target.vocab_size - 10) for i in range(behind + rows)]
        with torch.inference_mode(), target.active():
            if (rows, behind) not in texts:
                text = seam.text(target, capacity=behind + rows, rows=max(rows, behind))
                texts[rows, behind] = text.fill(ids[:behind], behind)
            own, times = texts[rows, behind], []
            for _ in range(REPEATS):
                begun = time.perf_counter()
                own.run(ids[behind:])
                times.append(time.perf_counter() - begun)
        return statistics.median(times), None

    told = {"runner": target.options["runner"], "invariant": target.batch_invariant}
    print(json.dumps(told), file=answers, flush=True)
    for line in tasks:
        name, *given = json.loads(line)
        print(json.dumps({"decode": decode, "forward": forward}[name](*given)), file=answers, flush=True)


class Checkout:
    """A checkout's process."""

    def __init__(self, root: Path, setup: dict[str, Any]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root), "SPECDEC_PAIRS_WORKER": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.told = self.ask(setup)

    def ask(self, task: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(task), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit("a checkout's process has ended; what it says is above")
        return json.loads(answer)


def interval(logs: list[float]) -> tuple[float, float, float]:
    """Geometric mean and 90 % interval of ratios, from their logarithms."""
    from scipy.stats import t

    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    reach = t.ppf(0.95, len(logs) - 1) * error
    return math.exp(mean - reach), math.exp(mean), math.exp(mean + reach)


def main(
    before: Annotated[
        Path | None,
        typer.Argument(
            help="The other checkout's folder; without one, drafters are set beside none.", exists=True, file_okay=False
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="A model, as specdec generate takes it.")] = "tiny",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    execution: Annotated[str, typer.Option(help="auto, native, fused or modules.")] = "auto",
    drafters: Annotated[str, typer.Option(help="Drafters to decode with.")] = "none,auto",
    temperatures: Annotated[str, typer.Option(help="Temperatures to decode at.")] = "0",
    rows: Annotated[str, typer.Option(help="Rows of forwards.")] = "1,2,3,4,5,6,7,8,12,16",
    behind: Annotated[int, typer.Option(help="Tokens in the cache of these forwards.")] = 128,
    tokens: Annotated[int, typer.Option(help="New tokens of a text.")] = 128,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    pairs: Annotated[int, typer.Option(help="Pairs.", min=2)] = 9,
) -> None:
    """Compare this checkout with another one, or its drafters with plain decoding."""
    names = [name for name in drafters.split(",") if name]
    how = {"model": model, "dtype": dtype, "execution": execution, "threads": threads}
    setup = {**how, "drafters": ["none", *names], "tokens": tokens}
    tasks: list[tuple[str, tuple[list[Any], list[Any]]]] = []  # what is done before, and now
    for name, heat in product(names, map(float, temperatures.split(","))):
        now = ["decode", name, heat]
        tasks.append((f"{name}, T = {heat:g}", (["decode", "none", heat] if before is None else now, now)))
    this = Checkout(ROOT, setup)
    both = [this, this]
    if before is not None:
        tasks += [(f"{count} rows", (["forward", int(count), behind],) * 2) for count in rows.split(",") if count]
        both[0] = Checkout(before.resolve(), setup)
    table = Table("task", "seconds before", "seconds now", "before / now", "90 %", "texts")
    for name, task in tqdm(tasks, disable=None):
        found: list[list[Any]] = [[], []]
        for pair in range(-1, pairs):  # the first one warms up
            for place in (0, 1) if pair % 2 else (1, 0):
                answer = both[place].ask(task[place])
                if pair >= 0:
                    found[place].append(answer)
        logs = [math.log(old[0] / new[0]) for old, new in zip(*found, strict=True)]
        low, middle, high = interval(logs)
        medians = [f"{statistics.median(seconds for seconds, _ in one):.4g}" for one in found]
        same = "" if found[0][0][1] is None else "equal" if found[0][0][1] == found[1][0][1] else "differ"
        table.add_row(name, *medians, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", same)
    console = Console(width=120)
    console.print(f"{model}, {dtype}, {threads} threads, {pairs} pairs; before {both[0].told}, now {both[1].told}")
    console.print(table)


if __name__ == "__main__":
    if os.environ.get("SPECDEC_PAIRS_WORKER"):
        serve(sys.stdin, sys.stdout)
    else:
        typer.run(main)
