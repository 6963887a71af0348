"""Self-check: at load, a target's logits are compared with the logits of its model.

The reference is the model's own forward over a few tokens: the target must compute its logits over a prefix and a tree,
last norm and head included, up to rounding. Each row has all experts meanwhile, where a known router chooses some:
where its logits are nearly even, two roundings choose others, and so differ by more than rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from specdec.errors import NumericalError, TargetError, first_line
from specdec.runners.block_weight import BlockWeight
from specdec.runners.experts import choose_all
from specdec.runners.replicas import Replicas
from specdec.step import torch_switches
from specdec.step.step_io import StepInput
from specdec.step.tree import Draft
from specdec.target import Target

__all__ = ["check_again", "check_finite", "differs", "own_logits", "tokens_for"]

# Relative; transformers takes some softmaxes in float32 whatever the dtype, so float64 is checked to float32 rounding.
_ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-3}
_HALF = 0.1  # in half precision
# Of every block here: oneDNN makes kernels for each number of rows, and keeps them (a megabyte each in bfloat16).
_ROWS = 6
_TREE = (-1, 0, 0, 2, 3, 4)  # below the root a wrong sibling first, so that a row's place and depth differ


def tokens_for(vocab_size: int) -> list[int]:
    """The tokens on which targets are checked."""
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(vocab_size, (2 * _ROWS - 1,), generator=generator).tolist()
    return tokens


def own_logits(model: Any, target: Target, tokens: Sequence[int]) -> torch.Tensor:
    """[N, V] of the model's own forward.

    Raises:
        TargetError: it fails without specdec.
        NumericalError: they are NaN or infinite.
    """
    try:
        with torch.inference_mode():
            ids = torch.tensor([list(tokens)], device=target.device)
            root = Replicas(model).root  # which leaves nothing in the model that it would write there
            choose_all(root)
            logits: torch.Tensor = root(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    except Exception as error:  # code of others: it may raise anything
        raise TargetError(
            f"{target.name}: the model's own forward fails in {target.dtype} on {target.device}, without specdec: "
            f"{type(error).__name__}: {first_line(error)}; mend its config, or load it with another dtype"
        ) from error
    scale = float(logits.double().abs().max())
    if not math.isfinite(scale):
        raise _not_finite(model, target, f"the model's own logits are {scale}")
    return logits.double()


def _not_finite(model: Any, target: Target, what: str) -> NumericalError:
    """Error text for results that are not finite; it names the first weight that is not finite, if there is one."""
    remedies = {
        "weight": (model.named_parameters(), "download or train the weights anew"),
        "buffer": (model.named_buffers(), "mend the config that it is made from"),
    }
    for kind, (tensors, remedy) in remedies.items():
        floats = ((name, tensor) for name, tensor in tensors if tensor.is_floating_point() and not tensor.is_meta)
        name = next((name for name, tensor in floats if not bool(tensor.isfinite().all())), None)
        if name is not None:
            return NumericalError(
                f"{target.name}: {what} on a few tokens, as its {kind} {name!r} holds NaN or infinity; {remedy}"
            )
    return NumericalError(
        f"{target.name}: {what} on a few tokens, though its weights are finite; load it in a wider dtype than "
        f"{target.dtype}, or mend its config"
    )


def check_finite(target: Any) -> None:
    """Raises NumericalError where a described target's logits of a few tokens are NaN or infinite."""
    tokens = tokens_for(target.vocab_size)
    with target.active():
        cache = target.new_cache(capacity=len(tokens), rows=len(tokens))
        largest = float(target.forward(StepInput.of(cache, tokens)).logits.abs().max())
    if math.isfinite(largest):
        return
    blocks = {name for names, kernel in target.executor.kernels() if isinstance(kernel, BlockWeight) for name in names}
    what = f"{target.name}: the model's own logits are {largest} on a few tokens"
    name = next((name for name, weight in target.named_weights() if not bool(weight.isfinite().all())), None)
    if name in blocks:
        raise NumericalError(
            f"{what}, as the stored weight {name!r} has a scale or a value that is NaN or infinity; the file is "
            "broken: get it again, or another quantisation"
        )
    if name is not None:
        raise NumericalError(
            f"{what}, as its weight {name!r} holds NaN or infinity; download or train the weights anew"
        )
    raise NumericalError(
        f"{what}, though its weights are finite; load it in a wider dtype than {target.dtype}, or mend its config"
    )


def differs(expected: torch.Tensor, target: Target, tokens: Sequence[int]) -> str | None:
    """How a target's logits differ from its model's by more than rounding, or None.

    ``expected``: the result of :func:`own_logits` for the tokens.
    """
    try:
        got = _logits(target, tokens).to(expected.device).double()
    except Exception as error:  # a library's, a compiler's and a driver's share no class but this
        return f"it fails: {type(error).__name__}: {first_line(error)}"
    scale = max(float(expected.abs().max()), 1e-3)
    off, most = float((got - expected).abs().max()), _ROUNDING.get(target.dtype, _HALF) * scale
    return None if off <= most else f"by {off:.3g}, where {most:.3g} is rounding"


def check_again(model: Any, target: Target, every_expert: Callable[[], AbstractContextManager[None]]) -> None:
    """Raises TargetError where a forward that was replaced since does not compute each path's logits of a tree.

    ``every_expert``: of the target's runner.
    """
    tokens = tokens_for(target.vocab_size)
    with torch_switches.loading():
        expected = own_logits(model, target, tokens)
        with every_expert():
            off = differs(expected, target, tokens)
    if off is not None:
        raise TargetError(
            f"the forward of {target.name}, or its attention, was changed after it was loaded, and its logits over a "
            f"tree are not those of each path: {off}; put it back, or use plain generate"
        )


def _logits(target: Target, tokens: Sequence[int]) -> torch.Tensor:
    """[11, V] by the target: a chain, then a tree, the path through which is the text."""
    root, *rest = tokens[_ROWS:]
    tree = Draft((root, tokens[0], *rest), _TREE)
    with target.active():
        cache = target.new_cache(capacity=2 * _ROWS, rows=_ROWS)
        prefix = target.forward(StepInput.of(cache, tokens[:_ROWS])).logits
        cache.commit(range(_ROWS))
        below = target.forward(StepInput.of(cache, tree.tokens, tree.tree)).logits
    assert prefix is not None
    assert below is not None
    return torch.cat((prefix, below[[0, 2, 3, 4, 5]]))
