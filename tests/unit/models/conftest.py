"""llama.cpp for the tests of what is read from files and written to them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.llama_cpp import LlamaCpp


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[LlamaCpp]:
    if find_spec("xllamacpp") is None:
        pytest.skip("llama.cpp is not installed: pip install xllamacpp")
    found = LlamaCpp()
    yield found
    found.close()
