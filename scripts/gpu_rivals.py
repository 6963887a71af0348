"""The sections of ``gpu_check.py`` about what drafting brings under its policy, and about transformers' own speed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from scripts.gpu_bits import DRAFTERS, QUESTIONS, drafter_for
from scripts.gpu_shapes import Figures, Part
from specdec import Engine, SamplingParams
from specdec.bench.shapes import random_model, random_prompt
from specdec.step.device_copies import seconds_of

__all__ = ["drafting", "rivals"]


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
