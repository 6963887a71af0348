"""A head between the target's hidden states and the state that gives logits, which drafting and training share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from drafters.shared.layer_weights import Make, layer_weights, product_of
from specdec.decoder.head_spec import HeadSpec
from specdec.decoder.rope import Angles
from specdec.decoder.spec import Norm
from specdec.execute.layer import APART, ByRow, LayerWeights, attention, heads_of, keys_values, layer_around
from specdec.execute.norm import RmsNorm
from specdec.runners.linear import LinearKernel

__all__ = ["Attend", "HeadForward", "MixAt"]

Attend = Callable[[int, torch.Tensor], torch.Tensor]
"""A layer's place, and what its queries, keys and values are made of [T, I] -> attention of rows [N, H d]."""

MixAt = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A layer's place, its queries [1, H, T, d], keys and values [1, G, T, d] -> attention of rows [1, H, N, d]."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadForward:
    """A head's products and norms. What its rows see is the caller's.

    Attributes:
        spec: what it computes.
        layers: of each layer.
        fc: makes a state of hidden states, or joins an embedding with a state.
        inputs: norms of what ``fc`` reads.
        fused_norm: of what it gives.
        joined: norms of the embedding and the state that the first layer's attention reads.
        norm: the last one.
    """

    spec: HeadSpec
    layers: tuple[LayerWeights, ...]
    fc: LinearKernel | None
    inputs: tuple[ByRow, ...]
    fused_norm: ByRow | None
    joined: tuple[ByRow, ByRow] | None
    norm: ByRow | None

    @classmethod
    def of(cls, spec: HeadSpec, tensors: Mapping[str, torch.Tensor], make: Make) -> HeadForward:
        """The head whose ``tensors`` have the names of :mod:`drafters.heads.weights`.

        ``make`` makes products. Tensors that are live parameters have gradients.
        """

        def norm(own: Norm, name: str) -> RmsNorm:
            return RmsNorm(own, tensors[f"{name}.weight"])

        names = [f"fc_norm.{place}" for place in range(len(spec.input_norms))]
        if "input_norm.weight" in tensors:
            names = ["input_norm"]
        joined = None
        if spec.joined_first is not None:
            first, second = spec.joined_first
            joined = norm(first, "layers.0.input_layernorm"), norm(second, "layers.0.hidden_norm")
        return cls(
            spec,
            tuple(
                replace(layer_weights(own, tensors, number, make), after=APART)
                for number, own in enumerate(spec.layers)
            ),
            None if spec.fuse == "none" else product_of(tensors, make, "fc"),
            tuple(map(norm, spec.input_norms, names)),
            None if spec.fused_norm is None else norm(spec.fused_norm, "hidden_norm"),
            joined,
            None if spec.norm is None else norm(spec.norm, "norm"),
        )

    def normed_by(self, norm: Callable[[RmsNorm, torch.Tensor], torch.Tensor]) -> HeadForward:
        """The same head, whose norms a function computes."""

        def by(own: Any) -> Any:
            return None if own is None else partial(norm, own)

        layers = (replace(own, before=(by(own.before[0]), by(own.before[1]))) for own in self.layers)
        joined = None if self.joined is None else (by(self.joined[0]), by(self.joined[1]))
        inputs, ends = tuple(map(by, self.inputs)), {"fused_norm": by(self.fused_norm), "norm": by(self.norm)}
        return replace(self, layers=tuple(layers), inputs=inputs, joined=joined, **ends)

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """[T, W] the states that the target's hidden states [T, taps x D] come to."""
        if self.spec.fuse == "join":
            return features
        if self.inputs:
            parts = features.chunk(len(self.inputs), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.inputs, parts, strict=True)], -1)
        states = features if self.fc is None else self.fc(features)
        return states if self.fused_norm is None else self.fused_norm(states)

    def entering(self, embedded: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream [T, W] and the input of the first attention [T, 2 W], of embeddings and states [T, W].

        The second is None if the first attention reads the residual stream.
        """
        if self.spec.fuse == "join":
            assert self.fc is not None
            return self.fc(torch.cat((embedded, states), -1)), None
        assert self.joined is not None
        tokens, hidden = self.joined[0](embedded), self.joined[1](states)
        return hidden if self.spec.residual == "normed" else states, torch.cat((tokens, hidden), -1)

    def through(
        self,
        hidden: torch.Tensor,
        attend: Attend,
        *,
        reads: torch.Tensor | None = None,
        wanted: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """[N, W] the stream behind the layers, from that before them [T, W].

        Args:
            hidden: [T, W].
            attend: attention of each layer; of the last one it has the ``wanted`` rows.
            reads: [T, 2 W] input of the first attention; None if it reads the residual stream.
            wanted: rows that are wanted of the last layer; None for all.
        """
        last = len(self.layers) - 1
        for place, (own, weights) in enumerate(zip(self.spec.layers, self.layers, strict=True)):
            attends, rows = partial(attend, place), wanted if place == last else None
            hidden = layer_around(own, weights, hidden, attends, reads=None if place else reads, wanted=rows)
        return hidden

    def heads(self, place: int, reads: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A layer's queries [1, H, T, d], keys and values [1, G, T, d] of rows at their positions."""
        return heads_of(self.spec.layers[place].attention, self.layers[place], reads, angles)

    def keys_values(self, place: int, reads: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of rows that have no queries."""
        return keys_values(self.spec.layers[place].attention, self.layers[place], reads, angles)

    def attending(self, angles: Angles, mix: MixAt) -> Attend:
        """Attention of rows at these positions."""

        def attend(place: int, reads: torch.Tensor) -> torch.Tensor:
            own = self.spec.layers[place].attention
            return attention(own, self.layers[place], reads, angles, partial(mix, place))

        return attend

    def ends(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What logits are made of, and the states that the next level reads, of the stream behind the layers [N, W]."""
        last = hidden if self.norm is None else self.norm(hidden)
        return last, last if self.spec.onward == "normed" else hidden
