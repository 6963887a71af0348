"""Every integer option of every registered drafter, set to what it cannot be: an error, or plain decoding's text."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from drafters.kangaroo.adapter import AdapterConfig
from drafters.medusa.heads import HeadsConfig
from specdec import Engine
from specdec.costs.curve import roofline
from specdec.drafting.registry import drafter_names, drafter_type
from specdec.errors import ConfigError, SpecdecError
from specdec.settings.parsing import parse
from tests.models import greedy, prompt_of, settings_of, target_of
from training.acceptance import EvalConfig
from training.data import TextConfig
from training.kangaroo import NewAdapter
from training.loop import LoopConfig

PROMPT, NEW = prompt_of(9), 12
VALUES = (10**9, 10**4000, 0, -1, "x", None, 1.5, float("nan"), True, [], {})
ROOM = 3 << 30  # bytes that a test may ask the system for


def whole_numbers(drafter: str) -> list[str]:
    """Its options that are integers, or lists of them."""
    kind = drafter_type(drafter).Config
    hints = get_type_hints(kind)
    return [one.name for one in fields(kind) if {int, list[int]} & {hints[one.name], *get_args(hints[one.name])}]


CASES = [(drafter, option) for drafter in drafter_names() for option in whole_numbers(drafter)]


@pytest.fixture
def little_memory() -> Iterator[None]:
    """An allocation of gigabytes fails at once, instead of the machine."""
    if sys.platform != "linux":
        yield
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    former = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, former[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, former)


@cache
def settings(drafter: str, folder: Path) -> list[Any]:
    folder.mkdir()
    return list(settings_of(drafter, target_of("llama"), folder))


def test_there_are_cases() -> None:
    assert ("lookahead", "window") in CASES
    assert ("draft_model", "widths") in CASES
    assert len(CASES) > 20


@pytest.mark.few(1)
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(("drafter", "option"), CASES)
def test_an_option_of_any_value(drafter: str, option: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    spec = settings(drafter, tmp_path_factory.getbasetemp() / f"hostile-{drafter}")[0]
    listed = get_type_hints(drafter_type(drafter).Config)[option] == list[int]
    engine, ran = Engine(target_of("llama"), costs=roofline()), 0
    for value in VALUES:
        for given in [value, *([[value]] if listed else [])]:
            told = ""
            try:
                found = engine.with_drafter({**spec, option: given}).generate(PROMPT, NEW)
            except SpecdecError as error:
                told = str(error)
            if told:
                assert option in told
                assert len(told) < 500
            else:
                assert found.token_ids == greedy("llama", PROMPT, NEW)
                ran += 1
    assert ran < len(VALUES)


@pytest.mark.parametrize("kind", [LoopConfig, TextConfig, EvalConfig, NewAdapter, AdapterConfig, HeadsConfig])
def test_a_number_of_a_training_config_of_any_value(kind: Any) -> None:
    """Refused with its name, or taken; a size that would be allocated is not taken."""
    known = {"hidden_size": 64, "vocab_size": 32, "exit_layer": 1, "heads": 2, "layers": 1}
    hints = get_type_hints(kind)
    base = {name: value for name, value in known.items() if name in hints and kind is not NewAdapter}
    for name, hint in hints.items():
        for value in VALUES if hint in (int, float) else ():
            told = ""
            try:
                parse(kind, {**base, name: value}, where="part")
            except ConfigError as error:
                told = str(error)
            assert not told or (name in told and len(told) < 500)
            if name in ("batch", "accumulate", "length") and value == 10**9:
                assert told
            if value is True or isinstance(value, str | list | dict) or value is None:
                assert told
