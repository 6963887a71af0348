"""Ranks: the processes that decode together, and the values that they exchange."""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Mapping, Sequence, Set, Sized
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from specdec.errors import ConfigError, ParallelError, first_line

__all__ = ["Ranks", "checksum", "content", "join", "local_device", "silence"]

_MOST_TOLD = 1 << 20  # values of a collection that ranks compare one by one
_LATE = 30.0  # seconds after which a rank that does not come to a step is given up


def join(device: torch.device | str | None = None) -> None:
    """Join the processes that torchrun started; only rank 0 prints from now on.

    Raises:
        ConfigError: this process was not started by torchrun.
        ParallelError: the place where the processes meet cannot be used, or one of them does not come.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise ConfigError(
                "parallel needs several processes, and this one was started alone; write "
                "`torchrun --nproc-per-node 2 -m specdec ...`, or call torch.distributed.init_process_group first"
            )
        accelerator = device is not None and torch.device(device).type == "cuda"
        if accelerator:
            torch.cuda.set_device(local_device(device))
        try:
            dist.init_process_group("nccl" if accelerator else "gloo")
        except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
            place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
            raise ParallelError(
                f"rank {os.environ['RANK']} cannot meet the others at {place}: {first_line(error)}; give torchrun a "
                "--master-port that is free, and start all ranks"
            ) from error


def silence() -> None:
    """Drop what ranks other than 0 print; whoever restores the streams hears of errors again."""
    if dist.get_rank():
        sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


def local_device(device: torch.device | str | None) -> torch.device | str | None:
    """``cuda`` is this rank's own GPU of its machine; any other device is what it says."""
    if device is None or torch.device(device) != torch.device("cuda"):
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def checksum(*parts: Sequence[int] | str, start: int = 0) -> int:
    """A 32-bit checksum, signed, of numbers and texts."""
    value = start & 0xFFFFFFFF
    for part in parts:
        data = part.encode() if isinstance(part, str) else np.asarray(part, dtype=np.int64).tobytes()
        value = zlib.crc32(data, zlib.crc32(len(data).to_bytes(8, "little"), value))
    return value - (1 << 32) if value >= 1 << 31 else value


def content(value: Any, depth: int = 4) -> str:
    """What a value holds, as text that is the same in every process: no address, and sets in order.

    An object is its class and attributes, a function its name, its numbers and what it was made with. Models and what
    is nested deeper than ``depth`` are their class alone, and large collections their size.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if depth == 0 or isinstance(value, torch.nn.Module):
        return str(name)
    size = value.numel() if isinstance(value, torch.Tensor) else len(value) if isinstance(value, Sized) else 0
    if size > _MOST_TOLD:
        return f"{name} of {size}"
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{value.dtype} {tuple(value.shape)} {value.tolist()}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{content(k, depth - 1)}: {content(v, depth - 1)}' for k, v in value.items()))}}}"
    if isinstance(value, list | tuple | range | Set):
        parts = [content(part, depth - 1) for part in value]
        return f"[{', '.join(sorted(parts) if isinstance(value, Set) else parts)}]"
    code = getattr(value, "__code__", None)
    if code is not None:
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        numbers = [one for one in code.co_consts if isinstance(one, int | float | str | None)]
        return f"{name} {content([numbers, value.__defaults__, value.__kwdefaults__, cells], depth - 1)}"
    return f"{name} {content(getattr(value, '__dict__', None), depth - 1)}"


class Ranks:
    """All ranks, as one of them sees them.

    Args:
        late: seconds after which a rank that does not come to a step is given up. Between texts there is more time.

    Attributes:
        rank, size: this one's number, and how many there are.
    """

    def __init__(self, late: float = _LATE) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._steps = dist.new_group(timeout=timedelta(seconds=late))
        self._device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        self._late = late

    def gather(self, words: torch.Tensor, *, patient: bool = False) -> torch.Tensor:
        """[N] int32 of this rank to [ranks, N] of all; one collective.

        ``patient``: what other ranks do before it may take long, as between texts.

        Raises:
            ParallelError: a rank is gone, or late.
        """
        words = words.to(self._device)
        found = words.new_empty(self.size, words.numel())
        try:
            dist.all_gather(list(found.unbind(0)), words, group=None if patient else self._steps)
            return found.cpu()
        except RuntimeError as error:
            raise self._lost(error) from error

    def lead(self, tensor: torch.Tensor, *, patient: bool = False) -> torch.Tensor:
        """The tensor as rank 0 has it; one collective.

        Raises:
            ParallelError: a rank is gone, or late.
        """
        tensor = tensor.contiguous()
        try:
            dist.broadcast(tensor, src=0, group=None if patient else self._steps)
            return tensor
        except RuntimeError as error:
            raise self._lost(error) from error

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, which JSON must be able to hold; two collectives."""
        data = json.dumps(value).encode() if self.rank == 0 else b""
        size = self.lead(torch.tensor([len(data)], device=self._device), patient=True)
        letters = torch.zeros(int(size), dtype=torch.uint8, device=self._device)
        if self.rank == 0:
            letters = torch.tensor(list(data), dtype=torch.uint8, device=self._device)
        return json.loads(bytes(self.lead(letters, patient=True).tolist()))

    def clock(self) -> float:
        """Seconds by rank 0's clock, so that all ranks decide alike by them."""
        return float(self.lead(torch.tensor([perf_counter()], dtype=torch.float64, device=self._device)))

    def agree(self, **values: int) -> None:
        """Check that all ranks have the same 32-bit values; one collective.

        Raises:
            ParallelError: values differ; the message names the first value and the ranks that differ.
        """
        found = self.gather(torch.tensor(list(values.values()), dtype=torch.int32), patient=True)
        for place, name in enumerate(values):
            self.check_equal(name.replace("_", " "), found[:, place].tolist())

    def check_equal(self, what: str, values: Sequence[int]) -> None:
        """Raises ParallelError where the ranks' values of something differ from rank 0's."""
        others = [str(rank) for rank, value in enumerate(values) if value != values[0]]
        if others:
            raise ParallelError(
                f"rank {', '.join(others)} has not {what} of rank 0; all ranks must run the same program on the same "
                "model, prompt and options, with drafters that read no clock"
            )

    def _lost(self, error: RuntimeError) -> ParallelError:
        return ParallelError(
            f"rank {self.rank} of {self.size} has lost another one, which ended, or was {self._late:g} seconds late "
            f"({first_line(error)}); look for the first error among the ranks, then start all of them again"
        )
