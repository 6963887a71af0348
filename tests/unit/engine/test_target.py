"""The target: its walk against the model's own hidden states, part by part; what it returns and what it leaves out."""

from __future__ import annotations

import pytest
import torch

from specdec import TransformersTarget
from specdec.step.step_io import Entering
from specdec.target import FINAL
from tests import seam
from tests.models import VOCAB, model_of, prompt_of, target_of

FAMILIES = ("llama", "mistral", "gemma2", "neox")
TEXT = list(prompt_of(12))
# Transformers' norms compute in float32 whatever the dtype.
NEAR = {"rtol": 1e-5, "atol": 1e-5}


def fresh(target: TransformersTarget) -> seam.Text:
    return seam.text(target, capacity=20, rows=12)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_taps_are_the_model_s_hidden_states(family: str) -> None:
    """``output_hidden_states`` has the embedding, what each layer but the last gives, and the last after the norm."""
    target = target_of(family)
    with target.active():
        out = fresh(target).run(TEXT, taps=(0, 1, 2, FINAL))
    ids = torch.tensor([TEXT])
    own = model_of(family)(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
    assert set(out.hidden) == {0, 1, 2, FINAL}
    for tap, states in zip((0, 1, 2, FINAL), own.hidden_states, strict=True):
        torch.testing.assert_close(out.hidden[tap], states[0], **NEAR)
    assert out.logits is not None
    torch.testing.assert_close(out.logits, own.logits[0], **NEAR)
    torch.testing.assert_close(target.head(out.hidden[FINAL]), own.logits[0], **NEAR)


@pytest.mark.parametrize("layer", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@torch.inference_mode()
def test_a_walk_in_two_parts(family: str, layer: int) -> None:
    """Out after some layers, in again with their hidden states: the logits of one walk, and the same cache."""
    target = target_of(family)
    with target.active():
        whole, parts = fresh(target), fresh(target)
        expected = whole.run(TEXT)
        early = parts.run(TEXT, exit_layer=layer)
        assert (early.logits is None) == (layer < 3)
        late = parts.run(TEXT, entry=Entering(layer, early.out))
    assert late.logits is not None
    assert expected.logits is not None
    assert torch.equal(late.logits, expected.logits)
    for one, other in zip(whole.keys(12), parts.keys(12), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [[0], [3, 11], list(range(12))])
@torch.inference_mode()
def test_logits_of_the_rows_asked_for(rows: list[int]) -> None:
    target = target_of("llama")
    with target.active():
        outs = [fresh(target).run(TEXT, rows=wanted) for wanted in (None, rows, ())]
    assert outs[0].logits is not None
    assert outs[1].logits is not None
    assert outs[1].logits.shape == (len(rows), VOCAB)
    torch.testing.assert_close(outs[1].logits, outs[0].logits[rows])
    assert outs[2].logits is None


@torch.inference_mode()
def test_a_row_at_a_time_and_all_at_once() -> None:
    target = target_of("mistral")
    with target.active():
        own = fresh(target)
        together = fresh(target).run(TEXT).logits
        for row, token in enumerate(TEXT):
            alone = own.run([token]).logits
            own.commit([0])
            assert alone is not None
            assert together is not None
            torch.testing.assert_close(alone[0], together[row], **NEAR)


def test_what_it_says_of_itself() -> None:
    target = target_of("gemma2")
    assert (target.vocab_size, target.hidden_size, target.num_layers, target.context_length) == (VOCAB, 32, 3, 256)
    assert (target.dtype, target.device.type, target.eos_ids) == (torch.float64, "cpu", frozenset())
    assert len(target.specs) == target.num_layers
