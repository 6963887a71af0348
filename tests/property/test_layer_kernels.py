"""The Triton kernels between a layer's products, under Triton's interpreter, against torch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specdec import Draft, Engine, SamplingParams, TransformersTarget
from specdec.decoder.rope import Angles, rotate, signed
from specdec.errors import SpecdecWarning
from specdec.execute import cuda_kernels
from specdec.execute.cuda import CudaExecutor
from tests import seam
from tests.launching import fused, launch
from tests.models import new_model, prompt_of

CompilationError = pytest.importorskip("triton", reason="Triton is not installed").CompilationError
kernels = pytest.importorskip("specdec.runners.kernels.layer")

# As little as shows every index at work: the interpreter takes its time for each program of each layer.
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 200}


@pytest.mark.parametrize("width", [20, 64])
@pytest.mark.parametrize("adds", [False, True])
def test_sum_and_norm(adds: bool, width: int) -> None:
    residual, delta, weight = torch.randn(5, width), torch.randn(5, width), torch.randn(width)
    total, normed = kernels.add_norm(residual, delta if adds else None, weight, 1e-5)
    expected = residual + delta if adds else residual
    assert torch.equal(total, expected)
    assert torch.allclose(normed, F.rms_norm(expected, (width,), weight, 1e-5), rtol=1e-6, atol=1e-6)


def test_gate() -> None:
    both = torch.randn(3, 2 * 700)
    first, second = both.chunk(2, -1)
    assert torch.allclose(kernels.gate(both), F.silu(first) * second, rtol=1e-6, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("first", [4, 10])  # the latter goes round the ring
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("width", "stored"), [(8, 4), (12, 3)])  # the last row fills a bucket
def test_turn_and_store(width: int, stored: int, normed: bool, first: int) -> None:
    rows, queries, key_heads, slots = 4, 4, 2, 12
    heads = torch.randn(rows, (queries + 2 * key_heads) * width)
    angles = torch.rand(40, width // 2).repeat(1, 2)
    places = torch.tensor([7, 8, 8, 39])
    keys, values = torch.zeros(2, 3, key_heads, slots, width)
    table = [(keys[layer].data_ptr(), values[layer].data_ptr(), slots) for layer in range(3)]
    where = {"counts": torch.tensor([first - 1, 1, stored]), "table": torch.tensor(table)}
    norms = (torch.randn(width), torch.randn(width), 1e-6) if normed else None
    shape = queries, key_heads, width
    query = kernels.turn_and_store(heads, angles.cos(), angles.sin(), places, norms, where, 1, shape)
    q, k, v = heads.view(rows, -1, width).transpose(0, 1).split((queries, key_heads, key_heads))
    if norms is not None:
        q, k = (F.rms_norm(x, (width,), weight, 1e-6) for x, weight in ((q, norms[0]), (k, norms[1])))
    turns = Angles(angles.cos()[places], signed(angles.sin()[places]))
    there = [(first + row) % slots for row in range(stored)]
    assert torch.allclose(query[0], rotate(q, turns), rtol=1e-5, atol=1e-6)
    assert torch.allclose(keys[1][:, there], rotate(k, turns)[:, :stored], rtol=1e-5, atol=1e-6)
    assert torch.equal(values[1][:, there], v[:, :stored])
    for store in (keys, values):
        assert int((store != 0).any(-1).sum()) == stored * key_heads


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("dtype", "name", "given"),
    [
        (torch.float32, "turn_and_store", {(4, 2, 12), (4, 4, 8)}),
        (torch.float16, "step_attention", {1}),
        (torch.float16, "product", {None}),
    ],
)
def test_kernels_are_tried_on_the_layers_that_they_are_for(
    dtype: torch.dtype, name: str, given: set[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler's errors are no RuntimeErrors, and one in the midst of loading would end it."""
    load, shapes = cuda_kernels.layer_kernels.__wrapped__, frozenset({(4, 2, 12, True), (4, 4, 8, False)})
    assert load(torch.device("cpu"), dtype, shapes) is kernels
    tried = []

    def refused(*arguments: object, **options: object) -> None:
        tried.append(arguments[-1])
        raise CompilationError("", None, "cannot take constexpr")

    monkeypatch.setattr(kernels, name, refused)
    with pytest.warns(SpecdecWarning, match=r"kernels for layers are not used.*CompilationError"):
        assert load(torch.device("cpu"), dtype, shapes) is None
    assert tried[0] in given


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "qwen2"])
def test_a_model_is_itself(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and taps of a tree are those of its modules, and the text of a few steps."""
    plain = TransformersTarget(new_model(family, torch.float32, **SMALL))
    launch(monkeypatch, kernels)
    target = fused(plain.model)
    assert isinstance(target.executor, CudaExecutor)
    draft = Draft((3, 4, 5, 6), (-1, 0, 0, 2))
    outputs = []
    for one in (target, plain):
        with one.active():
            outputs.append(seam.text(one, capacity=20, rows=8).run(draft, taps={0, 1, 2}))
    assert torch.allclose(outputs[0].logits, outputs[1].logits, rtol=1e-3, atol=1e-4)
    for layer in range(3):
        assert torch.allclose(outputs[0].hidden[layer], outputs[1].hidden[layer], rtol=1e-3, atol=1e-4)
    for sampling in (None, SamplingParams(temperature=0.8, seed=1)):
        texts = [
            Engine(one, None, "prompt_lookup").generate(prompt_of(9), 4, sampling).token_ids for one in (target, plain)
        ]
        assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("replayed", [False, True])
def test_rows_of_several_sequences_are_those_of_each(replayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of other lengths, so that the rows stand elsewhere in each; replayed, a fourth one has none."""
    recorder = launch(monkeypatch, kernels)
    target = fused(new_model("mistral", torch.float32, **SMALL))
    drafts = [Draft((3, 4, 5, 6), (-1, 0, 0, 2)), Draft.chain((3,)), Draft((8, 4, 5, 6), (-1, 0, 1, 1))]
    made, found = len(recorder.made), []
    for together in (False, True):
        with target.active():
            tokens = ([7, 8, 9], [7], [8, 8, 7, 7, 9, 9, 9, 8, 7])
            each = [seam.text(target, capacity=20, rows=8).fill(part, 8, again=False) for part in tokens]
            if together:
                outputs = [seam.run_together(each, drafts, again=replayed)]
            else:
                outputs = [own.run(draft, again=False) for own, draft in zip(each, drafts, strict=True)]
        found.append(torch.cat([output.out for output in outputs]))
    assert recorder.made[made:] == ([16] if replayed else [])
    assert torch.allclose(*found, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found[0][:4], found[0][5:], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_text_beyond_the_model_s_length_has_its_graphs_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was recorded for shorter texts has no room for it."""
    recorder = launch(monkeypatch)
    target = fused(new_model("llama", torch.float32, **SMALL))
    made = []
    for length in (3, 400, 410):
        own = seam.text(target, capacity=500, rows=8).blank(length)
        with target.active():
            own.run([5])
        made.append(len(recorder.made))
    assert made[1] == made[0] + 1
    assert made[2] == made[1]
