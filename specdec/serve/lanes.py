"""Lanes: threads that read, tokenize and plan requests, beside the event loop and the thread that decodes.

A lane takes its requests in order. Large bodies have a lane of their own, so that one of eight megabytes holds up no
request of usual size.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from specdec.engine.conversations import answer_end
from specdec.engine.engine import Engine
from specdec.serve.json_grammar import Grammars
from specdec.serve.plan import Limits, Planner
from specdec.serve.prompts import Encoder

__all__ = ["LARGE", "Lane"]

LARGE = 1 << 16
"""Bytes of a body from which on it is a large one."""

T = TypeVar("T")


class Lane:
    """A thread with a tokenizer, an encoder and a planner of its own, as one thread at a time may use a tokenizer.

    Args:
        name: the thread's name.
        engine: the engine that decodes.
        limits: what the server allows requests.
        defaults: see :class:`specdec.serve.plan.Planner`.
    """

    def __init__(self, name: str, engine: Engine, limits: Limits, defaults: dict[str, Any]) -> None:
        self._engine, self._tokenizer = engine, copy.deepcopy(engine.tokenizer)
        self.encoder = Encoder(engine, self._tokenizer, limits.context)
        self.planner = Planner(engine, self.encoder, lambda: self._grammars, defaults, limits)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"specdec-{name}")

    @cached_property
    def _grammars(self) -> Grammars:
        target, end = self._engine.target, answer_end(self._engine.tokenizer)
        return Grammars(self._tokenizer, target.vocab_size, target.eos_ids | ({end} if end is not None else set()))

    async def call(self, work: Callable[..., T], *arguments: Any) -> T:
        """The result of ``work(lane, *arguments)``, made in the lane's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self, *arguments)

    def close(self) -> None:
        """Take no more work; what waits is left undone."""
        self._thread.shutdown(wait=False, cancel_futures=True)
