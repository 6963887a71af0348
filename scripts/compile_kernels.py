"""Compile every Triton kernel for NVIDIA GPUs, on a machine that needs none: what the first run on one would do.

    python scripts/compile_kernels.py                        # all variants, for sm_80 and sm_90; some minutes
    python scripts/compile_kernels.py --arch 90 --meet 2     # a third, in which every two properties meet
    python scripts/compile_kernels.py --arch 90 --meet 1     # those in which every property is met once
    python scripts/compile_kernels.py --arch 90 --sample     # one of each kind

Prints a line per variant with the shared memory that it takes; the exit status is 1 if any fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import combinations
from itertools import product as product_of
from pathlib import Path
from typing import Any

if os.environ.pop("TRITON_INTERPRET", None):  # it would turn the kernels into Python, which nothing compiles
    os.execv(sys.executable, [sys.executable, *sys.argv])
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec.runners.kernels import embedding, launch, layer, pick, product, step, walk
from specdec.step.pages import PAGE

DTYPES = ("bf16", "fp16", "fp32")
WIDTHS = (8, 16, 32, 64, 80, 96, 128, 192, 256)
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a block may have, by architecture."""

Variant = tuple[str, Any, dict[str, str], dict[str, Any]]  # name, kernel, types of arguments, constants


def layer_variants(sample: bool, arch: int) -> Iterator[Variant]:
    """Sum and norm, turning and storing heads, and the gate."""
    for dtype, width in product_of(DTYPES[::2] if sample else DTYPES, (4096,) if sample else (192, 576, 4096, 8192)):
        types = dict.fromkeys(("residual", "delta", "weight", "total", "normed"), dtype)
        wide = triton.next_power_of_2(width)
        for parts in (0, 1, 4):
            own = {**types, "delta": "fp32" if parts > 1 else dtype}
            constants: dict[str, Any] = {"WIDTH": width, "WIDE": wide, "PARTS": parts}
            yield f"add_norm {dtype} width {width} parts {parts}", layer._add_norm, own, constants
        yield f"gate {dtype}", layer._gate, {"both": dtype, "output": dtype}, {"INNER": 3 * width, "BLOCK": 1024}
    pages = product_of((128,) if sample else WIDTHS, (False, True), (0, PAGE))
    for dtype, (width, normed, page) in product_of(DTYPES, pages):
        names = ("heads", "cosines", "sines", "query_weight", "key_weight", "query")
        types = {**dict.fromkeys(names, dtype), "places": "i64", "counts": "i64", "table": "i64"}
        half = triton.next_power_of_2(width // 2)
        constants = {"QUERIES": 32, "KEYS": 8, "WIDTH": width, "HALF": half, "NORMED": normed, "PARTS": 1}
        constants["PAGE"] = page
        yield (
            f"turn_and_store {dtype} width {width}{' normed' if normed else ''}{' paged' if page else ''}",
            layer._turn_and_store,
            types,
            constants,
        )


def step_variants(sample: bool, arch: int) -> Iterator[Variant]:
    """Attention of steps: dtypes x head widths x groups x windows x pages; and each row's way through the tree."""
    kinds = product_of((1, 3, 4, 8), (False, True), (0, PAGE))
    if sample:
        kinds = iter([(4, False, 0), (3, True, 0), (4, False, PAGE), (4, True, PAGE)])
    kinds = [*kinds]
    for dtype, width in product_of(DTYPES[::2] if sample else DTYPES, (128,) if sample else WIDTHS):
        types = {"query": dtype, "counts": "i64", "table": "i64", "places": "i64", "paths": "i32", "tops": "fp32",
                 "totals": "fp32", "mixes": "fp32", "output": dtype}  # fmt: skip
        for group, windowed, page in kinds:
            itemsize = 4 if dtype == "fp32" else 2
            constants = step.constants(8 * group, group, width, itemsize, windowed=windowed, page=page)
            yield (
                f"step {dtype} width {width} group {group}{' windowed' if windowed else ''}{' paged' if page else ''}",
                step._attend,
                types,
                constants,
            )
    types = {"counts": "i64", "places": "i64", "closure": "i1", "output": "i32"}
    yield "paths", step._paths, types, {"BLOCK": 128, "num_warps": 1}


def product_variants(sample: bool, arch: int) -> Iterator[Variant]:
    """Products of a 7 B model's and of a small one's shapes: dtypes x buckets of rows."""
    shapes = [
        (6144, 4096, False),
        (14336, 4096, True),
        (4096, 14336, False),
        (960, 576, False),
        (1536, 576, True),
        (100, 72, False),
    ]
    buckets = product.buckets_of(SHARED[arch])
    for dtype, bucket in product_of(
        DTYPES[:1] if sample else DTYPES[:2], buckets[:: len(buckets) - 1] if sample else buckets
    ):
        for outputs, inputs, gated in shapes[:2] if sample else shapes:
            offered = product.offered(outputs, inputs, gated, bucket, SHARED[arch])
            for number, cut in enumerate(offered if bucket > 32 or not sample else offered[:1]):
                types = {
                    "activations": dtype,
                    "weight": dtype,
                    "bias": dtype,
                    "output": "fp32" if cut.splits > 1 else dtype,
                }
                kind = f"{' gated' if gated else ''}{f' cut {number}' if number else ''}"
                name = f"product {dtype} {outputs} of {inputs} bucket {bucket}{kind}"
                yield name, product._product, types, {
                    "OUTPUTS": outputs, "INPUTS": inputs, "TILE": cut.tile, "STEP": cut.step, "BUCKET": cut.rows,
                    "SPLITS": cut.splits, "GATED": gated, "BIASED": True, "AHEAD": 256 if inputs >= 256 else 0,
                    "num_warps": cut.warps, "num_stages": cut.stages,
                }  # fmt: skip


def pick_variants(sample: bool, arch: int) -> Iterator[Variant]:
    """Argmax and draw of each row: dtypes x vocabularies."""
    types = {"draws": "i64", "counts": "i64", "places": "i64", "best": "fp32", "best_at": "i32", "drawn": "fp64",
             "drawn_at": "i32"}  # fmt: skip
    for dtype, tokens in product_of(DTYPES[::2] if sample else DTYPES, (32000,) if sample else (32000, 151936)):
        constants: dict[str, Any] = {"TOKENS": tokens, "ROWS": 4, "PLACES": 4, "PART": pick._PART, "num_warps": 4}
        yield f"pick {dtype} of {tokens}", pick._pick, {"logits": dtype, **types}, constants
    parts = triton.cdiv(151936, pick._PART)
    types = {name: kind for name, kind in types.items() if name not in ("counts", "places")}
    constants = {"ROWS": 4, "PARTS": parts, "WIDE": triton.next_power_of_2(parts), "num_warps": 1}
    yield "join picks", pick._join, {**types, "picked": "i64"}, constants


def embedding_variants(sample: bool, arch: int) -> Iterator[Variant]:
    """Embeddings, cosines and sines: dtypes x widths of heads."""
    types = dict.fromkeys(("tokens", "counts", "places", "tables"), "i64")
    for dtype, width in product_of(DTYPES[::2] if sample else DTYPES, (128,) if sample else WIDTHS):
        own = dict.fromkeys(("weight", "hidden", "cosines", "sines"), dtype)
        constants = {"TURNED": width, "WIDE": triton.next_power_of_2(width), "PART": embedding._PART, "num_warps": 4}
        yield f"look_up {dtype} width {width}", embedding._look_up, {**types, **own}, constants


def walk_variants(sample: bool, arch: int) -> Iterator[Variant]:
    """Walk and commit: dtypes x buckets of rows x widths of heads x pages."""
    types = dict.fromkeys(("picked", "draws", "above", "tokens", "counts", "table"), "i64")
    kinds = product_of((2, 128), (128,) if sample else WIDTHS, (8,) if sample else (1, 8, 32), (0, PAGE))
    for dtype, (rows, width, heads, page) in product_of(DTYPES[::2] if sample else DTYPES, kinds):
        constants = {"ROWS": rows, "HEADS": heads, "WIDTH": width, "GROUPS": triton.next_power_of_2(heads),
                     "WIDE": triton.next_power_of_2(width), "PAGE": page, "num_warps": 4}  # fmt: skip
        name = f"walk {dtype} of {rows} rows width {width} heads {heads}{' paged' if page else ''}"
        yield name, walk._walk, {**types, "like": dtype}, constants


def meeting(variants: Iterable[Variant], count: int) -> Iterator[Variant]:
    """Few of them, in which every ``count`` properties meet that meet in any, such as a dtype and a head width."""
    named = ((variant, re.findall(r"[a-z]\w*(?: \d+)?", variant[0])) for variant in variants)
    left = [(variant, set(combinations(names, count))) for variant, names in named]
    while left:
        variant, met = max(left, key=lambda one: len(one[1]))
        yield variant
        left = [(other, own - met) for other, own in left if own - met]


VARIANTS = (
    layer_variants, step_variants, product_variants, pick_variants, embedding_variants, walk_variants,
)  # fmt: skip


class SlowError(ValueError):
    """It is right, and slower than it could be."""


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], arch: int) -> int:
    """Compile one variant; its bytes of shared memory.

    Raises:
        ValueError: it specialises on a number, and so would be compiled anew in the midst of decoding; or it reads keys
            or weights number by number.
        SlowError: it reads fewer than 16 bytes at once, or its numbers find no place in registers.
    """
    fixed = [p.name for p in kernel.params if not (p.is_constexpr or p.do_not_specialize or p.name in types)]
    if fixed:
        raise ValueError(f"it specialises on {', '.join(fixed)}")
    scalars = {"scale": "fp32", "epsilon": "fp32"}
    options = {name: constants[name] for name in ("num_warps", "num_stages") if name in constants}
    constants = {name: value for name, value in constants.items() if name not in options}
    if "PDL" in kernel.arg_names:
        constants["PDL"] = launch.EARLY if arch >= 90 else 0
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: f"*{types[name]}" if name in types else scalars.get(name, "i32") for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    # As a launch finds them: what is allocated begins at a multiple of 16 bytes.
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if name in types}
    source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constants, aligned)
    found = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    if kernel in (step._attend, product._product):
        narrow = set(re.findall(r"cp\.async\.c\S+ \[[^]]*\], \[[^]]*\], (\S+?),", found.asm["ptx"])) - {"0x10", "16"}
        rows = constants.get("INPUTS", constants.get("WIDTH"))
        if rows % 8 == 0 and "cp.async" not in found.asm["ptx"]:
            raise ValueError("it reads keys or weights number by number")
        if kernel is product._product and arch >= 90 and "mma.sync" in found.asm["ptx"]:
            raise ValueError(
                "it takes another instruction of the tensor cores than other cuts, which may round otherwise"
            )
        if rows % 8 == 0 and narrow:
            raise SlowError(f"it does not read 16 bytes at once but {narrow}")
    if spilled := stack_of(found.asm["cubin"]):
        raise SlowError(f"it keeps {spilled} bytes of its numbers in memory, as registers are too few")
    return int(found.metadata.shared)


def stack_of(cubin: bytes) -> int:
    """Bytes of a thread's stack, to which the assembler moves what finds no register."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", told.stdout)[1])  # type: ignore[index]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], help="compute capabilities, 90 for 9.0")
    parser.add_argument("--meet", type=int, help="2: each pair of properties is compiled once; 1: each property")
    parser.add_argument("--sample", action="store_true", help="one variant of each kind")
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for arch, variants in product_of(args.arch, VARIANTS):
            chosen = variants(args.sample, arch)
            for name, kernel, types, constants in meeting(chosen, args.meet) if args.meet else chosen:
                try:
                    shared = compiled(kernel, types, constants, arch)
                    told = "ok" if shared <= SHARED.get(arch, shared) else "FAILED: more than a block may have"
                    told = f"{told}, {shared} bytes shared"
                except SlowError as error:  # as of widths and groups that models seldom have; not those of the sample
                    told = f"{'FAILED' if args.sample else 'ok, but slow'}: {error}"
                except Exception as error:  # the compiler's errors share no class but this
                    told = f"FAILED: {type(error).__name__}: {error}"
                failed += told.startswith("FAILED")
                print(f"sm_{arch} {name}: {told}", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
