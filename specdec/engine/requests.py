"""Requests: a prompt with its options, and many of them from options for all or for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Integral
from typing import Any

from specdec.drafting.registry import DrafterSpec
from specdec.engine.prediction import Prediction
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.prompt import Prompt
from specdec.errors import ConfigError
from specdec.settings.sampling_params import SamplingParams

__all__ = ["Request", "make_requests"]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and the options of its generation, which are those of ``Engine.start``.

    Attributes:
        drafter: a name, ``{"name": ..., **options}`` or a drafter, in place of the engine's own; for a
            :class:`specdec.engine.scheduler.Scheduler`.
        max_rows: most rows of one of its drafts, at most the engine's; None takes the engine's.
        trace: have each step's tree, and where its tokens came from, as ``Step.trace``.
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
    seed: int | Sequence[int] | None,
    stop: str | Sequence[str] | Sequence[Sequence[str]],
    stop_token_ids: int | Collection[int] | Sequence[Collection[int]],
    logits_processor: Sequence[Any],
    prediction: Prediction | Sequence[Prediction | None] | None = None,
    **others: Any,
) -> list[Request]:
    """One request per prompt, of parameters that are for all, or one for each; ``others`` are for all.

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
    stops = each("stop", stop, _is_of_lists)
    stop_tokens = each("stop_token_ids", stop_token_ids, _is_of_lists)
    chains = each("logits_processor", logits_processor, _is_of_lists)
    predictions = each("prediction", prediction, _is_of_predictions)
    return [
        Request(
            prompt,
            budget,
            own,
            stop=ends,
            stop_token_ids=last,
            logits_processor=chain,
            prediction=text,
            **others,
        )
        for prompt, budget, own, ends, last, chain, text in zip(
            prompts, budgets, params, stops, stop_tokens, chains, predictions, strict=True
        )
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
