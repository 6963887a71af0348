"""Loading a head from a folder in any format; it is checked against its config and the target."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from drafters.heads.config import BlockConfig, ChainConfig, HeadConfig, aux_layers
from drafters.heads.layout import Found, find
from drafters.heads.spec import check_positions
from drafters.heads.weights import Block, Chain, HeadWeights
from drafters.shared.fingerprint import fingerprint
from drafters.shared.vocabulary import check_draft_tokens
from drafters.shared.weights import CONFIG, check_fit, load_strictly, reading
from specdec.errors import CheckpointError, ConfigError, SpecdecWarning
from specdec.target import FINAL, Target

__all__ = ["convert", "describe", "head_of", "load_head", "taps_of"]

_REMEDY = f"it takes {CONFIG} beside *.safetensors or pytorch_model.bin, as EAGLE, DFlash and DSpark are published"


def load_head(folder: Path, drafter: str, target: Target, *, check_target: bool = True) -> HeadWeights:
    """Load the head in a folder for a target.

    Args:
        folder: folder in a known format, see :mod:`drafters.heads.formats`.
        drafter: name of the drafter that loads it.
        target: the target.
        check_target: whether to refuse a head that was trained for another model of the same sizes.

    Raises:
        CheckpointError: the folder has no such head, or a broken one, or one of another model.
        ConfigError: the target does not give the hidden states of all rows.
    """
    if target.splits:
        raise ConfigError(
            f"parallel='rows' gives the hidden state of one row a step, and {drafter} reads the hidden states of all "
            "rows; choose lookahead, medusa or auto"
        )
    found = _found(folder, drafter, target.vocab_size)
    check_fit(found.config, target, drafter, check_target=check_target)
    taps = taps_of(found, folder, target)
    if not found.config.taps:
        warnings.warn(
            f"the config of the head in {str(folder)!r} names no hidden layers, so EAGLE-3's default is read: {taps}; "
            "if it was trained with others, name them (eagle_config.eagle_aux_hidden_state_layer_ids)",
            SpecdecWarning,
            stacklevel=2,
        )
    check_positions(found.config, target.context_length)
    return head_of(found, folder, taps)


def _found(folder: Path, drafter: str, vocab_size: int) -> Found:
    with reading("head", folder, _REMEDY):
        if not folder.is_dir():
            raise ConfigError("there is no such folder")
        found = find(folder, vocab_size=vocab_size)
        if found.format.drafter != drafter:
            raise ConfigError(f"it is of format {found.format.name}; give it to the drafter {found.format.drafter!r}")
    return found


def head_of(found: Found, folder: Path, taps: Sequence[int]) -> HeadWeights:
    """The head's module with the tensors of the folder, for these taps."""
    config = replace(found.config, taps=[*taps])
    with reading("head", folder, _REMEDY), torch.device("meta"):  # a config can claim any size
        head = Block(config) if isinstance(config, BlockConfig) else Chain(_chain(config), len(taps))
    tensors = {name: _shaped(name, tensor) for name, tensor in found.tensors.items()}
    load_strictly(head, tensors, folder, f"a head of format {found.format.name}")
    check_draft_tokens(head.draft_tokens, config.vocab_size, folder)
    return head.requires_grad_(False).eval()


def _chain(config: HeadConfig) -> ChainConfig:
    assert isinstance(config, ChainConfig)
    return config


def _shaped(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as our module has it: P-EAGLE's training stores its mask state in three dimensions."""
    return tensor.flatten() if name == "mask_hidden" else tensor


def taps_of(found: Found, folder: Path, target: Target) -> list[int]:
    """The hidden states of the target that a head reads, as numbers of layers.

    Raises:
        CheckpointError: the head was trained for a target with another number of layers.
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
    """The number of hidden states that ``fc`` joins."""
    config = found.config
    if "fc.weight" not in found.tensors or found.format.kind == "eagle":  # EAGLE's fc joins one with the embedding
        return 1
    return int(found.tensors["fc.weight"].shape[-1]) // config.hidden_size


def describe(folder: Path, drafter: str) -> list[str]:
    """The lines of ``specdec drafters --check`` about a folder: its format, its target and its sizes.

    Raises:
        CheckpointError: the folder has no head of this drafter, or a broken one.
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
    """Read a folder in any format and write it in specdec's own format.

    Args:
        folder: the published folder.
        out: the folder to write.
        drafter: name of the drafter that uses the head.
        target: its target; if given, the head is checked against it and stored with its fingerprint.

    Raises:
        CheckpointError: as in :func:`load_head`, or the folder could not be written.
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
