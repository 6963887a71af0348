"""Systems that answer questions: drafters in our engine, and rivals through their own public interface.

Others add a system by declaring ``name = "module:Class"`` under the entry point group ``specdec.bench_systems``; the
class has ``build(label, engine, plan, options)``, and its instances are a :class:`System`, or a :class:`Batching`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, cast

from specdec.bench.plan import ALL, BASELINE, Plan, label_of, with_batch
from specdec.bench.records import Output
from specdec.bench.rival import spelt_out
from specdec.bench.transformers_systems import (
    TransformersAssisted,
    TransformersBatches,
    TransformersEarlyExit,
    TransformersLookup,
)
from specdec.drafting.registry import drafter_names, make_drafter, parse_drafter
from specdec.engine.decoding import Decoding
from specdec.engine.engine import Engine
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.requests import Request
from specdec.engine.scheduler import Scheduler
from specdec.errors import ConfigError, SpecdecError, check_choice
from specdec.step.device_copies import wait

__all__ = ["GROUP", "Batching", "Contestant", "Drafted", "System", "check_specs", "make_systems"]

GROUP = "specdec.bench_systems"
_PACKAGE = Path(__file__).resolve().parents[1]


class System(Protocol):
    """A system that answers questions in a run.

    ours: whether it is a drafter in our engine; the audit checks the exactness of these.
        label: its name in tables and files.
        ours: whether it is a drafter in our engine, whose exactness the audit checks.
        lossy: whether it can change the output distribution.
        comparable: whether its text must equal plain decoding's, token for token.
        options: its options, for the manifest.
    """

    label: str
    ours: bool
    lossy: bool
    comparable: bool
    options: Mapping[str, Any]

    def warm_up(self, prompt: list[int], budget: int) -> None:
        """Answer once, uncounted."""

    def reset(self) -> None:
        """Forget earlier questions, unless the plan is persistent. Not timed."""

    def answer(self, prompt: list[int], budget: int) -> Output:
        """Answer a prompt with at most ``budget`` tokens."""


class Batching(System, Protocol):
    """A system that can answer several prompts at once."""

    def answer_batch(self, prompts: Sequence[list[int]], budget: int, batch: int) -> list[Output | Exception]:
        """Answer all prompts, ``batch`` at once; an error of one prompt is its result and leaves the others alone."""


@dataclass(frozen=True, eq=False)
class Contestant:
    """A participant of a run: a system that answers ``size`` prompts at once."""

    system: System
    size: int = 1

    @property
    def label(self) -> str:
        return with_batch(self.system.label, self.size)

    def warm_up(self, prompt: list[int], budget: int) -> None:
        """Answer once, uncounted."""
        self.system.warm_up(prompt, budget)
        if self.size > 1:
            self.answer([prompt] * self.size, budget)

    def answer(self, prompts: Sequence[list[int]], budget: int) -> Sequence[Output | Exception]:
        """Answer all prompts; of several at once, each has its share of the clock."""
        if self.size == 1:
            return [self.system.answer(prompt, budget) for prompt in prompts]
        return cast(Batching, self.system).answer_batch(prompts, budget, self.size)


class Drafted:
    """A drafter in our engine."""

    ours = True

    def __init__(self, label: str, engine: Engine, spec: Mapping[str, Any], plan: Plan) -> None:
        self.label, self._spec, self._plan = label, dict(spec), plan
        self._base = engine
        self._prefix: PrefixCache | None = None
        self._policy = "off" if spec["name"] == BASELINE else plan.policy
        self._engine = engine.with_drafter(self._spec, policy=self._policy)
        self.lossy = plan.sampling().lossy
        # Tokens drawn from q are accepted by rejection, which keeps the distribution but not a seed's tokens.
        rejects = plan.acceptance == "reject" or (plan.acceptance == "auto" and self._engine.drafter.draws)
        self.comparable = not self.lossy and (plan.temperature == 0 or not rejects)
        config = getattr(self._engine.drafter, "config", None)
        values = {name: getattr(config, name) for name in getattr(config, "__dataclass_fields__", {})}
        self.options: Mapping[str, Any] = {"name": self._spec["name"], **values}

    def warm_up(self, prompt: list[int], budget: int) -> None:
        self._engine.generate(prompt, budget, self._plan.sampling())

    def reset(self) -> None:
        self._prefix = PrefixCache() if self._plan.keep_prefix else None
        if not self._plan.persistent:
            self._engine = self._base.with_drafter(self._spec, policy=self._policy)

    def answer(self, prompt: list[int], budget: int) -> Output:
        target = self._engine.target
        times: list[float] = []
        wait(target.device)
        began = perf_counter()
        decoding = self._engine.start(prompt, budget, self._plan.sampling(), prefix_cache=self._prefix)
        with target.active():
            decoding.prefill()
            wait(target.device)
            filled = perf_counter()
            while decoding.finish_reason is None:
                decoding.step()
                times.append(perf_counter() - began)
            wait(target.device)
        ended = perf_counter()
        output = _output(decoding, times)
        output.seconds.update(wall=ended - began, prefill=filled - began)
        return output

    def answer_batch(self, prompts: Sequence[list[int]], budget: int, batch: int) -> list[Output | Exception]:
        """Answer as a server would: the next prompt begins when one ends. Time outside of single sequences is divided
        in proportion to each one's own time.
        """
        target, sampling = self._engine.target, self._plan.sampling()
        taken: list[float] = []
        times: list[list[float]] = [[] for _ in prompts]
        outputs: dict[int, Output | Exception] = {}

        def requests() -> Iterator[Request]:
            for prompt in prompts:
                taken.append(perf_counter())
                yield Request(prompt, budget, sampling)

        wait(target.device)
        began = perf_counter()
        with target.active():
            for event in chain.from_iterable(Scheduler(self._engine, requests(), batch=batch).run()):
                times[event.index].append(perf_counter() - taken[event.index])
                if event.error is not None:
                    outputs[event.index] = event.error
                elif event.last and event.decoding is not None:
                    outputs[event.index] = _output(event.decoding, times[event.index])
            wait(target.device)
        wall = perf_counter() - began
        done = [output for output in outputs.values() if isinstance(output, Output)]
        own = [sum(output.seconds.values()) for output in done]
        for output, seconds in zip(done, own, strict=True):
            output.seconds["wall"] = wall * seconds / max(sum(own), 1e-9)
        return [outputs[place] for place in range(len(prompts))]


def _output(decoding: Decoding, times: list[float]) -> Output:
    """The output of a decoding, with the seconds that it took by itself."""
    stats = decoding.stats
    return Output(
        decoding.tokens[stats.prompt_tokens :],
        stats.acceptance_lengths,
        stats.rows,
        asdict(stats.seconds),
        decoding.finish_reason or "",
        stats.reused_tokens,
        times,
    )


_BUILT_IN: Mapping[str, Any] = {
    "transformers": TransformersBatches,
    "transformers_lookup": TransformersLookup,
    "transformers_early_exit": TransformersEarlyExit,
    "transformers_assisted": TransformersAssisted,
}


def make_systems(plan: Plan, engine: Engine) -> tuple[list[Contestant], dict[str, str]]:
    """The systems of a plan, plain decoding first, and those left out, with the reason.

    Raises:
        ConfigError: a drafter, a system or an option is unknown.
    """
    left_out: dict[str, str] = {}
    specs = [spec for spec in plan.drafters if spec != ALL]
    if ALL in plan.drafters:
        own = {label_of(spec) for spec in specs}
        for name in drafter_names():
            try:
                make_drafter(name, engine.target)
            except (SpecdecError, ImportError, OSError) as error:
                # Manifests are published, so they must not have paths of this machine.
                left_out[name] = " ".join(str(error).split()).replace(f"{_PACKAGE}/", "specdec/")
            else:
                if name not in own:
                    specs.append(name)
    if BASELINE not in map(label_of, specs):
        specs.append(BASELINE)
    specs.sort(key=lambda spec: label_of(spec) != BASELINE)
    makers: list[Callable[[], Any]] = [
        partial(Drafted, label_of(spec), engine, spelt_out(spec), plan) for spec in specs
    ]
    for spec in plan.systems:
        options = spelt_out(spec)
        makers.append(partial(_system_type(options.pop("name")).build, label_of(spec), engine, plan, options))
    systems: list[Contestant] = []
    larger = plan.sizes[1:]
    for make in makers:
        system = make()
        systems.append(Contestant(system))
        if hasattr(system, "answer_batch"):
            # A drafter must not use at one size what it has learned at another.
            systems += [Contestant(make() if plan.persistent else system, size) for size in larger]
        elif larger:
            which = " and ".join(with_batch(system.label, size) for size in larger)
            left_out[which] = f"{system.label} answers one prompt at a time"
    baseline = systems[0].system.options.get("name")
    if baseline != BASELINE:
        raise ConfigError(f"{BASELINE!r} labels the drafter {baseline!r}; that label is plain decoding's")
    return systems, left_out


def check_specs(plan: Plan) -> None:
    """Check the names and the drafters' options without a model.

    Raises:
        ConfigError: a drafter, a system or an option is unknown.
    """
    for spec in plan.drafters:
        if spec != ALL:
            parse_drafter(spelt_out(spec))
    for spec in plan.systems:
        _system_type(spelt_out(spec).pop("name", ""))


def _system_type(name: str) -> Any:
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    check_choice("system", name, {*_BUILT_IN, *entries})
    try:
        return entries[name].load()
    except Exception as error:  # a foreign package's code may raise anything
        raise ConfigError(
            f"system {name!r} is registered as {entries[name].value!r}, which does not import: {error}"
        ) from error
