"""What others' implementations guess with heads of the formats that we read, for texts of a small random model.

EAGLE-1's layer is transformers' own. For the others there is the package ``speculators``, which does not install beside
the transformers that is pinned here: ``pip install --no-deps speculators==0.9.0`` and what it then misses, in a venv of
one's own. What they guess is recorded in ``tests/head_guesses.json`` by ``scripts/record_heads.py``.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tests import heads
from tests.models import VOCAB, model_of

__all__ = ["FAMILY", "REFERENCES", "Guess", "Reference"]

FAMILY, SIZE = "llama", 32
OUTER = [1, 2, 3]  # hidden layers that are read, by what comes before them
Guess = Callable[[list[int], list[int]], torch.Tensor]
"""A text, its root last, and tokens guessed behind it, to [depths, V] logits: behind the root, and each of them."""


class Reference(NamedTuple):
    """A head in its published layout, who drafts with it, and how to have others guess with it."""

    drafter: str
    config: dict[str, Any]
    tensors: heads.Tensors
    guess: Callable[[], Guess]


def hidden_states(tokens: Sequence[int]) -> list[torch.Tensor]:
    """Of the target: [T, D] after 0, 1, ... all layers, and the last one's after the norm."""
    model, ids, last = model_of(FAMILY), torch.tensor([[*tokens]]), list[torch.Tensor]()
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0][0]))
    try:
        with torch.no_grad():
            found = model(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True).hidden_states
    finally:
        hook.remove()
    return [*(states[0] for states in found[:-1]), last[0], found[-1][0]]


def features(tokens: Sequence[int]) -> torch.Tensor:
    """[1, T, taps x D] of a text without its root."""
    states = hidden_states(tokens[:-1])
    return torch.cat([states[layer] for layer in OUTER], -1)[None]


def later(raw: torch.Tensor, rows: int) -> torch.Tensor:
    """As many rows more, of which the reference needs only places."""
    return torch.nn.functional.pad(raw, (0, 0, 0, rows))


def by_token(logits: torch.Tensor, tensors: heads.Tensors) -> torch.Tensor:
    """[..., V] of [..., d], -inf for tokens that are not drafted."""
    if "d2t" not in tensors:
        return logits
    tokens = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    return logits.new_full((*logits.shape[:-1], VOCAB), -torch.inf).index_copy(-1, tokens, logits)


def eagle1(config: dict[str, Any], tensors: heads.Tensors) -> Guess:
    """``fc``, and Llama's own layer without its first norm; the target's head on what comes out."""
    llama = LlamaConfig(**heads.layer_config(SIZE, VOCAB), attn_implementation="eager")
    layer, rotary = LlamaDecoderLayer(llama, 0).double().eval(), LlamaRotaryEmbedding(llama)
    layer.input_layernorm = torch.nn.Identity()
    layer.load_state_dict({n.removeprefix("layers.0."): t for n, t in tensors.items() if n.startswith("layers.")})
    weight, bias, model = tensors["fc.weight"].double(), tensors["fc.bias"].double(), model_of(FAMILY)

    @torch.no_grad()
    def guess(tokens: list[int], path: list[int]) -> torch.Tensor:
        states, given = hidden_states(tokens[:-1])[-1], torch.tensor([*tokens[1:], *path])
        for _ in range(len(path) + 1):  # each time the whole text, of which only the last row's state is new
            embedded = model.get_input_embeddings()(given[: len(states)])
            inputs = torch.nn.functional.linear(torch.cat((embedded, states), -1), weight, bias)[None]
            mask = torch.full((len(states), len(states)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
            angles = rotary(inputs, torch.arange(len(states))[None])
            found = layer(inputs, attention_mask=mask, position_embeddings=angles)[0]
            states = torch.cat((states, found[-1:]))
        return model.lm_head(states[-len(path) - 1 :])

    return guess


@contextmanager
def quiet() -> Iterator[None]:
    """That package's modules warn of what is theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def speculators_model(name: str, config: dict[str, Any], tensors: heads.Tensors, inner: Any, **own: Any) -> Any:
    """That package's model with these weights, and the target's embedding and head where it has none."""
    kind = name.lower()
    with quiet():
        core = importlib.import_module(f"speculators.models.{kind}.core")
        made = getattr(importlib.import_module(f"speculators.models.{kind}.config"), f"{name}SpeculatorConfig")
        found = made(transformer_layer_config=inner, draft_vocab_size=config["draft_vocab_size"], **own)
        model = getattr(core, f"{name}DraftModel")(found).double().eval()
    missing, more = model.load_state_dict(tensors, strict=False)
    known = {"embed_tokens.weight", "lm_head.weight", "verifier_norm.weight", "verifier_lm_head.weight", "t2d", "d2t"}
    assert not more
    assert set(missing) <= known
    for part in ("embed_tokens", "lm_head"):
        if f"{part}.weight" in missing:
            getattr(model, part).weight.data = getattr(
                model_of(FAMILY), f"get_{'in' if part[0] == 'e' else 'out'}put_embeddings"
            )().weight.data
    model.verifier_lm_head.weight.data.zero_()
    return model


def llama_of(config: dict[str, Any], layers: int, bias: bool) -> LlamaConfig:
    """The layers' config."""
    names = {**heads.layer_config(1, 1), "rope_scaling": None}
    inner = {name: value for name, value in config.items() if name in names}
    return LlamaConfig(**{**inner, "num_hidden_layers": layers}, attention_bias=bias, attn_implementation="eager")


def eagle3(config: dict[str, Any], tensors: heads.Tensors) -> Guess:
    """Its training runs as many passes as are asked for, with tokens that are given."""
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    model = speculators_model(
        "Eagle3", config, renamed, llama_of(config, 1, "midlayer.self_attn.q_proj.bias" in tensors),
        eagle_aux_hidden_state_layer_ids=OUTER, norm_before_residual=config.get("norm_before_residual", False),
        norm_output=config.get("norm_output", False), norm_before_fc="input_norm.weight" in tensors,
        fc_norm="fc_norm.0.weight" in tensors,
    )  # fmt: skip
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *given: logits.append(given[-1]))

    @torch.no_grad()
    def guess(tokens: list[int], path: list[int]) -> torch.Tensor:
        given = torch.tensor([[*tokens[1:], *path]])
        logits.clear()
        model(later(features(tokens), len(path)), given, torch.zeros_like(given), ttt_steps=len(path) + 1)
        return by_token(torch.stack([own[0, len(tokens) - 2] for own in logits]), tensors)

    return guess


def peagle(config: dict[str, Any], tensors: heads.Tensors) -> Guess:
    """All depths in one pass; its training samples some, and here those of the last row are asked."""
    inner, depths = config["transformer_layer_config"], 3
    model = speculators_model(
        "PEagle", config, tensors, llama_of(inner, inner["num_hidden_layers"], False),
        eagle_aux_hidden_state_layer_ids=OUTER, mask_token_id=config["mask_token_id"],
    )  # fmt: skip
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *given: logits.append(given[-1]))

    @torch.no_grad()
    def guess(tokens: list[int], path: list[int]) -> torch.Tensor:
        size, raw = len(tokens) - 1, later(features(tokens), depths)
        rows = torch.tensor([*range(size), *[size - 1] * depths]), torch.tensor([*[0] * size, *range(1, depths + 1)])
        given = torch.tensor([[*tokens[1:], *[0] * depths]])
        logits.clear()
        core = "speculators.models.peagle.core"
        with (
            patch(f"{core}.generate_cod_sample_indices", lambda **_: rows),
            patch(f"{core}.compute_metrics", lambda **_: (torch.zeros(()), {})),
        ):
            model(raw, given, torch.zeros_like(given), verifier_last_hidden_states=raw[..., :SIZE])
        return by_token(logits[0][0, size - 1 :][: len(path) + 1], tensors)

    return guess


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_EAGLE3: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3, draft vocabulary": {"draft": 17, "norm_before_residual": True},
    "eagle3.1": {"norms": "each", "norm_output": True, "draft": 20},
    "eagle3, inputs normed": {"norms": "whole", "embedding": True, "bias": True},
    "eagle3, scaled positions": {"rope_scaling": _LLAMA3},
}


def _references() -> dict[str, Reference]:
    made: dict[str, tuple[str, Any, tuple[dict[str, Any], heads.Tensors]]] = {
        "eagle1": ("eagle", eagle1, heads.eagle1(SIZE, VOCAB)),
        **{name: ("eagle", eagle3, heads.eagle3(SIZE, VOCAB, **own)) for name, own in _EAGLE3.items()},
        "peagle": ("eagle", peagle, heads.peagle(SIZE, VOCAB, layers=2, draft=18)),
    }
    return {
        name: Reference(
            drafter, config, tensors, lambda make=make, config=config, tensors=tensors: make(config, tensors)
        )
        for name, (drafter, make, (config, tensors)) in made.items()
    }


REFERENCES = _references()
