"""Strong scaling of ``parallel="rows"``, simulated: what more processes would bring, from what one of them takes.

    python scripts/parallel_scaling.py --out docs/figures/parallel_scaling.md     # the embedded model, about a minute

One process decodes, and its trees and accepted rows are kept. For 1, 2, 4 and 8 ranks each tree is split as
``specdec.parallel`` splits it, what other ranks accepted being run once more. A step then takes as long as the rank
with the most rows, by the measured cost curve T(rows), and one collective of the size of a step's, measured between
processes of this machine. **Simulated**: no two ranks share a memory or a processor here, and drafting, which every
rank does, is left out.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from specdec import Context, Draft, DraftSession, Engine, Observation, SamplingParams
from specdec.bench.environment import caption, describe_environment
from specdec.costs.curve import CostCurve
from specdec.costs.measuring import measure
from specdec.drafter import DrafterWrapper
from specdec.engine.questions import build_prompt, find_questions, read_questions, select
from specdec.parallel.split import split
from specdec.settings.files import write_text

Step = tuple[Sequence[int], list[int]]  # parents of the tree, accepted rows
RANKS = (1, 2, 4, 8)
WORDS = 2 + 128 + 128  # of a step's message
SETTINGS: dict[str, Any] = {
    "lookahead (15, 5, 15)": {"name": "lookahead", "window": 15, "ngram": 5, "guesses": 15},
    "token recycling, 80 rows": {"name": "token_recycling", "rows": 80},
    "prompt lookup": "prompt_lookup",
}


class Noted(DrafterWrapper):
    """A drafter whose trees are kept, with what became of them."""

    needs_observe = True

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.needs_observe, self.told = True, inner.needs_observe or bool(inner.taps)
        self.steps: list[Step] = []

    def start(self, context: Context) -> DraftSession:
        return NotedSession(self, self.inner.start(context))


class NotedSession:
    def __init__(self, noted: Noted, inner: DraftSession) -> None:
        self._noted, self._inner = noted, inner

    def propose(self, row_budget: int) -> Draft:
        return self._inner.propose(row_budget)

    def observe(self, seen: Observation) -> None:
        if seen.draft is not None:
            self._noted.steps.append((seen.draft.parents, list(seen.path)))
        if self._noted.told:
            self._inner.observe(seen)


def simulate(steps: Sequence[Step], ranks: int, seconds: Callable[[int], float], collective: float) -> float:
    """Seconds of these steps, one after the other."""
    lags, total = [0] * ranks, 0.0
    for parents, path in steps:
        shares = split(parents, lags)
        total += seconds(max(lag + len(share) for lag, share in zip(lags, shares, strict=True)))
        total += collective if ranks > 1 else 0.0
        lags = [len(path) - sum(row in share for row in path) for share in map(set, shares)]
    return total


def _exchange(rank: int, ranks: int, port: int, found: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    own = torch.zeros(WORDS, dtype=torch.int32)
    all_of_them = list(torch.zeros(ranks, WORDS, dtype=torch.int32).unbind(0))
    times = []
    for _ in range(300):
        dist.barrier()
        began = perf_counter()
        dist.all_gather(all_of_them, own)
        times.append(perf_counter() - began)
    if rank == 0:
        found.value = statistics.median(times)
    dist.destroy_process_group()


def collective_seconds(ranks: int) -> float:
    """The median time of a step's collective between so many processes of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = torch.multiprocessing.get_context("spawn").Value("d", 0.0)
    torch.multiprocessing.spawn(_exchange, (ranks, port, found), nprocs=ranks)  # type: ignore[no-untyped-call]
    return float(found.value)


def rows_of_table(
    noted: dict[str, list[Step]], curve: CostCurve, length: int, collectives: dict[int, float]
) -> list[str]:
    """Per drafter: tokens and rows of a step, and for each number of ranks the speedup over plain decoding."""
    seconds = curve.at(length, 256)
    lines = []
    for label, steps in noted.items():
        tokens = sum(len(path) for _, path in steps)
        rows = sum(len(parents) for parents, _ in steps)
        plain = tokens * seconds[1]
        gains = [plain / simulate(steps, n, seconds.__getitem__, collectives[n]) for n in RANKS]
        cells = " | ".join(f"{gain:.2f} ({gain / gains[0]:.2f})" for gain in gains)
        lines.append(f"| {label} | {rows / len(steps):.0f} | {tokens / len(steps):.2f} | {cells} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--questions", default="tiny")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--collective-us", type=float, help="microseconds of a collective, instead of measuring it")
    parser.add_argument("--out", type=Path, default=Path("runs/parallel_scaling.md"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engine = Engine.from_pretrained(args.model, dtype=args.dtype, device=args.device, policy="off")
    questions = select(read_questions(find_questions(args.questions)), (), args.limit)
    prompts = [engine.encode(build_prompt(question, (), "auto", engine.tokenizer)) for question in questions]
    noted: dict[str, list[Step]] = {}
    for label, spec in SETTINGS.items():
        drafter = Noted(engine.with_drafter(spec).drafter)
        for prompt in prompts:
            engine.with_drafter(drafter).generate(
                prompt, args.max_new_tokens, SamplingParams(temperature=args.temperature)
            )
        noted[label] = drafter.steps
    length = int(statistics.median(len(prompt) for prompt in prompts)) + args.max_new_tokens // 2
    curve = measure(engine.target, lengths=(length,))
    given = args.collective_us
    collectives = {1: 0.0, **{n: collective_seconds(n) if given is None else 1e-6 * given for n in RANKS[1:]}}
    head = [
        "| drafter | rows/step | tokens/step | " + " | ".join(f"{n} rank{'s' * (n > 1)}" for n in RANKS) + " |",
        "|---|--:|--:|" + "--:|" * len(RANKS),
    ]
    environment = describe_environment(engine.target.device)
    costs = ", ".join(f"{row}: {1e3 * s:.2f}" for row, s in zip(curve.rows, curve.seconds[0], strict=True))
    sent = ", ".join(f"{n}: {1e6 * collectives[n]:.0f}" for n in RANKS[1:])
    text = [
        "Simulated: times plain decoding's speed, and in brackets times one rank's.",
        "",
        f"By the measured cost of a step on one process ({environment['cpu']}, threads: {args.threads}):",
        "",
        *head,
        *rows_of_table(noted, curve, length, collectives),
        "",
        f"T(rows), ms: {costs}<br>",
        f"one collective of {4 * WORDS} bytes, us by ranks: {sent} ({os.cpu_count()} cores)<br>",
        "",
        f"{args.model}, T={args.temperature:g}, {len(prompts)} questions, {args.max_new_tokens} new tokens | "
        f"{caption(environment)}<br>",
        f"`{shlex.join(['python', *sys.argv])}`\n",
    ]
    write_text(args.out, "\n".join(text))
    print(*text, sep="\n")


if __name__ == "__main__":
    main()
