"""Biases in GGUF files: where classes of transformers have no place for them, of single layers, and of heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import Draft, Engine, TransformersTarget
from specdec.errors import CheckpointError, ConfigError
from specdec.execute.knobs import LIKE_LLAMA, unlike
from specdec.models.live_model import load_model
from specdec.native.library import library
from specdec.step.step_io import FINAL
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


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11 * float(expected.abs().max()))


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
    close(found, expected)
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


HEAD = {"output.bias": (VOCABULARY,)}


@pytest.mark.parametrize("tied", [False, True])
def test_a_bias_of_the_head(tied: bool, tmp_path: Path) -> None:
    """In a tree, and where drafters have the head by itself, of all tokens or some; and it counts."""
    tensors: dict[str, Any] = {**HEAD, "output.weight": None} if tied else HEAD
    file = write_family(tmp_path / "a.gguf", "qwen2", tensors=tensors)
    target, model = TransformersTarget.from_pretrained(file, dtype="float64"), modules_of(file)
    expected = torch.stack([reference_logits(model, [*PROMPT, *path])[-1] for path in PATHS])
    with target.active():
        output = seam.text(target).fill(PROMPT, 4).run(TREE, taps=(FINAL,))
    assert output.logits is not None
    close(output.logits, expected)
    last, some = output.hidden[FINAL], torch.tensor([5, 90, 7])
    with torch.inference_mode():
        for one in (target, TransformersTarget(model)):
            close(one.head(last), expected)
            for dtype in (None, torch.float64):
                close(one.head_of(some, dtype=dtype)(last), expected[:, some])
                close(one.head_of(None, dtype=dtype)(last), expected)
    bare = modules_of(write_family(tmp_path / "b.gguf", "qwen2", tensors={**tensors, "output.bias": None}))
    close(expected[-1] - reference_logits(bare, [*PROMPT, *PATHS[-1]])[-1], model.lm_head.bias.detach())
    assert dict(target.named_weights())["lm_head.bias"].abs().min() > 0
    with pytest.raises(ConfigError, match=r"1 biases, such as lm_head\.bias, have no place in"):
        modules_of(file, "auto")


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_native_heads_add_their_bias(kind: str, tmp_path: Path) -> None:
    """And so do packed rows of some tokens, which drafters run; CUDA's kernels refuse it by name."""
    file = write_family(tmp_path / "a.gguf", "qwen2", tensors=HEAD, types={"output.weight": kind})
    own, live = (
        TransformersTarget.from_pretrained(file, dtype="float32", execution=one) for one in ("native", "modules")
    )
    texts = [Engine(*one).generate(PROMPT, 20).token_ids for one in ((own, None, "lookahead"), (live, None, "none"))]
    assert texts[0] == texts[1]
    last, some = torch.randn(3, WIDTH), torch.tensor([5, 90, 7])
    part: Any = own.head_of(some)
    assert part.packed is not None
    torch.testing.assert_close(part.packed(last), live.head(last)[:, some])
    assert torch.equal(own.packed_head(last), own.head(last))
    torch.testing.assert_close(own.head(last), live.head(last))
    assert unlike(own.executor.spec, LIKE_LLAMA, "they do") == "they do, and here head.bias is True"


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
