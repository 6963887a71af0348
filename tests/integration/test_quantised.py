"""Quantised weights under speculation: no text differs from plain decoding's, whatever drafts, with any rows."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import pytest

from specdec import Engine, SamplingParams, TransformersTarget
from specdec.drafting.registry import drafter_names
from specdec.native import library as native
from tests.bitsandbytes_files import bitsandbytes_checkpoint
from tests.models import settings_of
from tests.quantised_files import FORMATS, quantised_file

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native.library() is None, reason="no C compiler")]

ROWS = (1, 2, 4, 8)  # most of a text's step
TEMPERATURES = (0.0, 1.0)
PROMPTS = [[3 + n % 5, 9, 4, 3 + n % 5, 9, 4, 11 + n, 3 + n % 5, 9] for n in range(8)]
NEW = 16
KINDS = (*product(FORMATS, ("default", "int8")), ("bitsandbytes nf4", "default"), ("bitsandbytes int8", "int8"))
"""What is quantised, and the rows that it is multiplied with."""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], Any]:
    """A target of each format, with both kinds of rows, made when it is asked for."""
    folder = tmp_path_factory.mktemp("quantised")

    class Targets(dict[tuple[str, str], Any]):
        def __missing__(self, key: tuple[str, str]) -> Any:
            if key[0].startswith("bitsandbytes"):
                place = folder / key[0]
                bitsandbytes_checkpoint(place, kind=key[0].split()[1], hidden_size=256)
            else:
                place = quantised_file(folder / f"{key[0]}.gguf", (key[0],))
            self[key] = TransformersTarget.from_pretrained(place, activations=key[1])
            return self[key]

    return Targets()


def part_of(drafter: str) -> list[tuple[tuple[str, str], int, float]]:
    """What this drafter is tried with: every number of rows, at both temperatures; formats and rows' kinds in turn."""
    cases = [*product(ROWS, TEMPERATURES)]
    first = 5 * drafter_names().index(drafter)  # neighbours have others; together they have all
    return [(kind, *case) for kind, case in zip(islice(cycle(KINDS), first, None), cases, strict=False)]


def test_drafters_share_all_formats() -> None:
    """With enough drafters each format is met by several, in both kinds of rows, and there are 400 texts at least."""
    met = [kind for drafter in drafter_names() for kind, _, _ in part_of(drafter)]
    assert {*met} == {*KINDS}
    assert len(met) * (1 + len(PROMPTS)) >= 400


@pytest.mark.parametrize("drafter", drafter_names())
def test_no_text_differs(drafter: str, targets: Mapping[tuple[str, str], Any], tmp_path: Path) -> None:
    """Alone, and eight at once."""
    differs, drafted = [], 0
    for kind, rows, temperature in part_of(drafter):
        target = targets[kind]
        sampling = SamplingParams(temperature=temperature, seed=7, acceptance="match") if temperature else None
        settings = settings_of(drafter, target, tmp_path)[0]
        plain = Engine(target, None, "none", prefill_chunk=16)
        engine = Engine(target, None, settings, max_rows=rows, prefill_chunk=16)
        expected = [plain.generate(prompt, NEW, sampling).token_ids for prompt in PROMPTS]
        told: dict[str, Any] = {} if drafter != "prediction" else {"prediction": expected[0]}
        alone = engine.generate(PROMPTS[0], NEW, sampling, **told)
        together = engine.generate_batch(PROMPTS, NEW, sampling, batch=8, **told)
        drafted += sum(max(one.stats.rows) > 1 for one in together)
        found = [alone.token_ids, *(one.token_ids for one in together)]
        differs += [
            (kind, rows, temperature, place)
            for place, (own, text) in enumerate(zip(found, [expected[0], *expected], strict=True))
            if own != text
        ]
        assert len({*map(tuple, expected)}) > 4  # else there would be little to differ
    assert not differs
    assert drafted or drafter in ("none", "auto")  # which sees that nothing pays here
