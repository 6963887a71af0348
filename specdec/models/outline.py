"""Outline: what of a live model is read once, so that a later change of it is refused."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from specdec.errors import shown

__all__ = ["Outline"]

_ABOUT = ("architectures", "id2label", "label2id")  # of a config, and set when it is saved


class Outline:
    """The numbers of a model's text config, of which its masks were read, and where and in what its embedding is."""

    def __init__(self, config: Any, embedding: nn.Module) -> None:
        self._config, self._embedding = config, embedding
        self._was = copy.deepcopy(self._now())

    def changed(self) -> str | None:
        """What was changed, or None."""
        for (name, was), now in zip(self._was.items(), self._now().values(), strict=True):
            for key, value in was.items():  # what is new is asked for by nothing
                if now.get(key) != value:
                    return f"the {key} of its {name} is {shown(now.get(key))}, and was {shown(value)}"
        return None

    def _now(self) -> dict[str, dict[str, Any]]:
        weight = next(self._embedding.parameters(), None)
        embedding = {} if weight is None else {"dtype": weight.dtype, "device": weight.device}
        return {"embedding": embedding, type(self._config).__name__: _settings(self._config)}


def _settings(config: Any) -> dict[str, Any]:
    """A config's numbers, and lists of them; tokens are another matter, as is what is set while a model runs."""
    return {
        key: value
        for key, value in vars(config).items()
        if type(value) in (int, float, list, dict, type(None))
        and not (key.startswith("_") or "token" in key or key in _ABOUT)
    }
