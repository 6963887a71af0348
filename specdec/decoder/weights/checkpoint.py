"""Checkpoint: the tensors of one decoder, found by its family's names, and held against what it needs.

Names, shapes and dtypes come from headers, so a checkpoint of another model is refused before a weight is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from specdec.decoder.names import FUSED, Names, Weight, shapes_of
from specdec.decoder.spec import DecoderSpec, Experts
from specdec.decoder.weights.packed import SomeRows
from specdec.decoder.weights.source import Source
from specdec.errors import CheckpointError
from specdec.runners.block_weight import BlockTensor

__all__ = ["Checkpoint"]


class Checkpoint:
    """The weights of a decoder.

    Args:
        spec: of the decoder.
        names: of its family.
        source: where its tensors are.
        called: what they are called there, if not as in checkpoints of the family.
        shapes: of its tensors, if not of all that a decoder has.

    Attributes:
        spec: as given, but ``head.tied`` as the tensors have it: a head that differs from the embedding is read.
        names: as given.
        shapes: of every tensor of the decoder.

    Raises:
        CheckpointError: tensors are missing, of other shapes or dtypes, or left over.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        names: Names,
        source: Source,
        called: Names | None = None,
        *,
        shapes: Mapping[Weight, tuple[int, ...]] | None = None,
    ) -> None:
        self.names, self._source, self._where, self._called = names, source, source.where, called or names
        before = self._called.prefixes
        norms = ((one, self._called.candidates(Weight("norm"), one)) for one in before)
        self._prefix = next((one for one, own in norms if any(name in source.shapes for name in own)), before[0])
        self._wrong: dict[str, list[str]] = {"missing": [], "misshapen": [], "of another dtype": []}
        self._places: dict[Weight, str] = {}
        self._zeros = set[Weight]()
        self._fused = set[Weight]()
        self._rows = dict[Weight, slice]()
        self.spec, self.shapes = spec, shapes_of(spec) if shapes is None else dict(shapes)
        self._find()
        extra = sorted(name for name in source.shapes.keys() - {*self._places.values()} if not self._ignored(name))
        told = [*((kind, found) for kind, found in self._wrong.items()), ("extra", extra)]
        if any(found for _, found in told):
            what = "; ".join(f"{len(found)} {kind}, such as {found[0]}" for kind, found in told if found)
            raise CheckpointError(
                f"the checkpoint {self._where} does not fit {spec.architecture}: tensors {what}; it was saved from "
                "another architecture or is incomplete"
            )
        if spec.head.tied and Weight("head") in self._places:
            self._settle_head()

    def _find(self) -> None:
        """Where each tensor of the decoder is, and which are not as they should be."""
        fused = {part: whole for whole, parts in FUSED.items() for part in parts}
        for stacked, parts in self.names.stacked.items():
            for number in range(len(self.spec.layers)):
                for kind in ("weight", "bias"):
                    self._find_stacked(Weight(stacked, number, kind=kind), parts)
        for weight, shape in self.shapes.items():
            if weight in self._rows:
                continue
            name = self._name(weight)
            if name is None and weight.expert is not None:
                whole = Weight(fused[weight.part], weight.layer, kind=weight.kind)
                if whole not in self._places and (of_all := self._name(whole)) is not None:
                    self._place(whole, of_all, self._fused_shape(whole))
                if whole in self._places:
                    self._places[weight] = self._places[whole]
                    self._fused.add(weight)
                    continue
            if name is None and weight.part == "embedding" and self.spec.head.tied:
                name = self._name(Weight("head"))  # which is the embedding as well
            self._place(weight, name, shape)
        if self.spec.head.tied and (name := self._name(Weight("head"))) not in (None, *self._places.values()):
            self.shapes[Weight("head")] = self.spec.vocab, self.spec.hidden
            self._place(Weight("head"), name, self.shapes[Weight("head")])

    def _find_stacked(self, whole: Weight, parts: Sequence[str]) -> None:
        """The tensors of a layer that are rows of another one, if that is there."""
        own = [weight for part in parts if (weight := whole._replace(part=part)) in self.shapes]
        if (name := self._name(whole)) is None or not own:
            return
        start, inputs = 0, self.shapes[own[0]][1:]
        for weight in own:
            stop = start + self.shapes[weight][0]
            self._places[weight], self._rows[weight] = name, slice(start, stop)
            start = stop
        if (found := self._source.shapes[name]) != (start, *inputs):
            self._wrong["misshapen"].append(f"{name}, {[*found]} in place of {[start, *inputs]}")
        elif name in self._source.strange:
            self._wrong["of another dtype"].append(f"{name}, {self._source.strange[name]}")

    def _name(self, weight: Weight) -> str | None:
        known = self._source.shapes
        return next((name for name in self._called.candidates(weight, self._prefix) if name in known), None)

    def _fused_shape(self, whole: Weight) -> tuple[int, ...]:
        assert whole.layer is not None
        experts = self.spec.layers[whole.layer].mlp
        assert isinstance(experts, Experts)
        return self._called.fused_shape(whole, experts, self.spec.hidden)

    def _place(self, weight: Weight, name: str | None, shape: tuple[int, ...]) -> None:
        wanted = next(self._called.candidates(weight, self._prefix))
        if name is None and weight.kind == "bias" and self._source.biases_lack:
            self._zeros.add(weight)
            return
        if name is None:
            self._wrong["missing"].append(wanted)
        elif (found := self._source.shapes[name]) != shape:
            self._wrong["misshapen"].append(f"{name}, {[*found]} in place of {[*shape]}")
        elif name in self._source.strange:
            self._wrong["of another dtype"].append(f"{name}, {self._source.strange[name]}")
        self._places[weight] = wanted if name is None else name

    def _ignored(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self._called.ignored) or self._source.is_no_bias(name)

    def _settle_head(self) -> None:
        """A tied head that is there as well is the embedding's once more, or, as transformers has it, its own."""
        head, embedding = self.read(Weight("head")), self.read(Weight("embedding"))
        if torch.equal(head, embedding):
            del self._places[Weight("head")]
        else:
            self.spec = replace(self.spec, head=replace(self.spec.head, tied=False))
        self.release([head, embedding])

    @property
    def layer_weights(self) -> int:
        """How many numbers the layers' tensors are."""
        return sum(math.prod(shape) for weight, shape in self.shapes.items() if weight.layer is not None)

    @property
    def sublayer_weights(self) -> list[tuple[int, int]]:
        """How many numbers each layer's attention has, and the rest of it."""
        found = [[0, 0] for _ in self.spec.layers]
        for weight, shape in self.shapes.items():
            if weight.layer is not None:
                found[weight.layer][not weight.part.startswith(("attention.", "conv."))] += math.prod(shape)
        return [(attention, others) for attention, others in found]

    @property
    def parameters(self) -> int:
        """How many numbers all tensors are."""
        return sum(map(math.prod, self.shapes.values()))

    def read(self, weight: Weight) -> torch.Tensor:
        """A tensor as it is in the checkpoint; perhaps a view of a file, which is not to be written to."""
        if weight in self._zeros:
            return torch.zeros(self.shapes[weight])
        found = self._source.read(self._places[weight])
        if weight in self._fused:
            parts = next(parts for parts in FUSED.values() if weight.part in parts)
            return self._parts(found[weight.expert], len(parts), weight.kind)[parts.index(weight.part)]
        found = found[self._rows.get(weight, slice(None))]
        return found if (order := self._order(weight)) is None else _ordered(weight, order, found)

    def blocks(self, weight: Weight) -> BlockTensor | None:
        """A weight in quantised blocks, as it is in the checkpoint; None where it is in none."""
        found, order = self._source.blocks(self._places[weight]), self._order(weight)
        if found is None or (order is None and weight not in self._rows):
            return found
        own = self._rows.get(weight, slice(None))
        if found.order is not None:  # rows that are in one order alone
            return None
        if not isinstance(found.blocks, np.ndarray):  # and so are those that are made as they are read
            return replace(found, blocks=SomeRows(found.blocks, own)) if order is None else None
        rows = found.blocks[own]
        return replace(found, blocks=rows, order=None if order is None else order.numpy())

    def _parts(self, own: torch.Tensor, count: int, kind: str) -> Sequence[torch.Tensor]:
        """The matrices of one expert that are fused in this tensor, or their biases."""
        if not self._called.interleaved:
            return own.chunk(count)
        rows = own if kind == "bias" else own.t()
        return [rows[first::count] for first in range(count)]

    def _order(self, weight: Weight) -> torch.Tensor | None:
        """Which rows of queries or keys, or numbers of their norms, stand where, so that values that turn together are
        half a head apart.
        """
        if not self.names.neighbours or weight.part.removesuffix("_norm") not in ("attention.q", "attention.k"):
            return None
        assert weight.layer is not None
        own = self.spec.layers[weight.layer].attention
        turning = own.rope.dim
        rows = torch.arange(self.shapes[weight][-1 if _is_norm(weight) else 0]).view(-1, own.head_dim)
        return torch.cat((rows[:, 0:turning:2], rows[:, 1:turning:2], rows[:, turning:]), 1).flatten()

    def as_named(self, weight: Weight) -> Callable[[torch.Tensor], torch.Tensor]:
        """What makes of a tensor that was read the one that transformers has."""
        if weight.part in FUSED and weight.expert is None and self.names.interleaved:
            return partial(_interleaved, len(FUSED[weight.part]))
        if (order := self._order(weight)) is None:
            return _same
        return partial(_ordered, weight, order.argsort())

    def has(self, weight: Weight) -> bool:
        """Whether the decoder has such a tensor."""
        return weight in self._places or weight in self._zeros

    def experts_in(self, layer: int) -> int:
        """How many experts a layer has."""
        mlp = self.spec.layers[layer].mlp
        return mlp.count if isinstance(mlp, Experts) else 0

    def experts(self, layer: int, part: str, kind: str = "weight") -> Iterator[Sequence[torch.Tensor]]:
        """For each expert of a layer, the tensors to be stacked in ``part``: of gate and up, or of down.

        ``kind``: ``bias`` for their biases; none where they have none.
        """
        parts = FUSED[part]
        if (whole := Weight(part, layer, kind=kind)) in self._places:
            yield from (self._parts(one, len(parts), kind) for one in self._source.read(self._places[whole]))
        elif self.has(Weight(parts[0], layer, 0, kind)):
            for expert in range(self.experts_in(layer)):
                yield [self.read(Weight(own, layer, expert, kind)) for own in parts]

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Drop the memory of tensors that were read, and copied."""
        self._source.release(tensors)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_norm(weight: Weight) -> bool:
    return weight.part.endswith("_norm")


def _ordered(weight: Weight, order: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """A tensor's rows, or the numbers of each row of a norm, in another order."""
    order = order.to(found.device)
    return found[..., order] if _is_norm(weight) else found[order]


def _interleaved(parts: int, every: torch.Tensor) -> torch.Tensor:
    """What is fused of all experts [E, outputs, inputs], or their biases, as of :class:`Names.interleaved`."""
    rows = every.reshape(len(every), parts, -1, *every.shape[2:]).transpose(1, 2).flatten(1, 2)
    return rows.transpose(1, 2) if rows.ndim == 3 else rows
