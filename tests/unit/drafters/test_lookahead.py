"""Lookahead: the window's lengths and shape, its n-grams, the pool's order, by hand and on a target without weights."""

from __future__ import annotations

import pytest

from drafters.lookahead import LookaheadConfig, NgramPool, Window
from specdec import Draft, Engine
from specdec.drafting.registry import make_drafter
from specdec.errors import ConfigError
from specdec.step.tree import DraftBuilder
from tests.fakes import Reciter, Spy


def place(window: Window, verify: str = "all") -> tuple[Draft, list[int]]:
    builder = DraftBuilder(0)
    last = window.place(builder, verify)
    return builder.build(read=last), last


@pytest.mark.parametrize(("size", "ngram"), [(1, 2), (4, 2), (1, 3), (5, 3), (3, 5), (7, 5), (1, 6)])
def test_window_fills_in_n_minus_2_steps_to_its_lengths(size: int, ngram: int) -> None:
    """From W + N - 3 tokens to W - 1, W, ..., W; then it moves on by one column a step and keeps them."""
    window = Window(size, ngram, list(range(100, 100 + size + ngram - 3)))
    full = [size - 1, *[size] * (ngram - 2)]
    for step in range(ngram + 3):
        lengths = [len(level) for level in window.levels]
        if step < ngram - 2:
            assert lengths[0] == size + ngram - 3 - step
            assert not window.full
        else:
            assert lengths == full
            assert window.full
        _, last = place(window)
        grams = window.advance(0, [1000 * step + row for row in range(len(last))])
        assert len(grams) == (size if step >= ngram - 2 else 0)
        assert all(len(rest) == ngram - 1 for _, rest in grams)


def test_a_window_by_hand() -> None:
    """W = 3, N = 3. The root is 0; its column's level-1 token hangs under it, the others under their column's."""
    window = Window(3, 3, [11, 12, 13])
    draft, last = place(window)
    assert (list(draft.tokens), list(draft.parents), last) == ([0, 11, 12, 13], [-1, 0, 1, 2], [1, 2, 3])
    assert window.advance(0, [21, 22, 23]) == []
    assert window.levels == [[12, 13], [21, 22, 23]]

    draft, last = place(window)
    assert list(draft.tokens) == [0, 12, 13, 21, 22, 23]
    assert list(draft.parents) == [-1, 0, 1, 0, 1, 2]
    assert draft.depths == [0, 1, 2, 1, 2, 3]  # so column c, level l stands at position n + c + l
    assert last == [3, 4, 5]
    assert window.advance(7, [31, 32, 33]) == [(7, (21, 31)), (12, (22, 32)), (13, (23, 33))]
    assert window.levels == [[22, 23], [31, 32, 33]]


def test_n_2_is_jacobi() -> None:
    """Level 0 alone; the answer after the root counts, too."""
    window = Window(3, 2, [11, 12])
    draft, last = place(window)
    assert (list(draft.tokens), last) == ([0, 11, 12], [0, 1, 2])
    assert window.advance(0, [21, 22, 23]) == [(0, (21,)), (11, (22,)), (12, (23,))]
    assert window.levels == [[22, 23]]


@pytest.mark.parametrize(("verify", "candidates"), [("all", {1, 2, 3, 4, 5}), ("column", {3}), ("none", set())])
def test_which_rows_of_the_window_may_be_accepted(verify: str, candidates: set[int]) -> None:
    window = Window(3, 3, [11, 12, 13])
    window.advance(0, [21, 22, 23])
    draft, _ = place(window, verify)
    assert set(range(1, len(draft))) - draft.probes == candidates
    assert draft.scored_rows() == sorted({0, 3, 4, 5} | candidates) or draft.scored_rows() is None


def test_pool_keeps_the_latest_g_and_gives_the_freshest_first() -> None:
    pool = NgramPool(3, 2)
    for rest in ((1, 2), (3, 4), (5, 6)):
        pool.add(9, rest)
    assert list(pool.of(9)) == [(5, 6), (3, 4)]  # (1, 2) went
    pool.add(9, (3, 4))
    assert list(pool.of(9)) == [(3, 4), (5, 6)]
    pool.add(9, (7, 8))
    assert list(pool.of(9)) == [(7, 8), (3, 4)]
    assert list(pool.of(1)) == []


def test_pool_reads_each_n_gram_of_the_text_once() -> None:
    pool = NgramPool(3, 9)
    pool.read([1, 2, 3, 4])
    assert [list(pool.of(key)) for key in (1, 2, 3)] == [[(2, 3)], [(3, 4)], []]
    pool.add(1, (8, 8))
    pool.read([1, 2, 3, 4, 1, 2])
    assert [list(pool.of(key)) for key in (1, 3, 4)] == [[(8, 8), (2, 3)], [(4, 1)], [(1, 2)]]  # (2, 3) is not fresh


@pytest.mark.few(1)
@pytest.mark.parametrize(("window", "ngram", "guesses"), [(4, 4, 3), (1, 4, 1), (5, 2, 5), (6, 3, 2)])
def test_rows_of_a_step(window: int, ngram: int, guesses: int) -> None:
    """At most 1 + (W-1) + W(N-2) + G(N-1), and no less than the window once that is full."""
    drafts: list[Draft] = []
    target = Reciter(lambda text: (7 * text[-1] + len(text)) % 100)
    options = {"name": "lookahead", "window": window, "ngram": ngram, "guesses": guesses}
    Engine(target, None, Spy(make_drafter(options, target), drafts.append)).generate([1, 2, 3], 40)
    own = 1 + (window - 1) + window * (ngram - 2)
    assert max(map(len, drafts)) <= own + guesses * (ngram - 1)
    # Rows that spell the same are one; here no two of a window's do.
    assert min(map(len, drafts[ngram - 2 : -ngram])) >= own - guesses


def test_the_pool_is_proposed_beside_the_window() -> None:
    drafts: list[Draft] = []
    target = Reciter(lambda text: (text[-1] + 1) % 5)
    options = {"name": "lookahead", "window": 1, "ngram": 4, "guesses": 1}
    out = Engine(target, None, Spy(make_drafter(options, target), drafts.append)).generate([0, 1, 2, 3, 4, 0], 40)
    assert list(drafts[0].tokens)[-3:] == [1, 2, 3]  # the prompt's own n-gram after token 0
    assert out.stats.tokens_per_step > 3.5  # all three and the bonus token, step after step
    off = {**options, "verify": False, "verify_window": "none"}
    assert Engine(target, None, off).generate([0, 1, 2, 3, 4, 0], 40).stats.tokens_per_step == 1


def test_a_small_room_costs_guesses_and_not_the_window() -> None:
    drafts: list[Draft] = []
    target = Reciter(lambda text: (text[-1] + 1) % 5)
    options = {"name": "lookahead", "window": 3, "ngram": 3, "guesses": 4}
    engine = Engine(target, None, Spy(make_drafter(options, target), drafts.append), max_rows=7)
    engine.generate([0, 1, 2, 3, 4, 0], 20)
    assert all(len(draft) <= 7 for draft in drafts)
    assert any(draft.read for draft in drafts)
    tight = Engine(target, None, Spy(make_drafter(options, target), drafts.append), max_rows=1)
    assert tight.generate([0, 1], 6).stats.rows == [1] * 6


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"window": 0}, "lookahead.window is 0; it must be at least 1"),
        ({"ngram": 1}, "lookahead.ngram is 1; it must be at least 2"),
        ({"guesses": 0}, "lookahead.guesses is 0; it must be at least 1"),
        ({"verify_window": "some"}, "lookahead.verify_window is 'some'; it must be all, column or none"),
    ],
)
def test_options_are_checked(values: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LookaheadConfig(**values)  # type: ignore[arg-type]
