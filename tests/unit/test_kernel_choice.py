"""The kernel of each shape: measured once, remembered per machine, and never trusted blindly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specdec.lowering import choice
from specdec.lowering.choice import choose_kernels
from specdec.lowering.products import PRODUCTS

WEIGHTS = [torch.randn(96, 64), torch.randn(64, 96), torch.randn(96, 64)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; every model is large enough to be measured, and each measurement is counted."""
    monkeypatch.setattr(choice, "cache_folder", lambda: tmp_path / "specdec")
    monkeypatch.setattr(choice, "_SMALL", 0)
    return tmp_path / "specdec"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per measurement: its number of weights."""
    calls: list[int] = []

    def measure(weights: list[torch.Tensor]) -> dict[str, str]:
        calls.append(len(weights))
        return {"96x64": "packed", "64x96": "transposed"}

    monkeypatch.setattr(choice, "_measure", measure)
    return calls


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_measured_once(folder: Path, measured: list[int]) -> None:
    for _ in range(3):
        assert choose_kernels(WEIGHTS) == {(96, 64): "packed", (64, 96): "transposed"}
    assert measured == [3]
    content = json.loads(only_file(folder).read_text())
    assert content["machine"]["torch"] == torch.__version__
    assert len(content["choices"]) == 1


def test_dtype_threads_and_shapes_are_measured_apart(folder: Path, measured: list[int]) -> None:
    threads = torch.get_num_threads()
    choose_kernels(WEIGHTS)
    choose_kernels([weight.double() for weight in WEIGHTS])
    choose_kernels(WEIGHTS[:2])
    try:
        torch.set_num_threads(threads + 1)
        choose_kernels(WEIGHTS)
    finally:
        torch.set_num_threads(threads)
    choose_kernels(WEIGHTS)
    assert len(measured) == 4
    assert len(json.loads(only_file(folder).read_text())["choices"]) == 4


def test_another_machine_s_file_is_left_alone(folder: Path, measured: list[int]) -> None:
    choose_kernels(WEIGHTS)
    path = only_file(folder)
    content = json.loads(path.read_text())
    content["machine"]["cpu"] = "Abacus 9000"
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="was measured on Abacus 9000, not on this machine; measuring anew"):
        choose_kernels(WEIGHTS)
    assert len(measured) == 2
    choose_kernels(WEIGHTS)
    assert len(measured) == 2


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"machine": 1, "choices": 2}', b"\xff\xfe", "KERNEL", "SHAPE"],
    ids=["empty", "cut", "list", "bare", "misshapen", "binary", "kernel", "shape"],
)
def test_a_corrupt_file_is_measured_anew(text: str | bytes, folder: Path, measured: list[int]) -> None:
    choose_kernels(WEIGHTS)
    path = only_file(folder)
    good = path.read_text()
    damaged = {"KERNEL": good.replace("transposed", "magic"), "SHAPE": good.replace("96x64", "wide")}
    path.write_bytes(text if isinstance(text, bytes) else damaged.get(text, text).encode())
    with pytest.warns(UserWarning, match="measuring anew"):
        assert choose_kernels(WEIGHTS)[96, 64] == "packed"
    assert len(measured) == 2
    assert path.read_text() == good


def test_a_folder_that_cannot_be_written_costs_only_time(
    folder: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file, where a folder should be")
    with pytest.warns(UserWarning, match="cannot be read"):
        assert choose_kernels(WEIGHTS)[96, 64] == "packed"


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ({"transposed": 9.0, "packed": 8.0, "tiled": 10.0}, "packed"),
        ({"transposed": 9.9, "packed": 9.9, "tiled": 11.5}, "linear"),
        ({"transposed": 9.0, "packed": 8.9, "tiled": 10.5}, "transposed"),
        ({"transposed": 9.0, "packed": 9.0, "tiled": 9.5}, "tiled"),
    ],
)
def test_the_fastest_kernel_wins_where_it_wins_clearly(
    times: dict[str, float], winner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_time", lambda *_: {"96x64": {"linear": 10.0, **times}})
    monkeypatch.setattr(choice, "usable", lambda *_: True)
    monkeypatch.setitem(PRODUCTS, "tiled", PRODUCTS["linear"])  # whether there is a compiler or not
    assert choice._measure(WEIGHTS[:1]) == {"96x64": winner}


def test_a_measurement_knows_all_shapes(folder: Path) -> None:
    kernels = choose_kernels(WEIGHTS)
    assert kernels.keys() == {(96, 64), (64, 96)}
    assert set(kernels.values()) <= {"linear", "transposed", "packed", "tiled"}


def test_small_models_are_not_measured(folder: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_SMALL", 1 << 20)
    assert choose_kernels(WEIGHTS) == {}
    assert not measured
    assert not folder.exists()
