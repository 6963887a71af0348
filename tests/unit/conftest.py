"""Packages that exist for one test, and llama.cpp for the tests of what is read from files and written to them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.llama_cpp import LlamaCpp

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install(entry_points, module=source, ...)``: as if pip had just installed a package of these modules."""
    site = tmp_path / "site"
    modules: set[str] = set()

    def install_package(entry_points: str, **sources: str) -> None:
        info = site / "sample-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sample\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        for module, source in sources.items():
            (site / f"{module}.py").write_text(source)
        modules.update(sources)
        monkeypatch.syspath_prepend(site)

    yield install_package
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[LlamaCpp]:
    if find_spec("xllamacpp") is None:
        pytest.skip("llama.cpp is not installed: pip install xllamacpp")
    found = LlamaCpp()
    yield found
    found.close()
