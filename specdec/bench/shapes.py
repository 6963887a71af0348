"""Shapes: models of published sizes with random weights, for measurements that depend on sizes alone."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel

from specdec.errors import check_choice

__all__ = ["BACK", "SHAPES", "random_model", "random_prompt", "weight_bytes", "write_rule"]

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

BACK = 3
"""The number of positions that every layer's attention looks back."""

_from_config: Any = AutoModelForCausalLM.from_config  # transformers does not annotate it
_LOUD = 1000.0  # length of each code in the stream; the random weights' remainder is a hundredth of it
_GATE = 20.0  # where silu is about the identity
_SURE = 10.0  # gap in nats of the best two logits, and about that of the right key and its neighbours


def random_model(
    shape: str, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0
) -> PreTrainedModel:
    """A model of a shape, created on the device; its text follows :func:`write_rule`.

    A step reads as many weights, and takes as long, as with any model of that shape.

    Raises:
        ConfigError: the shape is unknown.
    """
    check_choice("shape", shape, SHAPES)
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = _from_config(copy.deepcopy(SHAPES[shape]), dtype=dtype)
    write_rule(model, seed)
    return model  # type: ignore[no-any-return]


@torch.no_grad()
def write_rule(model: Any, seed: int = 0) -> None:
    """Give a Llama-like model weights by which its text needs every layer, and is the same in every precision.

    With plain random weights the best two logits are often nearer than rounding in bfloat16, and then a text depends on
    the kernels; with a loud embedding it no longer depends on attention. So a token is a random pair (x, y), and what
    follows token n has x = x[n] + 1 and y = y[n - BACK * layers] + 1 (of the first token, where that is before it).
    Each layer's MLP moves x on by one. Each layer's attention, sharp by rotary angle alone, fetches from BACK positions
    before what the layer below it had fetched, so that a key too many or too few anywhere below shows in the text.
    The codes of x, y and what is fetched are orthonormal and random, hence the weights dense; the text depends on the
    seed, not on them. No token comes again within as many as x has values: 25 for the toy, 523 for the 0.5 B shape.
    """
    config, layers, embedding = model.config, model.model.layers, model.get_input_embeddings().weight
    vocabulary, width = embedding.shape
    ys = min(64, layers[0].self_attn.head_dim, (width - 1) // (2 * len(layers) + 2))
    xs = min(vocabulary // ys, width - 1 - ys * (len(layers) + 1), config.intermediate_size)
    codes = _orthonormal(width, 1 + xs + ys * (len(layers) + 1), embedding.device).T
    always, x, fetched = codes[0], codes[1 : 1 + xs], codes[1 + xs :].reshape(len(layers) + 1, ys, width)
    number = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed)).to(embedding.device)
    own_x, own_y = number % xs, number // xs % ys
    embedding.copy_(_LOUD * (always + x[own_x] + fetched[0, own_y]))
    inverse = model.model.rotary_emb.inv_freq
    for depth, layer in enumerate(layers):
        # Lengths after the norm: so many codes are in the stream, each as long as the others.
        _look_back(layer.self_attn, inverse, always, fetched[depth], fetched[depth + 1], math.sqrt(width / (depth + 3)))
        length = math.sqrt(width / (depth + 4))
        layer.mlp.gate_proj.weight[:xs] = _GATE / length * x
        layer.mlp.up_proj.weight[:xs] = always / length
        layer.mlp.down_proj.weight[:, :xs] = _LOUD / _GATE * (x.roll(-1, 0) - x).T
    head = x[(own_x - 1 + len(layers)) % xs] + fetched[-1, (own_y - 1) % ys]
    spare = (number >= xs * ys).unsqueeze(1)  # tokens that are read as another's pair, and never written
    head = torch.where(spare, head / 2, head) * _SURE / math.sqrt(width / (len(layers) + 3))
    model.get_output_embeddings().weight.copy_(head)


def _look_back(
    attention: Any, inverse: torch.Tensor, always: torch.Tensor, source: torch.Tensor, to: torch.Tensor, length: float
) -> None:
    """All heads look at the key BACK positions before, or the first one; what ``source`` codes there, ``to`` does here.

    A key's rotary pairs point one way and a query's BACK angles behind it, so their product is largest at that
    distance. Each query head passes on its own share of the codes, so that none can be missed.
    """
    size, heads = attention.head_dim, attention.q_proj.out_features // attention.head_dim
    sharp = torch.sqrt(_SURE * 2 * math.sqrt(size) / (1 - torch.cos(inverse)).sum()) / length
    query = torch.cat([torch.cos(BACK * inverse), -torch.sin(BACK * inverse)])
    key = torch.cat([torch.ones_like(inverse), torch.zeros_like(inverse)])
    for linear, pattern in ((attention.q_proj, query), (attention.k_proj, key)):
        rows = (sharp * pattern).repeat(linear.out_features // size)
        linear.weight.copy_(torch.outer(rows, always))
    basis = _orthonormal(size, source.shape[0], always.device)  # [size, ys]
    attention.v_proj.weight.copy_((basis @ source / length).repeat(attention.v_proj.out_features // size, 1))
    share = torch.eye(heads, device=always.device).repeat(1, source.shape[0])[:, : source.shape[0]]  # [heads, ys]
    output = (basis * share.unsqueeze(1)).flatten(0, 1) @ to  # [heads * size, width]
    attention.o_proj.weight.copy_(_LOUD * output.T)


def _orthonormal(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    basis: torch.Tensor = torch.linalg.qr(torch.randn(rows, columns, device=device))[0]
    return basis


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that a forward of one row reads: all but an embedding that is not the head too."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = sum(int(weight.nbytes) for weight in model.parameters())
    return total if embedding is head else total - int(embedding.nbytes)


def random_prompt(vocab_size: int, length: int, seed: int = 0) -> list[int]:
    """Random tokens; with random weights only their number matters."""
    generator = torch.Generator().manual_seed(seed)
    prompt: list[int] = torch.randint(vocab_size, (length,), generator=generator).tolist()
    return prompt
