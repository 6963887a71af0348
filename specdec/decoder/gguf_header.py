"""A GGUF file's header, as llama.cpp reads it: each setting, and llama.cpp's default where it is missing.

A setting that changes the model is read, or the file is refused by the setting's name.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

from specdec.errors import CheckpointError, SpecdecWarning, shown

__all__ = ["GgufHeader"]

_REMEDY = "load the model's folder of safetensors"
_TELLING = ("rope", "attention", "expert", "scale", "norm", "window", "cap", "bias")  # in names of what changes a model
_NEVER = {  # no architecture here has a place for these; their values where they change nothing
    "attention.causal": (True,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
}
_PREDICTING = ("exaone4", "glm4", "glm4moe")
"""Architectures that may have layers of multi-token prediction behind the model's own."""


class GgufHeader:
    """The settings of a file's architecture, each of which is read or listed as of no effect.

    Args:
        architecture: llama.cpp's name of it.
        metadata: all settings by their whole keys; a list of words may be given as its length.
        names: of the file's tensors.
        numbers: reads a tensor by its name, for the few that are settings.
        where: the file, as messages name it.

    Attributes:
        architecture, names, where: as given.
    """

    def __init__(
        self,
        architecture: str,
        metadata: Mapping[str, Any],
        names: Collection[str],
        numbers: Callable[[str], list[float]],
        where: str,
    ) -> None:
        self.architecture, self.names, self.where = architecture, frozenset(names), where
        self._metadata, self._numbers, self._read = metadata, numbers, set[str]()

    def said(self, key: str, default: Any = None) -> Any:
        """A setting by its whole key."""
        return self._metadata.get(key, default)

    def tensor(self, name: str) -> list[float] | None:
        """The numbers of a small tensor that is a setting; None where there is none.

        Raises:
            CheckpointError: they are not all finite and above 0.
        """
        if name not in self.names:
            return None
        values = self._numbers(name)
        if not all(0 < value < math.inf for value in values):
            raise self.refused(f"has a tensor {name} of numbers that are not all finite and above 0", "get it again")
        return values

    def get(self, name: str, default: Any = None) -> Any:
        """A setting of the architecture, of any type."""
        self._read.add(name)
        return self._metadata.get(f"{self.architecture}.{name}", default)

    def number(self, name: str, default: float | None = None) -> Any:
        """A number, which is at least 0; a list has to have the same one for all layers.

        Raises:
            CheckpointError: it is missing and has no default, or is no such number.
        """
        value, key = self.get(name, default), f"{self.architecture}.{name}"
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if value is None:
            raise self.refused(f"does not say {key}, without which a model has no size", "get it again")
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise self.refused(f"says {key} {shown(value)}, and a number is needed that holds for all layers")
        return value

    @property
    def layers(self) -> int:
        """How many layers make the model."""
        return int(self.number("block_count")) - self.behind

    @property
    def behind(self) -> int:
        """How many layers of multi-token prediction lie behind them, which are no part of the model."""
        if self.architecture not in _PREDICTING:
            self.only("nextn_predict_layers", 0)
        every, behind = self.number("block_count"), self.number("nextn_predict_layers", 0)
        if type(behind) is not int or (behind and behind >= every):
            raise self.refused(
                f"says {self.architecture}.nextn_predict_layers {behind} and block_count {every}, and an integer below "
                "that is needed, which counts the model's layers as well",
                "get it again",
            )
        return behind

    @property
    def heads(self) -> tuple[int, int]:
        """How many heads there are, and how wide one is."""
        width, heads = self.number("embedding_length"), self.number("attention.head_count")
        if not heads or not width:
            raise self.refused(f"says {heads} heads and a width of {width}", "get it again")
        return heads, self.number("attention.key_length", width // heads)

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        words = self.said("tokenizer.ggml.tokens", self.get("vocab_size"))
        if words is None:
            raise self.refused("lists no tokens, and does not say how many there are", "get it again")
        return len(words) if isinstance(words, list) else int(words)

    def only(self, name: str, *meant: Any) -> None:
        """Raises CheckpointError where a setting is there and has none of these values."""
        value = self.get(name, meant[0])
        if value not in meant:
            raise self.refused(f"says {self.architecture}.{name} {shown(value)}, and only {meant[0]} is read from GGUF")

    def check_rest(self) -> None:
        """To be called when all that is known was read.

        A setting that llama.cpp knows, and does not read of this architecture, changes nothing. One that it does not
        know either is warned of.

        Raises:
            CheckpointError: its name sounds as if it changed the model.
        """
        for name, values in _NEVER.items():
            self.only(name, *values)
        prefix = f"{self.architecture}."
        own = [key.removeprefix(prefix) for key in self._metadata if key.startswith(prefix)]
        for name in own:
            if name in self._read or name in _known():
                continue
            if any(part in name for part in _TELLING):
                raise self.refused(f"says {prefix}{name}, which neither specdec nor llama.cpp's converter knows")
            warnings.warn(f"{prefix}{name} is not known, and not read", SpecdecWarning, stacklevel=2)

    def refused(self, why: str, remedy: str = _REMEDY) -> CheckpointError:
        """The error for a file that does not say what can be read."""
        return CheckpointError(f"{self.where} {why}; {remedy}")


@cache
def _known() -> Collection[str]:
    """The settings that llama.cpp's architectures have."""
    from gguf import Keys  # imported late: it can import other tokenizer packages, for seconds

    groups = (vars(group) for name, group in vars(Keys).items() if not name.startswith("_"))
    keys = [key for group in groups for key in group.values() if isinstance(key, str)]
    return frozenset(key.removeprefix("{arch}.") for key in keys if key.startswith("{arch}."))
