"""Token recycling: the template is the likeliest tree, the table keeps what was last seen, drafts follow both."""

from __future__ import annotations

import random

import pytest
import torch

from drafters.token_recycling.drafter import Successors, TokenRecycling, TokenRecyclingConfig, template
from specdec import Context, Draft, Engine, Observation, SamplingParams
from specdec.errors import ConfigError
from specdec.sampling.noise import Noise
from specdec.step.step_output import StepOutput
from tests.models import prompt_of, target_of


def context_of(tokens: list[int], remaining: int = 50) -> Context:
    """A context for sessions that read text and counts alone."""
    target = target_of("llama")
    return Context(
        target=target,
        cache=target.new_cache(capacity=4, rows=1),
        tokens=tokens,
        prompt_length=len(tokens),
        remaining=remaining,
        max_rows=64,
        sampling=SamplingParams(),
        noise=Noise(0, 32, target.device),
        rng=random.Random(0),
    )


def nodes_of(rows: int, depth: int, ranks: int) -> list[tuple[int, int]]:
    """Parents and ranks."""
    tree = template(rows, depth, ranks)
    return [*zip(tree.parents, tree.tokens, strict=True)][1:]


def depths_of(nodes: list[tuple[int, int]]) -> list[int]:
    depths = [0]
    for parent, _ in nodes:
        depths.append(depths[parent] + 1)
    return depths


def test_template_is_a_tree_in_order_of_worth() -> None:
    for rows, depth, ranks in ((1, 1, 1), (7, 6, 8), (80, 6, 8), (40, 2, 3)):
        nodes = nodes_of(rows, depth, ranks)
        assert len(nodes) == (rows if (rows, depth) != (40, 2) else 3 + 9)  # no more than the full tree
        assert all(parent < node for node, (parent, _) in enumerate(nodes, 1))
        assert len(set(nodes)) == len(nodes)
        assert max(depths_of(nodes)) <= depth
        # A rank is there only with all better ones beside it.
        assert all(rank == 0 or (parent, rank - 1) in nodes for parent, rank in nodes)
    assert nodes_of(3, 6, 8) == [(0, 0), (1, 0), (0, 1)]
    assert max(template(80, 9, 8).depths) == 6  # as deep as the paper's tree of 80


def test_successors_of_a_text_are_its_latest_pairs() -> None:
    table = Successors(2)
    table.read([1, 5, 1, 6, 1, 7, 1, 6])
    assert list(table.of(1)) == [6, 7]
    assert list(table.of(5)) == [1]
    assert list(table.of(9)) == []
    table.read([1, 5, 1, 5])
    assert list(table.of(1)) == [5, 6]  # none twice


def test_successors_are_the_top_of_the_logits_and_accepted_rows_win() -> None:
    table = Successors(2)
    logits = torch.zeros(4, 5)
    logits[0, 3], logits[0, 1] = 2, 1
    logits[1, 4], logits[1, 0] = 2, 1  # token 7, accepted
    logits[2, 2], logits[2, 1] = 2, 1  # token 7 again, rejected
    draft = Draft((9, 7, 8, 7), (-1, 0, 0, 2), probes=frozenset({2}))
    table.learn(draft, [0, 1], StepOutput(logits[:3], [0, 1, 3]))
    assert list(table.of(9)) == [3, 1]
    assert list(table.of(7)) == [4, 0]
    assert list(table.of(8)) == []  # it was not scored


def test_draft_follows_template_and_table() -> None:
    drafter = TokenRecycling(TokenRecyclingConfig(rows=4, successors=2))
    context = context_of([1, 5, 1, 6, 2, 1])
    session = drafter.start(context)
    draft = session.propose(9)
    assert nodes_of(4, 6, 2) == [(0, 0), (1, 0), (0, 1), (2, 0)]
    assert (list(draft.tokens), list(draft.parents)) == ([1, 6, 2, 5, 1], [-1, 0, 1, 0, 2])
    assert len(session.propose(3)) == 3
    context.remaining = 2
    assert session.propose(9).depths == [0, 1, 1]


def test_a_token_never_seen_has_no_draft() -> None:
    session = TokenRecycling().start(context_of([4, 3, 2]))
    assert list(session.propose(9).tokens) == [2]
    cold = TokenRecycling(TokenRecyclingConfig(from_prompt=False)).start(context_of([4, 4, 4]))
    assert list(cold.propose(9).tokens) == [4]


def test_sequences_share_a_persistent_table_and_no_other() -> None:
    for persistent in (False, True):
        drafter = TokenRecycling(TokenRecyclingConfig(persistent=persistent, from_prompt=False))
        first = drafter.start(context_of([3]))
        logits = torch.zeros(1, 32)
        logits[0, 8] = 1
        first.observe(Observation(Draft.chain([3]), [0], [8], StepOutput(logits)))
        assert (8 in drafter.start(context_of([3])).propose(9).tokens) is persistent


def test_where_the_text_depends_on_rows_no_table_is_shared() -> None:
    drafter = TokenRecycling(TokenRecyclingConfig(persistent=True))
    context = context_of([1, 2, 1])
    assert len(drafter.start(context).propose(9)) > 1
    context = context_of([1])
    assert len(drafter.start(context).propose(9)) > 1
    context.isolated = True
    assert len(drafter.start(context).propose(9)) == 1


def test_persistent_table_speeds_up_the_same_text() -> None:
    engine = Engine(target_of("llama"), None, {"name": "token_recycling", "persistent": True, "rows": 20})
    runs = [engine.generate(prompt_of(9), 40) for _ in range(2)]
    assert runs[0].token_ids == runs[1].token_ids
    assert runs[1].stats.steps < runs[0].stats.steps < 40


@pytest.mark.parametrize("option", ["rows", "depth", "successors"])
def test_options_are_checked(option: str) -> None:
    with pytest.raises(ConfigError, match=f"token_recycling.{option} is 0; it must be at least 1"):
        TokenRecyclingConfig(**{option: 0})
