"""Code of a model around its forward, in transformers' ``generate``, which specdec does not run.

Specdec decodes in its own loop, so virtual tokens, and methods that ``generate`` calls between two tokens, would have
no effect. Transformers' own code there is known to make no difference for texts, or is checked; any other code is
refused by its name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import GenerationMixin

from specdec.errors import TargetError

__all__ = ["GENERATION", "LOOP", "Whole"]

LOOP = (
    *("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "create_masks_for_generate"),
    *("_sample", "_prefill"),
)
"""Methods of a model that ``generate`` calls in its own loop, or in its place."""

GENERATION = tuple(name for name, value in vars(GenerationMixin).items() if callable(value) and name != "__init__")
"""All of ``generate``."""

_KNOWN = {"transformers", "transformers_modules", "torch", "peft", "contextlib"}
"""Packages whose methods are known, or checked in another way; the second one holds a checkpoint's own code."""

_PLAIN = "use model.generate without specdec, or a model without it"
_PEFT = {"XLORA": "runs the model twice for each token", "POLY": "asks for task_ids", "SHADOW": "packs its own cache"}


class Whole:
    """The modules from a model down to its decoder.

    Args:
        model: the root.
        decoder: what holds the layers.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module) -> None:
        self._path = [*_path(model, decoder)]
        for module in self._path:
            _check_adapters(module)
        self.check_methods(LOOP)

    def check_methods(self, names: Collection[str]) -> None:
        """Called before every generation, as methods may be replaced at any time.

        Raises:
            TargetError: one of these methods is neither transformers' own nor a checkpoint's.
        """
        for module in self._path:
            for name in names:
                holder = getattr(vars(module).get(name), "__self__", None)
                if isinstance(holder, nn.Module) and holder is not module:
                    _check_adapters(holder)
                if (owner := self._stranger(module, name)) is not None:
                    raise TargetError(
                        f"{name} of this {type(module).__name__} is {owner}, which specdec does not call, so what it "
                        f"does to a text would be lost; {_PLAIN}"
                    )

    def _stranger(self, module: nn.Module, name: str) -> str | None:
        """Whose a method is, if it is neither a library's nor a checkpoint's."""
        own = vars(module).get(name)
        if own is not None:
            bound = isinstance(own, MethodType) and any(own.__self__ is one for one in self._path)
            if not (bound and _is_known(own.__func__)):
                holder = getattr(own, "__self__", None)
                return "replaced" if holder is None else f"replaced by a method of {type(holder).__name__}"
        method = getattr(type(module), name, None)
        if method is None or _is_known(method):
            return None
        return next(f"{kind.__qualname__}'s own" for kind in type(module).__mro__ if name in vars(kind))


def _path(model: nn.Module, decoder: nn.Module) -> Iterator[nn.Module]:
    """The modules from the model down to the decoder, both included."""
    modules = dict(model.named_modules())
    name = next((name for name, module in modules.items() if module is decoder), "")
    parts = name.split(".") if name else []
    for size in range(len(parts) + 1):
        yield modules[".".join(parts[:size])]


def _check_adapters(module: nn.Module) -> None:
    """Raises TargetError for adapters of peft that do more than their modules do."""
    configs = getattr(module, "peft_config", None)
    for name, config in configs.items() if isinstance(configs, Mapping) else ():
        kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
        reason = _PEFT.get(kind)
        if getattr(config, "is_prompt_learning", False):
            reason = "puts virtual tokens before the text"
        elif getattr(config, "alora_invocation_tokens", None):
            kind, reason = "activated LoRA", "begins where its invocation tokens stand"
        if reason is not None:
            raise TargetError(
                f"the adapter {name!r} of this {type(module).__name__} is {kind}, which {reason}, and specdec does "
                "not; use its generate without specdec, or an adapter of weights alone, such as LoRA"
            )


def _is_known(function: Any) -> bool:
    """Whether a function, and each that it wraps, is a library's or a checkpoint's own."""
    if isinstance(function, MethodType):
        function = function.__func__
    while isinstance(function, FunctionType):
        if function.__globals__.get("__name__", "").partition(".")[0] not in _KNOWN:
            return False
        if not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__
    return False
