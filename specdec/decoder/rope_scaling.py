"""Rope scaling: how rotary frequencies differ from plain ones, for texts that are longer than what was trained."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Dynamic", "Linear", "Llama3", "LongRope", "RopeScaling", "Yarn"]


@dataclass(frozen=True, slots=True)
class Linear:
    """Frequencies divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Dynamic:
    """Another base for texts beyond ``trained`` tokens; below, the base as it is but for rounding by ``factor``."""

    factor: float
    trained: int


@dataclass(frozen=True, slots=True)
class Llama3:
    """Low frequencies divided by ``factor``, high ones as they are (Llama 3.1).

    ``low``, ``high``: a frequency is low or high that turns fewer or more often than so in ``trained`` tokens.
    """

    factor: float
    low: float
    high: float
    trained: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """Low frequencies divided by ``factor``, high ones as they are (Peng et al. 2023, YaRN, arXiv 2309.00071).

    ``fast``, ``slow``: turns in ``trained`` tokens, from which on a frequency is high, and up to which it is low.
    ``whole``: the bounds between are rounded to whole dimensions. Cosines and sines are multiplied by ``attention``.
    """

    factor: float
    trained: int
    fast: float
    slow: float
    whole: bool
    attention: float


@dataclass(frozen=True, slots=True)
class LongRope:
    """Each frequency divided by its own of ``factors`` (Ding et al. 2024, LongRoPE, arXiv 2402.13753).

    Cosines and sines are multiplied by ``attention``.
    """

    factors: tuple[float, ...]
    attention: float


RopeScaling = Linear | Dynamic | Llama3 | Yarn | LongRope
