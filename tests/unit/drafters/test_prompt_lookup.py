"""Prompt lookup: the longest suffix first, which occurrence, how far it is continued; against a search of the text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.prompt_lookup import PromptLookup, PromptLookupConfig
from specdec import Draft
from specdec.errors import ConfigError
from tests.unit.drafters.test_token_recycling import context_of


def draft_of(text: list[int], row_budget: int = 20, remaining: int = 50, **options: Any) -> Draft:
    return PromptLookup(PromptLookupConfig(**options)).start(context_of(text, remaining)).propose(row_budget)


def tokens_of(*arguments: Any, **options: Any) -> list[int]:
    """The proposal without the root."""
    return list(draft_of(*arguments, **options).tokens[1:])


def test_the_longest_suffix_wins() -> None:
    text = [1, 2, 3, 7, 8, 3, 9, 9, 2, 3]  # 2 3 was followed by 7, the later 3 by 9
    assert tokens_of(text, tokens=1) == [7]
    assert tokens_of(text, tokens=1, max_ngram=1) == [9]
    assert tokens_of(text, min_ngram=3) == []


@pytest.mark.parametrize(("match", "expected"), [("rightmost", [6, 1]), ("leftmost", [5, 1])])
def test_which_occurrence(match: str, expected: list[int]) -> None:
    assert tokens_of([1, 2, 5, 1, 2, 6, 1, 2], tokens=2, match=match) == expected


@pytest.mark.parametrize(("match", "paths"), [("rightmost", [6, 5]), ("leftmost", [4, 5])])
def test_several_occurrences_are_a_trie(match: str, paths: list[int]) -> None:
    draft = draft_of([1, 3, 8, 1, 4, 8, 1, 5, 8, 1, 6, 8, 1], matches=2, tokens=2, match=match)
    assert list(draft.tokens) == [1, paths[0], 8, paths[1], 8]
    assert list(draft.parents) == [-1, 0, 1, 0, 3]
    same = draft_of([1, 4, 8, 1, 4, 9, 1], matches=2, tokens=2)
    assert (list(same.tokens), list(same.parents)) == ([1, 4, 9, 8], [-1, 0, 1, 1])  # 4 is shared


def test_a_match_that_runs_into_the_end() -> None:
    text = [7, 1, 2, 3, 1, 2, 3]
    assert tokens_of(text, tokens=7) == [1, 2, 3, 1, 2, 3, 1]
    assert tokens_of(text, tokens=7, overlap=False) == [1, 2, 3]
    assert tokens_of([5, 5], tokens=3) == [5, 5, 5]


def test_no_match_is_a_plain_step() -> None:
    assert len(draft_of([1, 2, 3])) == 1
    assert len(draft_of([1])) == 1


def test_room_and_remaining_bound_the_proposal() -> None:
    text = [1, 2, 3, 4, 5, 6, 1]
    assert tokens_of(text, tokens=4) == [2, 3, 4, 5]
    assert tokens_of(text, row_budget=3) == [2, 3]
    assert tokens_of(text, row_budget=1) == []
    assert tokens_of(text, remaining=3) == [2, 3]
    assert len(draft_of([1, 4, 8, 1, 5, 8, 1], row_budget=4, matches=2)) == 4


def test_a_session_reads_on() -> None:
    context = context_of([1, 2, 3])
    session = PromptLookup().start(context)
    assert list(session.propose(9).tokens) == [3]
    context.tokens.extend([9, 1, 2])
    assert list(session.propose(4).tokens) == [2, 3, 9, 1]


@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    most=st.integers(1, 4),
    match=st.sampled_from(["leftmost", "rightmost"]),
    overlap=st.booleans(),
)
def test_against_a_search(text: list[int], most: int, match: str, overlap: bool) -> None:
    expected: list[int] = []
    for size in range(min(most, len(text) - 1), 0, -1):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
        if ends:
            end = ends[0] if match == "leftmost" else ends[-1]
            expected = [*text]
            while len(expected) < len(text) + 5:
                expected.append(expected[end + len(expected) - len(text)])
            expected = expected[len(text) :] if overlap else text[end : end + 5]
            break
    assert tokens_of(text, max_ngram=most, match=match, overlap=overlap, tokens=5) == expected


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"min_ngram": 0}, "min_ngram is 0 and max_ngram 3; they must satisfy 1 <= min_ngram <= max_ngram"),
        ({"min_ngram": 4}, "min_ngram is 4 and max_ngram 3"),
        ({"tokens": 0}, "prompt_lookup.tokens is 0; it must be at least 1"),
        ({"matches": 0}, "prompt_lookup.matches is 0; it must be at least 1"),
        ({"match": "middle"}, "prompt_lookup.match is 'middle'; it must be leftmost or rightmost"),
    ],
)
def test_options_are_checked(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PromptLookupConfig(**values)
