"""Prefix caches, fuzzed: any order of texts, caches and engines, against decoding with no cache at all.

The first machine is the slots alone, where a key says which text it is of; the second decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from specdec import Engine, PrefixCache, PrefixTree
from specdec.costs.prices import UNBATCHED, Rest
from specdec.engine.decoding import Decoding
from specdec.engine.requests import Request
from specdec.engine.scheduler import Scheduler
from specdec.engine.sequence import ScheduledRows
from specdec.step.cache import KVCache, LayerSpec
from specdec.target import FINAL, run_steps
from tests import seam
from tests.fakes import Oracle, Spy
from tests.models import VOCAB, target_of

CPU = torch.device("cpu")
SPECS = [LayerSpec(1, 1, 1, window, CPU, torch.float64) for window in (4, None, 7)]
REJECTED = -1.0


@dataclass
class Text:
    """A cache, and what its slots have to hold: of every committed token a number that no other text has."""

    cache: KVCache
    marks: list[float]


class Caches(RuleBasedStateMachine):
    """Caches that are filled by rows and from one another."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = list[Text]()
        self.mark = 0.0

    def write(self, text: Text, marks: Sequence[float]) -> None:
        """Rows behind a text, as a forward of them has it."""
        text.cache.reserve(text.cache.length + len(marks))
        rows = torch.tensor(marks, dtype=torch.float64)[None, None, :, None]
        for layer in range(len(SPECS)):
            text.cache.write(layer, rows, rows, text.cache.length)

    @rule(capacity=st.integers(20, 60), rows=st.integers(1, 9))
    def begin(self, capacity: int, rows: int) -> None:
        cache = KVCache(SPECS, capacity=capacity, rows=rows)
        for group in cache.groups:
            group.keys.fill_(torch.nan)
            group.values.fill_(torch.nan)
        self.texts.append(Text(cache, []))

    @rule(data=st.data(), accepted=st.lists(st.integers(0, (1 << 9) - 1), min_size=1, max_size=6))
    @precondition(lambda self: self.texts)
    def step(self, data: st.DataObject, accepted: list[int]) -> None:
        """Rows of which some are accepted (a bit each), and the others only written; in an interrupted step all."""
        text = data.draw(st.sampled_from(self.texts))
        cache = text.cache
        for bits in accepted:
            count = min(cache.free, cache.capacity - cache.length)
            path = [row for row in range(count) if bits >> row & 1]
            marks = [REJECTED] * count
            for row in path:
                self.mark += 1
                marks[row] = self.mark
            if count:
                self.write(text, marks)
            cache.commit(path)
            text.marks += [marks[row] for row in path]

    @rule(data=st.data(), capacity=st.integers(20, 60), rows=st.integers(1, 9), back=st.integers(0, 12))
    @precondition(lambda self: any(text.marks for text in self.texts))
    def take(self, data: st.DataObject, capacity: int, rows: int, back: int) -> None:
        """Another text that begins alike: what the next token sees is there, or nothing is taken."""
        former = data.draw(st.sampled_from([text for text in self.texts if text.marks]))
        count = max(1, min(len(former.marks), capacity) - back)
        self.begin(capacity, rows)
        taken = self.texts[-1]
        held = all(self.holds(former, layer, count) for layer in range(len(SPECS)))
        assert taken.cache.take(former.cache, count) == held
        taken.marks = former.marks[:count] if held else []
        assert taken.cache.length == len(taken.marks)

    def holds(self, text: Text, layer: int, count: int) -> bool:
        """Whether the slots hold every key that the token at position ``count`` sees, by the marks in the keys."""
        window = SPECS[layer].window
        places = range(0 if window is None else max(0, count - window + 1), count)
        slots = text.cache.group_of[layer].index((places.start, places.stop))
        return text.cache.keys[layer][0, 0, slots, 0].tolist() == [text.marks[place] for place in places]

    @invariant()
    def every_position_that_is_said_to_be_held_is(self) -> None:
        for text in self.texts:
            for layer, group in enumerate(text.cache.group_of):
                slots = group.index((group.first, max(group.first, text.cache.length)))
                for store in (text.cache.keys, text.cache.values):
                    assert store[layer][0, 0, slots, 0].tolist() == text.marks[group.first :]
                assert self.holds(text, layer, text.cache.length)


FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "gemma3",
    "lfm2",
)  # no windows; windows of 8 everywhere, in two layers, in two of three; convolutions in two of three


@lru_cache(maxsize=10_000)
def plain(family: str, text: tuple[int, ...], new: int) -> list[int]:
    """Without any cache."""
    return Engine(target_of(family), None).generate(text, new).token_ids


@dataclass(frozen=True)
class Sizes:
    """Of an engine, whose trees hide the true text; ``taps``: it wants hidden states."""

    max_rows: int
    chunk: int
    taps: bool


@dataclass
class Open:
    """A generation under way."""

    decoding: Decoding
    text: tuple[int, ...]
    expected: list[int]


sizes = st.builds(Sizes, st.sampled_from([1, 4, 16]), st.sampled_from([3, 8, 40]), st.booleans())
added = st.lists(st.integers(2, VOCAB - 1), max_size=12)


class Talks(RuleBasedStateMachine):
    """Texts that begin as earlier ones did, with several caches and engines of one target."""

    @initialize(family=st.sampled_from(FAMILIES), texts=st.sampled_from([0.5, 2, 100]))
    def build(self, family: str, texts: float) -> None:
        """``texts``: how many of a hundred tokens the tree has room for, without hidden states."""
        self.family, self.target = family, target_of(family)
        self.tree = PrefixTree(int(texts * KVCache.most_bytes(self.target.specs, capacity=100, rows=1)))
        self.kept = [PrefixCache(), self.tree]
        self.texts: list[tuple[int, ...]] = [(1, *range(2, 22))]
        self.open = list[Open]()

    def engine(self, sizes: Sizes, text: tuple[int, ...], expected: Sequence[int]) -> Engine:
        """One whose drafter knows the text, and wants hidden states or does not."""
        oracle: Any = Oracle([*text, *expected], VOCAB)
        if sizes.taps:
            oracle = Spy(oracle)
            oracle.taps = frozenset({0, 2, FINAL})
        return Engine(self.target, None, oracle, max_rows=sizes.max_rows, prefill_chunk=sizes.chunk)

    def choose(self, data: st.DataObject, cut: int, more: Sequence[int]) -> tuple[int, ...]:
        """A text that goes on from an earlier one, mostly the latest, without its last ``cut`` tokens."""
        base = self.texts[-data.draw(st.integers(1, min(3, len(self.texts))))]
        return (*base[: max(1, len(base) - cut)], *more)[:90]

    @rule(
        data=st.data(), sizes=sizes, kept=st.integers(0, 1), cut=st.integers(0, 14), more=added, new=st.integers(1, 9)
    )
    def talk(self, data: st.DataObject, sizes: Sizes, kept: int, cut: int, more: list[int], new: int) -> None:
        """Go on, edit, shrink, or the same once more."""
        text = self.choose(data, cut, more)
        expected = plain(self.family, text, new)
        engine = self.engine(sizes, text, expected)
        seen = dict[int, list[torch.Tensor]]()
        if isinstance(engine.drafter, Spy):
            engine.drafter.on_seen = lambda context, step: [
                seen.setdefault(layer, []).append(rows[list(step.path)]) for layer, rows in step.taps.items()
            ]
        out = engine.generate(text, new, prefix_cache=self.kept[kept])
        assert out.token_ids == expected
        self.texts.append((*text, *expected))
        if sizes.taps and new > 1:
            self.check_hidden({layer: torch.cat(rows) for layer, rows in seen.items()})

    def check_hidden(self, seen: dict[int, torch.Tensor]) -> None:
        """What a drafter was shown of the text is what one forward over all of it gives."""
        own, count = seam.text(self.target, capacity=200, rows=200), len(seen[FINAL])
        with self.target.active():
            fresh = own.run(self.texts[-1][:count], taps=(0, 2, FINAL), rows=())
        for layer, rows in seen.items():
            torch.testing.assert_close(rows, fresh.hidden[layer])

    @rule(
        data=st.data(), sizes=sizes, kept=st.integers(0, 1), cut=st.integers(0, 9), more=added, chunks=st.integers(0, 4)
    )
    @precondition(lambda self: len(self.open) < 3)
    def begin(self, data: st.DataObject, sizes: Sizes, kept: int, cut: int, more: list[int], chunks: int) -> None:
        """A text that is left for now, with all of its prompt run or not: its cache serves others as far as it went."""
        text = self.choose(data, cut, more)
        expected = plain(self.family, text, 9)
        engine = self.engine(sizes, text, expected)
        decoding = engine.start(text, 9, prefix_cache=self.kept[kept])
        with self.target.active():
            for _ in range(chunks):
                if decoding.sequence.prefilling:
                    decoding.advance()
        self.open.append(Open(decoding, text, expected))
        self.texts.append(text)

    @rule(data=st.data(), steps=st.integers(1, 4))
    @precondition(lambda self: self.open)
    def go_on(self, data: st.DataObject, steps: int) -> None:
        one = data.draw(st.sampled_from(self.open))
        with self.target.active():
            one.decoding.prefill()
            for _ in range(steps):
                if one.decoding.finish_reason is None:
                    one.decoding.step()
        new = one.decoding.tokens[len(one.text) :]
        assert new == one.expected[: len(new)]
        self.texts.append((*one.text, *new))
        if one.decoding.finish_reason is not None:
            assert new == one.expected
            self.open.remove(one)

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def break_off(self, data: st.DataObject) -> None:
        """In the middle of a step: its rows are in the slots, and none is committed."""
        one = data.draw(st.sampled_from(self.open))
        if not one.decoding.sequence.prefilling:
            with self.target.active():
                rows = one.decoding.sequence.propose(UNBATCHED, Rest.NONE)
                assert isinstance(rows, ScheduledRows)
                (output,) = run_steps(self.target, [rows.step])
            assert output.logits is not None
        self.open.remove(one)

    @rule(
        data=st.data(),
        sizes=sizes,
        cuts=st.lists(st.integers(0, 9), min_size=2, max_size=3),
        more=added,
        new=st.integers(1, 6),
        one_for_all=st.booleans(),
    )
    def batch(
        self, data: st.DataObject, sizes: Sizes, cuts: list[int], more: list[int], new: int, one_for_all: bool
    ) -> None:
        """Several at once, of one cache or each with its own."""
        texts = [self.choose(data, cut, more) for cut in cuts]
        expected = [plain(self.family, text, new) for text in texts]
        engine = self.engine(sizes, texts[0], expected[0])
        kept = [self.kept[0 if one_for_all else place % 2] for place in range(len(texts))]
        requests = [Request(text, new, prefix_cache=one) for text, one in zip(texts, kept, strict=True)]
        found = dict[int, list[int]]()
        with self.target.active():
            for events in Scheduler(engine, requests, batch=3).run():
                found |= {event.index: event.generation().token_ids for event in events if event.last}
        assert [found[place] for place in range(len(texts))] == expected
        self.texts += [(*text, *answer) for text, answer in zip(texts, expected, strict=True)]

    @invariant()
    def the_tree_holds_what_it_says_within_its_bound(self) -> None:
        assert self.tree.nbytes == held_bytes(self.tree) <= self.tree.max_bytes


def held_bytes(tree: PrefixTree) -> int:
    """Of the tensors in its nodes, by the storage that each of them keeps alive."""
    tensors = [
        tensor
        for node in tree._nodes()
        for tensor in (*(part for piece in node.pieces for part in (piece.keys, piece.values)), *node.taps.values())
    ]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_slots_hold_what_they_are_said_to() -> None:
    run_state_machine_as_test(
        Caches, settings=settings(max_examples=60, stateful_step_count=15, phases=[Phase.generate])
    )


@pytest.mark.slow
def test_texts_with_caches_against_texts_without() -> None:
    """A failure is not shrunk here, which would take minutes, but in the test below."""
    run_state_machine_as_test(
        Talks, settings=settings(max_examples=12, stateful_step_count=12, phases=[Phase.generate])
    )


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "examples"), [(Caches, 50), (Talks, 20)])
def test_at_length(machine: type[RuleBasedStateMachine], examples: int) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40))
