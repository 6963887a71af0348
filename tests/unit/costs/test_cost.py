"""Cost curves: what is read off them, where they are kept, and what happens to one that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.rest.drafter import rows_for
from specdec import Engine
from specdec.cli.tune import plot, table
from specdec.costs import machine
from specdec.costs import measuring as measuring_module
from specdec.costs.curve import CostCurve, roofline
from specdec.costs.measuring import cost_curve, describe, measure, stored_at
from specdec.errors import ConfigError
from specdec.models.transformers_target import TransformersTarget
from specdec.step import device_copies
from specdec.step.step_io import StepInput
from tests.models import target_of

CURVE = CostCurve(machine={}, rows=[1, 2, 4], lengths=[100, 300], seconds=[[1.0, 2.0, 3.0], [3.0, 4.0, 7.0]])


def target() -> TransformersTarget:
    return target_of("llama")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """An empty cache folder, and the measurements that were made."""
    calls: list[int] = []

    def quick(*arguments: Any, **options: Any) -> CostCurve:
        calls.append(1)
        return measure(*arguments, **{**options, "rows": (1, 2), "lengths": (8,), "seconds": 1e9})

    monkeypatch.setattr(measuring_module, "measure", quick)
    monkeypatch.setattr(measuring_module, "cache_folder", lambda: tmp_path)
    return calls


@pytest.mark.parametrize(
    ("length", "rows", "seconds"),
    [
        (100, 1, 1.0),  # as measured
        (300, 4, 7.0),
        (100, 3, 2.5),  # between rows
        (200, 2, 3.0),  # between lengths
        (500, 1, 5.0),  # beyond the longest
        (10, 1, 1.0),  # below the shortest, the shortest
        (100, 6, 4.0),  # beyond the last rows, by the last slope
        (100, 64, 33.0),
    ],
)
def test_between_and_beyond_the_measured(length: int, rows: int, seconds: float) -> None:
    assert CURVE.at(length, rows)[rows] == pytest.approx(seconds)


def test_one_length_serves_all() -> None:
    curve = CostCurve(machine={}, rows=[1, 2], lengths=[100], seconds=[[1.0, 3.0]])
    assert curve.at(5_000, 3) == pytest.approx([0.0, 1.0, 3.0, 5.0])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rows": [2, 3, 4]}, "begin with 2"),
        ({"rows": [1, 4, 2]}, r"\[1, 4, 2\]; they must ascend"),
        ({"lengths": []}, "lengths are"),
        ({"seconds": [[1.0, 2.0, 3.0]]}, "3 positive times for each of 2 lengths"),
        ({"seconds": [[1.0, 2.0, 0.0], [1.0, 2.0, 3.0]]}, "positive times"),
    ],
)
def test_a_curve_that_is_none_is_refused(change: dict[str, Any], told: str) -> None:
    whole = {"machine": {}, "rows": CURVE.rows, "lengths": CURVE.lengths, "seconds": CURVE.seconds}
    with pytest.raises(ConfigError, match=told):
        CostCurve(**{**whole, **change})


def test_few_rows_say_nothing_of_many() -> None:
    """Up to 4 rows cost what one costs, as weights are read once; beyond the roofline's arithmetic is supposed."""
    flat = CostCurve(machine={}, rows=[1, 4], lengths=[100], seconds=[[2.0, 2.0]])
    assert flat.at(0, 24)[24] == pytest.approx(2.0 + 20 * 2.0 / 10)
    alone = CostCurve(machine={}, rows=[1], lengths=[100], seconds=[[2.0]])
    assert alone.at(0, 11)[11] == pytest.approx(4.0)
    known = CostCurve(machine={}, rows=[1, 16], lengths=[100], seconds=[[2.0, 2.0]])
    assert known.at(0, 32)[32] == 2.0


def test_steps_are_told_in_plain_steps_and_never_fall() -> None:
    odd = CostCurve(machine={}, rows=[1, 2, 4, 5], lengths=[100], seconds=[[2.0, 1.8, 3.0, 2.0]])
    assert odd.steps(0, 5) == pytest.approx([0.0, *(seconds / 1.8 for seconds in (1.8, 1.8, 2.0, 2.0, 2.0))])


def test_trees_are_as_large_as_rows_are_cheap() -> None:
    dear = CostCurve(machine={}, rows=[1, 2], lengths=[100], seconds=[[1.0, 2.0]])
    free = CostCurve(machine={}, rows=[1, 200], lengths=[100], seconds=[[1.0, 1.0]])
    sizes = [rows_for(curve, 0) for curve in (dear, roofline(), roofline(at_once=True), free)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (1, 64)


def test_a_curve_is_of_the_library_that_ran() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring_module, "digest_of_library", lambda: "another")
        other = describe(target(), runner="native")
    assert other != describe(target(), runner="native")


class Clock:
    """Every look takes ``tick`` seconds, a forward (two looks) therefore as long."""

    def __init__(self, tick: float) -> None:
        self.tick, self.now = tick, 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def test_measured_within_the_context_and_kept_to_the_number() -> None:
    shares: list[float] = []
    curve = measure(
        target(), rows=(1, 2, 4), lengths=(8, 16, 10**6), seconds=1e9, clock=Clock(0.01), progress=shares.append
    )
    assert curve.rows == [1, 2, 4]
    assert curve.lengths[:2] == [8, 16]
    assert curve.lengths[-1] <= target().context_length - 5
    assert curve.machine == describe(target())
    assert [time for row in curve.seconds for time in row] == pytest.approx([0.01] * 9)
    assert shares == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])


def test_a_clock_that_stands_still_measures_something() -> None:
    curve = measure(target(), rows=(1, 2), lengths=(8,), clock=Clock(0.0))
    assert all(time > 0 for row in curve.seconds for time in row)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("tick", "rows", "lengths"),
    [
        (1e-4, [1, 2, 4, 8, 16], [8, 64]),
        (0.01, [1, 2, 4, 8], [8, 64]),  # half of the time is the first length's, and half of that its first round's
        (0.02, [1, 2], [8]),
        (0.3, [1], [8]),  # one forward is too much already
        (5.0, [1], [8]),
    ],
)
def test_repeats_rows_and_lengths_are_given_up_where_time_is_short(
    tick: float, rows: list[int], lengths: list[int]
) -> None:
    clock = Clock(tick)
    curve = measure(target(), rows=(1, 2, 4, 8, 16), lengths=(8, 64), seconds=1.0, clock=clock)
    assert (list(curve.rows), list(curve.lengths)) == (rows, lengths)
    assert clock.now <= 1.0 + 8 * tick


def test_texts_grow_while_they_are_timed_and_rows_are_trees_where_a_device_is_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On such a device every number of rows is run once before any is timed."""
    seen: list[tuple[int, int, bool]] = []

    def noted(work: Callable[[], Any], device: torch.device, clock: Callable[[], float]) -> float:
        work()
        return 1.0

    reciter = target()
    forward = reciter.forward

    def noting(step: StepInput) -> Any:
        seen.append((step.lengths[0], step.rows, not step.chain[0]))
        return forward(step)

    monkeypatch.setattr(reciter, "forward", noting)
    monkeypatch.setattr(device_copies, "seconds_of", noted)
    measure(reciter, rows=(1, 4), lengths=(8, 16), seconds=1e9)
    assert not any(tree for _, _, tree in seen)
    assert {length for length, _, _ in seen} == {*range(8, 8 + 32), *range(16, 16 + 32)}
    assert all(after == before + 1 for (before, *_), (after, *_) in pairwise(seen[:32]))
    seen.clear()
    monkeypatch.setattr(device_copies, "is_apart", lambda device: True)
    measure(reciter, rows=(1, 4), lengths=(8, 16), seconds=1e9)
    assert [(rows, tree) for _, rows, tree in seen[:3]] == [(1, False), (4, True), (1, False)]


def test_rows_cost_what_they_usually_take_and_few_are_timed_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour on the core: now and then arithmetic is fast, and a step that waits for memory never is."""
    clock, timed = Clock(0.0), dict[int, list[float]]()

    reciter = target()
    forward = reciter.forward

    def forwarded(step: StepInput) -> Any:
        timed[step.rows] = timed.pop(step.rows, [])  # the latest is the last
        return forward(step)

    def taken(work: Callable[[], Any], device: torch.device, now: Callable[[], float]) -> float:
        work()
        rows = next(reversed(timed))
        often = len(timed[rows]) % 3 > 0
        timed[rows].append({1: 0.01, 2: 0.016 if often else 0.01, 8: 0.04 if often else 0.02}[rows])
        clock.now += timed[rows][-1]
        return timed[rows][-1]

    monkeypatch.setattr(reciter, "forward", forwarded)
    monkeypatch.setattr(device_copies, "seconds_of", taken)
    curve = measure(reciter, rows=(1, 2, 8), lengths=(8,), seconds=0.4, clock=clock)
    assert curve.seconds == [[0.01, 0.016, 0.04]]
    assert clock.now <= 0.4
    assert len(timed[1]) > len(timed[2]) > len(timed[8]) > 2
    assert max(map(sum, timed.values())) - min(map(sum, timed.values())) <= 0.04


def test_a_device_s_own_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            told.append(stream)

        def synchronize(self) -> None:
            told.append("waits for the last")

        def elapsed_time(self, last: Event) -> float:
            return 2.5

    class Stream(str):
        def synchronize(self) -> None:  # no other stream is waited for, as another thread may be capturing there
            told.append(f"waits for {self}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device))
    took = device_copies.seconds_of(lambda: told.append("works"), torch.device("cuda:1"), Clock(1.0))
    assert took == 0.0025
    assert told == ["waits for cuda:1", "cuda:1", "works", "cuda:1", "waits for the last"]


def test_a_curve_is_measured_once(counted: list[int]) -> None:
    first = cost_curve(target())
    assert cost_curve(target()) == first
    assert len(counted) == 1


def test_a_busy_machine_s_curve_is_not_kept(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves once; what others slowed down would else decide about rows and runners for good."""
    with monkeypatch.context() as patch:
        patch.setattr(measuring_module, "thread_time", lambda: 0.0)  # the thread never had a processor
        assert not cost_curve(target()).steady
        assert not stored_at(describe(target())).exists()
    assert cost_curve(target()).steady
    assert stored_at(describe(target())).exists()
    assert len(counted) == 2


def test_an_engine_tells_the_curve_that_is_kept_and_where_it_is_from(
    counted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not its own drafter asks for one: what is shown is what its source says."""
    monkeypatch.setattr(TransformersTarget, "describe", lambda target: {})  # it compiles for an empty cache folder

    def told(**options: Any) -> tuple[str, str]:
        decoding = Engine(target(), **options).describe()["decoding"]
        return decoding["a step of 2, 4, 8 rows"].split()[0], decoding["known from"]

    assert told() == ("1.10", "a roofline, as nothing was timed here")
    with monkeypatch.context() as patch:
        patch.setattr(measuring_module, "thread_time", lambda: 0.0)
        assert told(drafter="auto")[1] == "a measurement that was not kept"
    kept = replace(cost_curve(target()), seconds=[[1.0, 2.5]])
    kept.save(stored_at(kept.machine))
    assert told() == told(drafter="auto") == ("2.50", str(stored_at(kept.machine)))
    own = tmp_path / "own.json"
    replace(kept, seconds=[[1.0, 1.5]]).save(own)
    assert told(drafter="auto", policy=str(own)) == ("1.50", str(own))
    own.write_text("{", encoding="utf-8")
    with pytest.warns(UserWarning, match="no cost curve .* measuring anew"):
        assert told(drafter="auto", policy=str(own))[1] == "a measurement that was not kept"


@pytest.mark.parametrize("part", ["layers.c", "runners/new.py"])
def test_other_code_is_measured_anew(
    part: str, counted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an update a kept curve would hold for code that is not there any more."""
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "specdec" / "costs" / "machine.py"))
    (tmp_path / "specdec" / "runners").mkdir(parents=True)
    try:
        for _ in range(2):
            cost_curve(target())
            cost_curve(target())
            (tmp_path / "specdec" / part).write_text("another one")
            machine.digest_of_code.cache_clear()
        assert len(counted) == 2
        assert cost_curve(target()).machine["code"] == machine.digest_of_code()
    finally:
        machine.digest_of_code.cache_clear()


def test_a_broken_file_is_measured_anew(counted: list[int]) -> None:
    path = stored_at(describe(target()))
    path.parent.mkdir(parents=True)
    path.write_text('{"rows": [1', encoding="utf-8")
    with pytest.warns(UserWarning, match="no cost curve .* measuring anew"):
        curve = cost_curve(target())
    assert CostCurve.load(path) == curve
    assert len(counted) == 1


def test_another_machines_file_is_passed_over_and_kept(counted: list[int], tmp_path: Path) -> None:
    path = tmp_path / "theirs.json"
    theirs = replace(CURVE, machine={**describe(target()), "device": "abacus"})
    theirs.save(path)
    with pytest.warns(UserWarning, match="made for device 'abacus' and not"):
        curve = cost_curve(target(), path)
    assert curve.machine["device"] != "abacus"
    assert CostCurve.load(path) == theirs
    assert len(counted) == 1


def test_a_file_that_fits_is_taken(counted: list[int], tmp_path: Path) -> None:
    ours = CostCurve(machine=describe(target()), rows=[1, 2], lengths=[8], seconds=[[1.0, 2.0]])
    ours.save(tmp_path / "ours.json")
    assert cost_curve(target(), tmp_path / "ours.json") == ours
    assert not counted


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no cost file .*specdec tune --out"):
        cost_curve(target(), tmp_path / "none.json")


def test_a_folder_that_cannot_be_written_is_no_obstacle(counted: list[int], tmp_path: Path) -> None:
    (tmp_path / "cost").write_text("a file, where the folder should be")
    with pytest.warns(UserWarning, match="cannot keep the cost curve"):
        cost_curve(target())


def test_shown(tmp_path: Path) -> None:
    curve = CostCurve(
        machine={"model": "M", "dtype": "float32", "device": "abacus", "threads": 2},
        rows=CURVE.rows,
        lengths=CURVE.lengths,
        seconds=CURVE.seconds,
    )
    sheet = table(curve)
    assert [list(column.cells) for column in sheet.columns][1] == ["1000.00 (1.00)", "2000.00 (2.00)", "3000.00 (3.00)"]
    pytest.importorskip("matplotlib")
    plot(curve, tmp_path / "curve.svg")
    assert "<svg" in (tmp_path / "curve.svg").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"name a \.png"):
        plot(curve, tmp_path / "curve.nothing")
