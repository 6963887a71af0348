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
from drafters.heads.sizes import Sizes, taps_in
from drafters.heads.weights import FORMAT
from drafters.shared.weights import load_tensors, read_config
from specdec.errors import ConfigError, check_choice, shown
from specdec.settings.files import read_object
from specdec.settings.parsing import parse
from specdec.target import FINAL

__all__ = ["Found", "find"]

Names = Mapping[str, torch.Tensor]


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
    sizes = Sizes(values, tensors, own, vocab_size)
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


def _chain(sizes: Sizes) -> ChainConfig:
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
        taps=taps_in(sizes) if fused else [FINAL],
        fused=fused,
        norm_inputs=norms,  # type: ignore[arg-type]
        norm_before_residual=bool(sizes.told("norm_before_residual", False)),
        norm_output=bool(sizes.told("norm_output", False)),
        mask_token=_mask(sizes) if sizes.own.kind == "peagle" else 0,
    )


def _mask(sizes: Sizes) -> int:
    if (token := sizes.told("mask_token")) is None:
        raise ConfigError(
            f"its config has no {' or '.join(sizes.own.values['mask_token'])}, the token that stands for unknown ones"
        )
    return int(token)


def _block(sizes: Sizes) -> BlockConfig:
    fields, taps = sizes.common(), taps_in(sizes)
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


def _conv_group(sizes: Sizes, width: int, kernel: int) -> int:
    """The number of channels that share a kernel, by the number of kernels that the projection returns."""
    name = "layers.0.attention_conv.kernel_projection.weight"
    groups, left = divmod(sizes.shape(name)[0], 2 * kernel)
    if left or not groups or width % groups:
        raise ConfigError(f"tensor {name!r} makes {sizes.shape(name)[0]} values; expected 2 x {kernel} each group")
    return width // groups
