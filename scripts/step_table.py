"""Whole steps by every runner: the tables of docs/speed.md, as Markdown.

    python scripts/step_table.py                    # about five minutes, on a machine that does nothing else
    python scripts/step_table.py --only tiny        # the lines whose name holds this word

A step is all layers and the head. Each runner's is timed for two seconds; the least of many counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from specdec import TransformersTarget
from specdec.bench.environment import caption, describe_environment
from specdec.bench.shapes import random_model
from specdec.cost import measure
from specdec.runners import EXECUTIONS

NAMES = {"tiny": "embedded", "smollm2": "SmolLM2-135M", "0.5b": "0.5 B shape"}
LINES = [
    (model, dtype, threads) for model in ("tiny", "smollm2") for dtype in ("float32", "bfloat16") for threads in (1, 2)
]
LINES += [("0.5b", "float32", 1), ("0.5b", "bfloat16", 1)]
MANY = (1, 4, 8, 16, 32, 64)


def target_of(model: str, dtype: str, execution: str) -> TransformersTarget:
    """The model, loaded anew, as a runner may lay out its weights for itself."""
    if model == "0.5b":
        made = random_model(model, getattr(torch, dtype))
        return TransformersTarget(made, execution=execution, owned=True)
    return TransformersTarget.from_pretrained(model, dtype=dtype, execution=execution)


def steps(target: TransformersTarget, rows: Sequence[int], length: int, seconds: float) -> list[float]:
    """Seconds of steps of so many rows after ``length`` tokens."""
    return list(measure(target, rows=rows, lengths=(length,), seconds=seconds).seconds[0])


def whole_steps(only: str, seconds: float) -> Iterator[str]:
    """A line for each model, dtype and number of threads: milliseconds of one row / of eight rows by runner."""
    runners = EXECUTIONS[1:]
    yield f"| model, dtype, threads | {' | '.join(f'`{name}`' for name in runners)} |"
    yield f"|---|{'---:|' * len(runners)}"
    for model, dtype, threads in LINES:
        if only in model:
            torch.set_num_threads(threads)
            found = [steps(target_of(model, dtype, name), (1, 8), 256, seconds) for name in runners]
            cells = [" / ".join(f"{1e3 * one:#.3g}".rstrip(".") for one in times) for times in found]
            yield f"| {NAMES[model]}, {dtype}, {threads} | {' | '.join(cells)} |"


def many_rows(model: str, seconds: float) -> Iterator[str]:
    """For each dtype, steps of many rows in steps of one, natively on one thread."""
    torch.set_num_threads(1)
    for dtype in ("float32", "bfloat16"):
        times = steps(target_of(model, dtype, "native"), MANY, 128, 10 * seconds)
        shown = ", ".join(f"{taken / times[0]:.2f}" for taken in times)
        yield f"{NAMES[model]}, {dtype}, {', '.join(map(str, MANY))} rows in steps of one row: {shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="models whose name holds this word")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each runner is timed")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for line in whole_steps(options.only, options.seconds):
        print(line, flush=True)
    for model in ("tiny", "smollm2"):
        if options.only in model:
            print("", *many_rows(model, options.seconds), sep="\n")
    print("\n" + caption(describe_environment(torch.device("cpu"))))


if __name__ == "__main__":
    main()
