"""What cases of the exactness harness run on: targets, and what drafters need for them, made once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specdec import Engine, TransformersTarget
from specdec.costs.curve import roofline
from specdec.drafting.registry import make_drafter
from specdec.parallel.rows import ShardedTarget
from specdec.parallel.tensor import TensorTarget
from tests import launching, models
from tests.bitsandbytes_files import bitsandbytes_checkpoint
from tests.compressed_files import compressed_checkpoint
from tests.exactness.cases import Case
from tests.int4_files import int4_checkpoint
from tests.models import target_for
from tests.quantised_files import quantised_file
from tests.ranks import ThreadRanks, results, run_ranks

__all__ = ["Targets"]

MIXED = ("Q4_K", "Q6_K", "Q5_0", "Q8_0")


class Targets:
    """By executor, format and family.

    Args:
        folder: for checkpoints and the weights of drafters.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._made, self._settings = folder, dict[Any, TransformersTarget](), dict[Any, Any]()
        self._loading = threading.Lock()  # while a model is loaded, the default dtype of all threads is another

    def of(self, case: Case) -> TransformersTarget:
        """The case's; where steps are recorded it is made for each case."""
        if case.recorded:
            target = launching.fused(models.new_model(case.family))
            target.executor.pages = case.executor == "paged"
            return target
        key = (case.executor, case.format, case.family, case.activations)
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, executor: str, form: str, family: str, activations: str) -> TransformersTarget:
        if form == "float64":
            execution = "auto" if executor in ("fused", "split") else "modules"
            return models.target_of(family, torch.float64, execution)
        if form in ("float32", "bfloat16"):
            of_16 = {"head_dim": 16} if executor == "native" else {"hidden_size": 64}  # heads that the library reads
            model = models.new_model(family, getattr(torch, form), **of_16)
            return target_for(model, execution=executor)
        place = self._folder / f"{form} {family}"
        wide = {"head_dim": 32} if family in ("qwen3", "gemma2") else {}
        if form in ("gptq", "awq"):
            int4_checkpoint(place, method=form, family=family, group_size=64, **wide)
        elif form.startswith("compressed"):
            compressed_checkpoint(place, bits=int(form.split()[1]), family=family, **wide)
        elif form.startswith("bitsandbytes"):
            bitsandbytes_checkpoint(place, kind=form.split()[1], family=family)
        else:
            place = quantised_file(place.with_suffix(".gguf"), MIXED if form == "mixed" else (form,), family=family)
        return TransformersTarget.from_pretrained(place, activations=activations)

    def settings(self, case: Case, target: TransformersTarget, drafter: str) -> dict[str, Any]:
        """Options of a registered drafter for this target."""
        key = (case.executor == "native", case.format, case.family, drafter)
        if key not in self._settings:
            folder = self._folder / " ".join(map(str, key))
            folder.mkdir()
            self._settings[key] = models.settings_of(drafter, target, folder)
        known = self._settings[key]
        chosen = dict(known[case.setting % len(known)])
        if drafter in ("kangaroo", "medusa") and (case.recorded or case.apart):
            chosen["check_target"] = False  # another object of the same weights
        if case.rejects:
            chosen.pop("persistent", None)  # what is kept from text to text is drafted from, too
        return chosen

    def run(self, case: Case, target: TransformersTarget, drafter: Any, ask: Callable[[Engine], Any]) -> list[Any]:
        """What ``ask`` says of an engine of the case, on every rank."""
        sizes: dict[str, Any] = {"max_rows": case.max_rows, "prefill_chunk": case.chunk, "policy": case.policy}
        if not case.apart:
            return [ask(engine_of(target, drafter, **sizes))]
        own = [models.new_model(case.family) for _ in range(2 + case.seed % 2)]
        kind = TensorTarget if case.executor == "tensor" else ShardedTarget

        def work(ranks: ThreadRanks) -> Any:
            sharded = kind(TransformersTarget(own[ranks.rank]), ranks=ranks)
            with self._loading:
                made = make_drafter(drafter, sharded)
            return ask(engine_of(sharded, made, **sizes))

        return results(run_ranks(len(own), work))


class Letters:
    """A tokenizer of one letter per token."""

    all_special_ids: tuple[int, ...] = ()

    def decode(self, tokens: Any, **_: Any) -> str:
        return "".join(chr(ord("A") + token) for token in tokens)


def engine_of(target: TransformersTarget, drafter: Any, **sizes: Any) -> Engine:
    """By given costs: which drafts are made must not depend on what a forward takes here."""
    return Engine(target, Letters(), drafter, costs=roofline(), **sizes)
