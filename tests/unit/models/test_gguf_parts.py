"""Split GGUF files: the model of all parts, whichever is given, and none that was put together of others' parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec import Engine
from specdec.errors import CheckpointError
from specdec.models.gguf import GgufFile
from specdec.models.live_model import load_model
from specdec.models.tokenizer import load_tokenizer
from tests.gguf_families import VOCABULARY, write_family
from tests.gguf_files import new_llama, split_gguf, write_gguf
from tests.llama_cpp import LlamaCpp, apart, log_probabilities
from tests.quantised_files import quantised_file

PROMPT = [3, 4, 5, 6]


def load(file: Path, **more: Any) -> Any:
    place = {"device": None, "device_map": None, **more}
    return load_model(file, dtype="float64", trust_remote_code=False, **place)


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_part_is_the_whole_model(given: int, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", new_llama())
    parts = split_gguf(whole, 3)
    assert torch.equal(log_probabilities(load(parts[given]), [PROMPT]), log_probabilities(load(whole), [PROMPT]))
    own, joined = load_tokenizer(whole), load_tokenizer(parts[given])
    assert joined("a12\n\n")["input_ids"] == own("a12\n\n")["input_ids"]
    assert joined.chat_template == own.chat_template


def test_blocks_stay_where_they_lie_in_the_parts(tmp_path: Path) -> None:
    whole = quantised_file(tmp_path / "whole.gguf", ("Q8_0", "Q4_K", "Q5_0"))
    parts = split_gguf(whole, 4)
    table = GgufFile.read(parts[2]).table
    assert {entry.part for entry in table.entries} == {0, 1, 2, 3}
    for entry in table.entries:
        assert np.shares_memory(table.bytes_of(entry), table.files[entry.part].blob)
    texts = [Engine.from_pretrained(file, policy="off").generate(PROMPT, 12).token_ids for file in (whole, parts[1])]
    assert texts[0] == texts[1]


def test_parts_are_joined_where_a_model_is_spread_over_devices(tmp_path: Path) -> None:
    whole = quantised_file(tmp_path / "whole.gguf", ("Q8_0", "Q5_0"))
    spread = load(split_gguf(whole, 2)[0], device_map={"": "cpu"})
    assert torch.equal(log_probabilities(spread, [PROMPT]), log_probabilities(load(whole), [PROMPT]))


def test_llama_cpp_reads_the_same_parts(llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    parts = split_gguf(write_family(tmp_path / "whole.gguf", "qwen3"), 3)
    expected = llama_cpp.logits(parts[0], [PROMPT], VOCABULARY)
    assert expected is not None
    assert apart(log_probabilities(load(parts[0]), [PROMPT]), expected) <= 1e-9


def lost(parts: list[Path]) -> None:
    parts[1].unlink()


def renamed(parts: list[Path]) -> None:
    parts[0].replace(parts[0].with_name("first.gguf"))


def swapped(parts: list[Path]) -> None:
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    parts[2].write_bytes(second)


def of_another_model(parts: list[Path]) -> None:
    other = write_family(parts[0].with_name("other.gguf"), "qwen2")
    split_gguf(other, 3, "other")[2].replace(parts[2])


def twice(parts: list[Path]) -> None:
    others = split_gguf(parts[0].with_name("whole.gguf"), 4, "other")
    changed = split_gguf(others[0].with_name("whole.gguf"), 3, "changed", {2: {"split.no": 2}})
    for old, new in zip(parts, changed, strict=True):
        new.replace(old)
    more = parts[1].read_bytes()
    parts[2].write_bytes(more.replace(b"split.no" + b"\2\0\0\0\1\0", b"split.no" + b"\2\0\0\0\2\0"))


def cut(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-64])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lost, r"is part 1 of 3 .* 1 of them is not beside it, such as 'parts-00002-of-00003\.gguf'; get all parts"),
        (swapped, r"parts-00002-of-00003\.gguf' says split\.no 2, and by its name it is part 2 of 3, which says 1"),
        (of_another_model, r"says general\.architecture 'qwen2', and the first part 'llama': they are of two models"),
        (twice, r"parts-00002-of-00003\.gguf' and .*parts-00003-of-00003\.gguf' both hold the tensor 'blk\."),
        (cut, r"parts-00003-of-00003\.gguf' ends after"),
    ],
)
def test_parts_that_make_no_model(change: Callable[[list[Path]], None], message: str, tmp_path: Path) -> None:
    parts = split_gguf(write_family(tmp_path / "whole.gguf", "llama"), 3)
    change(parts)
    with pytest.raises(CheckpointError, match=message):
        load(parts[0])


def test_a_part_with_another_name(tmp_path: Path) -> None:
    parts = split_gguf(write_family(tmp_path / "whole.gguf", "llama"), 3)
    renamed(parts)
    with pytest.raises(CheckpointError, match=r"is part 1 of 3 of a split model .* parts the names that they were pub"):
        load(tmp_path / "first.gguf")
    with pytest.raises(CheckpointError, match=r"is not beside it, such as 'parts-00001-of-00003\.gguf'"):
        load(parts[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {0: {"split.tensors.count": 40}},
            r"says split\.tensors\.count 30, and the first part 40: they are of two models",
        ),
        (
            {part: {"split.tensors.count": 40} for part in range(3)},
            r"says split\.tensors\.count 40, and its 3 parts hold",
        ),
        ({0: {"split.tensors.count": None}}, r"says split\.tensors\.count None, and its 3 parts hold"),
        ({1: {"split.no": None}}, r"00002-of-00003\.gguf' says split\.no None"),
        ({1: {"split.count": 2}}, r"00002-of-00003\.gguf' says split\.count 2, .* which says 3"),
        ({0: {"split.no": 3}}, r"says split\.no 3 and split\.count 3; it is broken"),
        ({0: {"split.no": 1}}, r"is part 2 of 3 of a split model .* does not end in '-00002-of-00003\.gguf'"),
        ({0: {"split.no": None}}, r"says split\.no None, which is no number of parts"),
        (
            {0: {"split.count": None}},
            r"says llama\.block_count 3 and has tensors of 1 layers",
        ),
    ],
)
def test_keys_of_parts_that_contradict(
    changes: Mapping[int, Mapping[str, int | None]], message: str, tmp_path: Path
) -> None:
    parts = split_gguf(write_family(tmp_path / "whole.gguf", "llama"), 3, changes=changes)
    with pytest.raises(CheckpointError, match=message):
        load(parts[0])
