"""Drafters that only tests need: one that knows the answer, one that draws from a q, one that watches another."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from specdec import Context, Draft, Drafter, DrafterBase, DrafterWrapper, DraftSession, Observation
from specdec.sampling import Noise


class Oracle(DrafterBase):
    """Hides the true continuation in random trees: wrong siblings before and after it, probes, duplicates.

    So blocks of every length get accepted, at rows that are no prefix of the tree. With ``steady`` it proposes a bare
    chain of that many tokens, so that blocks begin at known places.
    """

    name = "oracle"

    def __init__(self, text: Sequence[int], vocab_size: int, *, deepest: int = 6, steady: bool = False) -> None:
        self.text, self.vocab_size, self.deepest, self.steady = list(text), vocab_size, deepest, steady

    def start(self, context: Context) -> OracleSession:
        return OracleSession(self, context)


class OracleSession:
    def __init__(self, oracle: Oracle, context: Context) -> None:
        self._oracle, self._context = oracle, context
        self._rng = random.Random(len(context.tokens))

    def propose(self, room: int) -> Draft:
        oracle, rng = self._oracle, self._rng
        known = len(self._context.tokens)
        truth = oracle.text[known : known + min(oracle.deepest, self._context.remaining - 1, room - 1)]
        if oracle.steady:
            return Draft.chain([self._context.root, *truth])
        tokens, parents, probes = [self._context.root], [-1], set[int]()

        def add(parent: int, token: int, *, probe: bool = False) -> int:
            tokens.append(token)
            parents.append(parent)
            if probe:
                probes.add(len(tokens) - 1)
            return len(tokens) - 1

        row, left = 0, room - 1 - len(truth)
        for token in truth[: rng.randint(0, len(truth))]:
            for _ in range(rng.randint(0, 2)):
                if left < 2:
                    break
                wrong = add(row, rng.choice([t for t in range(oracle.vocab_size) if t != token]))
                left -= 1
                if rng.random() < 0.5:
                    add(wrong, token)
                    left -= 1
            if left and rng.random() < 0.3:  # the right token, but not for the taking
                add(row, token, probe=True)
                left -= 1
            parent, row = row, add(row, token)
            if left and rng.random() < 0.3:  # the right token once more, and too late
                add(parent, token)
                left -= 1
        if left:
            add(row, rng.randrange(oracle.vocab_size), probe=True)
        return Draft(tokens, parents, probes=frozenset(probes))

    def observe(self, seen: Observation) -> None:
        pass


class Drawing(DrafterBase):
    """Draws drafts from a bigram distribution q: ``widths`` children per level, siblings without replacement.

    ``chosen`` adds one more subtree below the root that is not drawn: the likeliest token of a row without a q.
    """

    name = "drawing"

    def __init__(self, q: torch.Tensor, widths: Sequence[int] = (1, 1), *, chosen: bool = False) -> None:
        self.q, self.widths, self.chosen = q, widths, chosen

    def start(self, context: Context) -> DrawingSession:
        return DrawingSession(self, context)


class DrawingSession:
    def __init__(self, drafter: Drawing, context: Context) -> None:
        self._drafter, self._context = drafter, context

    def propose(self, room: int) -> Draft:
        context, drafter = self._context, self._drafter
        tokens, parents, q = [context.root], [-1], dict[int, torch.Tensor]()
        level = [0]
        for depth, width in enumerate(drafter.widths[: context.remaining - 1]):
            below: list[int] = []
            for row in level:
                drawn = drafter.q[tokens[row]]
                if drafter.chosen and depth:
                    # Not drawn, so no q.
                    tokens.append(int(drawn.argmax()))
                    parents.append(row)
                    below.append(len(tokens) - 1)
                    continue
                q[row] = drawn
                left = drawn.clone()
                for _ in range(width):
                    token = context.noise.draw(left, len(context.tokens), Noise.DRAFT, len(tokens))
                    left[token] = 0
                    tokens.append(token)
                    parents.append(row)
                    below.append(len(tokens) - 1)
            level = below
        assert len(tokens) <= room
        return Draft(tokens, parents, q=q)

    def observe(self, seen: Observation) -> None:
        pass


class Spy(DrafterWrapper):
    """A drafter that is another one, and shows each draft and observation to the test."""

    def __init__(
        self,
        inner: Drafter,
        on_draft: Callable[[Draft], None] = lambda draft: None,
        on_seen: Callable[[Context, Observation], None] = lambda context, seen: None,
    ) -> None:
        super().__init__(inner)
        self.on_draft, self.on_seen = on_draft, on_seen
        self.context: Context  # of the latest sequence

    def start(self, context: Context) -> SpySession:
        self.context = context
        return SpySession(self, self.inner.start(context), context)


class SpySession:
    def __init__(self, spy: Spy, inner: DraftSession, context: Context) -> None:
        self._spy, self._inner, self._context = spy, inner, context

    def propose(self, room: int) -> Draft:
        draft = self._inner.propose(room)
        self._spy.on_draft(draft)
        return draft

    def observe(self, seen: Observation) -> None:
        self._spy.on_seen(self._context, seen)
        self._inner.observe(seen)
