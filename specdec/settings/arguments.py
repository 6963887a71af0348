"""Arguments of public functions: a table of the valid values of each name, which means the same in every function.

``checked`` checks a call by this table first. Prompts are checked by :mod:`specdec.engine.prompt`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

from annotated_types import Ge, Le, MinLen, Predicate

from specdec.settings.sampling_params import SamplingParams
from specdec.settings.validation import fitting, having

__all__ = ["ARGUMENTS", "DTYPES", "MAX_ROWS", "TOKENIZER_OR_PLACE", "checked", "checked_fields"]

P = ParamSpec("P")
T = TypeVar("T")

DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
MAX_ROWS = 1 << 16
"""Largest ``max_rows`` of an engine; costs and masks are made for so many rows."""


def _is_dtype(value: Any) -> bool:
    if type(value).__name__ == "dtype":
        return str(value) in [f"torch.{name}" for name in DTYPES]
    return isinstance(value, str) and value in DTYPES


def _is_device(value: Any) -> bool:
    return (isinstance(value, str | int) and not isinstance(value, bool)) or type(value).__name__ == "device"


def _is_drafter(value: Any) -> bool:
    return isinstance(value, str | Mapping) or (callable(getattr(value, "start", None)) and not isinstance(value, type))


def _is_ids(value: Any) -> bool:
    """Whether ``value`` is a tensor [B, n] of token ids."""
    import torch

    return isinstance(value, torch.Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32)


def _is_tokenizer_or_place(value: Any) -> bool:
    return hasattr(value, "decode") or (isinstance(value, str | Path) and value != "")


def _is_processor(value: Any) -> bool:
    """Whether ``value`` is a function, or a grammar (:mod:`specdec.sampling.grammar`)."""
    return callable(value) or (hasattr(value, "start") and not isinstance(value, type))


_Processor = Annotated[Any, Predicate(_is_processor)]
_Text = Annotated[str, MinLen(1)]
_Function = Annotated[Callable[..., Any], "a function"]
_Flag = Annotated[bool, "True or False"]
_Name = Annotated[str, "a name"]
_DRAFTER = "a name, {'name': ..., **options}, or a drafter: an object with start, not its class"

ARGUMENTS: Mapping[str, Any] = {
    # Engine
    "target": Annotated[Any, having("forward", "new_cache", "active"), "a Target, such as TransformersTarget(model)"],
    "tokenizer": Annotated[Any, having("decode"), "a tokenizer of transformers, or None"],
    "drafter": Annotated[Any, Predicate(_is_drafter), _DRAFTER],
    "max_rows": Annotated[int, Ge(1), Le(MAX_ROWS), f"an integer from 1 to {MAX_ROWS}"],
    "prefill_chunk": Annotated[int, Ge(1), "an integer >= 1, or None"],
    "policy": Annotated[str | os.PathLike[str], "off, acceptance, or the path of a cost file"],
    "costs": Annotated[Any, having("at", "steps"), "a CostCurve"],
    "progress": _Function,
    # Models
    "path": Annotated[_Text | os.PathLike[str], "'tiny', a folder, or a hub id"],
    "revision": Annotated[_Text, "a branch, a tag or a commit, or None"],
    "max_model_len": Annotated[int, Ge(2), "an integer >= 2, or None"],
    "subfolder": Annotated[_Text, "a folder's name, or None"],
    "model": Annotated[Any, having("config", "get_input_embeddings"), "a causal language model of transformers"],
    "dtype": Annotated[Any, Predicate(_is_dtype), f"{', '.join(DTYPES)}, or such a torch.dtype"],
    "device": Annotated[Any, Predicate(_is_device), "a device, such as cpu or cuda:0"],
    "device_map": Annotated[_Text | dict[str, Any], "such as auto, or a device for each module's name"],
    "execution": _Name,
    "attention": _Name,
    "activations": _Name,
    "parallel": _Name,
    "threads": Annotated[int, Ge(1), Le(4096), "an integer from 1 to 4096"],
    "trust_remote_code": _Flag,
    "chat_template": Annotated[_Text | os.PathLike[str], "a file, or the name of a template that ships"],
    "owned": _Flag,
    # A generation
    "max_new_tokens": Annotated[int, Ge(1), "an integer >= 1"],
    "sampling": SamplingParams,
    "prefix_cache": Annotated[Any, having("begin"), "a PrefixCache"],
    "logprobs": Annotated[int, Ge(0), "an integer >= 0, or None"],
    "batch": Annotated[int, Ge(1), "an integer >= 1"],
    "step_rows": Annotated[int, Ge(1), "an integer >= 1, or None"],
    "cache_bytes": Annotated[int, Ge(1), "an integer >= 1, or None"],
    "stop": Annotated[
        _Text | list[_Text] | tuple[_Text, ...] | set[_Text] | frozenset[_Text],
        "non-empty text, or a list of such; leave it out for none",
    ],
    "stop_token_ids": Annotated[
        int | list[int] | tuple[int, ...] | set[int] | frozenset[int],
        "a token id, or a list of such; leave it out for none",
    ],
    "logits_processor": Annotated[
        list[_Processor] | tuple[_Processor, ...],
        "a list of functions (ids, scores) -> scores; leave it out for none",
    ],
    "on_step": _Function,
    "stop_when": _Function,
    "sample": _Flag,
    "stream": _Flag,
    "trace": _Flag,
    "eos_ids": Annotated[set[int] | frozenset[int], "a set of token ids"],
    # custom_generate
    "input_ids": Annotated[Any, Predicate(_is_ids), "a tensor [B, n] of token ids"],
    "streamer": Annotated[Any, having("put", "end"), "a streamer of transformers"],
    "seed": Annotated[int, "an integer, such as 0"],
    "acceptance": _Name,
    "synced_gpus": _Flag,
}
"""Name -> annotation of its values, other than its default."""
TOKENIZER_OR_PLACE = Annotated[
    Any, Predicate(_is_tokenizer_or_place), "a tokenizer of transformers, the name of a model that has one, or None"
]
"""A tokenizer, where one may be loaded."""


def checked(function: Callable[P, T], **other: Any) -> Callable[P, T]:
    """A function whose arguments are checked by ``ARGUMENTS``; ConfigError for the first that does not fit.

    ``other``: annotations of names that may be more in this function.
    """
    parameters = inspect.signature(function).parameters
    names = list(parameters)

    def fit(name: str, value: Any) -> Any:
        kind = other.get(name, ARGUMENTS.get(name))
        if kind is None or name not in parameters or value is parameters[name].default:
            return value
        return fitting(name, value, kind)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        fit_args: Any = [*map(fit, names, args), *args[len(names) :]]
        fit_kwargs: Any = {name: fit(name, value) for name, value in kwargs.items()}
        return function(*fit_args, **fit_kwargs)

    return call


def checked_fields(options: T) -> T:
    """A dataclass whose fields are checked by ``ARGUMENTS``; ConfigError for the first that does not fit."""
    values = {field.name: (getattr(options, field.name), field.default) for field in fields(options)}  # type: ignore[arg-type]
    given = {name: value for name, (value, default) in values.items() if name in ARGUMENTS and value is not default}
    changes: dict[str, Any] = {name: fitting(name, value, ARGUMENTS[name]) for name, value in given.items()}
    return replace(options, **changes)  # type: ignore[type-var]
