"""Service: an engine with its thread, prompts, grammars, figures and limits."""

from __future__ import annotations

import math
from time import time
from typing import Any

from specdec.drafter import Drafter
from specdec.drafting.registry import drafter_names, make_drafter
from specdec.engine.engine import Engine
from specdec.engine.prefix_tree import PrefixTree
from specdec.engine.scheduler import Scheduler
from specdec.errors import ConfigError, shown, unknown
from specdec.serve.answers import Answer, Speaker
from specdec.serve.call_styles import Style
from specdec.serve.config import ServeConfig
from specdec.serve.engine_thread import EngineThread, Inbox, Submitted
from specdec.serve.errors import ApiError
from specdec.serve.fields import Generating, Speculation
from specdec.serve.lanes import LARGE, Lane
from specdec.serve.logprobs import TokenNames
from specdec.serve.metrics import Metrics
from specdec.serve.plan import Limits, Plan
from specdec.serve.stored import StoredResponses
from specdec.serve.styles import STYLES, style_of

__all__ = ["Service", "sampling_defaults", "step_rows"]


class Service:
    """Answers requests with an engine.

    Args:
        engine: an engine with a tokenizer.
        config: names, limits and defaults; its engine options have already been applied.

    Attributes:
        names: the model's names for clients; answers have the first.
        context: most tokens of a prompt and its answer.
        drafters: drafters that requests can name, by name; None stands for the engine's own.
        prefixes: the cache of prompt prefixes; None where prefixes are not kept.
        draining: whether the server is ending and refuses new requests.
        forced: whether the server ends at once, without waiting for a step.
        responses: responses that are kept for later requests.
        speaker: what answers have in common.
        lanes: threads that plan requests, that for large bodies last.
        answering: the number of requests whose body was read and whose answer has not been sent.
    """

    def __init__(self, engine: Engine, config: ServeConfig) -> None:
        self.engine, self.config = engine, config
        self.names, self.created = config.names, int(time())
        self.name = self.names[0]
        self.draining, self.forced, self.answering = False, False, 0
        self.metrics = Metrics(self.name, config.max_num_seqs, config.cache_bytes)
        self.thread = EngineThread(self._scheduler, self.metrics.stepped)
        self.context, self._step_rows = _context(engine, config), step_rows(engine, config)
        limits, defaults = (
            Limits(self.context, self._check_answers, self._speculation),
            sampling_defaults(engine, config),
        )
        # The engine's own tokenizer is for the threads that decode.
        self.lanes = [Lane(name, engine, limits, defaults) for name in ("plan", "plan-large")]
        self.drafters = _drafters(engine, config)
        kept = config.prefix_bytes if config.prefix_bytes is not None else config.cache_bytes or _PREFIX_BYTES
        self.prefixes = PrefixTree(max_bytes=kept) if kept else None
        self.responses = StoredResponses()
        names = TokenNames(engine.tokenizer)
        self.speaker = Speaker(self.name, engine.tokenizer, names, engine.max_rows, self._told_style())

    def _told_style(self) -> Style | None:
        """How the model marks tool calls, by ``--tool-parser`` or the chat template."""
        name, template = self.config.tool_parser, getattr(self.engine.tokenizer, "chat_template", None)
        if name == "auto" and template and not self.lanes[0].encoder.knows_tools:
            name = "hermes"
        elif name == "auto":
            name = style_of(template) or "none"
        return STYLES.get(name)

    def _scheduler(self) -> Scheduler:
        config = self.config
        self.engine.warm_up(config.max_num_seqs)
        return Scheduler(
            self.engine,
            batch=config.max_num_seqs,
            step_rows=self._step_rows,
            cache_bytes=config.cache_bytes,
            prefixes=self.prefixes,
        )

    def lane(self, body: bytes) -> Lane:
        """The lane for a body of this size."""
        return self.lanes[len(body) >= LARGE]

    @property
    def ready(self) -> bool:
        """Whether the server accepts new requests."""
        return self.thread.alive and not self.draining

    def answer(self, plan: Plan) -> Answer:
        """An empty answer to a plan, in its protocol."""
        assert plan.answer is not None
        made: Answer = plan.answer(plan, self.speaker)
        return made

    def check_ready(self) -> None:
        """Raises ApiError where the server refuses new requests."""
        if not self.ready:
            why = "is shutting down" if self.draining else "has no engine that runs"
            raise ApiError(
                f"the server {why}; send the request to another, or later",
                status=503,
                code="unavailable",
                headers={"Retry-After": "5"},
            )

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that this server does not have; a request need not name one."""
        if name is not None and name not in self.names:
            raise ApiError(
                f"there is no model {shown(name)} here; this server has {', '.join(map(repr, self.names))}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def submit(self, plan: Plan, inbox: Inbox) -> list[Submitted]:
        """Queue a plan's requests for decoding.

        Raises:
            ApiError: the queue is full, or the server is ending.
        """
        self.check_ready()
        self._check_answers(len(plan.requests))
        return [self.thread.submit(request, inbox, index) for index, request in enumerate(plan.requests)]

    def _check_answers(self, wanted: int) -> None:
        """Raises ApiError for more answers than there is place for. Called in lanes, before anything is tokenized."""
        held, most = len(self.thread.unfinished), self.config.max_num_seqs + self.config.max_queue
        if wanted > most:
            raise ApiError(
                f"the request wants {wanted} answers, prompts times n, and the server takes {most} at once; ask for "
                "fewer",
                param="n",
            )
        if held + wanted > most:
            raise ApiError(
                f"{held} sequences run or wait, and the server takes {most}; send the request again in a moment",
                status=429,
                code="queue_full",
                headers={"Retry-After": str(self._seconds_to_wait(wanted))},
            )

    def _seconds_to_wait(self, wanted: int) -> int:
        """Estimated seconds until ``wanted`` sequences have ended, by the time that the latest ones took."""
        return min(60, max(1, math.ceil(self.metrics.seconds_each * wanted / self.config.max_num_seqs)))

    def _speculation(self, fields: Generating) -> dict[str, Any]:
        """A request's options for drafting; raises ApiError for one that the server does not allow."""
        asked = fields.speculation or Speculation.model_validate({})
        options: dict[str, Any] = {"max_rows": asked.max_rows, "trace": asked.trace}
        options["prefix_cache"] = None if self.prefixes is None else self.prefixes.salted(fields.cache_salt or "")
        if asked.max_rows is not None and asked.max_rows > self.engine.max_rows:
            raise ApiError(
                f"speculation.max_rows is {asked.max_rows}, and the server's is {self.engine.max_rows}; ask for at "
                "most as many",
                param="speculation.max_rows",
            )
        if asked.drafter is not None:
            if asked.drafter not in self.drafters:
                raise ApiError(
                    unknown("drafter", asked.drafter, self.drafters),
                    param="speculation.drafter",
                )
            options["drafter"] = self.drafters[asked.drafter]
        return options

    def gauge(self) -> None:
        """Update the gauges of running and waiting sequences."""
        held = len(self.thread.unfinished)
        self.metrics.running = min(held, self.config.max_num_seqs)
        self.metrics.waiting = held - self.metrics.running
        self.metrics.prefix_bytes = 0 if self.prefixes is None else self.prefixes.nbytes

    async def close(self) -> None:
        """Stop the threads."""
        await self.thread.close(waits=not self.forced)
        for lane in self.lanes:
            lane.close()


_PREFIX_BYTES = 1 << 30
_STEP_SECONDS = 0.25  # of a step's rows, in which prompts come in and everybody else waits for the next token
_MOST_STEP_ROWS = 256  # more rows make no product faster


def step_rows(engine: Engine, config: ServeConfig) -> int:
    """Most rows of a step: those of ``--max-num-batched-tokens``, or by the measured costs of rows.

    Raises:
        ConfigError: the option's value cannot hold one draft.
    """
    given = config.max_num_batched_tokens
    if given is not None:
        if given < engine.max_rows:
            raise ConfigError(
                f"max_num_batched_tokens is {given}, and one draft may have max_rows = {engine.max_rows} rows; give at "
                "least as many"
            )
        return given
    costs, length = engine.costs, min(2048, engine.target.context_length - 1)
    seconds = costs.at(length, _MOST_STEP_ROWS)
    return max(engine.max_rows, int((seconds <= _STEP_SECONDS).sum()) - 1)


def _context(engine: Engine, config: ServeConfig) -> int:
    """Most tokens of a prompt and its answer.

    Raises:
        ConfigError: ``--max-model-len`` is more than the model has.
    """
    most, own = config.max_model_len, engine.target.context_length
    if most is not None and most > own:
        raise ConfigError(f"max_model_len is {most}, and the model's context holds {own} tokens; give at most {own}")
    return own if most is None else most


_UNTRAINED = ("auto", "jacobi", "lookahead", "prompt_lookup", "suffix_automaton", "token_recycling")


def _drafters(engine: Engine, config: ServeConfig) -> dict[str, Drafter | None]:
    """The drafters that requests can name, by name; making them here keeps that work out of the steps.

    Raises:
        ConfigError: a drafter is unknown or needs options.
    """
    own = engine.drafter.name
    names = ["none", *(config.drafters or [name for name in _UNTRAINED if name in drafter_names()])]
    return {name: None if name == own else make_drafter(name, engine.target) for name in dict.fromkeys([*names, own])}


def sampling_defaults(engine: Engine, config: ServeConfig) -> dict[str, Any]:
    """The checkpoint's sampling defaults, where the server's options ask for them."""
    if config.generation_config == "openai":
        return {}
    own = engine.target.generation_config
    if own is None:
        return {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: getattr(own, name, None) for name in names}
    if not own.do_sample:
        values["temperature"] = 0.0
    return {name: value for name, value in values.items() if value is not None}
