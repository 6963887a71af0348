"""Decoders by their specs, beside the models of transformers that they describe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from specdec.decoder.families import FAMILIES, spec_of
from specdec.decoder.names import CHOICE
from specdec.decoder.settings import Settings
from specdec.decoder.spec import DecoderSpec
from specdec.decoder.weights.checkpoint import Checkpoint
from specdec.decoder.weights.safetensors import SafetensorsSource
from specdec.decoder.weights.source import Source, TensorSource
from specdec.execute.native import NativeExecutor
from specdec.execute.torch import TorchExecutor
from specdec.step.torch_switches import steps
from tests import models

__all__ = [
    "ALL",
    "BIASED",
    "TORCH",
    "Decoder",
    "checkpoint_of",
    "new_model",
    "reference_logits",
    "spec_of_config",
    "unrounded",
]

TORCH = (
    "glm4_moe",
    "lfm2",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "granitemoehybrid",
    "gpt_oss",
    "ministral3",
    "qwen2_moe",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "smollm3",
    "exaone_moe",
    "glm",
    "glm4",
    "olmo2",
    "olmo3",
    "exaone4",
    "cohere",
    "cohere2",
    "starcoder2",
)
"""Families that have a spec which torch alone computes."""
ALL = (*models.FUSED, "mellum", "seed_oss", "ernie4_5", "phi3", *(own for own in TORCH if own not in models.FUSED))
"""Families that have a spec."""
_TURNED: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
BIASED: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "qwen2": {"use_sliding_window": False, "tie_word_embeddings": True},
    "qwen3": {"attention_bias": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "gemma": {"attention_bias": True, "tie_word_embeddings": True},
    "gemma2": {"attention_bias": True, "final_logit_softcapping": None, "query_pre_attn_scalar": 9},
    "gemma3": {"attention_bias": True, "final_logit_softcapping": 7.0, "attn_logit_softcapping": 3.0},
    "lfm2": {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
    "mixtral": {"sliding_window": 6, "head_dim": 16},
    "olmoe": {"attention_bias": True, "norm_topk_prob": True},
    "seed_oss": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    "ernie4_5": {"use_bias": True, "tie_word_embeddings": True},
    "granite": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "granitemoe": {"attention_bias": True, "head_dim": 16, "tie_word_embeddings": True, "num_experts_per_tok": 3},
    "granitemoeshared": {"attention_bias": True, "shared_intermediate_size": 0},
    "granitemoehybrid": {
        **{"attention_bias": True, "num_local_experts": 6, "num_experts_per_tok": 2, "position_embedding_type": "nope"},
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        **{"attention_bias": False, "swiglu_alpha": 1.3, "swiglu_limit": 0.7, "tie_word_embeddings": True},
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "ministral3": {
        "sliding_window": None,
        "rope_parameters": {
            **{"type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 3},
            **{"mscale": 1.0, "mscale_all_dim": 0.7, "max_position_embeddings": 256, "llama_4_scaling_beta": 0.2},
        },
    },
    "qwen2_moe": {
        **{"qkv_bias": False, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
        **{"mlp_only_layers": [1], "norm_topk_prob": True},
    },
    "hunyuan_v1_dense": {
        "attention_bias": True,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0},
    },
    "hunyuan_v1_moe": {"attention_bias": True, "moe_topk": [1, 3, 2], "tie_word_embeddings": True},
    "smollm3": {"attention_bias": True, "mlp_bias": True, "use_sliding_window": True, "sliding_window": 5},
    "phi3": {"sliding_window": None, "rope_parameters": {**_TURNED, "partial_rotary_factor": 0.5}},
    "exaone_moe": {"n_group": 4, "topk_group": 2, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "glm": {"attention_bias": True, "rope_parameters": {**_TURNED, "partial_rotary_factor": 0.25}},
    "glm4": {"attention_bias": True, "rope_parameters": {**_TURNED, "partial_rotary_factor": 0.25}},
    "olmo2": {"attention_bias": True, "tie_word_embeddings": True},
    "olmo3": {"attention_bias": True, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
    "cohere": {"attention_bias": True, "tie_word_embeddings": True, "use_qk_norm": True},
    "cohere2": {"attention_bias": True, "layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    "starcoder2": {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False},
    "mellum": {"attention_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse"], "norm_topk_prob": False},
    "glm4_moe": {"attention_bias": True, "use_qk_norm": True, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "qwen3_moe": {"attention_bias": True, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 6},
}
"""Family -> changes of its config: biases, other windows, tied and other heads."""


class _Unrounded(TorchFunctionMode):
    """Float64 stays float64 where transformers' modules compute in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            if func is torch.Tensor.float or (func in (torch.Tensor.to, torch.Tensor.type) and torch.float32 in args):
                return args[0]
            if func is torch.nn.functional.softmax and kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


@contextmanager
def unrounded() -> Iterator[None]:
    """While inside, modules round no float64."""
    with torch.inference_mode(), _Unrounded():
        yield


def reference_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[T, V] of the model's own forward over a text, in float64 throughout."""
    with unrounded():
        logits: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def new_model(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """As of :mod:`tests.models`, but for norms and biases, which are random as well."""
    model: Any = models.new_model(family, dtype, **changes)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        choices = (own for name, own in model.named_buffers() if name.endswith(CHOICE))
        for parameter in (*model.parameters(), *choices):
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.2)
    return model


def spec_of_config(config: Any) -> DecoderSpec:
    """What a config describes."""
    return spec_of(config.model_type, Settings.of(config))


def checkpoint_of(model: Any, folder: Path | None = None) -> Checkpoint:
    """A model's weights: those in memory, or with a folder, saved there and read from there."""
    source: Source = TensorSource(model.state_dict(), "a model in memory")
    if folder is not None:
        model.save_pretrained(folder)
        source = SafetensorsSource(folder)
    config = model.config
    return Checkpoint(spec_of_config(config), FAMILIES[config.model_type].names, source)


class Decoder:
    """A decoder as tests have it run (see :mod:`tests.seam`)."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype = torch.float64, execution: str = "torch") -> None:
        self.executor = (
            NativeExecutor(checkpoint, dtype=dtype)
            if execution == "native"
            else TorchExecutor(checkpoint, dtype=dtype, device=torch.device("cpu"))
        )
        self.forward, self.new_cache, self.active = self.executor.run, self.executor.new_cache, steps
