"""What a GPU makes of specdec, in the minutes of a short loan: one command, most important sections first.

    python scripts/gpu_check.py --out runs/gpu_check                     # all sections, ten minutes at most
    python scripts/gpu_check.py --only bits,step --limits step=60        # some of them, one with another time limit
    python scripts/gpu_check.py --model SmolLM2.gguf                     # real text, of a model that is here already
    python scripts/gpu_check.py --dry-run                                # without a GPU: all parts by name, all imports

Nothing is fetched. Every figure is printed as it comes and kept in OUT.jsonl; OUT.md has them as tables, with what was
to be reached. A part that is kept there is not run again, so a run that was cut short goes on where it was, and so does
one with ``--only``. A part that fails, or a section that has no time left, is recorded, and the next one goes on.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from scripts.checkout import use_checkout

use_checkout()

import torch
import torch.nn.functional as F
import transformers
from transformers import LlamaConfig

from specdec import Draft, Engine, SamplingParams
from specdec.bench.environment import caption, describe_environment
from specdec.bench.shapes import SHAPES, random_model, random_prompt, weight_bytes
from specdec.costs.measuring import measure
from specdec.engine.requests import Request
from specdec.engine.scheduler import Scheduler
from specdec.models.described_target import DescribedTarget
from specdec.runners import cuts as chosen_cuts
from specdec.step.device_copies import seconds_of, wait
from specdec.step.joining import joined
from specdec.step.step_io import NOTHING, StepInput

SHAPES.setdefault(
    "smollm2",
    LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=None,
    ),
)  # fmt: skip
HALF = (torch.bfloat16, torch.float16)

Figures = Mapping[str, Any]
Kept = Mapping[tuple[str, str], Figures]
Part = tuple[str, Callable[[], Figures]]
"""A part's name, and what computes its figures."""


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tree_parents(rows: int, kind: str) -> list[int]:
    """A chain, a star, or a binary tree."""
    if kind == "chain":
        return list(range(-1, rows - 1))
    return [-1, *((0 if kind == "star" else (row - 1) // 2) for row in range(1, rows))]


def product_shapes(shape: str) -> dict[str, tuple[int, int, bool]]:
    """Outputs, inputs and whether gated, of a layer's products and the head."""
    config: Any = SHAPES[shape]
    width, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    return {
        "qkv": (heads * head, width, False), "out": (width, config.num_attention_heads * head, False),
        "gate_up": (inner, width, True), "down": (width, inner, False), "head": (config.vocab_size, width, False),
    }  # fmt: skip


# -- What is exact -----------------------------------------------------------------------------------------------------

COUNTS = (1, 2, 8, 16, 17, 33, 64, 65, 128, 129, 300)
"""Rows of products that are compared with those of as many more."""
DRAFTERS = (
    "prompt_lookup", "suffix_automaton", "token_recycling", "lookahead", "jacobi", "auto", "medusa", "kangaroo",
    "draft_model",
)  # fmt: skip
QUESTIONS = (
    "Once upon a time there was a little", "The dog and the cat went to", "Tom had a red ball. He",
    "One day, Lily found", "The sun was warm and the", "Mum said that it was time to", "In the garden there lived",
    "A big bear came out of", "The bird could not fly, so", "Ben and Sue ran to the", "It was a cold night when",
    "The boat was very big and", "Anna liked to sing, but", "There was a hole in the", "The old man gave her a",
    "When the rain stopped, they",
)  # fmt: skip


def product_bits(device: torch.device, shape: str, dtype: torch.dtype, counts: Sequence[int]) -> Figures:
    """At which numbers of rows a product differs from the same rows among many, and its error against float64's."""
    from specdec.runners.kernels.product import product

    most, differing, errors = 512 if device.type == "cuda" else max(counts) + 1, {}, {}
    for name, (outputs, inputs, gated) in product_shapes(shape).items():
        weight = torch.randn(outputs * (2 if gated else 1), inputs, dtype=dtype, device=device) / inputs**0.5
        rows, whole = torch.randn(most, inputs, dtype=dtype, device=device), name == "head"
        every = product(rows, weight, None, gated=gated, whole=whole)
        reference = rows.double() @ weight.double().T
        if gated:
            reference = F.silu(reference[:, :outputs]) * reference[:, outputs:]
        off = (every if every.ndim == 2 else every.sum(0)).double() - reference
        errors[name] = float(off.norm() / reference.norm())
        differing[name] = [
            count for count in counts
            if not torch.equal(product(rows[most - count :], weight, None, gated=gated, whole=whole),
                               every[..., most - count :, :])
        ]  # fmt: skip
    return {"differing": sum(map(len, differing.values())), "at_rows": differing, "error": errors}


class Rows:
    """Logits of a tree's rows, against the same tokens decoded one by one down its last path; of one model."""

    def __init__(self, check: Any, shape: str, dtype: torch.dtype, most: int) -> None:
        self.check, self.device, self.shape, self.dtype, self.most = check, check.device, shape, dtype, most
        self.length = (100 if shape == check.small else 1000) if check.on_gpu else 20

    @cached_property
    def target(self) -> Any:
        return self.check.target(self.shape, self.dtype)

    @cached_property
    def text(self) -> list[int]:
        generator = torch.Generator().manual_seed(1)
        text: list[int] = torch.randint(
            self.target.vocab_size, (self.length + self.most,), generator=generator
        ).tolist()
        return text

    @cached_property
    def caches(self) -> tuple[Any, Any]:
        """Of the tree, and of plain decoding."""
        return self.filled(self.length), self.filled(self.length)

    def filled(self, length: int) -> Any:
        """A cache of so many tokens of the text."""
        cache = self.target.new_cache(capacity=length + self.most + 16, rows=128)
        for start in range(0, length, 128):
            part = self.text[start : min(start + 128, length)]
            self.target.forward(StepInput.of(cache, part, wanted=NOTHING, again=False))
            cache.commit(range(len(part)))
        return cache

    def differing(self, rows: int, kind: str) -> Figures:
        """How many rows of a path have other logits than plain decoding."""
        draft = Draft(self.text[self.length : self.length + rows], tree_parents(rows, kind))
        with self.target.active():
            cache, plain = self.caches
            recorded, launched = (self.logits(draft, cache, again) for again in (True, False))
            path = [rows - 1]
            while draft.parents[path[0]] >= 0:
                path.insert(0, draft.parents[path[0]])
            wrong, plain.length = 0, self.length
            for row in path[:12]:
                one = self.target.forward(StepInput.of(plain, [draft.tokens[row]])).logits
                wrong += not torch.equal(one[0], recorded[row])
                plain.commit([0])
        return {
            "differing": wrong, "compared": len(path[:12]), "launched_equal": torch.equal(recorded, launched),
            "finite": bool(recorded.isfinite().all()),
        }  # fmt: skip

    def logits(self, draft: Draft, cache: Any, again: bool) -> torch.Tensor:
        step = StepInput.of(cache, draft.tokens, draft.tree, again=again)
        found: torch.Tensor = self.target.forward(step).logits
        return found

    def batch(self) -> Figures:
        """Three sequences in one step, and each alone."""
        with self.target.active():
            sizes = (3, min(9, self.most), 1)
            drafts = [Draft(self.text[:rows], tree_parents(rows, "binary")) for rows in sizes]
            caches = [self.filled(length) for length in (self.length, 5, self.length // 2)]
            each = zip(drafts, caches, strict=True)
            steps = [StepInput.of(own, draft.tokens, draft.tree) for draft, own in each]
            alone = torch.cat([self.target.forward(step).out for step in steps])
            together = self.target.forward(joined(steps)).out
        return {"differing": int((alone != together).any(-1).sum()), "compared": len(alone)}


def bits(check: Any) -> Iterator[Part]:
    """A row's bits beside any others: products, whole steps of chains and trees, recorded and launched, and batches."""
    sizes = (2, 8, 16, 33, 64, 128) if check.on_gpu else (2, 5)
    for shape, dtypes in ((check.small, HALF), (check.big, HALF[:1])):
        for dtype in HALF if check.on_gpu else ():
            of_products = partial(product_bits, check.device, shape, dtype, COUNTS)
            yield f"products of {shape}, {named(dtype)}", of_products
        for dtype in dtypes if check.on_gpu else [check.dtype]:
            own = Rows(check, shape, dtype, max(sizes))
            for rows in sizes:
                for kind in ("chain", "binary", "star"):
                    yield f"{shape}, {named(dtype)}, {kind} of {rows} rows", partial(own.differing, rows, kind)
            yield f"{shape}, {named(dtype)}, three sequences", own.batch


def again(check: Any) -> Iterator[Part]:
    """The same step again and again: a race shows as one that differs. With programmatic dependent launch, too."""
    if not check.on_gpu:
        return
    for dtype in HALF:
        own = Rows(check, check.small, dtype, 64)
        for early in (0, 1, 2):
            for rows, kind in ((1, "chain"), (64, "chain"), (64, "binary")):
                name = f"{named(dtype)}, {kind} of {rows} rows{f', dependent launch {early}' if early else ''}"
                yield name, partial(repeated, own, rows, kind, early)


def repeated(own: Rows, rows: int, kind: str, early: int) -> Figures:
    """Count the steps whose logits differ from the first step's. Seven of eight steps are recorded, one is launched."""
    draft, target = Draft(own.text[own.length : own.length + rows], tree_parents(rows, kind)), own.target
    name = "differing, dependent launch" if early else "differing"
    counts = {name: 0, "steps": 0}
    with launched(target, early=early), target.active():
        cache = own.filled(own.length)
        first = own.logits(draft, cache, again=True)
        end = time.perf_counter() + 0.7
        while time.perf_counter() < end:
            steps = [own.logits(draft, cache, again=number % 8 != 0) for number in range(8)]
            counts[name] += sum(not torch.equal(one, first) for one in steps)
            counts["steps"] += len(steps)
    return counts


@contextmanager
def launched(target: Any, *, early: int) -> Iterator[None]:
    """While inside, kernels are launched as ``launch.EARLY`` says of this number."""
    from specdec.runners.kernels import launch

    former, graphs = launch.EARLY, target.executor._graphs
    launch.EARLY = early
    launch.early.cache_clear()
    graphs.kind += 1 + early  # graphs of its own
    try:
        yield
    finally:
        graphs.kind -= 1 + early
        launch.EARLY = former
        launch.early.cache_clear()


def texts(check: Any) -> Iterator[Part]:
    """Every drafter's texts against plain decoding's, one and eight at once; greedy, and T = 1 with ``match``."""
    for path in ["tiny", *([check.args.model] if check.args.model else [])]:
        for dtype in map(named, HALF) if check.on_gpu else [check.args.dtype]:
            known: dict[Any, Any] = {}
            for temperature in (0.0, 1.0):
                for drafter in ("none", *DRAFTERS):
                    yield (
                        f"{path}, {dtype}, T = {temperature:g}, {drafter}",
                        partial(drafted, check, path, dtype, temperature, drafter, known),
                    )


def drafter_for(name: str) -> Any:
    """A drafter's options; the draft model is the one that is in the package."""
    return {"name": name, "model": str(ROOT / "specdec/assets/tiny-draft")} if name == "draft_model" else name


def drafted(check: Any, path: str, dtype: str, temperature: float, drafter: str, known: dict[Any, Any]) -> Figures:
    """How many texts of a drafter are not plain decoding's; ``known`` keeps engine and plain texts meanwhile."""
    if "engine" not in known:
        known["engine"] = Engine.from_pretrained(path, "none", dtype=dtype, device=check.args.device, policy="off")
    engine, sampling = known["engine"], SamplingParams(temperature=temperature, seed=3, acceptance="match")
    questions = QUESTIONS[: check.args.texts]

    def decoded(one: Engine) -> list[Any]:
        return [one.generate(question, check.args.new, sampling) for question in questions]

    if temperature not in known:
        known[temperature] = [out.token_ids for out in decoded(engine)]
    one = engine.with_drafter(drafter_for(drafter))
    began = time.perf_counter()
    found = decoded(one)
    seconds = time.perf_counter() - began
    batch = one.generate_batch(list(questions), check.args.new, sampling, batch=8)
    plain, tokens = known[temperature], sum(len(out.token_ids) for out in found)
    return {
        "differing": sum(out.token_ids != text for out, text in zip(found, plain, strict=True)),
        "batch_differing": sum(out.token_ids != text for out, text in zip(batch, plain, strict=True)),
        "compared": len(plain), "tokens_per_second": tokens / seconds,
        "tokens_a_step": tokens / sum(out.stats.steps for out in found),
        "batch_invariant": engine.target.batch_invariant,
    }  # fmt: skip


# -- Speed -------------------------------------------------------------------------------------------------------------

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


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
    read = max(speeds[1:]) * check.read_bytes[shape] / 1e12
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
            most = max(most, *((pool.nbytes, pool.used) for pool in target.executor.pools), (0, 0))
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
                return target.forward(StepInput.of(cache, draft.tokens, draft.tree))

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


# -- Cuts of products that a warm-up chooses, beside those of the kernels' table ---------------------------------------

CUT_ROWS = (1, 16, 64)


def cuts(check: Any) -> Iterator[Part]:
    """What is chosen, how long that takes, and what it brings."""
    if check.on_gpu:
        for shape in (check.big, check.small):
            yield shape, partial(chosen, check, shape)


def chosen(check: Any, shape: str) -> Figures:
    """Milliseconds of steps with the table's cuts and with those of a warm-up with nothing kept, and its seconds."""
    target = check.target(shape)
    runner, found = target.executor, dict[str, Any]()
    own = runner._cuts
    with nothing_kept():
        former = {weight: dict(known) for weight, known in own._chosen.items()}
        for known in own._chosen.values():
            known.clear()
        runner._graphs.forget()
        found["table's, ms"] = {rows: step_ms(target, rows, check.device) for rows in CUT_ROWS}
        for name in ("choosing", "chosen before"):
            found[f"warm-up, {name}, s"] = seconds_of(lambda: target.warm_up(64), check.device, time.perf_counter)
        found["chosen, ms"] = {rows: step_ms(target, rows, check.device) for rows in CUT_ROWS}
        found["cuts"] = runner.cuts()
        own._chosen.update(former)
        runner._graphs.forget()
    return found


@contextmanager
def nothing_kept() -> Iterator[None]:
    """While inside, choices are kept in a folder that is empty at first."""
    former = chosen_cuts.cache_folder
    with TemporaryDirectory() as folder:
        chosen_cuts.cache_folder = lambda: Path(folder)
        try:
            yield
        finally:
            chosen_cuts.cache_folder = former


def step_ms(target: Any, rows: int, device: torch.device) -> float:
    """A recorded step of a binary tree, the median of fifteen."""
    draft = Draft([5] * rows, tree_parents(rows, "binary"))
    with target.active():
        cache = target.new_cache(capacity=200, rows=rows)
        times = [
            seconds_of(lambda: target.forward(StepInput.of(cache, draft.tokens, draft.tree)), device, time.perf_counter)
            for _ in range(17)
        ]
    return 1e3 * median(times[2:])


# -- What drafting brings under its policy, and transformers' own speed ------------------------------------------------


def drafting(check: Any) -> Iterator[Part]:
    """Tokens a second of every drafter under its policy, by those of plain decoding; one text at a time, warmed up."""
    known: dict[Any, Any] = {}
    for temperature in (0.0, 1.0):
        for drafter in ("none", "auto", *(name for name in DRAFTERS if name != "auto")):
            yield f"T = {temperature:g}, {drafter}", partial(paid, check, temperature, drafter, known)


def paid(check: Any, temperature: float, drafter: str, known: dict[Any, Any]) -> Figures:
    """What a drafter brings; ``known`` keeps the engine and the plain texts with their speed meanwhile."""
    if "engine" not in known:
        path, dtype = check.args.model or "tiny", check.args.dtype
        known["engine"] = Engine.from_pretrained(path, "none", dtype=dtype, device=check.args.device)
    sampling = SamplingParams(temperature=temperature, seed=3, acceptance="match")
    if temperature not in known:
        known[temperature] = answered(check, known["engine"], sampling)
    plain, usual = known[temperature]
    outs, speed = (plain, usual) if drafter == "none" else answered(
        check, known["engine"].with_drafter(drafter_for(drafter)), sampling
    )  # fmt: skip
    steps = [step for out in outs for step in out.steps]
    return {
        "of_plain": speed / usual, "tokens_per_second": speed,
        "differing": sum(out.token_ids != text.token_ids for out, text in zip(outs, plain, strict=True)),
        "tokens_a_step": sum(len(step.tokens) for step in steps) / len(steps),
        "rows_a_step": sum(step.rows for step in steps) / len(steps),
        "first_times": sum(step.first_time for step in steps),
    }  # fmt: skip


def answered(check: Any, engine: Engine, sampling: SamplingParams) -> tuple[list[Any], float]:
    """Answers to all questions, and their tokens a second, after a warm-up and one answer that does not count."""
    engine.warm_up()
    questions = QUESTIONS[: check.args.texts]
    engine.generate(questions[0], check.args.new, sampling)
    outs = [engine.generate(question, check.args.new, sampling) for question in questions]
    return outs, sum(len(out.token_ids) for out in outs) / sum(out.stats.seconds.decode for out in outs)


def rivals(check: Any) -> Iterator[Part]:
    """Transformers' ``generate`` on the same shape: as it is, and with a static cache and torch.compile."""
    kept: list[Any] = []
    yield f"{check.big}, transformers, dynamic cache", partial(generated, check, kept, {})
    if check.on_gpu:
        options = {"cache_implementation": "static"}  # which has transformers compile the forward
        yield f"{check.big}, transformers, static cache and torch.compile", partial(generated, check, kept, options)


def generated(check: Any, kept: list[Any], options: dict[str, Any]) -> Figures:
    """Seconds of the first text, compiling among them, and tokens a second of a later one, less its prompt."""
    if not kept:
        check.forget()
        kept.append(random_model(check.big, check.dtype, check.device))
    model = kept[0]
    prompt = random_prompt(model.config.vocab_size, min(1024, model.config.max_position_embeddings // 2))
    ids = torch.tensor([list(prompt)], device=check.device)

    def taken(new: int) -> float:
        def work() -> None:
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                pad_token_id=0, **options,
            )  # fmt: skip

        return seconds_of(work, check.device, time.perf_counter)

    new = max(check.args.new, 4)
    first = taken(new)
    whole, prefill = min(taken(new) for _ in range(2)), taken(2)
    return {"first_seconds": first, "tokens_per_second": (new - 2) / max(whole - prefill, 1e-9)}


# -- The sections ------------------------------------------------------------------------------------------------------

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


# -- The command -------------------------------------------------------------------------------------------------------


class OutOfTime(BaseException):
    """A section has had its time; no part takes it for an error of its own."""


class Check:
    """The figures, printed and kept; and what sections share.

    Attributes:
        args: as they were given; ``device``, ``dtype``, and the two shapes ``big`` and ``small`` among them.
        on_gpu: whether the device is a GPU; elsewhere the parts that only one can run are left out.
        kept: section and part -> figures, of this run and of those before it.
        read_bytes: shape -> bytes of weights that a step reads, of the last target of that shape.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.dtype = getattr(torch, args.dtype)
        self.big, self.small = args.big, args.small
        self.on_gpu = self.device.type == "cuda"
        self.began = time.perf_counter()
        self.file = args.out.with_suffix(".jsonl")
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        self.kept = {(line.pop("section"), line.pop("part")): line for line in map(json.loads, lines)}
        self._targets: dict[tuple[str, torch.dtype], DescribedTarget] = {}
        self.read_bytes = dict[str, int]()

    def keep(self, section: str, part: str, figures: Mapping[str, Any]) -> None:
        """Print and keep them; what was known of the part before is replaced."""
        told = " ".join(f"{name} {short(value)}" for name, value in figures.items())
        print(f"[{time.perf_counter() - self.began:6.1f}] {section}, {part}: {told}", flush=True)
        line = json.dumps({"section": section, "part": part, **figures}, default=str)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.kept[section, part] = {name: value for name, value in json.loads(line).items() if name in figures}
        self.file.with_suffix(".md").write_text(page(self.kept), encoding="utf-8")

    def target(self, shape: str, dtype: torch.dtype | None = None) -> DescribedTarget:
        """A random model of a shape; a large one is held alone."""
        key = shape, dtype or self.dtype
        if key not in self._targets:
            if shape == self.big or len(self._targets) > 2:
                self.forget()
            model = random_model(shape, key[1], self.device)
            self.read_bytes[shape] = weight_bytes(model)
            self._targets[key] = DescribedTarget.from_model(model, execution=self.args.execution)
            del model  # the target has a copy
            self._collect()
        return self._targets[key]

    def forget(self) -> None:
        """Hold no target any more."""
        self._targets.clear()
        self._collect()

    def _collect(self) -> None:
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def run(self, section: str, limit: float) -> None:
        """Run the parts that are not kept yet, for so many seconds at most."""
        try:
            with limited(limit):
                for part, work in SECTIONS[section](self):
                    if "failed" not in self.kept.get((section, part), {"failed": ""}):
                        print(f"{section}, {part}: kept already", flush=True)
                        continue
                    try:
                        self.keep(section, part, work())
                    except Exception as error:  # one kernel that is missing must not cost the other parts
                        self.keep(section, part, {"failed": f"{type(error).__name__}: {error}"[:800]})
        except OutOfTime as error:
            self.keep(section, "the rest", {"failed": f"no time left {error}; run it again, or with --limits"})
        else:
            if (section, "the rest") in self.kept:
                self.keep(section, "the rest", {"kept": "all"})


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """While inside, OutOfTime is raised after so many seconds."""

    def late(*_: Any) -> None:
        raise OutOfTime(f"after {seconds:g} s")

    former = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def short(value: Any) -> str:
    """A figure as it is printed."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {short(one)}" for key, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(short, value)) or "none"
    return str(value)


def page(kept: Mapping[tuple[str, str], Mapping[str, Any]]) -> str:
    """The figures as tables of Markdown: what was to be reached, and each section's parts."""
    lines = ["# specdec on a GPU", "", short(kept.get(("about", "machine"), {}).get("what", "")), ""]
    lines += ["| to reach | bound | measured | reached |", "| --- | --- | --- | --- |"]
    for goal, (bound, read) in GOALS.items():
        found = read(kept)
        if found is not None:
            value, good = found
            lines.append(f"| {goal} | {bound} | {short(value)} | {'yes' if good else 'no'} |")
    for section in dict.fromkeys(section for section, _ in kept if section != "about"):
        parts = {part: figures for (own, part), figures in kept.items() if own == section}
        names = list(dict.fromkeys(name for figures in parts.values() for name in figures))
        lines += ["", f"## {section}", "", f"| part | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
        for part, figures in parts.items():
            cells = (short(figures[name]) if name in figures else "" for name in names)
            lines.append(f"| {part} | {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def dry_run(check: Check) -> str | None:
    """Name every part that a GPU would run, and import what the parts and ``tests/gpu`` import; an error if one fails.

    Nothing of a loan is then lost to a name that is wrong or a package that is missing.
    """
    check.on_gpu = True
    for section in check.args.only:
        for part, _ in SECTIONS[section](check):
            print(f"{section}, {part}")
    for name in KERNELS:
        importlib.import_module(name)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        "tests/gpu",
    ]
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([*command, "tests/gpu"], cwd=ROOT, capture_output=True, text=True, env=known)
    print(done.stdout.strip().rpartition("\n")[2])
    return done.stdout[-700:] if done.returncode else None


def options(arguments: list[str] | None) -> argparse.Namespace:
    """What was asked for; ends with a message where it cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="OUT.jsonl and OUT.md")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"some of {', '.join(SECTIONS)}; in this order")
    parser.add_argument("--limits", default="", help="SECTION=SECONDS, ...")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", help="of speeds; bits and texts take bfloat16 and float16")
    parser.add_argument("--execution", default="auto")
    parser.add_argument("--big", default="mistral-7b", choices=SHAPES)
    parser.add_argument("--small", default="smollm2", choices=SHAPES)
    parser.add_argument("--new", type=int, default=64, help="tokens of a text")
    parser.add_argument("--texts", type=int, default=8, help="texts of each drafter")
    parser.add_argument("--batches", default="1,8,32,64", help="sequences at once")
    parser.add_argument("--model", help="a model for real text: a named one, a folder or a GGUF file that is here")
    parser.add_argument("--dry-run", action="store_true", help="name every part as on a GPU, import all, run nothing")
    parser.add_argument("--pytest", nargs="*", default=[], help="more for pytest, such as -k bits")
    args = parser.parse_args(arguments)
    args.only = [name for name in args.only.split(",") if name]
    pairs = (part.partition("=") for part in args.limits.split(",") if part)
    args.limits = {name: float(seconds) for name, _, seconds in pairs}
    args.batches = [int(size) for size in args.batches.split(",")]
    if odd := [name for name in (*args.only, *args.limits) if name not in SECTIONS]:
        parser.error(f"{odd[0]!r} is none of {', '.join(SECTIONS)}")
    if args.dry_run:
        args.device = "cpu"
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device here; try --device cpu --dtype float32 --big toy --small toy")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    transformers.utils.logging.set_verbosity_error()
    check = Check(args)
    if args.dry_run:
        sys.exit(dry_run(check))
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    here = f"{caption(describe_environment(check.device))}; {args.big}, {args.small}, {args.dtype}, {args.execution}"
    before = check.kept.get(("about", "machine"), {}).get("what", here)
    if before != here:
        sys.exit(f"{check.file} has figures of something else: {before}; here it is {here}. Name another --out")
    check.keep("about", "machine", {"what": here, "command": f"python scripts/gpu_check.py {given}"})
    for name in args.only:
        check.run(name, args.limits.get(name, LIMITS[name]))
    print(page(check.kept))


if __name__ == "__main__":
    main()
