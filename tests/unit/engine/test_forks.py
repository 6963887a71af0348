"""A process that was forked from one whose threads compute says so, where it would wait for them for ever."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec import Engine, TransformersTarget
from specdec.costs.machine import Threads
from tests import models

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
PROMPT = models.prompt_of(7)


def said_by_child(work: Callable[[], Any]) -> str:
    """What it comes to in a forked process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode()[:4000])
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def test_a_forked_process_does_not_wait_for_threads_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as specdec sees: such small products are computed by one thread, so that nothing would hang here."""
    engine, counted = Engine(models.target_of("llama")), [2]
    monkeypatch.setattr(Threads, "_started_by", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: counted[0])

    def generate() -> list[int]:
        return engine.generate(PROMPT, 5).token_ids

    def generate_by_one() -> list[int]:
        counted[0] = 1
        return generate()

    counted[0] = 1
    expected = generate()
    counted[0] = 2
    assert said_by_child(generate) == str(expected)  # no threads were started yet
    assert generate() == expected
    told = (
        f"ForkError: process [0-9]+ was forked from process {os.getpid()}, .* a generation with 2 threads would never"
    )
    for work in (
        generate,
        lambda: engine.start(PROMPT, 5),
        lambda: engine.generate_batch([PROMPT], 5),
        lambda: engine.target.active(),  # as every chunk of a stream that began before the fork
        lambda: TransformersTarget(models.new_model("llama")),
    ):
        assert re.match(told, said_by_child(work))
    assert said_by_child(generate_by_one) == str(expected)
    assert generate() == expected
