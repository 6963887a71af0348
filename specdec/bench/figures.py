"""Figures of a run, drawn with matplotlib's object interface: no window, no global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec.bench.metrics import OVERALL, Metrics, Row
from specdec.bench.plan import BASELINE, at_once
from specdec.costs.plots import new_figure, scale_to_rows, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_figures", "sign"]

# Okabe and Ito's colours, which most colour-blind people can distinguish, and three more; then markers differ.
_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#8C6D31",
    "#6A3D9A",
    "#B2182B",
    "#1B7837",
)
_MARKERS = "osD^vPX*<>"
_PLAIN = "#777777"


def draw_figures(metrics: Metrics, manifest: Mapping[str, Any], caption: str) -> dict[str, Figure]:
    """Figures by name; a figure without data in the run is left out."""
    batches = {system: groups[OVERALL] for system, groups in metrics.rows.items() if groups[OVERALL].answered}
    metrics = metrics.one_by_one()
    overall = {system: row for system, row in batches.items() if system in metrics.rows}
    styles = _styles(list(metrics.rows))
    drawn = {
        "batch": _batch(batches, styles),
        "speedup": _speedup(metrics, styles),
        "cost": _cost(overall, styles, manifest.get("cost") or {}),
    }
    figures = {name: figure for name, figure in drawn.items() if figure is not None}
    for figure in figures.values():
        sign(figure, caption)
    return figures


Style = dict[str, Any]


def _styles(systems: Sequence[str]) -> dict[str, Style]:
    styles = {}
    for place, system in enumerate(s for s in systems if s != BASELINE):
        colour = _COLOURS[place % len(_COLOURS)]
        styles[system] = {"color": colour, "marker": _MARKERS[(place + place // 10) % len(_MARKERS)]}
    return styles | {BASELINE: {"color": _PLAIN, "marker": "o"}}


def sign(figure: Figure, caption: str) -> None:
    """Write below a figure how it was made."""
    figure.supxlabel(caption, fontsize=6.5, color="#666666", x=0.01, ha="left")


def _panels(titles: Sequence[str], title: str, x: str, y: str, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """A figure with one panel of that size, in inches, for each of ``titles``; four in a line, with shared axes."""
    columns = min(4, len(titles))
    lines = -(-len(titles) // columns)
    figure = new_figure(size[0] * columns + 0.8, size[1] * lines + 0.8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    panels = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    for place, (axes, name) in enumerate(zip(panels, titles, strict=False)):
        lowest = place + columns >= len(titles)
        tidy(axes, name, x if lowest else "", y if place % columns == 0 else "")
        axes.tick_params(labelbottom=lowest)
    for axes in panels[len(titles) :]:
        axes.set_visible(False)
    return figure, panels[: len(titles)]


def _speedup(metrics: Metrics, styles: Mapping[str, Style]) -> Figure | None:
    """A panel per group: speed against plain decoding, with its interval."""
    systems = [s for s in metrics.rows if s != BASELINE and metrics.rows[s][OVERALL].speedup is not None]
    if not systems:
        return None
    groups = [OVERALL, *metrics.groups]
    title, size = "Speed against plain decoding, 95 % intervals", (2.6, 0.24 * len(systems) + 0.95)
    titles = [group.replace("_", " ") for group in groups]
    figure, panels = _panels(titles, title, "speed, plain decoding = 1", "", size)
    for group, axes in zip(groups, panels, strict=True):
        for height, system in enumerate(systems):
            speedup = metrics.rows[system][group].speedup
            if speedup is not None:
                error = [[max(0.0, speedup.value - speedup.low)], [max(0.0, speedup.high - speedup.value)]]
                axes.errorbar(speedup.value, height, xerr=error, ms=5, lw=1.5, capsize=2, **styles[system])
        axes.axvline(1, color=_PLAIN, lw=1, zorder=0)
        axes.set_yticks(range(len(systems)), systems)
        axes.grid(axis="x", color="#E5E5E5", lw=0.7)
    panels[0].set_ylim(len(systems) - 0.5, -0.5)
    return figure


def _one_panel(height: float) -> tuple[Figure, Axes]:
    """A figure with one panel, and room for a legend."""
    figure = new_figure(7.6, height)
    return figure, figure.subplots()


def _batch(rows: Mapping[str, Row], styles: Mapping[str, Style]) -> Figure | None:
    """Speedup over batch size, a line per system; a system that answers one question at a time is a point."""
    lines: dict[str, dict[int, float]] = {}
    for label, row in rows.items():
        system, size = at_once(label)
        if row.speedup is not None:
            lines.setdefault(system, {})[size] = row.speedup.value
    sizes = sorted({size for points in lines.values() for size in points})
    if len(sizes) < 2:
        return None
    figure, axes = _one_panel(4.2)
    for system, points in lines.items():
        axes.plot(list(points), list(points.values()), lw=1.6, ms=5, label=system, clip_on=False, **styles[system])
    axes.axhline(1, color=_PLAIN, lw=1, zorder=0)
    scale_to_rows(axes, sizes)
    tidy(axes, "Speedup over batch size", "questions at once", "tokens/s, plain decoding one by one = 1")
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    return figure


def _cost(overall: Mapping[str, Row], styles: Mapping[str, Style], cost: Mapping[str, Any]) -> Figure | None:
    """Plot the cost of a forward by rows, and over it the cost and the tokens of each drafter's steps."""
    plain = overall.get(BASELINE)
    if not cost.get("seconds") or plain is None or not plain.step_seconds:
        return None
    seconds = {int(rows): taken for rows, taken in cost["seconds"].items()}
    one = seconds[min(seconds)]
    figure, axes = _one_panel(4.4)
    axes.plot(
        list(seconds), [taken / one for taken in seconds.values()], color="#333333", lw=1.4, label="forward alone"
    )
    for system, row in overall.items():
        if row.rows_per_step is None or not row.step_seconds or row.tokens_per_step is None or system == BASELINE:
            continue
        x, step, gain = row.rows_per_step, row.step_seconds / plain.step_seconds, row.tokens_per_step.value
        style = styles[system]
        axes.plot([x, x], [step, gain], color=style["color"], lw=1, alpha=0.7)
        axes.plot(x, step, ls="", ms=6, label=f"{system}: {gain / step:.2f}x", **style)
        axes.plot(x, gain, ls="", ms=7, mfc="white", **style)
    scale_to_rows(axes, list(seconds))
    title = f"Cost of a step by its rows, at {cost['context']} tokens of context"
    tidy(axes, title, "rows of a step", "plain steps of time (filled) or tokens (hollow)")
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    return figure
