"""The sections of ``gpu_check.py``: what is asked of a GPU, part by part.

A section yields the name of each part, and what computes its figures; nothing is made for a part that is not run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from scripts.gpu_bits import again, bits, texts
from scripts.gpu_cuts import cuts
from scripts.gpu_rivals import drafting, rivals
from scripts.gpu_shapes import Figures, Part, product_shapes, tree_parents
from specdec import Draft, Engine
from specdec.bench.shapes import random_prompt, weight_bytes
from specdec.costs.measuring import measure
from specdec.engine.requests import Request
from specdec.engine.scheduler import Scheduler
from specdec.step.block import Block
from specdec.step.device_copies import seconds_of, wait

__all__ = ["GOALS", "LIMITS", "SECTIONS"]

ROOT = Path(__file__).resolve().parent.parent
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)

Kept = Mapping[tuple[str, str], Figures]


def device_us(work: Callable[[int], object], device: torch.device, calls: int = 20) -> float:
    """Microseconds of a call, the median of five graphs of so many calls; ``work`` is told which it is."""
    if device.type != "cuda":
        return 1e6 * seconds_of(lambda: work(0), device, time.perf_counter)
    stream: Any = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            work(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in range(calls):
                work(call)
        times = [seconds_of(graph.replay, device, time.perf_counter) for _ in range(6)]
    return sorted(times[1:])[2] / calls * 1e6


# -- Speed -------------------------------------------------------------------------------------------------------------


def bandwidth(check: Any) -> Iterator[Part]:
    """Bytes per second of copies and of reads."""

    def taken() -> Figures:
        size = 1 << (31 if check.on_gpu else 22)
        source = torch.ones(size // 4, device=check.device)
        sink = torch.empty_like(source)
        return {
            "copies": 2 * size / device_us(lambda _: sink.copy_(source), check.device, 3) / 1e6,
            "reads": size / device_us(lambda _: source.sum(), check.device, 3) / 1e6,
        }

    yield "terabytes a second", taken


def step(check: Any) -> Iterator[Part]:
    """Plain decoding, and what rows cost."""
    for shape in (check.big, check.small):
        yield f"{shape}, warm-up", partial(warmed, check, shape)
        yield f"{shape}, plain", partial(plain_speed, check, shape)
        for kind in ("tree", "chain"):
            yield f"{shape}, T(rows) / T(1), {kind}", partial(curve_of, check, shape, kind)


def warmed(check: Any, shape: str) -> Figures:
    target = check.target(shape)
    seconds = seconds_of(lambda: target.warm_up(128 if check.on_gpu else 4), check.device, time.perf_counter)
    return {"seconds": seconds}


def plain_speed(check: Any, shape: str) -> Figures:
    """Tokens a second, and the bytes of weights that they read as a share of the copied bandwidth."""
    target = check.target(shape)
    engine = Engine(target)
    prompt = random_prompt(target.vocab_size, min(1024, target.context_length // 2))
    outs = [engine.generate(prompt, check.args.new) for _ in range(3)]
    speeds = [check.args.new / out.stats.seconds.decode for out in outs]
    copied = check.kept.get(("bandwidth", "terabytes a second"), {}).get("copies")
    read = max(speeds[1:]) * weight_bytes(target.model) / 1e12
    return {
        "tokens_per_second": max(speeds[1:]), "all": speeds, "read_tb": read,
        "share_of_copies": read / copied if copied else "not known: run bandwidth first",
        "prefill_ms": 1e3 * outs[-1].stats.seconds.prefill, "batch_invariant": target.batch_invariant,
    }  # fmt: skip


def curve_of(check: Any, shape: str, kind: str) -> Figures:
    target = check.target(shape)
    length, rows = min(1024, target.context_length // 2), ROWS if check.on_gpu else (1, 4)
    curve = measure(target, rows=rows, lengths=[length], seconds=8.0 if check.on_gpu else 0.2, tree=kind == "tree")
    taken = dict(zip(curve.rows, curve.seconds[0], strict=True))
    return {"ms_of_one": 1e3 * taken[1], "ratio": {rows: seconds / taken[1] for rows, seconds in taken.items()}}


def batches(check: Any) -> Iterator[Part]:
    """Tokens a second of many sequences at once, of 64 tokens of prompt each."""

    def taken(shape: str, batch: int) -> Figures:
        engine = Engine(check.target(shape))
        prompts = [random_prompt(engine.target.vocab_size, 64, seed) for seed in range(batch)]
        engine.generate_batch(prompts, 4, batch=batch)
        began = time.perf_counter()
        outs = engine.generate_batch(prompts, check.args.new, batch=batch)
        return {"tokens_per_second": sum(len(out.token_ids) for out in outs) / (time.perf_counter() - began)}

    def held(shape: str, batch: int) -> Figures:
        """Memory of pages in which texts of very different lengths are; and of a cache of 1,024 tokens for each."""
        engine = Engine(check.target(shape))
        target: Any = engine.target
        longest = min(1000, target.context_length - 40)
        prompts = [random_prompt(target.vocab_size, 8 + longest * n // batch, n) for n in range(batch)]
        scheduler, most = Scheduler(engine, [Request(prompt, 16) for prompt in prompts], batch=batch), (0, 0)
        for events in scheduler.run():
            assert all(event.error is None for event in events)
            most = max(most, *((pool.nbytes, pool.used) for pool in target.runner.pools), (0, 0))
        each = sum(1024 * spec.slot_bytes for spec in target.specs)
        return {"most_mb": most[0] / 1e6, "pages": most[1], "mb_of_1024_each": batch * each / 1e6}

    for shape in (check.big, check.small):
        for batch in check.args.batches:
            yield f"{shape}, {batch} at once", partial(taken, shape, batch)
        yield f"{shape}, memory of {max(check.args.batches)}", partial(held, shape, max(check.args.batches))


def profile(check: Any) -> Iterator[Part]:
    """Device time by kernel, of plain steps and of steps of 64 rows, without the prompt."""

    def taken(shape: str, rows: int) -> Figures:
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as recorded

        target = check.target(shape)
        with target.active():
            cache = target.new_cache(capacity=2000, rows=128)
            cache.length = min(1024, target.context_length // 2)
            cache.reserve(1300)
            for group in cache.groups:
                group.clear()
            draft = Draft([5] * rows, tree_parents(rows, "binary"))

            def forward() -> Any:
                return target.forward(Block.of(draft, cache, check.device))

            times = [seconds_of(forward, check.device, time.perf_counter) for _ in range(6)]
            with recorded(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
                for _ in range(5):
                    forward()
                wait(check.device)
        sums: dict[str, list[float]] = {}
        for one in found.events():
            if str(one.device_type).endswith("CUDA"):
                sums.setdefault(one.name[:60], []).append(float(one.device_time_total))
        told = {
            name: {"us_a_step": sum(each) / 5, "calls": len(each) // 5} for name, each in sums.items() if sum(each) > 10
        }
        return {"ms": 1e3 * min(times), "kernels": told}

    if check.on_gpu:
        for shape in (check.big, check.small):
            for rows in (1, 64):
                yield f"{shape}, {rows} rows", partial(taken, shape, rows)


def products(check: Any) -> Iterator[Part]:
    """Each product beside cuBLAS's, terabytes of weights a second: weights in turn, so that no cache holds them."""

    def taken(outputs: int, inputs: int, gated: bool) -> Figures:
        from specdec.runners.kernels.product import product

        high = outputs * (2 if gated else 1)
        several = max(2, min(20, (1 << 30) // (high * inputs * 2)))
        weights = [torch.randn(high, inputs, dtype=check.dtype, device=check.device) for _ in range(several)]
        size, found = 2e-6 * high * inputs, {}  # megabytes; over microseconds they are terabytes a second
        kinds: dict[str, Callable[..., torch.Tensor]] = {
            "cublas": F.linear, "own": lambda x, w: product(x, w, None, gated=gated),
        }  # fmt: skip
        for name, kind in kinds.items():
            for rows in (1, 64, 128):
                x = torch.randn(rows, inputs, dtype=check.dtype, device=check.device)
                us = device_us(lambda call, x=x, kind=kind: kind(x, weights[call % several]), check.device)
                found.setdefault(name, {})[rows] = size / us
        return found

    def cuts(outputs: int, inputs: int, gated: bool) -> Figures:
        """Every cut of a product with the same numbers, for few rows and many, and the one that is taken."""
        from specdec.runners.kernels.product import cut_of, cuts_of, product, shared_of

        high, shared = outputs * (2 if gated else 1), shared_of(check.device)
        weights = [torch.randn(high, inputs, dtype=check.dtype, device=check.device) for _ in range(4)]
        found: dict[str, Any] = {}
        for rows, bucket in ((1, 16), (64, 64)):
            x, taken = torch.randn(rows, inputs, dtype=check.dtype, device=check.device), {}
            for cut in cuts_of(outputs, inputs, gated, bucket, shared):
                us = device_us(
                    lambda call, x=x, own={bucket: cut}: product(x, weights[call % 4], None, gated=gated, cuts=own),
                    check.device,
                )
                taken[named_cut(cut)] = 2e-6 * high * inputs / us
            best = max(taken, key=taken.__getitem__)
            own = named_cut(cut_of(outputs, inputs, gated, bucket, shared))
            found[f"{rows} rows"] = {"best": best, "its TB/s": taken[best], "taken": own, "of it": taken.get(own, 0.0)}
        return found

    if check.on_gpu:
        for shape in (check.big, check.small):
            for name, (outputs, inputs, gated) in product_shapes(shape).items():
                yield f"{shape}, {name} {outputs} x {inputs}", partial(taken, outputs, inputs, gated)
        for name, (outputs, inputs, gated) in product_shapes(check.big).items():
            yield f"{check.big}, cuts of {name}", partial(cuts, outputs, inputs, gated)


def named_cut(cut: Any) -> str:
    """A cut without what all cuts of a product have in common."""
    return f"{cut.tile} outputs by {cut.step}, {cut.warps} warps, {cut.stages} stages"


def tests(check: Any) -> Iterator[Part]:
    """The GPU's own tests."""

    def taken() -> Figures:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
        known = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # the checkout's entry points
        done = subprocess.run([*command, *check.args.pytest], cwd=ROOT, capture_output=True, text=True, env=known)
        if done.returncode:
            raise RuntimeError(done.stdout[-700:])
        return {"passed": done.stdout.strip().splitlines()[-1]}

    if check.on_gpu:
        yield "tests/gpu", taken


KERNELS = [f"specdec.runners.kernels.{name}" for name in ("launch", "layer", "pick", "product", "step")]
"""What parts import when they run."""
SECTIONS: dict[str, Callable[[Any], Iterator[Part]]] = {
    "bandwidth": bandwidth, "bits": bits, "again": again, "texts": texts, "step": step, "batches": batches,
    "drafting": drafting, "tests": tests, "profile": profile, "cuts": cuts, "products": products, "rivals": rivals,
}  # fmt: skip
LIMITS = {
    "bandwidth": 8, "bits": 85, "again": 25, "texts": 95, "step": 50, "batches": 45, "drafting": 75, "tests": 70,
    "profile": 22, "cuts": 40, "products": 35, "rivals": 50,
}  # fmt: skip
"""Seconds of each; ten minutes with what is imported and made in between."""


# -- What was to be reached --------------------------------------------------------------------------------------------


def most(section: str, name: str, bound: float) -> Callable[[Kept], tuple[float, bool] | None]:
    """The sum of a figure over a section's parts, which is at most the bound."""

    def read(kept: Kept) -> tuple[float, bool] | None:
        found = [figures[name] for (own, _), figures in kept.items() if own == section and name in figures]
        return (sum(found), sum(found) <= bound) if found else None

    return read


def least(section: str, name: str, bound: float) -> Callable[[Kept], tuple[float, bool] | None]:
    """The least of a figure over a section's parts, which is at least the bound."""

    def read(kept: Kept) -> tuple[float, bool] | None:
        found = [figures[name] for (own, _), figures in kept.items() if own == section and name in figures]
        return (min(found), min(found) >= bound) if found else None

    return read


def one(section: str, part: str, name: str, bound: float, *, least: bool = True) -> Callable[..., Any]:
    """One figure, ``NAME.KEY`` for one of several, and whether it reaches the bound."""

    def read(kept: Kept) -> tuple[float, bool] | None:
        found: Any = kept.get((section, part), {})
        for key in name.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        if not isinstance(found, float | int):
            return None
        return found, found >= bound if least else found <= bound

    return read


BIG, SMALL, SPEED = "mistral-7b", "smollm2", "tokens_per_second"
GOALS: dict[str, tuple[str, Callable[[Kept], tuple[float, bool] | None]]] = {
    "rows and products that differ": ("0", most("bits", "differing", 0)),
    "steps that differ from the same step": ("0", most("again", "differing", 0)),
    "texts that differ, one at a time": ("0", most("texts", "differing", 0)),
    "texts that differ, eight at a time": ("0", most("texts", "batch_differing", 0)),
    "texts that differ, under a policy": ("0", most("drafting", "differing", 0)),
    "steps that record, after a warm-up": ("0", most("drafting", "first_times", 0)),
    "every drafter under its policy, of plain decoding": (">= 0.98", least("drafting", "of_plain", 0.98)),
    "auto at T = 0, of plain decoding": (">= 1.8", one("drafting", "T = 0, auto", "of_plain", 1.8)),
    "auto at T = 1, of plain decoding": (">= 1.15", one("drafting", "T = 1, auto", "of_plain", 1.15)),
    "plain steps, share of the copied bandwidth": (">= 0.85", one("step", f"{BIG}, plain", "share_of_copies", 0.85)),
    "T(64) / T(1)": ("<= 1.15", one("step", f"{BIG}, T(rows) / T(1), tree", "ratio.64", 1.15, least=False)),
    "warm-up, seconds": ("<= 20", one("step", f"{BIG}, warm-up", "seconds", 20, least=False)),
    "7 B, 32 sequences at once, tokens/s": (">= 3500", one("batches", f"{BIG}, 32 at once", SPEED, 3500)),
    "7 B, 64 sequences at once, tokens/s": (">= 6000", one("batches", f"{BIG}, 64 at once", SPEED, 6000)),
    "SmolLM2's shape, tokens/s": (">= 1250", one("step", f"{SMALL}, plain", SPEED, 1250)),
    "SmolLM2's shape, 32 at once, tokens/s": (
        ">= 15000", one("batches", f"{SMALL}, 32 at once", SPEED, 15000),
    ),
}  # fmt: skip
"""Goal -> what it is to be, and what reads it off the figures; None where it was not measured."""
