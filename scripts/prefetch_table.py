"""This processor's line of the table in ``specdec/native/processors.h``: how its products prefetch best.

    python scripts/prefetch_table.py --model smollm2 --blocks FILE.gguf

Forwards of 1 to 8 rows are timed with and without prefetch instructions and by one stream of weights and two, in turn,
and those of quantised blocks with and without the mark that they are needed once. The least time of each counts. On a
machine with tiles, which need no such line, take another class of arithmetic first:
``SPECDEC_CFLAGS="-mno-amx-tile -mno-amx-bf16 -mno-amx-int8"``.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from specdec import Engine
from specdec.native.library import library
from specdec.step.step_io import StepInput

NEVER = 1 << 30
Ways = dict[str, tuple[int, int, int]]
WAYS: Ways = {
    "nothing, one stream": (NEVER, 0, 0),
    "nothing, two": (NEVER, 6, 0),
    "one stream": (1, 0, 0),
    "two streams": (1, 6, 0),
}
MARKS: Ways = {"for the caches": (4, 0, 0), "needed once": (4, 0, 1)}
ROWS = (1, 2, 3, 4, 5, 6, 8)


def processor() -> str:
    """Vendor, family and model, as the table has them."""
    found = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    told = {name.strip(): value.strip() for name, value in found.items()}
    return f'"{told["vendor_id"]}", {told["cpu family"]}, {told["model"]}, {told["model"]}'


def least(model: str, dtype: str, ways: Ways, repeats: int) -> dict[tuple[str, int], float]:
    """The least seconds of a forward, by way and rows."""
    target = Engine.from_pretrained(model, drafter="none", dtype=dtype, execution="native").target
    best: dict[tuple[str, int], float] = {}
    with torch.inference_mode(), target.active():
        cache = target.new_cache(capacity=16, rows=16)
        for rows in ROWS:
            for _ in range(repeats):
                for name, way in ways.items():
                    library().specdec_prefetch(*way)
                    step = StepInput.of(cache, range(5, 5 + rows))
                    begun = time.thread_time()
                    target.forward(step)
                    seconds = time.thread_time() - begun
                    best[name, rows] = min(seconds, best.get((name, rows), seconds))
            print(f"{rows} rows: " + ", ".join(f"{name} {best[name, rows] * 1e3:.2f} ms" for name in ways), flush=True)
    return best


def main(
    blocks: Annotated[str, typer.Option(help="A model in quantised blocks, much larger than the caches.")],
    model: Annotated[str, typer.Option(help="A model much larger than the caches.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(help="Forwards by each way.")] = 15,
) -> None:
    """Measure, and print the line."""
    torch.set_num_threads(1)
    if library().specdec_tiles():
        raise typer.BadParameter("products go by tiles here; see this script's first lines")
    best, marked = least(model, dtype, WAYS, repeats), least(blocks, dtype, MARKS, repeats)
    asks = {rows: min(WAYS, key=lambda name: best[name, rows]) for rows in ROWS}
    prefetches = min((rows for rows in ROWS if WAYS[asks[rows]][0] == 1), default=NEVER)
    twins = max((rows for rows in ROWS if rows <= 6 and WAYS[asks[rows]][1]), default=0)
    once = min(MARKS, key=lambda name: sum(marked[name, rows] for rows in ROWS))
    print(f"    {{{processor()}, {prefetches}, {twins}, {MARKS[once][2]}}},")


if __name__ == "__main__":
    typer.run(main)
