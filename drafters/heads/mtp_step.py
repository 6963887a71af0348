"""Running multi-token-prediction layers: decoder layers of the target's family, between norms."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from drafters.heads.head_step import Guess
from drafters.heads.mtp_layout import EMBEDDING, HEAD, HIDDEN, JOIN, LAST, TABLE, MtpTensors
from drafters.shared.own_cache import Nodes, specs_of
from specdec.decoder.families import FAMILIES, spec_of
from specdec.decoder.names import Weight, shapes_of
from specdec.decoder.rope import RopeTables
from specdec.decoder.settings import Settings
from specdec.decoder.spec import UnknownDecoder
from specdec.decoder.weights.checkpoint import Checkpoint
from specdec.errors import CheckpointError, shown
from specdec.execute.layer import layer
from specdec.execute.torch import stored_and_attended
from specdec.execute.weights import LayersWeights, look_up
from specdec.runners.linear import kernel_for
from specdec.runners.sent_rows import rows_on
from specdec.step.joining import joined
from specdec.target import Target

__all__ = ["MtpStep", "check_described", "mtp_checkpoint"]

T = TypeVar("T")
_AROUND = {EMBEDDING: "enorm", HIDDEN: "hnorm", LAST: "post_norm", JOIN: "eh_proj"}
"""Part around a layer -> its name among ours."""


def check_described(target: Target) -> None:
    """Raises CheckpointError where no description covers a target's layers, or it is run by its own forward."""
    if target.executor is not None:
        return
    kind = getattr(target.config, "model_type", None)
    if kind in FAMILIES:
        raise CheckpointError(
            f"mtp runs layers of the target's family by their description, and this {target.name} is run by its own "
            "forward (execution 'modules'): take a copy of it (Engine.from_model), or load the model from its folder "
            "without execution='modules', device_map and parallel='tensor'"
        )
    raise CheckpointError(
        f"mtp runs layers of the target's family by their description, and there is none for this {target.name}: its "
        f"model_type {shown(kind)} is none of {', '.join(sorted(FAMILIES))}; use another drafter"
    )


def mtp_checkpoint(found: MtpTensors, target: Target) -> Checkpoint:
    """The layers of a folder or a file as a decoder's of the target's family, without its ends.

    Raises:
        CheckpointError: a tensor is missing, left over or of another shape or dtype.
    """
    config = _config_of(target.config, found)
    try:
        spec = spec_of(config.model_type, Settings.of(config))
    except UnknownDecoder as unknown:
        raise CheckpointError(
            f"the multi-token-prediction layers in {str(found.folder)!r} are none that a description covers: {unknown}"
        ) from unknown
    own, size, layers = FAMILIES[config.model_type].names, spec.hidden, range(found.layers)
    parts = {part: tuple(map(_inside, patterns)) for part, patterns in own.decoder.items()}
    parts |= {part: (f"layers.{{layer}}.{name}",) for part, name in _AROUND.items()}
    experts = {part: tuple(map(_inside, patterns)) for part, patterns in own.experts.items()}
    names = replace(own, decoder=parts, prefixes=("",), experts=experts)
    called, there = found.called or names, found.source.shapes
    shapes = {weight: shape for weight, shape in shapes_of(spec).items() if weight.layer is not None}
    shapes |= {Weight(part, number): (size,) for part in (EMBEDDING, HIDDEN) for number in layers}
    shapes |= {Weight(JOIN, number): (size, 2 * size) for number in layers}
    if any(name in there for name in called.candidates(Weight(LAST, 0), "")):
        shapes |= {Weight(LAST, number): (size,) for number in layers}
    for weight in (Weight(part, number) for part in (TABLE, HEAD) for number in layers):
        if any(name in there for name in called.candidates(weight, "")):
            shapes[weight] = spec.vocab, size
    return Checkpoint(spec, names, found.source, called, shapes=shapes)


def _inside(pattern: str) -> str:
    """A family's name of a tensor of a layer, as these have it."""
    return pattern.replace("layers.{layer}.", "layers.{layer}.block.")


def _config_of(config: Any, found: MtpTensors) -> Any:
    """The target's config for these layers only."""
    made, layers = copy.deepcopy(config.get_text_config()), found.layers
    for kinds, own in (("layer_types", "mtp_layer_types"), ("mlp_layer_types", "mtp_mlp_layer_types")):
        if (of_target := getattr(config, kinds, None)) is not None:
            told = getattr(config, own, None)
            usual = "full_attention" if "full_attention" in of_target else of_target[-1]
            setattr(made, kinds, list(told) if told else [usual] * layers)
    made.num_hidden_layers = layers
    sparse = found.sparse  # configs number the model's dense layers
    if hasattr(made, "first_k_dense_replace"):
        made.first_k_dense_replace = next((place for place in range(layers) if place in sparse), layers)
    if hasattr(made, "mlp_only_layers"):
        made.mlp_only_layers = [place for place in range(layers) if place not in sparse]
        made.decoder_sparse_step = 1
    return made


class _Weights(LayersWeights):
    """Of the layers; and for each the norms of an embedding and of a hidden state, the product that joins these, and
    the last norm, if any, and its own embedding and head, if any.
    """

    def read_others(self) -> None:
        norm, layers = self._checkpoint.spec.head.norm, range(len(self._checkpoint.spec.layers))
        norm = replace(norm, rounds_first=not norm.offset)  # as transformers' modules, with which these were trained
        self.norms = [[self.read_norm(norm, Weight(part, at)) for part in (EMBEDDING, HIDDEN)] for at in layers]
        self.joins = [self.read_product(Weight(JOIN, at)) for at in layers]
        self.last = [self._if_there(partial(self.read_norm, norm), Weight(LAST, at)) for at in layers]
        self.tables = [self._if_there(self.read_table, Weight(TABLE, at)) for at in layers]
        self.heads = [self._if_there(self.read_product, Weight(HEAD, at)) for at in layers]

    def _if_there(self, read: Callable[[Weight], T], weight: Weight) -> T | None:
        return read(weight) if self._checkpoint.has(weight) else None


class MtpStep:
    """The layers in the layout that drafting uses.

    Args:
        found: the layers' tensors.
        target: the target, whose embedding, rotary positions and head they share.
        depth: tokens below the root; a ``repeated`` layer becomes one stage for each.

    Attributes:
        specs: the cache layout of each stage.
        weights: number of weights that a pass of one stage reads, the head's included.
        stages: functions that each run one layer, with a cache of its own, for several sequences.
    """

    def __init__(self, found: MtpTensors, target: Target, depth: int) -> None:
        checkpoint = mtp_checkpoint(found, target)
        self.device, self.dtype = target.head_device, target.dtype
        self._target, self._hidden_first = target, found.hidden_first
        self._layers, self._ropes = checkpoint.spec.layers, RopeTables(self.dtype, self.device)
        self._weights = _Weights(checkpoint, self.dtype, self.device, kernel_for(self.dtype, self.device))
        ends = (TABLE, HEAD)  # of a table only rows are read, and a head is read that is the model's or its own
        own = (math.prod(shape) for at, shape in checkpoint.shapes.items() if at.layer == 0 and at.part not in ends)
        self.weights = target.vocab_size * target.hidden_size + sum(own)
        places = [0] * depth if found.repeated else range(found.layers)
        self.specs = specs_of([self._layers[place] for place in places], self.device, self.dtype)
        runs = [partial(self._guess, place) for place in range(found.layers)]
        self.stages = [runs[place] for place in places]

    @torch.no_grad()
    def _guess(self, place: int, brought: Sequence[Nodes]) -> list[Guess]:
        """Run a layer for each sequence's rows: logits behind the last rows, and the states of all rows."""
        rows = rows_on(self.device, joined([one.step for one in brought]))
        parts = [part for one in brought for part in (one.features, one.states) if part is not None]
        before = torch.cat([part.to(self.device, self.dtype) for part in parts])
        weights, own = self._weights, self._layers[place]
        tokens, table, head = rows.tokens[0], weights.tables[place], weights.heads[place]
        found = self._target.embed(tokens) if table is None else look_up(table, tokens)
        embedded = found.to(self.device, self.dtype)
        both = [norm(part) for norm, part in zip(weights.norms[place], (embedded, before), strict=True)]
        hidden = weights.joins[place](torch.cat(both[::-1] if self._hidden_first else both, -1))
        mix = partial(stored_and_attended, rows, 0, own.attention, weights.layers[place].sinks)
        hidden = layer(own, weights.layers[place], hidden, self._ropes.of(own.attention.rope, rows), mix)
        last_norm = weights.last[place]
        states = hidden if last_norm is None else last_norm(hidden)
        sizes = rows.step.counts
        whole = torch.split(states, sizes)
        asked = [one.asked for one in brought]
        if not sum(asked):
            return [Guess(states[:0], part) for part in whole]
        last = torch.cat([part[len(part) - count :] for part, count in zip(whole, asked, strict=True)])
        logits = torch.split(self._target.head(last) if head is None else head(last), asked)
        return [Guess(*own) for own in zip(logits, whole, rows.there, strict=True)]
