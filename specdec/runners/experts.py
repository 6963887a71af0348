"""Experts: the mixtures that stand in the place of a layer's MLP, and the module that reads their packed weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from specdec.runners.linear import ModuleRef, PackedModule, PackedWeight

__all__ = ["MIXTURES", "KnownExperts", "Mixture", "PackedExperts", "choose_all", "fits", "has_experts"]


class Mixture(NamedTuple):
    """The exact classes of a mixture's router and of its experts."""

    router: type[nn.Module]
    experts: type[nn.Module]


# Block -> its parts. A router takes the softmax of a logit for each expert, and then the likeliest experts.
MIXTURES: dict[type[nn.Module], Mixture] = {
    mixtral.MixtralSparseMoeBlock: Mixture(mixtral.MixtralTopKRouter, mixtral.MixtralExperts),
    olmoe.OlmoeSparseMoeBlock: Mixture(olmoe.OlmoeTopKRouter, olmoe.OlmoeExperts),
    qwen3_moe.Qwen3MoeSparseMoeBlock: Mixture(qwen3_moe.Qwen3MoeTopKRouter, qwen3_moe.Qwen3MoeExperts),
}
_ROUTERS = tuple(mixture.router for mixture in MIXTURES.values())
# Routers that always let the shares of a row's experts add up to one; others have a setting for it.
_NORMED = (mixtral.MixtralTopKRouter,)


def has_experts(root: nn.Module) -> bool:
    """Whether a module has a known router in it."""
    return any(type(module) in _ROUTERS for module in root.modules())


def fits(router: Any) -> bool:
    """Whether a router chooses experts that it has."""
    return bool(1 <= router.top_k <= len(router.weight))


def choose_all(root: nn.Module) -> None:
    """Let known routers in a replica choose all experts for each row."""
    modules: Any = root.modules()
    for module in modules:
        if type(module) in _ROUTERS and fits(module):
            module.top_k = len(module.weight)


class PackedExperts(PackedModule):
    """Packed weights of experts, in the place of the module that held them: exact, but slow. A deep copy is that one.

    Args:
        gate_up, down: weights [2 I, D] and [D, I] of each expert.
        experts: the module whose weights they are.
    """

    names = ("gate_up_proj", "down_proj")

    def __init__(self, gate_up: Sequence[PackedWeight], down: Sequence[PackedWeight], experts: Any) -> None:
        super().__init__()
        self.gate_up, self.down = list(gate_up), list(down)
        shell = copy.copy(experts)
        shell._parameters = dict.fromkeys(self.names)
        self._shell = [shell]  # a list, so that torch does not register it as a submodule
        self.act_fn = experts.act_fn

    @property
    def stores(self) -> Sequence[PackedWeight]:
        return [*self.gate_up, *self.down]

    @property
    def gate_up_proj(self) -> torch.Tensor:
        """[E, 2 I, D] a copy of the weights; changing the copy has no effect."""
        return torch.stack([store.unpack() for store in self.gate_up])

    @property
    def down_proj(self) -> torch.Tensor:
        """[E, D, I] a copy of the weights; changing the copy has no effect."""
        return torch.stack([store.unpack() for store in self.down])

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """[T, D] what the ``chosen`` [T, k] experts make of rows [T, D], times their ``shares`` [T, k], summed."""
        total = torch.zeros_like(hidden)
        for number in sorted({*chosen.flatten().tolist()}):
            rows, rank = torch.where(chosen == number)
            gate_up, down = self.gate_up[number], self.down[number]
            gate, up = gate_up.linear(hidden[rows], slice(0, gate_up.outputs)).chunk(2, -1)
            own = down.linear(self.act_fn(gate) * up, slice(0, down.outputs))
            total = total.index_add(0, rows, (own * shares[rows, rank, None]).to(total.dtype))
        return total

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        (shell,) = copy.deepcopy(self._shell, memo)
        for name in self.names:
            setattr(shell, name, nn.Parameter(getattr(self, name)))
        memo[id(self)] = shell
        return shell  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class KnownExperts:
    """A layer's mixture of gated MLPs.

    Attributes:
        place: where the module of the experts stands.
        router: their router.
        chosen: experts of a row.
        norm_topk: the shares of a row's experts add up to one; else those of all experts do.
    """

    place: ModuleRef
    router: Any
    chosen: int
    norm_topk: bool

    @classmethod
    def of(cls, block: Any) -> KnownExperts:
        """Read a block whose parts are of the classes that ``MIXTURES`` has."""
        router = block.gate
        norm_topk = isinstance(router, _NORMED) or bool(router.norm_topk_prob)
        return cls(ModuleRef(block, "experts"), router, int(router.top_k), norm_topk)

    @property
    def inner(self) -> int:
        """Width of an expert."""
        module = self.place.module
        return int(module.down[0].inputs if isinstance(module, PackedExperts) else module.down_proj.shape[-1])

    def weights(self) -> tuple[Sequence[PackedWeight], Sequence[PackedWeight]]:
        """Gate and up, and down, of each expert: what is packed already, or copies."""
        module = self.place.module
        if isinstance(module, PackedExperts):
            return module.gate_up, module.down
        gate_up, down = ([*map(PackedWeight, weight.data)] for weight in (module.gate_up_proj, module.down_proj))
        return gate_up, down
