"""The native executor: what the torch executor computes, up to rounding, and a row the same in any company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import Draft
from specdec.decoder.spec import Norm, Plain, Rope
from specdec.execute.native import NativeExecutor
from specdec.execute.native_layers import why_not
from specdec.native.library import library
from specdec.step.step_io import Draws, Entering, LayerPlan, Part, Wanted
from specdec.target import FINAL
from tests import models, seam
from tests.decoders import ALL, BIASED, TORCH, Decoder, checkpoint_of, new_model, spec_of_config

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler works here")

PROMPT, OTHER = models.prompt_of(9), models.prompt_of(5, seed=3)
TREE = Draft((3, 4, 5, 6, 7, 8, 9), (-1, 0, 0, 1, 2, 3, 5))
SIZES: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48}


@pytest.mark.few(4)
@pytest.mark.parametrize("family", [family for family in ALL if family not in (*TORCH, "phi3")])
def test_logits_are_those_of_the_torch_executor(family: str, tmp_path: Path) -> None:
    """Chains, trees, texts beside each other, exits and entries; and what the head says."""
    checkpoint = checkpoint_of(new_model(family, torch.float32, **{**BIASED[family], **SIZES}), tmp_path)
    taps, wanted, found = {0, 1, 3, FINAL}, Wanted(top_k=3, draws=Draws([7], [0.8])), []
    for execution in ("torch", "native"):
        one = Decoder(checkpoint, torch.float32, execution)
        with one.active():
            own, other = seam.text(one).fill(PROMPT, 4), seam.text(one).fill(OTHER, 16)
            outputs = [own.run(models.prompt_of(rows), taps=taps) for rows in (1, 4, 7, 17)]
            outputs += [own.run(TREE, taps=taps), seam.run_together([own, other], [TREE, TREE], taps=taps)]
            early = one.forward(own.rows(TREE, plan=LayerPlan(1))).out.clone()
            outputs.append(one.forward(own.rows(TREE, entry=Entering(1, early))))
            drawn = one.forward(own.rows(TREE, wanted=wanted))
            assert drawn.best == drawn.given.argmax(-1).tolist()
            assert drawn.top_k(3)[2] == drawn.given[2].topk(3).indices.tolist()
            states = [output.hidden[tap] for output in outputs for tap in sorted(output.hidden)]
            found.append([early, drawn.logits, *states, *(output.logits for output in outputs)])
    for expected, own_numbers in zip(*found, strict=True):
        torch.testing.assert_close(own_numbers, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_weights_come_out_of_their_panels(tmp_path: Path) -> None:
    model = new_model("mixtral", torch.float32, tie_word_embeddings=True, **SIZES)
    executor = Decoder(checkpoint_of(model, tmp_path), torch.float32, "native").executor
    expected = dict(model.named_parameters())
    found = dict(executor.named_weights())
    assert [*found] == sorted(expected)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_parts_of_layers_run_by_the_same_panels() -> None:
    model = new_model("qwen3", torch.float32, **SIZES)
    plan, found = LayerPlan(parts=(Part.BOTH, Part.MLP, Part.ATTENTION)), []
    for execution in ("torch", "native"):
        target = Decoder(checkpoint_of(model), torch.float32, execution)
        with target.active():
            own = seam.text(target).fill(PROMPT, 16)
            logits = target.forward(own.rows(TREE, plan=plan)).logits
            assert logits is not None
            found.append(logits.clone())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-3)
    assert not torch.equal(*found)


@pytest.mark.parametrize(
    ("changes", "dtype", "says"),
    [
        ({}, torch.float16, "compute in float32 and bfloat16, and the model in float16"),
        ({"head_dim": 8}, torch.float32, "a multiple of 16, and here they are 8 and 48 wide"),
        ({"intermediate_size": 40}, torch.float32, "a multiple of 16, and here they are 16 and 40 wide"),
    ],
)
def test_what_the_library_does_not_run_is_named(changes: dict[str, Any], dtype: torch.dtype, says: str) -> None:
    spec = spec_of_config(new_model("llama", **{**SIZES, **changes}).config)
    assert says in str(why_not(spec, dtype, torch.device("cpu")))
    others = tuple(replace(own, mlp=replace(own.mlp, act="gelu")) for own in spec.layers)
    assert "here it is gelu" in str(why_not(replace(spec, layers=others), torch.float32, torch.device("cpu")))
    assert "on a CPU" in str(why_not(spec, dtype, torch.device("cuda")))
    other = spec_of_config(new_model("lfm2").config)
    assert "and no ShortConv" in str(why_not(other, torch.float32, torch.device("cpu")))


@pytest.mark.parametrize(
    ("part", "says"), [(0.5, "layers.0.mixer.rope.dim is 8"), (1.0, "layers.1.mlp.router is Sigmoid")]
)
def test_experts_and_positions_of_glm_are_refused_by_name(part: float, says: str) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part}
    spec = spec_of_config(new_model("glm4_moe", rope_parameters=rope).config)
    assert says in str(why_not(spec, torch.float32, torch.device("cpu")))


def test_what_torch_alone_computes_is_named() -> None:
    """One thing at a time, and each family in which there is one."""
    spec = spec_of_config(new_model("llama", **SIZES).config)
    own, computed = spec.layers[0], "native layers compute decoders like Llama's, Gemma's and Mixtral's, and here"
    attention, centred = own.attention, Norm(1e-5, centred=True)
    changed: dict[str, dict[str, Any]] = {
        "layers.0.scale is 0.5": {"scale": 0.5},
        "layers.0.parallel is True": {"parallel": True},
        "layers.0.mlp is Plain": {"mlp": Plain("silu", 48)},
        "layers.0.before.1 is None": {"before": (own.before[0], None)},
        "layers.0.before.0.centred is True": {"before": (centred, own.before[1])},
        "layers.0.mixer.rope.dim is 0": {"mixer": replace(attention, rope=Rope(0, 1e4))},
        "layers.0.mixer.rope.dim is 4": {"mixer": replace(attention, rope=Rope(4, 1e4))},
    }
    every = {what: replace(spec, layers=(replace(own, **more),)) for what, more in changed.items()}
    every["head.scale is 0.5"] = replace(spec, head=replace(spec.head, scale=0.5))
    every["head.norm.centred is True"] = replace(spec, head=replace(spec.head, norm=centred))
    for what, one in every.items():
        assert why_not(one, torch.float32, torch.device("cpu")) == f"{computed} {what}"
    for family in {*TORCH} - {"lfm2"}:
        said = why_not(spec_of_config(models.model_of(family).config), torch.float32, torch.device("cpu"))
        assert str(said).startswith(computed), family


def test_decoding_does_not_depend_on_rows_beside() -> None:
    spec = checkpoint_of(new_model("llama", torch.float32, **SIZES))
    assert why_not(spec.spec, torch.float32, torch.device("cpu")) is None
    assert NativeExecutor(spec, dtype=torch.float32).varies is None
