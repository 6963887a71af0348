"""A half-precision model by the kernels of a CUDA device, under Triton's interpreter: a row is itself, bit for bit.

It multiplies no bfloat16 numbers, so they are float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import Draft, Engine, SamplingParams
from specdec.models.described_target import DescribedTarget
from specdec.runners import cuts
from specdec.step.tree import ancestors
from tests import seam
from tests.launching import Recorder, fused, launch
from tests.models import new_model, prompt_of

pytest.importorskip("triton", reason="Triton is not installed")
kernels = pytest.importorskip("specdec.runners.kernels.layer")

# As little as shows every index at work: the interpreter takes its time for each program of each layer.
SMALL = {
    "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 300,
}  # fmt: skip
TREE = Draft((3, 4, 5, 6, 9), (-1, 0, 0, 2, 3))
TEXT = prompt_of(80)


def target_of(family: str, patch: pytest.MonkeyPatch) -> tuple[DescribedTarget, Recorder]:
    recorder = launch(patch, kernels)
    target = fused(new_model(family, torch.float16, **SMALL))
    assert target.batch_invariant
    return target, recorder


def filled(target: DescribedTarget, text: Sequence[int], chunk: int) -> seam.Text:
    """A text that was read in chunks."""
    return seam.text(target, capacity=200, rows=16).fill(text, chunk, again=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "length", "chunks"), [("llama", 7, (7, 4)), ("mistral", 62, (16, 7)), ("qwen3", 20, (16, 7))]
)
def test_logits_of_a_tree_are_plain_decoding_s(
    family: str, length: int, chunks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded and launched, and after a prompt in other chunks."""
    target, recorder = target_of(family, monkeypatch)
    with target.active():
        own, plain = (filled(target, TEXT[:length], chunk) for chunk in chunks)
        found = {}
        for again in (True, False):
            replays = recorder.replays.total()
            found[again] = own.run(TREE, again=again)
            assert recorder.replays.total() == replays + again
        assert torch.equal(found[True].logits, found[False].logits)
        for row in (0, 2, 3, 4):
            one = plain.run([TREE.tokens[row]])
            assert torch.equal(one.logits[0], found[True].logits[row]), row
            plain.commit([0])


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 40])
def test_cuts_that_were_chosen_change_no_bit(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept for the card by a warm-up, here of the cut furthest from the table's, and read with the model."""
    monkeypatch.setattr(cuts, "cache_folder", lambda: tmp_path)
    plain, _ = target_of("llama", monkeypatch)
    monkeypatch.setattr(cuts, "card_of", lambda device: {"card": "made up"})
    chosen = cuts.ChosenCuts(kernels, plain.device, plain.dtype)
    for weight in ((64, 32, False), (32, 32, False), (48, 32, True), (32, 48, False), (plain.vocab_size, 32, False)):
        chosen.of(weight)
        for bucket in chosen.buckets():
            chosen._chosen[weight][bucket] = kernels.offered(*weight, bucket)[-1 if bucket > 32 else 1]
        chosen._keep(weight)
    other, _ = target_of("llama", monkeypatch)
    logits = []
    for target in (plain, other):
        with target.active():
            own = filled(target, TEXT[:length], length)  # 40 are of a bucket whose rows are in two programs
            logits.append(own.run(TREE).logits)
    assert torch.equal(*logits)
    assert other.executor._cuts._chosen == chosen._chosen  # type: ignore[attr-defined]
    assert "up to 16 rows: 128 tile" in str(other.executor.cuts())


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafts",
    [[Draft.chain(TEXT[:rows]) for rows in (10, 9, 1)], [Draft.chain(TEXT[:7]), TREE, Draft.chain((3,))]],
    ids=["chunks", "mixed"],
)
def test_rows_of_several_sequences_are_those_of_each(drafts: list[Draft], monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded, and launched, where sequences of about as many rows share a launch; with the keys that they store."""
    target, _ = target_of("mistral", monkeypatch)
    lengths = (9, 20, 3)
    with target.active():
        found: dict[Any, list[torch.Tensor]] = {}
        for kind in ("alone", "recorded", "launched"):
            texts = [filled(target, TEXT[:length], 16) for length, _ in zip(lengths, drafts, strict=False)]
            if kind == "alone":
                logits = torch.cat([own.run(draft).logits for own, draft in zip(texts, drafts, strict=True)])
            else:
                logits = seam.run_together(texts, drafts, again=kind == "recorded").logits
            for own, draft in zip(texts, drafts, strict=True):
                own.commit([row for row in range(len(draft)) if ancestors(draft.parents)[-1, row]])
            each = [own.run([5]).logits for own in texts]
            found[kind] = [logits, *each]
    for kind in ("recorded", "launched"):
        for one, other in zip(found[kind], found["alone"], strict=True):
            assert torch.equal(one, other), kind


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "temperature"), [("lookahead", 0.0), ("token_recycling", 1.0)])
def test_texts_are_plain_decoding_s(drafter: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = target_of("llama", monkeypatch)
    sampling = SamplingParams(temperature=temperature, seed=3, acceptance="match")
    plain, drafted = (
        Engine(target, None, name, policy="off").generate(prompt_of(9), 14, sampling) for name in ("none", drafter)
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.steps < 14 or temperature


@pytest.mark.parametrize(
    ("dtype", "turned", "attention", "reason"),
    [
        (torch.float16, "", "auto", None),
        (torch.float16, "", "flash", "attention='flash' asks for kernels"),
        (torch.float32, "", "auto", "in float32 products are cuBLAS's"),
        (torch.float16, "lm_head", "auto", None),  # which is copied row by row
    ],
)
def test_which_targets_are_batch_invariant_is_told(
    dtype: torch.dtype, turned: str, attention: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And why others are not: what their products and attention are."""
    launch(monkeypatch, kernels)
    model: Any = new_model("llama", dtype, **SMALL)
    if turned:
        linear = model.get_submodule(turned)
        linear.weight.data = linear.weight.data.t().contiguous().t()
    target = fused(model, attention=attention)
    told = target.describe()["execution"]
    assert target.batch_invariant == (reason is None) == ("fixed positions" in told["attention"])
    assert told["batch-invariant"] == "yes" if reason is None else told["batch-invariant"].startswith(f"no: {reason}")
