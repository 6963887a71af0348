"""Service: an engine with its thread, prompts, grammars, figures and limits."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from time import time
from typing import Any, TypeVar

from specdec.drafter import Drafter
from specdec.drafting.registry import drafter_names, make_drafter
from specdec.engine.conversations import answer_end
from specdec.engine.engine import Engine
from specdec.engine.prefix_tree import PrefixTree
from specdec.engine.scheduler import Scheduler
from specdec.errors import shown, unknown
from specdec.serve.calls import MARKS
from specdec.serve.config import ServeConfig
from specdec.serve.engine_thread import EngineThread, Inbox, Submitted
from specdec.serve.errors import ApiError
from specdec.serve.fields import Speculation
from specdec.serve.json_grammar import Grammars
from specdec.serve.metrics import Metrics
from specdec.serve.plan import Plan, Planner
from specdec.serve.prompts import Encoder

__all__ = ["Service", "sampling_defaults"]

T = TypeVar("T")


class Service:
    """Answers requests with an engine.

    Args:
        engine: an engine with a tokenizer.
        config: names, limits and defaults; its engine options have already been applied.

    Attributes:
        drafters: drafters that requests can name, by name; None stands for the engine's own.
        prefixes: the cache of prompt prefixes; None where prefixes are not kept.
        draining: whether the server is ending and refuses new requests.
    """

    def __init__(self, engine: Engine, config: ServeConfig) -> None:
        self.engine, self.config = engine, config
        self.name, self.created = config.name, int(time())
        self.draining = False
        self.metrics = Metrics(self.name, config.max_num_seqs, config.cache_bytes)
        self.thread = EngineThread(self._scheduler, self.metrics.stepped)
        # One thread at a time may use a tokenizer; the engine's own is for the threads that decode.
        self._tokenizer = copy.deepcopy(engine.tokenizer)
        self.encoder = Encoder(engine, self._tokenizer)
        self.planner = Planner(
            engine, self.encoder, lambda: self._grammars, sampling_defaults(engine, config), self._speculation
        )
        self.drafters = _drafters(engine, config)
        kept = config.prefix_bytes if config.prefix_bytes is not None else config.cache_bytes or _PREFIX_BYTES
        self.prefixes = PrefixTree(max_bytes=kept) if kept else None
        self._planning = ThreadPoolExecutor(1, thread_name_prefix="specdec-plan")
        template = getattr(engine.tokenizer, "chat_template", None)
        self.marks_calls = isinstance(template, str) and MARKS[0] in template

    def _scheduler(self) -> Scheduler:
        config = self.config
        self.engine.warm_up(config.max_num_seqs)
        return Scheduler(self.engine, batch=config.max_num_seqs, cache_bytes=config.cache_bytes, prefixes=self.prefixes)

    @cached_property
    def _grammars(self) -> Grammars:
        end = answer_end(self.engine.tokenizer)
        ends = self.engine.target.eos_ids | ({end} if end is not None else set())
        return Grammars(self._tokenizer, self.engine.target.vocab_size, ends)

    @property
    def ready(self) -> bool:
        """Whether the server accepts new requests."""
        return self.thread.alive and not self.draining

    async def apart(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a call that tokenizes or compiles in a thread, and return its result, without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._planning, call, *arguments)

    def check_ready(self) -> None:
        """Raises ApiError where the server refuses new requests."""
        if not self.ready:
            why = "is shutting down" if self.draining else "has no engine that runs"
            raise ApiError(
                f"the server {why}; send the request to another, or later",
                status=503,
                kind="server_error",
                code="unavailable",
                headers={"Retry-After": "5"},
            )

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that this server does not have; a request need not name one."""
        if name is not None and name != self.name:
            raise ApiError(
                f"there is no model {shown(name)} here; this server has {self.name!r}",
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
        wanted, held = len(plan.requests), len(self.thread.unfinished)
        most = self.config.max_num_seqs + self.config.max_queue
        if wanted > most:
            raise ApiError(
                f"the request wants {wanted} answers, and the server takes {most} at once; ask for fewer", param="n"
            )
        if held + wanted > most:
            raise ApiError(
                f"{held} sequences run or wait, and the server takes {most}; send the request again in a moment",
                status=429,
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(self._seconds_to_wait(wanted))},
            )
        return [self.thread.submit(request, inbox, index) for index, request in enumerate(plan.requests)]

    def _seconds_to_wait(self, wanted: int) -> int:
        """Estimated seconds until ``wanted`` sequences have ended, by the time that the latest ones took."""
        return min(60, max(1, math.ceil(self.metrics.seconds_each * wanted / self.config.max_num_seqs)))

    def _speculation(self, asked: Speculation) -> dict[str, Any]:
        """A request's options for drafting; raises ApiError for one that the server does not allow."""
        options: dict[str, Any] = {"max_rows": asked.max_rows, "prefix_cache": self.prefixes, "trace": asked.trace}
        if asked.max_rows is not None and asked.max_rows > self.engine.max_rows:
            raise ApiError(
                f"speculation.max_rows is {asked.max_rows}, and the server's is {self.engine.max_rows}; ask for at "
                "most as many",
                param="speculation.max_rows",
                code="invalid_value",
            )
        if asked.drafter is not None:
            if asked.drafter not in self.drafters:
                raise ApiError(
                    unknown("drafter", asked.drafter, self.drafters),
                    param="speculation.drafter",
                    code="invalid_value",
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
        await self.thread.close()
        self._planning.shutdown(wait=False, cancel_futures=True)


_PREFIX_BYTES = 1 << 30
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
    own: Any = getattr(getattr(engine.target, "model", None), "generation_config", None)
    if own is None:
        return {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: getattr(own, name, None) for name in names}
    if not own.do_sample:
        values["temperature"] = 0.0
    return {name: value for name, value in values.items() if value is not None}
