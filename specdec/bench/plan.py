"""Plan: what a run is going to do, from a YAML file and the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from specdec.attention import check_backend
from specdec.bench.questions import FORMATS
from specdec.config import DTYPES, load_yaml, parse, read_value
from specdec.errors import ConfigError, unknown
from specdec.lowering import check_optimize
from specdec.policy import check_policy
from specdec.sampling import SamplingParams

__all__ = ["ALL", "BASELINE", "Plan", "label_of", "resolve_plan"]

BASELINE = "none"
ALL = "all"

Spec = str | dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Options of a run.

    Attributes:
        model: ``tiny``, a folder, or a hub id.
        questions: ``tiny`` (the set in this package), ``spec_bench`` (where ``--download`` puts it), or a file.
        drafters: names, or mappings with ``name``, ``label`` and options; ``["all"]`` takes every registered drafter
            that builds without options. Plain decoding always runs.
        systems: rivals outside of the engine, in the same form.
        categories: only questions of these.
        limit: only so many questions, evenly from all categories.
        max_new_tokens: budget of each turn.
        repeats: how often each question is answered by each system.
        temperature, seed, acceptance, allow_lossy: see SamplingParams. ``match`` makes sampled text the same under
            every drafter, which the audit can check.
        format: how a turn becomes a prompt: ``auto``, ``plain``, ``chat`` or ``vicuna``.
        dtype, device, attention, optimize: of the model, see Engine.from_pretrained.
        policy: of all drafters but plain decoding: ``acceptance``, ``off``, ``cost`` or a cost file, see Engine.
        threads: torch's CPU threads; None leaves them, but takes one for ``tiny``, as RunConfig does.
        persistent: keep each drafter object for the whole run instead of building it anew for every question.

    Raises:
        ConfigError: a value that cannot be.
    """

    model: str = "tiny"
    questions: str = "tiny"
    drafters: list[Spec] = field(default_factory=lambda: [ALL])
    systems: list[Spec] = field(default_factory=lambda: ["transformers", "transformers_lookup"])
    categories: list[str] = field(default_factory=list)
    limit: int | None = None
    max_new_tokens: int = 96
    repeats: int = 2
    temperature: float = 0.0
    seed: int = 0
    acceptance: str = "match"
    allow_lossy: bool = False
    format: str = "auto"
    dtype: str = "auto"
    device: str | None = None
    attention: str = "auto"
    optimize: str = "auto"
    policy: str = "acceptance"
    threads: int | None = None
    persistent: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "repeats", "limit", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.format not in FORMATS:
            raise ConfigError(unknown("prompt format", self.format, FORMATS))
        if self.dtype not in DTYPES:
            raise ConfigError(unknown("dtype", self.dtype, DTYPES))
        check_backend(self.attention)
        check_optimize(self.optimize)
        check_policy(self.policy)
        if ALL in self.drafters and len([spec for spec in self.drafters if not isinstance(spec, dict)]) > 1:
            raise ConfigError(f"drafters are {self.drafters}; {ALL!r} stands alone, or beside mappings with options")
        labels = [label_of(spec) for spec in [*self.drafters, *self.systems]]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ConfigError(f"two systems are called {twice[0]!r}; give one of them a label of its own")
        self.sampling()

    def sampling(self) -> SamplingParams:
        """As the engine takes it."""
        greedy = self.temperature == 0 and self.acceptance == "match"
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            acceptance="auto" if greedy else self.acceptance,
            allow_lossy=self.allow_lossy,
        )

    def options(self) -> dict[str, Any]:
        """All options as plain values."""
        return asdict(self)


def label_of(spec: Spec) -> str:
    """What a drafter or system is called in tables and files."""
    if isinstance(spec, str):
        return spec
    label = spec.get("label", spec.get("name"))
    if not isinstance(label, str):
        raise ConfigError(f"{spec!r} has no name; write a name, or a mapping with name, label and options")
    return label


def resolve_plan(file: Path | None, settings: Iterable[str], options: Mapping[str, Any]) -> Plan:
    """Defaults, then the YAML file, then ``options`` (None is none), then ``LABEL.OPTION=VALUE`` settings.

    Raises:
        ConfigError: an unknown option, or a value that cannot be.
    """
    values = {} if file is None else load_yaml(file)
    values |= {name: value for name, value in options.items() if value is not None}
    for setting in settings:
        _apply(values, setting)
    return parse(Plan, values, where="bench")


def _apply(values: dict[str, Any], setting: str) -> None:
    """``lookahead.window=5`` sets an option of the drafter or system called lookahead."""
    key, equals, text = setting.partition("=")
    label, dot, option = key.rpartition(".")
    if not equals or not dot:
        raise ConfigError(f"--set takes LABEL.OPTION=VALUE, such as lookahead.window=5; got {setting!r}")
    try:
        value = read_value(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {setting!r}: the value is no YAML") from error
    for field_name in ("drafters", "systems"):
        specs = list(values.get(field_name, ()))
        for place, spec in enumerate(specs):
            if label_of(spec) == label:
                known = {"name": spec} if isinstance(spec, str) else spec
                specs[place] = {**known, option: value}
                values[field_name] = specs
                return
    raise ConfigError(f"--set {setting!r}: no system {label!r} is in this run; name it in --drafters or --systems")
