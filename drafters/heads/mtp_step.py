"""Running multi-token-prediction layers: decoder layers of the target's class, between norms."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel

from drafters.heads.chain_step import Guess, Nodes
from drafters.heads.layers import product
from drafters.heads.mtp_layout import MtpTensors
from drafters.shared.weights import load_strictly
from specdec.errors import CheckpointError, first_line
from specdec.models.transformers_target import TransformersTarget
from specdec.runners.known_layers import KnownLayer, UnknownModule, stacked
from specdec.runners.layers import FusedLayer, ModuleLayer, ProbeLayer
from specdec.runners.linear import linear_kernel
from specdec.runners.rotary import Rotary
from specdec.runners.sent_rows import rows_on
from specdec.step import device_copies
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.joining import joined
from specdec.step.step_io import StepInput
from specdec.target import Target

__all__ = ["MtpLayers", "MtpStep", "mtp_module", "own_modules"]

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon", "norm_eps")


class MtpLayer(nn.Module):
    """One layer: a norm for each input, the product that joins them, the target's decoder layer, and the last norm."""

    def __init__(self, config: Any, like: nn.Module, place: int, post_norm: bool) -> None:
        super().__init__()
        size = int(config.hidden_size)
        norm: Any = next(type(module) for name, module in like.named_modules() if "norm" in name)
        eps = next(float(getattr(config, name)) for name in _EPSILONS if hasattr(config, name))
        self.enorm, self.hnorm = norm(size, eps=eps), norm(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        made: Any = type(like)
        self.block = made(config, place)
        if post_norm:
            self.post_norm = norm(size, eps=eps)


class MtpLayers(nn.Module):
    """All multi-token-prediction layers of a model."""

    def __init__(self, config: Any, like: nn.Module, layers: int, post_norm: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MtpLayer(config, like, place, post_norm) for place in range(layers))


def own_modules(target: Target) -> tuple[nn.Module, nn.Module]:
    """A layer of a target's class, and its rotary positions; a target that has no modules is given some to look at.

    Raises:
        CheckpointError: specdec knows no such layers in it.
    """
    if isinstance(target, TransformersTarget):
        decoder: Any = target.decoder
    else:
        classes: Any = AutoModel
        with torch.device("meta"):
            decoder = classes.from_config(target.config)
        rotary: Any = type(decoder.rotary_emb)
        decoder.rotary_emb = rotary(target.config).to(target.head_device)
    layers: Any = getattr(decoder, "layers", ())
    if getattr(decoder, "rotary_emb", None) is None or not len(layers):
        raise CheckpointError(
            "mtp makes layers of the class that the target's are of, and specdec knows no layers with rotary positions "
            f"in this {target.name}; use another drafter"
        )
    return layers[-1], decoder.rotary_emb


def mtp_module(found: MtpTensors, folder: Path, target: Target) -> tuple[MtpLayers, Any]:
    """The layers with their weights, and the config that they were made with.

    Raises:
        CheckpointError: a tensor is missing, left over or of another shape, or the class of the target's layers cannot
            be made with another config.
    """
    config, like = _config_of(target.config, found), own_modules(target)[0]
    post_norm = "layers.0.post_norm.weight" in found.tensors
    try:
        with torch.device("meta"):
            module = MtpLayers(config, like, found.layers, post_norm)
    except Exception as error:  # the model's own class, made in an unusual way, may raise anything
        raise CheckpointError(
            f"a {type(like).__name__} cannot be made anew for the multi-token-prediction layers in {str(folder)!r}: "
            f"{type(error).__name__}: {first_line(error)}; use another drafter"
        ) from error
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    what = f"{found.layers} multi-token-prediction layers with a {type(like).__name__} of this {target.name}"
    tensors = _joined(found.tensors, wanted)
    load_strictly(module, tensors, folder, what)
    if any(buffer.is_meta for buffer in module.buffers()):  # files do not hold buffers; they are made with the module
        module = MtpLayers(config, like, found.layers, post_norm)
        load_strictly(module, tensors, folder, what)
    module.requires_grad_(False).eval()
    for part in module.modules():
        if hasattr(part, "layer_idx"):
            part.layer_idx = 0  # type: ignore[assignment]  # each layer has a cache of its own
    return module, config


def _config_of(config: Any, found: MtpTensors) -> Any:
    """The target's config for these layers only, in transformers' own form."""
    made, layers = copy.deepcopy(config), found.layers
    for kinds, own in (("layer_types", "mtp_layer_types"), ("mlp_layer_types", "mtp_mlp_layer_types")):
        if (of_target := getattr(config, kinds, None)) is not None:
            told = getattr(config, own, None)
            usual = "full_attention" if "full_attention" in of_target else of_target[-1]
            setattr(made, kinds, list(told) if told else [usual] * layers)
    made.num_hidden_layers = layers
    # Configs number the model's dense layers. Which of these layers have experts, only their tensors tell.
    sparse = {int(name.split(".")[1]) for name in found.tensors if ".experts." in name}
    if hasattr(made, "first_k_dense_replace"):
        made.first_k_dense_replace = next((place for place in range(layers) if place in sparse), layers)
    if hasattr(made, "mlp_only_layers"):
        made.mlp_only_layers = [place for place in range(layers) if place not in sparse]
        made.decoder_sparse_step = 1
    return made


def _joined(tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors with those of single experts stacked, as transformers 5 has them, where the module wants that."""
    found, experts = dict[str, torch.Tensor](), dict[str, dict[str, dict[int, torch.Tensor]]]()
    for name, tensor in tensors.items():
        expert = _EXPERT.fullmatch(name)
        if expert is None or name in wanted or f"{expert[1]}.down_proj" not in wanted:
            found[name] = tensor
        else:
            experts.setdefault(expert[1], {}).setdefault(expert[3], {})[int(expert[2])] = tensor
    for place, parts in experts.items():
        stacks = {
            part: torch.stack([own[number] for number in sorted(own)])
            for part, own in parts.items()
            if len({tensor.shape for tensor in own.values()}) == 1
        }
        if "down_proj" in stacks:
            found[f"{place}.down_proj"] = stacks["down_proj"]
        if {"gate_proj", "up_proj"} <= stacks.keys() and stacks["gate_proj"].shape == stacks["up_proj"].shape:
            found[f"{place}.gate_up_proj"] = torch.cat((stacks["gate_proj"], stacks["up_proj"]), 1)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """One layer in the layout that drafting uses."""

    norms: tuple[Any, Any]
    join: Any
    block: Any
    post_norm: Any


class MtpStep:
    """The layers in the layout that drafting uses.

    Args:
        found: the layers' tensors.
        folder: their folder, for messages.
        target: the target, whose embedding, rotary positions and head they share.
        depth: tokens below the root; a ``repeated`` layer becomes one stage for each.

    Attributes:
        specs: the cache layout of each stage.
        weights: number of weights that a pass of one stage reads, the head's included.
        stages: functions that each run one layer, with a cache of its own, for several sequences.
    """

    def __init__(self, found: MtpTensors, folder: Path, target: Target, depth: int) -> None:
        module, config = mtp_module(found, folder, target)
        _, rotary = own_modules(target)
        module.to(target.head_device, target.dtype)
        self.device, self.dtype = target.head_device, target.dtype
        self._target, self._hidden_first = target, found.hidden_first
        self._rotary = Rotary(rotary, target.config)
        self._kinds = getattr(config, "layer_types", None) if self._rotary.by_kind else None
        if self._kinds and not {*self._kinds} <= {*target.config.layer_types}:
            made: Any = type(rotary)  # the target's own lacks this kind of layer
            self._rotary = Rotary(made(config).to(self.device), config)
        layers: list[Any] = [*module.layers]
        specs = [self._spec(layer.block, place) for place, layer in enumerate(layers)]
        self._stages = [
            _Stage(
                (layer.enorm, layer.hnorm),
                product(layer.eh_proj),
                self._block(layer.block, place),
                getattr(layer, "post_norm", None),
            )
            for place, layer in enumerate(layers)
        ]
        size = target.vocab_size * target.hidden_size
        self.weights = size + sum(weight.numel() for weight in layers[0].parameters())
        places = [0] * depth if found.repeated else range(len(layers))
        self.specs = [specs[place] for place in places]
        runs = [partial(self._guess, place) for place in range(len(layers))]
        self.stages = [runs[place] for place in places]

    def _block(self, layer: Any, place: int) -> Any:
        """The runner of a decoder layer: this machine's products for a Llama-like one, else its own module."""
        if not self._rotary.by_kind:
            try:
                known = KnownLayer.of(layer, 0)
            except UnknownModule:
                known = None
            if known is not None:
                return FusedLayer(known, [linear_kernel(*stacked(group)) for group in known.linears])
        return self._module_layer(layer, place)

    def _module_layer(self, layer: Any, place: int, kind: type[ModuleLayer] = ModuleLayer, **own: Any) -> ModuleLayer:
        arguments = inspect.signature(layer.forward).parameters
        cache = "layer_past" if "layer_past" in arguments else "past_key_values"
        return kind(layer, None if self._kinds is None else self._kinds[place], cache, **own)

    def _spec(self, layer: Any, place: int) -> LayerSpec:
        """The cache layout of a layer, found by running it with an attention function that only records."""
        specs: list[LayerSpec] = []
        probe = self._module_layer(layer, place, ProbeLayer, use_cache=False, note=specs.append)
        rows = rows_on(self.device, StepInput.of(KVCache([], capacity=1, rows=1), [0]))
        hidden = torch.zeros(1, self._target.hidden_size, device=self.device, dtype=self.dtype)
        with torch.inference_mode():
            probe(hidden, rows, self._rotary.of(rows, hidden))
        if len(specs) != 1:
            raise CheckpointError(
                f"a {type(layer).__name__} of the multi-token-prediction layers calls attention {len(specs)} times, "
                "and specdec caches one list of keys and values for each; use another drafter"
            )
        return specs[0]

    @torch.no_grad()
    def _guess(self, place: int, brought: Sequence[Nodes]) -> list[Guess]:
        """Run a layer for each sequence's rows: logits behind the last rows, and the states of all rows."""
        stage, rows = self._stages[place], rows_on(self.device, joined([one.step for one in brought]))
        parts = [part for one in brought for part in (one.features, one.states) if part is not None]
        before = torch.cat([part.to(self.device, self.dtype) for part in parts])
        there = device_copies.is_apart(self.device)  # where tokens that it drafted are not read
        embedded = self._target.embed(rows.tokens[0] if there else rows.step.ids).to(self.device, self.dtype)
        both = [stage.norms[0](embedded), stage.norms[1](before)]
        hidden = stage.join(torch.cat(both[::-1] if self._hidden_first else both, -1))
        hidden = stage.block(hidden, rows, self._rotary.of(rows, hidden))
        states = hidden if stage.post_norm is None else stage.post_norm(hidden)
        sizes = rows.step.counts
        whole = torch.split(states, sizes)
        asked = [one.asked for one in brought]
        if not sum(asked):
            return [Guess(states[:0], part) for part in whole]
        last = torch.cat([part[len(part) - count :] for part, count in zip(whole, asked, strict=True)])
        logits = torch.split(self._target.head(last), asked)
        return [Guess(*own) for own in zip(logits, whole, rows.there, strict=True)]
