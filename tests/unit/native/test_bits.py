"""The native library's bits: no row's depend on other rows, and none on the compiler, its level or its tuning.

The driver in ``bits/`` is compiled in several ways; builds of one class of arithmetic have to print the same hashes.
``scripts/native_bits.py`` has Arm's as well, and tries every combination with ``--all``.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from scripts.native_bits import CHOSEN, SMALL, Build, differences

EXACT = ("by row", "in exact sums")  # groups of blocks in which nothing is rounded that depends on an order of sums
BUILDS = [one for one in CHOSEN if one.target != "arm"]  # an emulated machine takes minutes


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run, the same for all workers, as builds of a class may be tested by several."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def test_bits_without_products_are_those_of_the_class(tmp_path: Path, shared: Path) -> None:
    """Both builds in one test, so that they meet wherever it runs."""
    for build in SMALL:
        (tmp_path / build.level).mkdir()
        _check(build, tmp_path / build.level, shared)


@pytest.mark.slow
@pytest.mark.parametrize("build", [pytest.param(one, id=one.name) for one in BUILDS])
def test_a_build_s_bits_are_those_of_its_class(build: Build, tmp_path: Path, shared: Path) -> None:
    again = any(one.target == build.target for one in BUILDS[: BUILDS.index(build)])
    _check(build, tmp_path, shared, quick=again)


def _check(build: Build, folder: Path, shared: Path, quick: bool = False) -> None:
    if why := build.missing():
        pytest.skip(why)
    name, found = build.run(folder, quick)  # it fails where rows of one build differ
    exact = {group: one for group, one in found.items() if group.endswith(EXACT)}
    for groups, builds in ((found, name), (exact, "all classes")):
        own, first = folder / f"{builds}.json", shared / f"{builds}, small {build.small}.json"
        own.write_text(json.dumps([str(build), groups]), encoding="utf-8")
        with suppress(FileExistsError):
            os.link(own, first)  # whole or not at all
        other, expected = json.loads(first.read_text(encoding="utf-8"))
        assert not differences(expected, groups), f"{build} differs from {other}, both of {builds}"


def test_chosen_builds_meet_every_choice() -> None:
    """In each class both compilers, both levels, and contraction off and fast, as far as a class has them."""
    for targets in (("v2",), ("v3", "v3 and AVX-VNNI"), ("v4",), ("pairs", "tiles")):  # tiles have pairs' groups, too
        own = [one for one in CHOSEN if one.target in targets]
        assert {one.compiler for one in own} == {"gcc", "clang"}
        assert {one.level for one in own} == {"-O2", "-O3"}
        assert {one.contract for one in own} == {"off", "fast"}
    assert {one.tune for one in CHOSEN} == {"generic", "haswell", "znver2", "znver3", "alderlake", "sapphirerapids"}


def test_a_group_that_differs_is_named() -> None:
    one, other = {"a": "1", "b": "2", "c, by tiles": "3", "all": "4"}, {"a": "1", "b": "5", "d": "6", "all": "7"}
    assert differences(one, other) == ["b", "all", "d"]
