"""Medusa's heads: small residual blocks on the last hidden state, each guessing one position further ahead.

A checkpoint is a folder in the published layout: ``medusa_lm_head.safetensors`` (or ``.pt``) and ``config.json``. A
merged model, whose own weights hold the heads under ``medusa_head.``, is read as well.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import nn

from drafters.fingerprint import fingerprint
from drafters.weights import CONFIG, mismatches, save_weights
from specdec.config import check_positive
from specdec.errors import CheckpointError
from specdec.target import Target

__all__ = ["HeadsConfig", "MedusaHeads", "random_heads"]

_WEIGHTS, _PICKLED = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
_MERGED = "medusa_head."
_NAME = re.compile(r"(\d+)\.(\d+)(\.linear)?\.(weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsConfig:
    """What a set of heads is.

    Attributes:
        heads: K; head k guesses the token k + 1 places behind the one whose hidden state it reads.
        layers: residual blocks of a head.
        hidden_size: D, the target's width.
        vocab_size: V, the target's.
        own_head: each head ends in its own [V, D] matrix; else in the target's.
        target: fingerprint of the model that they were trained for; empty if not known.
    """

    heads: int
    layers: int
    hidden_size: int
    vocab_size: int
    own_head: bool = False
    target: str = ""

    def __post_init__(self) -> None:
        names = ("heads", "layers", "hidden_size", "vocab_size")
        check_positive("heads.", **{name: getattr(self, name) for name in names})


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
        try:
            tensors = dict(_tensors(folder))
            values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CheckpointError(
                f"no Medusa heads in {str(folder)!r}: {reason}; it takes {CONFIG} beside {_WEIGHTS}, {_PICKLED} or a "
                f"model's *.safetensors with {_MERGED}* in it"
            ) from error
        heads = cls(config_of(tensors, values if isinstance(values, dict) else {}, folder))
        heads.load_state_dict(tensors)
        return heads


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names, without the merged models' prefix, and tensors; of a merged model, the heads' alone are read."""
    if (folder / _PICKLED).exists() and not (folder / _WEIGHTS).exists():
        loaded = torch.load(folder / _PICKLED, map_location="cpu", weights_only=True)
        if not isinstance(loaded, Mapping):
            raise ValueError(f"{_PICKLED} holds {type(loaded).__name__}, not tensors by name")
        yield from ((str(name).removeprefix(_MERGED), tensor) for name, tensor in loaded.items())
        return
    alone = (folder / _WEIGHTS).exists()
    files = [folder / _WEIGHTS] if alone else sorted(folder.glob("*.safetensors"))
    found = False
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                if alone or name.startswith(_MERGED):
                    found = True
                    yield name.removeprefix(_MERGED), file.get_tensor(name)
    if not found:
        raise ValueError(f"no {_WEIGHTS}, no {_PICKLED}, and no {_MERGED}* in {len(files)} other files")


def config_of(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any], folder: Path) -> HeadsConfig:
    """What the tensors are, read off their names and shapes, with the fingerprint from ``config.json``, if any.

    Raises:
        CheckpointError: they are no whole set of heads; the first odd tensor is named.
    """
    parts = {name: _NAME.fullmatch(name) for name in tensors}
    for name, part in parts.items():
        if part is None or not isinstance(tensors[name], torch.Tensor):
            raise _odd(folder, f"{name!r} is none of theirs")
    matches = [part for part in parts.values() if part is not None]
    blocks = [part for part in matches if part[3]]
    if not blocks:
        raise _odd(folder, "no tensor is called {head}.{layer}.linear.weight")
    heads, layers = (max(int(part[group]) for part in blocks) + 1 for group in (1, 2))
    own = len(blocks) < len(matches)
    size = tensors[blocks[0][0]].shape[0]
    last = tensors.get(f"0.{layers}.weight")
    vocab = int(last.shape[0]) if last is not None else int(values.get("vocab_size", 1))
    expected: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for layer in range(layers):
            expected[f"{head}.{layer}.linear.weight"] = (size, size)
            expected[f"{head}.{layer}.linear.bias"] = (size,)
        if own:
            expected[f"{head}.{layers}.weight"] = (vocab, size)
    for odd in mismatches(tensors, expected):
        raise _odd(folder, odd)
    told = values.get("medusa_num_layers", layers)
    if told != layers:
        raise _odd(folder, f"{CONFIG} counts {told} layers, the tensors {layers}")
    own_target = str(values.get("target", ""))
    return HeadsConfig(
        heads=heads, layers=layers, hidden_size=size, vocab_size=vocab, own_head=own, target=own_target
    )  # fmt: skip


def _odd(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"the tensors in {str(folder)!r} are no set of Medusa heads: {what}; the file is broken")


def random_heads(
    target: Target, folder: str | Path, *, heads: int = 3, layers: int = 1, own_head: bool = False, seed: int = 0
) -> MedusaHeads:
    """Write heads with random weights that fit ``target``: they draft badly, and exactness must not mind."""
    made = MedusaHeads(
        HeadsConfig(
            heads=heads,
            layers=layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            own_head=own_head,
            target=fingerprint(target),
        )
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    made.save_pretrained(folder)
    return made
