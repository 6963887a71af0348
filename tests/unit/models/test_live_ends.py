"""Embedding and head of live models by themselves: as their own forward has them, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import Engine, TransformersTarget
from specdec.errors import TargetError
from specdec.step.step_io import FINAL
from tests import seam
from tests.models import BOS, VOCAB, prompt_of, reference

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.3, "logits_scaling": 0.7}
CAPPED = {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "final_logit_softcapping": 6.0,
    "layer_types": ["full_attention"] * 2,
}


def random_weights(model: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
    return model.to(dtype).eval()


def new_model(kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options})
    return random_weights(getattr(transformers, f"{kind}ForCausalLM")(config), dtype)


def by_themselves(target: TransformersTarget) -> tuple[float, float]:
    """How far embedding and head are from what the forward gives of a text, relative to the largest number."""
    tokens = prompt_of(11)
    with target.active(), torch.no_grad():
        output = seam.text(target, capacity=20, rows=20).run(tokens, taps={0, FINAL})
        found = (target.embed(tokens), output.hidden[0]), (target.head(output.hidden[FINAL]), output.logits)
    embedding, logits = (float((own - other).abs().max() / other.abs().max()) for own, other in found)
    return embedding, logits


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {}),
        ("Granite", GRANITE),
        ("Cohere", {"logit_scale": 0.3}),
        ("Falcon", {"alibi": False}),
        ("HyperCLOVAX", {**GRANITE, "head_dim": 8}),
        ("Gemma2", CAPPED),  # whose embedding multiplies by itself, as the next one's
        ("MiniCPM3", {**LATENT, "scale_emb": 5, "scale_depth": 1.4, "dim_model_base": 10}),
    ],
)
def test_ends_give_what_the_forward_gives(kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    target = TransformersTarget(new_model(kind, dtype, **options))
    embedding, logits = by_themselves(target)
    assert embedding <= torch.finfo(dtype).eps * 4 + 1e-7
    assert logits <= torch.finfo(dtype).eps * 4
    assert (target.embedding_rows is None) == (kind not in ("Llama", "Cohere", "Falcon"))


class Changed(LlamaForCausalLM):
    """A Llama whose logits are a function of a Llama's."""

    change: Any = staticmethod(lambda logits: logits)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        output = super().forward(*arguments, **options)
        output.logits = self.change(output.logits)
        return output


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits + 1,
        lambda logits: torch.tanh(logits / 32) * 32,
        lambda logits: logits.clamp(max=2),
        lambda logits: logits.flip(-1),
        lambda logits: torch.cat((logits, logits), -1),
    ],
)
def test_what_is_no_multiple_is_refused(change: Any) -> None:
    model, prompt = random_weights(Changed(LlamaConfig(**SIZES)), torch.float64), prompt_of(9)
    model.change = change
    target = TransformersTarget(model)
    with pytest.raises(TargetError, match=r"between head and logits that is no multiple and no cap.*tokens alone"):
        target.head(torch.ones(1, target.hidden_size, dtype=torch.float64))
    assert Engine(target, drafter="prompt_lookup").generate(prompt, 20).token_ids == reference(model, prompt, 20)


def test_an_embedding_that_is_normed_is_refused() -> None:
    target = TransformersTarget(new_model("NanoChat", final_logit_softcapping=8.0))
    with pytest.raises(TargetError, match=r"NanoChatForCausalLM is run by .* between embedding and layers"):
        target.embed([3])


def test_a_forward_that_fails_is_told() -> None:
    model = new_model("Llama")
    target = TransformersTarget(model)

    def fails(*_: Any) -> None:
        raise RuntimeError("broken")

    hook = model.model.layers[1].mlp.register_forward_hook(fails)
    with pytest.raises(TargetError, match="cannot be called by themselves: broken"):
        target.head(torch.ones(1, target.hidden_size))
    hook.remove()
    assert target.head(torch.ones(1, target.hidden_size, dtype=torch.float64)).shape == (1, VOCAB)
