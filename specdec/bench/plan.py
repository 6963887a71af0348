"""Plan: the options of a run, from a YAML file and the command line."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, fields
from typing import Any

from specdec.engine.config import EngineOptions
from specdec.engine.questions import FORMATS
from specdec.errors import ConfigError, check_choice
from specdec.settings.options import option
from specdec.settings.sampling_params import SamplingParams
from specdec.settings.validation import AtLeast1, Sizes, check_fields

__all__ = ["ALL", "BASELINE", "Plan", "Spec", "at_once", "label_of", "labelled", "with_batch"]

BASELINE = "none"
ALL = "all"

Spec = str | dict[str, Any]
"""A name, or a mapping with ``name``, ``label`` and options."""

_WEIGHTS = ("adapter", "heads", "head", "model", "datastore")  # options of drafters that take a folder

_sampling_option = functools.partial(option, panel="Sampling")


@dataclass(frozen=True, kw_only=True)
class Plan(EngineOptions):
    """The options of a run; plain decoding is always included, without a policy.

    Raises:
        ConfigError: a value is not allowed.
    """

    questions: str = option(
        "tiny", "tiny or six_kinds (in the package), spec_bench (see --download), or a file.", metavar="FILE"
    )
    drafters: list[Spec] = option(
        lambda: [ALL], "Drafters; all: every one that needs no options (default all).", metavar="A,B,C", commas=True
    )
    systems: list[Spec] = option(
        lambda: ["transformers", "transformers_lookup"],
        "Rivals: transformers, transformers_lookup, transformers_early_exit, transformers_assisted, llama_cpp, "
        "or installed ones; '' for none.",
        metavar="A,B,C",
        commas=True,
    )
    categories: list[str] = option(list, "Only questions of these.", metavar="A,B,C", commas=True)
    limit: AtLeast1 | None = option(None, "Only so many questions, evenly from all categories.")
    batch: Sizes = option(
        lambda: [1], "How many questions at once, size by size; 1 is always one of them.", metavar="1,2,4", commas=True
    )
    max_new_tokens: AtLeast1 = option(96, "Most new tokens of each turn.")
    repeats: AtLeast1 = option(2, "How often each question is answered by each system.")
    format: str = option("auto", "How turns become a prompt: auto, plain, chat or vicuna.")
    persistent: bool = option(False, "Keep drafters for the whole run, with what they learned.")
    keep_prefix: bool = option(False, "Keep our drafters' cache between the turns of a question.")
    temperature: float = _sampling_option(0.0, "0 is greedy.")
    seed: int = _sampling_option(0, "Of the sampling noise.")
    acceptance: str = _sampling_option("match", "match (same text under every drafter), reject, auto or typical.")
    allow_lossy: bool = _sampling_option(False, "Permit an acceptance that changes the text.")

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        check_fields(self)
        check_choice("prompt format", self.format, FORMATS)
        if self.parallel == "tensor":
            raise ConfigError("a bench takes parallel 'rows' or 'off': the audit and the rivals run on rank 0 alone")
        for what, given in (("parallel", self.parallel != "off"), ("keep-prefix", self.keep_prefix)):
            if given and self.sizes != [1]:
                raise ConfigError(f"batch is {self.batch}, and --{what} is for one question at a time; leave out one")
        if ALL in self.drafters and len([spec for spec in self.drafters if not isinstance(spec, dict)]) > 1:
            raise ConfigError(f"drafters are {self.drafters}; {ALL!r} stands alone, or beside mappings with options")
        labels = [label_of(spec) for spec in [*self.drafters, *self.systems]]
        odd = next((label for label in labels if at_once(label) != (label, 1)), None)
        if odd is not None:
            raise ConfigError(f"a system is called {odd!r}, and @ stands before a batch's size; give it another label")
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ConfigError(f"two systems are called {twice[0]!r}; give one of them a label of its own")
        self.sampling()

    @property
    def sizes(self) -> list[int]:
        """The batch sizes, in ascending order; the first is 1."""
        return sorted({1, *self.batch})

    @classmethod
    def group(cls, values: dict[str, Any], name: str) -> dict[str, Any]:
        """The options of the drafter or system called ``name``."""
        for key in ("drafters", "systems"):
            specs = values.get(key, ())
            for place, spec in enumerate(specs if isinstance(specs, list) else ()):  # other types are refused later
                if isinstance(spec, str | dict) and label_of(spec) == name:
                    values[key][place] = {"name": spec} if isinstance(spec, str) else spec
                    return values[key][place]  # type: ignore[no-any-return]
        raise ConfigError(f"no system {name!r} is in this run; name it in --drafters or --systems")

    def sampling(self) -> SamplingParams:
        """The sampling parameters in the engine's form."""
        greedy = self.temperature == 0 and self.acceptance == "match"
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            acceptance="auto" if greedy else self.acceptance,
            allow_lossy=self.allow_lossy,
        )


def label_of(spec: Spec) -> str:
    """The label of a drafter or system in tables and files."""
    if isinstance(spec, str):
        return spec
    label = spec.get("label", spec.get("name"))
    if not isinstance(label, str):
        raise ConfigError(f"{spec!r} has no name; write a name, or a mapping with name, label and options")
    return label


def labelled(text: str) -> dict[str, Any]:
    """The spec that ``LABEL=NAME``, or ``LABEL=NAME:FOLDER`` with the drafter's weights, stands for.

    Raises:
        ConfigError: the text has another form, or the drafter is unknown or takes no weights.
    """
    from specdec.drafting.registry import drafter_type  # not at the top: it imports torch

    match = re.fullmatch(r"([^=:]+)=([^=:]+)(?::(.+))?", text, re.DOTALL)
    if match is None:
        raise ConfigError(f"--drafter is {text!r}; it takes LABEL=NAME:FOLDER, such as mine=kangaroo:runs/mine/best")
    label, name, folder = match.groups()
    if folder is None:
        return {"label": label, "name": name}
    known = [field.name for field in fields(drafter_type(name).Config)]
    option = next((option for option in _WEIGHTS if option in known), None)
    if option is None:
        raise ConfigError(f"--drafter is {text!r}, and {name} takes no folder of weights; write {label}={name}")
    return {"label": label, "name": name, option: folder}


def with_batch(label: str, size: int) -> str:
    """The label of a system that answers ``size`` questions at once: ``auto``, ``auto@2``, ``auto@4``."""
    return label if size == 1 else f"{label}@{size}"


def at_once(label: str) -> tuple[str, int]:
    """The inverse of :func:`with_batch`: the system's label and the number of questions at once."""
    match = re.fullmatch(r"(.+)@(\d{1,9})", label, re.DOTALL)
    return (match[1], int(match[2])) if match else (label, 1)
