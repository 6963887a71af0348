"""What only tests need: a target without weights, and drafters that know the answer, draw from a q, watch another."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from specdec import Context, Draft, Drafter, DrafterBase, DrafterWrapper, DraftSession, Observation
from specdec.sampling.noise import Noise
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.step_io import StepInput
from specdec.step.step_output import StepOutput
from specdec.target import Target

CPU = torch.device("cpu")


class Reciter(Target):
    """A target without weights: after a text it says ``rule(text)``.

    It keeps each row's token as the key of its slot, and reads the text of a row back from the slots and the row's
    ancestors; so a row that is stored, gathered or seen wrongly makes it say something else.
    """

    hidden_size = num_layers = layer_weights = 1
    device = head_device = CPU
    dtype = torch.float64
    backend = "auto"
    batch_invariant = True
    shared = False
    name = "reciter"

    def __init__(
        self,
        rule: Callable[[list[int]], int],
        *,
        vocab_size: int = 100,
        context_length: int = 1000,
        eos_ids: Collection[int] = (),
    ) -> None:
        self.rule, self.vocab_size, self.context_length = rule, vocab_size, context_length
        self.eos_ids = frozenset(eos_ids)
        self.forwards: list[int] = []  # rows of each
        self.options: dict[str, Any] = {}

    def check_layers(self, asked: str) -> None:
        pass

    def check_unchanged(self) -> None:
        pass

    def version(self) -> object:
        return None

    def describe(self) -> dict[str, dict[str, Any]]:
        return {}

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def new_cache(self, *, capacity: int, rows: int) -> KVCache:
        return KVCache([LayerSpec(1, 1, 1, None, CPU, self.dtype)], capacity=capacity, rows=rows)

    def forward(self, step: StepInput) -> StepOutput:
        ids, wanted = step.ids, step.wanted.scored
        for cache, start, first, last in zip(
            step.texts, self._begins(step), step.starts, step.starts[1:], strict=False
        ):
            tokens = torch.tensor(ids[first:last].tolist(), dtype=self.dtype)[None, None, :, None]
            cache.write(0, tokens, tokens, start)
        self.forwards.append(step.rows)
        hidden = torch.zeros(step.rows, 1, dtype=self.dtype)
        if step.wanted.nothing:
            return StepOutput(out=hidden)
        rows = range(step.rows) if wanted is None else wanted
        logits = torch.zeros(len(rows), self.vocab_size, dtype=self.dtype)
        for place, row in enumerate(rows):
            logits[place, self.rule(self.text(step, row))] = 1000  # at T = 1 too no other token has a chance
        return StepOutput(logits, wanted, out=hidden)

    def _begins(self, step: StepInput) -> list[int]:
        """Where each sequence's first row is stored."""
        ends = zip(step.lengths, step.tree, step.tree[1:], step.counts, strict=False)
        return [length + last - first - rows for length, first, last, rows in ends]

    def text(self, step: StepInput, row: int) -> list[int]:
        number = next(number for number, last in enumerate(step.starts[1:]) if row < last)
        parents = step.parents[step.tree[number] : step.tree[number + 1]]
        slots = step.texts[number].keys[0][0, 0, :, 0].nan_to_num().long().tolist()
        length, path, row = step.lengths[number], list[int](), row - step.starts[number + 1] + len(parents)
        while row >= 0:
            path.insert(0, length + row)
            row = int(parents[row])
        return [slots[slot] for slot in (*range(length), *path)]

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def head_of(self, tokens: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        raise NotImplementedError


class Scripted(DrafterBase):
    """A drafter whose every draft is what the function says; keeps what it was shown."""

    name = "scripted"

    def __init__(self, draft: Callable[[Context, int], Draft]) -> None:
        self.draft = draft

    def start(self, context: Context) -> Scripted:
        self.context, self.rooms, self.seen = context, list[int](), list[Observation]()
        return self

    def propose(self, row_budget: int) -> Draft:
        self.rooms.append(row_budget)
        return self.draft(self.context, row_budget)

    def observe(self, seen: Observation) -> None:
        self.seen.append(seen)


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

    def propose(self, row_budget: int) -> Draft:
        oracle, rng = self._oracle, self._rng
        known = len(self._context.tokens)
        truth = oracle.text[known : known + min(oracle.deepest, self._context.remaining - 1, row_budget - 1)]
        if oracle.steady:
            return Draft.chain([self._context.root, *truth])
        tokens, parents, probes = [self._context.root], [-1], set[int]()

        def add(parent: int, token: int, *, probe: bool = False) -> int:
            tokens.append(token)
            parents.append(parent)
            if probe:
                probes.add(len(tokens) - 1)
            return len(tokens) - 1

        row, left = 0, row_budget - 1 - len(truth)
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

    def propose(self, row_budget: int) -> Draft:
        context, drafter = self._context, self._drafter
        tokens, parents, q = [context.root], [-1], dict[int, torch.Tensor]()
        level = [0]
        for depth, width in enumerate(drafter.widths[: min(context.remaining, row_budget) - 1]):
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
        assert len(tokens) <= row_budget
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

    def propose(self, row_budget: int) -> Draft:
        draft = self._inner.propose(row_budget)
        self._spy.on_draft(draft)
        return draft

    def observe(self, seen: Observation) -> None:
        self._spy.on_seen(self._context, seen)
        self._inner.observe(seen)


class Alternating:
    """A grammar whose states are its matchers: after an even token comes an odd one. Its masks are made on the host."""

    def __init__(self, odd: bool = False) -> None:
        self.odd = odd

    def start(self, prompt: Sequence[int]) -> Alternating:
        return Alternating()

    def advance(self, token: int) -> Alternating | None:
        return Alternating(not self.odd) if token % 2 == self.odd else None

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(torch.arange(scores.shape[-1]) % 2 != self.odd, -torch.inf)
