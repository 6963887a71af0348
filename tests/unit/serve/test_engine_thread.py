"""The engine's thread ends before whoever closes it goes on."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

from specdec.serve.engine_thread import EngineThread


class Stepping:
    """A scheduler whose only step lasts until it is allowed to end."""

    idle = False

    def __init__(self) -> None:
        self.runs, self.may_end = Event(), Event()

    def step(self) -> list[Any]:
        self.runs.set()
        self.may_end.wait()
        return []


def test_the_running_step_is_waited_for() -> None:
    """An interpreter that ends while a thread runs torch's code aborts."""
    scheduler = Stepping()
    thread = EngineThread(lambda: scheduler)  # type: ignore[arg-type, return-value]

    async def close() -> bool:
        await thread.close()
        return scheduler.may_end.is_set()

    async def run() -> bool:
        thread.start()
        await asyncio.to_thread(scheduler.runs.wait)
        closed = asyncio.ensure_future(close())
        for _ in range(3):  # a close that does not wait is done by then
            await asyncio.sleep(0)
        scheduler.may_end.set()
        return await closed

    assert asyncio.run(run())
