"""What a change of the native layers brings: a model's forwards with and without it, in turn in one process.

    python scripts/ablate_native.py --model smollm2 --dtype bfloat16 --threads 1
    python scripts/ablate_native.py --model smollm2 --dtype bfloat16 --threads 1 --change tiles
    git worktree add before COMMIT  # and --before before/specdec/native/layers.c
    python scripts/ablate_native.py --model smollm2 --dtype bfloat16 --threads 1 --before before.c --context 1000

Without ``--before`` the same layers run with weights in sixteen bits and in twelve, on a CPU that reads such codes, or,
with ``--change tiles``, by vectors and by tiles, on a CPU that has those; with it, layers of another C file, an earlier
one or one that was changed, and then those of this package. Prints median milliseconds of forwards by their rows, of
each of ``--sequences``, head and all, after so many tokens.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

NEEDED = ("specdec_run_layers", "specdec_product", "specdec_look_up", "specdec_top")
SIDES = {"codes": ("sixteen bits", "twelve bits"), "tiles": ("vectors", "tiles")}


def described(source: str) -> list[str]:
    """The structures of a C source that Python fills, without comments."""
    found = re.findall(r"typedef struct \{((?:(?!typedef).)*?)\} (?:Product|Layer|Shape|Rows|Head);", source, re.DOTALL)
    return [" ".join(re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL).split()) for body in found]


def compiled(source: str) -> Any:
    """The library of another C source; what the package's has come to offer since is there, and is not called."""
    from specdec.native import library as native
    from specdec.native import types

    missing = [name for name in types.FUNCTIONS if f"{name}(" not in source]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "before.c"
        file.write_text(source + "".join(f"\nint {name}(void) {{ return 1; }}\n" for name in missing), encoding="utf-8")
        with patch.object(native, "_SOURCE", file), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            other = native.library.__wrapped__()
    if other is None:
        sys.exit(f"error: --before: {'; '.join(str(one.message) for one in told)}")
    return other


def main() -> None:
    from specdec import TransformersTarget
    from specdec.native import library as native
    from specdec.runners import linear
    from specdec.runners import native as runner
    from specdec.runners import native_layers as layers
    from specdec.step.batched_rows import rows_of
    from specdec.step.block import Block

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,2,4,6,8,16,32,64")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=1, help="that a forward has such rows of, each")
    parser.add_argument("--before", type=Path, help="a C file like specdec/native/layers.c")
    parser.add_argument("--change", choices=SIDES, default="codes", help="what is compared without --before")
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = sorted(int(count) for count in options.rows.split(","))
    if options.sequences < 1:
        parser.error(f"--sequences is {options.sequences}; it must be at least 1")
    if (found := native.library()) is None or not (options.before or getattr(found, f"specdec_{options.change}")()):
        needed = {"codes": "AVX-512", "tiles": "AMX"}[options.change]
        sys.exit(f"error: nothing to compare here: that needs a C compiler, and without --before a CPU with {needed}")
    source = ""
    if options.before:
        try:
            source = native.source(options.before)
        except (OSError, ValueError) as error:
            parser.error(f"--before: cannot read {str(options.before)!r}: {error}")
        if absent := [name for name in NEEDED if f"{name}(" not in source]:
            parser.error(f"--before: {str(options.before)!r} has no {absent[0]}; give one like specdec/native/layers.c")
        if described(source) != described(native.source()):
            other = "is told of weights or layers in another way than this version's; run its own version's script"
            parser.error(f"--before: {str(options.before)!r} {other}")
    targets = {}
    for name in ("before", "after") if options.before else SIDES[options.change]:
        with ExitStack() as changes:
            if name == "before":
                other = compiled(source)
                for module in (linear, runner, layers):
                    changes.enter_context(patch.object(module, "library", return_value=other))
            elif name == "sixteen bits":
                changes.enter_context(patch.object(linear.PackedWeight, "_code", return_value=None))
            elif name == "vectors":
                changes.enter_context(patch.object(found, "specdec_tiles", return_value=0))
            target = TransformersTarget.from_pretrained(options.model, dtype=options.dtype, execution="native")
        caches = []
        with target.active():
            for _ in range(options.sequences):
                cache = target.new_cache(capacity=options.context + rows[-1], rows=rows[-1])
                cache.reserve(options.context + rows[-1])
                for group in cache.groups:
                    group.keys.normal_()
                    group.values.normal_()
                cache.length = options.context
                caches.append(cache)
        targets[name] = target, caches
    taken: dict[tuple[str, int], list[float]] = {}
    began = perf_counter()
    while not taken or perf_counter() - began < options.seconds:
        for count in rows:
            for name, (target, caches) in targets.items():
                with target.active():
                    own = [Block(one, [7] * count, device=target.device, backend=target.backend) for one in caches]
                    block = rows_of(own)
                    start = perf_counter()
                    target.forward(block)
                    taken.setdefault((name, count), []).append(perf_counter() - start)
    for name in targets:
        times = [statistics.median(taken[name, count][1:] or taken[name, count]) for count in rows]
        print(f"{name}: " + ", ".join(f"{count}: {1e3 * time:.2f}" for count, time in zip(rows, times, strict=True)))


if __name__ == "__main__":
    main()
