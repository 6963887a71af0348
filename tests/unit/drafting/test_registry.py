"""The registry: drafters by name, their options, and what it says of drafters that are broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specdec import Context, Drafter, DrafterBase, DrafterWrapper, DraftSession, Engine
from specdec.drafting.registry import drafter_names, drafter_type, make_drafter, parse_drafter
from specdec.errors import ConfigError
from tests.unit.conftest import Install


def test_names_are_sorted_and_hold_the_four_of_the_core() -> None:
    names = drafter_names()
    assert names == sorted(names)
    assert {"none", "jacobi", "lookahead", "prompt_lookup"} <= set(names)


def test_every_drafter_goes_by_its_registered_name() -> None:
    for name in drafter_names():
        assert drafter_type(name).name == name


def test_unknown_drafter_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown drafter 'lokahead'; did you mean 'lookahead'\? known: .*jacobi"):
        parse_drafter("lokahead")


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown option of lookahead 'windw'; did you mean 'window'\?"):
        parse_drafter({"name": "lookahead", "windw": 3})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "lookahead", "window": 0}, "lookahead.window is 0; it must be at least 1"),
        ({"name": "lookahead", "guesses": -4}, "lookahead.guesses is -4; it must be at least 1"),
        ({"name": "lookahead", "ngram": 1}, "lookahead.ngram is 1; it must be at least 2"),
        ({"name": "jacobi", "guesses": -1}, "jacobi.guesses is -1; it must be at least 1"),
        ({"name": "prompt_lookup", "tokens": 0}, "prompt_lookup.tokens is 0; it must be at least 1"),
        ({"name": "prompt_lookup", "match": "middle"}, "match is 'middle'; it must be leftmost or rightmost"),
        ({"name": "jacobi", "guesses": "many"}, "jacobi.guesses is 'many', of type str; it must be of type int"),
        ({"name": "jacobi", "guesses": True}, "jacobi.guesses is True, of type bool; it must be of type int"),
        ({"name": "none", "window": 3}, "unknown option of none 'window'; known: none"),
        ({"window": 3}, "has no name; choose one of"),
    ],
)
def test_bad_options_are_refused_with_value_and_remedy(spec: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_drafter(spec)
    assert message in str(error.value)


def test_a_drafter_stands_for_itself_and_nothing_else_does(tiny_engine: Engine) -> None:
    drafter = make_drafter({"name": "jacobi", "guesses": 7}, tiny_engine.target)
    assert make_drafter(drafter, tiny_engine.target) is drafter
    with pytest.raises(ConfigError, match=r"drafter is 7; it must be a name, \{'name': ..., \*\*options\}, or "):
        make_drafter(7, tiny_engine.target)  # type: ignore[arg-type]


class Bare(DrafterBase):
    """A drafter whose author forgot its Config."""

    name = "bare"

    def start(self, context: Context) -> DraftSession:
        raise AssertionError


class Idle(DrafterBase):
    """And one whose author forgot what it is for."""

    name = "idle"
    Config = dict


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Bare, "drafter Bare has no Config; give the class one, a frozen dataclass"),
        (lambda: Bare.build(None, None), "drafter Bare has no Config; give the class one"),  # type: ignore[arg-type]
        (lambda: Bare, "Bare'>, of type type; it must be a name, .* or a drafter: an object with start, not its class"),
        (Idle, "of type Idle; it must be a name, .*, or a drafter: an object with start"),
        (lambda: {"name": "union", "parts": [Bare]}, "not its class"),
    ],
)
def test_a_drafter_that_lacks_something_is_named(make: Callable[[], object], message: str, tiny_engine: Engine) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_engine.with_drafter(make())  # type: ignore[arg-type]


def test_a_package_that_raises_on_import_is_named(install: Install) -> None:
    install("[specdec.drafters]\nbroken = broken_package:Drafter\n", broken_package="1 / 0\n")
    assert "broken" in drafter_names()
    with pytest.raises(ConfigError, match=r"'broken' is registered as 'broken_package:Drafter'.*ZeroDivisionError"):
        drafter_type("broken")


def test_a_class_that_is_no_drafter_is_named(install: Install) -> None:
    install("[specdec.drafters]\nbare = bare_package:Bare\n", bare_package="class Bare:\n    name = 'bare'\n")
    with pytest.raises(ConfigError, match=r"has no Config and no build; subclass specdec.DrafterBase"):
        drafter_type("bare")


def test_one_file_and_one_entry_point_make_a_drafter(install: Install, tiny_engine: Engine) -> None:
    source = Path(__file__).parents[1].joinpath("third_party_drafter.py").read_text()
    install("[specdec.drafters]\nshout = shout:Shout\n", shout=source)
    plain = tiny_engine.generate("x = [0, 0, 0, 0, ", 16)
    shouted = tiny_engine.with_drafter({"name": "shout", "times": 4}, policy="off").generate("x = [0, 0, 0, 0, ", 16)
    assert shouted.token_ids == plain.token_ids
    assert shouted.stats.rows[0] == 5  # the root and four guesses
    with pytest.raises(ConfigError, match="unknown option of shout 'time'; did you mean 'times'"):
        parse_drafter({"name": "shout", "time": 4})


class Odd(DrafterBase):
    """Differs from the defaults in all that the engine reads."""

    name, Config = "odd", dict
    taps = frozenset({1})
    needs_observe = False
    needs_draft = False
    proposes = False
    plans_rows = True
    draws = False
    top_k = 3
    fixed_cost_rows = 5

    def start(self, context: Context) -> DraftSession:
        raise NotImplementedError


def test_a_wrapper_has_all_that_the_engine_reads_from_a_drafter() -> None:
    for name in Drafter.__annotations__:
        assert getattr(DrafterBase, name, None) != getattr(Odd, name), "the test would not notice its loss"
        assert getattr(DrafterWrapper(DrafterWrapper(Odd())), name) == getattr(Odd, name)


def test_a_drafter_that_does_not_declare_itself_is_refused(tiny_engine: Engine) -> None:
    class Bare:
        name = "bare"
        taps = frozenset[int]()
        plans_rows = False

        def start(self, context: Context) -> DraftSession:
            raise NotImplementedError

    message = (
        r"drafter Bare does not say its needs_observe, needs_draft, top_k, proposes, draws, fixed_cost_rows; "
        r"subclass specdec\.DrafterBase"
    )
    with pytest.raises(ConfigError, match=message):
        make_drafter(Bare(), tiny_engine.target)  # type: ignore[arg-type]
