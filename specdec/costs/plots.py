"""Plots over the rows of a forward, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec.errors import ConfigError, pip_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["new_figure", "require_bench_extra", "scale_to_rows", "sign", "tidy"]


def require_bench_extra() -> None:
    """Raises ConfigError where matplotlib or jinja2 is not installed; specdec imports them only where it draws."""
    try:
        import jinja2  # noqa: F401
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"figures and reports need {error.name}, which is not installed; run {pip_line('bench')}"
        ) from error


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def tidy(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    """Titles on the left, labels, and no more lines than are needed."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def sign(figure: Figure, caption: str) -> None:
    """Write below a figure how it was made."""
    figure.supxlabel(caption, fontsize=6.5, color="#666666", x=0.01, ha="left")


def scale_to_rows(axes: Axes, rows: Sequence[int]) -> None:
    """Rows of a step across, on a scale of powers of two; what they cost upwards from 0."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [str(count) for count in rows])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(color="#E5E5E5", lw=0.7)
