"""Recycled distributions: means of what was seen, ranked with the target's noise, in trees of the rows that pay."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from drafters.token_recycling.drafter import TokenRecycling, TokenRecyclingConfig, TokenRecyclingSession
from drafters.token_recycling.recycled import Distributions, DrawnSession
from specdec import Context, Draft, Engine, Observation, SamplingParams
from specdec.drafter import DraftSession
from specdec.errors import ConfigError
from specdec.sampling import noise as noise_module
from specdec.sampling.noise import Noise
from specdec.step.step_output import StepOutput, Top
from tests.models import prompt_of, target_of
from tests.unit.drafters.test_token_recycling import context_of

V = 32


def drawing(tokens: list[int], temperature: float = 0.8, seed: int = 3, **params: object) -> Context:
    chosen = SamplingParams(temperature=temperature, seed=seed, **params)  # type: ignore[arg-type]
    return replace(context_of(tokens), sampling=chosen, noise=Noise(seed, V, torch.device("cpu")))


def started(context: Context, **options: int) -> DraftSession:
    return TokenRecycling(TokenRecyclingConfig(**options)).start(context)


def told(session: DraftSession, context: Context, token: int, logits: torch.Tensor) -> None:
    """Have the last token's row, with its ``logits`` [V], verified, and a token emitted."""
    root = context.root
    session.propose(2)
    context.tokens.append(token)
    session.observe(Observation(Draft.chain([root]), [0], [token], StepOutput(logits[None])))


@pytest.mark.parametrize("compiled", [True, False])
def test_tokens_are_ranked_by_score_and_the_noise_of_a_full_vocabulary(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(noise_module, "rank", lambda *_: None)
    rng = np.random.default_rng(0)
    for seed, sizes in ((0, [1]), (1, [2, 1]), (2, [40, 32, 1]), (-3, [300, 200, 600])):
        noise, known, shares = Noise(seed, 1000, torch.device("cpu")), [], np.zeros(1000)
        for size in sizes:
            scores = np.sort(rng.normal(0, 2, size).astype(np.float32))[::-1]
            tokens = rng.permutation(1000)[:size]
            scores[size // 2 :] = scores[size // 2 :] if size < 40 else -np.inf
            known.append((array("q", tokens.tolist()), array("f", scores.tolist())))
            odds = np.exp(scores.astype(np.float64) / 0.7)
            shares[tokens] += odds / odds.sum() / len(sizes)
        with np.errstate(divide="ignore"):
            logs = np.log(shares)
        for position in (0, 1, 7, 100_000):
            sums = logs + noise.gumbel(position).numpy()
            best = np.argsort(-sums, kind="stable")[: min(8, np.isfinite(logs).sum())]
            found, reached = noise.ranked(known, 0.7, position, 8)
            assert found == best.tolist(), (seed, sizes, position)
            assert np.allclose(reached, sums[best], rtol=0, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.8, 0.3])
def test_a_row_s_children_are_those_of_the_target_s_noise_at_its_depth(temperature: float) -> None:
    """One token's distribution at three depths, so that only the position's noise tells them apart."""
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1))
    logits[5] = 6.0
    context = drawing([5, 5], temperature)
    session = started(context, rows=20, depth=3)
    told(session, context, 5, logits)
    draft = session.propose(64)
    order: list[list[int]] = [[] for _ in draft.tokens]
    for row in range(1, len(draft)):
        order[draft.parents[row]].append(draft.tokens[row])
    assert {draft.depths[row] for row in range(len(draft)) if order[row] and draft.tokens[row] == 5} >= {0, 1}
    for row, children in enumerate(order):
        if children and draft.tokens[row] == 5:
            position = len(context.tokens) + draft.depths[row]
            sums = logits.double() / temperature + context.noise.gumbel(position)
            assert children == sums.argsort(descending=True)[: len(children)].tolist()


def test_a_known_distribution_drafts_the_target_s_own_draws() -> None:
    """A chain of tokens whose distributions are known exactly is what the target draws, token for token."""
    logits = torch.randn(V, V, generator=torch.Generator().manual_seed(2))
    context = drawing([0], 0.7, seed=11)
    session = started(context, rows=6, depth=6)
    assert isinstance(session, DrawnSession)
    for token in range(V):
        best = logits[token].sort(descending=True)
        session._table.learn(None, token, best.indices.tolist(), best.values.tolist())
    text = [0]
    for _ in range(6):
        text.append(int((logits[text[-1]].double() / 0.7 + context.noise.gumbel(len(text))).argmax()))
    draft = session.propose(64)
    row, path = 0, [0]
    while (child := draft.child(row, text[len(path)]) if len(path) < len(text) else None) is not None:
        assert child == min(below for below in range(len(draft)) if draft.parents[below] == row)  # the first rank
        row = child
        path.append(draft.tokens[child])
    assert len(path) >= 3


def test_a_row_is_as_likely_as_its_lead_says_in_logits() -> None:
    """Four tokens, all of them proposed; a lead of as many logits counts the same at any temperature."""
    for temperature in (1.0, 0.5):
        context = drawing([5, 5], temperature)
        session = started(context, rows=4, depth=1)
        assert isinstance(session, DrawnSession)
        logits = torch.tensor([2.0, 1.5, 0.5, 0.0], dtype=torch.float64)
        session._table.learn(5, 5, [0, 1, 2, 3], logits.tolist())
        draft = session.propose(9)
        sums = logits / temperature + context.noise.gumbel(len(context.tokens))[:4]
        chances = torch.softmax(sums * temperature / 1.25, -1)
        assert session._chances[1:] == pytest.approx(chances[list(draft.tokens[1:])].tolist())
        assert draft.hints.chances[1:] == pytest.approx([0.75 * chance for chance in session._chances[1:]])


def scores_of(shares: dict[int, float]) -> tuple[list[int], list[float]]:
    tokens = sorted(shares, key=lambda token: -shares[token])
    return tokens, [0.5 * math.log(shares[token]) for token in tokens]


def shares_of(table: Distributions, before: int | None, token: int) -> dict[int, float]:
    """As a draw at temperature 0.5 has them, of ``scores_of``."""
    guess, shares = table.of(before, token, 0.5), dict[int, float]()
    for tokens, scores in guess.known if guess else ():
        assert guess is not None
        odds = np.exp(np.array(scores) / 0.5)
        for one, odd in zip(tokens, (odds / odds.sum()).tolist(), strict=True):
            if odd:
                shares[one] = shares.get(one, 0.0) + guess.mass * odd / len(guess.known)
    return shares


def test_a_guess_is_the_mean_of_the_latest_and_of_the_same_pair_where_it_is_known() -> None:
    table = Distributions()
    for before, shares in ((1, {4: 0.9, 5: 0.1}), (2, {4: 0.5, 6: 0.5}), (3, {7: 1.0}), (2, {6: 0.8, 4: 0.2})):
        table.learn(before, 8, *scores_of(shares))
    assert shares_of(table, 2, 8) == pytest.approx({4: 0.35, 6: 0.65})
    assert shares_of(table, 1, 8) == pytest.approx({4: 0.9, 5: 0.1})
    assert shares_of(table, 9, 8) == pytest.approx({4: 0.7 / 3, 6: 1.3 / 3, 7: 1 / 3})  # the latest three after any
    assert shares_of(table, None, 8) == shares_of(table, 9, 8)
    assert shares_of(table, 2, 9) == {}
    table.learn(2, 8, [1], [-3.0])
    assert shares_of(table, 2, 8) == pytest.approx({4: 0.35 * 2 / 3, 6: 0.65 * 2 / 3, 1: 1 / 3})


def test_pairs_of_the_prompt_serve_until_a_distribution_is_known() -> None:
    table = Distributions()
    table.read([1, 5, 1, 6, 1, 5])
    assert shares_of(table, 0, 1) == pytest.approx({5: 2 / 5, 6: 1 / 5})
    table.read([1, 5])
    assert shares_of(table, 0, 1) == pytest.approx({5: 3 / 6, 6: 1 / 6})
    table.learn(0, 1, [9], [0.0])
    assert shares_of(table, 3, 1) == {9: 1.0}


def test_what_is_never_drawn_is_not_proposed() -> None:
    context = drawing([5, 5], 1.0, top_k=2)
    session = started(context, rows=9, depth=1)
    told(session, context, 5, torch.linspace(1, 0, V))
    assert set(session.propose(64).tokens[1:]) == {0, 1}


def test_rows_are_learned_under_their_own_pair_and_accepted_ones_last() -> None:
    context = drawing([7, 9])
    session = started(context)
    assert isinstance(session, DrawnSession)
    session.propose(9)
    logits = torch.full((4, V), -torch.inf)
    for row, token in enumerate((20, 21, 22, 23)):
        logits[row, token] = 0.0
    draft = Draft((9, 8, 6, 8), (-1, 0, 1, 0), probes=frozenset({2}))  # row 3 was accepted, row 1 was not
    context.tokens += [8, 23]
    session.observe(Observation(draft, [0, 3], [8, 23], StepOutput(logits[[0, 1, 3]], [0, 1, 3])))
    table = session._table
    assert [shares_of(table, *pair) for pair in ((7, 9), (8, 6))] == [{20: 1.0}, {}]
    assert shares_of(table, 9, 8) == {21: 0.5, 23: 0.5}
    assert table._of[9, 8][-1][0][0] == 23


def test_without_logits_ranks_stand_for_them() -> None:
    context = drawing([5, 5], 1.0)
    session = started(context, rows=9, depth=1)
    scores = StepOutput(torch.arange(float(V), 0, -1)[None])
    session.propose(2)
    context.tokens.append(5)
    scores.gather(Top(32, scores.top_k(32)[0], ()), {})
    session.observe(Observation(Draft.chain([5]), [0], [5], scores))
    assert isinstance(session, DrawnSession)
    expected = np.arange(1, 33) ** (-1.8 / 0.5)  # at the temperature of shares_of
    assert shares_of(session._table, 5, 5) == pytest.approx(dict(enumerate(expected / expected.sum())))


def test_likeliest_tokens_come_with_their_logits_where_these_are_at_hand() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(4))
    best = logits.topk(20)
    for dtype in (torch.float32, torch.float64):  # the second is none that the library reads
        scores = StepOutput(logits.to(dtype), [0, 2, 5])
        for own, places, count in ((scores, [0, 1, 2], 20), (scores.select([5, 0], None), [2, 0], 1)):
            tokens, values = own.weighed(count)
            assert values is not None
            assert [[*row] for row in tokens] == best.indices[places, :count].tolist()
            assert [[*row] for row in values] == best.values[places, :count].tolist()
    told = StepOutput(logits[:2])
    told.gather(Top(2, [3, 1, 2, 5], ()), {})  # by other ranks
    assert told.weighed(2) == ([[3, 1], [2, 5]], None)
    assert (told.argmax(1), told.top_k(1)) == (2, [[3], [2]])
    with pytest.raises(ConfigError, match="reads the 3 likeliest tokens of each row and its top_k is 2"):
        told.top_k(3)
    with pytest.raises(ConfigError, match="logits are not exchanged"):
        told.at(0)


def test_promises_follow_what_was_right() -> None:
    """Rows that keep being wrong are promised less, until none pays; and a draft says how sure it is of its rows."""
    logits = torch.zeros(V)
    logits[5] = 9.0
    kept = dict[int, tuple[int, float]]()
    for emitted in (5, 6):
        context = drawing([5, 5])
        session = started(context)
        told(session, context, 5, logits)
        for _ in range(80):
            draft = session.propose(9)
            context.tokens.append(emitted)
            rows = StepOutput(logits.expand(len(draft), V))
            session.observe(Observation(draft, [0], [emitted], rows))
            context.tokens[-1] = 5
        draft = session.propose(9)
        kept[emitted] = len(draft), max(draft.hints.chances[1:], default=0.0)
    assert kept[5][0] > 1 == kept[6][0]
    assert kept[5][1] > 0.6 > kept[6][1]


@pytest.mark.parametrize(
    ("chosen", "drawn"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=1.0), True),
        (SamplingParams(temperature=1.0, acceptance="match"), True),
        (SamplingParams(temperature=1.0, acceptance="reject"), False),
        (SamplingParams(temperature=1.0, acceptance="typical", allow_lossy=True), False),
    ],
)
def test_only_the_target_s_own_draws_are_ranked_by_noise(chosen: SamplingParams, drawn: bool) -> None:
    session = TokenRecycling().start(replace(context_of([1, 2]), sampling=chosen))
    assert type(session) is (DrawnSession if drawn else TokenRecyclingSession)


def test_the_room_and_the_depth_are_kept() -> None:
    context = drawing([5, 5], 1.0)
    session = started(context, rows=40, depth=2)
    told(session, context, 5, torch.zeros(V))
    assert len(session.propose(7)) == 7
    assert max(session.propose(64).depths) <= 2
    context.remaining = 2
    assert max(session.propose(64).depths) == 1
    context.remaining = 1
    assert len(session.propose(64)) == len(session.propose(1)) == 1


@pytest.mark.slow
def test_more_is_accepted_than_with_another_s_noise() -> None:
    """Of the same sampled texts, whose tokens none of this may change."""
    chosen = SamplingParams(temperature=1.0)
    original, other = Noise.ranked, Noise(99, 1000, torch.device("cpu"))
    runs = []
    for ranked in (original, lambda self, *given: original(other, *given)):
        engine = Engine(target_of("llama"), None, {"name": "token_recycling", "rows": 8})
        with patch.object(Noise, "ranked", ranked):
            runs.append([engine.generate(prompt_of(seed + 5), 60, replace(chosen, seed=seed)) for seed in range(4)])
    assert [run.token_ids for run in runs[0]] == [run.token_ids for run in runs[1]]
    assert sum(run.stats.steps for run in runs[0]) < 0.9 * sum(run.stats.steps for run in runs[1])


def test_a_persistent_table_is_shared_by_sequences_that_draw() -> None:
    for persistent in (False, True):
        drafter = TokenRecycling(TokenRecyclingConfig(persistent=persistent, from_prompt=False))
        context = drawing([3, 3])
        told(drafter.start(context), context, 8, torch.eye(V)[8] * 20)
        assert (8 in drafter.start(drawing([3, 3])).propose(9).tokens) is persistent
