"""What models do between their parts: read off their own forward, bit for bit, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import Engine, TransformersTarget
from specdec.errors import TargetError
from specdec.runners.boundary_ops import Joint, Joints
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


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("Llama", {}, ""),
        ("Granite", GRANITE, "embedding * 3; logits / 0.7"),
        ("Cohere", {"logit_scale": 0.3}, "logits * 0.3"),
        ("HyperCLOVAX", {**GRANITE, "head_dim": 8}, "embedding * 3; logits * 0.7"),
        ("Gemma2", CAPPED, "logits soft-capped at 6"),
        (
            "MiniCPM3",
            {**LATENT, "scale_emb": 5, "scale_depth": 1.4, "dim_model_base": 10},
            "last hidden state / 3.2",  # its embedding multiplies by itself
        ),
    ],
)
def test_multiples_and_caps(kind: str, options: dict[str, Any], told: str, dtype: torch.dtype) -> None:
    model, prompt = new_model(kind, dtype, **options), prompt_of(11)
    target = TransformersTarget(model)
    assert str(target.joints) == told
    if dtype == torch.float64:
        expected = reference(model, prompt, 30)
        assert len(set(expected)) > 4
        for drafter in ("none", "prompt_lookup"):
            assert Engine(target, drafter=drafter).generate(prompt, 30).token_ids == expected
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Changed(LlamaForCausalLM):
    """A Llama whose logits are a function of a Llama's."""

    change: Any = staticmethod(lambda logits: logits)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        output = super().forward(*arguments, **options)
        output.logits = self.change(output.logits)
        return output


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "steps"),
    [
        (lambda logits: logits * 0.6180339, (("multiply", 0.6180339),)),  # no number of the config
        (lambda logits: torch.tanh(logits * 0.02 / 32) * 32, (("multiply", 0.02), ("cap", 32.0))),
        (lambda logits: 48 * torch.tanh(logits / 48) / 256, (("cap", 48.0), ("divide", 256.0))),
        (lambda logits: (logits / 256).float(), None),
        (lambda logits: logits + 1e-4, "refused"),
        (lambda logits: logits.clamp(max=200), "refused"),
        (lambda logits: logits.flip(-1), "refused"),
        (lambda logits: torch.cat((logits, logits), -1), "refused"),
    ],
)
def test_forms_that_a_joint_may_have(change: Any, steps: Any) -> None:
    model = random_weights(Changed(LlamaConfig(**SIZES)), torch.float64)
    model.change, prompt = change, prompt_of(9)
    target = TransformersTarget(model)
    if steps == "refused":
        with pytest.raises(
            TargetError, match=r"between head and logits that is no multiple and no soft cap.*tokens alone"
        ):
            target.head(torch.ones(1, target.hidden_size, dtype=torch.float64))
    else:
        joint = target.joints.logits
        assert joint.steps == steps or steps is None
        values = torch.linspace(-60, 60, 1000, dtype=torch.float64)
        assert torch.equal(joint(values), change(values))
    assert Engine(target, drafter="prompt_lookup").generate(prompt, 20).token_ids == reference(model, prompt, 20)


def test_a_norm_that_is_used_twice_does_not_hide_a_joint() -> None:
    """NanoChat norms its embedding, by the module that is its last norm."""
    options = {"final_logit_softcapping": 8.0}
    target = TransformersTarget(new_model("NanoChat", **options))
    with pytest.raises(TargetError, match="NanoChatForCausalLM does something between embedding and layers"):
        target.embed([3])


def test_without_steps_nothing_is_computed() -> None:
    values = torch.ones(3)
    assert Joints().logits(values) is values
    assert Joint(dtype=torch.float64)(values).dtype == torch.float64


def test_hooks_are_taken_back_when_the_forward_fails() -> None:
    model = new_model("Llama")
    target = TransformersTarget(model)

    def fails(*_: Any) -> None:
        raise RuntimeError("broken")

    hook = model.model.layers[1].mlp.register_forward_hook(fails)
    with pytest.raises(TargetError, match="cannot be called by themselves: broken"):
        target.head(torch.ones(1, target.hidden_size))
    hook.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
