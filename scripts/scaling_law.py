"""Lookahead's scaling law: tokens per step over (W, N) with G = W, fitted by the paper's formula.

    python scripts/scaling_law.py --out docs/figures/scaling_law.png        # the embedded model, about 3 minutes

With g = N - 1 and b = W = G, a step is expected to emit E = (g + 1) - sum_{i=1..g} (1 - alpha^i)^b tokens where the
pool holds good guesses, which is so in one step of f: S = (f - 1 + E) / f (Fu et al. 2024, arXiv 2402.02057). The left
panel is the paper's figure 4, tokens per step over the window; the right one is figure 6 of its authors' blog, tokens
per step over the rows of a step. As in the paper, the pool has no n-grams of the prompt, and the window's rows are not
accepted. The questions are a bench's, and so are its options.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from specdec import Engine
from specdec.bench.environment import caption_of
from specdec.bench.metrics import OVERALL, measure
from specdec.bench.plan import Plan
from specdec.bench.runner import Runner
from specdec.costs.plots import new_figure, scale_to_rows, sign, tidy
from specdec.engine.config import resolve
from specdec.engine.load import load
from specdec.errors import SpecdecError
from specdec.settings.files import write_json
from specdec.settings.options import Given, option, with_options
from specdec.settings.validation import AtLeast1

Point = tuple[int, int, float, float]  # W, N, tokens per step, rows per step
PAPER = (0.425, 3.106)  # alpha and f of the paper's fit, Llama-2-7B-chat on MT-bench
WINDOWS, NGRAMS = (1, 2, 4, 8, 16, 32), (3, 4, 5)
COLOURS = ("#0072B2", "#D55E00", "#009E73")


@dataclass(frozen=True, kw_only=True)
class LawPlan(Plan):
    """A bench's options, with other defaults."""

    limit: AtLeast1 | None = option(18, "How many questions.")
    max_new_tokens: AtLeast1 = option(64, "Most new tokens of each turn.")
    repeats: AtLeast1 = 1
    threads: int | None = option(1, "CPU threads.", panel="Model")
    policy: str = "off"


def expected(alpha: float, window: int, ngram: int) -> float:
    """E: tokens of a step with good guesses."""
    g = ngram - 1
    return (g + 1) - sum((1 - alpha**i) ** window for i in range(1, g + 1))


def law(alpha: float, f: float, window: int, ngram: int) -> float:
    """S: tokens per step."""
    return (f - 1 + expected(alpha, window, ngram)) / f


def fit(points: Sequence[Point]) -> tuple[float, float, float]:
    """alpha, f and the root mean square error. For a given alpha, S is linear in 1 / f, which has a closed form."""
    best = (0.0, 0.0, float("inf"))
    for alpha in np.linspace(0.01, 0.99, 981):
        gain = np.array([expected(float(alpha), w, n) - 1 for w, n, _, _ in points])
        seen = np.array([s - 1 for _, _, s, _ in points])
        inverse = min(1.0, max(1e-6, float(gain @ seen / (gain @ gain))))  # f is at least 1
        error = float(np.sqrt(np.mean((inverse * gain - seen) ** 2)))
        if error < best[2]:
            best = (float(alpha), 1 / inverse, error)
    return best


def draw(points: Sequence[Point], alpha: float, f: float, caption: str, path: Path) -> None:
    figure = new_figure(9.6, 4.2)
    left, right = figure.subplots(1, 2)
    windows = np.geomspace(WINDOWS[0], WINDOWS[-1], 60)
    for colour, ngram in zip(COLOURS, NGRAMS, strict=True):
        chosen = [p for p in points if p[1] == ngram]
        style = {"color": colour, "marker": "o", "ms": 5}
        left.plot([p[0] for p in chosen], [p[2] for p in chosen], ls="", label=f"N = {ngram}", **style)
        left.plot(windows, [law(alpha, f, w, ngram) for w in windows], color=colour, lw=1.2)
        right.plot([p[3] for p in chosen], [p[2] for p in chosen], lw=1.2, label=f"N = {ngram}", **style)
    tidy(left, f"Tokens per step, fit: alpha = {alpha:.3f}, f = {f:.2f}", "W = G", "tokens per step")
    tidy(right, "The same by what a step costs", "rows of a step")
    for axes, ticks in ((left, WINDOWS), (right, [2**n for n in range(1, 9)])):
        scale_to_rows(axes, ticks)
        axes.set_ylim(1, 1.05 * max(p[2] for p in points))
        axes.legend(fontsize=8, frameon=False, loc="upper left")
    sign(figure, caption)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


@with_options(LawPlan, without=["drafters", "systems", "batch", "parallel", "acceptance", "keep_prefix", "persistent"])
def main(
    given: Given,
    out: Annotated[Path, typer.Option(help="Figure; a .json goes beside it.")] = Path("runs/scaling_law.png"),
) -> None:
    """Measure tokens per step over the window, fit the law, and draw both."""
    plan = resolve(LawPlan, given, where="scaling_law")
    settings = {f"W=G={w:<3} N={n}": (w, n) for n in NGRAMS for w in WINDOWS}
    fixed = {"name": "lookahead", "pool_from_prompt": False, "verify_window": "none"}
    drafters = [{**fixed, "label": label, "window": w, "guesses": w, "ngram": n} for label, (w, n) in settings.items()]
    loaded = load(plan)
    engine = Engine(loaded.target, loaded.tokenizer, max_rows=4 * WINDOWS[-1] * NGRAMS[-1])
    with tempfile.TemporaryDirectory() as folder:
        command = shlex.join(["python", *sys.argv])
        measured = replace(plan, drafters=drafters, systems=[])
        run = Runner(measured, folder, command=command, engine=engine, cost=False).run()
        manifest, rows = run.manifest(), measure(run.records(), list(settings)).rows
    points = []
    for label, setting in settings.items():
        row = rows[label][OVERALL]
        assert row.tokens_per_step is not None
        assert row.rows_per_step is not None
        points.append((*setting, row.tokens_per_step.value, row.rows_per_step))
    alpha, f, error = fit(points)
    draw(points, alpha, f, f"{caption_of(manifest)} | {command}", out)
    for label, (window, ngram, tokens, forwarded) in zip(settings, points, strict=True):
        print(f"{label}  tokens/step {tokens:.3f}  law {law(alpha, f, window, ngram):.3f}  rows {forwarded:.1f}")
    print(f"alpha {alpha:.3f}, f {f:.3f}, rms error {error:.3f}; the paper's: alpha {PAPER[0]}, f {PAPER[1]}")
    found = [dict(zip(("W", "N", "tokens_per_step", "rows_per_step"), point, strict=True)) for point in points]
    write_json(out.with_suffix(".json"), {**manifest, "alpha": alpha, "f": f, "rms_error": error, "points": found})


if __name__ == "__main__":
    try:
        typer.run(main)
    except SpecdecError as error:
        raise SystemExit(f"error: {error}") from error
