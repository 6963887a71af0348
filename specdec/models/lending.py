"""What a model's modules are lent while a target of it decodes: an attention function, and eval mode."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from transformers import AttentionInterface, PreTrainedModel

from specdec.errors import TargetError
from specdec.models.masks import register_masks
from specdec.models.self_check import note_layer
from specdec.runners.attention import layer_attention

__all__ = ["ATTENTION", "PROBE", "LentModules"]

ATTENTION, PROBE = "specdec", "specdec_probe"


class LentModules:
    """What a model's modules are lent: an attention function, and eval mode. Counted, as several threads may hold it.

    Modules look their function up in their own config object, a layer's may be a sub-config. There is one of these for
    a model, however many targets are made of it.
    """

    _all: ClassVar[weakref.WeakKeyDictionary[PreTrainedModel, LentModules]] = weakref.WeakKeyDictionary()
    _making: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def of(cls, model: PreTrainedModel) -> LentModules:
        """The model's own, made with its first target."""
        with cls._making:
            if model not in cls._all:
                cls._all[model] = cls(model)
            return cls._all[model]

    def __init__(self, model: PreTrainedModel) -> None:
        AttentionInterface.register(ATTENTION, layer_attention)
        AttentionInterface.register(PROBE, note_layer)
        register_masks()
        self._model = weakref.ref(model)  # what is kept by model must not keep the model
        self._lock, self._holders = threading.Lock(), 0
        self._attention: str | None = None
        self._former: list[tuple[Any, Any]] = []
        self._training: list[Any] = []

    @contextmanager
    def to(self, attention: str | None) -> Iterator[None]:
        """While inside, attention modules call this function (None: their own), and dropout is off.

        With the last holder's end the model is as it was.

        Raises:
            TargetError: somebody else has it, with another function: a target is made of a model that decodes.
        """
        with self._lock:
            model = self._model()
            assert model is not None
            if not self._holders:
                modules: list[Any] = list(model.modules())
                self._training = [module for module in modules if module.training]
                configs = {id(c): c for m in modules if attention and (c := getattr(m, "config", None)) is not None}
                self._former = [(config, config._attn_implementation) for config in configs.values()]
                self._set(False, [(config, attention) for config, _ in self._former])
                self._attention = attention
            elif attention != self._attention:
                raise TargetError(
                    f"a target is being made of a {type(model).__name__} that is decoding, in this thread or another; "
                    "make all targets of a model before any of them decodes, or share one (custom_generate's target=)"
                )
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self._set(True, self._former)
                    self._former, self._training = [], []  # which would keep the model

    def _set(self, training: bool, implementations: Sequence[tuple[Any, Any]]) -> None:
        for module in self._training:
            module.training = training  # not train(), which goes on to the children, whose mode may be another
        for config, implementation in implementations:
            config._attn_implementation = implementation
