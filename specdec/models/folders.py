"""What is wrong with a checkpoint in safetensors that transformers would not say, or would load as another model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.utils.peft_utils import find_adapter_config_file

from specdec.errors import CheckpointError, SpecdecError, shown
from specdec.models.names import NAMES
from specdec.settings.files import read_object

__all__ = ["refuse_adapter", "refuse_integers", "remedy_for"]

_INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL")


def refuse_adapter(place: Path) -> None:
    """Raises CheckpointError where peft's adapter_config.json is in a checkpoint: whether transformers applies it, and
    whether it loads the base model that stands in it, depends on what is installed and on the other files.
    """
    adapter = find_adapter_config_file(str(place))
    if adapter is not None:
        raise CheckpointError(
            f"{str(place)!r} holds {adapter!r}, which names another model to be loaded or changes this one's weights; "
            "delete it if the folder's own weights are meant. To decode with an adapter, load base and adapter with "
            "peft and hand the model to TransformersTarget"
        )


def refuse_integers(place: Path, model: Any = None) -> None:
    """Raises CheckpointError where a checkpoint whose config says nothing of quantisation has integers for weights.

    Transformers takes them for numbers, as they are. ``model``: as it loaded it, if it did.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        return
    parameters = () if model is None else model.named_parameters()
    floats = {name for name, weight in parameters if weight.is_floating_point()}
    for file in sorted(place.glob("*.safetensors")):
        for name, kind in _types(file):
            if kind in _INTEGERS and (name in floats or name.endswith(".weight")):
                raise CheckpointError(
                    f"{name!r} in {str(file)!r} holds integers ({kind}), and the config says nothing of quantisation: "
                    "the weights' scales are not known; get it with its quantization_config, or one that is dense"
                )


def _types(file: Path) -> Iterator[tuple[str, str]]:
    """The tensors of a file of safetensors, and the type of each."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header: Mapping[str, Any] = json.loads(opened.read(size))
    return ((name, told["dtype"]) for name, told in header.items() if name != "__metadata__")


def remedy_for(place: Path, error: Exception) -> str:
    """What to do where transformers could not load a checkpoint."""
    text = str(error)
    if (method := _quant_method(place)) is not None:
        return (
            f"its weights are quantised by {shown(method)}: install what transformers loads such checkpoints with, or "
            "give one that is not quantised, or a GGUF file"
        )
    if "does not recognize this architecture" in text:
        return (
            f"transformers {transformers.__version__} does not have its architecture: install a newer one, or give "
            "another model"
        )
    if isinstance(error, ImportError) or "pip install" in text:
        return "install the package that it needs, or give another checkpoint"
    if "Unrecognized configuration class" in text:
        return "its architecture makes no text, or not from text alone; give a language model"
    return (
        f"give {NAMES}, a folder with config.json and *.safetensors, a GGUF file, or a hub id that this machine can "
        "reach"
    )


def _quant_method(place: Path) -> str | None:
    """The method in a folder's config, or None."""
    try:
        told = read_object(Path(place, "config.json")).get("quantization_config")
    except SpecdecError:
        return None
    method = told.get("quant_method") if isinstance(told, Mapping) else None
    return method if isinstance(method, str) else None
