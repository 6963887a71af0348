"""Quantised blocks: the package gguf's own numbers, and a row's product the same whatever rows are beside it."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from specdec.native import library as native
from specdec.native.formats import formats
from specdec.runners.block_weight import BlockTensor, BlockWeight
from tests.bitsandbytes_files import LISTS
from tests.quantised_files import FORMATS, SCALES_AT, random_blocks
from tests.sums import rounding_of

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")
BY_NAME = {one.name: one for one in formats().values()}
INT4 = ("INT4_32", "INT4_64", "INT4_128")  # which no GGUF file has
BITSANDBYTES = ("NF4_32", "NF4_64", "FP4_32", "FP4_64", "INT8_32", "INT8_128")  # nor those
OTHERS = (*INT4, *BITSANDBYTES)
NAMES = (*FORMATS, "F16", *OTHERS)
IN_INTEGERS = tuple(name for name in NAMES if "F" not in name)  # whose codes are multiplied as such


def blocks_of(name: str, outputs: int, inputs: int, seed: int = 0) -> BlockTensor:
    """Random blocks, whose rows stand in another order than in the file."""
    order = np.random.default_rng(seed).permutation(outputs)
    if name == "F16":
        values = (0.1 * np.random.default_rng(seed).standard_normal((outputs, inputs))).astype(np.float16)
        return BlockTensor(BY_NAME[name], values.view(np.uint8), order)
    if name not in OTHERS:
        return BlockTensor(BY_NAME[name], random_blocks(name, outputs, inputs, seed=seed), order)
    random, each = np.random.default_rng(seed), int(name.partition("_")[2])
    if name in BITSANDBYTES:
        rows = random.integers(0, 256, (outputs, inputs // each, BY_NAME[name].bytes), dtype=np.uint8)
        rows[..., :4] = random.uniform(0.01, 0.03, (*rows.shape[:2], 1)).astype(np.float32).view(np.uint8)
        return BlockTensor(BY_NAME[name], rows.reshape(outputs, -1), order)
    rows = random.integers(0, 256, (outputs, inputs // each, 4 + each // 2), dtype=np.uint8)
    scales, zeros = random.uniform(0.01, 0.03, rows.shape[:2]), random.integers(0, 17, rows.shape[:2])
    rows[..., :4] = np.stack([scales, zeros], -1).astype(np.float16).view(np.uint8)
    return BlockTensor(BY_NAME[name], rows.reshape(outputs, -1), order)


def dequantised(tensor: BlockTensor) -> np.ndarray:
    """What the package gguf makes of blocks; of those that it does not know, scales times codes less the zero, or times
    what codes stand for.
    """
    assert isinstance(tensor.blocks, np.ndarray)
    if tensor.format.type >= 0:
        with np.errstate(invalid="ignore"):
            found: np.ndarray = gguf.quants.dequantize(tensor.blocks, gguf.GGMLQuantizationType(tensor.format.type))
        return found
    rows = tensor.blocks.reshape(tensor.outputs, -1, tensor.format.bytes)
    if (kind := tensor.format.name.partition("_")[0]) != "INT4":
        pairs = np.stack([rows[..., 4:] >> 4, rows[..., 4:] & 15], -1).reshape(*rows.shape[:2], -1)
        codes = rows[..., 4:].view(np.int8) if kind == "INT8" else LISTS[kind.lower()].numpy()[pairs]
        return (rows[..., :4].copy().view(np.float32) * codes.astype(np.float32)).reshape(tensor.outputs, -1)
    scales, zeros = np.moveaxis(rows[..., :4].copy().view(np.float16).astype(np.float32), -1, 0)
    codes = np.stack([rows[..., 4:] & 15, rows[..., 4:] >> 4], -1).reshape(*rows.shape[:2], -1).astype(np.float32)
    return (scales[..., None] * (codes - zeros[..., None])).reshape(tensor.outputs, -1)


def values_of(tensor: BlockTensor) -> torch.Tensor:
    """What they stand for, in their order."""
    found = torch.from_numpy(dequantised(tensor))
    return found if tensor.order is None else found[torch.from_numpy(tensor.order)]


def test_the_table_is_that_of_the_files() -> None:
    assert {*BY_NAME} == {*NAMES}
    for name, one in BY_NAME.items():
        if name in OTHERS:
            assert one.type < 0  # a number that no file can have
            continue
        kind = gguf.GGMLQuantizationType[name]
        values, size = gguf.GGML_QUANT_SIZES[kind]
        each = 32 if one.is_float16 else 1  # which are read at a time
        assert (one.type, (one.values, one.bytes)) == (kind, (values * each, size * each))


@pytest.mark.few(11)
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_exact(name: str) -> None:
    """Read from the file's blocks; looked up there and in panels; multiplied with rows of the unit matrix."""
    tensor = blocks_of(name, 70, 512)
    weight = values_of(tensor)
    exact, rounded = BlockWeight([tensor], None, torch.float32), BlockWeight([tensor], None, torch.bfloat16)
    assert torch.equal(exact.look_up(range(3, 67)), weight[3:67])
    assert torch.equal(exact.unpack(), weight)
    assert torch.equal(rounded.unpack(), weight.bfloat16())
    assert torch.equal(exact(torch.eye(512)), weight.t())
    assert torch.equal(rounded(torch.eye(512).bfloat16()), weight.t().bfloat16())
    plain = BlockTensor(tensor.format, tensor.blocks)
    there = BlockWeight([plain], None, torch.float32, as_in_file=True)
    assert torch.equal(there.look_up([69, 0, 31, 32]), values_of(plain)[[69, 0, 31, 32]])


def test_every_float16_is_exact() -> None:
    """But for those that are no numbers, each of which is looked up as such."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(64, 1024)
    numbers = every[np.isfinite(every).all(-1)]
    product = BlockWeight([BlockTensor(BY_NAME["F16"], numbers.view(np.uint8))], None, torch.float32)
    weight, unit = torch.from_numpy(numbers.astype(np.float32)), torch.eye(1024)
    assert len(weight) == 62
    assert torch.equal(product(unit), weight.t())
    assert torch.equal(product(unit[7:8]), weight.t()[7:8])
    assert torch.equal(product.unpack().view(torch.int32), weight.view(torch.int32))  # the sign of zero, too
    tensor = BlockTensor(BY_NAME["F16"], every.view(np.uint8))
    found, expected = BlockWeight([tensor], None, torch.float32).unpack(), torch.from_numpy(every.astype(np.float32))
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("special", ["-0", "65504", "inf", "nan", "6e-8"])
def test_scales_of_any_size(special: str) -> None:
    """As float16 has them, the smallest and what is no number among them."""
    tensor = blocks_of("Q5_1", 64, 64)
    tensor.blocks[3, :4] = np.array([float(special)] * 2, np.float16).view(np.uint8)
    found, weight = BlockWeight([tensor], None, torch.float32).unpack(), values_of(tensor)
    assert torch.equal(found.isnan(), weight.isnan())
    assert torch.equal(found.nan_to_num(), weight.nan_to_num())


def in_integers(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows as integers from -127 to 127 [rows, chunks, 32], and what one of them stands for [rows, chunks, 1]."""
    chunks = rows.astype(np.float32).reshape(len(rows), -1, 32)
    largest = np.abs(chunks).max(-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        by = np.where(largest < 2.0**-112, np.float32(0), np.float32(127) / largest)
    return np.rint(chunks * by).astype(np.int64), largest / np.float32(127)


@pytest.mark.few(14)
@pytest.mark.parametrize("name", IN_INTEGERS)
def test_rows_in_bytes_are_multiplied_exactly(name: str) -> None:
    """Bit for bit by integers, where scales are powers of two, so that no sum is rounded; otherwise to rounding."""
    tensor = blocks_of(name, 70, 512)
    random = np.random.default_rng(1)
    whole = random.integers(-127, 128, (9, 16, 32))
    whole[0, 3], whole[1, 7] = 127, -127  # sums that are as large as bytes allow
    whole[:, :, 5] = 127
    rows = (whole * 0.5).reshape(9, 512).astype(np.float32)
    values, scales = in_integers(rows)
    assert np.array_equal(values, whole)
    assert (scales == 0.5).all()
    plain = plain_scales(tensor)
    weight = values_of(plain).double().numpy()
    product = BlockWeight([plain], None, torch.float32, int8=True)
    assert np.array_equal(product(torch.from_numpy(rows)).double().numpy(), rows.astype(np.float64) @ weight.T)
    rows = random.normal(size=(9, 512)).astype(np.float32)
    rows[4, 32:64], rows[5, :32] = 0.0, 1e-37
    values, scales = in_integers(rows)
    rounded = (values * scales.astype(np.float64)).reshape(9, 512)
    weight = values_of(tensor).double().numpy()
    found = BlockWeight([tensor], None, torch.float32, int8=True)(torch.from_numpy(rows)).double().numpy()
    largest = float((np.abs(rounded) @ np.abs(weight.T)).max())
    np.testing.assert_allclose(found, rounded @ weight.T, rtol=0, atol=1e-6 * largest)


def plain_scales(tensor: BlockTensor) -> BlockTensor:
    """The same codes, with scales and minima that are powers of two, or whole numbers of one."""
    blocks = tensor.blocks.copy()
    rows = blocks.reshape(len(blocks), -1, tensor.format.bytes)
    for at in SCALES_AT.get(tensor.format.name, (0,)):
        if tensor.format.name in BITSANDBYTES:
            rows[..., :4] = np.array([2.0**-6], np.float32).view(np.uint8)
        elif at is not None:
            rows[..., at : at + 2] = np.array([2.0**-6], np.float16).view(np.uint8)
    return BlockTensor(tensor.format, blocks, tensor.order)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "int8"), [(torch.bfloat16, False), (torch.float32, False), (torch.bfloat16, True)])
def test_a_row_s_product_does_not_depend_on_the_others(name: str, dtype: torch.dtype, int8: bool) -> None:
    torch.manual_seed(0)
    parts = [blocks_of(name, outputs, 512, seed) for seed, outputs in enumerate((70, 33, 64))]
    parts[1] = blocks_of("Q8_0", 33, 512)
    weight, bias = torch.cat([*map(values_of, parts)]), torch.randn(167).to(dtype)
    rows, residual = torch.randn(210, 512).to(dtype), torch.randn(210, 167).to(dtype)
    rows[5, 32:64] = 0.0
    product = BlockWeight(parts, bias, dtype, int8=int8)
    read = rows
    if int8:
        values, scales = in_integers(rows.float().numpy())
        read = torch.from_numpy((values * scales.astype(np.float64)).reshape(rows.shape))
    expected = torch.nn.functional.linear(read.double(), weight.double(), bias.double())
    together, onto = product(rows), product.add(rows, residual)
    bound = rounding_of(read, weight.to(dtype), bias, expected)
    torch.testing.assert_close(together.double(), expected, atol=bound, rtol=0)
    torch.testing.assert_close(onto.double(), expected + residual.double(), atol=bound, rtol=0)
    for count in (*range(1, 14), 95, 96, 97, 193):
        assert torch.equal(product(rows[:count]), together[:count]), count
        assert torch.equal(product.add(rows[-count:], residual[-count:]), onto[-count:]), count


@pytest.mark.few(7)
@pytest.mark.parametrize("name", NAMES)
def test_threads_change_no_product(name: str) -> None:
    """Panels are shared among threads, and a row's sum is one thread's."""
    torch.manual_seed(0)
    product, threads = BlockWeight([blocks_of(name, 167, 256)], None, torch.bfloat16), torch.get_num_threads()
    rows = torch.randn(9, 256).bfloat16()
    try:
        torch.set_num_threads(1)
        alone = product(rows)
        for count in (2, 3):
            torch.set_num_threads(count)
            assert torch.equal(product(rows), alone)
            assert torch.equal(product(rows[:1]), alone[:1])
            assert torch.equal(BlockWeight([blocks_of(name, 167, 256)], None, torch.bfloat16)(rows), alone)
    finally:
        torch.set_num_threads(threads)


def test_memory_that_a_part_took_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Part by part: where blocks are made as they are read, as much as the panels was left otherwise."""
    returned = list[int]()
    monkeypatch.setattr("specdec.runners.block_weight.trim_heap", lambda: returned.append(1))
    product = BlockWeight([blocks_of("NF4_64", 40, 64), blocks_of("NF4_64", 33, 64)], None, torch.bfloat16)
    assert len(returned) == len(product.parts) == 2


def test_rows_are_rounded_less_than_bfloat16_rounds_them() -> None:
    """Also where few inputs are a hundred times as large as the rest."""
    torch.manual_seed(0)
    rows = torch.randn(40, 512)
    rows[:, ::100] *= 100.0
    weight = values_of(blocks_of("Q4_K", 64, 512))
    product = BlockWeight([blocks_of("Q4_K", 64, 512)], None, torch.bfloat16)
    exact = rows.bfloat16().double() @ weight.double().t()
    product.dtype = torch.float32  # results are not rounded, so that it is the rows' rounding that is seen
    off = product(rows.bfloat16().float()).double() - exact
    theirs = rows.bfloat16().double() @ weight.bfloat16().double().t() - exact
    assert off.square().mean() < theirs.square().mean() / 30


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_spreads(broken: float, int8: bool) -> None:
    rows = torch.randn(3, 64).bfloat16()
    rows[1, 40] = broken
    found = BlockWeight([blocks_of("Q4_0", 64, 64)], None, torch.bfloat16, int8=int8)(rows)
    assert [bool(row.isnan().all()) for row in found] == [False, True, False]
