"""What ranks compare, and where they meet."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from specdec.errors import ParallelError
from specdec.parallel.ranks import content, join


def scaled(by: float) -> Callable[[Any, Any], Any]:
    return lambda ids, scores: scores / by


EQUAL: dict[str, Callable[[], Any]] = {
    "numbers": lambda: [1, 2.5, None, "a", True],
    "a set, in any order": lambda: {"stop", "end", "halt"},
    "arrays": lambda: (torch.tensor([1, 2]), np.array([3.0])),
    "a processor": lambda: RepetitionPenaltyLogitsProcessor(1.3),
    "a function": lambda: scaled(2),
    "an object that has no content": lambda: object(),
}
OTHER: dict[str, tuple[Any, Any]] = {
    "order": ([1, 2], [2, 1]),
    "kind": (1, "1"),
    "a number of a processor": (RepetitionPenaltyLogitsProcessor(1.3), RepetitionPenaltyLogitsProcessor(1.4)),
    "what a function was made with": (scaled(2), scaled(3)),
    "what a function says": (lambda scores: scores * 2, lambda scores: scores * 3),
    "a tensor's values": (torch.tensor([1, 2]), torch.tensor([1, 3])),
    "a tensor's dtype": (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32)),
}


@pytest.mark.parametrize("made", EQUAL.values(), ids=EQUAL)
def test_equal_values_have_equal_content(made: Callable[[], Any]) -> None:
    assert content(made()) == content(made())


@pytest.mark.parametrize("pair", OTHER.values(), ids=OTHER)
def test_other_values_have_other_content(pair: tuple[Any, Any]) -> None:
    assert content([pair[0]]) != content([pair[1]])


def test_a_model_and_much_data_are_named_only() -> None:
    assert content(torch.nn.Linear(2, 2)) == "Linear"
    assert len(content([torch.zeros(1 << 21)])) < 40


def test_a_place_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(ParallelError, match=f"rank 0 cannot meet the others at 127.0.0.1:{port}: .*--master-port"):
            join()
