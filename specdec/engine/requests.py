"""Requests: a prompt with its options, and many of them from options for all or for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Integral
from typing import Any, TypedDict

from specdec.drafting.registry import DrafterSpec
from specdec.engine.prediction import Prediction
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.prompt import Prompt
from specdec.errors import ConfigError
from specdec.settings.sampling_params import SamplingParams

__all__ = ["Request", "make_requests"]


class Options(TypedDict, total=False):
    """Options of :meth:`specdec.engine.engine.Engine.generate`, which says what they are."""

    stop: str | Collection[str]
    stop_token_ids: int | Collection[int]
    logits_processor: Sequence[Any]
    logprobs: int | None
    prefix_cache: PrefixCache | None
    prediction: Prediction | None


class BatchOptions(TypedDict, total=False):
    """The same of :meth:`specdec.engine.engine.Engine.generate_batch`, for all prompts or one for each."""

    batch: int
    seed: int | Sequence[int] | None
    stop: str | Sequence[str] | Sequence[Sequence[str]]
    stop_token_ids: int | Collection[int] | Sequence[Collection[int]]
    logits_processor: Sequence[Any]
    logprobs: int | None
    prediction: Prediction | Sequence[Prediction | None] | None
    step_rows: int | None
    cache_bytes: int | None


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and the options of its generation: those of ``Engine.generate``, and more.

    Attributes:
        stop_when: called after every token with the tokens of prompt and text; the text ends if it returns True.
        sample: whether tokens are drawn; None: if the temperature is above 0.
        eos_ids: end tokens; None takes the model's.
        min_tokens: tokens of the text within which a stop string does not end it. (End tokens are held back by a logits
            processor.)
        stream: whether the text is read while it is generated.
        drafter: a name, ``{"name": ..., **options}`` or a drafter, in place of the engine's; for a
            :class:`specdec.engine.scheduler.Scheduler`.
        max_rows: most rows of a draft, at most the engine's ``max_rows``, which None takes. Under ``reject`` the text
            at a seed depends on it, as on every option of a drafter.
        trace: keep each step's tree and the sources of its tokens in ``Step.trace``.
    """

    prompt: Prompt
    max_new_tokens: int = 128
    sampling: SamplingParams | None = None
    _: KW_ONLY
    stop: str | Collection[str] = ()
    stop_token_ids: int | Collection[int] = ()
    logits_processor: Sequence[Any] = ()
    logprobs: int | None = None
    prefix_cache: PrefixCache | None = None
    stop_when: Callable[[Sequence[int]], bool] | None = None
    sample: bool | None = None
    eos_ids: frozenset[int] | None = None
    min_tokens: int = 0
    stream: bool = False
    drafter: DrafterSpec | None = None
    max_rows: int | None = None
    prediction: Prediction | None = None
    trace: bool = False


def make_requests(
    prompts: Iterable[Any],
    max_new_tokens: int | Sequence[int],
    sampling: SamplingParams | Sequence[SamplingParams | None] | None,
    *,
    seed: int | Sequence[int] | None = None,
    **options: Any,
) -> list[Request]:
    """One request per prompt; a parameter has one value for all or one per prompt. ``options``: those of a Request.

    Stop strings, stop tokens and processors are lists already, so that one for each is a list of lists.

    Raises:
        ConfigError: the prompts are one text, or a parameter has another number of values.
    """
    if isinstance(prompts, str | Mapping):
        raise ConfigError("prompts is one prompt; give a list of prompts, or call generate")
    prompts = list(prompts)

    def each(name: str, value: Any, one_each: Callable[[Any], bool] = _is_several) -> list[Any]:
        if _is_array(value):
            value = value.tolist()
        if not one_each(value):
            return [value] * len(prompts)
        if len(value) != len(prompts):
            raise ConfigError(
                f"{name} has {len(value)} values for {len(prompts)} prompts; give one for all, or one for each"
            )
        return list(value)

    budgets = each("max_new_tokens", max_new_tokens)
    params = each("sampling", sampling)
    if seed is not None:
        seeds = each("seed", seed)
        params = [replace(one or SamplingParams(), seed=own) for one, own in zip(params, seeds, strict=True)]
    columns = {name: each(name, options.pop(name), one_each) for name, one_each in _ONE_EACH.items() if name in options}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)] or [{}] * len(prompts)
    return [
        Request(prompt, budget, own, **row, **options)
        for prompt, budget, own, row in zip(prompts, budgets, params, rows, strict=True)
    ]


def _is_array(value: Any) -> bool:
    """Whether it is an array of numpy, a tensor, or a column of a table."""
    return hasattr(value, "tolist") and getattr(value, "ndim", 1) > 0


def _is_several(value: Any) -> bool:
    """Whether there is a value for each prompt, in an order."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping | Set)


def _is_of_predictions(value: Any) -> bool:
    """Whether it holds texts, lists of tokens, arrays or None; a list of tokens is one prediction, as an array is."""
    return isinstance(value, list | tuple) and any(one is None or not isinstance(one, Integral) for one in value)


def _is_of_lists(value: Any) -> bool:
    kinds = (list, tuple, set, frozenset)
    several = isinstance(value, list | tuple) and bool(value)
    return several and all(isinstance(one, kinds) or _is_array(one) for one in value)


# Options of which there may be one for each prompt, and what says whether a value is a list of those.
_ONE_EACH: Mapping[str, Callable[[Any], bool]] = {
    "stop": _is_of_lists,
    "stop_token_ids": _is_of_lists,
    "logits_processor": _is_of_lists,
    "prediction": _is_of_predictions,
}
