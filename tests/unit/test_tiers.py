"""The mark ``few`` leaves cases in the first tier, as many as it says, wherever they are spread."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.conftest import pytest_collection_modifyitems


class Case:
    """A case of a test as pytest collects it."""

    def __init__(self, nodeid: str, **marks: Any) -> None:
        self.nodeid, self.marks = nodeid, marks

    def get_closest_marker(self, name: str) -> Any:
        return SimpleNamespace(args=(self.marks[name],)) if name in self.marks else None

    def add_marker(self, name: str) -> None:
        self.marks[name] = True


def quick(cases: list[Any]) -> list[int]:
    pytest_collection_modifyitems(cases)
    return [place for place, case in enumerate(cases) if "slow" not in case.marks]


def test_few_cases_are_quick() -> None:
    for count in range(1, 40):
        for number in range(1, count + 1):
            found = quick([Case(f"file::test[{place}]", few=number) for place in range(count)])
            assert len(found) == number
            assert found[-1] >= (number - 1) * count // number, "they are not spread"


def test_those_that_are_slow_already_are_not_counted_and_other_tests_are_left_alone() -> None:
    cases = [Case(f"file::test[{place}]", few=1, **({"slow": True} if place < 3 else {})) for place in range(6)]
    assert quick([*cases, Case("file::other"), Case("file::third[0]")]) == [3, 6, 7]
