"""Lookahead decoding (Fu, Bailis, Stoica and Zhang 2024, arXiv 2402.02057).

A window of W columns and N - 1 levels of guesses rides along with every step. Level 0 is a chain under the root (its
column 0 *is* the root); the token at level l of column c hangs below level l - 1 of the same column, at position
``n + c + l``. The answers below the last level complete one n-gram per column; they go into a pool, and the window
moves on by a column. What the pool knows for the root is proposed beside the window.

Unlike the paper's code: a full match yields the bonus token too, pool n-grams are verified from the first step on, the
window's own paths may be accepted, n-grams that share a prefix share rows, and only rows that are read get logits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specdec.costs.curve import CostCurve
from specdec.drafter import Context, DrafterBase, Observation
from specdec.errors import ConfigError
from specdec.step.tree import Draft, DraftBuilder

__all__ = ["Lookahead", "LookaheadConfig", "NgramPool", "Window", "rows_of", "sizes_for", "tokens_of"]

SIZES = ((1, 4, 1), (5, 4, 5), (7, 5, 7), (10, 5, 10), (15, 5, 15))
"""(W, N, G) to choose from: no window, a small one, and the paper's (its table 4) for 34 B, 13 B and 7 B models."""

_ACCEPTED, _STEPS = 0.425, 3.106  # the scaling law's alpha and f, fitted in the paper


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadConfig:
    """Options. Sizes left at None follow from what rows cost, see :func:`sizes_for`.

    Attributes:
        window: W, columns of the window; for the rows of a step see :func:`rows_of`.
        ngram: N, length of an n-gram, its key included; proposals are N - 1 tokens long. 2 is Jacobi decoding.
        guesses: G, n-grams kept per first token and proposed in a step.
        pool_from_prompt: fill the pool from the prompt, and from the text as it comes.
        verify: propose the pool's n-grams; off leaves only the window.
        verify_window: which of the window's own rows may be accepted: ``all``, ``column`` (the path below the root that
            column 0 spells) or ``none``.
    """

    window: int | None = None
    ngram: int | None = None
    guesses: int | None = None
    pool_from_prompt: bool = True
    verify: bool = True
    verify_window: str = "all"

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("ngram", 2), ("guesses", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"lookahead.{name} is {value}; it must be at least {least}")
        if self.verify_window not in ("all", "column", "none"):
            raise ConfigError(f"lookahead.verify_window is {self.verify_window!r}; it must be all, column or none")


def rows_of(window: int, ngram: int, guesses: int) -> int:
    """Rows of a step, the root included, with a full window and as many guesses as there may be."""
    return 1 + (window - 1) + window * (ngram - 2) + guesses * (ngram - 1)


def tokens_of(window: int, ngram: int, guesses: int) -> float:
    """Tokens per step that the paper's scaling law expects (its section 4, with the constants that it fits).

    ``g`` guessed tokens in ``b`` places give ``(g + 1) - sum((1 - a^i)^b)`` where a guess succeeds, one step in ``f``.
    """
    b = min(window, guesses)
    length = ngram - sum((1 - _ACCEPTED**i) ** b for i in range(1, ngram))
    return (_STEPS - 1 + length) / _STEPS


def sizes_for(costs: CostCurve, length: int, most: int) -> tuple[int, int, int]:
    """(W, N, G) of :data:`SIZES` with the most expected tokens per second, of at most ``most`` rows.

    Where rows are free these are the paper's for a 7 B model on an A100; where they are dear, no window at all: then
    the n-grams of the prompt and of the text carry the gain, which the law leaves out.
    """
    steps = costs.steps(length, max(rows_of(*sizes) for sizes in SIZES))
    fitting = [sizes for sizes in SIZES if rows_of(*sizes) <= most] or [SIZES[0]]
    return max(fitting, key=lambda sizes: tokens_of(*sizes) / steps[rows_of(*sizes)])


class Lookahead(DrafterBase):
    """Jacobi trajectories as a source of n-grams."""

    name = "lookahead"
    draws = False
    Config = LookaheadConfig
    fixed_cost_rows = 1  # the pool, and the window's answers

    def start(self, context: Context) -> LookaheadSession:
        config = self.config
        window, ngram, guesses = sizes_for(context.costs, context.prompt_length, context.max_rows)
        most = context.max_rows + 3  # a larger window would not fit a step either
        return LookaheadSession(
            config,
            context,
            window=min(config.window or window, most),
            ngram=min(config.ngram or ngram, most),
            guesses=config.guesses or guesses,
        )


class NgramPool:
    """First token -> the N - 1 tokens that followed it, at most G of them, the least recently used out."""

    def __init__(self, ngram: int, guesses: int) -> None:
        self._ngram = ngram
        self._guesses = guesses
        self._of: dict[int, OrderedDict[tuple[int, ...], None]] = {}
        self._read = 0

    def add(self, key: int, value: tuple[int, ...]) -> None:
        """Put an n-gram in, or bring it to the fresh end."""
        known = self._of.setdefault(key, OrderedDict())
        known[value] = None
        known.move_to_end(value)
        if len(known) > self._guesses:
            known.popitem(last=False)

    def read(self, tokens: Sequence[int]) -> None:
        """Add the n-grams of the text that end in tokens not read before."""
        for end in range(max(self._read + 1, self._ngram), len(tokens) + 1):
            first, *rest = tokens[end - self._ngram : end]
            self.add(first, tuple(rest))
        self._read = len(tokens)

    def of(self, key: int) -> Iterable[tuple[int, ...]]:
        """The n-grams after ``key``, the most recently used first."""
        return reversed(self._of.get(key, OrderedDict()))


class Window:
    """The two-dimensional window: ``levels[0]`` holds columns 1 .. W-1, the higher ones columns 0 .. W-1.

    It starts with level 0 alone, ``W + N - 3`` tokens of the prompt at random; each of the first N - 2 steps adds a
    level and shortens the others, until the lengths are W - 1, W, ..., W.
    """

    def __init__(self, size: int, ngram: int, seeds: list[int]) -> None:
        assert len(seeds) == max(size + ngram - 3, 0)
        self.levels = [seeds]
        self._size = size
        self._ngram = ngram

    @property
    def full(self) -> bool:
        """Whether all N - 1 levels are there."""
        return len(self.levels) == self._ngram - 1

    @property
    def rows(self) -> int:
        """Rows that it adds to a step, at most."""
        return sum(map(len, self.levels))

    def place(self, builder: DraftBuilder, verify: str) -> list[int]:
        """Add the rows; returns those of the last level, whose answers ``advance`` wants.

        With N = 2 the last level is level 0, and its column 0 is the root.
        """
        above = [0]
        for token in self.levels[0]:
            above.append(builder.add(above[-1], token, candidate=verify == "all"))
        if self.full and self._ngram == 2:
            return above
        last = above[1:]
        for depth, level in enumerate(self.levels[1:]):
            # While filling, a level is as long as the one below it in the next; column 0 hangs under the root.
            parents = above if depth == 0 else last
            last = [
                builder.add(parent, token, candidate=verify == "all" or (verify == "column" and column == 0))
                for column, (parent, token) in enumerate(zip(parents, level, strict=False))
            ]
        return last

    def advance(self, root: int, answers: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Take the answers below the last level; returns the finished n-grams, none while filling."""
        levels = self.levels
        if not self.full:
            first = len(levels) == 1
            # The answers to level 0 begin at column 0 of level 1; those to a higher level are one column late.
            levels[:] = [*(level[1:] for level in levels), answers if first else answers[1:]]
            return []
        columns = [[root, *levels[0]], *levels[1:], answers]
        grams = [(key, tuple(rest)) for key, *rest in zip(*columns, strict=True)]
        levels[:] = [columns[1][1:], *columns[2:]]
        return grams


class LookaheadSession:
    def __init__(self, config: LookaheadConfig, context: Context, *, window: int, ngram: int, guesses: int) -> None:
        self._config = config
        self._context = context
        self._ngram = ngram
        self._pool = NgramPool(ngram, guesses)
        seeds = [context.rng.choice(context.tokens) for _ in range(max(window + ngram - 3, 0))]
        self._window = Window(window, ngram, seeds)
        self._last: list[int] = []

    def propose(self, row_budget: int) -> Draft:
        config, context = self._config, self._context
        self._last = []
        if row_budget < 2:
            return Draft.chain([context.root])
        if config.pool_from_prompt:
            self._pool.read(context.tokens)
        builder = DraftBuilder(context.root)
        # The window first, so that a small budget costs guesses and not the window's order.
        if len(builder) + self._window.rows <= row_budget:
            self._last = self._window.place(builder, config.verify_window)
        if config.verify:
            for guess in self._pool.of(context.root):
                builder.add_path(guess[: context.remaining - 1], row_budget=row_budget)
        return builder.build(read=self._last)

    def observe(self, seen: Observation) -> None:
        assert seen.draft is not None
        root = seen.draft.tokens[0]
        if len(seen.path) > 1:  # what has just proved right stays fresh
            accepted = tuple(seen.tokens[: self._ngram - 1])
            if len(accepted) == self._ngram - 1:
                self._pool.add(root, accepted)
        if self._last:
            for key, rest in self._window.advance(root, [seen.argmax(row) for row in self._last]):
                self._pool.add(key, rest)
