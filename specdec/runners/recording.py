"""Recording: what a drafter needs to have passes of its own recorded beside a model's steps."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from specdec.runners.graphs import Recorder

__all__ = ["Recording"]


class Recording(NamedTuple):
    """The parts of an executor on a CUDA device, for :class:`specdec.runners.graphs.StepGraphs` of other layers there.

    Attributes:
        kernels: Triton's kernels, see :mod:`specdec.runners.kernels.layer`; for the dtype of the model.
        recorder: keeps the graphs.
        longest: tokens of a text that attention has room for at first.
    """

    kernels: ModuleType
    recorder: Recorder
    longest: int
