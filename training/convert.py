"""Converting published Kangaroo checkpoints: ``pytorch_model.bin`` and a one-layer Llama ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from drafters.kangaroo.adapter import Adapter, AdapterConfig
from drafters.kangaroo.drafter import check_adapter
from drafters.shared.fingerprint import fingerprint
from drafters.shared.weights import load_strictly, load_tensors, read_config, reading
from specdec.errors import CheckpointError, ConfigError
from specdec.target import Target

__all__ = ["convert"]

_NAMES = {
    "layers.0.input_layernorm.weight": "input_norm",
    **{f"layers.0.self_attn.{p}.weight": f"{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "o_proj")},
    "norm.weight": "norm",
}
_IGNORED = "rotary_emb.inv_freq"  # a constant in old releases


def convert(source: str | Path, out: str | Path, *, exit_layer: int, target: Target | None = None) -> Adapter:
    """Read a checkpoint in the official layout and write it in ours.

    Args:
        source: the folder with ``config.json`` and ``pytorch_model.bin`` or ``model.safetensors``.
        out: the folder to write.
        exit_layer: l, which is not in the files; the authors use 2 for 7B models and 3 for 13B.
        target: its target; if given, the adapter is checked against it and stored with its fingerprint.

    Raises:
        CheckpointError: a file is missing or broken, has foreign tensors, or does not fit the target.
    """
    source = Path(source)
    remedy = "give the folder that holds config.json, a Llama's, and pytorch_model.bin"
    with reading("official Kangaroo checkpoint", source, remedy):
        safe = source / "model.safetensors"
        tensors = load_tensors(safe if safe.exists() else source / "pytorch_model.bin")
        values = read_config(source)
        config = AdapterConfig(
            hidden_size=int(values["hidden_size"]),
            vocab_size=int(values["vocab_size"]),
            exit_layer=exit_layer,
            heads=int(values["num_attention_heads"]),
            key_heads=int(values.get("num_key_value_heads") or 0),
            rope_base=rope_base(values),
            norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            target="" if target is None else fingerprint(target),
        )
    adapter = Adapter(config)
    load_strictly(adapter, _renamed(tensors, source), source, "an official adapter")
    if target is not None:
        check_adapter(config, target)
    adapter.save_pretrained(out)
    return adapter


def rope_base(values: Mapping[str, Any]) -> float:
    """The base of the rotary positions in a Llama's config, as transformers 4 or 5 writes it.

    Raises:
        ConfigError: the positions are scaled, which adapters do not support.
    """
    parameters = LlamaConfig(**values).rope_parameters
    if (kind := parameters["rope_type"]) != "default":
        raise ConfigError(f"its rotary positions are scaled ({kind}), and an adapter's are plain")
    return float(parameters["rope_theta"])


def _renamed(tensors: dict[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
    """The tensors under our names; the official ones have a prefix ``module.`` if saved from several GPUs."""
    renamed: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        plain = key.removeprefix("module.")
        if plain.endswith(_IGNORED):
            continue
        if plain not in _NAMES:
            raise CheckpointError(
                f"{str(source)!r} holds {key!r}, which an official Kangaroo adapter has not; known: {', '.join(_NAMES)}"
            )
        renamed[_NAMES[plain]] = tensor.float()
    return renamed
