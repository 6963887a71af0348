"""A folder as a head: of whatever format, held against its own config and against the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from drafters.heads.config import BlockConfig, ChainConfig, HeadConfig, aux_layers
from drafters.heads.layout import Found, find
from drafters.heads.weights import Block, Chain, HeadWeights
from drafters.shared.fingerprint import fingerprint
from drafters.shared.vocabulary import check_draft_tokens
from drafters.shared.weights import CONFIG, check_fit, load_strictly, reading
from specdec.errors import CheckpointError, ConfigError
from specdec.target import FINAL, Target

__all__ = ["convert", "describe", "head_of", "load_head", "taps_of"]

_REMEDY = f"it takes {CONFIG} beside *.safetensors or pytorch_model.bin, as EAGLE, DFlash and DSpark are published"


def load_head(folder: Path, drafter: str, target: Target, *, check_target: bool = True) -> HeadWeights:
    """The head in a folder, for a target.

    Args:
        folder: of any format that is known, see :mod:`drafters.heads.formats`.
        drafter: name of the drafter that loads it.
        target: its model.
        check_target: refuse one that is known to have been trained for another model of the same sizes.

    Raises:
        CheckpointError: no such head, a broken one, or one of another model.
        ConfigError: the target gives no hidden states of all rows.
    """
    if getattr(target, "splits", False):
        raise ConfigError(
            f"parallel='rows' gives the hidden state of one row a step, and {drafter} reads the hidden states of all "
            "rows; choose lookahead, medusa or auto"
        )
    found = _found(folder, drafter, target.vocab_size)
    check_fit(found.config, target, drafter, check_target=check_target)
    return head_of(found, folder, taps_of(found, folder, target))


def _found(folder: Path, drafter: str, vocab_size: int) -> Found:
    with reading("head", folder, _REMEDY):
        if not folder.is_dir():
            raise ConfigError("there is no such folder")
        found = find(folder, vocab_size=vocab_size)
        if found.format.drafter != drafter:
            raise ConfigError(f"it is of format {found.format.name}; give it to the drafter {found.format.drafter!r}")
    return found


def head_of(found: Found, folder: Path, taps: Sequence[int]) -> HeadWeights:
    """The module with the weights of what was found, for these taps."""
    config = replace(found.config, taps=[*taps])
    with reading("head", folder, _REMEDY), torch.device("meta"):  # a config may say any size
        head = Block(config) if isinstance(config, BlockConfig) else Chain(_chain(config), len(taps))
    tensors = {name: _shaped(name, tensor) for name, tensor in found.tensors.items()}
    load_strictly(head, tensors, folder, f"a head of format {found.format.name}")
    check_draft_tokens(head.draft_tokens, config.vocab_size, folder)
    return head.requires_grad_(False).eval()


def _chain(config: HeadConfig) -> ChainConfig:
    assert isinstance(config, ChainConfig)
    return config


def _shaped(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """P-EAGLE's state for what is not known is a row in three dimensions, as its training has it."""
    return tensor.flatten() if name == "mask_hidden" else tensor


def taps_of(found: Found, folder: Path, target: Target) -> list[int]:
    """The hidden layers of a target that a head reads.

    Raises:
        CheckpointError: it was trained for a model with other layers.
    """
    config, layers = found.config, target.num_layers
    taps = config.taps or aux_layers(layers)
    if isinstance(config, BlockConfig) and config.final_normed:
        taps = [FINAL if tap == layers else tap for tap in taps]
    if config.target_layers not in (0, layers) or max(taps) > layers:
        known = config.target_layers or f"at least {max(taps)}"
        raise CheckpointError(
            f"the head in {str(folder)!r} reads hidden layers {taps} of a model of {known} layers, and this one has "
            f"{layers}; take the head of this model"
        )
    if (count := _count(found)) != len(taps):
        raise CheckpointError(
            f"fc.weight in {str(folder)!r} reads {count} hidden states of {config.hidden_size} values, and the layers "
            f"are {taps}; the model has too few layers, or its config names others than the head was trained with"
        )
    return taps


def _count(found: Found) -> int:
    """The hidden states that ``fc`` joins."""
    config = found.config
    if "fc.weight" not in found.tensors or found.format.kind == "eagle":  # which joins one with the embedding
        return 1
    return int(found.tensors["fc.weight"].shape[-1]) // config.hidden_size


def describe(folder: Path, drafter: str) -> list[str]:
    """What ``specdec drafters --check`` says of a folder: its format, for which target it is, and what it would do.

    Raises:
        CheckpointError: it is no head of this drafter's, or a broken one.
    """
    found = _found(folder, drafter, 0)
    config, count = found.config, _count(found)
    head = head_of(found, folder, config.taps or range(count))
    target = config.target or config.target_name
    layers = f" of {config.target_layers} layers" if config.target_layers else ""
    known = f"for {target or 'a model'}{layers}: width {config.hidden_size}, vocabulary {config.vocab_size}"
    taps = f"hidden layers {config.taps}" if config.taps else f"{count} hidden layers, chosen by the model's depth"
    parts = [f"{config.layers} layer{'s' * (config.layers > 1)} of width {config.width}"]
    parts.append(f"among {config.draft_vocab or config.vocab_size} tokens")
    owned = {"embedding": config.own_embedding, "head": config.own_head}
    parts += [f"its own {what}" for what, there in owned.items() if there]
    if isinstance(config, BlockConfig):
        parts.append(f"blocks of {config.drafted} tokens")
    weights = sum(weight.numel() for weight in head.parameters())
    return [
        f"format {found.format.name}, {weights:,} weights",
        known,
        f"reads {taps}; drafts with {', '.join(parts)}",
        f"use it with --drafter {drafter} --set {drafter}.head={folder}",
    ]


def convert(folder: Path, out: Path, drafter: str, target: Target | None = None) -> HeadWeights:
    """Read a folder of whatever format and write one clean folder.

    Args:
        folder: as others published it.
        out: folder to write.
        drafter: who drafts with it.
        target: its model; if given, the head is checked against it and carries its fingerprint.

    Raises:
        CheckpointError: as :func:`load_head`, or the folder could not be written.
    """
    found = _found(folder, drafter, 0 if target is None else target.vocab_size)
    taps = found.config.taps or [*range(_count(found))]
    if target is not None:
        check_fit(found.config, target, drafter)
        taps = taps_of(found, folder, target)
    head = head_of(found, folder, taps)
    config = replace(head.config, taps=found.config.taps)
    if target is not None:
        config = replace(config, taps=taps, target=fingerprint(target), target_layers=target.num_layers)
    head.config = config
    dtypes = {tensor.dtype for tensor in found.tensors.values() if tensor.is_floating_point()}
    head.save_pretrained(out, dtype=dtypes.pop() if len(dtypes) == 1 else None)
    return head
