"""The sampler: each node's processors see the node's own prefix, and leave the logits as they were."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TopKLogitsWarper

from specdec import SamplingParams
from specdec.errors import NumericalError
from specdec.sampling.sampler import Sampler
from specdec.step.step_output import StepOutput
from tests.models import VOCAB, model_of, prompt_of

CPU = torch.device("cpu")


class Recorder:
    """A processor that notes the prefixes it is shown, and writes over the scores in place."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        self.seen.append(input_ids[0].tolist())
        return scores.fill_(1.0)


@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=300),
    steps=st.lists(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=4), max_size=8),
    kept=st.lists(st.integers(0, 6), min_size=8, max_size=8),
)
@settings(max_examples=80)
def test_processors_see_each_nodes_own_prefix(prompt: list[int], steps: list[Any], kept: list[int]) -> None:
    """Siblings are looked at one after the other, and what was rejected leaves nothing behind."""
    tokens = list(prompt)
    recorder = Recorder()
    sampler = Sampler(SamplingParams(temperature=1.0), tokens, 10, CPU, [recorder])
    scores = StepOutput(torch.zeros(1, 10))
    expected = []
    for paths, keep in zip(steps, kept, strict=False):
        for path in paths:
            sampler.distribution(scores, 0, path)
            expected.append([*tokens, *path])
        tokens.extend([*paths[-1][:keep], 9])
    assert recorder.seen == expected
    assert torch.equal(scores.logits, torch.zeros(1, 10)), "the drafter gets to see what a processor wrote"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, repetition_penalty=1.3),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=2.0, min_p=0.2),
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
    ],
)
def test_processors_are_those_of_generate(params: SamplingParams) -> None:
    """The same logits as transformers prepares from the same options, in its own order."""
    prompt = prompt_of(12)
    ids = torch.tensor([prompt])
    warp = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    out = model_of("llama").generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1,
        repetition_penalty=params.repetition_penalty,
        do_sample=params.temperature > 0,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **(warp if params.temperature > 0 else {}),
    )
    # Scores are kept in float32 there.
    ours = Sampler(params, list(prompt), VOCAB, CPU).processed(StepOutput(out.logits[0].float()), 0, ())
    torch.testing.assert_close(ours, out.scores[0][0].float(), rtol=1e-6, atol=1e-6)
    if params.top_k or params.top_p < 1 or params.min_p:
        assert torch.isinf(ours).any()


def test_a_warper_s_subclass_sees_the_text() -> None:
    """Transformers' own never look at it, which says nothing of what is made of them."""

    class Last(TopKLogitsWarper):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            scores[:, input_ids[0, -1]] = 9.0
            return super().__call__(input_ids, scores)  # type: ignore[no-any-return]

    scores = StepOutput(torch.zeros(1, 10))
    found = Sampler(SamplingParams(), [1, 2], 10, CPU, [Last(1)]).processed(scores, 0, (7,))
    assert found.isfinite().nonzero().tolist() == [[7]]
    assert not scores.logits.any()


def test_scores_by_row() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 2.0, 1.0], [0.0, 0.0, 7.0]])
    scores = StepOutput(logits, rows=(0, 4, 6))
    assert [scores.argmax(row) for row in (6, 0, 4)] == [2, 1, 0]
    assert torch.equal(scores.at(4), logits[1])
    assert StepOutput(logits).argmax(2) == 2


def test_selected_scores_are_those_of_their_rows() -> None:
    logits = torch.randn(3, 10)
    for part in (StepOutput(logits, (0, 4, 6)), StepOutput(logits, (0, 4, 6)).select((0, 4, 6), (0, 4, 6))):
        found = part.select((6, 0), (1, 5))
        assert torch.equal(found.logits, logits[[2, 0]])
        assert found.top_k(3) == logits[[2, 0]].topk(3).indices.tolist()
        assert [found.argmax(row) for row in (1, 5)] == logits[[2, 0]].argmax(-1).tolist()
        assert torch.equal(found.at(5), logits[0])


def test_half_precision_is_sampled_in_float64() -> None:
    """Probabilities of a bfloat16 row sum to one, not to what bfloat16 makes of it."""
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.9), [1], 1000, CPU)
    p = sampler.distribution(StepOutput(logits), 0, ())
    assert p.dtype == torch.float64
    assert abs(float(p.sum()) - 1) < 1e-12


def test_greedy_reads_no_nan() -> None:
    logits = torch.tensor([[0.0, 1.0], [0.0, torch.nan]])
    output = StepOutput(logits)
    assert output.argmax(0) == 1  # as of a text that never comes to the other row
    with pytest.raises(NumericalError, match="1 of 2 are NaN"):
        output.argmax(1)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.9},
        {"temperature": 2.0, "top_p": 0.01},
        {"temperature": 1.0, "min_p": 0.05, "top_p": 0.5},
    ],
)
@pytest.mark.parametrize("native", [True, False])
def test_a_draw_that_looks_at_few_tokens_is_that_of_all(
    params: dict[str, float], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From flat logits, where top-p itself has to be asked, to steep ones."""
    if not native:
        monkeypatch.setattr("specdec.sampling.noise.draw", lambda *_: None)
    for size, seed, spread in itertools.product((300, 20_000), range(6), (0.0, 0.5, 4.0)):
        logits = spread * torch.randn(1, size, generator=torch.Generator().manual_seed(seed))
        sampler = Sampler(SamplingParams(seed=seed, **params), [1, 2, 3], size, CPU)  # type: ignore[arg-type]
        scores = StepOutput(logits.bfloat16() if seed % 2 else logits)
        whole = sampler.noise.gumbel(3) + sampler.processed(scores, 0, ())
        assert sampler.token(scores, 0, ()) == int(whole.argmax()), (size, seed, spread)


@pytest.mark.parametrize("size", [300, 20_000])
def test_a_draw_reads_no_nan(size: int) -> None:
    logits = torch.zeros(1, size)
    logits[0, 7] = torch.nan
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)):
        with pytest.raises(NumericalError, match=f"1 of {size} are NaN"):
            Sampler(params, [1], size, CPU).token(StepOutput(logits), 0, ())
