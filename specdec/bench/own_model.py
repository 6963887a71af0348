"""A target's model as transformers runs it: for its own ways to generate, and to judge where two texts part."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from specdec.errors import ConfigError
from specdec.models.live_model import load_model
from specdec.models.transformers_target import TransformersTarget
from specdec.target import Target

__all__ = ["keep_model", "own_model"]

_LOADED: WeakKeyDictionary[Target, Any] = WeakKeyDictionary()


def keep_model(target: Target, model: Any) -> None:
    """Let the live model that a target is a copy of be its own."""
    _LOADED[target] = model


def own_model(target: Target) -> Any:
    """The live model that a target runs; of one that a spec describes, a second one from the same place, loaded once.

    Raises:
        ConfigError: the target was loaded from nowhere.
        CheckpointError: its place has no such model any more.
    """
    if isinstance(target, TransformersTarget):
        return target.model
    if target not in _LOADED:
        if not target.path:
            raise ConfigError(f"transformers cannot load this {target.name}, as it comes from no folder; give a folder")
        _LOADED[target] = load_model(target.path, dtype=target.dtype, device=target.device, device_map=None)
    return _LOADED[target]
