"""What Python spends on a step of a sequence: by the clock, and without what it waits for.

    python scripts/host_time.py --model smollm2 --dtype bfloat16 --threads 2 --batch 1,2,4,8

Questions are decoded, and what the model computed is kept; then the same texts are decoded from that, with nothing
computed in between. Both times are what is outside of models' passes, per step of a sequence, as in ``specdec bench``.
A forward drives code and objects out of the processor's caches, so that by the clock Python waits for memory after it.
Played back it does not. Rows are chosen by a measured curve that nothing bends meanwhile, so that both runs take the
same steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specdec import Engine
from specdec.engine.questions import build_prompt, find_questions, read_questions, select
from specdec.errors import SpecdecError
from specdec.step import forward_passes
from specdec.target import Target, TargetOutput


class Played:
    """A target's forwards and drafters' passes: kept while they are run, and given again in that order."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._outputs: list[tuple[int, TargetOutput]] = []
        self._answers: list[list[Any]] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what is computed."""
        forward, together = self._target.forward, forward_passes.run_together

        def run(block: Any, **options: Any) -> TargetOutput:
            output = forward(block, **options)
            self._outputs.append((block.rows, output))
            return output

        def run_together(asked: Sequence[Any]) -> list[Any]:
            with patch.object(self._target, "forward", forward):  # what a pass runs through the target is its own
                answers = together(asked)
            self._answers.append(answers)
            return answers

        with self._patched(run, run_together):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Give what was kept."""
        outputs, answers = iter(self._outputs), iter(self._answers)

        def run(block: Any, **options: Any) -> TargetOutput:
            rows, output = next(outputs, (0, None))
            if output is None or rows != block.rows:
                sys.exit(
                    f"error: a forward of {block.rows} rows had {rows} before; these drafts differ from run to run"
                )
            return output

        with self._patched(run, lambda asked: next(answers)):
            yield

    @contextmanager
    def _patched(self, run: Any, run_together: Any) -> Iterator[None]:
        with (
            patch.object(self._target, "forward", run),
            patch.object(forward_passes, "run_together", run_together),
        ):
            yield


def host_time(
    engine: Engine, prompts: Sequence[Any], options: argparse.Namespace, size: int
) -> tuple[float, list[list[int]]]:
    """Seconds outside of models' passes and of prompts, per step of a sequence; and the texts."""
    began = perf_counter()
    if size > 1:
        done = engine.generate_batch(prompts, options.max_new_tokens, batch=size)
    else:
        done = [engine.generate(prompt, options.max_new_tokens) for prompt in prompts]
    taken = perf_counter() - began
    spent = [generation.stats.seconds for generation in done]
    models = sum(own.prefill + own.target + own.passes for own in spent)
    steps = sum(generation.stats.steps for generation in done)
    return (taken - models) / steps, [generation.token_ids for generation in done]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--drafters", default="none,auto")
    parser.add_argument("--batch", default="1,2,4,8")
    parser.add_argument("--limit", type=int, default=16, help="questions")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    try:
        sizes = [int(number) for number in options.batch.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        parser.error(f"--batch is {options.batch!r}; it must be sizes of at least 1, such as 1,2,4,8")
    for name in ("threads", "limit", "max_new_tokens", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    try:
        measure(options, sizes)
    except SpecdecError as error:
        parser.error(str(error))


def measure(options: argparse.Namespace, sizes: Sequence[int]) -> None:
    """Print both times for each size and drafter."""
    torch.set_num_threads(options.threads)
    plain = Engine.from_pretrained(options.model, dtype=options.dtype, drafter="none")
    questions = select(read_questions(find_questions("six_kinds")), (), options.limit)
    prompts = [build_prompt(question, [], "auto", plain.tokenizer) for question in questions]
    costs = plain.with_drafter("prompt_lookup").costs
    for size in sizes:
        for name in options.drafters.split(","):
            times: dict[str, list[float]] = {"by the clock": [], "played back": []}
            for _ in range(options.repeats):
                # Each run has an engine of its own, as drafters know more after the first.
                played, texts = Played(plain.target), list[Any]()
                for side, part in zip(times, (played.kept, played.again), strict=True):
                    engine = Engine(plain.target, plain.tokenizer, name, costs=costs)
                    with part():
                        seconds, text = host_time(engine, prompts, options, size)
                    times[side].append(seconds)
                    texts.append(text)
                assert texts[0] == texts[1]
            told = ", ".join(f"{side} {1e6 * statistics.median(seconds):.0f}" for side, seconds in times.items())
            print(f"{name}, {size} at once: {told} us")


if __name__ == "__main__":
    main()
