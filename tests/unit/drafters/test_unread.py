"""Drafts of heads that stay on a device, on a CPU that is treated as one: their shapes, texts and distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.heads.settled import Settled, settle
from drafters.heads.unread import UnreadSession
from specdec import Draft, Engine, SamplingParams
from specdec.costs.curve import roofline
from specdec.drafting.registry import make_drafter
from specdec.step import device_copies
from tests import heads
from tests.fakes import Spy
from tests.joint import assert_joint, five_token_target, joint_of
from tests.models import VOCAB, greedy, prompt_of, settings_of, target_of

SIZE, PROMPT, NEW = 32, prompt_of(9), 30
MATCH = SamplingParams(temperature=0.9, seed=2, acceptance="match")
MADE = {
    "eagle1": lambda size, vocab: heads.eagle1(size, vocab),
    "eagle3": lambda size, vocab: heads.eagle3(size, vocab, draft=vocab // 2 + 2),
    "peagle": lambda size, vocab: heads.peagle(size, vocab),
    "dflash": lambda size, vocab: heads.dflash(size, vocab),
    "dspark": lambda size, vocab: heads.dflash(size, vocab, draft=vocab // 2 + 2, markov="rnn", block=4),
}
BLOCKS = ("dflash", "dspark")


def settings(folder: Path, kind: str, *sizes: int, **options: Any) -> dict[str, Any]:
    if kind == "mtp":  # one layer, which runs again on its own output
        made = {**settings_of("mtp", target_of("llama"), folder)[0], "tokens": 6}
    else:
        name = "dflash" if kind in BLOCKS else "eagle"
        made = {"name": name, "head": str(heads.write(folder / kind, *MADE[kind](*(sizes or (SIZE, VOCAB)))))}
    return {**made, "min_chance": 0.0, "check_target": False, **options}


UNREAD = (*MADE, "mtp")


def everything(reach: Sequence[float]) -> int:
    return len(reach)


def shape(shares: Sequence[float], most: int, deepest: int, **options: Any) -> Settled:
    return settle(shares, most, deepest, **{"width": 8, "least": None, "gain": None, "keep": everything, **options})


def test_a_shape_has_the_likeliest_rows_level_by_level() -> None:
    """Of chances .5 and .2: .5, .25, .2, .125, .1 (of two), .1, .0625."""
    found = shape([0.5, 0.2], 7, 4)
    assert found.parents == [-1, 0, 0, 1, 1, 2, 3, 6]
    assert found.depths == [0, 1, 1, 2, 2, 2, 3, 4]
    assert found.chances == [1.0, 0.5, 0.2, 0.5, 0.2, 0.5, 0.5, 0.5]
    assert found.levels == [[0], [1, 2], [3], [6]]
    assert [found.children(row) for row in range(4)] == [[1, 2], [3, 4], [5], [6]]
    assert shape([0.5], 3, 2).parents == [-1, 0, 1]


def test_few_rows_of_a_level_are_guessed_behind() -> None:
    found = shape([0.9, 0.85], 20, 3, width=1)
    assert found.levels == [[0], [1], [3]]
    assert found.parents == [-1, 0, 0, 1, 1, 3, 3]


def test_rows_and_levels_have_to_pay() -> None:
    assert shape([0.5, 0.2], 9, 4, keep=lambda reach: sum(own >= 0.2 for own in reach)).parents == [-1, 0, 0, 1]
    assert shape([0.5, 0.2], 9, 4, least=[0.22] * 10).parents == [-1, 0, 1]
    # Each level costs as much as 0.3 tokens: the second brings 0.25 and what is behind the other row.
    paid = shape([0.5, 0.2], 9, 4, gain=lambda reach, levels: sum(reach) - 0.3 * levels)
    assert max(paid.depths) == 2
    assert max(shape([0.5, 0.2], 9, 4, gain=lambda reach, levels: sum(reach) - 0.9 * levels).depths) == 1


def test_there_is_a_guess_though_none_pays() -> None:
    assert shape([0.1, 0.05], 9, 4, least=[2.0] * 10, keep=lambda reach: 0).parents == [-1, 0]


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", [None, MATCH, SamplingParams(temperature=0.8, top_p=0.9, seed=3)])
@pytest.mark.parametrize("kind", UNREAD)
def test_a_chain_is_that_which_is_read_level_by_level(
    kind: str, sampling: SamplingParams | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draft has the same tokens: what the head guesses does not depend on whether it is read."""
    target, found = target_of("llama"), list[Any]()
    for apart in (False, True):
        monkeypatch.setattr(device_copies, "is_apart", lambda device, apart=apart: apart)
        drafts = list[Draft]()
        drafter = Spy(make_drafter(settings(tmp_path, kind, branch=1), target), drafts.append)
        text = Engine(target, None, drafter, max_rows=24, policy="off").generate(PROMPT, NEW, sampling).token_ids
        found.append((text, [([*draft.tokens], [*draft.parents]) for draft in drafts]))
    assert found[0] == found[1]
    assert max(len(tokens) for tokens, _ in found[0][1]) > 4


def behind(drafts: Sequence[tuple[int, Draft]]) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """By the text's length and the path of tokens, the tokens that were guessed behind it, likeliest first."""
    found = dict[tuple[int, tuple[int, ...]], list[int]]()
    for length, draft in drafts:
        paths = [()] + [tuple(draft.path_tokens(row)) for row in range(1, len(draft))]
        for row in range(1, len(draft)):
            found.setdefault((length, paths[draft.parents[row]]), []).append(draft.tokens[row])
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", [None, MATCH])
@pytest.mark.parametrize("kind", UNREAD)
def test_behind_the_same_tokens_a_tree_has_the_guesses_that_are_read(
    kind: str, sampling: SamplingParams | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their shapes differ; so every list begins as the other one does."""
    target, found, levels = target_of("llama"), list[dict[tuple[int, tuple[int, ...]], list[int]]](), 0
    for apart in (False, True):
        monkeypatch.setattr(device_copies, "is_apart", lambda device, apart=apart: apart)
        drafts, drafter = list[tuple[int, Draft]](), make_drafter(settings(tmp_path, kind, branch=3, rows=20), target)

        class Noted(type(drafter)):  # type: ignore[misc]
            def start(self, context: Any, drafts: Any = drafts) -> Any:
                session = super().start(context)
                passes = session.passes

                def noted(row_budget: int) -> Any:
                    draft = yield from passes(row_budget)
                    drafts.append((len(context.tokens), draft))
                    return draft

                session.passes = noted
                return session

        drafter.__class__ = Noted
        Engine(target, None, drafter, max_rows=24, policy="off").generate(PROMPT, NEW, sampling)
        found.append(behind(drafts))
    shared = found[0].keys() & found[1].keys()
    for place in shared:
        size = min(len(found[0][place]), len(found[1][place]))
        assert found[0][place][:size] == found[1][place][:size], place
        levels = max(levels, len(place[1]))
    assert len(shared) > 40
    assert levels > 1
    assert any(len(path) and len(found[1][length, path]) > 1 for length, path in shared)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", UNREAD)
def test_texts_are_the_target_s(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of trees, alone, in a batch, and with what is settled by costs; their rows are learned from."""
    target, plain, seen = target_of("llama"), Engine(target_of("llama")), list[int]()
    expected = [plain.generate(PROMPT, NEW, one).token_ids for one in (None, MATCH)]
    monkeypatch.setattr(device_copies, "is_apart", lambda device: True)
    grow = UnreadSession._settle

    def noted(own: UnreadSession, most: int, deepest: int) -> Settled:
        found = grow(own, most, deepest)
        seen.append(len(found.parents))
        return found

    monkeypatch.setattr(UnreadSession, "_settle", noted)
    for options in ({"branch": 3, "rows": 9}, {"min_chance": None}):
        drafter = make_drafter(settings(tmp_path, kind, **options), target)
        engine = Engine(target, None, drafter, max_rows=24, costs=roofline(), policy="off")
        assert [engine.generate(PROMPT, NEW, one).token_ids for one in (None, MATCH)] == expected
        both = engine.generate_batch([PROMPT, PROMPT[:5]], NEW, [MATCH, None], batch=2)
        assert [one.error for one in both] == [None, None]
        assert both[0].token_ids == expected[1]
        assert both[1].token_ids == greedy("llama", PROMPT[:5], NEW)
    assert max(seen) == 10


def test_guesses_of_before_say_how_many_rows_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that goes on as the head says has more rows than one that never does."""
    monkeypatch.setattr(device_copies, "is_apart", lambda device: True)
    rows = list[list[int]]()
    for right in (True, False):
        target, sizes = target_of("llama"), list[int]()
        made: Any = make_drafter(settings(tmp_path, "eagle3", min_chance=None), target)
        drafter = Spy(made, lambda draft, sizes=sizes: sizes.append(len(draft)))
        truth = [*PROMPT, *greedy("llama", PROMPT, NEW)]

        def guess(brought: Any, made: Any = made, right: bool = right, truth: Any = truth) -> Any:
            """Logits that are for the next token of the text, or never for one."""
            found = []
            for one, given in zip(brought, type(made).guess(made, brought), strict=True):
                logits = torch.full_like(given.logits, -5.0)
                for row in range(one.asked):
                    place = one.step.lengths[0] + one.step.tree[-1] - one.asked + row + 2
                    token = truth[min(place, len(truth) - 1)]
                    known = (made.vocabulary.tokens == token).nonzero().flatten().tolist()
                    if known and right:
                        logits[row, known[0]] = 5.0
                    elif known:
                        logits[row, known[0]] = -9.0
                found.append(replace(given, logits=logits))
            return found

        monkeypatch.setattr(made, "guess", guess)
        # Rows cost something, so that only likely ones pay.
        Engine(target, None, drafter, max_rows=16, costs=roofline(), policy="off").generate(PROMPT, NEW)
        rows.append(sizes)
    assert sum(rows[0]) / len(rows[0]) > sum(rows[1]) / len(rows[1])
    assert rows[1][-2] == 2, "one guess is always made"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["peagle", "dspark"])
def test_drawn_drafts_keep_the_joint_distribution(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees whose shape was settled, of confident heads that are far from the target; see test_heads.py, too."""
    target, model = five_token_target()
    drafter = make_drafter(settings(tmp_path, kind, 8, 5), target)
    monkeypatch.setattr(device_copies, "is_apart", lambda device: True)
    drafts = list[Draft]()
    engine = Engine(target, None, Spy(drafter, drafts.append), max_rows=16, costs=roofline())
    params = [SamplingParams(temperature=1.0, seed=seed, acceptance="reject") for seed in range(1500)]
    texts = [one.token_ids for one in engine.generate_batch([[4, 2, 0, 1]] * 1500, 3, params, batch=64)]
    assert_joint(texts, joint_of(model, [4, 2, 0, 1], 3))
    assert any(len(draft.q) > 1 and not draft.is_chain for draft in drafts)


def test_a_token_that_a_filter_excludes_has_a_probability_under_q(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a row that was drawn because its number was settled is judged, whatever it is."""
    target = target_of("llama")
    drafter = make_drafter(settings(tmp_path, "eagle3", branch=4, rows=9), target)
    monkeypatch.setattr(device_copies, "is_apart", lambda device: True)
    drafts = list[Draft]()
    engine = Engine(target, None, Spy(drafter, drafts.append), max_rows=16, policy="off")
    sampling = SamplingParams(temperature=0.7, top_k=1, seed=3, acceptance="reject")
    assert engine.generate(PROMPT, NEW, sampling).token_ids == greedy("llama", PROMPT, NEW)  # top_k leaves one token
    drawn = [(draft, row) for draft in drafts for row in range(1, len(draft))]
    assert drawn
    assert all(draft.q[draft.parents[row]][draft.tokens[row]] > 0 for draft, row in drawn)


def test_each_row_draws_by_a_noise_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a head that has no opinion, the children of several rows are several."""
    target = target_of("llama")
    drafter: Any = make_drafter(settings(tmp_path, "eagle1", branch=2, rows=20), target)
    monkeypatch.setattr(device_copies, "is_apart", lambda device: True)

    def guess(brought: Any) -> Any:
        return [replace(one, logits=0 * one.logits) for one in type(drafter).guess(drafter, brought)]

    monkeypatch.setattr(drafter, "guess", guess)
    drafts = list[Draft]()
    engine = Engine(target, None, Spy(drafter, drafts.append), max_rows=24, policy="off")
    engine.generate(PROMPT, 8, SamplingParams(temperature=1.0, seed=3, acceptance="reject"))
    below: dict[int, list[int]] = {}
    for row in range(1, len(drafts[0])):
        below.setdefault(drafts[0].parents[row], []).append(drafts[0].tokens[row])
    assert len({*map(tuple, below.values())}) > len(below) // 2
    assert all(len({*siblings}) == len(siblings) for siblings in below.values())
