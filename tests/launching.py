"""A CUDA device that is not there: torch's operations in the places of Triton's kernels, and a recorder of closures.

What the kernels read from a device's memory these read from tensors too, addresses among it; so what holds for them
holds for a graph of the kernels: it reads nothing but what was sent.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from specdec.decoder.rope import Angles, rotate, signed
from specdec.execute import cuda, cuda_kernels
from specdec.models import described_target
from specdec.models.described_target import DescribedTarget
from specdec.models.inspection import eos_ids_of
from specdec.runners.graphs import Outcome
from specdec.sampling import noise
from specdec.sampling.noise import Noise
from specdec.step import device_copies
from specdec.step.pages import PAGE
from specdec.step.step_output import finite_argmax
from tests.decoders import checkpoint_of

__all__ = ["Kernels", "Recorder", "fused", "launch"]


class Kernels:
    """What :mod:`specdec.runners.kernels.layer` computes, in any precision."""

    def __init__(self) -> None:
        self._memory: dict[int, torch.Tensor] = {}

    def address(self, tensor: torch.Tensor) -> int:
        """In the place of ``copies.address``: only what was asked for can be found again."""
        self._memory[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    def look_up(
        self, where: Mapping[str, Any], tables: torch.Tensor, turned: int, like: torch.Tensor, weight: Any
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        counts, places = where["counts"].view(-1, 3), where["places"].view(-1, where["places"].shape[-1])
        tokens = where["tokens"].view(len(counts), -1)
        at = (counts[:, 1:2] + torch.arange(tokens.shape[1])).clamp(max=places.shape[1] - 1)
        position = places.gather(1, at).flatten()
        cos, sin = (self._memory[address][position] for address in tables.tolist())
        assert cos.shape[1] == turned
        return None if weight is None else weight[tokens.flatten().clamp(min=0)], cos, sin

    def add_norm(self, residual: Any, delta: Any, weight: torch.Tensor, epsilon: float) -> Any:
        total = residual if delta is None else residual + delta
        return total, F.rms_norm(total, weight.shape, weight, epsilon)

    def gate(self, both: torch.Tensor) -> torch.Tensor:
        first, second = both.chunk(2, -1)
        return F.silu(first) * second

    def product(
        self, rows: Any, weight: torch.Tensor, bias: Any, *, gated: bool = False, cuts: Any = None, whole: bool = False
    ) -> torch.Tensor:
        found = F.linear(rows, weight, bias)
        return self.gate(found) if gated else found

    def turn_and_store(
        self, heads: Any, cos: Any, sin: Any, at: Any, norms: Any, where: Mapping[str, Any], layer: int, shape: Any
    ) -> torch.Tensor:
        queries, keys, width = shape
        q, k, v = heads.view(len(heads), -1, width).transpose(0, 1).split((queries, keys, keys))
        if norms is not None:
            q, k = (F.rms_norm(x, (width,), weight, norms[2]) for x, weight in ((q, norms[0]), (k, norms[1])))
        q, k = (rotate(x, Angles(cos[at], signed(sin[at]))) for x in (q, k))
        each = len(heads) // (where["counts"].numel() // 3)
        for number, one in enumerate(_sequences(where)):
            length, before, rows = one["counts"].tolist()
            begin = length + before
            for place, own_keys, own_values in self._stores(one, layer, begin, begin + rows):
                own = slice(*(row - begin + number * each for row in (place.start, place.stop)))
                own_keys.copy_(k[:, own])
                own_values.copy_(v[:, own])
        return q.transpose(0, 1).contiguous().transpose(0, 1)[None]

    def segments_of(self, positions: int) -> int:
        return 1

    def paths(self, where: Mapping[str, Any]) -> Any:
        """Nothing: what it is made of is read here."""
        return where["closure"]

    def step_attention(
        self, query: Any, where: Mapping[str, Any], layer: int, key_heads: int, window: int | None, scale: float,
        segments: int,
    ) -> torch.Tensor:  # fmt: skip
        if "closure" not in where:  # a chain's that is launched
            _, before, rows = where["counts"].tolist()
            where = {**where, "closure": torch.ones(rows, before + rows, dtype=torch.bool).tril(before)}
        parts = query.split(where["closure"].shape[-2], 2)
        both = zip(parts, _sequences(where), strict=True)
        return torch.cat([self._attended(part, one, layer, window, scale) for part, one in both])

    def _attended(
        self, query: Any, where: Mapping[str, Any], layer: int, window: int | None, scale: float
    ) -> torch.Tensor:
        length, before, rows = where["counts"].tolist()
        low = 0 if window is None else max(0, length - window + 1)
        output = query.new_zeros(query.shape[2], query.shape[1] * query.shape[3])
        if not rows:
            return output
        _, *both = zip(*self._stores(where, layer, low, length + before + rows), strict=True)
        keys, values = (torch.cat(pieces, 1)[None] for pieces in both)
        places = torch.cat((torch.arange(low, length), where["places"][: before + rows]))
        seen = torch.ones(rows, keys.shape[2], dtype=torch.bool)
        seen[:, length - low :] = where["closure"][:rows, : before + rows]
        if window is not None:
            seen &= where["places"][before : before + rows, None] - places < window
        mixed = F.scaled_dot_product_attention(
            query[:, :, :rows], keys, values, attn_mask=seen, scale=scale, enable_gqa=True
        )
        output[:rows] = mixed[0].transpose(0, 1).flatten(1)
        return output

    def pick(self, logits: torch.Tensor, where: Mapping[str, Any]) -> torch.Tensor:
        each, own = len(logits) // (where["draws"].numel() // 2), torch.full((len(logits),), -1)
        for number, one in enumerate(_sequences(where)):
            (start, bits), before = one["draws"].tolist(), int(one["counts"][1])
            if bits:
                here, steps = slice(number * each, (number + 1) * each), Noise(0, logits.shape[1], logits.device)._steps
                keys = noise._hashed((one["places"][before : before + each] + 1) * noise._signed(noise._GOLDEN) + start)
                gumbel = noise._gumbel(noise._mixed(steps + noise._hashed(keys)[:, None]))
                own[here] = finite_argmax(logits[here] * float(np.int32(bits).view(np.float32)) + gumbel)
        best = finite_argmax(logits)
        none, roots = torch.zeros_like(best), torch.where(own < 0, best, own)
        return torch.stack((best, own, none, none, roots), 1)

    def walk(self, picked: torch.Tensor, where: Mapping[str, Any], store: Any, like: torch.Tensor) -> None:
        """Row by row, as the host does it, and rows of a path that is no chain are moved."""
        for one, rows in zip(_sequences(where), picked.view(-1, where["above"].shape[-1], 5), strict=True):
            above, tokens = one["above"].tolist(), one["tokens"].tolist()
            own, path = rows[:, int(one["draws"][1] != 0)].tolist(), [0]
            for row in range(1, len(above)):
                if above[row] == path[-1] + 1 and tokens[row] == own[path[-1]]:
                    path.append(row)
            decided = above[0] > 0
            for place, row in enumerate(path if decided and store is not None else []):
                for layer in range(len(one["table"])):
                    begin = int(one["counts"][0])
                    here, there = (self._stores(one, layer, begin + at, begin + at + 1)[0] for at in (row, place))
                    there[1].copy_(here[1])
                    there[2].copy_(here[2])
            found = (path[-1], len(path) - 1, own[path[-1]]) if decided else (-1, -1, -1)
            for column, number in enumerate(found, 2):
                rows[:, column].fill_(number)

    def _stores(self, where: Mapping[str, Any], layer: int, first: int, last: int) -> list[tuple[Any, ...]]:
        """The keys and the values [heads, n, d] of the positions [first, last), by those that lie beside each other."""
        one, other, *slots = where["table"][layer].tolist()
        size, found, begin = slots[0] if slots else PAGE, list[tuple[Any, ...]](), first
        while begin < last:
            end = min(last, (begin // size + 1) * size)
            if slots:
                assert self._memory[one].shape[2] == size
                both = self._memory[one][0], self._memory[other][0]
            else:  # the list of pages, and the numbers in a page that are of other layers
                page = self._memory[int(self._memory[one][begin // PAGE])]
                both = page[other // page[0].numel()].unbind(0)
            found.append((slice(begin, end), *(store[:, begin % size :][:, : end - begin] for store in both)))
            begin = end
        return found


def _sequences(where: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """What kernels read of each sequence."""
    if where["counts"].ndim == 1:
        return [dict(where)]
    return [{name: values[number] for name, values in where.items()} for number in range(len(where["counts"]))]


class Recorder:
    """Records by keeping the work, whose outcome is put where the recorded one was, and overwrites it.

    Attributes:
        made: rows of the buckets that were recorded, one for each record.
        replays: how often each record was done again.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: list[int] = []
        self.replays: Counter[int] = Counter()
        self.fails: Exception | None = None

    def record(self, work: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
        if self.fails is not None:
            raise self.fails
        hidden, taps = work()  # as a device is warmed up
        kept = _none(hidden), {tap: _none(rows) for tap, rows in taps.items()}
        number = len(self.made)
        self.made.append(len(hidden))

        def replay() -> None:
            assert self.lock.locked()  # on a device, what another thread does again would overwrite the outcome
            self.replays[number] += 1
            again, found = work()
            kept[0].copy_(again)
            for tap, rows in found.items():
                kept[1][tap].copy_(rows)

        return kept, replay


def _none(values: torch.Tensor) -> torch.Tensor:
    """In the place of values that are not computed yet."""
    return torch.full_like(values, torch.nan if values.is_floating_point() else 1 << 40)


def launch(patch: pytest.MonkeyPatch, kernels: Any = None) -> Recorder:
    """From now on every device is apart, and fused targets are those of a CUDA device, recorded by this recorder."""
    recorder, stand_ins = Recorder(), Kernels()
    if kernels is None:
        patch.setattr(device_copies, "address", stand_ins.address)
    patch.setattr(device_copies, "is_apart", lambda device: True)
    patch.setattr(cuda_kernels, "_why_not_there", lambda dtype, device: None)
    patch.setattr(cuda_kernels, "layer_kernels", lambda *_: stand_ins if kernels is None else kernels)
    patch.setattr(cuda, "CudaRecorder", lambda device: recorder)
    patch.setattr(described_target, "check_runs", lambda *_: None)  # no flash-attn is there either
    return recorder


def fused(model: Any, **options: Any) -> Any:
    """A target of a copy of a model's weights, on its device or on the one that is not there; with the ``model``."""
    known: dict[str, Any] = {"dtype": model.dtype, "device": model.device, "execution": "fused"}
    known |= {"eos_ids": eos_ids_of(model), "config": model.config}
    target: Any = DescribedTarget(checkpoint_of(model), **known, **options)
    target.model = model
    return target
