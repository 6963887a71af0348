"""This machine's rows of the table of shares in docs/speed.md: least times by the cores' limits, over times taken.

    python scripts/shares_table.py --model smollm2 --model FILE.gguf     # on a quiet machine

It measures as ``specdec tune`` does, natively and with kernels compiled for AVX2, but times the library's call alone:
layers, head and the search for the likeliest token, without Python and torch around them. Limits and forwards are
measured in turn, as what a core reads changes from minute to minute, and medians of the rounds' figures are written.
Rows of the same processor, arithmetic and model are replaced, all others stay. A model whose share is above 1 is said
and not written, and the script exits with 1: its weights stay in a cache, or other work ran meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

ROWS = (1, 2, 3, 4, 6, 8, 16)
ROUNDS = 5
PAGE = Path(__file__).parents[1] / "docs/speed.md"
MARKS = "<!-- shares_table -->\n", "<!-- end of shares -->"
AVX2 = "-march=x86-64-v3"
WORKER = "SPECDEC_SHARES_WORKER"
TITLES = ("processor", "arithmetic", "model", "GB/s", "Gop/s", *(f"{n} row{'s' * (n > 1)}" for n in ROWS))


class CallClock:
    """A clock that stands still but while the function runs, in whose place ``timed`` is called."""

    def __init__(self, function: Callable[..., Any], clock: Callable[[], float] = perf_counter) -> None:
        self._function, self._clock, self._spent = function, clock, 0.0

    def __call__(self) -> float:
        return self._spent

    def timed(self, *arguments: Any) -> Any:
        """The function's result."""
        began = self._clock()
        found = self._function(*arguments)
        self._spent += self._clock() - began
        return found


def measured(model: str, dtype: str, threads: int, length: int, seconds: float) -> list[str]:
    """A row of the table. Raises SystemExit where a share is above 1, or where not all rows were measured."""
    import torch

    from specdec import Engine
    from specdec.costs.machine import processor
    from specdec.costs.measuring import measure
    from specdec.costs.shares import Shares, shares
    from specdec.native import limits
    from specdec.native.library import arithmetic, library

    torch.set_num_threads(threads)
    target = Engine.from_pretrained(model, drafter="none", dtype=dtype, execution="native").target
    if (native := library()) is None:
        sys.exit("the native library is not there; `specdec info` says why")
    clock = CallClock(native.specdec_run_layers)
    native.specdec_run_layers = clock.timed
    rounds = list[tuple[Sequence[float], Shares]]()  # times, and what follows
    for _ in range(ROUNDS):
        reading = limits.measure((), threads).reading
        curve = measure(target, rows=ROWS, lengths=(length,), seconds=seconds, clock=clock)
        found = shares(curve, target, reading=reading)
        if found is None:
            sys.exit(f"{model} has no limits here: no native layers run it")
        if len(curve.rows) < len(ROWS):
            sys.exit(f"{model}: --seconds {seconds:g} are too few to time forwards of up to {ROWS[-1]} rows; give more")
        rounds.append((curve.seconds[0], found))
    taken = [median(own) for own in zip(*(times for times, _ in rounds), strict=True)]
    parts = [median(own) for own in zip(*(found.of[0] for _, found in rounds), strict=True)]
    if max(parts) > 1:
        highest = max((own for _, own in rounds), key=lambda own: max(own.of[0]))
        sys.exit(f"{model}, {arithmetic()}: {highest.describe()}")
    by = ", ".join(
        f"{median(own.limits.multiplying[one] for _, own in rounds) / 1e9:.0f} ({one})" for one in found.multiplied
    )
    read = f"{median(own.limits.reading for _, own in rounds) / 1e9:.1f}"
    cells = [f"{time * 1e3:.1f} ms: {share:.2f}" for time, share in zip(taken, parts, strict=True)]
    name = f"{Path(model).name}, {dtype}, {threads} thread{'s' * (threads > 1)}, after {length}"
    return [processor(torch.device("cpu")), str(arithmetic()), name, read, by, *cells]


def merged(page: str, rows: list[list[str]]) -> str:
    """The page with these rows in place of those of the same processor, arithmetic and model."""
    begin, end = page.index(MARKS[0]) + len(MARKS[0]), page.index(MARKS[1])
    table = {}
    for line in page[begin:end].splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        table[tuple(cells[:3])] = cells
    table.update({tuple(row[:3]): row for row in rows})
    lines = ["| " + " | ".join(TITLES) + " |", "|---|---|---|" + "---:|" * (len(TITLES) - 3)]
    lines += ["| " + " | ".join(table[key]) + " |" for key in sorted(table)]
    return page[:begin] + "\n".join(lines) + "\n" + page[end:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="smollm2 unless given; may be given several times")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--length", type=int, default=128, help="tokens in the cache")
    parser.add_argument("--seconds", type=float, default=4, help="about how long to measure forwards in a round")
    options = parser.parse_args()
    if WORKER in os.environ:
        row = measured(options.model[0], options.dtype, options.threads, options.length, options.seconds)
        print(json.dumps(row))
        return 0
    rows, failed = list[list[str]](), 0
    for model in options.model or ["smollm2"]:
        for flags in (os.environ.get("SPECDEC_CFLAGS", ""), AVX2):
            given = [f"--{name}={getattr(options, name)}" for name in ("dtype", "threads", "length", "seconds")]
            done = subprocess.run(
                [sys.executable, __file__, f"--model={model}", *given],
                env={**os.environ, WORKER: "1", "SPECDEC_CFLAGS": flags}, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            if done.returncode:  # it has said why
                failed = 1
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            rows += [row] if row not in rows else []
            print(" | ".join(row), flush=True)
    PAGE.write_text(merged(PAGE.read_text("utf-8"), rows), "utf-8")
    return failed


if __name__ == "__main__":
    sys.exit(main())
