"""docs/models.md has a row for every model type, and a row says what its model does."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec.native.library import library

ROOT = Path(__file__).parents[3]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts/models_table.py"), run_name="models_table")
PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8").splitlines()
# Multiples everywhere; sinks and windows; latent attention; windows that the mask alone knows; what layers are given
# beside hidden states; rotary positions of their own; refused for recurrent layers; run by their description alone.
CHOSEN = ("granite", "gpt_oss", "youtu", "phimoe", "gemma4_text", "deepseek_v2", "mamba2", "stablelm", "lfm2")
EXACT = [row.split("`")[1] for row in PAGE if re.match(r"\| `.*` \| modules", row)]
SAMPLE = sorted({*CHOSEN, "llama", *SCRIPT["kinds"]()[::10], *EXACT[::12]})


def test_every_model_type_has_a_row() -> None:
    rows = [row.split("`")[1] for row in PAGE if row.startswith("| `")]
    assert rows == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), "run scripts/models_table.py"
    assert len(EXACT) > 105


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLE)
@pytest.mark.filterwarnings("ignore")  # of transformers' own about small configs
def test_a_row_is_what_the_script_says(kind: str) -> None:
    row = str(SCRIPT["row_of"](kind))
    if library() is None:  # no compiler: nothing can be said of native layers
        assert row in [shown.replace(", native", "") for shown in PAGE]
    else:
        assert row in PAGE
