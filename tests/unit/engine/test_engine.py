"""Engine: what a step commits, where a block is cut, what a drafter is asked and shown. On a target without weights."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specdec import Context, Draft, Engine, SamplingParams
from specdec.drafter import DrafterBase
from tests.fakes import Reciter, Scripted


def count(text: Sequence[int]) -> int:
    return (text[-1] + 1) % 100


def chain(size: int) -> Scripted:
    """Drafts of ``size`` rows, all right."""
    return Scripted(
        lambda context, row_budget: Draft.chain([context.root + row for row in range(min(size, row_budget))])
    )


def bush(context: Context, row_budget: int) -> Draft:
    """Rows 2 and 4 are right: the text goes root, row 2, row 4; row 5 is right too late."""
    root = context.root
    return Draft([root, 50, root + 1, 51, root + 2, root + 3], [-1, 0, 0, 1, 2, 3])


def slots(drafter: Scripted) -> list[int]:
    cache = drafter.context.cache
    return [int(key) for key in cache.keys[0][0, 0, : cache.length, 0]]


def test_a_step_by_hand() -> None:
    drafter = Scripted(bush)
    engine = Engine(Reciter(count), None, drafter)
    decoding = engine.start([7, 8, 3], 20)
    decoding.prefill()
    assert drafter.context.cache.length == 2  # the root is not cached
    step = decoding.step()
    assert (step.tokens, step.rows) == ([4, 5, 6], 6)
    (seen,) = drafter.seen
    assert list(seen.path) == [0, 2, 4]
    assert seen.tokens == [4, 5, 6]  # the bonus token last
    assert drafter.context.tokens == [7, 8, 3, 4, 5, 6]
    assert slots(drafter) == [7, 8, 3, 4, 5]  # gathered out of rows 0, 2 and 4
    assert [seen.argmax(row) for row in range(6)] == [4, 51, 5, 52, 6, 7]


def test_prefill_runs_all_but_the_root_in_chunks() -> None:
    target = Reciter(count)
    Engine(target, prefill_chunk=4).generate(list(range(10)), 2)
    assert target.forwards == [4, 4, 1, 1, 1]


@pytest.mark.parametrize(("chunk", "forwards"), [(1, [1, 1, 1]), (2, [2, 1]), (3, [3]), (None, [3])])
def test_prefill_chunk(chunk: int | None, forwards: list[int]) -> None:
    target = Reciter(count)
    decoding = Engine(target, prefill_chunk=chunk).start([1, 2, 3, 4], 5)
    decoding.prefill()
    assert target.forwards == forwards


# Prompt [1, 2, 3] and blocks of four tokens: 4 5 6 7, then 8 9 10 11.
@pytest.mark.parametrize(
    ("eos", "text"),
    [((4,), [4]), ((6,), [4, 5, 6]), ((7,), [4, 5, 6, 7]), ((8,), [4, 5, 6, 7, 8]), ((9, 5), [4, 5])],
)
def test_eos_cuts_a_block(eos: tuple[int, ...], text: list[int]) -> None:
    drafter = chain(4)
    out = Engine(Reciter(count, eos_ids=eos), None, drafter).generate([1, 2, 3], 20)
    assert (out.token_ids, out.finish_reason) == (text, "eos")
    assert slots(drafter) == [1, 2, 3, *text[:-1]]


@pytest.mark.parametrize("budget", range(1, 10))
def test_budget_cuts_a_block(budget: int) -> None:
    drafter = chain(4)
    out = Engine(Reciter(count), None, drafter).generate([1, 2, 3], budget)
    assert (out.token_ids, out.finish_reason) == (list(range(4, 4 + budget)), "length")
    assert out.stats.acceptance_lengths == [4] * (budget // 4) + [budget % 4] * (budget % 4 > 0)
    assert slots(drafter) == list(range(1, 3 + budget))


@pytest.mark.parametrize("context", range(4, 13))
def test_context_cuts_a_block(context: int) -> None:
    out = Engine(Reciter(count, context_length=context), None, chain(4)).generate([1, 2, 3], 20)
    assert (out.token_ids, out.finish_reason) == (list(range(4, 1 + context)), "context")


def test_reasons_at_one_token() -> None:
    """EOS before the budget, the budget before the context."""
    engine = Engine(Reciter(count, eos_ids=[6], context_length=6), None, chain(4))
    assert engine.generate([1, 2, 3], 3).finish_reason == "eos"
    assert Engine(Reciter(count, context_length=6), None, chain(4)).generate([1, 2, 3], 3).finish_reason == "length"


def test_stop_when_is_asked_after_every_token() -> None:
    asked: list[list[int]] = []

    def stop_when(text: Sequence[int]) -> bool:
        asked.append(list(text))
        return text[-1] == 6

    decoding = Engine(Reciter(count), None, chain(4)).start([1, 2, 3], 20, stop_when=stop_when)
    decoding.prefill()
    assert decoding.step().tokens == [4, 5, 6]
    assert decoding.finish_reason == "stop"
    assert asked == [[1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]


def test_room_is_what_slots_and_max_rows_leave() -> None:
    drafter = chain(4)
    Engine(Reciter(count), None, drafter, max_rows=9).generate([1, 2, 3], 8)
    assert drafter.rooms == [9, 9]
    Engine(Reciter(count), None, drafter, max_rows=2).generate([1, 2, 3], 8)
    assert drafter.rooms == [2] * 4


def test_remaining_counts_down_and_the_last_token_needs_no_draft() -> None:
    left: list[int] = []

    def draft(context: Context, row_budget: int) -> Draft:
        left.append(context.remaining)
        return Draft.chain([context.root, context.root + 1])

    out = Engine(Reciter(count), None, Scripted(draft)).generate([1, 2, 3], 7)
    assert left == [7, 5, 3]  # with one token left the drafter is not asked
    assert out.stats.rows == [2, 2, 2, 1]


def test_a_drafter_is_shown_every_step_but_the_last() -> None:
    drafter = chain(4)
    Engine(Reciter(count), None, drafter).generate([1, 2, 3], 12)
    assert [seen.tokens for seen in drafter.seen] == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_steps_and_statistics() -> None:
    steps = []
    out = Engine(Reciter(count), None, Scripted(bush)).generate([1, 2, 3], 7, on_step=steps.append)
    assert [step.tokens for step in steps] == [[4, 5, 6], [7, 8, 9], [10]]
    assert (out.stats.acceptance_lengths, out.stats.rows, out.stats.new_tokens) == ([3, 3, 1], [6, 6, 1], 7)
    assert out.stats.tokens_per_step == pytest.approx(7 / 3)


def test_the_target_sees_each_row_s_own_text() -> None:
    """A rule of the whole text: any row that is read from a wrong slot changes it."""

    def rule(text: Sequence[int]) -> int:
        return sum((place + 1) * token for place, token in enumerate(text)) % 100

    prompt = [3, 1, 4]
    plain = Engine(Reciter(rule)).generate(prompt, 30).token_ids
    text = [*prompt]
    for _ in range(30):
        text.append(rule(text))
    assert plain == text[3:]

    def draft(context: Context, row_budget: int) -> Draft:
        known = len(context.tokens)
        one, two = (text[known + ahead] if known + ahead < len(text) else 0 for ahead in (0, 1))
        return Draft([context.root, 99, one, 99, 98, two], [-1, 0, 0, 1, 2, 2])

    out = Engine(Reciter(rule), None, Scripted(draft)).generate(prompt, 30)
    assert out.token_ids == plain
    assert out.stats.acceptance_lengths[:9] == [3] * 9


def test_a_drafter_that_has_no_use_for_it_is_shown_nothing() -> None:
    seen = []

    class Quiet(DrafterBase):
        name = "quiet"
        needs_observe = False

        def start(self, context: Context) -> Scripted:
            session = chain(2).start(context)
            session.observe = seen.append  # type: ignore[method-assign]
            return session

        def __init__(self) -> None:
            pass

    out = Engine(Reciter(count), None, Quiet()).generate([1, 2], 6)
    assert out.stats.acceptance_lengths == [2, 2, 2]
    assert seen == []


def test_seeds_reach_the_session() -> None:
    drawn = []
    drafter = Scripted(lambda context, row_budget: drawn.append(context.rng.random()) or Draft.chain([context.root]))
    for seed in (1, 1, 2):
        Engine(Reciter(count), None, drafter).generate([1], 2, SamplingParams(seed=seed))
    assert drawn[0] == drawn[1] != drawn[2]
