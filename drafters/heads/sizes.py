"""Sizes and switches of a published head: from its tensors' shapes, with which its config must agree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from drafters.heads.formats import Format
from specdec.errors import ConfigError, shown

__all__ = ["Sizes", "taps_in"]

_TAPS = 3  # EAGLE-3's default


class Sizes:
    """Sizes of one head, read from its tensors and config under our names."""

    def __init__(
        self, values: Mapping[str, Any], tensors: dict[str, torch.Tensor], own: Format, target_vocab: int
    ) -> None:
        self.own, self.tensors, self._values = own, tensors, values
        inner = next((name for name in own.inner if name in values), None)
        self._inner: Mapping[str, Any] = values if inner is None else values[inner]
        if not isinstance(self._inner, Mapping):
            raise ConfigError(f"{inner} in its config is {shown(self._inner)}; it must be a section")
        self._target_vocab = target_vocab

    def told(self, name: str, default: Any = None) -> Any:
        """The config's value of one of our fields, under the format's name for it."""
        for place in self.own.values.get(name, ()):
            found: Any = self._values
            for part in place.split("."):
                found = found.get(part) if isinstance(found, Mapping) else None
            if found is not None:
                return found
        return self.own.defaults.get(name, default)

    def at_top(self, name: str) -> Any:
        """The config's value under a name outside of all sections."""
        return self._values.get(name)

    def layer(self, name: str, default: Any = None) -> Any:
        """A value from the config's section about layers."""
        found = self._inner.get(name)
        return default if found is None else found

    def shape(self, name: str, dims: int = 2) -> tuple[int, ...]:
        """The shape of a tensor that must be present."""
        if name not in self.tensors:
            raise ConfigError(f"tensor {name!r} is missing, which a head of format {self.own.name} has")
        shape = tuple(self.tensors[name].shape)
        if len(shape) != dims or 0 in shape:
            raise ConfigError(f"tensor {name!r} is {list(shape)}; it must have {dims} dimensions, none of them 0")
        return shape

    def has(self, name: str) -> bool:
        return name in self.tensors

    def drop(self, name: str) -> None:
        """Leave a tensor out."""
        self.tensors.pop(name, None)

    def common(self) -> dict[str, Any]:
        """The fields that all heads have."""
        width, query_in = self._width()
        layers = len({found[1] for name in self.tensors if (found := re.match(r"layers\.(\d+)\.", name))})
        vocabulary = self._vocabulary(width)
        return {
            "kind": self.own.kind,
            "hidden_size": self._hidden_size(width),
            "width": width,
            "layers": layers,
            **self._attention(query_in),
            "intermediate_size": self.shape("layers.0.mlp.gate_proj.weight")[0],
            "norm_eps": float(self.layer("rms_norm_eps", 1e-6)),
            "activation": str(self.layer("hidden_act", self.layer("hidden_activation", "silu"))),
            "rope": _rope(self._inner),
            "positions": self.layer("max_position_embeddings", 4096),
            "windows": self._windows(layers),
            **vocabulary,
            "attention_bias": self.has("layers.0.self_attn.q_proj.bias"),
            "output_bias": self.has("layers.0.self_attn.o_proj.bias"),
            "mlp_bias": self.has("layers.0.mlp.gate_proj.bias"),
            "fc_bias": self.has("fc.bias"),
            "qk_norm": self.has("layers.0.self_attn.q_norm.weight"),
            "depth": self._depth(),
            "target_layers": self.told("target_layers", 0),
            "target_name": str(self.told("target_name", "")),
        }

    def _width(self) -> tuple[int, int]:
        """The width of the hidden states, and the input width of the first layer's queries."""
        width = self.shape("layers.0.self_attn.o_proj.weight")[0]
        inputs = self.shape("layers.0.self_attn.q_proj.weight")[1]
        wanted = 2 * width if self.own.kind in ("eagle3", "peagle") else width
        if inputs != wanted:
            raise ConfigError(
                f"tensor 'layers.0.self_attn.q_proj.weight' reads {inputs} values; a head of format {self.own.name} "
                f"that is {width} wide has {wanted} there"
            )
        return width, inputs

    def _hidden_size(self, width: int) -> int:
        """The target's hidden size."""
        if (told := self.told("hidden_size")) is not None:
            return int(told)
        if self.own.kind == "eagle" or not self.has("fc.weight"):
            return width
        inputs, taps = self.shape("fc.weight")[1], len(taps_in(self)) or _TAPS
        if inputs % taps:
            raise ConfigError(
                f"tensor 'fc.weight' reads {inputs} values, which are no {taps} hidden states of the target: its "
                "config names other layers than it was trained with, or lacks target_hidden_size"
            )
        return inputs // taps

    def _attention(self, inputs: int) -> dict[str, int]:
        """Numbers of heads and their width; a config may omit the width, and the tensors must agree."""
        q, k = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"
        outputs, keys = self.shape(q)[0], self.shape(k)[0]
        if self.has("layers.0.self_attn.q_norm.weight"):
            size = self.shape("layers.0.self_attn.q_norm.weight", 1)[0]
        else:
            heads = self.layer("num_attention_heads")
            if type(heads) is not int or heads < 1 or (outputs % heads and not self.layer("head_dim")):
                raise ConfigError(
                    f"num_attention_heads in its config is {shown(heads)}; it must divide {outputs} outputs of {q!r}"
                )
            size = self.layer("head_dim") or outputs // heads
        if type(size) is not int or size < 1 or outputs % size or keys % size:
            raise ConfigError(
                f"tensors {q!r} and {k!r} have {outputs} and {keys} outputs, which are no heads of {shown(size)} each; "
                "head_dim or num_attention_heads in its config is of another model"
            )
        for name, found in (("num_attention_heads", outputs // size), ("num_key_value_heads", keys // size)):
            if (told := self.layer(name)) not in (None, found):
                raise ConfigError(
                    f"{name} in its config is {shown(told)}, and the tensors have {found} of {size} each ({q!r}, {k!r})"
                )
        return {"heads": outputs // size, "key_heads": keys // size, "head_dim": size}

    def _windows(self, layers: int) -> list[int]:
        kinds, window = self.layer("layer_types"), self.layer("sliding_window")
        if not isinstance(kinds, list) or window is None:
            return []
        kinds = (kinds * layers)[:layers] if kinds else []
        windows = [window if kind == "sliding_attention" else 0 for kind in kinds]
        return windows if any(windows) else []

    def _depth(self) -> int:
        """The number of tokens that the config lets the head draft; 0 where the config has none."""
        told = self.told("depth")
        methods = (self._values.get("speculators_config") or {}).get("proposal_methods") or [{}]
        found = told if told is not None else methods[0].get("speculative_tokens", 0)
        return found if type(found) is int and found > 0 else 0

    def _vocabulary(self, width: int) -> dict[str, Any]:
        """The sizes of the target's and the draft vocabulary; rows of tensors are sorted by token."""
        own_embedding, own_head = self.has("embed_tokens.weight"), self.has("lm_head.weight")
        sizes = {
            "embed_tokens.weight": self.shape("embed_tokens.weight")[0] if own_embedding else 0,
            "t2d": self.shape("t2d", 1)[0] if self.has("t2d") else 0,
        }
        known = [(name, size) for name, size in sizes.items() if size]
        vocab = known[0][1] if known else self.layer("vocab_size", self._target_vocab)
        if known and any(size != vocab for _, size in known):
            raise ConfigError(f"tensors {sizes} are of vocabularies of different sizes")
        draft = self._draft_vocabulary(vocab, own_head)
        if self.own.kind == "eagle" and own_head:  # EAGLE has no head of its own; the file has a copy of the target's
            del self.tensors["lm_head.weight"]
            own_head = False
        return {"vocab_size": vocab, "draft_vocab": draft, "own_embedding": own_embedding, "own_head": own_head}

    def _draft_vocabulary(self, vocab: int, own_head: bool) -> int:
        """Read ``d2t``, the offset of each draft token, and ``t2d``, a mask of the drafted tokens, where present."""
        offsets, drafted = self.tensors.pop("d2t", None), self.tensors.pop("t2d", None)
        rows = self.shape("lm_head.weight")[0] if own_head else 0
        if offsets is None:
            if own_head and rows != vocab:
                raise ConfigError(
                    f"tensor 'd2t' is missing: 'lm_head.weight' has {rows} rows and the vocabulary {vocab} tokens, so "
                    "it must say which token each row is"
                )
            return 0
        if own_head and len(offsets) != rows:
            raise ConfigError(f"tensor 'd2t' has {len(offsets)} entries, and 'lm_head.weight' {rows} rows")
        tokens = _tokens_of(offsets, drafted, vocab)
        distinct = len({*tokens.tolist()})
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocab or distinct < len(tokens):
            raise ConfigError(
                f"tensor 'd2t' leads to tokens in [{int(tokens.min())}, {int(tokens.max())}], {distinct} of "
                f"{len(tokens)} distinct; they must be distinct, and in [0, {vocab})"
            )
        order = tokens.argsort()
        if len(tokens) == vocab:  # the draft vocabulary has every token, so only the rows' order matters
            vocabulary = 0
        else:
            self.tensors["draft_tokens"], vocabulary = tokens[order], len(tokens)
        for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
            if name in self.tensors:
                self.tensors[name] = self.tensors[name][order]
        return vocabulary


def _tokens_of(offsets: torch.Tensor, drafted: torch.Tensor | None, vocab: int) -> torch.Tensor:
    """[d] int64 the token of each row: its index plus its offset; or its entry, where only that agrees with ``t2d``."""
    if offsets.ndim != 1 or offsets.is_floating_point() or not len(offsets):
        raise ConfigError(f"tensor 'd2t' is {offsets.dtype} of shape {list(offsets.shape)}; it holds whole numbers")
    offsets = offsets.long()
    tokens = offsets + torch.arange(len(offsets))
    if drafted is not None and not bool(drafted.any()):
        raise ConfigError(
            "tensor 't2d' marks no token, so the draft vocabulary was never filled; take the file as it was trained"
        )
    if drafted is None:
        if len(tokens) < vocab and not bool(offsets.any()):
            raise ConfigError(
                f"tensor 'd2t' is zero throughout, so the draft vocabulary of {len(tokens)} tokens was never filled; "
                "take the file as it was trained"
            )
        return tokens
    known = drafted.bool().nonzero()[:, 0]
    for found in (tokens, offsets):
        if torch.equal(found.sort().values, known):
            return found
    raise ConfigError(
        f"tensors 'd2t' and 't2d' contradict each other: the first names {len(tokens)} tokens, and the second other "
        f"ones, {len(known)} of them; the file is broken"
    )


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary positions as transformers 5 writes them; those of transformers 4 are converted."""
    found = values.get("rope_parameters")
    if isinstance(found, Mapping) and isinstance(found.get("sliding_attention"), Mapping):
        found = found["sliding_attention"]  # all layers of a head share these
    rope = dict(found if isinstance(found, Mapping) else values.get("rope_scaling") or {})
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", values.get("rope_theta") or 10000.0)
    return rope


def taps_in(sizes: Sizes) -> list[int]:
    """The tapped layers that a config names, by our count; empty where it names none."""
    own = sizes.own
    inner = _layer_numbers(sizes.told("taps"), own.values["taps"][0], own.layer_shift)
    for name in own.unshifted:
        outer = _layer_numbers(sizes.at_top(name), name, 0)
        if inner and outer and inner != outer:
            raise ConfigError(
                f"{name} in its config names hidden layers {outer}, and {own.values['taps'][0]}, which counts outputs "
                f"of layers from 0, names {inner}; delete the wrong one"
            )
        inner = inner or outer
    return inner


def _layer_numbers(told: Any, name: str, shift: int) -> list[int]:
    """The tapped layers under a name of the config, by our count; empty where it has none."""
    told = [] if told is None else told
    if not isinstance(told, list) or any(type(layer) is not int for layer in told):
        raise ConfigError(f"{name} in its config is {shown(told)}; it must be a list of layers")
    return [layer + shift for layer in told]
