"""Reading a folder of a head: its format, its tensors under our names, and its sizes and switches.

A config that counts layers or heads may describe another model. So names are translated first, sizes and switches then
follow from the tensors' shapes, and the config must agree with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafters.heads.config import BlockConfig, ChainConfig, HeadConfig
from drafters.heads.formats import FORMATS, SAVED, SPECULATORS, Format
from drafters.heads.weights import FORMAT
from drafters.shared.weights import load_tensors, read_config
from specdec.errors import ConfigError, check_choice, shown
from specdec.settings.files import read_object
from specdec.settings.parsing import parse
from specdec.target import FINAL

__all__ = ["Found", "find"]

Names = Mapping[str, torch.Tensor]
_TAPS = 3  # EAGLE-3's default


@dataclass(frozen=True)
class Found:
    """The content of a folder: its format, our config, and the tensors by our names."""

    format: Format
    config: HeadConfig
    tensors: dict[str, torch.Tensor]


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder; call this within ``reading``. An index decides which file holds which."""
    paths = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not paths:
        raise ConfigError("it holds neither *.safetensors nor pytorch_model.bin")
    indices = sorted(folder.glob(f"*{paths[0].suffix}.index.json"))
    if indices:
        return _indexed(indices[0])
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        tensors = load_tensors(path)
        if twice := sorted(found.keys() & tensors.keys()):
            raise ConfigError(
                f"{path.name} holds {twice[0]!r}, which another file beside it holds as well; delete the one that is "
                "left over"
            )
        found |= tensors
    return found


def _indexed(index: Path) -> dict[str, torch.Tensor]:
    """The tensors that an index names, each from its file."""
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in places.values()
    ):
        raise ConfigError(f"{index.name} holds no weight_map from tensors to files beside it")
    found: dict[str, torch.Tensor] = {}
    for file in sorted({*places.values()}):
        tensors = load_tensors(index.with_name(file))
        wanted = [name for name, place in places.items() if place == file]
        if missing := [name for name in wanted if name not in tensors]:
            raise ConfigError(f"{index.name} says that {file} holds {missing[0]!r}, and it does not")
        found |= {name: tensors[name] for name in wanted}
    return found


def find(folder: Path, *, vocab_size: int = 0) -> Found:
    """Read a folder in any known format; call this within ``reading``.

    Args:
        folder: folder with ``config.json`` and the tensors.
        vocab_size: the target's vocabulary size, for heads whose files lack it; 0 if unknown.

    Raises:
        ConfigError: the format is unknown, a tensor or a value is missing, or shapes contradict each other.
    """
    values, tensors = read_config(folder), read_tensors(folder)
    if values.get("format") == FORMAT:
        return _converted(values, tensors)
    own = _format_of(values, tensors)
    tensors = _renamed(tensors, own)
    sizes = _Sizes(values, tensors, own, vocab_size)
    config = _block(sizes) if own.drafter == "dflash" else _chain(sizes)
    return Found(own, config, sizes.tensors)


def _converted(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Found:
    fields = {name: value for name, value in values.items() if name != "format"}
    kind = check_choice("kind of head", str(fields.get("kind")), FORMATS)
    shape = BlockConfig if FORMATS[kind].drafter == "dflash" else ChainConfig
    config: HeadConfig = parse(shape, fields, where="head")
    return Found(FORMATS[kind], config, tensors)


def _format_of(values: Mapping[str, Any], tensors: Names) -> Format:
    """The format, by a speculators config or else by tensors that only one format has."""
    if (told := values.get("speculators_model_type")) is not None:
        return SPECULATORS[check_choice("speculators_model_type", str(told), SPECULATORS)]
    names = {_plain(name) for name in tensors}
    if any(name.startswith("markov_head.") for name in names):
        return FORMATS["dspark"]
    if any(name.startswith("candidate_selector.") for name in names):
        return FORMATS["dflash2"]
    if names & {"hidden_norm.weight", "encoder.fc.weight", "context_norm.weight"}:
        return FORMATS["dflash"]
    if "mask_hidden" in names:
        return FORMATS["peagle"]
    if names & {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}:
        return FORMATS["eagle3"]
    if "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names:
        return FORMATS["eagle"]
    raise ConfigError(
        f"its tensors ({', '.join(sorted(names)[:4])}, ...) are of no head that is known: {', '.join(FORMATS)}, or a "
        f"config with speculators_model_type {', '.join(SPECULATORS)}"
    )


def _plain(name: str) -> str:
    """A name without the prefixes that training loops add."""
    return re.sub(SAVED[0], SAVED[1], name) if re.fullmatch(SAVED[0], name) else name


def _renamed(tensors: Names, own: Format) -> dict[str, torch.Tensor]:
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        plain = name
        for pattern, ours in own.renames:
            if re.fullmatch(pattern, plain):
                plain = re.sub(pattern, ours, plain)
        if any(re.fullmatch(pattern, plain) for pattern in own.ignored):
            continue
        if plain in renamed:
            raise ConfigError(f"it holds {plain!r} twice, once as {name!r}")
        renamed[plain] = tensor
    return renamed


class _Sizes:
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
        inputs, taps = self.shape("fc.weight")[1], len(_taps(self)) or _TAPS
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


def _taps(sizes: _Sizes) -> list[int]:
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


def _chain(sizes: _Sizes) -> ChainConfig:
    fields = sizes.common()
    if sizes.own.kind == "eagle":
        width = fields["width"]
        if (shape := sizes.shape("fc.weight")) != (width, 2 * width):
            raise ConfigError(f"tensor 'fc.weight' is {list(shape)}, expected {[width, 2 * width]}")
        return ChainConfig(**fields, taps=[FINAL])
    fused = bool(sizes.told("fused", True))
    if fused and not sizes.has("fc.weight"):
        raise ConfigError("tensor 'fc.weight' is missing, which joins the target's hidden states")
    if not fused:  # vLLM and SGLang pass over such a tensor
        sizes.drop("fc.weight")
    for told, name in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if fused and sizes.at_top(told) is True and not sizes.has(name):
            raise ConfigError(f"tensor {name!r} is missing, and {told} in its config says that the head has it")
    norms = "whole" if sizes.has("input_norm.weight") else "each" if sizes.has("fc_norm.0.weight") else "none"
    return ChainConfig(
        **fields,
        taps=_taps(sizes) if fused else [FINAL],
        fused=fused,
        norm_inputs=norms,  # type: ignore[arg-type]
        norm_before_residual=bool(sizes.told("norm_before_residual", False)),
        norm_output=bool(sizes.told("norm_output", False)),
        mask_token=_mask(sizes) if sizes.own.kind == "peagle" else 0,
    )


def _mask(sizes: _Sizes) -> int:
    if (token := sizes.told("mask_token")) is None:
        raise ConfigError(
            f"its config has no {' or '.join(sizes.own.values['mask_token'])}, the token that stands for unknown ones"
        )
    return int(token)


def _block(sizes: _Sizes) -> BlockConfig:
    fields, taps = sizes.common(), _taps(sizes)
    if type(size := sizes.told("block_size")) is not int:
        raise ConfigError(f"block_size in its config is {shown(size)}; it must be the rows of a block")
    rank = sizes.shape("markov_head.markov_w1.weight")[1] if sizes.has("markov_head.markov_w1.weight") else 0
    markov = "gated" if sizes.has("markov_head.gate_proj.weight") else "vanilla"
    markov = "rnn" if sizes.has("markov_head.joint_proj.weight") else markov
    confidence = "none"
    if sizes.has("confidence_head.proj.weight"):
        inputs = sizes.shape("confidence_head.proj.weight")[1]
        confidence = "hidden" if inputs == fields["width"] else "markov"
    conv = "layers.0.attention_conv.base_kernel"
    kernel = sizes.shape(conv, 3)[1] if sizes.has(conv) else 0
    selector = "candidate_selector.predecessor_codebook"
    return BlockConfig(
        **fields,
        taps=taps,
        block_size=size,
        mask_token=_mask(sizes),
        from_anchor=bool(sizes.told("from_anchor", False)),
        window_causal=not sizes.told("sees_later", True),
        window_from_anchor=bool(sizes.own.inner),
        final_normed=not sizes.own.inner,
        markov=(sizes.told("markov", markov) if rank else "none"),
        markov_rank=rank,
        confidence=confidence,  # type: ignore[arg-type]
        conv_kernel=kernel,
        conv_group=_conv_group(sizes, fields["width"], kernel) if kernel else 0,
        selector_rank=sizes.shape(selector)[1] if sizes.has(selector) else 0,
        selector_top=sizes.told("selector_top", 16) if sizes.has(selector) else 0,
    )


def _conv_group(sizes: _Sizes, width: int, kernel: int) -> int:
    """The number of channels that share a kernel, by the number of kernels that the projection returns."""
    name = "layers.0.attention_conv.kernel_projection.weight"
    groups, left = divmod(sizes.shape(name)[0], 2 * kernel)
    if left or not groups or width % groups:
        raise ConfigError(f"tensor {name!r} makes {sizes.shape(name)[0]} values; expected 2 x {kernel} each group")
    return width // groups
