"""Requests: a prompt with its options, and many of them from options for all or for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec.errors import ConfigError
from specdec.settings.sampling_params import SamplingParams

__all__ = ["Request", "make_requests"]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and what ``Engine.start`` is told beside it: the options that it is given."""

    prompt: Any
    max_new_tokens: int
    options: Mapping[str, Any]


def make_requests(
    prompts: Iterable[Any],
    max_new_tokens: int | Sequence[int],
    sampling: SamplingParams | Sequence[SamplingParams | None] | None,
    *,
    seed: int | Sequence[int] | None,
    stop: str | Sequence[str] | Sequence[Sequence[str]],
    logits_processor: Sequence[Any],
    **others: Any,
) -> list[Request]:
    """One request per prompt, of parameters that are for all, or one for each; ``others`` are for all.

    Stop strings and processors are lists already, so that one for each is a list of lists.

    Raises:
        ConfigError: the prompts are one text, or a parameter has another number of values.
    """
    if isinstance(prompts, str | Mapping):
        raise ConfigError("prompts is one prompt; give a list of prompts, or call generate")
    prompts = list(prompts)

    def each(name: str, value: Any, one_each: bool) -> list[Any]:
        if not one_each:
            return [value] * len(prompts)
        if len(value) != len(prompts):
            raise ConfigError(
                f"{name} has {len(value)} values for {len(prompts)} prompts; give one for all, or one for each"
            )
        return list(value)

    def of_lists(value: Any) -> bool:
        return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, list | tuple) for one in value)

    budgets = each("max_new_tokens", max_new_tokens, isinstance(max_new_tokens, Sequence))
    params = each("sampling", sampling, isinstance(sampling, Sequence))
    if seed is not None:
        seeds = each("seed", seed, isinstance(seed, Sequence))
        params = [replace(one or SamplingParams(), seed=own) for one, own in zip(params, seeds, strict=True)]
    stops = each("stop", stop, of_lists(stop))
    chains = each("logits_processor", logits_processor, of_lists(logits_processor))
    return [
        Request(prompt, budget, {"sampling": own, "stop": ends, "logits_processor": chain, **others})
        for prompt, budget, own, ends, chain in zip(prompts, budgets, params, stops, chains, strict=True)
    ]
