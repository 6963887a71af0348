"""Broken GGUF files: refused by name, whatever is broken, and nothing is read outside of the file."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specdec import Engine
from specdec.errors import SpecdecError
from specdec.models.gguf import GgufFile
from specdec.native import library as native
from tests.quantised_files import FORMATS, quantised_file


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantised_file(tmp_path_factory.mktemp("gguf") / "small.gguf", FORMATS)


def place_of(data: bytes, name: str) -> int:
    """Where a tensor's entry goes on behind its name."""
    word = name.encode()
    return data.index(struct.pack("<Q", len(word)) + word) + 8 + len(word)


def changed(at: int, kind: str, value: int) -> Callable[[bytearray], None]:
    """A number of the entry of blk.0.attn_q.weight: of two dimensions, type and offset."""

    def change(data: bytearray) -> None:
        place = place_of(data, "blk.0.attn_q.weight") + at
        struct.pack_into(kind, data, place, value)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(20, "<I", 99), "type 99, which the installed package gguf does not know"),
        (changed(24, "<Q", 1 << 40), "ends after .* of"),
        (changed(24, "<Q", 1 << 63), "ends after .* of"),
        (changed(24, "<Q", 33), "begins at byte 33, and alignment is 32"),
        (changed(24, "<Q", 0), "share bytes"),
        (changed(4, "<Q", 255), r"is \[256, 255\], in blocks of"),
        (changed(4, "<Q", 0), r"is \[256, 0\]"),
        (changed(12, "<Q", 1 << 50), "ends after|share bytes"),
        (changed(12, "<Q", 128), "1 misshapen, such as blk.0.attn_q.weight"),
        (lambda data: struct.pack_into("<Q", data, 8, 1 << 40), "as GGUF"),
        (lambda data: struct.pack_into("<Q", data, 8, 3), "says llama.block_count 3 and has tensors of 1 layers"),
        (lambda data: struct.pack_into("<Q", data, 16, 1 << 60), "as GGUF"),
        (lambda data: data.__delitem__(slice(-4000, None)), "ends after .* of"),
        (lambda data: data.__delitem__(slice(2000, None)), "as GGUF"),
    ],
)
def test_a_broken_table_is_refused(
    file: Path, change: Callable[[bytearray], None], message: str, tmp_path: Path
) -> None:
    data = bytearray(file.read_bytes())
    change(data)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data)
    with pytest.raises(SpecdecError, match=rf"broken\.gguf'.*({message})"):
        Engine.from_pretrained(broken)


@pytest.mark.parametrize("count", [40, pytest.param(160, marks=pytest.mark.slow)])
def test_files_that_are_broken_anywhere(file: Path, count: int, tmp_path: Path) -> None:
    """A few bytes of the head are others, or the file is cut: an error of ours, or a model like any other."""
    whole, random = file.read_bytes(), np.random.default_rng(count)
    head, broken, refused = GgufFile.read(file).table.files[0].data, tmp_path / "broken.gguf", 0
    for _ in range(count):
        data = bytearray(whole)
        for place in random.integers(0, head, random.integers(1, 9)).tolist():
            data[place] = int(random.integers(0, 256))
        if random.integers(0, 4) == 0:
            del data[int(random.integers(1, len(data))) :]
        broken.write_bytes(data)
        try:
            found = GgufFile.read(broken)
            assert found.table.files[0].end <= len(data)
            if native.library() is not None and count > 40:
                Engine.from_pretrained(broken).generate([3, 4], 2)
        except SpecdecError:
            refused += 1
    assert refused > count / 4
