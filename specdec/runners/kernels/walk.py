"""Behind a recorded step's draws, in Triton: the path through each tree that ``match`` accepts, and its commit.

From the root a path goes on to the first child that holds the target's token, as on the host
(:func:`specdec.sampling.verify.match`). Its keys and values are moved together behind the committed ones, by one launch
for all sequences and layers. A program walks by itself, and moves what no other program reads or writes: one sequence's
rows of one layer. Rows move down and in order, so none is overwritten before it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from specdec.runners.kernels.launch import after_former, early, on_device
from specdec.runners.kernels.step import page_of

__all__ = ["walk"]

_COLUMNS: tl.constexpr = tl.constexpr(5)  # of what is known of each row


@triton.jit(do_not_specialize=("layers",))
def _walk(
    picked, draws, above, tokens, counts, table, like, layers,
    ROWS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
    PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    sequence, layer = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)
    parent = tl.load(above + sequence * ROWS + row) - 1
    token = tl.load(tokens + sequence * ROWS + row)
    decided = tl.load(above + sequence * ROWS) > 0
    which = (tl.load(draws + 2 * sequence + 1) != 0).to(tl.int32)  # the draw, or the argmax
    length = tl.load(counts + 3 * sequence).to(tl.int32)
    picked += sequence * ROWS * _COLUMNS
    after_former(PDL)
    own = tl.load(picked + tl.maximum(parent, 0) * _COLUMNS + which)
    fits = decided & (row > 0) & (parent >= 0) & (own == token) & (own >= 0)
    last, depth = length * 0, length * 0
    below = tl.min(tl.where(fits & (parent == last), row, ROWS), 0)
    while below < ROWS:
        depth += 1
        last = below
        if (HEADS > 0) & (last != depth):
            _move(table, like, sequence * layers + layer, length + last, length + depth,
                  HEADS, WIDTH, GROUPS, WIDE, PAGE)  # fmt: skip
        below = tl.min(tl.where(fits & (parent == last), row, ROWS), 0)
    if layer == 0:
        there = picked + row * _COLUMNS
        tl.store(there + 2, tl.where(decided, last, -1) + row * 0)
        tl.store(there + 3, tl.where(decided, depth, -1) + row * 0)
        tl.store(there + 4, tl.load(picked + last * _COLUMNS + which) + row * 0)


@triton.jit
def _move(
    table, like, place, source, target,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Copy keys and values of one position to another, of a layer of a sequence."""
    element = like.dtype.element_ty
    head, at = tl.arange(0, GROUPS), tl.arange(0, WIDE)
    inside = (head < HEADS)[:, None] & (at < WIDTH)[None, :]
    if PAGE:
        pages = tl.load(table + 2 * place).to(tl.pointer_type(tl.int64))
        tile = tl.load(table + 2 * place + 1) + head[:, None] * PAGE * WIDTH + at[None, :]
        here = tl.load(pages + source // PAGE).to(tl.pointer_type(element)) + tile + source % PAGE * WIDTH
        there = tl.load(pages + target // PAGE).to(tl.pointer_type(element)) + tile + target % PAGE * WIDTH
        values, values_there = here + HEADS * PAGE * WIDTH, there + HEADS * PAGE * WIDTH
    else:
        slots = tl.load(table + 3 * place + 2)
        tile = head[:, None] * slots * WIDTH + at[None, :]
        keys = tl.load(table + 3 * place).to(tl.pointer_type(element)) + tile
        stored = tl.load(table + 3 * place + 1).to(tl.pointer_type(element)) + tile
        here, there = keys + source % slots * WIDTH, keys + target % slots * WIDTH
        values, values_there = stored + source % slots * WIDTH, stored + target % slots * WIDTH
    key, value = tl.load(here, mask=inside), tl.load(values, mask=inside)
    tl.debug_barrier()  # several threads may read the same numbers, and one of them writes
    tl.store(there, key, mask=inside)
    tl.store(values_there, value, mask=inside)
    tl.debug_barrier()


def walk(
    picked: torch.Tensor, where: Mapping[str, torch.Tensor], store: tuple[int, int] | None, like: torch.Tensor
) -> None:
    """Have the last three of the numbers that :func:`specdec.runners.kernels.pick.pick` gives for each row, in place.

    Args:
        picked: int64 [B, 5], contiguous.
        where: of the rows, see :mod:`specdec.runners.packed_step`; ``above`` and ``tokens`` among its
            arrays. Sequences of which nothing is decided here have -1, and nothing of them is moved.
        store: key heads of each layer and their width, whose keys and values are to be moved; None to move nothing.
        like: of the dtype of keys and values.
    """
    above, layers = where["above"], where["table"].shape[-2]
    rows = above.shape[-1]
    heads, width = (0, 1) if store is None else store
    launch: Any = _walk[(above.numel() // rows, layers if heads else 1)]
    with on_device(picked):
        launch(
            picked, where["draws"], above, where["tokens"], where["counts"], where["table"], like, layers,
            ROWS=rows, HEADS=heads, WIDTH=width, GROUPS=triton.next_power_of_2(max(1, heads)),
            WIDE=triton.next_power_of_2(width), PAGE=page_of(where), num_warps=4, **early(picked.device),
        )  # fmt: skip
