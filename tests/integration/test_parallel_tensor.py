"""Weights spread over ranks: what rank 0 computes holds for all, under every drafter and rule.

Here every rank has the whole model, and rank 1 rounds wildly: what a rank gets from its own layers does not matter then
for any text. ``test_processes.py`` has weights that transformers has split.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import Draft, Engine, SamplingParams
from specdec.drafting.registry import drafter_names, make_drafter
from specdec.errors import ParallelError
from specdec.models.transformers_target import TransformersTarget
from specdec.parallel.tensor import TensorTarget
from tests.fakes import Scripted
from tests.models import OF_LAYERS, greedy, new_model, prompt_of, settings_of, target_of
from tests.ranks import ThreadRanks, results, run_ranks
from tests.tiers import turns

PROMPT, NEW = prompt_of(7), 24
SAMPLING = SamplingParams(temperature=0.8, seed=5)
_LOADING = threading.Lock()  # while a model is loaded, the default dtype of all threads is another


def texts(drafter: Any, sampling: SamplingParams | None, *, spoiled: bool = True) -> list[Any]:
    """What each of two ranks generates, or raises."""
    models = [new_model("llama") for _ in range(2)]

    def work(ranks: ThreadRanks) -> list[int]:
        target = TensorTarget(TransformersTarget(models[ranks.rank]), ranks=ranks)
        with _LOADING:
            made = make_drafter(drafter(ranks.rank) if callable(drafter) else drafter, target)
        if spoiled and ranks.rank == 1:
            own: Any = target._target
            assert own.ends  # measured of right logits, as in a process that computes its part
            run, generator = own.forward, torch.Generator().manual_seed(0)

            def spoilt(*given: Any) -> Any:
                output = run(*given)
                for found in (*output.hidden.values(), output.logits):
                    if found is not None:
                        found.add_(torch.randn(found.shape, generator=generator, dtype=found.dtype))
                return output

            own.forward = spoilt
        return Engine(target, None, made).generate(PROMPT, NEW, sampling).token_ids

    return run_ranks(2, work)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("drafter", "sampling"), turns([name for name in drafter_names() if name not in OF_LAYERS], (None, SAMPLING))
)
def test_rank_0_decides(drafter: str, sampling: SamplingParams | None, tmp_path: Path) -> None:
    """Also where a draft is drawn from a q, or read from hidden states."""
    settings = settings_of(drafter, target_of("llama"), tmp_path)[0]
    alone = Engine(target_of("llama"), None, settings).generate(PROMPT, NEW, sampling).token_ids
    assert results(texts(settings, sampling)) == [alone, alone]
    assert sampling is not None or alone == greedy("llama", PROMPT, NEW)


def test_ranks_that_draft_otherwise_end() -> None:
    def drafter(rank: int) -> Scripted:
        return Scripted(lambda context, row_budget: Draft.chain([context.root, 5 + rank * (len(context.tokens) > 10)]))

    for error in texts(drafter, None, spoiled=False):
        assert isinstance(error, ParallelError)
        assert "rank 1 has not the rows of rank 0" in str(error)
