"""Steps on CUDA devices that are not there: fake tensors, which refuse to meet across devices, and have no numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from transformers import MinNewTokensLengthLogitsProcessor, NoRepeatNGramLogitsProcessor

from drafters.heads import mtp_finding
from drafters.heads import session as head_session
from drafters.heads.loading import load_head
from drafters.heads.mtp_layout import find_mtp
from drafters.heads.weights import HeadWeights
from drafters.kangaroo.adapter import Adapter
from drafters.medusa.heads import MedusaHeads
from specdec import Draft, Engine, SamplingParams, TransformersTarget
from specdec.costs import measuring
from specdec.drafting.registry import drafter_names
from specdec.execute import cuda, cuda_kernels
from specdec.models import transformers_target
from specdec.models.live_ends import LiveEnds
from specdec.runners import attention, attention_kernels, cuts
from specdec.sampling import processors
from specdec.step import device_copies, torch_switches
from specdec.target import FINAL
from tests import launching, models, seam
from tests.models import FAMILIES, MIXTURES, OF_LAYERS, prompt_of, settings_of
from tests.tiers import FEW

BACKENDS = ("auto", "flash")
TREE = Draft((3, 4, 5, 6, 7), (-1, 0, 0, 2, 1), probes=frozenset({4}))
DRAFTS = {"root": Draft.chain([3]), "chain": Draft.chain([3, 4, 5]), "tree": TREE}
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=4)
PENALISED = SamplingParams(temperature=0.8, repetition_penalty=1.2, acceptance="match")


class Numbers(TorchFunctionMode):
    """A number that Python reads of a fake tensor is nought: the likeliest token; or one, if it is a float."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("item", "__int__", "__index__"):
            return 1.0 if name == "item" and args[0].dtype.is_floating_point else 0
        if name in ("__float__", "__bool__"):
            return 1.0 if name == "__float__" else False
        if name == "tolist":
            return _numbers(args[0].shape, 1.0 if args[0].dtype.is_floating_point else 0)
        # Torch without CUDA cannot index what claims to be there, while the operations that this means can.
        if name == "__getitem__" and args[0].is_cuda:
            return _part(args[0], args[1])
        if name == "tensor":
            own = {"i": torch.long, "b": torch.bool}.get(np.asarray(args[0]).dtype.kind)
            kind = {key: value for key, value in (kwargs or {}).items() if key in ("dtype", "device")}
            return torch.zeros(np.shape(args[0]), **{"dtype": own, **kind})
        if name == "__invert__":
            return torch.logical_not(args[0])
        if name == "rms_norm":
            same(args[0], args[2] if len(args) > 2 else None)
            return args[0].clone()
        if name == "contiguous" and args[0].is_cuda:
            return args[0].clone()
        if name == "copy_" and args[0].is_cuda:  # the one operation that may join devices
            return _copied(args[0], args[1])
        if name == "__setitem__" and args[0].is_cuda:
            return _copied(_part(args[0], args[1]), args[2])
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "not linked" not in str(error) or not name.endswith("_") or name.endswith("__"):
                raise
            return _copied(args[0], getattr(args[0], name[:-1])(*args[1:], **(kwargs or {})))


def _copied(there: torch.Tensor, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        assert torch.broadcast_shapes(there.shape, value.shape) == there.shape
    return there


def _tuple(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _part(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """``tensor[index]``."""
    dim, parts = 0, _tuple(index)
    for place, at in enumerate(parts):
        if at is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif at is Ellipsis:
            dim = tensor.ndim - sum(part is not None for part in parts[place + 1 :])
        elif isinstance(at, slice):
            assert at.step is None
            first, last, _ = at.indices(tensor.shape[dim])
            tensor, dim = tensor.narrow(dim, first, max(0, last - first)), dim + 1
        elif isinstance(at, int):
            tensor = tensor.select(dim, at)
        else:
            rows = at if isinstance(at, torch.Tensor) else torch.empty(len(at), dtype=torch.long, device=tensor.device)
            if rows.dtype == torch.bool:  # all of them, as nobody knows
                rows = torch.arange(len(rows), device=rows.device)
            tensor, dim = torch.ops.aten.index(tensor, [None] * dim + [rows]), dim + rows.ndim
    return tensor


def _numbers(shape: Sequence[int], number: float) -> Any:
    return [_numbers(shape[1:], number) for _ in range(shape[0])] if shape else number


def same(*tensors: Any) -> torch.device:
    """The one device of what a kernel is given."""
    devices = {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}
    assert len(devices) == 1, devices
    return devices.pop()


def _looked_up(where: Any, tables: Any, turned: int, like: Any, weight: Any) -> Any:
    same(tables, like, weight, *where.values())
    rows = where["tokens"].numel()
    hidden = None if weight is None else weight.new_empty(rows, weight.shape[1])
    return hidden, like.new_empty(rows, turned), like.new_empty(rows, turned)


def _add_norm(residual: Any, delta: Any, weight: Any, epsilon: float) -> Any:
    same(residual, delta, weight)
    return residual.clone(), residual.clone()


def _turned(heads: Any, cos: Any, sin: Any, at: Any, norms: Any, where: Any, layer: int, shape: Any) -> Any:
    same(heads, cos, sin, at, *(norms or ())[:2], *where.values())
    assert at.shape == (len(heads),)
    assert layer < where["table"].shape[-2]
    return heads.new_empty(1, shape[0], len(heads), shape[2])


def _attended(
    query: Any, where: Any, layer: int, key_heads: int, window: int | None, scale: float, segments: int
) -> Any:
    same(query, *where.values())
    assert (query.shape[2], where["places"].shape[-1]) == where["paths"].shape
    return query.new_empty(query.shape[2], query.shape[1] * query.shape[3])


def _gated(both: Any) -> Any:
    return both.new_empty(len(both), both.shape[1] // 2)


def _product(rows: Any, weight: Any, bias: Any, *, gated: bool = False, cuts: Any = None, whole: bool = False) -> Any:
    same(rows, weight, bias)
    assert rows.shape[1] == weight.shape[1]
    return rows.new_empty(len(rows), len(weight) // (2 if gated else 1))


def _paths(where: Any) -> Any:
    same(*where.values())
    return where["closure"].flatten(0, -2).int()


def _picked(logits: Any, where: Any) -> Any:
    same(logits, *where.values())
    assert len(logits) % (where["draws"].numel() // 2) == 0
    return where["draws"].new_empty(len(logits), 5)


def _walked(picked: Any, where: Any, store: Any, like: Any) -> None:
    same(picked, like, *where.values())
    assert picked.shape == (where["tokens"].numel(), 5)
    assert where["above"].shape == where["tokens"].shape


LAYER = SimpleNamespace(
    look_up=_looked_up, add_norm=_add_norm, turn_and_store=_turned, gate=_gated, step_attention=_attended,
    product=_product, paths=_paths, pick=_picked, walk=_walked, segments_of=lambda positions: 1,
)  # fmt: skip


def copy_in(arrays: Mapping[str, Any], device: torch.device) -> device_copies.Views:
    places, size = device_copies.pack(arrays)
    return device_copies.Views(torch.empty(size, dtype=torch.uint8, device=device), arrays, places)


def copy_out(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    same(*tensors)
    return [[1.0 if tensor.is_floating_point() else 0] * tensor.numel() for tensor in tensors]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While it is there tensors are fake, and what only a GPU could do is done by what looks at shapes and devices."""
    monkeypatch.setattr(torch_switches, "_check_numbers", lambda: None)
    monkeypatch.setattr(torch, "from_numpy", lambda array: torch.tensor(array))  # which would make one that is not fake
    monkeypatch.setattr(device_copies, "copy_in", copy_in)
    monkeypatch.setattr(device_copies, "copy_out", copy_out)
    monkeypatch.setattr(device_copies, "reading", lambda tensor: tensor.tolist)
    monkeypatch.setattr(attention, "_has_flash", lambda device: True)
    monkeypatch.setattr(attention, "flash_attn", lambda: None)
    monkeypatch.setitem(attention_kernels.FLASH, "flash", attention_kernels.torch_flash)
    monkeypatch.setattr(device_copies, "address", lambda tensor: 0)
    monkeypatch.setattr(device_copies, "free_bytes", lambda device: 1 << 30)
    monkeypatch.setattr(cuda_kernels, "layer_kernels", lambda *_: LAYER)
    monkeypatch.setattr(cuts, "card_of", lambda device: None)
    monkeypatch.setattr(
        cuda, "CudaRecorder", lambda device: SimpleNamespace(record=lambda work: (work(), list), lock=Lock())
    )
    monkeypatch.setattr(
        transformers_target, "own_logits", lambda module, target, tokens: torch.empty(len(tokens), models.VOCAB)
    )
    monkeypatch.setattr(transformers_target, "differs", lambda *_: None)
    monkeypatch.setattr(measuring, "processor", lambda device: "none")
    monkeypatch.setattr(device_copies, "wait", lambda device: None)
    monkeypatch.setattr(device_copies, "seconds_of", lambda work, *_: 1.0 if work() else 0.0)
    with FakeTensorMode(allow_non_fake_inputs=True), Numbers():
        yield


def move(module: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Fake parameters and buffers in the places of what a module has."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = nn.Parameter(torch.empty(weight.shape, dtype=dtype, device=device), False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def model_on(family: str, dtype: torch.dtype, first: str = "cuda:0") -> Any:
    """The family's model on a device."""
    with unset_fake_temporarily():
        made: Any = copy.deepcopy(models.model_of(family, torch.float32))
    move(made, first, dtype)
    return made


def target_on(family: str, dtype: torch.dtype, backend: str = "auto", *, first: str = "cuda:0") -> Any:
    """The family's decoder by its description on a device: by the kernels of layers, or by torch's operations."""
    backend = "auto" if dtype == torch.float32 else backend  # no flash kernel computes it
    return launching.fused(model_on(family, dtype, first), attention=backend)


def modules_on(
    family: str, dtype: torch.dtype, *, devices: int = 1, first: str = "cuda:0", ends: LiveEnds | None = None
) -> Any:
    """The family's own modules there; with two devices its layers but the first, norm and head on cuda:1.

    ``ends``: what is done around its embedding and head, which is held against numbers, of which there are none here.
    """
    made = model_on(family, dtype, first)
    if devices > 1:
        decoder = made.get_decoder()
        layers = decoder.layers
        norm = next(child for name, child in decoder.named_children() if name in ("norm", "final_layer_norm"))
        for module in (*layers[1:], norm, made.get_output_embeddings()):
            move(module, "cuda:1", dtype)
            add_hook_to_module(module, AlignDevicesHook(execution_device="cuda:1"))
    target = TransformersTarget(made)
    target._ends = None if ends is None else replace(ends, model=made)
    return target


def run(target: Any, taps: set[int]) -> None:
    """A chunk of the prompt, then drafts of every shape, each committed along a path that is no prefix of it."""
    with target.active():
        text = seam.text(target, capacity=60, rows=24).fill([1] * 36, 12)
        for draft in DRAFTS.values():
            rows = draft.scored_rows()
            output = text.run(draft, rows=rows, taps=taps)
            assert output.logits is not None
            assert output.logits.device == target.head_device
            assert output.logits.shape == (len(draft if rows is None else rows), target.vocab_size)
            text.commit([0, 2, 3] if draft is TREE else range(len(draft)))


# Every family on one device or on two, with an attention and a dtype in turn.
CASES = [
    (family, dtype, backend, devices)
    for number, family in enumerate(FAMILIES)
    if family not in MIXTURES  # whose routers choose by values, which fake tensors do not have
    for devices in [1 + number % 2]
    for backend in [BACKENDS[(number + devices) % len(BACKENDS)]]
    for dtype in [(torch.bfloat16, torch.float16, torch.float32)[(number // 3 + devices) % 3]]
]


@pytest.mark.few(1)
@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("family", "dtype", "backend", "devices"), CASES)
def test_rows_of_every_kind(family: str, dtype: torch.dtype, backend: str, devices: int) -> None:
    run(modules_on(family, dtype, devices=devices), {1, FINAL})
    if family in models.FUSED:
        target = target_on(family, dtype, "auto" if dtype == torch.float32 else backend)  # no flash kernel computes
        run(target, {1, 3, FINAL})
        assert ("CUDA kernels" in target.others) == (family not in ("llama", "mistral", "qwen2", "qwen3"))


RECORDED = ("dflash", "eagle", "medusa")  # where one device has it all, their passes are graphs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "devices", "family"),
    [  # a drafter's own calculations are the same for every family
        (drafter, devices, ("llama", "mistral")[(number + devices) % 2])
        for number, drafter in enumerate(sorted({*FEW, *RECORDED}))
        for devices in ((1, 2) if drafter in RECORDED else (1 if drafter in OF_LAYERS else 2,))
    ],
)
def test_every_drafter(
    drafter: str, family: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    settings = [dict(options) for options in settings_of(drafter, models.target_of(family), tmp_path)]
    ends = models.target_of(family, execution="modules").ends
    loaded: dict[str, Any] = {}
    for options in settings:
        if "adapter" in options:
            loaded[options["adapter"]] = Adapter.from_pretrained(options["adapter"])
        elif "heads" in options:
            loaded[options["heads"]] = MedusaHeads.from_pretrained(options["heads"])
        elif drafter == "mtp":
            loaded[options["head"]] = find_mtp(Path(options["head"]))
        elif "head" in options:
            head = load_head(Path(options["head"]), drafter, models.target_of(family))
            loaded[options["head"]] = head.to(torch.float32)
    monkeypatch.setattr(head_session, "load_head", lambda folder, *_, **__: loaded[str(folder)])
    monkeypatch.setattr(mtp_finding, "find_mtp", lambda folder: loaded[str(folder)])
    for kind in (Adapter, MedusaHeads):
        monkeypatch.setattr(kind, "from_pretrained", lambda folder: loaded[str(folder)])
    for kind in (Adapter, MedusaHeads, HeadWeights):
        monkeypatch.setattr(kind, "to", lambda self, device, dtype: move(self, device, dtype) or self)
    request.getfixturevalue("fake")
    there: dict[str, Any] = {"devices": devices, "ends": ends}
    target = target_on(family, torch.bfloat16) if devices == 1 else modules_on(family, torch.bfloat16, **there)
    stranger = partial(target_on, "llama", torch.bfloat16)
    monkeypatch.setattr(TransformersTarget, "from_pretrained", lambda path, dtype, device: stranger(first=str(device)))
    if drafter in RECORDED and devices == 2:  # where a head is does not depend on what it is made of
        settings = [settings[0], settings[-1]]
    for number, options in enumerate(settings):
        if drafter in ("kangaroo", "medusa"):
            options["check_target"] = False
        # How a draft is judged does not depend on the sizes of those that made it, so these take turns; nor on who
        # made it, where that reads tokens alone.
        samplings, turn = (SAMPLED, PENALISED, None), number + drafter_names().index(drafter)
        every = number == 0 and len(settings) < 3 and drafter in (*RECORDED, *OF_LAYERS, "draft_model", "auto")
        for sampling in samplings if every else (samplings[turn % 3],):
            engine = Engine(target, None, options, max_rows=24, prefill_chunk=16)
            assert engine.generate(prompt_of(18), 3, sampling).finish_reason == "length"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama"])
def test_an_embedding_beside_the_host(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Its rows are sent nowhere, so that nothing is there with them of what decides on the head's device."""
    options = dict(settings_of("medusa", models.target_of(family), tmp_path)[0])
    heads, ends = MedusaHeads.from_pretrained(options["heads"]), models.target_of(family, execution="modules").ends
    monkeypatch.setattr(MedusaHeads, "from_pretrained", lambda folder: heads)
    monkeypatch.setattr(MedusaHeads, "to", lambda self, device, dtype: move(self, device, dtype) or self)
    request.getfixturevalue("fake")
    target = modules_on(family, torch.bfloat16, devices=2, first="cpu", ends=ends)
    assert (target.device.type, target.head_device.type) == ("cpu", "cuda")
    for sampling in (None, SAMPLED):
        engine = Engine(target, None, {**options, "check_target": False}, max_rows=24, prefill_chunk=16)
        assert engine.generate(prompt_of(20), 6, sampling).finish_reason == "length"


@pytest.mark.slow
@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("family", "devices"),
    [("llama", 1), ("mistral", 2), ("gemma2", 1)],
)
def test_batches(family: str, devices: int) -> None:
    """Prompts and drafts of several texts in one forward; on one device through the kernels of layers."""
    target = target_on(family, torch.bfloat16) if devices == 1 else modules_on(family, torch.bfloat16, devices=2)
    engine = Engine(target, None, "token_recycling", max_rows=24, prefill_chunk=16)
    prompts = [prompt_of(size) for size in (20, 5, 40)]
    for sampling in (None, SAMPLED):
        found = engine.generate_batch(prompts, 6, sampling, batch=2)
        assert [one.finish_reason for one in found] == ["length"] * 3, [one.error for one in found]


class Anything:
    """A grammar of one state."""

    def start(self, prompt: Sequence[int]) -> Anything:
        return self

    def advance(self, token: int) -> Anything:
        return self

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        raise AssertionError("there are no numbers to mask; what is made of a mask on the host is a stand-in's")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama"])
@pytest.mark.parametrize(("drafter", "devices"), [("token_recycling", 1), ("draft_model", 2)])
def test_processors_and_other_rules(
    drafter: str, family: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    options = {"name": drafter}
    if drafter == "draft_model":
        options = dict(settings_of(drafter, models.target_of(family), tmp_path)[0])
    masks = lambda states, size, dtype: (np.zeros((len(states), size), bool), dtype)  # noqa: E731
    monkeypatch.setattr(processors, "forbidden", masks)
    placed: dict[str, Any] = {"devices": devices, "ends": models.target_of(family, execution="modules").ends}
    request.getfixturevalue("fake")
    target = target_on(family, torch.bfloat16) if devices == 1 else modules_on(family, torch.bfloat16, **placed)
    stranger = partial(target_on, family, torch.bfloat16)
    monkeypatch.setattr(TransformersTarget, "from_pretrained", lambda path, dtype, device: stranger(first=str(device)))
    engine = Engine(target, None, options, max_rows=24, prefill_chunk=16)
    there = str(target.head_device)
    rules = [SAMPLED, replace(SAMPLED, acceptance="reject"), replace(SAMPLED, acceptance="typical", allow_lossy=True)]
    ours: list[Any] = [
        [],
        [Anything()],
        [NoRepeatNGramLogitsProcessor(2), MinNewTokensLengthLogitsProcessor(20, 3, 0, device=there)],
    ]
    for number, sampling in enumerate((None, PENALISED, *rules)):
        for own in ours if devices == 1 else [ours[number % 3]]:  # each with each where modules do not take their time
            assert engine.generate(prompt_of(20), 3, sampling, logits_processor=own).finish_reason == "length"


@pytest.mark.usefixtures("fake")
def test_a_mix_of_devices_is_noticed() -> None:
    """Else the tests above would show nothing."""
    with pytest.raises((RuntimeError, AssertionError), match="device"):
        torch.empty(2, device="cuda:0") + torch.empty(2, device="cuda:1")
