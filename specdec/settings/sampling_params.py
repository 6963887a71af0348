"""Sampling parameters: how tokens are chosen, checked; without torch, so that a command line can read them at once."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt, Predicate

from specdec.errors import ConfigError
from specdec.settings.options import option
from specdec.settings.validation import check_fields

__all__ = ["ACCEPTANCES", "SamplingParams"]

ACCEPTANCES = ("auto", "match", "reject", "typical")

_option = functools.partial(option, panel="Sampling")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of sampling and acceptance.

    Attributes:
        temperature: 0 is greedy decoding.
        top_k, top_p, min_p: as transformers' warpers, in that order after the temperature; 0, 1 and 0 are off.
        repetition_penalty: as transformers'; 1 is off. It also acts on greedy decoding.
        seed: seed of the noise; under ``match`` the same seed gives the same text with every drafter.
        acceptance: ``match`` draws from the target and follows the draft where it agrees. ``reject`` is speculative
            sampling for drafts that are drawn from a distribution. ``auto`` takes ``reject`` for such drafts when
            sampling, else ``match``; with a user's own logits processors, which may keep state between calls, always
            ``match``. All of these are lossless. ``typical`` (Medusa) is not, and needs ``allow_lossy``.
        allow_lossy: permit an acceptance rule that changes the output distribution; results are then marked as lossy.
        typical_epsilon, typical_delta: thresholds of ``typical``.

    Raises:
        ConfigError: a value is out of range or of a wrong type.
    """

    temperature: Annotated[float, Ge(0), Lt(math.inf), "a finite number >= 0, where 0 is greedy"] = _option(
        0.0, "0 is greedy."
    )
    top_k: Annotated[int, Ge(0), "an integer >= 0, where 0 is off"] = _option(0, "0 is off.")
    top_p: Annotated[float, Gt(0), Le(1), "a number in (0, 1], where 1 is off"] = _option(1.0, "1 is off.")
    min_p: Annotated[float, Ge(0), Lt(1), "a number in [0, 1), where 0 is off"] = _option(0.0, "0 is off.")
    repetition_penalty: Annotated[float, Gt(0), Lt(math.inf), "a finite number > 0, where 1 is off"] = _option(
        1.0, "1 is off."
    )
    seed: Annotated[int, "an integer, such as 0"] = _option(0, "Of the sampling noise.")
    acceptance: Annotated[str, Predicate(ACCEPTANCES.__contains__), f"one of {', '.join(ACCEPTANCES)}"] = _option(
        "auto", "auto, match, reject or typical."
    )
    allow_lossy: Annotated[bool, "True or False"] = _option(False, "Permit an acceptance that changes the text.")
    typical_epsilon: Annotated[float, Gt(0), Le(1), "a number in (0, 1]"] = 0.09
    typical_delta: Annotated[float, Gt(0), Le(1), "a number in (0, 1]"] = 0.3

    def __post_init__(self) -> None:
        check_fields(self)
        if self.acceptance == "typical" and not self.allow_lossy:
            raise ConfigError(
                "acceptance='typical' changes the output distribution; pass allow_lossy=True (on the command line, "
                "--allow-lossy) if you want that"
            )
        if self.acceptance == "typical" and self.temperature == 0:
            raise ConfigError("acceptance='typical' compares probabilities and needs temperature > 0; it is 0")

    @property
    def lossy(self) -> bool:
        """Whether the output may differ in distribution from plain decoding."""
        return self.acceptance == "typical"

    def processors(self) -> Any:
        """Transformers' own processors, in the order in which its ``generate`` applies them."""
        import transformers as hf  # not at the top: it takes seconds

        chain = hf.LogitsProcessorList()
        if self.repetition_penalty != 1:
            chain.append(hf.RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.temperature > 0:
            if self.temperature != 1:
                chain.append(hf.TemperatureLogitsWarper(self.temperature))
            if self.top_k:
                chain.append(hf.TopKLogitsWarper(self.top_k))
            if self.top_p < 1:
                chain.append(hf.TopPLogitsWarper(self.top_p))
            if self.min_p > 0:
                chain.append(hf.MinPLogitsWarper(self.min_p))
        return chain
