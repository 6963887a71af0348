"""Medusa's heads: small residual blocks on the last hidden state, each for one position further ahead.

A checkpoint is a folder in the published layout: ``medusa_lm_head.safetensors`` (or ``.pt``) and ``config.json``. Two
    more
layouts are read: a merged model, whose weights include the heads under ``medusa_head.``, and vLLM's, with
``blocks.0.layers.0.weight``, ``lm_heads.0.weight`` and ``token_map``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from safetensors import safe_open
from torch import nn

from drafters.shared.target_weights import head_weight
from drafters.shared.vocabulary import check_draft_tokens
from drafters.shared.weights import (
    CONFIG,
    WeightsConfig,
    load_strictly,
    load_tensors,
    read_config,
    reading,
    save_weights,
)
from specdec.errors import ConfigError, shown
from specdec.settings.validation import check_fields
from specdec.target import Target

__all__ = ["HeadsConfig", "MedusaHeads", "with_roots"]

_WEIGHTS, _PICKLED = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
_MERGED = "medusa_head."
Few = Annotated[int, Ge(1), Le(64), "an integer from 1 to 64"]  # number of heads, or blocks of a head
_NAME = re.compile(r"(\d+)\.(\d+)(\.linear)?\.(weight|bias)")
_BLOCK, _HEAD = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), re.compile(r"lm_heads\.(\d+)\.weight")
_TOKENS, _MAP = "draft_tokens", "token_map"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsConfig(WeightsConfig):
    """The config of a set of heads.

    Attributes:
        heads: K; head k guesses the token k + 1 positions behind the token whose hidden state it reads.
        layers: residual blocks of a head.
        hidden_size, vocab_size, target: see :class:`drafters.shared.weights.WeightsConfig`.
        sees_root: whether a head's first block also reads the embedding of the token that the target chose from the
            hidden state, scaled to a mean square of 1. The first of Hydra's heads does so (Ankner et al. 2024, arXiv
            2402.05109), as a hidden state does not show which token was drawn from it.
        own_head: whether each head ends in a [V, D] matrix of its own; otherwise in the target's.
        draft_vocab: d, size of the draft vocabulary, see :mod:`drafters.shared.vocabulary`; 0 for all tokens.
        accuracy: for each head, how often its guess of each rank was right on held-out text; for information, empty if
            unknown.
    """

    heads: Few
    layers: Few
    sees_root: bool = False
    own_head: bool = False
    draft_vocab: Annotated[int, Ge(0), "an integer >= 0"] = 0
    accuracy: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_fields(self, "heads.")
        if self.draft_vocab > self.vocab_size:
            raise ConfigError(
                f"heads.draft_vocab is {shown(self.draft_vocab)}; it must be in [0, {shown(self.vocab_size)}]"
            )

    @property
    def input_size(self) -> int:
        """The input width of a head."""
        return self.hidden_size * (1 + self.sees_root)

    @property
    def ranks(self) -> int:
        """The number of tokens that a head ranks."""
        return self.draft_vocab or self.vocab_size


class ResBlock(nn.Module):
    """x + SiLU(W i + b), where x is the first part of the input i; mostly x is all of i."""

    def __init__(self, size: int, seen: int) -> None:
        super().__init__()
        self.linear = nn.Linear(seen, size)

    def forward(self, brought: torch.Tensor) -> torch.Tensor:
        return brought[..., : self.linear.out_features] + F.silu(self.linear(brought))


class MedusaHeads(nn.ModuleList):
    """K heads; parameter names are the published ones, ``{head}.{layer}.linear.weight`` and ``{head}.{layers}.weight``.

    Example: with D = 192 and shared matrices, 3 heads of one block have 3 (D^2 + D) = 111,168 weights.
    """

    draft_tokens: torch.Tensor | None  # [d] int64, ascending

    def __init__(self, config: HeadsConfig) -> None:
        size = config.hidden_size
        super().__init__(
            nn.Sequential(
                *(ResBlock(size, size if layer else config.input_size) for layer in range(config.layers)),
                *([nn.Linear(size, config.ranks, bias=False)] if config.own_head else []),
            )
            for _ in range(config.heads)
        )
        self.config = config
        self.register_buffer(_TOKENS, torch.arange(config.draft_vocab) if config.draft_vocab else None)

    def forward(self, brought: torch.Tensor) -> list[torch.Tensor]:
        """Each head's logits, if it has its own matrix; otherwise the states that the target's head reads.

        ``brought`` are hidden states [..., D]; for heads that see the root, :func:`with_roots` makes them.
        """
        return [head(brought) for head in self]

    def seeing_root(self) -> MedusaHeads:
        """Heads with the same results that can learn to use the root: its weights start at 0."""
        if self.config.sees_root:
            return self
        heads = MedusaHeads(replace(self.config, sees_root=True))
        weights, size = self.state_dict(), self.config.hidden_size
        for head in range(self.config.heads):
            name = f"{head}.0.linear.weight"
            weights[name] = F.pad(weights[name], (0, size))
        heads.load_state_dict(weights)
        return heads

    def start_from(self, target: Target) -> None:
        """Set initial weights: every head repeats the target's own next token."""
        weight = head_weight(target, self.draft_tokens) if self.config.own_head else None
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if ".linear." in name:
                    parameter.zero_()
                elif weight is not None:
                    parameter.copy_(weight)

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write weights and config, each to a temporary file first, so that a full disk leaves the earlier files whole.

        Args:
            folder: the folder, created if missing.
            dtype: dtype of the weights in the file; None keeps each weight's own.

        Raises:
            CheckpointError: the files could not be written.
        """
        own = self.config
        values = {"medusa_num_heads": own.heads, "medusa_num_layers": own.layers, **asdict(own)}
        save_weights(Path(folder), _WEIGHTS, self.state_dict(), values, what="the heads", dtype=dtype)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> MedusaHeads:
        """Load a folder of heads or a merged model; the tensors decide the number of heads.

        The published 7B config has the number 2 where the file has 5 heads, so that number is ignored.

        Raises:
            CheckpointError: the folder has no heads, or tensors that are not a complete set of heads.
        """
        folder = Path(folder)
        remedy = f"it takes {CONFIG} beside {_WEIGHTS}, {_PICKLED} or a model's *.safetensors with {_MERGED}* in it"
        with reading("Medusa heads", folder, remedy):
            values = read_config(folder)
            tensors = _published(_tensors(folder), values)
            config = config_of(tensors, values)
            with torch.device("meta"):  # a bias can claim any size
                heads = cls(config)
        load_strictly(heads, tensors, folder, "a set of Medusa heads")
        check_draft_tokens(heads.draft_tokens, heads.config.vocab_size, folder)
        return heads


def with_roots(hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """[..., 2 D] hidden states with the scaled embeddings of the roots, for heads that see the root."""
    return torch.cat((hidden, F.rms_norm(embedded, embedded.shape[-1:]).to(hidden)), -1)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The heads' tensors by name; a merged model's other tensors are skipped, and their prefix is removed."""
    for name in (_WEIGHTS, _PICKLED):
        if (folder / name).exists():
            tensors = load_tensors(folder / name)
            return {name.removeprefix(_MERGED): tensor for name, tensor in tensors.items()}
    tensors_of_heads: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            alone = any(_BLOCK.fullmatch(name.removeprefix("medusa_heads.")) for name in names)
            tensors_of_heads |= {
                name.removeprefix("medusa_heads.").removeprefix(_MERGED): file.get_tensor(name)
                for name in names
                if alone or name.startswith(_MERGED)
            }
    return tensors_of_heads


def _published(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors by their published names; those of vLLM's layout are renamed.

    In vLLM's layout, blocks may lack biases, heads that equal the target's are stored once (``original_lm_head``), and
    ``token_map`` lists the draft vocabulary in any order.
    """
    blocks = {name: part for name in tensors if (part := _BLOCK.fullmatch(name))}
    if not blocks:
        return dict(tensors)
    layers = 1 + max(int(part[2]) for part in blocks.values())
    tokens = tensors.get(_MAP)
    order = None if tokens is None else tokens.long().argsort()
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if (part := blocks.get(name)) is not None:
            renamed[f"{part[1]}.{part[2]}.linear.{part[3]}"] = tensor
            renamed.setdefault(f"{part[1]}.{part[2]}.linear.bias", tensor.new_zeros(len(tensor)))
        elif values.get("original_lm_head") and (name == "lm_head.weight" or _HEAD.fullmatch(name)):
            continue
        elif (head := _HEAD.fullmatch(name)) is not None:
            is_whole = tokens is None or order is None or len(tensor) > len(tokens)
            rows = order if not is_whole else None if tokens is None else tokens.long().sort().values
            renamed[f"{head[1]}.{layers}.weight"] = tensor if rows is None else tensor[rows]
        elif name == _MAP:
            renamed[_TOKENS] = tensor.long().sort().values
        else:
            renamed[name] = tensor
    return renamed


def config_of(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> HeadsConfig:
    """The config of a set of heads, from the tensors' names and shapes, and the fingerprint in ``config.json``, if any.

    Raises:
        ConfigError: the tensors are not heads, or have another number of layers than ``config.json``.
    """
    parts = {name: _NAME.fullmatch(name) for name in tensors if name != _TOKENS}
    strange = [name for name, part in parts.items() if part is None]
    if strange:
        raise ConfigError(f"{strange[0]!r} is none of theirs")
    blocks = [part for part in parts.values() if part is not None and part[3]]
    if not blocks:
        raise ConfigError("no tensor is called {head}.{layer}.linear.weight")
    heads, layers = (len({part[group] for part in blocks}) for group in (1, 2))
    if (counted := values.get("medusa_num_layers", layers)) != layers:
        raise ConfigError(f"{CONFIG} counts {shown(counted)} layers, the tensors {layers}")
    if type(vocabulary := values.get("vocab_size", 1)) is not int:
        raise ConfigError(f"vocab_size in {CONFIG} is {shown(vocabulary)}; it must be a whole number")
    matrix, tokens = tensors.get(f"0.{layers}.weight"), tensors.get(_TOKENS)
    size, first = len(tensors[blocks[0][0]]), tensors.get("0.0.linear.weight")
    return HeadsConfig(
        heads=heads,
        layers=layers,
        hidden_size=size,
        sees_root=first is not None and first.shape[-1] == 2 * size,
        vocab_size=vocabulary if matrix is None or tokens is not None else len(matrix),
        draft_vocab=0 if tokens is None else len(tokens),
        own_head=len(blocks) < len(parts),
        accuracy=[[float(rate) for rate in rates] for rates in values.get("accuracy", [])],
        target=str(values.get("target", "")),
    )
