"""The executor of a CUDA device, on one that is not there: which decoders it takes, and what it computes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec import Draft
from specdec.decoder.rope import RopeTables
from specdec.decoder.spec import DecoderSpec, Gated, Norm, Plain, Rope
from specdec.execute import cuda_kernels
from specdec.execute.cuda import CudaExecutor
from specdec.execute.cuda_kernels import why_not
from specdec.execute.cuda_rope import PlacedTables
from specdec.execute.torch import TorchExecutor
from specdec.step import device_copies
from specdec.step.step_io import Entering, LayerPlan, Part
from specdec.target import FINAL
from tests import models, seam
from tests.decoders import ALL, BIASED, Decoder, checkpoint_of, new_model, spec_of_config
from tests.launching import Recorder, fused, launch

LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "seed_oss", "ernie4_5")  # which the kernels compute
GPU, HALF = torch.device("cuda"), torch.bfloat16
PROMPT, OTHER = models.prompt_of(9), models.prompt_of(5, seed=3)
TREE = Draft((3, 4, 5, 6, 7, 8, 9), (-1, 0, 0, 1, 2, 3, 5))
PARTS = (Part.BOTH, Part.MLP, Part.ATTENTION, Part.BOTH)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They work on every device."""
    monkeypatch.setattr(cuda_kernels, "layer_kernels", lambda *_: cuda_kernels)


def spec_of(family: str) -> DecoderSpec:
    return spec_of_config(models.model_of(family).config)


COMPUTED = "CUDA kernels compute decoders like Llama's, and here"
REFUSED = {
    "gemma": "layers.0.mlp.act is 'gelu_tanh'",
    "gemma2": "layers.0.mixer.cap is 5.0",
    "gemma3": "layers.0.mixer.qk_norm.offset is 1.0",
    "lfm2": "layers.0.mixer is ShortConv",
    "mixtral": "layers.0.mlp is Experts",
    "olmoe": "layers.0.mixer.norms_all is True",
    "qwen3_moe": "layers.0.mlp is Experts",
    "granite": "layers.0.scale is 0.7",
    "smollm3": "layers.1.mixer.rope.dim is 0",
    "exaone_moe": "layers.1.mixer.rope.dim is 0",
    "glm": "layers.0.mixer.rope.dim is 8",
    "glm4": "layers.0.mixer.rope.dim is 8",
    "olmo2": "layers.0.mixer.norms_all is True",
    "olmo3": "layers.0.mixer.norms_all is True",
    "exaone4": "layers.0.before.0 is None",
    "cohere": "layers.0.before.0.centred is True",
    "cohere2": "layers.0.before.0.centred is True",
    "starcoder2": "layers.0.mlp is Plain",
    "mellum": "layers.0.mlp is Experts",
    "glm4_moe": "layers.0.mixer.rope.dim is 8",
    "granitemoe": "layers.0.mlp is Experts",
    "granitemoeshared": "layers.0.mlp is Experts",
    "granitemoehybrid": "layers.0.scale is 0.7",
    "gpt_oss": "layers.0.mixer.sinks is True",
    "ministral3": "layers.0.mixer.growth is Growth",
    "qwen2_moe": "layers.0.mlp is Experts",
    "hunyuan_v1_dense": "layers.0.mixer.norms_after is True",
    "hunyuan_v1_moe": "layers.0.mixer.norms_after is True",
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", ALL)
def test_which_families_it_takes(family: str) -> None:
    """Those like Llama; of the others it names the first thing that the kernels do not compute."""
    said = why_not(spec_of(family), HALF, GPU)
    assert said == (None if family in (*LLAMAS, "phi3") else f"{COMPUTED} {REFUSED[family]}")


def of_layers(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    return replace(spec, layers=tuple(replace(layer, **changes) for layer in spec.layers))


def of_attention(spec: DecoderSpec, *, only: int | None = None, **changes: Any) -> DecoderSpec:
    layers = [
        replace(layer, mixer=replace(layer.attention, **changes)) if only in (None, number) else layer
        for number, layer in enumerate(spec.layers)
    ]
    return replace(spec, layers=tuple(layers))


@pytest.mark.usefixtures("kernels")
def test_every_other_thing_that_a_description_says_is_refused_by_name() -> None:
    """One at a time; what the kernels compute may differ from layer to layer."""
    spec = spec_of("qwen3")
    own = spec.layers[0]
    norm, gated = own.before[0], own.mlp
    assert isinstance(gated, Gated)
    changed = {
        "layers.1.mixer.cap is 30.0": of_attention(spec, only=1, cap=30.0),
        "layers.0.mixer.norms_all is True": of_attention(spec, norms_all=True),
        "layers.0.mixer.rope.dim is 4": of_attention(spec, rope=replace(own.attention.rope, dim=4)),
        "layers.0.mixer.qk_norm.offset is 1.0": of_attention(spec, qk_norm=Norm(1e-6, 1.0)),
        "layers.0.mlp.act is 'gelu_tanh'": of_layers(spec, mlp=replace(gated, act="gelu_tanh")),
        "layers.0.before.1.offset is 1.0": of_layers(spec, before=(norm, replace(norm, offset=1.0))),
        "layers.0.after is Norm, Norm": of_layers(spec, after=(norm, norm)),
        "layers.0.before.1 is None": of_layers(spec, before=(norm, None)),
        "layers.0.scale is 0.5": of_layers(spec, scale=0.5),
        "layers.0.parallel is True": of_layers(spec, parallel=True),
        "layers.0.mlp is Plain": of_layers(spec, mlp=Plain("silu", 48)),
        "head.scale is 0.5": replace(spec, head=replace(spec.head, scale=0.5)),
        "embedding.scale is 8.0": replace(spec, embedding=replace(spec.embedding, scale=8.0)),
        "head.norm.offset is 1.0": replace(spec, head=replace(spec.head, norm=Norm(1e-6, 1.0))),
        "head.cap is 30.0": replace(spec, head=replace(spec.head, cap=30.0)),
    }
    for what, one in changed.items():
        assert why_not(one, HALF, GPU) == f"{COMPUTED} {what}"
    other = of_attention(spec, only=1, rope=replace(own.attention.rope, base=5.0))
    assert "they differ by layer" in str(why_not(other, HALF, GPU))
    for one in (
        of_attention(spec, only=0, window=7, kv_heads=4, scale=2.0, bias=(True, True)),
        of_attention(spec, qk_norm=None),
        of_layers(spec, mlp=replace(gated, width=48, bias=True), before=(Norm(1e-3), Norm(1e-4))),
    ):
        assert why_not(one, HALF, GPU) is None


def test_where_kernels_do_not_run_layers_are_run_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, model = spec_of("llama"), new_model("llama", torch.float32)
    assert why_not(spec, HALF, torch.device("cpu")) == "CUDA kernels run on a CUDA device, and the model is on cpu"
    assert "the model in float64" in str(why_not(spec, torch.float64, GPU))
    assert type(fused(model).executor) is TorchExecutor
    launch(monkeypatch)
    assert type(fused(model).executor) is CudaExecutor
    assert type(fused(new_model("gemma2", torch.float32)).executor) is TorchExecutor
    monkeypatch.setattr(cuda_kernels, "layer_kernels", lambda *_: None)
    assert why_not(spec, HALF, GPU) == "Triton's kernels do not work here"


def close(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11 * float(expected.abs().max()))


@pytest.mark.few(2)
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("family", LLAMAS)
def test_a_forward_is_the_torch_executor_s(
    family: str, changed: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and hidden states of trees, parts of trees, rows that enter, batches, and plans of parts of layers."""
    model = new_model(family, **(BIASED[family] if changed else {}))
    expected = forwards(Decoder(checkpoint_of(model)), again)
    recorder = launch(monkeypatch)
    found = forwards(fused(model), again)
    assert bool(recorder.made) == again
    for one, other in zip(found, expected, strict=True):
        close(one, other)


def forwards(target: Any, again: bool) -> list[torch.Tensor]:
    taps = {0, 1, FINAL}
    found = list[Any]()
    with target.active():
        own, other = seam.text(target).fill(PROMPT, 4, again=False), seam.text(target).fill(OTHER, 16, again=False)
        whole = own.run(TREE, taps=taps, again=again)
        found += [whole.logits, whole.out, *(whole.hidden[tap] for tap in sorted(taps))]
        found.append(own.run(TREE, rows=(2, 5), again=again).logits)
        early = own.run(TREE, exit_layer=1, again=again).out
        found += [early, own.run(TREE, entry=Entering(1, early), again=again).logits]
        found.append(own.run(TREE.tokens[3:], TREE.parents, first=3, again=again).logits)
        found.append(seam.run_together([own, other], [TREE, Draft.chain((5, 6))], again=again).logits)
        plan = LayerPlan(parts=PARTS[: len(target.executor.spec.layers)])
        found.append(target.forward(own.rows(TREE, plan=plan, again=again)).logits)
        own.run(TREE, again=again)
        own.commit([0, 2, 4])
        found.append(own.run([7], again=again).logits)
    return found


def test_recorded_steps_read_the_longest_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are is written when they grow, and not again by a text that is shorter."""
    written = list[torch.Tensor]()
    monkeypatch.setattr(device_copies, "address", lambda tensor: written.append(tensor) or len(written))
    rope = Rope(8, 100.0)
    tables = PlacedTables(RopeTables(torch.float32, torch.device("cpu")), rope, torch.device("cpu"))
    cos, sin = tables.reach(5)
    assert (len(cos), tables.addresses.tolist()) == (1024, [1, 2])
    assert all(map(torch.equal, written, (cos, sin)))
    longer, _ = tables.reach(1025)
    assert (len(longer), tables.addresses.tolist()) == (2048, [3, 4])
    assert tables.reach(5)[0] is longer
    angles = torch.arange(2048)[:, None].float() * (1.0 / 100.0 ** (torch.arange(0, 8, 2).float() / 8))
    assert torch.equal(written[3], torch.cat((angles, angles), -1).sin())
    assert tables.addresses.tolist() == [3, 4]


def test_a_decoder_s_cache_is_in_pages_where_rows_are_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder: Recorder = launch(monkeypatch)
    sizes = {"num_hidden_layers": 1}
    half, full = (fused(new_model("llama", dtype, **sizes)) for dtype in (torch.float16, torch.float32))
    assert (half.pages, half.batch_invariant, full.pages, full.batch_invariant) == (True, True, False, False)
    assert half.cache_room() is None, "of a device that does not tell"
    text = seam.text(half)
    with half.active():
        text.run([3])
    assert half.describe()["execution"]["cache"] == "in pages of 64 tokens; 1 of 16 in use, 0.1 MB"
    monkeypatch.setattr(device_copies, "free_bytes", lambda device: 1000)
    assert half.cache_room() == 900 + 15 * 2 * 2 * 64 * 8 * 2, "and the pages that are free"
    assert full.cache_room() is None
    assert recorder.made
