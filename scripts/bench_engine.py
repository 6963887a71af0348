"""Speed of the engine, side by side with what a user would pick instead.

    python scripts/bench_engine.py                                 # the embedded model on held-out code
    python scripts/bench_engine.py --model PATH --dtype bfloat16   # any checkpoint
    python scripts/bench_engine.py --shape mistral-7b --dtype bfloat16 --device cuda   # random weights
    python scripts/bench_engine.py --oracle .5,.7,.9,1 --drafters none   # what the engine makes of acceptance

Systems run in turn, prompt by prompt and repeat by repeat, and every figure is a ratio of medians from the one run, so
that a machine that drifts drifts for all. A drafter is kept for the whole run. The last line says what was compared.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from drafters.rest.stdlib_corpus import read_files
from specdec import Engine, TransformersTarget
from specdec.bench.environment import caption, describe_environment
from specdec.bench.metrics import OVERALL, Row, measure
from specdec.bench.oracle import OraclePoint, sweep_oracle
from specdec.bench.own_model import keep_model
from specdec.bench.plan import BASELINE, Plan, Spec
from specdec.bench.records import Record
from specdec.bench.runner import answer_prompts
from specdec.bench.shapes import SHAPES, random_model, random_prompt
from specdec.bench.tables import COLUMNS
from specdec.cli.tune import table as cost_table
from specdec.costs.measuring import measure as measure_cost
from specdec.costs.plots import new_figure, sign, tidy
from specdec.engine.config import resolve
from specdec.engine.load import load, prepare
from specdec.errors import SpecdecError
from specdec.settings.options import Given, option, with_options

SHOWN = ("tokens/step", "rows/step", "tokens/s", "x plain (95 %)", "x transformers", "peak MiB", "repeats")


@dataclass(frozen=True, kw_only=True)
class EnginePlan(Plan):
    """A bench's options, with other defaults: prompts take the place of its questions."""

    drafters: list[Spec] = option(
        lambda: ["none", "jacobi", "prompt_lookup", "lookahead"], "Drafters.", metavar="A,B,C", commas=True
    )
    max_new_tokens: int = option(128, "New tokens of each answer.")
    repeats: int = option(5, "How often each prompt is answered by each system.")
    threads: int | None = option(1, "CPU threads.", panel="Model")
    acceptance: str = option("auto", "auto, match, reject or typical.", panel="Sampling")
    persistent: bool = True


def held_out_prompts(encode: Callable[[str], list[int]], count: int, length: int) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens, each from another held-out file, cut at a line's end."""
    prompts = []
    for _, text in read_files(held_out=True):
        lines = text.splitlines(keepends=True)
        start = len(lines) // 3  # past licence and imports
        ids = encode("".join(lines[start : start + 400]))[:length]
        if len(ids) == length:
            prompts.append(ids)
    step = max(1, len(prompts) // count)
    return prompts[::step][:count]


def overhead(engine: Engine, prompt: list[int], budget: int) -> float:
    """Step time of plain decoding by the walk alone at the same context, interleaved; median of five."""
    ratios = []
    for _ in range(5):
        out = engine.with_drafter("none").generate(prompt, budget)
        middle = len(prompt) + len(out.token_ids) // 2  # attention at the mean context
        bare = measure_cost(engine.target, rows=(1,), lengths=(middle,)).seconds[0][0]
        ratios.append(out.stats.seconds.decode / out.stats.steps / bare)
    return statistics.median(ratios)


def sheet_of(title: str, columns: Sequence[str]) -> Table:
    sheet = Table(title=title, title_justify="left")
    for column in columns:
        sheet.add_column(column, justify="left" if column in ("system", "text") else "right")
    return sheet


def table(title: str, rows: dict[str, Row], records: Sequence[Record]) -> Table:
    """A row per system: its figures, drafting's share of the decoding time, and whether its texts are plain ones."""
    texts = {(r.system, r.question_id, r.repeat): r.turns[0].token_ids for r in records}
    sheet = sheet_of(title, ("system", "new tokens", *SHOWN, "drafting", "text"))
    for name, row in rows.items():
        drafting = f"{row.shares['draft'] / (1 - row.shares['prefill']):.0%}" if "draft" in row.shares else ""
        same = all(text == texts[BASELINE, *key[1:]] for key, text in texts.items() if key[0] == name)
        cells = [str(row.tokens), *(COLUMNS[column](row) for column in SHOWN), drafting]
        sheet.add_row(name, *cells, "same" if same else "differs")
    return sheet


def run_oracle(
    plan: Plan, engine: Engine, prompts: list[list[int]], accuracies: list[float], depths: list[int]
) -> list[OraclePoint]:
    with tqdm(total=(plan.repeats + 1) * len(prompts), unit="round", file=sys.stderr) as bar:
        return sweep_oracle(
            engine,
            prompts,
            accuracies=accuracies,
            depths=depths,
            max_new_tokens=plan.max_new_tokens,
            repeats=plan.repeats,
            sampling=plan.sampling(),
            on_round=bar.update,
        )


def oracle_table(title: str, points: list[OraclePoint]) -> Table:
    columns = ("depth", "accuracy", "tokens/step", "x plain", "x plain / tokens", "T(rows)/T(1)", "engine", "text")
    sheet = sheet_of(title, columns)
    for p in points:
        numbers = (p.tokens_per_step, p.speedup, p.kept, p.row_cost, p.engine_share)
        cells = [str(p.depth), f"{p.accuracy:g}", *(f"{number:.2f}" for number in numbers)]
        sheet.add_row(*cells, "same" if p.same else "differs")
    return sheet


def draw_oracle(points: list[OraclePoint], title: str, caption: str) -> Any:
    """Speedup against tokens per step, a line per depth; dashed where every token saved is time saved."""
    figure = new_figure(5.6, 4.2)
    axes = figure.subplots()
    most = max(point.tokens_per_step for point in points)
    axes.plot([1, most], [1, most], color="#777777", lw=1, ls="--", label="nothing lost")
    for depth, colour in zip(dict.fromkeys(p.depth for p in points), ("#0072B2", "#D55E00", "#009E73"), strict=False):
        mine = [point for point in points if point.depth == depth]
        x, y = [point.tokens_per_step for point in mine], [point.speedup for point in mine]
        axes.plot(x, y, color=colour, marker="o", ms=5, label=f"depth {depth}")
        for point in mine:
            place = (point.tokens_per_step, point.speedup)
            axes.annotate(f"{point.accuracy:g}", place, xytext=(4, -10), textcoords="offset points", fontsize=7)
    axes.grid(color="#E5E5E5", lw=0.7)
    tidy(axes, title, "tokens per step", "speed, plain decoding = 1")
    axes.legend(fontsize=8, frameon=False)
    sign(figure, caption)
    return figure


def engine_of(plan: Plan, shape: str | None) -> Engine:
    if shape is None:
        return load(plan)
    prepare(plan)
    dtype = torch.float32 if plan.dtype == "auto" else getattr(torch, plan.dtype)
    model = random_model(shape, dtype, plan.device or "cpu")
    if plan.execution == "modules":
        return Engine(TransformersTarget(model))
    engine = Engine.from_model(model, attention=plan.attention, execution=plan.execution)
    keep_model(engine.target, model)
    return engine


def numbers(text: str, kind: Callable[[str], Any]) -> list[Any]:
    return [kind(part) for part in text.split(",") if part]


@with_options(
    EnginePlan,
    without=["questions", "categories", "limit", "batch", "format", "keep_prefix", "parallel", "temperature"],
    file="configs/bench/tiny.yaml",
    setting="rest.datastore=FOLDER",
)
def main(
    given: Given,
    shape: Annotated[str | None, typer.Option(help=f"Random weights instead: {', '.join(SHAPES)}.")] = None,
    prompts: Annotated[int, typer.Option(help="How many.")] = 6,
    prompt_tokens: Annotated[int, typer.Option(help="Of each.")] = 256,
    temperatures: Annotated[str, typer.Option(metavar="A,B", help="A table for each.")] = "0,0.8",
    oracle: Annotated[str, typer.Option(metavar="A,B", help="Accuracies of a drafter that knows the answer.")] = "",
    oracle_depths: Annotated[str, typer.Option(metavar="A,B", help="Tokens that it proposes a step.")] = "4,8",
    oracle_figure: Annotated[Path | None, typer.Option(help="Its speed at the first temperature.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Time drafters and transformers' own decoding on held-out code, or on random weights."""
    plan = resolve(EnginePlan, given, where="bench_engine")
    console = Console(width=160)
    engine = engine_of(plan, shape)
    target = engine.target
    if engine.tokenizer is not None:
        asked = held_out_prompts(lambda text: engine.tokenizer(text)["input_ids"], prompts, prompt_tokens)
    else:
        asked = [random_prompt(target.vocab_size, prompt_tokens, seed) for seed in range(prompts)]
    about = describe_environment(target.device) | {"command": shlex.join(["python", *sys.argv])}
    report: dict[str, Any] = {"environment": about, "tables": {}, "oracle": {}}
    size = f"{len(asked)} prompts of {prompt_tokens} tokens, {plan.max_new_tokens} new, {plan.repeats} repeats"
    for temperature in numbers(temperatures, float):
        title, here = f"T={temperature:g}", replace(plan, temperature=temperature)
        with tqdm(total=plan.repeats * len(asked), unit="round", file=sys.stderr) as bar:
            records = answer_prompts(here, engine, asked, bar.update)
        labels = list(dict.fromkeys(record.system for record in records))
        rows = {system: groups[OVERALL] for system, groups in measure(records, labels).rows.items()}
        console.print(table(f"{title}, {size}", rows, records))
        report["tables"][title] = {system: asdict(row) for system, row in rows.items()}
        if not oracle:
            continue
        points = run_oracle(here, engine, asked, numbers(oracle, float), numbers(oracle_depths, int))
        console.print(oracle_table(f"Oracle, {title}, {size}", points))
        if oracle_figure is not None and not report["oracle"]:
            dtype = str(target.dtype).removeprefix("torch.")
            below = f"{shape or plan.model}, {dtype}, {title}, {len(asked)} prompts\n{caption(about)}"
            draw_oracle(points, "What the engine makes of acceptance", below).savefig(oracle_figure)
        report["oracle"][title] = [asdict(p) | {"kept": p.kept, "engine_share": p.engine_share} for p in points]
    report["overhead"] = overhead(engine, asked[0], plan.max_new_tokens)
    console.print(f"engine overhead: a plain step takes {report['overhead']:.3f} x the bare walk of one row")
    curve = measure_cost(target, rows=(1, 2, 4, 8, 16, 32, 64), lengths=(len(asked[0]),))
    report["cost"] = {n: taken / curve.seconds[0][0] for n, taken in zip(curve.rows, curve.seconds[0], strict=True)}
    console.print(cost_table(curve))
    console.print(json.dumps(about))
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    try:
        typer.run(main)
    except SpecdecError as error:
        raise SystemExit(f"error: {error}") from error
