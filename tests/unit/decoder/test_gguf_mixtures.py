"""Experts of GPT-OSS, Granite and Hunyuan, whose weights several tensors of a file make; and Mistral 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from specdec import Engine, TransformersTarget
from specdec.models.live_model import load_model
from specdec.native.library import library
from specdec.runners.block_weight import BlockWeight
from tests.gguf_families import DIM, EXPERTS, HEADS, VOCABULARY, WIDTH, shapes_of, write_family
from tests.gguf_files import rewritten, widened
from tests.llama_cpp import LlamaCpp, apart, log_probabilities
from tests.models import logits_of

PROMPT = (3, 9, 4, 3, 9, 4, 11, 3, 9)
EVEN = {"expert_feed_forward_length": WIDTH}  # of which 32 is a divisor, as blocks need it


def even_experts() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in shapes_of("gpt-oss"):
        if "_exps." in name:
            shapes[name] = (EXPERTS, WIDTH, WIDTH) if name.endswith("weight") else (EXPERTS, WIDTH)
    return shapes


def packed(file: Path, to: Path, kind: Any = gguf.GGMLQuantizationType.MXFP4, part: str = "_exps.weight") -> Path:
    """The same file with matrices whose names end so, and whose rows can be, in blocks of a kind."""

    def change(tensor: Any) -> tuple[Any, Any]:
        if tensor.name.endswith(part) and len(tensor.shape) > 1 and tensor.shape[0] % 32 == 0:
            return gguf.quants.quantize(np.array(tensor.data), kind), kind
        return tensor.data, None

    return rewritten(file, to, change)


def test_blocks_of_mxfp4_are_what_llama_cpp_takes_them_for(llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    plain = write_family(tmp_path / "a.gguf", "gpt-oss", EVEN, even_experts())
    file = packed(plain, tmp_path / "packed.gguf")
    expected = llama_cpp.logits(widened(file, tmp_path / "wide.gguf"), [PROMPT], VOCABULARY)
    assert expected is not None
    model: Any = load_model(file, dtype="float64", device=None, device_map=None, trust_remote_code=False)
    found = log_probabilities(model, [PROMPT])
    assert apart(found, expected) <= 1e-9
    before = llama_cpp.logits(plain, [PROMPT], VOCABULARY)
    assert before is not None
    assert apart(found, before) > 1e-6


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["gpt-oss", "granitemoe", "mistral3", "hunyuan-moe"])
def test_texts_do_not_depend_on_the_drafter(family: str, tmp_path: Path) -> None:
    target = TransformersTarget.from_pretrained(write_family(tmp_path / "a.gguf", family), dtype="float64")
    assert target.options["runner"] == "fused"
    plain = Engine(target, None).generate(PROMPT, 40)
    for drafter in ("lookahead", "token_recycling"):
        found = Engine(target, None, drafter).generate(PROMPT, 40)
        assert found.token_ids == plain.token_ids
        assert found.stats.steps < plain.stats.steps


def test_a_mistral3_that_scales_no_queries_is_a_llama(tmp_path: Path) -> None:
    said = {"attention.temperature_scale": None}
    file = write_family(tmp_path / "a.gguf", "mistral3", said)
    target = TransformersTarget.from_pretrained(file, dtype="float32")
    assert target.name == "LlamaForCausalLM"
    other = write_family(tmp_path / "b.gguf", "mistral3", said, {"blk.0.attn_q.bias": (HEADS * DIM,)})
    biased = TransformersTarget.from_pretrained(other, dtype="float32")
    named = dict(biased.named_weights())
    assert bool(named["model.layers.0.self_attn.q_proj.bias"].any())
    assert not bool(named["model.layers.1.self_attn.q_proj.bias"].any())
    assert torch.equal(named["lm_head.weight"], dict(target.named_weights())["lm_head.weight"])


@pytest.mark.few(2)
@pytest.mark.skipif(library() is None, reason="no C compiler works here")
@pytest.mark.parametrize("family", ["phi3", "glm4", "ernie4_5", "seed_oss", "llama"])
def test_blocks_stay_where_a_tensor_is_of_several_weights_or_in_another_order(family: str, tmp_path: Path) -> None:
    """Queries, keys and values in one, gate and up in one, and rows of which neighbours turn together."""
    plain = write_family(tmp_path / "a.gguf", family)
    file = packed(plain, tmp_path / "packed.gguf", gguf.GGMLQuantizationType.Q8_0, ".weight")
    target = TransformersTarget.from_pretrained(file, dtype="float32")
    assert target.options["runner"] == "native"
    attention = [one for names, one in target.executor.kernels() if "self_attn" in names[0]]
    assert len(attention) == 6
    assert all(isinstance(one, BlockWeight) for one in attention)
    model: Any = load_model(file, dtype="float32", device=None, device_map=None, trust_remote_code=False)
    for name, weight in target.named_weights():
        assert torch.equal(weight, model.state_dict()[name]), name
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(target, PROMPT), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
