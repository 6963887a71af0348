"""Prefetching changes no bit of a product, and the limits of the cores are shown beside a forward's time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.cli.tune import table
from specdec.costs.curve import CostCurve
from specdec.costs.shares import Shares, shares
from specdec.errors import ConfigError
from specdec.models.transformers_target import TransformersTarget
from specdec.native import limits
from specdec.native.invariance import _cases, _multiplied
from specdec.native.library import library
from specdec.native.limits import Arithmetic, Limits
from specdec.native.types import Kind
from tests import models
from tests.models import target_for
from tests.quantised_files import quantised_file

LIBRARY = library()
SIZES = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no C compiler")
CURVE = CostCurve(
    machine={"model": "m", "dtype": "d", "device": "c"}, rows=[1, 8], lengths=[16], seconds=[[1e-3, 2e-3]]
)


@pytest.fixture
def prefetching() -> Iterator[None]:
    """Lets a test choose how products prefetch; behind it they do so as on an unknown processor."""
    yield
    LIBRARY.specdec_prefetch(4, 0, 0)


@pytest.mark.parametrize("way", [(1, 6, 0), (99, 0, 1), (1, 0, 1), (99, 2, 0)])
def test_no_bit_depends_on_the_processor_s_prefetching(way: tuple[int, int, int], prefetching: None) -> None:
    random = np.random.default_rng(1)
    inputs = random.standard_normal((20, 512), np.float32)
    for case in _cases(np.random.default_rng(0)):
        if case.product.kind >= Kind.QUANTISED and not way[2]:
            break
        for count in (1, 2, 5, 6, 7, 20):
            found = []
            for own in ((4, 0, 0), way):
                LIBRARY.specdec_prefetch(*own)
                found.append(_multiplied(case.product, inputs, None, slice(count)))
            assert np.array_equal(*(one.view(np.int32) for one in found)), case.name


def test_both_limits_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_last_cache", lambda: 0)
    every = [one for one in Arithmetic if one is not Arithmetic.TILES or LIBRARY.specdec_tiles()]
    found = limits.measure(every, threads=1)
    assert found.reading > 0
    assert [*found.multiplying] == every
    assert min(found.multiplying.values()) > 0


def test_without_a_library_there_are_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "library", lambda: None)
    with pytest.raises(ConfigError, match="C compiler"):
        limits.measure([Arithmetic.FLOATS], threads=1)


SPEEDS = {Arithmetic.WORDS: 3e9, Arithmetic.BYTES: 5e9}


@pytest.mark.parametrize("activations", [None, "default", "int8"])
def test_a_share_is_the_least_time_over_the_time(
    activations: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products' operations are those of float32, of 16-bit integers and of bytes; attention has none."""
    found = Limits(reading=1e9, multiplying={one: SPEEDS.get(one, 1e9) for one in Arithmetic})
    monkeypatch.setattr("specdec.costs.shares.measure", lambda *_: found)
    target: Any
    if activations is None:
        target = target_for(models.new_model("llama", torch.float32, **SIZES), execution="native")
    else:
        file = quantised_file(tmp_path / "m.gguf", ("Q8_0",))
        target = TransformersTarget.from_pretrained(file, activations=activations)
    weights = target.executor.weights
    cached = sum(spec.slot_bytes for spec in target.specs) * 16
    heads = sum(own.attention.heads * 2 * own.attention.head_dim for own in target.spec.layers)
    told = shares(CURVE, target)
    assert told is not None
    speed = {None: 1e9, "default": 3e9, "int8": 5e9}[activations]
    passes = 3 if weights[0].described.tiles else 1
    for rows, share, seconds in zip((1, 8), told.of[0], (1e-3, 2e-3), strict=True):
        least = max(cached, 2 * heads * 16 * rows) / 1e9
        for one in weights:
            least += max(one.nbytes / 1e9, 2 * one.inputs * one.outputs * rows * passes / speed)
        assert share == pytest.approx(least / seconds)
    for reading, best in ((9e8, 1e9), (2e9, 2e9)):  # what was measured before counts where it was faster
        again = shares(CURVE, target, reading=reading)
        assert again is not None
        assert again.limits.reading == best
        assert (again.of == told.of) is (best == 1e9)


def test_other_runners_have_no_limits() -> None:
    assert shares(CURVE, target_for(models.new_model("llama", torch.float32), execution="fused")) is None


def test_the_table_has_shares_and_says_what_one_above_1_means() -> None:
    from rich.console import Console

    found = Shares(
        limits=Limits(reading=2e9, multiplying={Arithmetic.FLOATS: 5e10, Arithmetic.WORDS: 7e10}),
        multiplied=[Arithmetic.WORDS, Arithmetic.FLOATS],
        of=[[0.5, 0.75]],
    )
    console = Console(width=200)
    with console.capture() as shown:
        console.print(table(CURVE, found))
    assert "1.00 (1.00; 0.50)" in shown.get()
    assert "2.00 (2.00; 0.75)" in shown.get()
    by = "70 Gop/s of multiplying (16-bit integers), 50 GFLOP/s of multiplying (float32)"
    assert found.describe() == f"limits: 2.0 GB/s of reading, {by}"
    assert "1.20, above 1" in replace(found, of=[[0.5, 1.2]]).describe()
