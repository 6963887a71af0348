"""A model of transformers, loaded from its folder or a hub id, and checked before and after."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
from annotated_types import Ge, Lt
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from specdec.decoder.families import FAMILIES
from specdec.decoder.weights.quantised import METHODS, method_of, needs_gpu
from specdec.errors import CheckpointError, ConfigError, SpecdecError, first_line, shown, told
from specdec.models.catalog import named_models
from specdec.models.folders import refuse_adapter, refuse_integers, refuse_others, remedy_for
from specdec.models.git_lfs import refuse_pointers
from specdec.models.inspection import refuse_unfit
from specdec.models.long_context import take_long_factors
from specdec.models.names import model_source
from specdec.settings.files import read_object
from specdec.settings.validation import fitting
from specdec.step import torch_switches

__all__ = ["check_folder", "check_place", "check_sizes", "embedded_model", "load_weights", "mtp_layers"]

_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "disk")  # that accelerate makes of a machine's devices
_SIZE = Annotated[int, Ge(1), Lt(1 << 31), "an integer from 1 to 2147483647"]
_LAYERS = Annotated[int, Ge(1), Lt(1 << 13), "an integer from 1 to 8191"]
_SIZES = (
    *("vocab_size", "hidden_size", "n_embd", "intermediate_size", "head_dim", "num_hidden_layers", "n_layer"),
    *("num_attention_heads", "n_head", "num_key_value_heads", "max_position_embeddings", "n_positions"),
)
_PACKED = 32  # weights per byte: many times more than any quantisation, or sharing of layers, makes of one


def embedded_model() -> Path:
    """Folder of the small model inside the package, known as ``"tiny"``."""
    return named_models()["tiny"].place


def check_place(device: Any, device_map: Any) -> None:
    """Raises ConfigError where a model's place is given twice, or names a device that this machine does not have."""
    if device is not None and device_map is not None:
        raise ConfigError(f"device is {shown(device)} and device_map {shown(device_map)}; give only one of them")
    spread = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    for place in [device] if device_map is None else spread:
        try:
            if place not in _MAPS:
                torch.empty(1, device=place).cpu()  # there is nothing to copy on meta
        except (RuntimeError, AssertionError, TypeError) as error:
            raise ConfigError(
                f"device {str(place)!r} cannot be used: {first_line(error)}; leave it out, or name one of here"
            ) from error


@torch_switches.reads_weights
def load_weights(
    path: str | Path,
    *,
    dtype: str | torch.dtype,
    device: str | torch.device | None,
    device_map: str | dict[str, Any] | None,
    trust_remote_code: bool,
    split: bool = False,
    activations: str = "default",
    revision: str | None = None,
    subfolder: str | None = None,
    max_model_len: int | None = None,
) -> PreTrainedModel:
    """A checkpoint's model as transformers loads it: a named one's, a folder's or a hub id's (safetensors only).

    ``split``: over the processes of torch.distributed, each weight by the model's own plan. ``activations``: ``int8``
    rounds the rows that quantised blocks are multiplied with, of which there are none here.
    ``revision``, ``subfolder``: as of :func:`model_source`. ``max_model_len``: of :func:`take_long_factors`.

    Raises:
        CheckpointError: no model there, a broken file, or tensors missing or left over.
        TargetError: a model that specdec cannot drive.
        ConfigError: there are no blocks, whose rows could be rounded.
    """
    place = model_source(path, revision=revision, subfolder=subfolder, code=trust_remote_code)
    spread = device_map is not None or split
    check_folder(place)
    try:
        refuse_adapter(place)
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
        refuse_others(place, config)
        text = config.get_text_config()
        refuse_unfit(type(config).__name__.removesuffix("Config"), text, described=True)
        check_sizes(config.to_dict(), str(path))
        take_long_factors(vars(text), max_model_len)
        if (config.dtype if dtype == "auto" else _dtype_of(dtype)) in (torch.float64, "float64"):
            config._experts_implementation = "eager"  # transformers' other loops over experts take no float64
        _check_quantised(place, config, device, spread=spread)
        if activations == "int8":
            raise ConfigError(
                "activations='int8' rounds rows that quantised blocks are multiplied with, and "
                f"{shown(str(path), 400)} is not loaded as such here; leave it out, or make a GGUF file with "
                "`specdec quantize`"
            )
        loaded: Any = _auto_class(config).from_pretrained(
            place,
            config=config,
            dtype=dtype,
            device_map=device_map,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            distributed_config=DistributedConfig(tp_plan="auto") if split else None,
            trust_remote_code=trust_remote_code,
        )
    except SpecdecError:
        raise
    except Exception as error:  # files of others, read by code of others: they raise anything
        raise CheckpointError(
            f"cannot load a causal language model from {str(path)!r}: {told(error)}; {remedy_for(place, error)}"
        ) from error
    model: PreTrainedModel = loaded[0]
    _check_loaded(model, loaded[1], str(path))
    refuse_integers(place, model)
    if device is not None and device_map is None:
        model.to(device)  # type: ignore[arg-type]  # in place
    return model


def _check_loaded(model: Any, info: dict[str, Any], path: str) -> None:
    """Raises CheckpointError where tensors were missing, misshapen or left over."""
    kinds = {"missing": "missing_keys", "extra": "unexpected_keys", "misshapen": "mismatched_keys"}
    broken = {kind: sorted(map(str, info[key])) for kind, key in kinds.items() if info.get(key)}
    extra = [name for name in broken.pop("extra", []) if not _is_of_mtp(name, model.config.get_text_config())]
    broken |= {"extra": extra} if extra else {}
    if broken:
        what = "; ".join(f"{len(names)} {kind}, such as {names[0]}" for kind, names in broken.items())
        raise CheckpointError(
            f"the checkpoint {path!r} does not fit {type(model).__name__}: tensors {what}; "
            "it was saved from another architecture or is incomplete"
        )


def _auto_class(config: Any) -> Any:
    """The class of transformers that loads a model of texts, or one of images and texts, which is given texts alone."""
    both: Any = AutoModelForImageTextToText
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}) or type(config) not in both._model_mapping:
        return AutoModelForCausalLM
    of_both = both._model_mapping[type(config)].__name__ in (config.architectures or ())
    return both if of_both or type(config) not in AutoModelForCausalLM._model_mapping else AutoModelForCausalLM


def _is_of_mtp(name: str, config: Any) -> bool:
    """Whether a tensor is of multi-token-prediction layers, which stand behind a model's own, and which no class of
    transformers has; of some published sizes of these models transformers itself leaves them out.
    """
    if re.match(r"(?:model\.)?mtp(?:_layers)?\.", name):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) in mtp_layers(config)


def mtp_layers(config: Any) -> range:
    """The numbers of a checkpoint's multi-token-prediction layers, where they are numbered behind the model's own."""
    layers = getattr(config, "num_mtp_layers", None) or getattr(config, "num_nextn_predict_layers", None)
    own = config.num_hidden_layers
    return range(own, own + (layers if type(layers) is int else 0))


def _check_quantised(place: Path, config: Any, device: Any, *, spread: bool) -> None:
    """Raises CheckpointError where weights are quantised by a method whose packages, which transformers needs, are not
    installed, or whose modules are none for this device.
    """
    quantisation = getattr(config, "quantization_config", None)
    named = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
    if not spread and needs_gpu(named, device):
        raise CheckpointError(
            f"{str(place)!r} is quantised by {named}, whose modules are run on a GPU alone: say device='cuda', or "
            f"give a checkpoint that is not quantised, one by {', '.join(METHODS)}, or a GGUF file"
        )
    if isinstance(quantisation, Mapping) and named is not None and not _is_known(named):
        raise CheckpointError(
            f"{str(place)!r} is quantised by {shown(named)}, which neither specdec nor transformers "
            f"{transformers.__version__} reads: install a newer one, give a checkpoint by {', '.join(METHODS)}, or "
            "remove quantization_config from its config.json if its weights are not quantised"
        )
    method = method_of(quantisation)
    if method is None or METHODS[method].transformers_loads():
        return
    why = f"its architecture {config.model_type!r} is none of {', '.join(FAMILIES)}"
    if spread:
        why = "device_map and ranks spread weights that are not quantised"
    packages = METHODS[method].packages
    named = f"package{'s' if len(packages) > 1 else ''} {' and '.join(packages)}"
    raise CheckpointError(
        f"{str(place)!r} is quantised by {method}, and {why}: install the {named}, with which transformers loads "
        "it, or give a checkpoint that is not quantised"
    )


def _is_known(method: Any) -> bool:
    return isinstance(method, str) and (method in METHODS or method in AUTO_QUANTIZATION_CONFIG_MAPPING)


def _dtype_of(dtype: str | torch.dtype) -> Any:
    return getattr(torch, dtype, None) if isinstance(dtype, str) else dtype


def check_folder(folder: Path) -> None:
    """Raises CheckpointError for files that were not fetched, and JSON that no library should be asked to believe."""
    refuse_pointers(folder)
    held = sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file())
    for path in filter(Path.exists, (folder / "config.json", folder / "generation_config.json")):
        values = read_object(path)
        if path.name == "config.json":
            check_sizes(values, str(path), held or None)
    for index in folder.glob("*.index.json"):  # a hub's client sees to its own
        shards = read_object(index).get("weight_map")
        if not isinstance(shards, dict):
            raise CheckpointError(f"{str(index)!r} has no weight_map; the checkpoint is broken")
        for shard in set(map(str, shards.values())):
            if "\\" in shard or Path(shard).is_absolute() or ".." in Path(shard).parts:
                raise CheckpointError(
                    f"{str(index)!r} names weights outside its folder: {shard!r}; do not trust this checkpoint"
                )


def check_sizes(config: Mapping[str, Any], where: str, held: int | None = None) -> None:
    """Raises CheckpointError for sizes that no model has, or that ``held`` bytes of weights cannot have.

    Transformers would build the modules first, and fill weights that do not fit with random numbers.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        check_sizes(text, where, held)
    sizes = dict.fromkeys(_SIZES, 1)
    for name in _SIZES:
        value = config.get(name)
        if value is None or isinstance(value, list | tuple):  # left to the class, or one for each layer
            continue
        try:
            sizes[name] = fitting(name, value, _LAYERS if "layer" in name else _SIZE)
        except ConfigError as error:
            raise CheckpointError(f"in {where!r}, {error}; mend it, or download it anew") from error
    hidden = max(sizes["hidden_size"], sizes["n_embd"])
    layer = hidden * (hidden + sizes["intermediate_size"])
    least = sizes["vocab_size"] * hidden + max(sizes["num_hidden_layers"], sizes["n_layer"]) * layer
    if held is not None and least > _PACKED * held:
        raise CheckpointError(
            f"{where!r} speaks of {least:,} weights or more, and the safetensors beside it hold {held:,} bytes: it is "
            "another model's; download both anew"
        )
