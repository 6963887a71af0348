"""Shapes: models of published sizes with random weights, for what depends on the size alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel

from specdec.errors import ConfigError, unknown

__all__ = ["SHAPES", "random_model", "random_prompt"]

SHAPES = {
    "toy": LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=None,
    ),
    "0.5b": LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
        num_key_value_heads=8, max_position_embeddings=4096, eos_token_id=None,
    ),
    "mistral-7b": MistralConfig(sliding_window=4096, eos_token_id=None),
    "llama-7b": LlamaConfig(max_position_embeddings=4096, eos_token_id=None),
}  # fmt: skip
"""Name -> config; no token ends a text."""

_from_config: Any = AutoModelForCausalLM.from_config  # transformers does not type it
_LOUD = 100.0  # standard deviation of the embedding: the layers add a tenth of that, whatever their depth


def random_model(
    shape: str, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0
) -> PreTrainedModel:
    """A model of a shape, made on the device.

    With plain random weights the two best logits are often nearer than rounding in bfloat16, and then a text depends on
    the kernels. So the embedding is made louder than the layers, and the head reads the token after it on one random
    cycle through the vocabulary: every kernel writes the same text, and no text repeats itself within the vocabulary's
    size. The weights that a step reads, and its time, are those of any model of that shape.

    Raises:
        ConfigError: an unknown shape.
    """
    if shape not in SHAPES:
        raise ConfigError(unknown("shape", shape, SHAPES))
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = _from_config(copy.deepcopy(SHAPES[shape]), dtype=dtype)
    embedding, head = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    cycle = torch.randperm(embedding.shape[0], generator=torch.Generator().manual_seed(seed)).to(device)
    embedding.normal_()
    head[cycle.roll(-1)] = embedding[cycle] * model.config.initializer_range
    embedding.mul_(_LOUD)
    return model  # type: ignore[no-any-return]


def random_prompt(vocab_size: int, length: int, seed: int = 0) -> list[int]:
    """Random tokens; with random weights only their number matters."""
    generator = torch.Generator().manual_seed(seed)
    prompt: list[int] = torch.randint(vocab_size, (length,), generator=generator).tolist()
    return prompt
