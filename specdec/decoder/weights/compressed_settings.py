"""What a compressed-tensors checkpoint's ``quantization_config`` says of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.errors import CheckpointError, shown

__all__ = ["CompressedSettings", "Scheme"]

_FORMATS = {"pack-quantized": True, "int-quantized": False, "naive-quantized": False}
"""Those that are read -> whether codes are packed into words."""
_ROUNDED = ("input_activations", "output_activations")
_UNREAD = ("sparsity_config", "transform_config", "moe_sparsity_config")
_REMEDY = "give a checkpoint whose weights are integers of 4 or 8 bits, one that is not quantised, or a GGUF file"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights of some modules are quantised.

    Attributes:
        bits: of a code, 4 or 8.
        packed: codes lie in words of 32 bits; else each is a byte.
        group: inputs that share a scale; -1: all of an output; 0: all of the matrix.
        symmetric: no code but zero stands for zero.
    """

    bits: int
    packed: bool
    group: int
    symmetric: bool


@dataclass(frozen=True, slots=True)
class CompressedSettings:
    """Which modules are quantised, and how.

    Attributes:
        where: the checkpoint, as messages name it.
        schemes: by targets: a module's name, ``re:`` and a pattern of names, or a class.
        ignored: targets that are not quantised.
        rounded: what else is to be rounded: ``activations``, ``keys and values``.
    """

    where: str
    schemes: Mapping[str, Scheme | None]
    ignored: tuple[str, ...]
    rounded: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, told: Mapping[str, Any], where: str) -> CompressedSettings:
        """Those of a config's ``quantization_config``.

        Raises:
            CheckpointError: weights that are not integers of 4 or 8 bits, in another layout, or changed otherwise.
        """
        own = _Told(where)
        status = told.get("quantization_status", "compressed")
        own.refuse_unless(status == "compressed", "quantization_status", status, "'compressed'")
        for name in _UNREAD:
            value = told.get(name)
            none = not value or (name == "sparsity_config" and own.mapping(name, value).get("format") == "dense")
            own.refuse_unless(none, name, value, "none")
        groups = own.mapping("config_groups", told.get("config_groups"))
        own.refuse_unless(bool(groups), "config_groups", groups, "at least one")
        schemes, rounded = dict[str, Scheme | None](), dict[str, None]()
        for name, value in groups.items():
            group = own.mapping(f"config_groups[{name!r}]", value)
            scheme = own.scheme(group, told.get("format"))
            schemes |= dict.fromkeys(own.targets("targets", group.get("targets")), scheme)
            rounded |= {"activations": None} if any(map(group.get, _ROUNDED)) else {}
        rounded |= {"keys and values": None} if told.get("kv_cache_scheme") else {}
        return cls(where, schemes, own.targets("ignore", told.get("ignore") or ()), tuple(rounded))

    def scheme(self, module: str) -> Scheme:
        """Of a module whose weights are quantised.

        Raises:
            CheckpointError: by the config it is not.
        """
        names = sorted(self.schemes, key=lambda target: (target.startswith("re:"), target))  # as the package has them
        kinds = ("Embedding" if "embed" in module.rpartition(".")[2] else "Linear", "Module")
        fitting = [target for target in names if _names(target, module)] + [kind for kind in kinds if kind in names]
        found = self.schemes[fitting[0]] if fitting else None
        passed = any(_names(target, module) or target in kinds for target in self.ignored)
        if found is None or passed:
            raise CheckpointError(
                f"{module!r} in {self.where} has quantised weights, and by its quantization_config it is "
                f"{'ignored' if passed else 'of no group'}; download config.json and the weights anew, from one place"
            )
        return found


@dataclass(frozen=True, slots=True)
class _Told:
    """Values of a config, checked; ``where``: the checkpoint, as messages name it."""

    where: str

    def refuse_unless(self, good: bool, name: str, value: Any, wanted: str) -> None:
        if not good:
            raise CheckpointError(
                f"{self.where} is quantised by compressed-tensors with {name} {shown(value)}, and {wanted} is read; "
                f"{_REMEDY}"
            )

    def mapping(self, name: str, value: Any) -> Mapping[str, Any]:
        self.refuse_unless(isinstance(value, Mapping), name, value, "a mapping of settings")
        found: Mapping[str, Any] = value
        return found

    def targets(self, name: str, value: Any) -> tuple[str, ...]:
        """Names and patterns of modules, and classes."""
        good = isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, str) for one in value)
        self.refuse_unless(good, name, value, "a list of names")
        for one in value:
            try:
                re.compile(one.removeprefix("re:") if one.startswith("re:") else "")
            except re.error as error:
                raise CheckpointError(
                    f"{self.where} has {shown(one)} among its {name}, which is no pattern: {error}; download the "
                    "checkpoint anew"
                ) from error
        return tuple(value)

    def scheme(self, group: Mapping[str, Any], form: Any) -> Scheme | None:
        """Of a group's weights; None where they are not quantised."""
        if group.get("weights") is None:
            return None
        weights, form = self.mapping("weights", group["weights"]), group.get("format") or form
        kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
        self.refuse_unless(kind == "int", "weights of type", f"{kind} and {bits} bits", "'int'")
        self.refuse_unless(form in tuple(_FORMATS), "format", form, " or ".join(map(repr, _FORMATS)))
        self.refuse_unless(type(bits) is int and bits in (4, 8), "num_bits", bits, "4 or 8")
        size, way = weights.get("group_size"), weights.get("strategy")
        if way is None:  # as the package has it
            way = "tensor" if size is None else "channel" if size == -1 else "group"
        self.refuse_unless(way in ("tensor", "channel", "group"), "strategy", way, "'tensor', 'channel' or 'group'")
        whole = type(size) is int and size > 0
        fits = whole if way == "group" else size in (None, -1)
        self.refuse_unless(fits, "group_size", size, f"what strategy {way!r} takes")
        symmetric, dynamic = weights.get("symmetric", True), weights.get("dynamic", False)
        self.refuse_unless(type(symmetric) is bool, "symmetric", symmetric, "true or false")
        self.refuse_unless(dynamic is False, "dynamic", dynamic, "false for weights")
        group_of: Any = {"tensor": 0, "channel": -1}.get(way, size)
        return Scheme(bits, _FORMATS[form], group_of, symmetric)


def _names(target: str, module: str) -> bool:
    """Whether a target that is no class is a module's."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module
