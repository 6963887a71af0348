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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, Qwen3Config
from transformers.cache_utils import DFlashCache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tests import heads
from tests.models import VOCAB, model_of

__all__ = ["FAMILY", "REFERENCES", "Guess", "Reference"]

FAMILY, SIZE = "llama", 32
OUTER, BLOCK_OUTER = [1, 2, 3], [1, 2]  # hidden layers that are read, by what comes before them
Guess = Callable[[list[int], list[int]], torch.Tensor]
"""A text, its root last, and tokens guessed behind it, to [depths, V] logits: behind the root, and each of them."""


class Reference(NamedTuple):
    """A head in its published layout, who drafts with it, and how to have others guess with it."""

    drafter: str
    config: dict[str, Any]
    tensors: heads.Tensors
    guess: Callable[[], Guess]
    family: str = FAMILY


def hidden_states(tokens: Sequence[int], family: str = FAMILY) -> list[torch.Tensor]:
    """Of the target: [T, D] after 0, 1, ... all layers, and the last one's after the norm."""
    model, ids, last = model_of(family), torch.tensor([[*tokens]]), list[torch.Tensor]()
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0][0]))
    try:
        with torch.no_grad():
            found = model(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True).hidden_states
    finally:
        hook.remove()
    return [*(states[0] for states in found[:-1]), last[0], found[-1][0]]


def features(tokens: Sequence[int], layers: Sequence[int] = OUTER) -> torch.Tensor:
    """[1, T, taps x D] of a text without its root."""
    states = hidden_states(tokens[:-1])
    return torch.cat([states[layer] for layer in layers], -1)[None]


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
            place = {"embed_tokens": "get_input_embeddings", "lm_head": "get_output_embeddings"}[part]
            getattr(model, part).weight.data = getattr(model_of(FAMILY), place)().weight.data
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
    return chain_guess(model, tensors, OUTER)


def chain_guess(model: Any, tensors: heads.Tensors, layers: Sequence[int]) -> Guess:
    """What that package's EAGLE-3 head guesses; ``layers``: of the target, that it reads."""
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *given: logits.append(given[-1]))

    @torch.no_grad()
    def guess(tokens: list[int], path: list[int]) -> torch.Tensor:
        given = torch.tensor([[*tokens[1:], *path]])
        logits.clear()
        model(later(features(tokens, layers), len(path)), given, torch.zeros_like(given), ttt_steps=len(path) + 1)
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


def block_config(config: dict[str, Any]) -> tuple[dict[str, Any], Qwen3Config]:
    """What a block's config says, wherever it stands, and the layers' config."""
    inner = config.get("transformer_layer_config", config)
    names = {*heads.layer_config(1, 1), "layer_types", "sliding_window"}
    layers = {name: value for name, value in inner.items() if name in names}
    windows = {"use_sliding_window": True} if "sliding_window" in layers else {}
    return {**config, **config.get("dflash_config", {})}, Qwen3Config(**layers, **windows, attn_implementation="eager")


def block_model(name: str, config: dict[str, Any], tensors: heads.Tensors) -> tuple[Any, int]:
    """That package's head, and the number of its block's first row that drafts."""
    told, inner = block_config(config)
    own: dict[str, Any] = {"sample_from_anchor": name == "DSpark"}
    if name == "DSpark":
        kinds = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
        own["markov_rank"] = tensors["markov_head.markov_w1.weight"].shape[1]
        own["markov_head_type"] = next((kind for part, kind in kinds.items() if part in tensors), "vanilla")
    if name == "DFlash2":
        rank = tensors["candidate_selector.predecessor_codebook"].shape[1]
        own |= {"conv_group_size": 8, "selector_rank": rank, "selector_top_k": told["selector_top_k"]}
    later = told.get("sliding_window_non_causal", "dflash_config" in config)
    model = speculators_model(
        name, config, tensors, inner, block_size=told["block_size"], mask_token_id=0,
        aux_hidden_state_layer_ids=BLOCK_OUTER, sliding_window_non_causal=later, **own,
    )  # fmt: skip
    return model, 0 if own["sample_from_anchor"] else 1


def dflash(config: dict[str, Any], tensors: heads.Tensors, name: str = "DFlash") -> Guess:
    """Its training has blocks begin anywhere in a text; here one does, behind all of it."""
    model, first = block_model(name, config, tensors)
    return block_guess(model, tensors, BLOCK_OUTER, first, name)


def block_guess(model: Any, tensors: heads.Tensors, layers: Sequence[int], first: int, name: str) -> Guess:
    """What that package's head guesses with a block, whose row ``first`` is the first that drafts."""

    @torch.no_grad()
    def guess(tokens: list[int], path: list[int]) -> torch.Tensor:
        block, anchor = model.block_size, len(tokens) - 1
        states = hidden_states(tokens[:-1])
        raw = later(torch.cat([states[layer] for layer in layers], -1)[None], block + 1)
        given = torch.tensor([[*tokens, *[0] * block]])
        chosen = (torch.tensor([anchor]), torch.tensor([True]))
        with patch("speculators.models.dflash.core.select_anchors", lambda *_: chosen):
            hidden, logits, *_ = model._backbone_forward(
                raw, given, torch.ones_like(given), raw[..., :SIZE], torch.zeros_like(given), max_anchors=1
            )
        before = torch.tensor([[*[tokens[-1]] * (first + 1), *path, *[0] * block]])[:, :block]
        if name == "DSpark" and model.markov_head is not None:
            logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
        elif name == "DFlash2":
            best = logits.topk(model.candidate_selector.top_k, -1).indices
            scores = model.candidate_selector.score_candidates(logits, hidden, before, best)
            logits = torch.full_like(logits, -torch.inf).scatter(-1, best, scores)
        return by_token(logits[0, first : first + 1 + len(path)], tensors)

    return guess


def exported(folder: Path) -> Guess:
    """What that package guesses with the head in a folder, as it reads it itself."""
    with quiet():
        speculators = importlib.import_module("speculators")
        config = speculators.SpeculatorModelConfig.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = "eager"
        model = speculators.SpeculatorModel.from_pretrained(folder, config=config).double().eval()
    tensors, kind = load_file(folder / "model.safetensors"), config.speculators_model_type
    if kind == "eagle3":
        return chain_guess(model, tensors, config.eagle_aux_hidden_state_layer_ids)
    return block_guess(model, tensors, config.aux_hidden_state_layer_ids, not config.sample_from_anchor, "DSpark")


def muse(config: dict[str, Any], tensors: heads.Tensors) -> Guess:
    """Transformers' own, with the cache that its generator gives it."""
    own = MuseGlimmerAssistantConfig(**config, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    own._attn_implementation = "eager"
    model = MuseGlimmerAssistantModel(own).double().eval()
    model.load_state_dict(tensors)
    target = model_of(FAMILY)

    @torch.no_grad()
    def guess(tokens: list[int], path: list[int]) -> torch.Tensor:
        states, block = hidden_states(tokens[:-1]), own.block_size
        raw = torch.cat([states[layer + 1] for layer in own.target_layer_ids], -1)[None]
        cache = DFlashCache(config=own)
        cache.set_previous_accepted_tokens(len(tokens) - 1)
        noise = target.get_input_embeddings()(torch.tensor([[tokens[-1], *[own.mask_token_id] * (block - 1)]]))
        places = torch.arange(len(tokens) - 1 + block)[None]
        found = model(noise_embeds=noise, context_hidden_states=raw, position_ids=places, past_key_values=cache)
        return target.lm_head(found.last_hidden_state[0, 1 : 2 + len(path)])

    return guess


def mtp(config: dict[str, Any], tensors: heads.Tensors) -> Guess:
    """Its training runs the layer once for each depth, over all rows, with tokens that are given."""
    target = model_of(_MTP)
    with quiet():
        core = importlib.import_module("speculators.models.mtp.core")
        made = importlib.import_module("speculators.models.mtp.config").MTPSpeculatorConfig
        inner = Qwen3Config(**config["transformer_layer_config"], attn_implementation="eager")
        model = core.MTPDraftModel(made(transformer_layer_config=inner)).double().eval()
    model.load_state_dict(tensors, strict=False)
    model.embed_tokens.weight.data = target.get_input_embeddings().weight.data
    model.lm_head.weight.data = target.get_output_embeddings().weight.data

    @torch.no_grad()
    def guess(tokens: list[int], path: list[int]) -> torch.Tensor:
        states, steps = hidden_states(tokens[:-1], _MTP)[-1], len(path) + 1
        given = torch.tensor([[*tokens, *path, 0]])
        with patch.object(made, "num_speculative_steps", steps):
            logits, *_ = model(given, later(states, steps)[None])
        return torch.stack([own[0, len(tokens) - 2] for own in logits])

    return guess


def _mtp() -> tuple[dict[str, Any], heads.Tensors]:
    """As that package writes it."""
    target, random, layer = model_of(_MTP), heads.Random(7), "mtp_layers.0"
    inner: dict[str, Any] = target.config.to_diff_dict()
    shapes = {name: tensor.shape for name, tensor in target.model.layers[0].state_dict().items()}
    shapes |= {f"{name}_layernorm.weight": (SIZE,) for name in ("token", "hidden", "final")}
    tensors = {
        f"{layer}.{name}": random.matrix(*shape) if len(shape) > 1 else random.norm(*shape)
        for name, shape in shapes.items()
    }
    tensors[f"{layer}.input_proj.weight"] = random.matrix(SIZE, 2 * SIZE, gain=2.0)
    return {"speculators_model_type": "mtp", "transformer_layer_config": inner}, tensors


_MTP = "qwen3"  # of the families that the package knows for it, and that are driven here
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


_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def _windowed() -> tuple[dict[str, Any], heads.Tensors]:
    """As that package writes it; a layer with a window sees no later rows of the block."""
    config, tensors = heads.dflash(SIZE, VOCAB, draft=21, model_type="qwen3", **_WINDOWS)
    told = {"aux_hidden_state_layer_ids": BLOCK_OUTER, "block_size": config["block_size"], "mask_token_id": 0}
    return heads.speculators("dflash", config, 2, **told), tensors


def _renamed_for_transformers() -> tuple[dict[str, Any], heads.Tensors]:
    config, tensors = heads.dflash(SIZE, VOCAB)
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    told = {"model_type": "muse_glimmer_assistant", "mask_token_id": 0, "target_layer_ids": [0, 1], **_WINDOWS}
    rope = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    del config["dflash_config"]
    return {**config, **told, "rope_parameters": rope}, {
        names.get(name, name): tensor for name, tensor in tensors.items()
    }


def _references() -> dict[str, Reference]:
    made: dict[str, tuple[str, Any, tuple[dict[str, Any], heads.Tensors]]] = {
        "eagle1": ("eagle", eagle1, heads.eagle1(SIZE, VOCAB)),
        **{name: ("eagle", eagle3, heads.eagle3(SIZE, VOCAB, **own)) for name, own in _EAGLE3.items()},
        "peagle": ("eagle", peagle, heads.peagle(SIZE, VOCAB, layers=2, draft=18)),
        "dflash": ("dflash", dflash, heads.dflash(SIZE, VOCAB)),
        "dflash, windows": ("dflash", dflash, _windowed()),
        "dflash of transformers": ("dflash", muse, _renamed_for_transformers()),
        "dflash2": ("dflash", partial(dflash, name="DFlash2"), heads.dflash(SIZE, VOCAB, kind="dflash2")),
        **{
            f"dspark, {markov}": (
                "dflash",
                partial(dflash, name="DSpark"),
                heads.dflash(SIZE, VOCAB, kind="dspark", markov=markov, draft=draft, own=not draft),
            )
            for markov, draft in (("vanilla", 19), ("gated", 0), ("rnn", 0))
        },
    }
    made["mtp of speculators"] = ("mtp", mtp, _mtp())
    return {
        name: Reference(
            drafter,
            config,
            tensors,
            lambda make=make, config=config, tensors=tensors: make(config, tensors),
            _MTP if drafter == "mtp" else FAMILY,
        )
        for name, (drafter, make, (config, tensors)) in made.items()
    }


REFERENCES = _references()
