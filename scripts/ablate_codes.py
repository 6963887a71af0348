"""What twelve bits of a bfloat16 weight save: forwards of a model with and without codes, in turn in one process.

    python scripts/ablate_codes.py --model smollm2 --dtype bfloat16 --threads 1

Native layers, on a CPU that reads such codes. Prints median milliseconds of forwards by their rows, after 256 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    from specdec import TransformersTarget
    from specdec.block import Block
    from specdec.native.library import library
    from specdec.runners.linear import PackedWeight

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,2,4,6,8,16,32,64")
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = sorted(int(count) for count in options.rows.split(","))
    if (native := library()) is None or not native.specdec_codes():
        sys.exit("error: no weights in twelve bits here: that needs a C compiler and a CPU with AVX-512")
    targets = {}
    layouts = {"sixteen bits": patch.object(PackedWeight, "_code", return_value=None), "twelve bits": nullcontext()}
    for name, layout in layouts.items():
        with layout:
            target = TransformersTarget.from_pretrained(options.model, dtype=options.dtype, execution="native")
        with target.active():
            cache = target.new_cache(capacity=256 + rows[-1], rows=rows[-1])
            cache.reserve(256 + rows[-1])
            for group in cache.groups:
                group.keys.zero_()
                group.values.zero_()
        cache.length = 256
        targets[name] = target, cache
    taken: dict[tuple[str, int], list[float]] = {}
    began = perf_counter()
    while not taken or perf_counter() - began < options.seconds:
        for count in rows:
            for name, (target, cache) in targets.items():
                with target.active():
                    block = Block(cache, [7] * count, device=target.device, backend=target.backend)
                    start = perf_counter()
                    target.forward(block)
                    taken.setdefault((name, count), []).append(perf_counter() - start)
    for name in targets:
        times = [statistics.median(taken[name, count][1:] or taken[name, count]) for count in rows]
        print(f"{name}: " + ", ".join(f"{count}: {1e3 * time:.2f}" for count, time in zip(rows, times, strict=True)))


if __name__ == "__main__":
    main()
