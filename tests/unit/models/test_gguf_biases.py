"""Biases in GGUF files of architectures whose classes in transformers have no place for them, and of few layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import Draft, Engine, TransformersTarget
from specdec.errors import CheckpointError, ConfigError
from specdec.models.live_model import load_model
from specdec.native.library import library
from tests import models, seam
from tests.decoders import reference_logits
from tests.gguf_families import DIM, HEADS, VOCABULARY, WIDTH, biases_of, write_family
from tests.llama_cpp import LlamaCpp, apart

PROMPT = models.prompt_of(9)
TREE = Draft((3, 4, 5, 6, 7), (-1, 0, 0, 1, 2))
PATHS = ((3,), (3, 4), (3, 5), (3, 4, 6), (3, 5, 7))  # from the tree's root to each row
BARE = {"mixtral": True, "mistral3": True, "phi3": False, "exaone4": False}
"""Architectures whose classes in transformers have no biases -> whether llama.cpp reads that of attention's output."""


def biased(place: Path, family: str) -> Path:
    return write_family(place / "a.gguf", family, tensors=biases_of(family, output=BARE[family]))


def modules_of(file: Path, device_map: str | None = None) -> Any:
    return load_model(file, dtype="float64", device=None, device_map=device_map)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", BARE)
def test_biases_are_those_of_the_modules(family: str, tmp_path: Path) -> None:
    """In a prompt and in a tree; and they count."""
    file = biased(tmp_path, family)
    target, model = TransformersTarget.from_pretrained(file, dtype="float64"), modules_of(file)
    expected = torch.stack([reference_logits(model, [*PROMPT, *path])[-1] for path in PATHS])
    with target.active():
        found = seam.text(target).fill(PROMPT, 4).run(TREE).logits
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11 * float(expected.abs().max()))
    bare = write_family(tmp_path / "b.gguf", family)  # of the same weights
    plain = modules_of(bare)
    assert apart(*(reference_logits(one, PROMPT).log_softmax(-1) for one in (model, plain))) > 1e-6
    with pytest.raises(ConfigError, match=r"biases, such as model\.layers\.0\.\S+\.bias, have no place in"):
        modules_of(file, "auto")


@pytest.mark.skipif(library() is None, reason="no C compiler")
def test_texts_of_native_layers_are_those_of_the_modules(tmp_path: Path) -> None:
    file = biased(tmp_path, "mixtral")
    own, live = (TransformersTarget.from_pretrained(file, execution=one) for one in ("native", "modules"))
    texts = [Engine(*one).generate(PROMPT, 20).token_ids for one in ((own, None, "lookahead"), (live, None, "none"))]
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_biases_of_one_layer(family: str, llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    file = write_family(tmp_path / "a.gguf", family, tensors={"blk.1.attn_q.bias": (HEADS * DIM,)})
    expected = llama_cpp.logits(file, [PROMPT], VOCABULARY)
    target = TransformersTarget.from_pretrained(file, dtype="float64")
    assert expected is not None
    assert apart(models.logits_of(target, PROMPT)[-1:].log_softmax(-1), expected) <= 1e-9


@pytest.mark.parametrize("family", ["ernie4_5", "gemma", "qwen3"])
def test_biases_that_llama_cpp_does_not_add(family: str, tmp_path: Path) -> None:
    file = write_family(tmp_path / "a.gguf", family, tensors={"blk.2.attn_output.bias": (WIDTH,)})
    with pytest.raises(CheckpointError, match=f"biases of attn_output, which llama.cpp does not add for {family}"):
        TransformersTarget.from_pretrained(file)
