"""Draft vocabularies: what is left out is never proposed and has no probability, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from drafters.kangaroo.adapter import Adapter
from drafters.kangaroo.drafter import Kangaroo, KangarooConfig
from drafters.medusa.drafter import Medusa, MedusaConfig
from drafters.medusa.heads import MedusaHeads
from drafters.medusa.heads_step import State
from drafters.shared.vocabulary import DraftVocabulary, most_frequent, number_in, ranks_of, token_counts
from specdec import Draft, Engine, SamplingParams
from specdec.drafter import Drafter
from specdec.errors import CheckpointError, ConfigError
from specdec.models.transformers_target import TransformersTarget
from specdec.sampling.verify import reject
from tests.fakes import Spy
from tests.joint import assert_joint, five_token_target, joint_of
from tests.models import new_model, prompt_of, random_adapter, random_heads, target_for
from tests.unit.sampling.test_verify import SHAPES, emitted, joint, table

TOKENS = [1, 4, 5, 9, 17, 20, 21, 30]
PROMPT = prompt_of(9)


@pytest.fixture
def target(target_of: Callable[..., TransformersTarget]) -> TransformersTarget:
    return target_of("llama")


def among(part: Adapter | MedusaHeads, folder: Path, tokens: list[int]) -> str:
    """Give saved weights this draft vocabulary."""
    path = next(folder.glob("*.safetensors"))
    save_file({**load_file(path), "draft_tokens": torch.tensor(tokens)}, path)
    return str(folder)


def kangaroo(target: TransformersTarget, folder: Path, tokens: list[int], **options: Any) -> Kangaroo:
    saved = random_adapter(target, folder, draft_vocab=len(tokens))
    return Kangaroo.build(KangarooConfig(adapter=among(saved, folder, tokens), **options), target)


def medusa(target: TransformersTarget, folder: Path, tokens: list[int], **sizes: Any) -> Medusa:
    saved = random_heads(target, folder, draft_vocab=len(tokens), **sizes)
    return Medusa.build(MedusaConfig(heads=among(saved, folder, tokens), tree=[[0], [1], [0, 0], [0, 7]]), target)


def drafts_of(target: TransformersTarget, drafter: Drafter, **sampling: Any) -> list[Draft]:
    drafts: list[Draft] = []
    params = SamplingParams(**sampling) if sampling else None
    found = Engine(target, None, Spy(drafter, drafts.append)).generate(PROMPT, 20, params)
    if sampling.get("acceptance") != "reject":
        assert found.token_ids == Engine(target).generate(PROMPT, 20, params).token_ids
    return drafts


def test_the_most_frequent_are_counted() -> None:
    counts = token_counts([[3, 3, 3, 5], [5, 0, 7, 7, 7]], 8)
    assert counts.tolist() == [1, 0, 0, 3, 0, 2, 0, 3]
    assert most_frequent(counts, 3).tolist() == [3, 5, 7]
    assert most_frequent(counts, 6).tolist() == [0, 1, 2, 3, 5, 7]  # the lower where they tie


def test_numbers_and_ranks() -> None:
    drafted = torch.tensor([1, 4, 6])
    assert number_in(drafted, torch.tensor([0, 1, 4, 5, 6, 9])).tolist() == [-1, 0, 1, -1, 2, -1]
    guess = torch.tensor([[0.1, 0.9, 0.5], [0.1, 0.9, 0.5]])
    assert ranks_of(guess, torch.tensor([2, -1])).tolist() == [1, 3]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("execution", "kind"),
    [*(("modules", kind) for kind in ("plain", "capped", "biased")), ("native", "plain"), ("native", "capped")],
)
def test_a_slice_of_the_head_says_what_the_head_says(execution: str, kind: str) -> None:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1} if execution == "native" else {}
    model = new_model("gemma2" if kind == "capped" else "llama", torch.float32, **sizes)
    if kind == "biased":
        model.lm_head.bias = nn.Parameter(torch.randn(32))
    target = target_for(model, execution=execution)
    tokens = torch.tensor(TOKENS)
    for shape in ((1, 32), (3, 32), (2, 3, 32)):
        hidden = torch.randn(shape)
        expected = target.head(hidden)[..., tokens]
        torch.testing.assert_close(target.head_of(tokens)(hidden), expected, rtol=1e-5, atol=1e-5)
        for kept in (tokens, None):
            trained = target.head_of(kept, dtype=torch.float32)(hidden.requires_grad_())
            torch.testing.assert_close(trained, target.head(hidden)[..., TOKENS if kept is not None else slice(None)])
            trained.sum().backward()
        assert hidden.grad is not None


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "acceptance": "match", "top_k": 5}])
def test_kangaroo_proposes_nothing_else(target: TransformersTarget, tmp_path: Path, sampling: dict[str, Any]) -> None:
    drafts = drafts_of(target, kangaroo(target, tmp_path, TOKENS, eta=0.0, gamma=3), **sampling)
    assert {token for draft in drafts for token in draft.tokens[1:]} <= set(TOKENS)
    assert any(len(draft) == 4 for draft in drafts)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_kangaroos_q_is_over_all_tokens(target: TransformersTarget, tmp_path: Path, penalty: float) -> None:
    sampling = {"temperature": 0.8, "acceptance": "reject", "repetition_penalty": penalty}
    drafts = drafts_of(target, kangaroo(target, tmp_path, TOKENS, eta=0.0, gamma=3), **sampling)
    spread = [q for draft in drafts for q in draft.q.values()]
    assert spread
    for q in spread:
        assert q.shape == (target.vocab_size,)
        assert set(q.nonzero()[:, 0].tolist()) == set(TOKENS)
        assert float(q.sum()) == pytest.approx(1)


def test_kangaroo_confuses_no_tokens(target: TransformersTarget, tmp_path: Path) -> None:
    """With all tokens in its vocabulary it drafts what it does without one, under every rule."""
    random_adapter(target, tmp_path / "plain")
    plain = Kangaroo.build(KangarooConfig(adapter=str(tmp_path / "plain"), eta=0.0, gamma=3), target)
    every = kangaroo(target, tmp_path / "every", list(range(32)), eta=0.0, gamma=3)
    for sampling in (
        {},
        {"temperature": 1.0, "acceptance": "match"},
        {"temperature": 1.0, "acceptance": "reject", "top_p": 0.8, "repetition_penalty": 1.2},
    ):
        one, other = drafts_of(target, plain, **sampling), drafts_of(target, every, **sampling)
        assert [list(draft.tokens) for draft in one] == [list(draft.tokens) for draft in other]


@pytest.mark.parametrize("own_head", [False, True])
def test_medusa_proposes_the_best_of_its_vocabulary(target: TransformersTarget, tmp_path: Path, own_head: bool) -> None:
    drafter = medusa(target, tmp_path, TOKENS, own_head=own_head)
    heads = MedusaHeads.from_pretrained(tmp_path).double()
    hidden = torch.randn(1, 32, dtype=torch.float64)
    with torch.no_grad():
        logits = [state if own_head else target.head(state)[:, TOKENS] for state in heads(hidden)]
    best = [[TOKENS[number] for number in own[0].argsort(descending=True)] for own in logits]
    (guesses,) = drafter.lists([(State(hidden, 0, 0), None)])
    assert [[drafter.vocabulary.token(int(number)) for number in own] for own, _ in guesses] == best[:2]
    drafts = drafts_of(target, drafter)
    assert {token for draft in drafts for token in draft.tokens[1:]} <= set(TOKENS)


@pytest.mark.parametrize("shape", ["chain of 2", "3 siblings", "2 then 2"])
@pytest.mark.parametrize("tokens", [[0, 2], [1]])
def test_reject_is_exact_whatever_is_left_out(tokens: list[int], shape: str) -> None:
    """By enumeration: q of three tokens from a vocabulary of one or two."""
    p, raw = table(3, 1), table(3, 2)
    vocabulary = DraftVocabulary(
        torch.tensor(tokens),
        SimpleNamespace(vocab_size=3, head_of=lambda tokens: None),  # type: ignore[arg-type]
    )
    q = {
        text: vocabulary.spread(part / part.sum(), 0.0)
        for text, part in ((text, vocabulary.gather(own)) for text, own in raw.items())
    }
    found, expected = emitted(reject, p, q, SHAPES[shape]), joint(p)
    assert max(abs(found[text] - expected[text]) for text in expected) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("eta", [0.0, None])
def test_sampled_texts_have_the_models_distribution(tmp_path: Path, eta: float | None) -> None:
    target, model = five_token_target()
    drafter = kangaroo(target, tmp_path, [0, 3], eta=0.0, gamma=2)
    drafter.eta = eta
    engine = Engine(target, None, drafter)
    params = [SamplingParams(temperature=1.0, seed=seed, acceptance="reject") for seed in range(300)]
    texts = [one.token_ids for one in engine.generate_batch([[1, 2, 3, 1, 2]] * 300, 2, params, batch=30)]
    assert_joint(texts, joint_of(model, [1, 2, 3, 1, 2], 2))


@pytest.mark.parametrize("tokens", [[4, 1, 5, 9, 17, 20, 21, 30], [1, 1, 5, 9, 17, 20, 21, 30], [*TOKENS[:7], 32]])
def test_odd_vocabularies_are_refused(target: TransformersTarget, tmp_path: Path, tokens: list[int]) -> None:
    for make in (kangaroo, medusa):
        with pytest.raises(CheckpointError, match="no ascending tokens"):
            make(target, tmp_path / make.__name__, tokens)


def test_sizes_are_checked(target: TransformersTarget, tmp_path: Path) -> None:
    for make in (random_adapter, random_heads):
        with pytest.raises(ConfigError, match=r"draft_vocab is 33; it must be in \[0, 32\]"):
            make(target, tmp_path, draft_vocab=33)
