"""The rows of lookahead's ablation (Fu et al. 2024, arXiv 2402.02057, table 3) on a model, beside the paper's figures.

    python scripts/lookahead_ablation.py --out docs/figures/lookahead_ablation.md    # the embedded model, 6 minutes

Settings are (N, W, G) as in the table. A tiny window leaves the pool to verify alone; a tiny pool leaves the window
alone; "verify off" proposes nothing from the pool, so that only the window's column 0 can be accepted. Each is run with
and without the prompt as reference. The window's own rows are not accepted, as in the paper, but for "verify off" and
the last row, which is how this package uses a window of that size. No policy has any of them rest.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from specdec.bench.metrics import OVERALL, Metrics, measure
from specdec.bench.plan import Plan
from specdec.bench.records import RunFolder
from specdec.bench.report import caption_of
from specdec.bench.runner import Runner

# label, (N, W, G), prompt as reference, further options, the paper's tokens per step and speedup
ROWS: tuple[tuple[str, tuple[int, int, int], bool, dict[str, Any], tuple[float, float | None] | None], ...] = (
    ("minimal window", (5, 1, 30), False, {}, (1.12, None)),
    ("minimal window + prompt", (5, 1, 30), True, {}, (1.59, None)),
    ("minimal pool", (5, 30, 1), False, {}, (1.79, None)),
    ("minimal pool + prompt", (5, 30, 1), True, {}, None),
    ("verify off", (5, 15, 15), False, {"verify": False, "verify_window": "column"}, None),
    ("balanced", (5, 15, 15), False, {}, (1.96, 1.78)),
    ("balanced + prompt", (5, 15, 15), True, {}, (2.05, 1.88)),
    ("balanced + prompt, window accepted", (5, 15, 15), True, {"verify_window": "all"}, None),
)
LOOKUP = (1.55, 1.44)


def drafters() -> list[str | dict[str, Any]]:
    found: list[str | dict[str, Any]] = ["none", "prompt_lookup"]
    for label, (ngram, window, guesses), prompt, more, _ in ROWS:
        sizes = {"ngram": ngram, "window": window, "guesses": guesses}
        options = {"pool_from_prompt": prompt, "verify_window": "none", **more}
        found.append({"name": "lookahead", "label": label, **sizes, **options})
    return found


def table(runs: dict[float, Metrics]) -> list[str]:
    temperatures = list(runs)
    heads = [f"tokens/step, T={t:g} | x plain, T={t:g}" for t in temperatures]
    lines = [
        f"| setting | (N, W, G) | rows/step | {' | '.join(heads)} | paper: tokens/step | paper: speedup |",
        "|---|---|--:|" + "--:|--:|" * len(temperatures) + "--:|--:|",
    ]
    paper = {"prompt_lookup": LOOKUP} | {row[0]: row[4] for row in ROWS}
    sizes = {row[0]: str(row[1]) for row in ROWS}
    for label in ["prompt_lookup", *sizes]:
        cells = [
            label.replace("_", " "),
            sizes.get(label, ""),
            f"{runs[temperatures[0]].rows[label][OVERALL].rows_per_step:.0f}",
        ]
        for metrics in runs.values():
            row = metrics.rows[label][OVERALL]
            assert row.tokens_per_step is not None
            assert row.speedup is not None
            cells += [
                f"{row.tokens_per_step.value:.2f}",
                f"{row.speedup.value:.2f} ({row.speedup.low:.2f}-{row.speedup.high:.2f})",
            ]
        known = paper[label] or (None, None)
        cells += ["" if value is None else f"{value:.2f}" for value in known]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--questions", default="tiny")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/lookahead_ablation.md"), help="table; a .json goes beside it"
    )
    args = parser.parse_args()
    runs: dict[float, Metrics] = {}
    manifests: list[dict[str, Any]] = []
    command = shlex.join(["python", *sys.argv])
    for temperature in map(float, args.temperatures.split(",")):
        names = ("model", "dtype", "device", "questions", "limit", "repeats", "max_new_tokens", "threads")
        options = {name: getattr(args, name) for name in names}
        plan = Plan(**options, drafters=drafters(), systems=[], temperature=temperature, policy="off")
        with tempfile.TemporaryDirectory() as folder:
            run: RunFolder = Runner(plan, folder, command=command, cost=False).run()
            manifests.append(run.manifest())
            runs[temperature] = measure(run.records(), list(manifests[-1]["systems"]))
    lines = [*table(runs), "", *(f"{caption_of(manifest)}<br>" for manifest in manifests), f"`{command}`", ""]
    print("\n".join(lines))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n".join(lines), encoding="utf-8")
    args.out.with_suffix(".json").write_text(json.dumps(manifests, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
