"""Pretrained: a model of transformers, loaded from its folder, refused where it cannot be driven, and its parts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stderr
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils.peft_utils import find_adapter_config_file
from transformers.utils.quantization_config import GgufConfig

from specdec.errors import CheckpointError, ConfigError, SpecdecError, TargetError, first_line, shown, told
from specdec.files import read_object
from specdec.gguf import GgufFile, is_gguf
from specdec.named import named_models
from specdec.values import fitting

__all__ = [
    "check_place",
    "context_length_of",
    "decoder_parts",
    "device_of",
    "embedded_model",
    "eos_ids_of",
    "load_model",
    "model_source",
    "refuse_unfit",
    "rope_depends_on_length",
    "rope_kinds",
    "unused_generation_options",
    "weight_of",
]

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_RECURRENT = ("ssm_cfg", "state_size", "mamba_d_state", "conv_kernel", "lru_width")  # options of such layers alone
_CHOOSING = ("index_topk", "index_topk_blocks", "keep_window_size")  # of attention over so many keys, chosen by scores
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "disk")  # that accelerate makes of a machine's devices
_SIZE = Annotated[int, Ge(1), Lt(1 << 31), "an integer from 1 to 2147483647"]
_LAYERS = Annotated[int, Ge(1), Lt(1 << 13), "an integer from 1 to 8191"]
_SIZES = (
    *("vocab_size", "hidden_size", "n_embd", "intermediate_size", "head_dim", "num_hidden_layers", "n_layer"),
    *("num_attention_heads", "n_head", "num_key_value_heads", "max_position_embeddings", "n_positions"),
)
_PACKED = 32  # weights per byte: many times more than any quantisation, or sharing of layers, makes of one
_TOKENS = Annotated[int | list[int] | tuple[int, ...] | set[int], "a token id, or a list of them"]
_HUB_ID = re.compile(r"(?![.~])[\w.-]{1,96}(/[\w.-]{1,96})?")
# Options of a generation config that change tokens -> the value that is off, as None is. SamplingParams say these too,
_SAMPLING = {"do_sample": False, "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
_PENALTY = {"repetition_penalty": 1}
# and only generate does these.
_GENERATION = {
    **dict.fromkeys(("num_beams", "typical_p", "guidance_scale"), 1),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("remove_invalid_values", "top_h", "penalty_alpha", "dola_layers"), False),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"), False),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), -1),
    **dict.fromkeys(("stop_strings", "watermarking_config"), False),
}
_NAMES = " or ".join(map(repr, named_models()))
_NORMS = ("norm", "final_layer_norm", "final_layernorm")


def embedded_model() -> Path:
    """Folder of the small model inside the package, known as ``"tiny"``."""
    return named_models()["tiny"].place


def model_source(model: str | Path) -> str | Path:
    """Where a model lies: a named one's folder, a folder or a GGUF file, or a hub id as it is.

    Raises:
        CheckpointError: none of these, or a named model that was not pulled.
    """
    if (named := named_models().get(str(model))) is not None:
        return named.found()
    path = os.path.expanduser(model)  # as the next ones, it takes any name, also one that no file can have
    if os.path.isdir(path) or (os.path.isfile(path) and is_gguf(path)):
        return Path(path)
    if os.path.exists(path) or not isinstance(model, str) or is_gguf(path) or not _HUB_ID.fullmatch(model):
        wrong = (
            "that is a file" if os.path.exists(path) else f"there is no such {'file' if is_gguf(path) else 'folder'}"
        )
        raise CheckpointError(
            f"cannot load a model from {shown(str(model), 400)}: {wrong}; give {_NAMES}, a folder with config.json and "
            "*.safetensors, a GGUF file, or a hub id"
        )
    return model


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


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype,
    device: str | torch.device | None,
    device_map: str | dict[str, Any] | None,
    trust_remote_code: bool,
    split: bool = False,
) -> PreTrainedModel:
    """A checkpoint's model: a named one's, a folder's, a hub id's (safetensors only), or a GGUF file's, dequantised.

    ``split``: over the processes of torch.distributed, each weight by the model's own plan.

    Raises:
        CheckpointError: no model there, a broken file, or tensors missing or left over.
        TargetError: a model that specdec cannot drive.
        ConfigError: a GGUF file, and no package to read it with.
    """
    place = model_source(path)
    gguf = GgufFile.read(Path(place)) if is_gguf(place) else None
    reading: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if gguf is not None:
        dtype = gguf.dtype if dtype == "auto" else dtype
    elif isinstance(place, Path):
        _check_folder(place)
    dequantised = {} if gguf is None else {"quantization_config": GgufConfig(dequantize=True)}
    try:
        with ExitStack() as opened:
            if gguf is not None:
                file = opened.enter_context(gguf.opened())
                place, reading["gguf_file"] = file.parent, file.name
            config = AutoConfig.from_pretrained(place, **reading)
            refuse_unfit(type(config).__name__.removesuffix("Config"), config.get_text_config())
            _check_sizes(config.to_dict(), str(path))
            if gguf is None:
                _refuse_adapter(place)
            else:
                _refuse_scaled(gguf, config)
                opened.enter_context(redirect_stderr(StringIO()))  # the bar heeds no switch of transformers
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                place,
                config=config,
                dtype=dtype,
                device_map=device_map,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                distributed_config=DistributedConfig(tp_plan="auto") if split else None,
                **reading,
                **dequantised,
            )
    except SpecdecError:
        raise
    except Exception as error:  # files of others, read by code of others: they raise anything
        raise CheckpointError(
            f"cannot load a causal language model from {str(path)!r}: {told(error)}; give {_NAMES}, a folder "
            "with config.json and *.safetensors, a GGUF file, or a hub id that this machine can reach"
        ) from error
    model: PreTrainedModel = loaded[0]
    if gguf is not None:
        gguf.settle(model)
    info: dict[str, Any] = loaded[1]
    kinds = {"missing": "missing_keys", "extra": "unexpected_keys", "misshapen": "mismatched_keys"}
    broken = {kind: sorted(map(str, info[key])) for kind, key in kinds.items() if info.get(key)}
    if broken:
        what = "; ".join(f"{len(names)} {kind}, such as {names[0]}" for kind, names in broken.items())
        raise CheckpointError(
            f"the checkpoint {str(path)!r} does not fit {type(model).__name__}: tensors {what}; "
            "it was saved from another architecture or is incomplete"
        )
    if device is not None and device_map is None:
        model.to(device)  # type: ignore[arg-type]  # in place
    return model


def _check_folder(folder: Path) -> None:
    """Raises CheckpointError for what a folder's JSON files say that no library should be asked to believe."""
    held = sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file())
    for path in filter(Path.exists, (folder / "config.json", folder / "generation_config.json")):
        values = read_object(path)
        if path.name == "config.json":
            _check_sizes(values, str(path), held or None)
    for index in folder.glob("*.index.json"):  # a hub's client sees to its own
        shards = read_object(index).get("weight_map")
        if not isinstance(shards, dict):
            raise CheckpointError(f"{str(index)!r} has no weight_map; the checkpoint is broken")
        for shard in set(map(str, shards.values())):
            if "\\" in shard or Path(shard).is_absolute() or ".." in Path(shard).parts:
                raise CheckpointError(
                    f"{str(index)!r} names weights outside its folder: {shard!r}; do not trust this checkpoint"
                )


def _refuse_scaled(gguf: GgufFile, config: Any) -> None:
    """Raises CheckpointError where a GGUF file scales its rotary frequencies and transformers did not read how."""
    if gguf.scales_positions and all(rope.get("rope_type", "default") == "default" for rope in rope_kinds(config)):
        raise CheckpointError(
            f"{str(gguf.path)!r} scales its rotary frequencies, which transformers does not read from GGUF: the model "
            "would be another one; load its folder of safetensors"
        )


def _refuse_adapter(place: str | Path) -> None:
    """Raises CheckpointError where peft's adapter_config.json is beside the weights: whether transformers applies it,
    and whether it loads the base model that stands in it, depends on what is installed and on the other files.
    """
    found = find_adapter_config_file(str(place))
    if found is not None:
        raise CheckpointError(
            f"{str(place)!r} holds {found!r}, which names another model to be loaded or changes this one's weights; "
            "delete it if the folder's own weights are meant. To decode with an adapter, load base and adapter with "
            "peft and hand the model to TransformersTarget"
        )


def _check_sizes(config: Mapping[str, Any], where: str, held: int | None = None) -> None:
    """Raises CheckpointError for sizes that no model has, or that ``held`` bytes of weights cannot have.

    Transformers would build the modules first, and fill weights that do not fit with random numbers.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        _check_sizes(text, where, held)
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


def refuse_unfit(name: str, config: Any) -> None:
    """Raises TargetError for models whose state is not a list of keys and values per token, all or the last seen."""
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    recurrent = [key for key in _RECURRENT if hasattr(config, key)]
    if odd or recurrent:
        raise TargetError(
            f"{name} has layers that specdec cannot roll back ({', '.join(odd or recurrent)}); recurrent and chunked "
            "layers keep no keys per token. Use a decoder with full or sliding-window attention"
        )
    longest = context_length_of(config)
    chosen = [f"{key}={limit}" for key in _CHOOSING if 0 < (limit := getattr(config, key, None) or 0) < longest]
    if chosen:
        raise TargetError(
            f"{name} attends to the keys that score best ({', '.join(chosen)}), which specdec does not compute"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise TargetError(f"{name} is an encoder-decoder; specdec drives decoder-only models")


def decoder_parts(name: str, model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList, nn.Module]:
    """The decoder, its layers and its last norm."""
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    if decoder is None or decoder is model:
        decoder = model.base_model
    layers = getattr(decoder, "layers", None)
    norm = next((getattr(decoder, name) for name in _NORMS if hasattr(decoder, name)), None)
    if not isinstance(layers, nn.ModuleList) or norm is None:
        raise TargetError(
            f"{name} is no decoder that specdec knows: {type(decoder).__name__} has no `layers` and last `norm`"
        )
    if not len(layers):
        raise TargetError(f"{name} has no layers; there is nothing to run")
    return decoder, layers, norm


def rope_kinds(config: Any) -> list[Mapping[str, Any]]:
    """The rope parameters of each kind of attention; one entry where all layers share them."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [values for values in rope.values() if isinstance(values, Mapping)]
    return nested or [rope]


def rope_depends_on_length(rope: Mapping[str, Any]) -> bool:
    """Whether frequencies change with the length of the text."""
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    return "dynamic" in kind or kind == "longrope"


def context_length_of(config: Any) -> int:
    """Longest text in tokens. Where rotary frequencies depend on the length, the length up to which they do not."""
    longest = int(getattr(config, "max_position_embeddings", 1 << 20))
    changing = [rope for rope in rope_kinds(config) if rope_depends_on_length(rope)]
    return min([longest, *(int(rope.get("original_max_position_embeddings") or longest) for rope in changing)])


def eos_ids_of(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end a text: its generation config's, or its config's where that says nothing."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)  # several families' have none
    known: Any = () if ids is None else fitting(f"eos_token_id of {type(model).__name__}", ids, _TOKENS)
    return frozenset([known] if isinstance(known, int) else known)


def unused_generation_options(model: PreTrainedModel, *, sampling: bool) -> list[str]:
    """What a model's generation config says of the tokens, beside those that end a text; an engine takes none of it.

    ``sampling``: the caller said how to sample, which replaces what the config says of that.
    """
    config: Any = model.generation_config
    asked = _GENERATION if sampling else {**_PENALTY, **_GENERATION}
    if config.do_sample and not sampling:  # else these say nothing
        asked = {**_SAMPLING, **asked}
    values = {name: (getattr(config, name, None), off) for name, off in asked.items()}
    return [f"{name}={value!r}" for name, (value, off) in values.items() if value not in (None, off, [])]


def weight_of(module: nn.Module) -> torch.Tensor:
    """The first weight of a module, or what quantisers have in its place.

    Raises:
        TargetError: it has none.
    """
    weight = next(chain(module.parameters(), module.buffers()), None)
    if weight is None:
        raise TargetError(
            f"{type(module).__name__} stands in the place of an embedding or a head, and has no weights, so specdec "
            "cannot see on which device it computes"
        )
    return weight


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: beside its weights, or where accelerate brings weights that it has offloaded."""
    device = weight_of(module).device
    hook: Any = getattr(module, "_hf_hook", None)
    place = getattr(hook, "execution_device", None)
    return device if device.type != "meta" or place is None else torch.device(place)
