"""Settings: what a model's config says, and which of it was read, so that nothing that counts is lost.

A key counts if the config's class declares it, it is not in ``COMMON``, and its value is other than the class's
default: defaults are read by the family's function, or were added to the class later and mean what was before. Keys
that no class declares are ignored, as transformers ignores them, with a warning where their name sounds like numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from specdec.decoder.spec import UnknownDecoder
from specdec.errors import CheckpointError, SpecdecWarning, shown

__all__ = ["COMMON", "Settings"]

COMMON: Mapping[str, str] = {
    **dict.fromkeys(("architectures", "model_type", "transformers_version", "auto_map"), "which code loads it"),
    **dict.fromkeys(("name_or_path", "id2label", "label2id", "problem_type", "num_labels"), "names"),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id"), "the tokenizer, and ends"),
    **dict.fromkeys(("dtype", "torch_dtype", "quantization_config"), "how weights are held"),
    **dict.fromkeys(("output_hidden_states", "output_attentions", "return_dict", "use_cache"), "what a call returns"),
    **dict.fromkeys(("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"), "training"),
    **dict.fromkeys(("initializer_range", "attention_dropout", "hidden_dropout"), "training"),
    **dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers"), "layers behind the model's own"),
    **dict.fromkeys(("pretraining_tp", "chunk_size_feed_forward"), "the same numbers in another order"),
}
"""Keys that change no number of a decoder in eval mode -> what they are about."""
_SOUND = ("rope", "scal", "window", "cap", "bias", "norm", "expert")  # of numbers, in a key that no class declares


class Settings:
    """A model's settings by transformers' names, all of them there.

    Args:
        values: of the config, or of a file's header by the same names.
        defaults: the keys that the config's class declares, and their defaults; None where every key is asked for.
        where: whose they are, as messages name it.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, *, where: str) -> None:
        self._values, self._defaults, self.where = values, defaults, where
        self._read = set[str]()

    @classmethod
    def of(cls, config: Any) -> Settings:
        """Those of a text config of transformers."""
        declared = {own.name: _default(own) for own in fields(type(config))}
        others = {*config.attribute_map, *config.attribute_map.values()} - declared.keys()  # of what is declared
        values = {name: value for name, value in config.to_dict().items() if name not in others}
        values |= {name: getattr(config, name) for name in declared if hasattr(config, name)}
        return cls(values, declared, where=type(config).__name__)

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or the default where there is none."""
        self._read.add(key)
        return self._values.get(key, default)

    def declares(self, key: str) -> bool:
        """Whether the config's class knows a key."""
        return self._defaults is None or key in self._defaults

    def count(self, key: str) -> int:
        """A number of things, from 1 on.

        Raises:
            CheckpointError: it is none.
        """
        value = self.get(key)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{self.where} says {key} {shown(value)}, not an integer from 1 on; mend it")
        return value

    def number(self, key: str) -> float:
        """A number above 0.

        Raises:
            CheckpointError: it is none.
        """
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise CheckpointError(f"{self.where} says {key} {shown(value)}, not a number above 0; mend it")
        return float(value)

    def said(self, *keys: str) -> None:
        """What these keys say, others say as well, or the model makes no use of it."""
        self._read.update(keys)

    def refuse(self, *keys: str) -> None:
        """Raises UnknownDecoder where one of these keys has a value, as no description has a place for it."""
        for key in keys:
            if (value := self.get(key)) not in (None, False):
                raise UnknownDecoder(f"{self.where} says {key} {shown(value)}")

    @property
    def unread(self) -> dict[str, Any]:
        """What was not read, but for what is in ``COMMON``."""
        left = self._values.keys() - self._read - COMMON.keys()
        return {key: self._values[key] for key in sorted(left) if not key.startswith("_")}

    def check_read(self) -> None:
        """To be called when all that is known was read.

        Raises:
            UnknownDecoder: a key that counts was not read.
        """
        for key, value in self.unread.items():
            if self._defaults is None or (key in self._defaults and value != self._defaults[key]):
                raise UnknownDecoder(f"{self.where} says {key} {shown(value)}, which no description of it reads")
            if key not in self._defaults and value not in (None, False) and any(word in key for word in _SOUND):
                warnings.warn(
                    f"{self.where} says {key} {shown(value)}, which its class does not know: it is ignored, as "
                    "transformers ignores it",
                    SpecdecWarning,
                    stacklevel=2,
                )


def _default(own: Any) -> Any:
    """The default of a field of a config's class; None where it has none."""
    if own.default is not MISSING:
        return own.default
    return None if own.default_factory is MISSING else own.default_factory()
