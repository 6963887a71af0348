"""What is wrong with a checkpoint in safetensors that transformers would not say, or would load as another model."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.utils.peft_utils import find_adapter_config_file

from specdec.errors import CheckpointError, SpecdecError, shown
from specdec.models.names import NAMES
from specdec.settings.files import read_object

__all__ = ["refuse_adapter", "refuse_integers", "refuse_others", "remedy_for"]

_INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL")
_BYTES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_DRAFTS = re.compile(r"Eagle3|EagleDraft|LMEagle|Medusa|DFlash|DSpark|Speculator|DraftModel")
_NO_TEXT = ("Model", "Classification", "QuestionAnswering", "MaskedLM")


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


def refuse_others(place: Path, config: Any, names: Collection[str] = ()) -> None:
    """Raises CheckpointError where a folder's class, or its tensors, are those of a draft head or of no language model.

    ``config``: transformers' of the folder. ``names``: of its tensors, where they are known.
    """
    kind = str(next(iter(getattr(config, "architectures", None) or ()), ""))
    if _DRAFTS.search(kind) or any(name == "fc.weight" or name.startswith("midlayer.") for name in names):
        raise CheckpointError(
            f"{str(place)!r} is a draft head ({kind or 'by its tensors'}) and no model: give the model, and the head "
            "as its drafter's"
        )
    headless = bool(names) and not any("lm_head." in name for name in names)
    tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
    if headless and not tied and kind.endswith(_NO_TEXT) and "LMHead" not in kind:
        raise CheckpointError(
            f"{str(place)!r} is a {kind}, which makes embeddings or classes and no text: it has no head over tokens; "
            "give a language model"
        )


def refuse_integers(place: Path, model: Any = None) -> None:
    """Raises CheckpointError where a checkpoint whose config says nothing of quantisation has integers for weights, or
    floats of 8 bits.

    Transformers takes them for numbers, as they are. ``model``: as it loaded it, if it did.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        return
    parameters = () if model is None else model.named_parameters()
    floats = {name for name, weight in parameters if weight.is_floating_point()}
    for file in sorted(place.glob("*.safetensors")):
        for name, kind in _types(file):
            if kind in (*_INTEGERS, *_BYTES) and (name in floats or name.endswith(".weight")):
                what = "integers" if kind in _INTEGERS else "floats of 8 bits"
                raise CheckpointError(
                    f"{name!r} in {str(file)!r} holds {what} ({kind}), and the config says nothing of quantisation: "
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
    if not any(place.glob("*.safetensors")) and any(place.glob("*.bin")):
        return (
            "its weights are pickles (*.bin), which may run code and are not loaded: convert them to safetensors, or "
            "give a folder that has these"
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
