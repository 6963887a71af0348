"""Draft model: its cache follows the text, its draws are what q says, and models that do not fit are refused."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import draft_model
from drafters.draft_model import DraftModel, DraftModelConfig, DraftModelSession, fitting
from drafters.shared.own_cache import OwnCache
from specdec import Context, Draft, Engine, Observation, SamplingParams
from specdec.drafting.registry import make_drafter
from specdec.errors import CheckpointError, ConfigError
from specdec.models.transformers_target import TransformersTarget
from specdec.step import device_copies
from specdec.step.forward_passes import alone
from tests.fakes import Spy
from tests.models import greedy, model_of, new_model, prompt_of, target_of
from tests.tiers import each_once


def stranger(family: str = "llama") -> TransformersTarget:
    """Another model of the same vocabulary."""
    return TransformersTarget(new_model(family, seed=2))


class Watched(DraftModel):
    """Keeps its last session."""

    session: DraftModelSession

    def start(self, context: Context) -> DraftModelSession:
        self.session = super().start(context)
        return self.session


@pytest.mark.few(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_drafts_are_the_draft_models_own_text(family: str, temperature: float) -> None:
    """A draft of the target by itself is right to the end, so its cache and its noise are the target's."""
    target = target_of(family)
    drafter = DraftModel(DraftModelConfig(tokens=4, min_confidence=0.0), target)
    sampling = SamplingParams(temperature=temperature, acceptance="match", seed=4)
    out = Engine(target, None, drafter).generate(prompt_of(9), 40, sampling)
    assert out.stats.acceptance_lengths == [5] * 8


def test_block_verification_accepts_all_of_its_own_draws() -> None:
    drafter = DraftModel(DraftModelConfig(tokens=4, min_confidence=0.0), target_of("llama"))
    out = Engine(target_of("llama"), None, drafter).generate(prompt_of(9), 40, SamplingParams(temperature=1.0))
    assert out.stats.acceptance_lengths == [5] * 8


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("options", [{"tokens": 4}, {"tokens": 3, "widths": [3, 2]}])
def test_cache_holds_the_text_as_a_fresh_one_would(family: str, options: dict[str, Any]) -> None:
    model = stranger(family)
    drafter = Watched(DraftModelConfig(min_confidence=0.0, **options), model)
    lengths = set[int]()

    def compare(context: Context, seen: Observation) -> None:
        cache = drafter.session._own.cache
        lengths.add(len(context.tokens) - len(seen.tokens) - cache.length)

    target = target_of(family)
    Engine(target, None, Spy(drafter, on_seen=compare)).generate(prompt_of(9), 30, SamplingParams(temperature=1.0))
    assert lengths == {1}  # when a draft is made, all text but the root is there
    session = drafter.session
    with model.active():
        caught_up, _ = alone(session._catch_up())
        session._own = OwnCache(model.new_cache(capacity=300, rows=300))
        fresh, _ = alone(session._catch_up())
    assert torch.allclose(caught_up, fresh, atol=1e-6)


def test_accepted_rows_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stranger()
    rows: list[int] = []
    forward = model.forward

    def counting(step: Any) -> Any:
        rows.append(step.rows)
        return forward(step)

    monkeypatch.setattr(model, "forward", counting)
    drafter = DraftModel(DraftModelConfig(tokens=4, min_confidence=0.0), model)
    Engine(TransformersTarget(model.model), None, drafter).generate(prompt_of(9), 20)
    # The prompt; then every step the last draft, which was accepted without having been run, and the root.
    assert rows == [9, 1, 1, 1] + [2, 1, 1, 1] * 3


def test_long_texts_are_caught_up_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "_CHUNK", 7)
    drafter = DraftModel(DraftModelConfig(tokens=4, min_confidence=0.0), target_of("mistral"))
    out = Engine(target_of("mistral"), None, drafter, max_rows=5).generate(prompt_of(40), 20)
    assert out.stats.acceptance_lengths == [5] * 4


def drafts_of(sampling: SamplingParams, **options: Any) -> list[Draft]:
    found: list[Draft] = []
    drafter = Spy(DraftModel(DraftModelConfig(**options), stranger()), found.append)
    Engine(target_of("llama"), None, drafter, max_rows=24).generate(prompt_of(9), 20, sampling)
    return found


def test_tree_has_the_widths_asked_for() -> None:
    first = drafts_of(SamplingParams(), tokens=3, widths=[3, 2], min_confidence=0.0)[0]
    assert list(first.parents) == [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9]
    assert not first.q
    for row in range(len(first)):
        below = [first.tokens[child] for child in first.children()[row]]
        assert len(set(below)) == len(below)


@pytest.mark.slow
def test_confidence_ends_paths() -> None:
    text = [*prompt_of(9), *drafts_of(SamplingParams(), tokens=6, min_confidence=0.0)[0].tokens[1:]]
    assert len(text) == 15
    with torch.inference_mode():
        logits = stranger().model(torch.tensor([text])).logits[0, 8:-1]
    trust = logits.double().softmax(-1).amax(-1).cumprod(0).tolist()  # of 1, 2 .. 6 tokens
    for kept in range(1, 6):
        between = (trust[kept - 1] + trust[kept]) / 2
        assert len(drafts_of(SamplingParams(), tokens=6, min_confidence=between)[0]) == 1 + kept


@pytest.mark.few(1)
@pytest.mark.parametrize("acceptance", ["auto", "reject"])
def test_q_is_kept_where_the_verifier_needs_it(acceptance: str) -> None:
    sampling = SamplingParams(temperature=0.7, top_k=2, acceptance=acceptance)
    for draft in drafts_of(sampling, tokens=2, widths=[3, 2], min_confidence=0.0)[:3]:
        assert set(draft.q) == {draft.parents[row] for row in range(1, len(draft))}
        for row, q in draft.q.items():
            below = draft.children()[row]
            assert 1 <= len(below) <= 2  # top_k leaves no third token to draw
            assert torch.isclose(q.sum(), torch.tensor(1.0, dtype=q.dtype))
            assert all(q[draft.tokens[child]] > 0 for child in below)


def test_no_q_where_tokens_follow_the_targets_noise() -> None:
    assert not any(draft.q for draft in drafts_of(SamplingParams(temperature=1.0, acceptance="match"), tokens=3))


@pytest.mark.slow
def test_children_are_drawn_without_replacement_from_q() -> None:
    """Frequencies of ordered pairs over many positions, against q(a) q(b) / (1 - q(a)) at four standard deviations."""
    drafter = DraftModel(DraftModelConfig(tokens=1, widths=[2]), stranger())
    target = target_of("llama")
    spy = Spy(drafter)
    engine = Engine(target, None, spy)
    engine.generate(prompt_of(9), 2, SamplingParams(temperature=1.0))
    q = torch.zeros(32, dtype=torch.float64)
    q[:3] = torch.tensor([0.5, 0.3, 0.2])
    session = DraftModelSession(drafter.config, drafter.model, spy.context)
    draws = 3000
    counts: dict[tuple[int, ...], int] = {}
    for row in range(draws):
        pair = tuple(token for token, _ in session._children([q], [row], 0, 2)[0][1])
        counts[pair] = counts.get(pair, 0) + 1
    for (a, b), seen in counts.items():
        expected = float(q[a] * q[b] / (1 - q[a]))
        assert abs(seen / draws - expected) < 4 * (expected * (1 - expected) / draws) ** 0.5
    assert len(counts) == 6


def test_full_tree_fits_its_room() -> None:
    assert fitting([3, 2], 3, 16) == [3, 2, 1]
    assert fitting([3, 2], 3, 12) == [3, 2]
    assert fitting([3, 2], 3, 9) == [3, 1]
    assert fitting([], 5, 3) == [1, 1]
    assert fitting([4], 2, 1) == []


def test_text_beyond_the_draft_models_context_is_decoded_plainly() -> None:
    short = TransformersTarget(new_model("llama", seed=2, max_position_embeddings=20))
    drafter = DraftModel(DraftModelConfig(tokens=3, min_confidence=0.0), short)
    out = Engine(target_of("llama"), None, drafter).generate(prompt_of(12), 20)
    assert out.token_ids == Engine(target_of("llama")).generate(prompt_of(12), 20).token_ids
    assert max(out.stats.rows) == 4
    assert out.stats.rows[-3:] == [1, 1, 1]


def test_models_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("llama")
    new_model("llama", vocab_size=40).save_pretrained(tmp_path / "wide")
    with pytest.raises(ConfigError, match="has a vocabulary of 40 tokens, the target one of 32"):
        Engine(target, None, {"name": "draft_model", "model": str(tmp_path / "wide")})
    with pytest.raises(CheckpointError, match=r"cannot load a model from .*nowhere.*no such folder"):
        Engine(target, None, {"name": "draft_model", "model": str(tmp_path / "nowhere")})
    monkeypatch.setattr(draft_model, "embedded_draft_model", lambda: str(tmp_path / "unshipped"))
    with pytest.raises(ConfigError, match=r"draft_model\.model is not set"):
        Engine(target, None, "draft_model")


def padded(model: TransformersTarget, rows: int, folder: Path) -> dict[str, Any]:
    """A model's copy with so many rows more, as a draft model; fewer where negative."""
    other = copy.deepcopy(model.model)
    other.resize_token_embeddings(model.vocab_size + rows, mean_resizing=False)
    with torch.no_grad():
        for matrix in (other.get_input_embeddings(), other.get_output_embeddings()):
            matrix.weight[model.vocab_size :] = 9.0  # often the likeliest, if it were asked
    other.save_pretrained(folder)
    return {"name": "draft_model", "model": str(folder), "min_confidence": 0.0, "check_tokenizer": False}


@pytest.mark.few(1)
@pytest.mark.parametrize(("device", "rows"), each_once(["apart", "host"], [-9, 9]))
def test_what_both_vocabularies_have_is_drafted(
    rows: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text has tokens that the smaller draft model lacks, and it has to be told something in their place."""
    target, common = target_of("llama"), 32 + min(rows, 0)
    spec = padded(stranger(), rows, tmp_path)
    if device == "apart":
        monkeypatch.setattr(device_copies, "is_apart", lambda device: True)
    found = list[Draft]()
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=1.0, acceptance="match", repetition_penalty=1.3),
        SamplingParams(temperature=1.0, top_k=20, repetition_penalty=1.3, acceptance="reject", seed=3),
    ]
    for widths in ([], [3, 2]):
        engine = Engine(target, None, Spy(make_drafter({**spec, "widths": widths}, target), found.append))
        for sampling in samplings:
            out = engine.generate(prompt_of(9), 40, sampling)
            if sampling.acceptance != "reject":
                assert out.token_ids == Engine(target).generate(prompt_of(9), 40, sampling).token_ids
            assert rows > 0 or any(token >= common for token in out.token_ids[:-1])
    drafted = {token for draft in found for token in draft.tokens[1:]}
    assert len(drafted) > 9
    assert max(drafted) < common
    assert any(draft.q for draft in found)
    for q in (q for draft in found for q in draft.q.values()):
        assert q.shape == (32,)
        assert torch.isclose(q.sum(), torch.ones((), dtype=q.dtype))
        assert not q[common:].any()


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [-9, 9])
def test_the_target_by_itself_but_for_padding_is_right_wherever_it_may_draft(rows: int, tmp_path: Path) -> None:
    target = target_of("llama")
    drafter = make_drafter({**padded(target, rows, tmp_path), "tokens": 4}, target)
    out = Engine(target, None, drafter).generate(prompt_of(9), 40)
    assert out.token_ids == greedy("llama", prompt_of(9), 40)
    assert rows < 0 or out.stats.acceptance_lengths == [5] * 8


@pytest.mark.slow
def test_padding_beside_one_tokenizer_is_no_other_vocabulary(tmp_path: Path, tiny_engine: Engine) -> None:
    source = Path(draft_model.embedded_draft_model())
    spec = padded(TransformersTarget.from_pretrained(source, execution="modules"), 64, tmp_path)
    assert tiny_engine.with_drafter(spec)
    with pytest.raises(ConfigError, match="no tokenizer beside the draft model says that only their padding differs"):
        tiny_engine.with_drafter({**spec, "check_tokenizer": True})
    for file in source.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    prompt = "def read(path):\n    with open(path) as file:\n"
    found = tiny_engine.with_drafter({**spec, "check_tokenizer": True}).generate(prompt, 24)
    assert found.token_ids == tiny_engine.generate(prompt, 24).token_ids
    assert found.stats.tokens_per_step > 1.2


def test_another_tokenizer_of_the_same_size_is_refused(tmp_path: Path, tiny_engine: Engine) -> None:
    shutil.copytree(draft_model.embedded_draft_model(), tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    values = json.loads(path.read_text())
    vocabulary = values["model"]["vocab"]
    one, two = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    path.write_text(json.dumps(values))
    spec = {"name": "draft_model", "model": str(tmp_path / "other")}
    with pytest.raises(ConfigError, match="has another vocabulary than the target, of the same size"):
        tiny_engine.with_drafter(spec)
    tiny_engine.with_drafter({**spec, "check_tokenizer": False})
    path.unlink()  # then nothing is known
    (tmp_path / "other" / "tokenizer_config.json").unlink()
    tiny_engine.with_drafter(spec)


def test_shipped_draft_model_serves_the_embedded_model(tiny_engine: Engine) -> None:
    prompt = "def read(path):\n    with open(path) as file:\n"
    plain = tiny_engine.generate(prompt, 48)
    found = tiny_engine.with_drafter("draft_model").generate(prompt, 48)
    assert found.token_ids == plain.token_ids
    assert found.stats.tokens_per_step > 1.2


def test_dtype_is_the_targets_unless_told(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path)
    target = target_of("llama")
    assert DraftModel.build(DraftModelConfig(model=str(tmp_path)), target).model.dtype == torch.float64
    assert DraftModel.build(DraftModelConfig(model=str(tmp_path), dtype="float32"), target).model.dtype == torch.float32


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tokens": 0}, "draft_model.tokens is 0; it must be at least 1"),
        ({"tokens": 1, "widths": [2, 2]}, "at most tokens = 1 numbers of 1 or more"),
        ({"widths": [0]}, r"draft_model.widths is \[0\]"),
        ({"min_confidence": 1.0}, r"draft_model.min_confidence is 1.0; it must be in \[0, 1\)"),
    ],
)
def test_options_are_checked(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DraftModelConfig(**values)
