"""Published layouts of multi-token-prediction layers: in a model's checkpoint, or in a folder of their own.

A layer has two norms, a product that joins a token's embedding with the hidden state before it, a decoder layer of the
target's class, and a last norm. Layouts differ in names; the name of the product tells which layout it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from drafters.heads.layout import read_tensors
from drafters.heads.weights import FORMAT
from drafters.shared.weights import CONFIG, read_config
from specdec.decoder.names import Names
from specdec.decoder.weights.source import Source, TensorSource
from specdec.errors import ConfigError, shown

__all__ = [
    *("EMBEDDING", "HEAD", "HIDDEN", "JOIN", "LAST", "LAYOUTS", "TABLE"),
    *("MtpLayout", "MtpTensors", "find_mtp", "has_mtp", "mtp_names"),
]

EMBEDDING, HIDDEN, LAST, JOIN = "mtp.embedding", "mtp.hidden", "mtp.last", "mtp.join"
"""Parts around a layer: the norms of an embedding, of a hidden state and of the output, and the product."""
TABLE, HEAD = "mtp.table", "mtp.head"
"""A layer's own embedding and head, where they are not the model's."""
_DEEPEST = 64  # most tokens of a draft


@dataclass(frozen=True, kw_only=True)
class MtpLayout:
    """A published layout.

    Attributes:
        name: name of the layout.
        joins: pattern of the product's name; its group, if any, is the layer's index.
        renames: patterns of its names -> our names, of which the first match counts; tensors without a match do not
            belong to the layers. ``*`` as a layer's index stands for every layer.
        ignored: patterns of matching tensors that carry no further information.
        hidden_first: whether the product reads the hidden state first, then the embedding.
        repeated: whether one layer was trained for every depth; all rows of the text then pass it once per depth.
    """

    name: str
    joins: str
    renames: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...] = (
        r"layers\.\d+\.block\.(?:embed_tokens|shared_head\.head)\.weight",
        r".*rotary_emb\.inv_freq",
    )
    hidden_first: bool = False
    repeated: bool = False


_BEFORE = r"(?:model\.|language_model\.)*"
_NUMBERED = rf"{_BEFORE}(?:mtp\.)?layers\.(\d+)"
_SHARED = rf"{_BEFORE}mtp"
_MTP_LAYERS = rf"{_BEFORE}mtp_layers\.(\d+)"
_MTP_LAYERS_RENAMES = (
    (rf"{_MTP_LAYERS}\.token_layernorm\.(.+)", r"layers.\1.enorm.\2"),
    (rf"{_MTP_LAYERS}\.hidden_layernorm\.(.+)", r"layers.\1.hnorm.\2"),
    (rf"{_MTP_LAYERS}\.input_proj\.(.+)", r"layers.\1.eh_proj.\2"),
    (rf"{_MTP_LAYERS}\.final_layernorm\.(.+)", r"layers.\1.post_norm.\2"),
    (rf"{_MTP_LAYERS}\.(.+)", r"layers.\1.block.\2"),
)

LAYOUTS = (
    MtpLayout(
        name="numbered on behind the model's layers (DeepSeek-V3, GLM-4 MoE)",
        joins=rf"{_NUMBERED}\.eh_proj\.weight",
        renames=(
            (rf"{_NUMBERED}\.shared_head\.norm\.(.+)", r"layers.\1.post_norm.\2"),
            (rf"{_NUMBERED}\.(enorm|hnorm|eh_proj|post_norm)\.(.+)", r"layers.\1.\2.\3"),
            (rf"{_NUMBERED}\.(?:mtp_block\.|transformer_block\.|block\.)?(.+)", r"layers.\1.block.\2"),
        ),
    ),
    MtpLayout(
        name="one product for all layers (Mellum, Qwen3-Next, Qwen3.5)",
        joins=rf"{_SHARED}\.fc\.weight",
        renames=(
            (rf"{_SHARED}\.fc\.(.+)", r"layers.*.eh_proj.\1"),
            (rf"{_SHARED}\.pre_fc_norm_embedding\.(.+)", r"layers.*.enorm.\1"),
            (rf"{_SHARED}\.pre_fc_norm_hidden\.(.+)", r"layers.*.hnorm.\1"),
            (rf"{_SHARED}\.norm\.(.+)", r"layers.*.post_norm.\1"),
            (rf"{_SHARED}\.layers\.(\d+)\.(.+)", r"layers.\1.block.\2"),
        ),
    ),
    MtpLayout(
        name="speculators mtp",
        joins=r"mtp_layers\.(\d+)\.input_proj\.weight",
        renames=_MTP_LAYERS_RENAMES,
        repeated=True,
    ),
    MtpLayout(
        name="MiMo",
        joins=r"model\.mtp_layers\.(\d+)\.input_proj\.weight",
        renames=_MTP_LAYERS_RENAMES,
        hidden_first=True,
    ),
)
"""All known layouts, tried in this order."""


@dataclass(frozen=True)
class MtpTensors:
    """The multi-token-prediction layers of a folder or a file.

    Attributes:
        layout: their layout.
        layers: number of layers.
        source: their tensors.
        width: D, the width of the hidden states.
        hidden_first, repeated: see :class:`MtpLayout`.
        depth: number of tokens that they were published to draft; 0 if unknown.
        values: content of the folder's ``config.json``.
        folder: the folder, or the file.
        called: what a file calls them; None for our names, ``layers.0.{enorm, hnorm, eh_proj, post_norm, block}``.
    """

    layout: str
    layers: int
    source: Source
    width: int
    hidden_first: bool
    repeated: bool
    depth: int
    values: dict[str, Any]
    folder: Path
    called: Names | None = None

    @property
    def sparse(self) -> set[int]:
        """The layers that have experts, which only their tensors tell."""
        first = 0 if self.called is None else self.called.first
        found = (re.match(r"\w+\.(\d+)\..*(?:\.experts\.|_exps\.)", name) for name in self.source.shapes)
        return {int(own[1]) - first for own in found if own}


def mtp_names(names: Iterable[str]) -> tuple[MtpLayout, dict[str, list[str]]] | None:
    """The layout of a checkpoint's layers, and each tensor's names among ours; None where there are no such layers."""
    known = sorted(names)
    for layout in LAYOUTS:
        joined = [found for name in known if (found := re.fullmatch(layout.joins, name))]
        if joined:
            stems = tuple(found.string[: found.end(1)] + "." for found in joined if found.re.groups)
            own = [name for name in known if not stems or name.startswith(stems)]
            return layout, _ours(layout, own, [int(found[1]) for found in joined if found.re.groups])
    return None


def _ours(layout: MtpLayout, names: list[str], numbers: list[int]) -> dict[str, list[str]]:
    """Our names of the layers' tensors; ``numbers``: the file's indices of layers, empty where all share a product."""
    renamed = dict[str, list[str]]()
    for name in names:
        pattern = next((pattern for pattern in layout.renames if re.fullmatch(pattern[0], name)), None)
        if pattern is not None:
            renamed[name] = [re.sub(*pattern, name)]
    if not numbers:
        numbers = sorted({int(found[1]) for (own,) in renamed.values() if (found := re.match(r"layers\.(\d+)", own))})
    places = {str(number): place for place, number in enumerate(sorted(numbers))}
    placed = dict[str, list[str]]()
    for name, (own,) in renamed.items():
        _, number, rest = own.split(".", 2)
        wanted = [*places.values()] if number == "*" else [places[number]] if number in places else []
        ours = [f"layers.{place}.{rest}" for place in wanted]
        if ours and not any(re.fullmatch(pattern, ours[0]) for pattern in layout.ignored):
            placed[name] = ours
    return placed


def has_mtp(folder: Path) -> bool:
    """Whether a folder's safetensors have such layers; this reads only names."""
    return mtp_names(_places(folder)) is not None


def _places(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that has it."""
    files = dict[str, Path]()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            files |= dict.fromkeys(opened.keys(), path)
    return files


def find_mtp(folder: Path) -> MtpTensors:
    """Read the layers in a folder, a model's or one of their own; call this within ``reading``.

    Raises:
        ConfigError: the folder has no such layers, or only of unknown kinds.
    """
    if not folder.is_dir():
        raise ConfigError("there is no such folder")
    values = read_config(folder)
    told = values.get("speculators_model_type", "mtp") if values.get("format") != FORMAT else values.get("kind")
    if told != "mtp":
        raise ConfigError(f"its {CONFIG} says that it is a head of kind {shown(told)}")
    layout, tensors = _read(folder)
    layers = 1 + max((int(name.split(".")[1]) for name in tensors), default=-1)
    for place in range(layers):
        for part in ("enorm", "hnorm", "eh_proj"):
            if f"layers.{place}.{part}.weight" not in tensors:
                raise ConfigError(f"layer {place} of format {layout.name!r} has no {part!r} weight among its tensors")
    shape = list(tensors["layers.0.eh_proj.weight"].shape)
    if len(shape) != 2 or shape[1] != 2 * shape[0]:
        raise ConfigError(f"tensor 'layers.0.eh_proj.weight' is {shape}; it joins two vectors of a width to one")
    for name, tensor in sorted(tensors.items()):  # fp8 has no such numbers, and is refused for what it is
        if tensor.dtype.itemsize > 1 and not bool(tensor.isfinite().all()):
            raise ConfigError(f"{name} holds NaN or infinity")
    hidden_first = bool(values.get("mtp_hidden_states_first", values.get("hidden_first", layout.hidden_first)))
    repeated = bool(values.get("repeated", layout.repeated)) and layers == 1
    methods = (values.get("speculators_config") or {}).get("proposal_methods") or [{}]
    depth = values.get("depth", methods[0].get("speculative_tokens", 0))
    if type(depth) is not int or not 0 <= depth <= _DEEPEST:
        raise ConfigError(f"its config says that it drafts {shown(depth)} tokens; it must be in [0, {_DEEPEST}]")
    source = TensorSource(tensors, repr(str(folder)))
    return MtpTensors(layout.name, layers, source, shape[0], hidden_first, repeated, depth, values, folder)


def _read(folder: Path) -> tuple[MtpLayout, dict[str, torch.Tensor]]:
    """Read the layers' tensors; a model's other tensors are skipped."""
    files = _places(folder)
    if not files:  # a pickle can only be read as a whole
        tensors: Mapping[str, torch.Tensor] = read_tensors(folder)
        layout, ours = _known(mtp_names(tensors), tensors)
        return layout, {own: tensors[name] for name, owns in ours.items() for own in owns}
    layout, ours = _known(mtp_names(files), files)
    found = dict[str, torch.Tensor]()
    for path in {files[name] for name in ours}:
        with safe_open(path, framework="pt") as opened:
            for name in (name for name in ours if files[name] == path):
                found |= dict.fromkeys(ours[name], opened.get_tensor(name))
    return layout, found


def _known(found: tuple[MtpLayout, dict[str, list[str]]] | None, names: Iterable[str]) -> Any:
    if found is None:
        some = ", ".join(sorted(names)[:4])
        raise ConfigError(
            f"it has no multi-token-prediction layers: none of its tensors ({some}, ...) joins an embedding with a "
            "hidden state, as layers.N.eh_proj.weight, mtp.fc.weight or mtp_layers.N.input_proj.weight do"
        )
    return found
