"""One server for many tests: the embedded model, whose chat template also knows tools.

Where a test of this folder is named on the command line, this file is imported before ``tests/conftest.py`` prepares
the process; so it imports nothing at its top.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from specdec import Engine
    from tests.serving import Running

TOOLS = (
    "{% if tools %}{{ '# Tools: <tool_call>' }}"
    "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{{ '\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def served_engine(tiny_engine: Engine) -> Engine:
    """An engine that drafts, whose tokenizer writes tools."""
    from specdec.native.library import library

    library()  # which may have to be compiled, and not while a client waits
    tokenizer = copy.deepcopy(tiny_engine.tokenizer)
    tokenizer.chat_template = TOOLS + tokenizer.chat_template
    engine = tiny_engine.with_drafter("prompt_lookup")
    engine.tokenizer = tokenizer
    return engine


@pytest.fixture(scope="session")
def running(served_engine: Engine) -> Iterator[Running]:
    from tests.serving import serving

    with serving(served_engine, max_num_seqs=4, max_queue=1000) as server:
        yield server
