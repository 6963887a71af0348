"""Compile every Triton kernel for NVIDIA GPUs, on a machine that needs none: what the first run on one would do.

    python scripts/compile_kernels.py                        # all variants, for sm_80 and sm_90; some minutes
    python scripts/compile_kernels.py --arch 90 --pairs      # a third, in which every two properties meet
    python scripts/compile_kernels.py --arch 90 --sample     # one of each kind

Prints a line per variant with the shared memory that it takes; the exit status is 1 if any fails.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

if os.environ.pop("TRITON_INTERPRET", None):  # it would turn the kernels into Python, which nothing compiles
    os.execv(sys.executable, [sys.executable, *sys.argv])
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec.runners.kernels import layer, step, tree

DTYPES = ("bf16", "fp16", "fp32")
WIDTHS = (8, 16, 32, 64, 80, 96, 128, 192, 256)
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a block may have, by architecture."""

Variant = tuple[str, Any, dict[str, str], dict[str, Any]]  # name, kernel, types of arguments, constants


def tree_variants(sample: bool) -> Iterator[Variant]:
    """Tree attention: dtypes x head widths x group sizes x (masked, indexed, continued)."""
    shapes = [(128, 4)] if sample else [*product(WIDTHS, (4,)), (128, 1), (128, 7)]
    flags = [(False, False, False), (True, False, True), (True, True, True)]
    if not sample:
        flags = list(product((False, True), repeat=3))
    dtypes = DTYPES[::2] if sample else DTYPES
    for dtype, (width, group), (masked, indexed, continued) in product(dtypes, shapes, flags):
        types = {"query": dtype, "keys": dtype, "values": dtype, "mask": dtype, "slots": "i64",
                 "prior": dtype, "prior_weight": "fp32", "output": dtype}  # fmt: skip
        constants = tree.constants(group, width, width, masked=masked, indexed=indexed, continued=continued)
        name = f"tree {dtype} width {width} group {group}" + "".join(
            f" {flag}" for flag, on in (("masked", masked), ("indexed", indexed), ("continued", continued)) if on
        )
        yield name, tree._tree, types, constants


def layer_variants(sample: bool) -> Iterator[Variant]:
    """Sum and norm, turning and storing heads, and the gate."""
    for dtype, width in product(DTYPES[::2] if sample else DTYPES, (4096,) if sample else (192, 576, 4096, 8192)):
        types = dict.fromkeys(("residual", "delta", "weight", "total", "normed"), dtype)
        wide = triton.next_power_of_2(width)
        for adds in (False, True):
            constants: dict[str, Any] = {"WIDTH": width, "WIDE": wide, "ADDS": adds}
            yield f"add_norm {dtype} width {width}{' adds' if adds else ''}", layer._add_norm, types, constants
        yield f"gate {dtype}", layer._gate, {"both": dtype, "output": dtype}, {"INNER": 3 * width, "BLOCK": 1024}
    for dtype, width, normed in product(DTYPES, (128,) if sample else WIDTHS, (False, True)):
        names = ("heads", "cosines", "sines", "query_weight", "key_weight", "query")
        types = {**dict.fromkeys(names, dtype), "places": "i64", "counts": "i64", "table": "i64"}
        half = triton.next_power_of_2(width // 2)
        constants = {"QUERIES": 32, "KEYS": 8, "WIDTH": width, "HALF": half, "NORMED": normed}
        yield (
            f"turn_and_store {dtype} width {width}{' normed' if normed else ''}",
            layer._turn_and_store,
            types,
            constants,
        )


def step_variants(sample: bool) -> Iterator[Variant]:
    """Attention of recorded steps: dtypes x head widths x buckets of rows x windows, and what joins its parts."""
    kinds = [(1, False), (64, True)] if sample else [*product((1, 4, 16, 64, 128), (False, True))]
    for dtype, width in product(DTYPES[::2] if sample else DTYPES, (128,) if sample else WIDTHS):
        types = {"query": dtype, "counts": "i64", "table": "i64", "places": "i64", "closure": "i1",
                 "mixed_parts": "fp32", "weight_parts": "fp32"}  # fmt: skip
        for rows, windowed in kinds:
            constants = step.constants(1, rows, 8, 4, width, 4 if dtype == "fp32" else 2, windowed=windowed)
            name = f"step {dtype} width {width} rows {rows}{' windowed' if windowed else ''}"
            yield name, step._part, types, constants
        joined = {name: constants[name] for name in ("WIDTH", "WIDE", "PARTS")}
        types = {"mixed_parts": "fp32", "weight_parts": "fp32", "output": dtype}
        yield f"join {dtype} width {width}", step._join, types, joined


def paired(variants: Iterator[Variant]) -> Iterator[Variant]:
    """Those in which two properties meet, such as a dtype and a head width, that did not meet in one before."""
    met = set[tuple[str, str]]()
    for variant in variants:
        pairs = set(combinations(re.findall(r"[a-z]\w*(?: \d+)?", variant[0]), 2))
        if not pairs <= met:
            met |= pairs
            yield variant


VARIANTS = (tree_variants, layer_variants, step_variants)


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], arch: int) -> int:
    """Compile one variant; its bytes of shared memory.

    Raises:
        ValueError: it specialises on a number, and so would be compiled anew in the midst of decoding; or it reads keys
            number by number.
    """
    fixed = [p.name for p in kernel.params if not (p.is_constexpr or p.do_not_specialize or p.name in types)]
    if fixed:
        raise ValueError(f"it specialises on {', '.join(fixed)}")
    scalars = {"scale": "fp32", "epsilon": "fp32"}
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: f"*{types[name]}" if name in types else scalars.get(name, "i32") for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constants)
    found = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    if kernel is step._part and "cp.async" not in found.asm["ptx"]:
        raise ValueError("it does not read 16 bytes of keys at once")
    return int(found.metadata.shared)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], help="compute capabilities, 90 for 9.0")
    parser.add_argument("--pairs", action="store_true", help="only until every two properties of a kernel have met")
    parser.add_argument("--sample", action="store_true", help="one variant of each kind")
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for arch, variants in product(args.arch, VARIANTS):
            chosen = variants(args.sample)
            for name, kernel, types, constants in paired(chosen) if args.pairs else chosen:
                try:
                    shared = compiled(kernel, types, constants, arch)
                    told = "ok" if shared <= SHARED.get(arch, shared) else "FAILED: more than a block may have"
                    told = f"{told}, {shared} bytes shared"
                except Exception as error:  # the compiler's errors share no class but this
                    told = f"FAILED: {type(error).__name__}: {error}"
                failed += told.startswith("FAILED")
                print(f"sm_{arch} {name}: {told}", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
