"""Medusa's heads: small residual blocks on the last hidden state, each guessing one position further ahead.

A checkpoint is a folder in the published layout: ``medusa_lm_head.safetensors`` (or ``.pt``) and ``config.json``. A
merged model, whose own weights hold the heads under ``medusa_head.``, is read as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

from drafters.weights import CONFIG, WeightsConfig, load_strictly, load_tensors, read_config, reading, save_weights
from specdec.config import check_positive
from specdec.errors import ConfigError, shown
from specdec.target import Target

__all__ = ["HeadsConfig", "MedusaHeads"]

_WEIGHTS, _PICKLED = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
_MERGED = "medusa_head."
_MOST = 64  # heads, and blocks of a head
_NAME = re.compile(r"(\d+)\.(\d+)(\.linear)?\.(weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsConfig(WeightsConfig):
    """What a set of heads is.

    Attributes:
        heads: K; head k guesses the token k + 1 places behind the one whose hidden state it reads.
        layers: residual blocks of a head.
        hidden_size, vocab_size, target: see :class:`drafters.weights.WeightsConfig`.
        own_head: each head ends in its own [V, D] matrix; else in the target's.
    """

    heads: int
    layers: int
    own_head: bool = False

    def __post_init__(self) -> None:
        names = ("heads", "layers", "hidden_size", "vocab_size")
        check_positive("heads.", **{name: getattr(self, name) for name in names})
        check_positive("heads.", most=_MOST, heads=self.heads, layers=self.layers)


class ResBlock(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + F.silu(self.linear(hidden))


class MedusaHeads(nn.ModuleList):
    """K heads; parameter names are the published ones, ``{head}.{layer}.linear.weight`` and ``{head}.{layers}.weight``.

    Example: with D = 192 and shared matrices, 3 heads of one block have 3 (D^2 + D) = 111,168 weights.
    """

    def __init__(self, config: HeadsConfig) -> None:
        size = config.hidden_size
        super().__init__(
            nn.Sequential(
                *(ResBlock(size) for _ in range(config.layers)),
                *([nn.Linear(size, config.vocab_size, bias=False)] if config.own_head else []),
            )
            for _ in range(config.heads)
        )
        self.config = config

    def forward(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Each head's logits for hidden states [..., D] if it has its own matrix, else what the target's is to read."""
        return [head(hidden) for head in self]

    def start_from(self, target: Target) -> None:
        """Initial weights: every head repeats the target's own next token."""
        lm_head = getattr(target, "lm_head", None)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if ".linear." in name:
                    parameter.zero_()
                elif lm_head is not None:
                    parameter.copy_(lm_head.weight)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights and config; each file beside its name first, so that a full disk leaves the former ones whole.

        Raises:
            CheckpointError: the files could not be written.
        """
        own = self.config
        values = {"medusa_num_heads": own.heads, "medusa_num_layers": own.layers, **asdict(own)}
        save_weights(Path(folder), _WEIGHTS, self.state_dict(), values, what="the heads")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> MedusaHeads:
        """Load a folder of heads, or a merged model's; how many there are is what the file holds.

        The published 7B config counts 2 heads where its file holds 5, so a config's count is not asked.

        Raises:
            CheckpointError: no heads there, or tensors that make no whole set of heads.
        """
        folder = Path(folder)
        remedy = f"it takes {CONFIG} beside {_WEIGHTS}, {_PICKLED} or a model's *.safetensors with {_MERGED}* in it"
        with reading("Medusa heads", folder, remedy):
            tensors = {name.removeprefix(_MERGED): tensor for name, tensor in _tensors(folder).items()}
            config = config_of(tensors, read_config(folder))
            with torch.device("meta"):  # one bias may say any size
                heads = cls(config)
        load_strictly(heads, tensors, folder, "a set of Medusa heads")
        return heads


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """By name; of a merged model, the heads' alone are read."""
    for name in (_WEIGHTS, _PICKLED):
        if (folder / name).exists():
            return load_tensors(folder / name)
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys() if name.startswith(_MERGED)}  # noqa: SIM118
    return found


def config_of(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> HeadsConfig:
    """What the tensors are, read off their names and shapes, with the fingerprint from ``config.json``, if any.

    Raises:
        ConfigError: they are no heads, or not as many layers as ``config.json`` says.
    """
    parts = {name: _NAME.fullmatch(name) for name in tensors}
    strange = [name for name, part in parts.items() if part is None]
    if strange:
        raise ConfigError(f"{strange[0]!r} is none of theirs")
    blocks = [part for part in parts.values() if part is not None and part[3]]
    if not blocks:
        raise ConfigError("no tensor is called {head}.{layer}.linear.weight")
    heads, layers = (len({part[group] for part in blocks}) for group in (1, 2))
    if (told := values.get("medusa_num_layers", layers)) != layers:
        raise ConfigError(f"{CONFIG} counts {shown(told)} layers, the tensors {layers}")
    if type(size := values.get("vocab_size", 1)) is not int:
        raise ConfigError(f"vocab_size in {CONFIG} is {shown(size)}; it must be a whole number")
    matrix = tensors.get(f"0.{layers}.weight")
    return HeadsConfig(
        heads=heads,
        layers=layers,
        hidden_size=tensors[blocks[0][0]].shape[0],
        vocab_size=size if matrix is None else len(matrix),
        own_head=len(blocks) < len(parts),
        target=str(values.get("target", "")),
    )
