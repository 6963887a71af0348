"""Joints: operations of a model between embedding and layers, before the head and after it, detected by a forward.

Some models multiply the embeddings (Granite), the head's input (MiniCPM) or the logits (Cohere), some apply a tanh to
the logits (Gemma 2). The operations are not looked up by the model's name. Instead, embedding, last norm and head are
made to return known numbers while the model's own forward runs. The next module's input must be these numbers, or a
multiple or soft cap of them by a constant, to the last bit. Any other model is refused.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from specdec.errors import TargetError

__all__ = ["Joint", "Joints", "read_joints"]

_SAMPLE = 64  # values on which a constant is tried before it is held against all of them
_GIVEN = {"attention_mask", "position_ids", "position_embeddings", "cache_position"}  # tensors that layers get
_SIGNS = {"multiply": "*", "divide": "/", "cap": "soft-capped at"}

Step = tuple[str, float]  # multiply, divide or cap, and by what


@dataclass(frozen=True, slots=True)
class Joint:
    """What happens to a tensor between two modules: in this dtype, these steps one after the other."""

    steps: tuple[Step, ...] = ()
    dtype: torch.dtype | None = None  # None: as it is

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if self.dtype is not None:
            values = values.to(self.dtype)
        for kind, constant in self.steps:
            if kind == "multiply":
                values = values * constant
            elif kind == "divide":
                values = values / constant
            else:
                values = torch.tanh(values / constant) * constant
        return values

    def __str__(self) -> str:
        return ", ".join(f"{_SIGNS[kind]} {constant:.6g}" for kind, constant in self.steps)


@dataclass(frozen=True, slots=True)
class Joints:
    """From the embedding to the first layer, from the last norm to the head, and from the head to the logits.

    ``plain``: nothing happens at any of them.
    """

    embedding: Joint = Joint()
    hidden: Joint = Joint()
    logits: Joint = Joint()
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        joints = (self.embedding, self.hidden, self.logits)
        object.__setattr__(self, "plain", not any(joint.steps or joint.dtype is not None for joint in joints))

    def __str__(self) -> str:
        named = (("embedding", self.embedding), ("last hidden state", self.hidden), ("logits", self.logits))
        return "; ".join(f"{name} {joint}" for name, joint in named if joint.steps)


def read_joints(
    name: str,
    config: Any,
    forward: Callable[[], Any],
    *,
    embedding: nn.Module,
    layer: nn.Module,
    norm: nn.Module,
    head: nn.Module,
) -> Joints:
    """The joints of a model, found by one call of ``forward``, which returns logits.

    Args:
        config: the text config; its numbers are the constants that are tried.
        layer: the first layer.

    Raises:
        TargetError: a joint is none of the known forms, or the layers are given tensors that specdec does not have.
    """
    said: dict[str, torch.Tensor] = {}
    came: dict[str, torch.Tensor] = {}

    def say(place: str) -> Callable[..., Any]:
        def hook(module: Any, arguments: Any, output: Any) -> Any:
            if not isinstance(output, torch.Tensor):
                return None
            said[place] = _numbers(output, seed=len(place))  # each place its own: a last norm may be called twice
            return said[place].clone()

        return hook

    def note(place: str) -> Callable[..., None]:
        def hook(module: Any, arguments: Any, options: Any) -> None:
            named = {**dict(zip(inspect.signature(module.forward).parameters, arguments, strict=False)), **options}
            tensors = {word: value for word, value in named.items() if isinstance(value, torch.Tensor)}
            if tensors:
                word = next(iter(tensors))
                came[place] = tensors.pop(word).clone()
            unknown = sorted(tensors.keys() - _GIVEN)
            if place == "embedding" and unknown:
                raise TargetError(f"{name} gives its layers {', '.join(unknown)}, which specdec does not compute")

        return hook

    places = (("embedding", embedding), ("hidden", norm), ("logits", head))
    hooks = [module.register_forward_hook(say(place)) for place, module in places]
    hooks += [
        module.register_forward_pre_hook(note(place), with_kwargs=True)
        for place, module in (("embedding", layer), ("hidden", head))
    ]
    try:
        came["logits"] = forward().logits
    finally:
        for hook in hooks:
            hook.remove()
    constants = _constants(config)
    # Where nothing was heard, a module is called in a way of its own; the check of the logits decides then.
    found = {place: _joint(name, place, said[place], came[place], constants) for place in said.keys() & came.keys()}
    return Joints(**found)


def _numbers(like: torch.Tensor, *, seed: int) -> torch.Tensor:
    """Numbers of all magnitudes of hidden states and logits, in the shape of ``like``; the first is 1."""
    count = like.numel()
    numbers = torch.linspace(-20, 20, count, dtype=torch.float64)
    sizes = torch.logspace(-3, 2.5, len(numbers[1::2]), dtype=torch.float64)
    numbers[1::2] = torch.where(torch.arange(len(sizes)) % 2 == 0, sizes, -sizes)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    numbers = numbers[order]
    numbers[0] = 1
    return numbers.to(like).view_as(like)


def _constants(config: Any) -> list[float]:
    """The numbers of a config, and what models make of its width."""
    values = config.to_dict().values()
    numbers = {float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)}
    width = float(config.hidden_size)
    return sorted({*numbers, width**0.5, *(width / number for number in numbers if number)} - {0.0, 1.0})


def _joint(name: str, place: str, said: torch.Tensor, came: torch.Tensor, constants: list[float]) -> Joint:
    """The joint that turns one module's output into the next one's input, bit for bit.

    Raises:
        TargetError: no known joint does.
    """
    dtype = None if came.dtype == said.dtype else came.dtype
    if came.shape == said.shape:
        came = came.to(said.device)
        few, expected = said.flatten()[:_SAMPLE], came.flatten()[:_SAMPLE]
        measured = float(expected[0])  # of 1
        for steps in _forms(constants, measured):
            joint = Joint(steps, dtype)
            if torch.equal(joint(few), expected) and torch.equal(joint(said), came):
                return joint
    where = {"embedding": "embedding and layers", "hidden": "last norm and head", "logits": "head and logits"}[place]
    raise TargetError(
        f"{name} does something between {where} that is no multiple and no soft cap, so specdec would decode wrongly; "
        "it is refused"
    )


def _forms(constants: list[float], measured: float) -> Iterator[tuple[Step, ...]]:
    yield ()
    scales: list[Step] = [(kind, constant) for constant in constants for kind in ("multiply", "divide")]
    scales.append(("multiply", measured))
    caps: list[Step] = [("cap", constant) for constant in constants if constant > 0]
    yield from ((step,) for step in (*scales, *caps))
    yield from itertools.product(scales, caps)
    yield from itertools.product(caps, scales)
