"""What a GPU makes of specdec, in the minutes of a short loan: one command, most important sections first.

    python scripts/gpu_check.py --out runs/gpu_check                       # all sections, some ten minutes on an H100
    python scripts/gpu_check.py --sections bits,step --limits step=60      # some of them, one with another time limit
    python scripts/gpu_check.py --gguf SmolLM2.gguf                        # real text, with a file that lies beside it

Nothing is fetched. Every figure is printed as it comes and kept in OUT.jsonl; a section that ended there is not run
again, so that a run that was cut short goes on where it was. A section that fails or has no time left is recorded, and
the next one goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from scripts.checkout import use_checkout

use_checkout()

import torch
import torch.nn.functional as F
import transformers

from specdec import Draft, Engine, SamplingParams, TransformersTarget
from specdec.bench.environment import caption, describe_environment
from specdec.bench.shapes import SHAPES, random_model, random_prompt, weight_bytes
from specdec.block import Batch, Block
from specdec.copies import seconds_of, wait
from specdec.cost import measure
from specdec.errors import SpecdecError

BIG, SMALL = "mistral-7b", "smollm2"
SHAPES.setdefault(
    SMALL,
    transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=None,
    ),
)  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
DRAFTERS: tuple[Any, ...] = (
    "prompt_lookup", "suffix_automaton", "token_recycling", "lookahead", "jacobi", "auto", "medusa", "kangaroo",
    "draft_model",
)  # fmt: skip


class OutOfTime(Exception):
    """A section has had its time."""


class Check:
    """The figures, printed and kept; and what sections share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.dtype = getattr(torch, args.dtype)
        self.big, self.small = args.big, args.small
        self.began = time.perf_counter()
        self.file = args.out.with_suffix(".jsonl")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        self.done = {line["section"] for line in map(json.loads, lines) if "ended" in line}
        self.section = ""
        self._targets: dict[tuple[str, torch.dtype], TransformersTarget] = {}

    def note(self, **figures: Any) -> None:
        told = " ".join(f"{name} {_short(value)}" for name, value in figures.items())
        print(f"[{time.perf_counter() - self.began:6.1f}] {self.section}: {told}", flush=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"section": self.section, **figures}, default=str) + "\n")

    def target(self, shape: str, dtype: torch.dtype | None = None) -> TransformersTarget:
        """A random model of a shape; one is held at a time, but for small ones."""
        key = shape, dtype or self.dtype
        if key not in self._targets:
            if shape == self.big or len(self._targets) > 2:
                self._targets.clear()
                gc.collect()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
            began = time.perf_counter()
            model = random_model(shape, key[1], self.device)
            self._targets[key] = TransformersTarget(model, execution=self.args.execution, owned=True)
            self.note(
                made=shape, dtype=str(key[1]), seconds=time.perf_counter() - began, alike=self._targets[key].alike,
                runner=self._targets[key].runner.name,
            )  # fmt: skip
        return self._targets[key]

    def run(self, name: str, section: Callable[[Check], None], limit: float) -> None:
        self.section = name
        began = time.perf_counter()
        try:
            with _limited(limit):
                section(self)
            self.note(ended=time.perf_counter() - began)
        except (OutOfTime, Exception) as error:  # one kernel that is missing must not cost the other sections
            self.note(failed=f"{type(error).__name__}: {' '.join(str(error).split())}"[:1500])
            if os.environ.get("GPU_CHECK_TRACE"):
                raise


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return " ".join(f"{key}:{_short(one)}" for key, one in value.items())
    return str(value)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise OutOfTime(f"after {seconds:g} s")

    former = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def device_us(work: Callable[[int], object], device: torch.device, calls: int = 20) -> float:
    """Microseconds of a call, the median of five graphs of so many calls; ``work`` is told which it is."""
    if device.type != "cuda":
        began = time.perf_counter()
        work(0)
        return 1e6 * (time.perf_counter() - began)
    stream: Any = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            work(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in range(calls):
                work(call)
        event: Any = torch.cuda.Event
        times = []
        for _ in range(6):
            first, last = event(enable_timing=True), event(enable_timing=True)
            first.record(stream)
            graph.replay()
            last.record(stream)
            last.synchronize()
            times.append(float(first.elapsed_time(last)))
    return sorted(times[1:])[2] / calls * 1e3


def tree_parents(rows: int, kind: str) -> list[int]:
    """A chain, a star, or a binary tree."""
    if kind == "chain":
        return list(range(-1, rows - 1))
    return [-1, *((0 if kind == "star" else (row - 1) // 2) for row in range(1, rows))]


# -- Sections ----------------------------------------------------------------------------------------------------------


def bandwidth(check: Check) -> None:
    """Bytes per second of copies and of reads."""
    size = 1 << (31 if check.device.type == "cuda" else 22)
    source = torch.ones(size // 4, device=check.device)
    sink = torch.empty_like(source)
    check.note(
        copy=2 * size / device_us(lambda _: sink.copy_(source), check.device, 3) / 1e6,
        read=size / device_us(lambda _: source.sum(), check.device, 3) / 1e6,
    )


def bits(check: Check) -> None:
    """A row's bits beside any others: products, whole steps of chains and trees, recorded and launched, and batches."""
    for shape in (check.big, check.small):
        for dtype in (torch.bfloat16, torch.float16) if shape == check.small else (check.dtype,):
            if check.device.type == "cuda":
                product_bits(check, shape, dtype)
            target = check.target(shape, dtype)
            step_bits(check, target, shape, 100 if shape == check.small else 1000)


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


def product_bits(check: Check, shape: str, dtype: torch.dtype) -> None:
    from specdec.kernels.product import product

    for name, (outputs, inputs, gated) in product_shapes(shape).items():
        weight = torch.randn(outputs * (2 if gated else 1), inputs, dtype=dtype, device=check.device) / inputs**0.5
        rows = torch.randn(512, inputs, dtype=dtype, device=check.device)
        options = {"gated": gated, "whole": name == "head"}
        every = product(rows, weight, None, **options)
        reference = rows.double() @ weight.double().T
        if gated:
            reference = F.silu(reference[:, :outputs]) * reference[:, outputs:]
        off = float(((every if every.ndim == 2 else every.sum(0)).double() - reference).norm() / reference.norm())
        wrong = [
            count for count in (1, 2, 8, 16, 17, 33, 64, 65, 128, 129, 300)
            if not torch.equal(product(rows[512 - count :], weight, None, **options), every[..., 512 - count :, :])
        ]  # fmt: skip
        check.note(product=name, shape=shape, dtype=str(dtype), error=off, differing_counts=wrong)


def step_bits(check: Check, target: TransformersTarget, shape: str, length: int) -> None:
    """Logits of a tree's rows against the same tokens decoded one by one down the longest path."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(target.vocab_size, (length + 200,), generator=generator).tolist()

    def filled() -> Any:
        cache = target.new_cache(capacity=length + 300, rows=128)
        for start in range(0, length, 128):
            part = text[start : min(start + 128, length)]
            target.forward(Block(cache, part, device=check.device, again=False), rows=())
            cache.commit(range(len(part)))
        return cache

    with target.active():
        cache, plain = filled(), filled()
        for rows in (2, 8, 16, 33, 64, 128):
            for kind in ("chain", "binary", "star"):
                parents = tree_parents(rows, kind)
                draft = Draft(text[length : length + rows], parents)
                logits = []
                for again in (True, False):
                    block = Block.of(draft, cache, check.device)
                    block.again = again
                    logits.append(target.forward(block).logits)
                path = [rows - 1]
                while parents[path[0]] >= 0:
                    path.insert(0, parents[path[0]])
                path = path[:12]
                plain.length = length
                wrong = 0
                for row in path:
                    one = target.forward(Block(plain, [text[length + row]], device=check.device)).logits
                    wrong += not torch.equal(one[0], logits[0][row])
                    plain.commit([0])
                check.note(
                    shape=shape, rows=rows, kind=kind, differing_from_plain=f"{wrong} of {len(path)}",
                    launched_equal=torch.equal(logits[0], logits[1]),
                    finite=bool(logits[0].isfinite().all()),
                )  # fmt: skip
        blocks = [
            Block.of(Draft(text[:rows], tree_parents(rows, "binary")), filled(), check.device) for rows in (3, 9, 1)
        ]
        alone = torch.cat([target.forward(block).hidden for block in blocks])
        together = target.forward(Batch(blocks)).hidden
        check.note(shape=shape, batch_equal=torch.equal(alone, together))


def step(check: Check) -> None:
    """Plain decoding, and what rows cost."""
    for shape in (check.big, check.small):
        target = check.target(shape)
        engine = Engine(target)
        began = time.perf_counter()
        target.warm_up(128)
        wait(check.device)
        check.note(shape=shape, warm_up_seconds=time.perf_counter() - began)
        prompt = random_prompt(target.vocab_size, min(1024, target.context_length // 2))
        speeds = []
        for _ in range(3):
            out = engine.generate(prompt, check.args.new)
            speeds.append(check.args.new / out.stats.seconds.decode)
        check.note(
            shape=shape, tokens_per_second=max(speeds[1:]), all=[round(one, 1) for one in speeds],
            prefill_ms=1e3 * out.stats.seconds.prefill, weight_bytes=weight_bytes(target.model),
            bandwidth_used=max(speeds[1:]) * weight_bytes(target.model) / 1e12,
        )  # fmt: skip
        for kind in (True, False):
            curve = measure(target, rows=ROWS, lengths=[len(prompt)], seconds=8.0, tree=kind)
            taken = dict(zip(curve.rows, curve.seconds[0], strict=True))
            ratios = {rows: round(seconds / taken[1], 3) for rows, seconds in taken.items()}
            check.note(shape=shape, tree=kind, ms_of_one=1e3 * taken[1], ratios=ratios)


@contextmanager
def launched_late(target: Any) -> Iterator[None]:
    """While inside, no kernel is launched before the one ahead has ended, so that each one's time is its own."""
    from specdec.kernels import layer, product, step

    former, graphs = product.early, target.runner._graphs
    for module in (layer, product, step):
        module.early = lambda device: {"PDL": False}
    graphs.kind += 1
    try:
        yield
    finally:
        graphs.kind -= 1
        for module in (layer, product, step):
            module.early = former


def profile(check: Check) -> None:
    """Device time by kernel, of plain steps and of steps of 64 rows, without the prompt; each kernel begins late."""
    for shape in (check.big, check.small):
        target = check.target(shape)
        with target.active(), launched_late(target):
            cache = target.new_cache(capacity=2000, rows=128)
            cache.length = min(1024, target.context_length // 2)
            cache.reserve(1300)
            for group in cache.groups:
                group.keys.zero_()
                group.values.zero_()
            for rows in (1, 64):
                draft = Draft([5] * rows, tree_parents(rows, "binary"))
                profile_of(
                    check, shape, rows, lambda d=draft, c=cache, t=target: t.forward(Block.of(d, c, check.device))
                )


def profile_of(check: Check, shape: str, rows: int, run: Callable[[], object]) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    for _ in range(3):
        run()
    seconds = min(seconds_of(run, check.device, time.perf_counter) for _ in range(3))
    with recorded(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            run()
        wait(check.device)
    sums: dict[str, list[float]] = {}
    for one in found.events():
        if str(one.device_type).endswith("CUDA"):
            sums.setdefault(one.name[:60], []).append(float(one.device_time_total))
    told = {name: f"{sum(times) / 5:.0f}us/{len(times) // 5}" for name, times in sums.items() if sum(times) > 10}
    for name in ("_product", "_attend"):  # one layer's, in their order
        own = sums.get(name, [])
        each = {"_product": 4, "_attend": 2}[name]
        told[f"{name} in turn"] = [round(one, 1) for one in own[8 * each : 9 * each]]
    check.note(shape=shape, rows=rows, ms=1e3 * seconds, kernels=told)


def settings(check: Check) -> None:
    """One setting of the kernels after the other: it is kept where steps of 1 and 64 rows take less time with it.

    Bits differ between settings of attention, not between those of launches.
    """
    from specdec.kernels import layer, product, step

    target: Any = check.target(check.big)

    def taken() -> dict[int, float]:
        target.runner._graphs.kind += 1  # recorded anew
        found = {}
        for rows in (1, 64):
            draft = Draft([5] * rows, tree_parents(rows, "binary"))
            run = lambda d=draft: target.forward(Block.of(d, cache, check.device))  # noqa: E731
            for _ in range(3):
                run()
            found[rows] = sorted(1e3 * seconds_of(run, check.device, time.perf_counter) for _ in range(15))[7]
        return found

    def set_early(options: dict[str, Any]) -> Callable[[], None]:
        def put() -> None:
            for module in (layer, product, step):
                module.early = lambda device: options if device.type == "cuda" else {"PDL": False}

        return put

    def set_constants(**over: Any) -> Callable[[], None]:
        def put() -> None:
            own = step.constants
            step.constants = lambda *args, **kwargs: {**own(*args, **kwargs), **over}

        return put

    def set_cut(over: dict[Any, Any]) -> Callable[[], None]:
        def put() -> None:
            own = product.cut_of

            def cut(outputs: int, inputs: int, gated: bool, bucket: int, shared: int = 0) -> Any:
                known = own(outputs, inputs, gated, bucket, shared or 227 << 10)
                return dataclasses.replace(known, **over.get((gated, bucket), {}))

            product.cut_of = cut

        return put

    def put(module: Any, name: str, value: Any) -> Callable[[], None]:
        return lambda: setattr(module, name, value)

    changes = {
        "next launched when the one ahead has ended": set_early({"PDL": False}),
        "512 inputs read ahead": put(product, "_AHEAD", 512),
        "attention 16 rows": set_constants(ROWS=16),
        "attention 16 rows, 2 warps": set_constants(ROWS=16, num_warps=2),
        "attention 8 warps": set_constants(num_warps=8),
        "attention 3 stages": set_constants(num_stages=3),
        "attention 128 keys": set_constants(KEYS=128),
        "gate_up 64 rows: 64 inputs, 5 stages": set_cut({(True, 64): {"step": 64, "stages": 5}}),
        "other 64 rows: 64 inputs, 6 stages": set_cut({(False, 64): {"step": 64, "stages": 6}}),
        "gate_up 16 rows: 3 stages": set_cut({(True, 16): {"stages": 3}}),
        "other 64 rows: 4 stages": set_cut({(False, 64): {"stages": 4}}),
        "other 16 rows: 5 stages": set_cut({(False, 16): {"stages": 5}}),
    }
    with target.active():
        cache = target.new_cache(capacity=2000, rows=128)
        cache.length = min(1024, target.context_length // 2)
        cache.reserve(1300)
        for group in cache.groups:
            group.keys.zero_()
            group.values.zero_()
        best = taken()
        check.note(as_it_is=best)
        for name, change in changes.items():
            former = [(m, dict(vars(m))) for m in (layer, product, step)]
            change()
            try:
                found = taken()
                better = 3 * found[1] + found[64] < 3 * best[1] + best[64]
            except Exception as error:  # too much of a processor's memory
                found, better = {1: str(error)[:100]}, False
            check.note(setting=name, ms=found, kept=better)
            if better:
                best = found
            else:
                for module, values in former:
                    vars(module).update(values)
        check.note(best=best)
        target.runner._graphs.kind += 1


def products(check: Check) -> None:
    """Every way to cut each product beside cuBLAS's: weights in turn, so that no cache holds them."""
    from specdec.kernels.product import Cut, cut_of, product

    for shape in (check.big, check.small):
        for name, (outputs, inputs, gated) in product_shapes(shape).items():
            high = outputs * (2 if gated else 1)
            several = max(2, min(20, (1 << 30) // (high * inputs * 2)))
            weights = [torch.randn(high, inputs, dtype=check.dtype, device=check.device) for _ in range(several)]
            size = 2e-6 * high * inputs  # megabytes; over microseconds they are terabytes a second
            activations = {
                rows: torch.randn(rows, inputs, dtype=check.dtype, device=check.device) for rows in (1, 64, 128)
            }
            theirs = {
                rows: size / device_us(lambda n, x=x, held=weights: F.linear(x, held[n % len(held)]), check.device)
                for rows, x in activations.items()
            }
            check.note(shape=shape, product=name, cublas=theirs)
            own = cut_of(outputs, inputs, gated, 16)
            for cut in dict.fromkeys([own, *cuts(Cut, own, inputs, gated or name == "head")]):
                speeds: dict[int, Any] = {}
                try:
                    for rows, x in activations.items():
                        taken = device_us(
                            lambda n, x=x, cut=cut, held=weights, two=gated: product(
                                x, held[n % len(held)], None, gated=two, cut=cut
                            ),
                            check.device,
                        )
                        speeds[rows] = size / taken
                except Exception as error:  # too much of a processor's memory
                    speeds["failed"] = str(error)[:60]
                key = f"{cut.tile}x{cut.step}/{cut.splits} w{cut.warps} s{cut.stages}"
                check.note(shape=shape, product=name, cut=key, tb_a_second=speeds)


def cuts(cut: Any, own: Any, inputs: int, whole: bool) -> Iterator[Any]:
    """Other ways."""
    for tile, step, warps, stages in (
        (64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4),
        (128, 64, 8, 6),
    ):  # fmt: skip
        turns = -(-inputs // step)
        for splits in {1} if whole else {own.splits, own.splits * 2, max(1, own.splits // 2)}:
            if splits == 1 or turns % splits == 0:
                yield cut(tile, step, splits, warps, stages)


def tiny_drafters() -> dict[Any, Any]:
    """Drafters with what the embedded model has for them."""
    return {"draft_model": {"name": "draft_model", "model": str(ROOT / "specdec" / "assets" / "tiny-draft")}}


def texts(check: Check) -> None:
    """Every drafter's texts against plain decoding's: embedded model, and a GGUF file; one and eight at once."""
    paths = ["tiny", *([check.args.gguf] if check.args.gguf else [])]
    questions = [
        "Once upon a time there was a little", "The dog and the cat went to", "Tom had a red ball. He",
        "One day, Lily found", "The sun was warm and the", "Mum said that it was time to", "In the garden there lived",
        "A big bear came out of",
    ]  # fmt: skip
    for path in paths:
        engine = Engine.from_pretrained(path, "none", dtype=check.args.dtype, device=check.args.device, policy="off")
        check.note(path=path, alike=engine.target.alike, told=engine.target.describe()["execution"]["runner"])
        for temperature in map(float, check.args.temperatures.split(",")):
            sampling = SamplingParams(temperature=temperature, seed=3, acceptance="match")
            plain: list[list[int]] = []
            for drafter in ("none", *DRAFTERS):
                try:
                    one = engine.with_drafter(tiny_drafters().get(drafter, drafter) if path == "tiny" else drafter)
                    began = time.perf_counter()
                    outs = [one.generate(question, check.args.new, sampling) for question in questions]
                    seconds = time.perf_counter() - began
                    found = [out.token_ids for out in outs]
                    plain = plain or found
                    batch = [out.token_ids for out in one.generate_batch(questions, check.args.new, sampling, batch=8)]
                except SpecdecError as error:
                    check.note(path=path, T=temperature, drafter=drafter, refused=str(error)[:200])
                    continue
                tokens = sum(map(len, found))
                check.note(
                    path=path, T=temperature, drafter=drafter, texts_differing=differing(found, plain),
                    batch_differing=differing(batch, plain), tokens_per_second=tokens / seconds,
                    tokens_a_step=tokens / sum(len(out.steps) if hasattr(out, "steps") else 1 for out in outs),
                )  # fmt: skip


def differing(found: list[list[int]], plain: list[list[int]]) -> str:
    return f"{sum(one != other for one, other in zip(found, plain, strict=True))} of {len(plain)}"


def batches(check: Check) -> None:
    """Tokens per second of many sequences at once."""
    for shape, sizes in ((check.big, (1, 8, 32, 64)), (check.small, (1, 32))):
        engine = Engine(check.target(shape))
        for batch in sizes:
            prompts = [random_prompt(engine.target.vocab_size, 64, seed) for seed in range(batch)]
            engine.generate_batch(prompts[:batch], 4, batch=batch)
            began = time.perf_counter()
            outs = engine.generate_batch(prompts, 48, batch=batch)
            seconds = time.perf_counter() - began
            check.note(shape=shape, batch=batch, tokens_per_second=sum(len(out.token_ids) for out in outs) / seconds)


def tests(check: Check) -> None:
    """The GPU's own tests, but for what the other sections do at length."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # the checkout's entry points
    done = subprocess.run([*command, *check.args.pytest], cwd=ROOT, capture_output=True, text=True, env=known)
    check.note(status=done.returncode, told=done.stdout[-1500:])


SECTIONS: dict[str, tuple[Callable[[Check], None], float]] = {
    "bandwidth": (bandwidth, 20),
    "bits": (bits, 120),
    "step": (step, 90),
    "profile": (profile, 40),
    "settings": (settings, 120),
    "products": (products, 120),
    "texts": (texts, 120),
    "batches": (batches, 60),
    "tests": (tests, 200),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"))
    parser.add_argument("--sections", default=",".join(SECTIONS), help="in this order")
    parser.add_argument("--limits", default="", help="SECTION=SECONDS, ...")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--execution", default="auto")
    parser.add_argument("--big", default=BIG, choices=SHAPES)
    parser.add_argument("--small", default=SMALL, choices=SHAPES)
    parser.add_argument("--new", type=int, default=96, help="tokens of a text")
    parser.add_argument("--temperatures", default="0,1", help="of the texts")
    parser.add_argument("--gguf", help="a model's file, for real text")
    parser.add_argument("--pytest", nargs="*", default=[], help="more for pytest, such as -k bits")
    args = parser.parse_args(arguments)
    limits = {
        name: float(seconds) for name, _, seconds in (part.partition("=") for part in args.limits.split(",") if part)
    }
    names = [name for name in args.sections.split(",") if name]
    if odd := [name for name in (*names, *limits) if name not in SECTIONS]:
        parser.error(f"{odd[0]!r} is none of {', '.join(SECTIONS)}")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device here; try --device cpu --dtype float32 --big toy --small toy")
    transformers.utils.logging.set_verbosity_error()
    check = Check(args)
    check.section = "about"
    check.note(machine=caption(describe_environment(check.device)), command=" ".join(sys.argv[1:]))
    for name in names:
        if name in check.done:
            print(f"{name}: done already")
            continue
        section, limit = SECTIONS[name]
        check.run(name, section, limits.get(name, limit))


if __name__ == "__main__":
    main()
