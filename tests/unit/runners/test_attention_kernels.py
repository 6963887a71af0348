"""The CUDA kernels of attention, without a GPU: how they are called, and which of them is called when."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from specdec.errors import ConfigError
from specdec.native.library import library
from specdec.runners import attention, attention_kernels
from specdec.runners.attention import check_runs, describe_backend
from specdec.runners.attention_kernels import merge
from specdec.step.cache import LayerSpec
from tests.models import model_of, target_for
from tests.property.test_attention import Case, World, cases

# As the oldest torch that is allowed declares it, and flash-attn 2.8.
TORCH_2_9 = (
    "aten::_scaled_dot_product_flash_attention(Tensor query, Tensor key, Tensor value, float dropout_p=0.0, "
    "bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, "
    "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, Tensor unused, "
    "Tensor debug_attn_mask)"
)


def flash_attn_2_8(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Its signature; computes [1, T, H, D] and [1, H, T] by plain products."""
    assert return_attn_probs
    assert dropout_p == 0
    output, weight = lower_right(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale, causal=causal)
    return output.transpose(1, 2), weight, None


def lower_right(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, causal: bool = False, **_: Any
) -> Any:
    """What a flash kernel computes: where ``causal``, the last row sees all keys."""
    rows, size = query.shape[2], keys.shape[2]
    mask = torch.full((rows, size), -torch.inf).triu_(size - rows + 1) if causal else None
    return attention_kernels.plain_attention(query, keys, values, scale, mask)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """Flash kernels on this CPU, in any precision; rows, keys and ``causal`` of each call."""
    made: list[tuple[int, int, bool]] = []

    def noted(query: Any, keys: Any, values: Any, scale: float, *, causal: bool = False, **_: Any) -> Any:
        made.append((query.shape[2], keys.shape[2], causal))
        return lower_right(query, keys, values, scale, causal=causal)

    monkeypatch.setattr(attention, "_flash_takes", lambda *shape: True)
    monkeypatch.setitem(attention_kernels.FLASH, "flash", noted)
    return made


@pytest.mark.slow
@given(case=cases())
@settings(max_examples=80)
def test_rows_see_their_ancestors_and_the_window(flash: list[tuple[int, int, bool]], case: Case) -> None:
    world = World(case)
    expected = world.naive()
    for pieces in (False, True):
        assert (world.attended("flash", pieces=pieces).double() - expected).abs().max() < 1e-6


@pytest.mark.parametrize("rows", [1, 5])
def test_a_chain_is_one_causal_call(flash: list[tuple[int, int, bool]], rows: int) -> None:
    world = World(Case(20, list(range(-1, rows - 1)), 0, None, None, 0))
    assert (world.attended("flash", pieces=False).double() - world.naive()).abs().max() < 1e-6
    assert flash == [(rows, 20 + rows, rows > 1)]


def test_a_tree_takes_the_prefix_only(flash: list[tuple[int, int, bool]]) -> None:
    World(Case(20, [-1, 0, 0, 1], 0, None, None, 0)).attended("flash", pieces=False)
    assert flash == [(4, 20, False)]


def schemas() -> list[Any]:
    parse = torch._C.parse_schema
    return [parse(TORCH_2_9), torch.ops.aten._scaled_dot_product_flash_attention.default._schema]


@pytest.mark.parametrize("number", [0, 1])
def test_torch_takes_the_call_and_gives_what_is_read(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = schemas()[number]
    calls: list[tuple[Any, Any]] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        calls.append((arguments, options))
        return tuple(range(len(schema.returns)))

    aten = SimpleNamespace(aten=SimpleNamespace(_scaled_dot_product_flash_attention=noted))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "ops", aten)
        found = attention_kernels.torch_flash(*torch.zeros(3, 1, 1, 1, 8), 0.5, causal=True)
    names = [value.name for value in schema.returns]
    assert [names[place] for place in found] == ["output", "logsumexp"]
    (arguments, options), declared = calls[0], list(schema.arguments)
    given = dict(zip([a.name for a in declared if not a.kwarg_only], arguments, strict=True))
    assert (given["is_causal"], given["return_debug_mask"], given["dropout_p"]) == (True, False, 0.0)
    assert options == {"scale": 0.5}
    assert {a.name for a in declared if a.kwarg_only} == {"scale"}


def test_flash_attn_takes_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "flash_attn", lambda: flash_attn_2_8)
    query, keys, values = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    for causal in (False, True):
        got = attention_kernels._package_flash(query, keys, values, 0.3, causal=causal)
        for one, other in zip(got, lower_right(query, keys, values, 0.3, causal=causal), strict=True):
            assert torch.equal(one, other)
    assert "return_attn_probs" in inspect.signature(flash_attn_2_8).parameters


def test_flash_attn_is_asked_for_by_name_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    load = attention_kernels.flash_attn.__wrapped__
    with pytest.raises(ConfigError, match=r"needs flash-attn 2\.8 or newer.*extra 'flash'"):
        load()
    module = ModuleType("flash_attn")
    module.flash_attn_func = flash_attn_2_8  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    for version, old in (("2.8.0", False), ("2.10.1", False), ("2.7.4", True)):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        if old:
            with pytest.raises(ConfigError, match=r"2\.8 or newer, and 2\.7\.4 is installed"):
                load()
        else:
            assert load() is flash_attn_2_8


def spec(dtype: torch.dtype = torch.bfloat16, device: str = "cuda", width: int = 64) -> LayerSpec:
    return LayerSpec(2, width, width, None, torch.device(device), dtype)


def test_what_cannot_run_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash_attn", lambda: flash_attn_2_8)
    with pytest.raises(ConfigError, match=r"attention='flash' is for float16 and bfloat16.*float32, 64 and cpu"):
        check_runs("flash", [spec(torch.float32, "cpu")])
    check_runs("auto", [spec(torch.float32, "cpu")])
    with pytest.raises(ConfigError, match="attention='flash' is for float16"):
        target_for(model_of("llama"), attention="flash", execution="auto")


@pytest.mark.parametrize(
    ("capability", "built", "taken"), [((9, 0), True, True), ((7, 5), True, False), ((9, 0), False, False)]
)
def test_flash_is_taken_where_torch_has_it(
    capability: tuple[int, int], built: bool, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    monkeypatch.setattr(attention, "_has_flash", attention._has_flash.__wrapped__)
    assert attention._flash_takes(torch.device("cuda"), torch.bfloat16, 64, 64) == taken


def test_the_description_names_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_has_flash", lambda device: True)
    plain = "auto (text so far: plain products, tree: plain products)"
    assert describe_backend("auto", [spec()], None) == "auto (text so far: torch's flash kernel, tree: plain products)"
    assert describe_backend("flash", [spec()], None) == "flash (text so far: flash-attn, tree: plain products)"
    assert describe_backend("auto", [spec(torch.float32)], None) == plain
    assert describe_backend("auto", [spec(width=12)], None) == plain
    assert describe_backend("auto", [spec()], 50.0) == plain
    assert describe_backend("auto", [spec(torch.float64, device="cpu")], None) == "auto"
    by_library = "auto (the native library's)" if library() else "auto"
    assert describe_backend("auto", [spec(device="cpu")], None) == by_library
    monkeypatch.setattr(attention, "flash_attn", lambda: flash_attn_2_8)
    check_runs("flash", [spec()])


def test_merging_is_exact() -> None:
    query, keys, values = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    ranges = ((0, 4), (4, 5), (5, 9))
    parts = [attention_kernels.plain_attention(query, keys[:, :, a:b], values[:, :, a:b], 0.3) for a, b in ranges]
    assert (merge(parts)[0] - attention_kernels.plain_attention(query, keys, values, 0.3)[0]).abs().max() < 1e-6
