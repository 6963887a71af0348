"""Lookahead's scaling law on a model: tokens per step over (W, N) with G = W, fitted by the paper's formula.

    python scripts/scaling_law.py --out docs/figures/scaling_law.png        # the embedded model, about 3 minutes

With g = N - 1 and b = W = G, a step is expected to emit E = (g + 1) - sum_{i=1..g} (1 - alpha^i)^b tokens where the
pool holds good guesses, which is so in one step of f: S = (f - 1 + E) / f (Fu et al. 2024, arXiv 2402.02057). The left
panel is the paper's figure 4, tokens per step over the window; the right one is figure 6 of its authors' blog, tokens
per step over the rows of a step. As in the paper, the pool has no n-grams of the prompt, and the window's rows are not
accepted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from specdec import Engine, SamplingParams, TransformersTarget
from specdec.bench.environment import describe_environment, describe_model
from specdec.bench.figures import new_figure
from specdec.bench.questions import build_prompt, find_questions, read_questions, select

Point = tuple[int, int, float, float]  # W, N, tokens per step, rows per step
PAPER = (0.425, 3.106)  # alpha and f of the paper's fit, Llama-2-7B-chat on MT-bench
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


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


def measure(engine: Engine, prompts: Sequence[list[int]], args: argparse.Namespace) -> list[Point]:
    """Decode all prompts with each (W, N)."""
    points = []
    sampling = SamplingParams(temperature=args.temperature)
    for window, ngram in tqdm([(w, n) for n in args.ngrams for w in args.windows], unit="setting", file=sys.stderr):
        options = {"window": window, "ngram": ngram, "guesses": window}
        fixed = {"pool_from_prompt": False, "verify_window": "none"}
        ours = engine.with_drafter({"name": "lookahead", **options, **fixed}, policy="off")
        stats = [ours.generate(prompt, args.max_new_tokens, sampling).stats for prompt in prompts]
        steps = sum(s.steps for s in stats)
        tokens, rows = sum(s.new_tokens for s in stats), sum(sum(s.rows) for s in stats)
        points.append((window, ngram, tokens / steps, rows / steps))
    return points


def draw(points: Sequence[Point], alpha: float, f: float, caption: str, path: Path) -> None:
    figure = new_figure(9.6, 4.2)
    left, right = figure.subplots(1, 2, sharey=True)
    windows = np.geomspace(1, max(w for w, *_ in points), 60)
    for colour, ngram in zip(COLOURS, sorted({n for _, n, _, _ in points}), strict=False):
        chosen = sorted(p for p in points if p[1] == ngram)
        style = {"color": colour, "marker": "o", "ms": 5}
        left.plot([p[0] for p in chosen], [p[2] for p in chosen], ls="", label=f"N = {ngram}", **style)
        left.plot(windows, [law(alpha, f, w, ngram) for w in windows], color=colour, lw=1.2)
        right.plot([p[3] for p in chosen], [p[2] for p in chosen], lw=1.2, label=f"N = {ngram}", **style)
    left.set_title(f"Tokens per step, fit: alpha = {alpha:.3f}, f = {f:.2f}", loc="left", fontsize=10)
    left.set_xlabel("W = G", fontsize=9)
    left.set_ylabel("tokens per step", fontsize=9)
    right.set_title("The same by what a step costs", loc="left", fontsize=10)
    right.set_xlabel("rows of a step", fontsize=9)
    ticks = {left: sorted({w for w, *_ in points}), right: [2**n for n in range(1, 9)]}
    for axes, at in ticks.items():
        axes.set_xscale("log", base=2)
        axes.set_xticks(at, list(map(str, at)))
        axes.minorticks_off()
        axes.grid(color="#E5E5E5", lw=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=8, frameon=False, loc="upper left")
    figure.supxlabel(caption, fontsize=6.5, color="#666666", x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--questions", default="tiny")
    parser.add_argument("--limit", type=int, default=18)
    parser.add_argument("--windows", type=integers, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--ngrams", type=integers, default=[3, 4, 5])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/scaling_law.png"), help="figure; a .json goes beside it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = Engine.from_pretrained(args.model, dtype=args.dtype, device=args.device)
    assert isinstance(loaded.target, TransformersTarget)
    engine = Engine(loaded.target, loaded.tokenizer, max_rows=4 * max(args.windows) * max(args.ngrams))
    questions = select(read_questions(find_questions(args.questions)), (), args.limit)
    prompts = [engine.encode(build_prompt(question, (), "auto", engine.tokenizer)) for question in questions]
    points = measure(engine, prompts, args)
    alpha, f, error = fit(points)
    environment = describe_environment(loaded.target.device)
    command = " ".join(["python", *sys.argv])
    caption = (
        f"{args.model}, T={args.temperature:g}, {len(prompts)} questions, {args.max_new_tokens} new tokens | specdec "
        f"{environment['commit']}, torch {environment['versions']['torch']} | {environment['cpu']} | {command}"
    )
    draw(points, alpha, f, caption, args.out)
    for window, ngram, tokens, rows in points:
        fitted = law(alpha, f, window, ngram)
        print(f"W=G={window:<3} N={ngram}  tokens/step {tokens:.3f}  law {fitted:.3f}  rows {rows:.1f}")
    print(f"alpha {alpha:.3f}, f {f:.3f}, rms error {error:.3f}; the paper's: alpha {PAPER[0]}, f {PAPER[1]}")
    manifest = {
        "command": command,
        "environment": environment,
        "model": describe_model(args.model, loaded.target),
        "alpha": alpha,
        "f": f,
        "rms_error": error,
        "points": [dict(zip(("W", "N", "tokens_per_step", "rows_per_step"), point, strict=True)) for point in points],
    }
    args.out.with_suffix(".json").write_text(json.dumps(manifest, indent=2) + "\n")


if __name__ == "__main__":
    main()
