"""The native library's bits: no row's depend on other rows, and none on the compiler, its level or its tuning.

The driver in ``bits/`` is compiled in several ways; builds of one class of arithmetic have to print the same hashes.
``scripts/native_bits.py`` has more of them, and tries every combination with ``--all``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.native_bits import CHOSEN, Build, differences

BUILDS = [one for one in CHOSEN if one.target in ("v3", "v4", "tiles")]  # each takes half a minute of a processor
FEW = 2  # builds of the quick tier, of one class: with contraction off, and fast
_first: dict[str, tuple[Build, dict[str, str]]] = {}


@pytest.mark.parametrize(
    "build",
    [pytest.param(one, id=str(one), marks=() if at < FEW else pytest.mark.slow) for at, one in enumerate(BUILDS)],
)
def test_a_build_s_bits_are_those_of_its_class(build: Build, tmp_path: Path) -> None:
    if why := build.missing():
        pytest.skip(why)
    name, found = build.run(tmp_path)  # it fails where rows of one build differ
    other, expected = _first.setdefault(name, (build, found))
    assert not differences(expected, found), f"{build} differs from {other}, both of {name}"


def test_chosen_builds_meet_every_choice() -> None:
    """In each class both compilers, both levels, and contraction off and fast, as far as a class has them."""
    for target in ("v2", "v3", "v4", "pairs"):
        own = [one for one in CHOSEN if one.target == target or (target == "pairs" and one.target == "tiles")]
        assert {one.compiler for one in own} == {"gcc", "clang"}
        assert {one.level for one in own} == {"-O2", "-O3"}
        assert {one.contract for one in own} == {"off", "fast"}
    assert {one.tune for one in CHOSEN} == {"generic", "haswell", "znver2", "znver3", "alderlake", "sapphirerapids"}


def test_a_group_that_differs_is_named() -> None:
    one, other = {"a": "1", "b": "2", "c, by tiles": "3", "all": "4"}, {"a": "1", "b": "5", "d": "6", "all": "7"}
    assert differences(one, other) == ["b", "all", "d"]
