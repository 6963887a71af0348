"""The demo: the embedded model writes the same text under several drafters, and they are timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median

from specdec.engine import Engine
from specdec.results import Chunk, Generation
from specdec.sampling import SamplingParams

__all__ = ["PROMPT", "ROUNDS", "Race", "Result"]

ROUNDS = 3

PROMPT = '''"""Tests of the shelf that holds the books."""

import unittest

from library import Book, Shelf


class ShelfTest(unittest.TestCase):

    def setUp(self):
        self.shelf = Shelf(capacity=3)

    def test_new_shelf_is_empty(self):
        self.assertEqual(len(self.shelf), 0)
        self.assertFalse(self.shelf.full())

    def test_add_book(self):
        book = Book("Emma", author="Austen")
        self.shelf.add(book)
        self.assertEqual(len(self.shelf), 1)
        self.assertIn(book, self.shelf)

    def test_remove_book(self):'''


@dataclass(slots=True)
class Result:
    """One drafter's text, and the tokens per second of each timed repetition, the prefill not counted."""

    drafter: str
    generation: Generation
    speeds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Of the median repetition."""
        return median(self.speeds)

    def first_difference(self, other: Result) -> int | None:
        """Number of the first token in which the texts differ, from 1; None if they are identical."""
        pairs = zip_longest(self.generation.token_ids, other.generation.token_ids)
        return next((place for place, (mine, theirs) in enumerate(pairs, 1) if mine != theirs), None)


class Race:
    """Drafters on one target and one prompt; plain decoding goes first and is the reference.

    Raises:
        ConfigError: an unknown drafter.
    """

    def __init__(
        self, engine: Engine, drafters: Iterable[str], *, max_new_tokens: int, sampling: SamplingParams
    ) -> None:
        names = dict.fromkeys(["none", *drafters])
        self.engines = {name: engine.with_drafter(name) for name in names}
        self.max_new_tokens = max_new_tokens
        self.sampling = sampling
        self.results: list[Result] = []

    def show(self, drafter: str, on_chunk: Callable[[Chunk], None]) -> None:
        """Decode once, which also warms up, and hand each step's text on."""
        decoding = self.engines[drafter].start(PROMPT, self.max_new_tokens, self.sampling, stream=True)
        for chunk in decoding.chunks():
            on_chunk(chunk)
        self.results.append(Result(drafter, decoding.result()))

    def time(self, result: Result) -> None:
        """One repetition, without showing it."""
        again = self.engines[result.drafter].generate(PROMPT, self.max_new_tokens, self.sampling)
        result.speeds.append(again.stats.tokens_per_second)
