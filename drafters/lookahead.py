"""Lookahead decoding (Fu, Bailis, Stoica and Zhang 2024, arXiv 2402.02057).

Each step carries a window of W columns and N - 1 levels of guesses. Level 0 is a chain below the root, which itself is
column 0. The token at level l of column c is below level l - 1 of the same column, at position ``n + c + l``. The
target's tokens behind the last level complete one n-gram for each column; the n-grams go into a pool, and the window
moves on by a column. The pool's n-grams behind the root are proposed beside the window.

Differences from the paper's code: a full match yields the bonus token too; n-grams of the pool are verified from the
first step on; the window's own paths can be accepted; n-grams share the rows of a common prefix; and only rows that are
read get logits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specdec.costs.curve import CostCurve
from specdec.costs.prices import Prices, pace
from specdec.drafter import Context, DrafterBase, Observation
from specdec.errors import ConfigError
from specdec.step.tree import Draft, DraftBuilder

__all__ = ["Lookahead", "LookaheadConfig", "NgramPool", "Window", "rows_of", "sizes_for", "tokens_of"]

SIZES = ((1, 4, 1), (5, 4, 5), (7, 5, 7), (10, 5, 10), (15, 5, 15))
"""(W, N, G) to choose from: no window, a small one, and the paper's for 34 B, 13 B and 7 B models (its table 4)."""

_ACCEPTED, _STEPS = 0.425, 3.106  # alpha and f of the scaling law, as fitted in the paper


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadConfig:
    """Options. Sizes that are None follow from the costs of rows, see :func:`sizes_for`.

    Attributes:
        window: W, number of the window's columns; :func:`rows_of` gives the rows of a step.
        ngram: N, length of an n-gram with its first token; proposals have N - 1 tokens. 2 is Jacobi decoding.
        guesses: G, most n-grams to keep for each first token and to propose in a step.
        pool_from_prompt: whether the n-grams of the prompt and of new text fill the pool.
        verify: whether to propose the pool's n-grams; otherwise a step has the window only.
        verify_window: the window's rows that can be accepted: ``all``; ``column``, the path of column 0 below the root;
            or ``none``.
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
    """The rows of a step with a full window and the most guesses, the root included."""
    return 1 + (window - 1) + window * (ngram - 2) + guesses * (ngram - 1)


def tokens_of(window: int, ngram: int, guesses: int) -> float:
    """The tokens per step that the paper's scaling law expects (its section 4, with its fitted constants).

    One step in ``f``, ``g`` guessed tokens in ``b`` places give ``(g + 1) - sum((1 - a^i)^b)`` tokens.
    """
    b = min(window, guesses)
    length = ngram - sum((1 - _ACCEPTED**i) ** b for i in range(1, ngram))
    return (_STEPS - 1 + length) / _STEPS


def sizes_for(costs: CostCurve, length: int, most: int) -> tuple[int, int, int]:
    """The (W, N, G) in :data:`SIZES` with the most expected tokens per second, within ``most`` rows.

    Where rows are free, this gives the paper's sizes for a 7 B model on an A100. Where rows are expensive, there is no
    window, and the n-grams of the prompt and text bring the gain, which the law does not include.
    """
    prices = Prices(costs)
    fitting = [sizes for sizes in SIZES if rows_of(*sizes) <= most] or [SIZES[0]]
    return max(fitting, key=lambda sizes: pace(tokens_of(*sizes), prices.step(length, rows_of(*sizes))))


class Lookahead(DrafterBase):
    """Jacobi trajectories as a source of n-grams."""

    name = "lookahead"
    draws = False
    Config = LookaheadConfig
    fixed_cost_rows = 1  # the time for the pool and for reading the window's results

    def start(self, context: Context) -> LookaheadSession:
        config = self.config
        window, ngram, guesses = sizes_for(context.costs, context.prompt_length, context.max_rows)
        most = context.max_rows + 3  # larger windows do not fit in a step
        return LookaheadSession(
            config,
            context,
            window=min(config.window or window, most),
            ngram=min(config.ngram or ngram, most),
            guesses=config.guesses or guesses,
        )


class NgramPool:
    """A map from a first token to the N - 1 tokens that followed it; each keeps the G most recently used n-grams."""

    def __init__(self, ngram: int, guesses: int) -> None:
        self._ngram = ngram
        self._guesses = guesses
        self._of: dict[int, OrderedDict[tuple[int, ...], None]] = {}
        self._read = 0

    def add(self, key: int, value: tuple[int, ...]) -> None:
        """Add an n-gram, or mark it as the most recently used."""
        known = self._of.setdefault(key, OrderedDict())
        known[value] = None
        known.move_to_end(value)
        if len(known) > self._guesses:
            known.popitem(last=False)

    def read(self, tokens: Sequence[int]) -> None:
        """Add the text's n-grams whose last token has not been read before."""
        for end in range(max(self._read + 1, self._ngram), len(tokens) + 1):
            first, *rest = tokens[end - self._ngram : end]
            self.add(first, tuple(rest))
        self._read = len(tokens)

    def of(self, key: int) -> Iterable[tuple[int, ...]]:
        """The n-grams behind ``key``, the most recently used first."""
        return reversed(self._of.get(key, OrderedDict()))


class Window:
    """The two-dimensional window: ``levels[0]`` has columns 1 .. W - 1, higher levels have columns 0 .. W - 1.

    It begins with level 0 only, ``W + N - 3`` random tokens of the prompt. Each of the first N - 2 steps adds a level
    and shortens the others, until the lengths are W - 1, W, ..., W.
    """

    def __init__(self, size: int, ngram: int, seeds: list[int]) -> None:
        assert len(seeds) == max(size + ngram - 3, 0)
        self.levels = [seeds]
        self._size = size
        self._ngram = ngram

    @property
    def full(self) -> bool:
        """Whether it has all N - 1 levels."""
        return len(self.levels) == self._ngram - 1

    @property
    def rows(self) -> int:
        """The most rows that it adds to a step."""
        return sum(map(len, self.levels))

    def place(self, builder: DraftBuilder, verify: str) -> list[int]:
        """Add the window's rows to a draft; returns the rows of the last level, whose results ``advance`` needs.

        With N = 2, the last level is level 0, and its column 0 is the root.
        """
        above = [0]
        for token in self.levels[0]:
            above.append(builder.add(above[-1], token, candidate=verify == "all"))
        if self.full and self._ngram == 2:
            return above
        last = above[1:]
        for depth, level in enumerate(self.levels[1:]):
            # While the window fills, a level is as long as the one below in the next step; column 0 is below the root.
            parents = above if depth == 0 else last
            last = [
                builder.add(parent, token, candidate=verify == "all" or (verify == "column" and column == 0))
                for column, (parent, token) in enumerate(zip(parents, level, strict=False))
            ]
        return last

    def advance(self, root: int, answers: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Add the target's tokens behind the last level; returns the completed n-grams, none while the window fills."""
        levels = self.levels
        if not self.full:
            first = len(levels) == 1
            # Results of level 0 begin at column 0 of level 1; those of a higher level begin one column later.
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
        # The window comes first, so that a small budget drops guesses and keeps the window's order.
        if len(builder) + self._window.rows <= row_budget:
            self._last = self._window.place(builder, config.verify_window)
        if config.verify:
            for guess in self._pool.of(context.root):
                builder.add_path(guess[: context.remaining - 1], row_budget=row_budget)
        return builder.build(read=self._last)

    def observe(self, seen: Observation) -> None:
        assert seen.draft is not None
        root = seen.draft.tokens[0]
        if len(seen.path) > 1:  # an n-gram that was just accepted becomes the most recently used
            accepted = tuple(seen.tokens[: self._ngram - 1])
            if len(accepted) == self._ngram - 1:
                self._pool.add(root, accepted)
        if self._last:
            for key, rest in self._window.advance(root, [seen.argmax(row) for row in self._last]):
                self._pool.add(key, rest)
