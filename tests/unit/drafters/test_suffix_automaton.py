"""Suffix automaton: against brute force on every prefix of random texts, and its drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.rest.datastore import SEPARATOR, build_datastore
from drafters.suffix_automaton import Cursor, SuffixAutomaton, SuffixAutomatonConfig, SuffixAutomatonDrafter
from specdec import Draft
from specdec.errors import CheckpointError, ConfigError
from tests.models import Numerals, target_of
from tests.unit.drafters.test_token_recycling import context_of

TEXTS = st.lists(st.integers(0, 2), max_size=40)


def ends_of(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Where ``part`` ends in ``text``, ascending."""
    size = len(part)
    return [end for end in range(size, len(text) + 1) if list(text[end - size : end]) == list(part)]


@given(TEXTS)
def test_match_is_the_latest_occurrence_of_the_longest_repeated_suffix(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for count, token in enumerate(text, 1):
        automaton.extend([token])
        seen = text[:count]
        length = max(size for size in range(count) if size == 0 or len(ends_of(seen, seen[-size:])) > 1)
        assert automaton.match[1] == length
        if length:
            assert automaton.match[0] == ends_of(seen, seen[-length:])[-2]


@given(TEXTS)
def test_automaton_holds_all_substrings_and_is_small(text: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    assert len(automaton.link) <= max(2 * len(text), 1)
    for first in range(len(text)):
        state = 0
        for last in range(first, len(text)):
            state = automaton.next[state][text[last]]
            part = text[first : last + 1]
            assert automaton.length[automaton.link[state]] < len(part) <= automaton.length[state]
            assert automaton.end[state] == ends_of(text, part)[-1]


def test_a_run_of_one_token_takes_linear_time() -> None:
    automaton = SuffixAutomaton([7] * 20_000)
    assert automaton.match == (19_999, 19_999)


@given(TEXTS, TEXTS)
def test_cursor_follows_the_longest_suffix_in_another_text(corpus: list[int], text: list[int]) -> None:
    cursor = Cursor(SuffixAutomaton(corpus))
    for count, token in enumerate(text, 1):
        cursor.add(token)
        end, length = cursor.match
        seen = text[:count]
        assert length == max(size for size in range(count + 1) if size == 0 or ends_of(corpus, seen[-size:]))
        assert length == 0 or end == ends_of(corpus, seen[-length:])[-1]


def draft_of(
    tokens: list[int], row_budget: int = 20, remaining: int = 50, corpus: Sequence[int] = (), **options: float
) -> Draft:
    config = SuffixAutomatonConfig(**options)  # type: ignore[arg-type]
    drafter = SuffixAutomatonDrafter(config, SuffixAutomaton(corpus) if corpus else None)
    return drafter.start(context_of(tokens, remaining)).propose(row_budget)


def test_draft_copies_what_followed() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 2, 3]
    assert list(draft_of(text, max_tokens=4).tokens) == [3, 4, 5, 6, 7]
    assert list(draft_of(text, max_tokens=4, factor=1.0).tokens) == [3, 4, 5]  # two matched, two proposed
    assert list(draft_of(text, min_match=3).tokens) == [3]
    assert list(draft_of(text, row_budget=3).tokens) == [3, 4, 5]
    assert list(draft_of(text, remaining=2).tokens) == [3, 4]
    assert list(draft_of([1, 2, 3]).tokens) == [3]


def test_draft_prefers_the_latest_occurrence() -> None:
    assert list(draft_of([1, 2, 5, 1, 2, 6, 1, 2], max_tokens=1).tokens) == [2, 6]


def test_a_repeating_text_is_continued_beyond_its_end() -> None:
    assert list(draft_of([1, 2, 3, 1, 2, 3, 1], max_tokens=7).tokens) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_a_session_reads_on() -> None:
    context = context_of([1, 2, 3])
    session = SuffixAutomatonDrafter().start(context)
    assert list(session.propose(9).tokens) == [3]
    context.tokens.extend([9, 1, 2])
    assert list(session.propose(4).tokens) == [2, 3, 9, 1]


def test_corpus_is_copied_where_its_match_is_longer() -> None:
    corpus = [8, 1, 2, 9, 9, SEPARATOR, 5, 5]
    assert list(draft_of([2, 7, 1, 2], max_tokens=5, corpus=corpus).tokens) == [2, 9, 9]  # not across the separator
    assert list(draft_of([1, 2, 7, 1, 2], max_tokens=2, corpus=corpus).tokens) == [2, 7, 1]  # a tie is the text's


def test_corpus_comes_from_a_datastore(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 2 3 4", encoding="utf-8")
    build_datastore([tmp_path / "a.txt"], Numerals(32), tmp_path / "store")
    config = SuffixAutomatonConfig(corpus=str(tmp_path / "store"))
    session = SuffixAutomatonDrafter.build(config, target_of("llama")).start(context_of([1, 2]))
    assert list(session.propose(9).tokens) == [2, 3, 4]
    with pytest.raises(CheckpointError, match="no datastore at"):
        SuffixAutomatonDrafter.build(SuffixAutomatonConfig(corpus=str(tmp_path / "none")), target_of("llama"))


def test_matches_agree_with_prompt_lookups_notion_on_long_texts() -> None:
    rng = random.Random(0)
    text = [rng.randrange(4) for _ in range(600)]
    automaton = SuffixAutomaton(text)
    end, length = automaton.match
    assert text[end - length : end] == text[-length:]
    assert not ends_of(text[:-1], text[-length - 1 :])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"min_match": 0}, "suffix_automaton.min_match is 0; it must be at least 1"),
        ({"max_tokens": 0}, "suffix_automaton.max_tokens is 0; it must be at least 1"),
        ({"factor": 0.0}, "suffix_automaton.factor is 0.0; it must be more than 0"),
    ],
)
def test_options_are_checked(values: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SuffixAutomatonConfig(**values)  # type: ignore[arg-type]
