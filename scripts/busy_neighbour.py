"""Whether drafters lose beside a busy neighbour, or after it is gone: each against plain decoding, in turn.

    python scripts/busy_neighbour.py --model smollm2 --dtype bfloat16 --threads 1

Questions are decoded plainly and by each drafter under the default policy, in turn, while nothing runs beside them,
then beside a loop that computes, after it, beside one that reads memory, and after that. A neighbour runs on another
thread of the same core where the system tells which that is, else on another processor. Engines are their own, so none
learns from another what forwards take, and go through all phases, as in a service. A ratio is the time of a plain run
just before and just after, by the drafter's own, prompts aside; the table has the median of the questions', and in
brackets that of all their time, in which is what it took to notice a change. It ends with 1 if a median is below
``--least``, or if a text is not plain decoding's.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

DRAFTERS = "lookahead,medusa,token_recycling,auto,kangaroo,suffix_automaton,prompt_lookup"
LOOPS = {
    "busy": "n = 0\nwhile True: n = n * 3 + 1 & 0xFFFFFFFF",
    "memory": "import numpy as np\na = np.zeros(1 << 26)\nb = a + 1\nwhile True: np.copyto(a, b)",
}
PHASES = ("none", "busy", "after", "memory", "after")


def places(threads: int) -> tuple[set[int], int]:
    """Processors for the decoding, and the one of the neighbour."""
    mine = sorted(os.sched_getaffinity(0))
    told = Path(f"/sys/devices/system/cpu/cpu{mine[0]}/topology/thread_siblings_list")
    siblings = set(numbers(told.read_text())) if told.exists() else set()
    beside = [one for one in mine[1:] if one in siblings] or mine[threads : threads + 1] or mine[-1:]
    return {one for one in mine if one != beside[0]} or {mine[0]}, beside[0]


def numbers(listed: str) -> Iterator[int]:
    """Those of a list like "0,4-6"."""
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


@contextmanager
def neighbour(kind: str, place: int) -> Iterator[None]:
    """A process that runs such a loop on that processor, if it is one."""
    if kind not in LOOPS:
        yield
        return
    die = "import ctypes, signal\nctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"  # with the one that began it
    process = subprocess.Popen([sys.executable, "-c", die + LOOPS[kind]])
    try:
        os.sched_setaffinity(process.pid, {place})
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--drafters", default=DRAFTERS)
    parser.add_argument("--questions", default="six_kinds")
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--limit", type=int, default=6, help="questions of a phase")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--least", type=float, default=0.98)
    options = parser.parse_args()
    own, beside = places(options.threads)
    os.sched_setaffinity(0, own)

    import torch

    from specdec import Engine, SamplingParams
    from specdec.engine.questions import build_prompt, find_questions, read_questions, select

    torch.set_num_threads(options.threads)
    plain = Engine.from_pretrained(options.model, "none", dtype=options.dtype)
    names, phases = options.drafters.split(","), options.phases.split(",")
    questions = select(read_questions(find_questions(options.questions)), (), options.limit * len(phases))
    prompts = [build_prompt(question, (), "auto", plain.tokenizer) for question in questions]
    engines = {name: Engine(plain.target, plain.tokenizer, name, policy="acceptance") for name in names}
    plain.generate(prompts[0], 16)

    def timed(engine: Engine, prompt: Any, number: int) -> tuple[float, Sequence[int], float]:
        sampling = SamplingParams(temperature=options.temperature, acceptance="match", seed=number)
        found = engine.generate(prompt, options.max_new_tokens, sampling)
        return found.stats.seconds.decode, found.token_ids, found.stats.rows_per_step

    print(f"{options.model}, {options.dtype}, {options.threads} threads on {own}, the neighbour on {beside}")
    lost = False
    for phase, kind in enumerate(phases):
        taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
        with neighbour(kind, beside):
            for number, prompt in enumerate(prompts[phase :: len(phases)]):
                before, truth, _ = timed(plain, prompt, number)
                for name, engine in engines.items():
                    seconds, text, rows = timed(engine, prompt, number)
                    after, _, _ = timed(plain, prompt, number)
                    taken[name].append(((before + after) / 2, seconds, rows))
                    before = after
                    if text != truth:
                        lost = True
                        print(f"{name}: question {number}'s text beside {kind!r} is not plain decoding's")
        for name, runs in taken.items():
            ratio = median(one / other for one, other, _ in runs)
            whole = sum(one for one, _, _ in runs) / sum(other for _, other, _ in runs)
            lost |= ratio < options.least
            each = " ".join(f"{one / other:.2f}" for one, other, _ in runs)
            rows = sum(rows for _, _, rows in runs) / len(runs)
            mark = "  LOSES" if ratio < options.least else ""
            print(f"{kind:7} {name:17} {ratio:5.3f} ({whole:5.3f})  rows {rows:4.1f}  {each}{mark}", flush=True)
    sys.exit(lost)


if __name__ == "__main__":
    main()
