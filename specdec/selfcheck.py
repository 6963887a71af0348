"""Self-check: what a target computes at load, layer by layer, held against what its model says itself.

A model for which the walk differs is refused by name; a lowered layer that differs is left as it was.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specdec.block import Block
from specdec.cache import KVCache, LayerSpec
from specdec.draft import Draft, Entry
from specdec.errors import NumericalError, SpecdecWarning, TargetError, first_line
from specdec.lowering import LoweredLayer

if TYPE_CHECKING:
    from specdec.target import TargetOutput, TransformersTarget

__all__ = ["PROBE", "agrees", "native_agrees", "note_layer", "self_check"]

PROBE = "specdec_probe"
"""Name under which transformers' attention modules find ``note_layer``."""

# Relative; transformers takes some softmaxes in float32 whatever the dtype, so float64 is checked to float32 rounding.
_ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-3}
# Of every block here: oneDNN makes kernels for each number of rows, and keeps them (a megabyte each in bfloat16).
_ROWS = 6


def self_check(target: TransformersTarget) -> list[LayerSpec]:
    """Compare the walk with the model's own forward, and return what each layer caches, as seen on the way.

    Raises:
        TargetError: it cannot be walked, or the two differ by more than rounding.
        NumericalError: the model's own logits are NaN or infinite.
    """
    generator = torch.Generator().manual_seed(0)
    high = min(target.vocab_size, target.embedding.weight.shape[0])
    tokens: list[int] = torch.randint(high, (2 * _ROWS - 1,), generator=generator).tolist()
    expected = _own_logits(target, tokens)[_ROWS:]
    specs, walked = _walked(target, tokens)
    scale = float(expected.double().abs().max())
    if not math.isfinite(scale):
        raise NumericalError(
            f"{target.name}: the model's own logits are {scale} on a few tokens; the weights are broken, or "
            f"{target.dtype} is too narrow for them: use float32 or bfloat16"
        )
    off = float((walked.double() - expected.to(walked.device).double()).abs().max())
    bound = _ROUNDING.get(target.dtype, 0.1) * max(scale, 1e-3)
    if not off <= bound:
        raise TargetError(
            f"{target.name}: the layer walk differs from the model's own forward by {off:.3g} on logits up to "
            f"{scale:.3g} (at most {bound:.3g} is rounding); its architecture does something between the layers "
            "that specdec does not know, so it is refused rather than decoded wrongly"
        )
    return specs


def agrees(target: TransformersTarget, number: int, layer: nn.Module, lowered: LoweredLayer) -> bool:
    """Whether a lowered layer computes what its original does; if not, a warning says which layer stays."""
    what = f"{target.name}: layer {number} ({type(layer).__name__})"

    def run(candidate: Any) -> torch.Tensor:
        with target.replaced(number, candidate):
            return _run_layers(target, number, number + 1)

    return _same(target, what, "when lowered", partial(run, layer), partial(run, lowered))


def native_agrees(target: TransformersTarget) -> bool:
    """Whether the layers compute in one native call what they do one by one; if not, a warning says so."""

    def alone() -> torch.Tensor:
        with target.layer_by_layer():
            return _run_layers(target, 0, target.num_layers)

    what = f"{target.name}: all layers"
    return _same(target, what, "in one native call", alone, partial(_run_layers, target, 0, target.num_layers))


def _same(
    target: TransformersTarget,
    what: str,
    when: str,
    original: Callable[[], torch.Tensor],
    other: Callable[[], torch.Tensor],
) -> bool:
    """Whether two ways to the same hidden states differ by no more than rounding; if not, there is a warning."""
    try:
        expected, got = original().double(), other().double()
    except RuntimeError as error:
        warnings.warn(
            f"{what} cannot be run {when}, and stays as it is: {first_line(error)}", SpecdecWarning, stacklevel=6
        )
        return False
    scale, off = float(expected.abs().max()), float((expected - got).abs().max())
    if off <= _ROUNDING.get(target.dtype, 0.1) * scale:
        return True
    message = f"{what} differs by {off:.3g} on values up to {scale:.3g} {when}, and stays as it is"
    warnings.warn(message, SpecdecWarning, stacklevel=6)
    return False


def _run_layers(target: TransformersTarget, first: int, last: int) -> torch.Tensor:
    """Random hidden states through layers [first, last): a prefix and a tree; [2 * _ROWS, D]."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2 * _ROWS, target.hidden_size, generator=generator, dtype=torch.float64)
    hidden = hidden.to(target.specs[first].device, target.specs[first].dtype)
    with target.active():
        cache = KVCache(target.specs, capacity=2 * _ROWS, rows=_ROWS)
        rows: list[TargetOutput] = []
        for draft in (Draft.chain((0,) * _ROWS), Draft((0,) * _ROWS, (-1, 0, 0, 2, 3, 4))):
            part = hidden[len(rows) * _ROWS :][:_ROWS]
            block = Block.of(draft, cache, target.device, target.backend)
            rows.append(target.forward(block, entry=Entry(first, part), exit_layer=last, taps=(last,), rows=()))
            cache.commit(range(_ROWS))
        return torch.cat([output.taps[last] for output in rows])


def _walked(target: TransformersTarget, tokens: list[int]) -> tuple[list[LayerSpec], torch.Tensor]:
    """What each layer caches, and the walk's logits [5, V] of the last tokens: a block, then one that is a tree."""
    specs: list[LayerSpec] = []
    try:
        with target.active(PROBE):
            block = Block(KVCache([], capacity=1, rows=1), tokens[:1], device=target.device)
            hidden = target.embedding(block.tokens)[0]
            target.walk(hidden, block, 0, target.num_layers, {}, (), {"use_cache": False, "note": specs.append})
        with target.active():
            cache = KVCache(specs, capacity=16, rows=16)
            target.forward(Block(cache, tokens[:_ROWS], device=target.device, backend=target.backend), rows=())
            cache.commit(range(_ROWS))
            # Below the root: a wrong sibling first, then the text, so that a row's place and depth differ.
            root, *rest = tokens[_ROWS:]
            tree = Draft((root, tokens[0], *rest), (-1, 0, 0, 2, 3, 4))
            walked = target.forward(Block.of(tree, cache, target.device, target.backend)).logits
    except (TypeError, AttributeError, RuntimeError, IndexError, ValueError) as error:
        raise TargetError(
            f"{target.name} cannot be walked layer by layer: {type(error).__name__}: {first_line(error)}"
        ) from error
    assert walked is not None
    return specs, walked[[0, 2, 3, 4, 5]]


def _own_logits(target: TransformersTarget, tokens: list[int]) -> torch.Tensor:
    """[n, V] logits of the model's own forward."""
    ids = torch.tensor([tokens], device=target.device)
    try:
        with torch.inference_mode():
            logits: torch.Tensor = target.model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    except (TypeError, AttributeError, RuntimeError, IndexError, ValueError) as error:
        raise TargetError(
            f"{target.name}: the model's own forward fails in {target.dtype} on {target.device}, without specdec: "
            f"{type(error).__name__}: {first_line(error)}; mend its config, or load it with another dtype"
        ) from error
    return logits


def note_layer(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    note: Callable[[LayerSpec], None] | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function that only notes what its layer will cache, [1, heads, 1, dim], and its window.

    Raises:
        TargetError: the layer keeps its arguments to itself, and ``note`` with them.
    """
    if note is None:
        raise TargetError(
            f"{type(module).__name__} is not handed the arguments that its decoder layer was given, so specdec's rows "
            "do not reach the attention; such models are not supported"
        )
    note(LayerSpec(key.shape[1], key.shape[-1], value.shape[-1], sliding_window, key.device, key.dtype))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
