"""Sessions of heads: beside other drafters, after a rest, and what the policy is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.heads.dflash import DFlash, DFlashConfig
from drafters.heads.eagle import EagleConfig
from drafters.heads.loading import load_head
from drafters.heads.transitions import Transitions
from drafters.heads.weights import Block
from specdec import Draft, Engine, SamplingParams
from specdec.costs.curve import roofline
from specdec.drafting.registry import make_drafter
from specdec.errors import CheckpointError, ConfigError
from tests import heads
from tests.fakes import Spy
from tests.joint import assert_joint, five_token_target, joint_of
from tests.models import VOCAB, greedy, prompt_of, target_of

SIZE, PROMPT, NEW = 32, prompt_of(9), 30


def eagle(folder: Path, **options: Any) -> dict[str, Any]:
    made = heads.eagle3(SIZE, VOCAB, draft=17)
    return {"name": "eagle", "head": str(heads.write(folder / "eagle", *made)), "min_chance": 0.0, **options}


def dflash(folder: Path, **options: Any) -> dict[str, Any]:
    made = heads.dflash(SIZE, VOCAB, kind="dspark", markov="vanilla", draft=17)
    return {"name": "dflash", "head": str(heads.write(folder / "dflash", *made)), "min_chance": 0.0, **options}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["auto", "union"])
def test_heads_are_parts_of_merged_drafts(name: str, tmp_path: Path) -> None:
    target, rows = target_of("mistral"), []
    parts = [eagle(tmp_path, rows=4), dflash(tmp_path, rows=5), "suffix_automaton"]
    drafter = Spy(
        make_drafter({"name": name, "parts": parts, "rows": 12}, target), lambda draft: rows.append(len(draft))
    )
    engine = Engine(target, None, drafter, max_rows=24, costs=roofline())
    assert engine.generate(PROMPT, NEW).token_ids == greedy("mistral", PROMPT, NEW)
    assert max(rows) > 3
    hot = SamplingParams(temperature=0.9, seed=2, acceptance="match")
    assert engine.generate(PROMPT, NEW, hot).token_ids == Engine(target).generate(PROMPT, NEW, hot).token_ids


@pytest.mark.few(1)
@pytest.mark.parametrize("made", [eagle, dflash])
def test_after_a_rest_it_guesses_as_if_it_had_been_asked(made: Any, tmp_path: Path) -> None:
    """Tokens that came without it are seen all the same; so the same text gives the same draft."""
    target, truth = target_of("llama"), greedy("llama", PROMPT, NEW)
    drafts: list[dict[int, Draft]] = []
    for asked in (lambda length: True, lambda length: length > len(PROMPT) + 15):
        found: dict[int, Draft] = {}
        inner = make_drafter(made(tmp_path), target)

        class Sometimes(type(inner)):  # type: ignore[misc]
            def start(self, context: Any, asked: Any = asked, found: Any = found) -> Any:
                session = super().start(context)
                propose = session.passes

                def passes(row_budget: int) -> Any:
                    if not asked(len(context.tokens)):
                        yield from ()
                        return Draft.chain([context.root])
                    draft = yield from propose(row_budget)
                    found[len(context.tokens)] = draft
                    return draft

                session.passes = passes
                return session

        inner.__class__ = Sometimes
        assert Engine(target, None, inner, max_rows=24).generate(PROMPT, NEW).token_ids == truth
        drafts.append(found)
    shared = drafts[0].keys() & drafts[1].keys()
    assert len(shared) > 5
    for length in shared:
        assert drafts[0][length].tokens[1] == drafts[1][length].tokens[1]


def test_confidence_is_the_chance_that_the_policy_is_told(tmp_path: Path) -> None:
    """By hand: the sigmoid of a product with the state and the embedding of the token before."""
    config, tensors = heads.dflash(SIZE, VOCAB, kind="dspark", markov="vanilla")
    head = load_head(heads.write(tmp_path, config, tensors), "dflash", target_of("llama"))
    assert isinstance(head, Block)
    generator = torch.Generator().manual_seed(1)
    hidden, logits = torch.randn(2, SIZE, generator=generator), torch.randn(2, VOCAB, generator=generator)
    said = Transitions(head).said(hidden, logits, [3, 5], None)
    known = tensors["markov_head.markov_w1.weight"][[3, 5]]
    weight, bias = (tensors[f"confidence_head.proj.{part}"] for part in ("weight", "bias"))
    expected = torch.sigmoid(torch.cat((hidden, known), -1) @ weight.T + bias)[:, 0]
    assert said.chances is not None
    torch.testing.assert_close(torch.tensor(said.chances), expected)
    torch.testing.assert_close(said.logits, logits + known @ tensors["markov_head.markov_w2.weight"].T)
    drafts: list[Draft] = []
    drafter = Spy(
        make_drafter({"name": "dflash", "head": str(tmp_path), "min_chance": 0.0}, target_of("llama")), drafts.append
    )
    Engine(target_of("llama"), None, drafter, max_rows=24).generate(PROMPT, 8)
    told = [draft for draft in drafts if len(draft) > 1]
    assert told
    assert all(len(draft.hints.chances) == len(draft) and draft.hints.chances[0] == 1 for draft in told)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "dflash2"])
def test_drawn_drafts_keep_the_joint_distribution(kind: str, tmp_path: Path) -> None:
    """Confident heads, far from the target; what they draw is accepted and rejected by its q. See test_unread.py."""
    target, model = five_token_target()
    made: dict[str, Any] = {
        "eagle3": lambda: heads.eagle3(8, 5, draft=4),
        "dflash2": lambda: heads.dflash(8, 5, kind="dflash2", selector_top_k=3),
    }
    name = "eagle" if "eagle" in kind else "dflash"
    settings = {"name": name, "head": str(heads.write(tmp_path, *made[kind]())), "min_chance": 0.0}
    engine = Engine(target, None, settings, max_rows=16, costs=roofline())
    params = [SamplingParams(temperature=1.0, seed=seed, acceptance="reject") for seed in range(1500)]
    texts = [one.token_ids for one in engine.generate_batch([[4, 2, 0, 1]] * 1500, 3, params, batch=64)]
    assert_joint(texts, joint_of(model, [4, 2, 0, 1], 3))


def test_a_head_that_says_nan_drafts_nothing(tmp_path: Path) -> None:
    config, tensors = heads.eagle3(SIZE, VOCAB)
    tensors["lm_head.weight"] *= 1e38
    tensors["norm.weight"] *= 1e38
    folder = heads.write(tmp_path, config, tensors)
    target = target_of("llama", torch.float32)
    for sampling in (None, SamplingParams(temperature=1.0, acceptance="reject")):
        engine = Engine(target, None, {"name": "eagle", "head": str(folder), "min_chance": 0.0})
        assert len(engine.generate(PROMPT, 8, sampling).token_ids) == 8


@pytest.mark.parametrize("options", [{"tokens": 0}, {"branch": 0}, {"rows": -1}, {"min_chance": 1.5}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    for config in (EagleConfig, DFlashConfig):
        with pytest.raises(ConfigError, match=next(iter(options))):
            config(**options)


def test_each_head_goes_to_its_drafter(tmp_path: Path) -> None:
    target = target_of("llama")
    wrong = {"name": "dflash", "head": eagle(tmp_path)["head"]}
    with pytest.raises(CheckpointError, match="of format eagle3; give it to the drafter 'eagle'"):
        make_drafter(wrong, target)
    assert isinstance(make_drafter(dflash(tmp_path), target), DFlash)
