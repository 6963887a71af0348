"""The sections of ``gpu_check.py`` about what is exact: rows beside rows, and drafted texts beside plain ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from scripts.gpu_shapes import HALF, Figures, Part, named, product_shapes, tree_parents
from specdec import Draft, Engine, SamplingParams
from specdec.step.batched_rows import Batch
from specdec.step.block import Block

__all__ = ["DRAFTERS", "QUESTIONS", "again", "bits", "drafter_for", "texts"]

ROOT = Path(__file__).resolve().parent.parent
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
            self.target.forward(Block(cache, part, device=self.device, again=False), rows=())
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
                one = self.target.forward(Block(plain, [draft.tokens[row]], device=self.device)).logits
                wrong += not torch.equal(one[0], recorded[row])
                plain.commit([0])
        return {
            "differing": wrong, "compared": len(path[:12]), "launched_equal": torch.equal(recorded, launched),
            "finite": bool(recorded.isfinite().all()),
        }  # fmt: skip

    def logits(self, draft: Draft, cache: Any, again: bool) -> torch.Tensor:
        block = Block.of(draft, cache, self.device)
        block.again = again
        found: torch.Tensor = self.target.forward(block).logits
        return found

    def batch(self) -> Figures:
        """Three sequences in one step, and each alone."""
        with self.target.active():
            sizes = (3, min(9, self.most), 1)
            drafts = [Draft(self.text[:rows], tree_parents(rows, "binary")) for rows in sizes]
            caches = [self.filled(length) for length in (self.length, 5, self.length // 2)]
            blocks = [Block.of(draft, own, self.device) for draft, own in zip(drafts, caches, strict=True)]
            alone = torch.cat([self.target.forward(block).hidden for block in blocks])
            together = self.target.forward(Batch(blocks)).hidden
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

    former, graphs = launch.EARLY, target.runner._graphs
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
