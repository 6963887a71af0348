"""Self-check: at load, a target's logits are compared with the logits of its model.

The reference is the model's own forward over a few tokens: every runner must compute its logits over a prefix and a
tree, last norm and head included. In full precision they must agree up to rounding. In half precision rounding may hide
a wrong layer, so it is measured: the same modules run in float32, layer by layer, and a runner's error relative to this
run may be no larger than that of the model's own modules. Where rows are rounded to bytes it is measured in full
precision, too, by float64: there the last bit of a float32 decides between two bytes. As chance has it that bit differs
in one runner and not in another, so what it may change is measured as well: by a run in which every value that lies so
near to the middle of two bytes becomes the other one.

Each row has all experts meanwhile, where a known router chooses some: where its logits are nearly even, two roundings
choose others, and so differ by more than rounding; and no expert is left out. How runners choose is compared apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from specdec.errors import NumericalError, TargetError, first_line
from specdec.runners.experts import choose_all
from specdec.runners.layers import ModuleLayer
from specdec.runners.linear import PackedModule
from specdec.runners.replicas import Replicas
from specdec.runners.rows import Rows
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.step_io import StepInput
from specdec.step.tree import Draft
from specdec.target import Target

__all__ = ["PROBE", "ProbeLayer", "Reference", "ShadowLayer", "note_layer", "own_logits", "tokens_for"]

PROBE = "specdec_probe"
"""The name of ``note_layer`` among transformers' attention functions."""

# Relative; transformers takes some softmaxes in float32 whatever the dtype, so float64 is checked to float32 rounding.
_ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-3}
_WITHOUT_SHADOW = 0.1
# In half precision, root mean squares, which hardly vary over so many logits: two roundings differ by 1.4 of one, and
# one runner rounds about as much as another. The floor, relative, is for models that round by accident to nothing.
_OWN, _RUNNER, _FLOOR = 4.0, 1.5, 2.0**-10
# How near to the middle of two bytes a sum in float32 may be rounded to either: by 32 units in the last place of 127.
_NEAR = 127 * 2.0**-19
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
            root = Replicas(model, whole=True).root  # which leaves nothing in the model that it would write there
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
    for place, module in model.named_modules():
        kinds = module.names if isinstance(module, PackedModule) else ()
        if name := next((kind for kind in kinds if not _finite(getattr(module, kind))), None):
            return NumericalError(
                f"{target.name}: {what} on a few tokens, as the stored weight '{place}.{name}' has a scale or a value "
                "that is NaN or infinity; the file is broken: get it again, or another quantisation"
            )
    return NumericalError(
        f"{target.name}: {what} on a few tokens, though its weights are finite; load it in a wider dtype than "
        f"{target.dtype}, or mend its config"
    )


def _finite(weight: torch.Tensor | None) -> bool:
    return weight is None or bool(weight.isfinite().all())


class Reference:
    """The model's own logits of a few tokens, and the largest difference that rounding may explain.

    Args:
        model: the target's model.
        expected: the result of :func:`own_logits` for the tokens.
        target: the target whose forward is checked, with its current runner.
        specs: specs of its layers' caches.
    """

    def __init__(
        self, model: Any, expected: torch.Tensor, target: Target, specs: Sequence[LayerSpec], tokens: Sequence[int]
    ) -> None:
        self._model = model
        self._target, self._specs, self._tokens, self._expected = target, specs, tokens, expected
        self._full = None if getattr(target, "activations", None) else _ROUNDING.get(target.dtype)
        self._shadow: torch.Tensor | None = None
        self._rounding = 0.0

    @property
    def other_dtype(self) -> torch.dtype:
        """The dtype that the target's is measured by."""
        return torch.float64 if self._target.dtype is torch.float32 else torch.float32

    def check_modules(self, shadowed: Callable[[float], Any] | None) -> None:
        """Hold the model's modules, called layer by layer, against its own forward.

        ``shadowed``: a context manager in which the target runs the same modules in ``other_dtype``, and rounds rows to
        bytes as ``in_bytes`` does by its ``near``; None where it cannot.

        Raises:
            TargetError: they differ by more than rounding.
            NumericalError: they are no numbers.
        """
        walked = self._logits()
        if self._full is None and shadowed is not None:
            specs = [replace(spec, dtype=self.other_dtype) for spec in self._specs]
            with shadowed(0.0):
                self._shadow = self._in_one_chain(specs)
            self._rounding = _rms(walked - self._shadow)
            if getattr(self._target, "activations", None):
                with shadowed(_NEAR):
                    self._rounding = max(self._rounding, _rms(self._in_one_chain(specs) - self._shadow))
            off, most = _rms(walked - self._expected), _OWN * self._rounding + _FLOOR * _rms(self._expected)
        else:
            off, most = self._distance(walked)
        if not math.isfinite(off + most):
            what = f"the layer walk differs from the model's own forward by {off}, where {most} is rounding,"
            raise _not_finite(self._model, self._target, what)
        if not off <= most:
            raise TargetError(
                f"{self._target.name}: the layer walk differs from the model's own forward by {off:.3g} on logits up "
                f"to {float(self._expected.abs().max()):.3g} (at most {most:.3g} is rounding); its architecture does "
                "something between the layers that specdec does not know, so it is refused rather than decoded wrongly"
            )

    def differs(self) -> str | None:
        """How the target, on the runner that it has now, differs from its model by more than rounding, or None."""
        try:
            got = self._logits()
        except Exception as error:  # a library's, a compiler's and a driver's share no class but this
            return f"it fails: {type(error).__name__}: {first_line(error)}"
        if self._shadow is None:
            off, most = self._distance(got)
        else:
            off = _rms(got - self._shadow)
            most = _RUNNER * self._rounding + _FLOOR * _rms(self._shadow)
        return None if off <= most else f"by {off:.3g}, where {most:.3g} is rounding"

    def _distance(self, got: torch.Tensor) -> tuple[float, float]:
        scale = max(float(self._expected.abs().max()), 1e-3)
        return float((got - self._expected).abs().max()), (self._full or _WITHOUT_SHADOW) * scale

    def _logits(self) -> torch.Tensor:
        """[11, V] by the target: a chain, then a tree, the path through which is the text."""
        target, tokens = self._target, list(self._tokens)
        root, *rest = tokens[_ROWS:]
        tree = Draft((root, tokens[0], *rest), _TREE)
        with target.active():
            cache = target.new_cache(capacity=2 * _ROWS, rows=_ROWS)
            prefix = target.forward(StepInput.of(cache, tokens[:_ROWS])).logits
            cache.commit(range(_ROWS))
            below = target.forward(StepInput.of(cache, tree.tokens, tree.tree)).logits
        assert prefix is not None
        assert below is not None
        return torch.cat((prefix, below[[0, 2, 3, 4, 5]])).to(self._expected.device).double()

    def _in_one_chain(self, specs: Sequence[LayerSpec]) -> torch.Tensor:
        """[11, V] of the same text as one chain: in float32 each forward converts all weights, so there is only one."""
        target, tokens = self._target, list(self._tokens)
        with target.active():
            cache = KVCache(specs, capacity=len(tokens), rows=len(tokens))
            logits = target.forward(StepInput.of(cache, tokens)).logits
        assert logits is not None
        return logits.to(self._expected.device).double()


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


class ProbeLayer(ModuleLayer):
    """A layer's own module without a cache, for an attention function that only looks."""

    _attention = PROBE

    def _call(self, hidden: torch.Tensor, given: dict[str, Any]) -> Any:
        arguments = {name: value for name, value in given.items() if not isinstance(value, Rows)}
        return self._layer(hidden, **arguments)


class ShadowLayer(ModuleLayer):
    """A layer's own module with its parameters in another dtype, for one call."""

    def __init__(self, *arguments: Any, dtype: torch.dtype, **options: Any) -> None:
        self._dtype = dtype
        super().__init__(*arguments, **options)


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
