"""The walk of a recorded step, by Triton's interpreter and by the stand-in, against the host's verdict."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from specdec import Draft, SamplingParams
from specdec.runners.sent_rows import SentRows
from specdec.sampling.sampler import Sampler
from specdec.sampling.verify import match
from specdec.step import device_copies
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.joining import joined
from specdec.step.pages import PagePool
from specdec.step.step_io import Draws, StepInput, Walk, Wanted
from specdec.step.step_output import StepOutput
from tests import seam
from tests.launching import Kernels

pytest.importorskip("triton", reason="Triton is not installed")
module = pytest.importorskip("specdec.runners.kernels.walk")

CPU = torch.device("cpu")
TOKENS = 2  # so few that siblings are equal, and that paths get long


@pytest.fixture(params=["interpreter", "stand-in"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(device_copies, "is_apart", lambda device: True)
    if request.param == "interpreter":
        return module
    stand_in = Kernels()
    monkeypatch.setattr(device_copies, "address", stand_in.address)
    return stand_in


def tokens_of(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(TOKENS), weights=(4, 1), k=count)


class Step:
    """One sequence's rows of a step, its target's tokens, and what the host makes of them."""

    def __init__(self, rng: random.Random, cache: KVCache, most: int) -> None:
        size = rng.randint(1, most)
        chain = rng.random() < 0.3
        parents = [-1, *(row - 1 if chain else rng.randint(0, row - 1) for row in range(1, size))]
        tokens = tokens_of(rng, size)
        probes = frozenset(row for row in range(1, size) if rng.random() < 0.15)
        self.draft, self.sampled, self.decides = Draft(tokens, parents, probes=probes), rng.random() < 0.5, True
        self.cache, self.rows = cache, size
        cache.reserve(cache.length + size)
        self.best, self.drawn = (tokens_of(rng, size) for _ in range(2))
        sampling = SamplingParams(temperature=0.8, acceptance="match") if self.sampled else SamplingParams()
        logits = torch.nn.functional.one_hot(torch.tensor(self.best), TOKENS).float()
        output = StepOutput(logits, drawn=self.drawn if self.sampled else ())
        self.verdict = match(self.draft, output, Sampler(sampling, [1], TOKENS, CPU))

    def step(self) -> StepInput:
        """Its rows, of which a device is to decide."""
        may = np.array([row not in self.draft.probes for row in range(self.rows)])
        draws = Draws((7,), (1.0,)) if self.sampled else None
        wanted = Wanted(draws=draws, walks=(Walk(may, True) if self.decides else Walk(),))
        return seam.Text(self.cache).rows(self.draft, wanted=wanted)


def cache_of(rows: int, heads: int = 2, width: int = 4, window: int | None = None, layers: int = 2) -> KVCache:
    return KVCache([LayerSpec(heads, width, width, window, CPU, torch.float16)] * layers, capacity=150, rows=rows)


def walked(kernels: Any, steps: list[Step], store: tuple[int, int] | None) -> torch.Tensor:
    """[S, K, 5] after the walk of all sequences in one step."""
    arrays = SentRows(joined([step.step() for step in steps])).shapes
    where = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    each = where["above"].shape[-1]
    picked = torch.full((where["above"].numel(), 5), -7)
    for step, own in zip(steps, picked.view(-1, each, 5), strict=False):
        own[: len(step.best), 0], own[: len(step.drawn), 1] = torch.tensor(step.best), torch.tensor(step.drawn)
    kernels.walk(picked, where, store, torch.empty(0, dtype=torch.float16))
    return picked.view(-1, each, 5)


@pytest.mark.few(1)
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("most", [4, 18])
def test_the_walk_is_the_host_s(sequences: int, most: int, kernels: Any) -> None:
    """Random trees and chains, greedy and drawn, with probes; of some sequences nothing is decided."""
    deepest = 0
    for seed in range(25 if sequences == 1 else 8):
        rng = random.Random(seed)
        steps = [Step(rng, cache_of(most), most) for _ in range(sequences)]
        for step in steps:
            step.decides = seed == 0 or rng.random() < 0.8
        if all(step.rows == 1 for step in steps):
            continue
        found_of = walked(kernels, steps, None)
        assert (found_of[sequences:, :, 2:4] == -1).all(), "nothing is decided of a sequence that fills up"
        for step, found in zip(steps, found_of, strict=False):
            path, tokens = step.verdict.path, step.verdict.tokens
            rows = found[: step.rows, 2:].tolist()
            if step.decides:
                assert rows == [[path[-1], len(path) - 1, tokens[-1]]] * step.rows, (seed, step.draft)
                deepest = max(deepest, len(path))
            else:
                assert [row[:2] for row in rows] == [[-1, -1]] * step.rows
    assert deepest > 2


def filled(cache: KVCache, rows: int) -> None:
    """Random keys and values at all positions up to the last of a step's rows."""
    cache.reserve(cache.length + rows)
    for layer, group in enumerate(cache.group_of):
        first = max(0, cache.length + rows - group.limit)
        size = group.limit if first else cache.length + rows
        keys, values = torch.randn(2, 1, *_shape(cache, layer, size)).half()
        cache.write(layer, keys, values, first)


def _shape(cache: KVCache, layer: int, size: int) -> tuple[int, int, int]:
    keys = cache.group_of[layer].read(0, 1)[0]
    return keys.shape[2], size, keys.shape[4]


def copied(cache: KVCache, rows: int) -> list[torch.Tensor]:
    """Keys and values of all positions that are held, up to ``rows`` behind the text."""
    found = list[torch.Tensor]()
    for group in cache.groups:
        end = cache.length + rows
        found += group.read(max(0, end - group.limit), end)
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize(
    ("paged", "window", "heads", "width"),
    [(True, None, 2, 4), (False, None, 3, 12), (False, 20, 1, 8), (True, 9, 2, 8)],
)
def test_the_commit_is_the_host_s(
    paged: bool, window: int | None, heads: int, width: int, sequences: int, kernels: Any
) -> None:
    """Over the ends of pages, and of rings; only what the host would move is moved."""
    spec, moved = LayerSpec(heads, width, width, window, CPU, torch.float16), 0
    for seed in range(24 if sequences == 1 else 8):
        rng = random.Random(seed)
        pools = {spec: PagePool(spec, 2)} if paged else None
        steps, hosts = list[Step](), list[KVCache]()
        for _ in range(sequences):
            cache = KVCache([spec] * 2, capacity=150, rows=18, pools=pools)
            cache.length = rng.choice((3, 55, 60, 127))
            steps.append(Step(rng, cache, 18))
            filled(cache, steps[-1].rows)
            steps[-1].decides = rng.random() < 0.8
        if all(step.rows == 1 for step in steps):
            continue
        expected = list[list[torch.Tensor]]()
        for step in steps:
            cache, path = step.cache, step.verdict.path if step.decides else [0]
            host = KVCache([spec] * 2, capacity=150, rows=18, pools=pools)
            host.length = cache.length
            host.reserve(host.length + step.rows)
            for mine, theirs in zip(host.groups, cache.groups, strict=True):
                first = max(0, host.length + step.rows - theirs.limit)
                mine.fill(first, *theirs.read(first, host.length + step.rows))
            host.commit(path)
            hosts.append(host)
            expected.append(copied(host, step.rows - len(path)))
            moved += path[-1] >= len(path)
        walked(kernels, steps, (heads, width))
        for step, own in zip(steps, expected, strict=True):
            cache, path = step.cache, step.verdict.path if step.decides else [0]
            cache.moved = step.decides
            cache.commit(path)
            for one, other in zip(copied(cache, step.rows - len(path)), own, strict=True):
                assert torch.equal(one, other), (seed, path)
    assert moved > 2
