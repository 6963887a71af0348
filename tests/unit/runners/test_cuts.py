"""Cuts of products that whole steps choose at a warm-up, by a made-up clock on a device that is not there."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec import Engine
from specdec.errors import SpecdecWarning
from specdec.models.described_target import DescribedTarget
from specdec.runners import cuts as module
from specdec.runners.cuts import BUDGET, fastest
from tests.launching import Kernels, fused, launch
from tests.models import new_model, prompt_of

pytest.importorskip("triton", reason="Triton is not installed")
products = pytest.importorskip("specdec.runners.kernels.product")

CARD = {"card": "made up", "capability": [9, 0]}
SIZES = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 192}
Prices = Callable[[Any, int, Any], float]


class Device(Kernels):
    """The stand-in, on which a step takes what its cuts cost when it was recorded.

    Attributes:
        price: seconds of a weight's product in a bucket, by its cut.
        noise: seconds that a replay takes besides.
        recording: seconds of a record.
        now: the clock.
        timed: replays.
        wrong, broken: cuts whose products are wrong, or that do not compile.
    """

    buckets_of, offered = staticmethod(products.buckets_of), staticmethod(products.offered)

    def __init__(self, patch: pytest.MonkeyPatch, price: Prices = lambda *_: 1e-3) -> None:
        super().__init__()
        self.price, self.noise, self.recording, self.now, self.timed = price, lambda: 0.0, 0.0, 0.0, 0
        self.wrong, self.broken = set[Any](), set[Any]()
        self._used: dict[Any, Any] = {}
        recorder = launch(patch, self)
        patch.setattr(module, "card_of", lambda device: CARD)
        patch.setattr(module, "perf_counter", lambda: self.now)
        patch.setattr("specdec.step.device_copies.address", self.address)
        record = recorder.record

        def priced(work: Any) -> Any:
            self._used.clear()
            outcome, replay = record(work)
            seconds = sum(self.price(weight, bucket, cut) for (weight, bucket), cut in self._used.items())
            self.now += self.recording

            def timed() -> None:
                self.now += seconds + self.noise()
                self.timed += 1
                replay()

            return outcome, timed

        patch.setattr(recorder, "record", priced)

    def shared_of(self, device: torch.device) -> int:
        return 227 << 10

    def product(self, rows: Any, weight: Any, bias: Any, *, cuts: Any = None, **options: Any) -> torch.Tensor:
        gated, bucket = options.get("gated", False), products.bucket_of(len(rows))
        own = len(weight) // (1 + gated), weight.shape[1], gated
        cut = (cuts or {}).get(bucket) or products.cut_of(*own, bucket)
        self._used[own, bucket] = cut
        if cut in self.broken:
            raise RuntimeError("out of resource: shared memory")
        found = super().product(rows, weight, bias, **options)
        return found + 1e-3 if cut in self.wrong else found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path)
    return tmp_path / "cuts"


def target_of() -> DescribedTarget:
    return fused(new_model("llama", torch.float16, **SIZES))


def chosen(target: DescribedTarget) -> dict[Any, dict[int, Any]]:
    found: dict[Any, dict[int, Any]] = target.executor._cuts._chosen  # type: ignore[attr-defined]
    return {weight: dict(cuts) for weight, cuts in found.items()}


def by_lot(weight: Any, bucket: int, cut: Any) -> float:
    """A price that follows from the cut."""
    return 1e-3 + random.Random(repr((weight, bucket, cut))).random() * 1e-3


@pytest.mark.slow
def test_the_fastest_of_the_cuts_is_chosen_for_each_weight_and_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, by_lot)
    target = target_of()
    assert not any(chosen(target).values())
    target.warm_up(64)
    found = chosen(target)
    assert len(found) == 5, "four products of a layer, and the head"
    for weight, cuts in found.items():
        assert cuts.keys() == {16, 32, 64}
        for bucket, cut in cuts.items():
            offered = products.offered(*weight, bucket)
            assert cut == min(offered, key=lambda one: by_lot(weight, bucket, one))
    assert (
        len({cut == products.cut_of(*weight, bucket) for weight, of in found.items() for bucket, cut in of.items()})
        == 2
    )
    told = str(target.describe()["execution"]["cuts of products"])
    assert "64 x 192 up to 16 rows: " in told
    assert "of 15 that were timed" in told
    before = device.timed
    target.warm_up(64)
    assert device.timed - before == 7, "each bucket's step is run, and nothing is chosen again"


def test_steps_have_the_cuts_that_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where their like was recorded before; texts are those of before."""
    device = Device(monkeypatch, by_lot)
    target = target_of()
    engine = Engine(target)
    text = engine.generate(prompt_of(9), 6).token_ids

    def step() -> float:
        began = device.now
        engine.generate(prompt_of(9), 2)
        return device.now - began

    slow = step()
    target.warm_up(1)
    assert step() < 0.99 * slow
    assert engine.generate(prompt_of(9), 6).token_ids == text


def test_noise_chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device, noise = Device(monkeypatch), random.Random(3)
    device.noise = lambda: noise.gauss(0.0, 1e-4)
    target = target_of()
    target.warm_up(1)
    assert all(cuts == {16: products.cut_of(*weight, 16)} for weight, cuts in chosen(target).items())
    assert device.timed > 5 * 2 * 9
    for _ in range(2000):
        assert fastest([[noise.gauss(5.0, 1.0) for _ in range(9)] for _ in range(5)]) == 0


def test_a_cut_wins_by_more_than_times_spread() -> None:
    assert fastest([[5.0] * 9, [4.9] * 9, [4.8] * 9]) == 2
    assert fastest([[5.0] * 9]) == 0
    spread = [4.7, 4.8, 4.9, 4.9, 5.0, 5.1, 5.1, 5.2, 5.3]  # by 0.4 without the ends
    assert fastest([spread, [4.7] * 9]) == 0
    assert fastest([spread, [4.5] * 9]) == 1
    assert fastest([spread, [one - 0.7 for one in spread]]) == 0
    assert fastest([spread, [one - 0.9 for one in spread]]) == 1
    assert fastest([[5.0] * 8 + [50.0], [4.9] * 8 + [0.1]]) == 1, "one that was interrupted says nothing"


def test_a_cut_of_other_bits_or_none_is_not_chosen_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, by_lot)
    weights = (64, 192, False), (192, 64, True)
    wrong, broken = (min(products.offered(*weight, 16), key=lambda one: by_lot(weight, 16, one)) for weight in weights)
    assert wrong != products.cut_of(*weights[0], 16)
    assert broken != products.cut_of(*weights[1], 16)
    device.wrong, device.broken = {wrong}, {broken}
    target = target_of()
    text = Engine(target).generate(prompt_of(9), 6).token_ids
    target.warm_up(1)
    found = chosen(target)
    for weight, bad in zip(weights, (wrong, broken), strict=True):
        left = [cut for cut in products.offered(*weight, 16) if cut != bad]
        assert found[weight][16] == min(left, key=lambda one: by_lot(weight, 16, one))
    assert Engine(target).generate(prompt_of(9), 6).token_ids == text


@pytest.mark.slow
def test_choosing_has_a_budget_and_goes_on_in_the_next_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, by_lot)
    target = target_of()
    device.recording = 1.0
    choose, spent = target.executor._cuts.choose, list[float]()  # type: ignore[attr-defined]

    def watched(*given: Any) -> Any:
        began = device.now
        try:
            return choose(*given)
        finally:
            spent.append(device.now - began)

    monkeypatch.setattr(target.executor._cuts, "choose", watched)  # type: ignore[attr-defined]
    counts = list[int]()
    for _ in range(40):
        target.warm_up(32)
        counts.append(sum(map(len, chosen(target).values())))
    assert 2 <= counts[0] < 10
    assert spent[0] <= BUDGET + 1
    assert max(spent[1:]) <= 6, "a weight's choice is not cut short"
    assert counts[-1] == 10
    assert spent[-1] == 0


@pytest.mark.slow
def test_choices_are_kept_for_the_next_load(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    device = Device(monkeypatch, by_lot)
    first = target_of()
    first.warm_up(16)
    assert len([*folder.iterdir()]) == 5
    recorded = device.timed
    again = target_of()
    assert chosen(again) == chosen(first)
    assert device.timed - recorded <= 2, "what is checked at load"
    monkeypatch.setattr(module, "card_of", lambda device: {**CARD, "card": "another"})
    assert not any(chosen(target_of()).values())


def damaged(text: str, weight: Any) -> dict[str, tuple[str | bytes, str]]:
    """Files that are none, and what is said of them."""

    def with_cut(**changes: Any) -> str:
        value = json.loads(text)
        value["cuts"]["16"] |= changes
        return json.dumps(value)

    value = json.loads(text)
    usual = asdict(replace(products.cut_of(*weight, 16), splits=5))
    return {
        "cut short": (text[: len(text) // 2], "does not tell how products are cut"),
        "empty": ("", "Expecting value"),
        "no text": (b"\xff\xfe\x00", "does not tell"),
        "too deep": ("[" * 100_000, "nested too deeply"),
        "a list": ("[]", "it is not for"),
        "another card's": (text.replace("made up", "another"), "it is not for"),
        "no cuts": (json.dumps({**value, "cuts": [1]}), "it has no cuts"),
        "a list of numbers": (json.dumps({**value, "cuts": {"16": [64]}}), "none of those"),
        "other sums": (json.dumps({**value, "cuts": {"16": usual}}), "none of those that give the same numbers"),
        "another tile": (with_cut(tile=32), "none of those"),
        "a float": (with_cut(warps=4.0), "none of those"),
        "a word": (with_cut(warps="__import__('os').abort()"), "none of those"),
        "more names": (with_cut(more=1), "none of those"),
        "no bucket": (json.dumps({**value, "cuts": {"17": value["cuts"]["16"]}}), "no bucket of '17' rows"),
    }


@pytest.mark.slow
def test_a_file_that_is_broken_or_foreign_is_ignored(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    Device(monkeypatch, by_lot)
    target = target_of()
    text = Engine(target).generate(prompt_of(9), 4).token_ids
    target.warm_up(1)
    weight = (64, 192, False)
    path = target.executor._cuts._file(weight)  # type: ignore[attr-defined]
    whole = path.read_text()
    for name, (given, reason) in damaged(whole, weight).items():
        path.write_bytes(given if isinstance(given, bytes) else given.encode())
        with pytest.warns(SpecdecWarning, match=reason):
            other = target_of()
        assert chosen(other)[weight] == {}, name
        assert len([cuts for cuts in chosen(other).values() if cuts]) == 4, name
        assert Engine(other).generate(prompt_of(9), 4).token_ids == text, name
    path.unlink()
    path.mkdir()
    with pytest.warns(SpecdecWarning, match="does not tell"):
        other = target_of()
    with pytest.warns(SpecdecWarning, match="cannot keep how products are cut"):
        other.warm_up(1)
    assert chosen(other)[weight].keys() == {16}


def test_nothing_is_timed_in_an_answer_or_where_steps_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch, by_lot)
    monkeypatch.setattr(module, "seconds_of", None)
    target = target_of()
    Engine(target, None, "prompt_lookup").generate(prompt_of(9), 6)
    for other in (fused(new_model("llama", torch.float32, **SIZES)), target):
        if other is target:
            monkeypatch.setattr(target.executor._graphs, "failed", "no graphs")  # type: ignore[attr-defined]
        other.warm_up(2)
        assert not any(chosen(other).values())
    monkeypatch.setattr(target.executor._graphs, "failed", None)  # type: ignore[attr-defined]
    monkeypatch.setattr(
        target.executor._graphs,
        "_recorder",
        SimpleNamespace(record=lambda work: 1 / 0),  # type: ignore[attr-defined]
    )
    with pytest.warns(SpecdecWarning, match="no CUDA graph of 2 rows can be recorded: ZeroDivisionError"):
        target.warm_up(2)
    assert not any(chosen(target).values())
