"""Speed of the engine, side by side with what a user would pick instead.

    python scripts/bench_engine.py                                 # the embedded model on held-out code
    python scripts/bench_engine.py --model PATH --dtype bfloat16   # any checkpoint
    python scripts/bench_engine.py --shape mistral-7b --dtype bfloat16 --device cuda   # random weights
    python scripts/bench_engine.py --oracle .5,.7,.9,1 --drafters none   # what the engine makes of acceptance

Systems run in turn, prompt by prompt and repeat by repeat, and every figure is a ratio of medians from the one run, so
that a machine that drifts drifts for all. The last line of each part says what was compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from drafters.stdlib_corpus import read_files
from specdec import Engine, SamplingParams, TransformersTarget
from specdec.bench.environment import MemoryMeter, caption, describe_environment
from specdec.bench.figures import new_figure, sign, tidy
from specdec.bench.metrics import repeat_share
from specdec.bench.oracle import OraclePoint, sweep_oracle
from specdec.bench.shapes import SHAPES, random_model, random_prompt
from specdec.config import ModelOptions
from specdec.copies import wait
from specdec.cost import measure
from specdec.load import load as load_model
from specdec.runners import EXECUTIONS

DEFAULT_DRAFTERS = ("none", "jacobi", "prompt_lookup", "lookahead")
GRID = ((5, 3, 3), (5, 5, 5), (7, 5, 7), (10, 5, 10), (15, 5, 15))  # (W, N, G)


@dataclass
class Result:
    """What one system did on one prompt, over the repeats."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    rows: int = 0
    draft_share: list[float] = field(default_factory=list)  # of the decoding time
    memory: int = 0  # peak bytes


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


class Ours:
    """A drafter in our engine."""

    def __init__(self, engine: Engine, drafter: Any, sampling: SamplingParams, new: int, policy: str = "off") -> None:
        self.engine, self.sampling, self.new = engine.with_drafter(drafter, policy=policy), sampling, new

    def __call__(self, prompt: list[int], result: Result) -> list[int]:
        out = self.engine.generate(prompt, self.new, self.sampling)
        result.steps, result.rows = out.stats.steps, sum(out.stats.rows)
        result.draft_share.append(out.stats.seconds.draft / out.stats.seconds.decode)
        return out.token_ids


class Theirs:
    """Transformers' own generate."""

    def __init__(self, engine: Engine, sampling: SamplingParams, budget: int, **options: Any) -> None:
        self.model = engine.target.plain_model()  # ours may have repacked its weights
        self.options = {"max_new_tokens": budget, "do_sample": sampling.temperature > 0, **options}
        if sampling.temperature > 0:
            self.options |= {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}

    def __call__(self, prompt: list[int], result: Result) -> list[int]:
        torch.manual_seed(0)
        ids = torch.tensor([prompt], device=self.model.device)
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **self.options)
        return out[0, len(prompt) :].tolist()


def run(
    systems: dict[str, Any], prompts: list[list[int]], repeats: int, device: torch.device
) -> dict[str, list[Result]]:
    """Every system on every prompt, ``repeats`` times, interleaved; one round before it that is not counted."""
    results = {name: [Result() for _ in prompts] for name in systems}
    memory = MemoryMeter(device)
    rounds = [(repeat, index) for repeat in range(-1, repeats) for index in range(len(prompts))]
    for repeat, index in tqdm(rounds, unit="round", file=sys.stderr):
        if repeat < 0 and index > 0:
            continue  # one prompt warms up
        for name, system in systems.items():
            result = results[name][index] if repeat >= 0 else Result()
            memory.reset()
            began = time.perf_counter()
            result.tokens = system(prompts[index], result)
            wait(device)
            result.seconds.append(time.perf_counter() - began)
            result.memory = max(result.memory, memory.read() or 0)
    return results


def speed(results: list[Result]) -> float:
    """New tokens per second: over the prompts, medians of the repeats."""
    return sum(len(r.tokens) for r in results) / sum(statistics.median(r.seconds) for r in results)


def overhead(engine: Engine, prompt: list[int], budget: int) -> float:
    """Step time of plain decoding by the walk alone at the same context, interleaved; median of five."""
    ratios = []
    for _ in range(5):
        out = engine.with_drafter("none").generate(prompt, budget)
        middle = len(prompt) + len(out.token_ids) // 2  # attention at the mean context
        bare = measure(engine.target, rows=(1,), lengths=(middle,)).seconds[0][0]
        ratios.append(out.stats.seconds.decode / out.stats.steps / bare)
    return statistics.median(ratios)


COLUMNS = ("system", "new tokens", "tokens/step", "rows/step", "drafting", "tokens/s", "x {}", "x rival", "peak MiB",
           "repeats", "text")  # fmt: skip


def sheet_of(title: str, columns: tuple[str, ...]) -> Table:
    sheet = Table(title=title, title_justify="left")
    for column in columns:
        sheet.add_column(column, justify="left" if column in ("system", "text") else "right")
    return sheet


def table(title: str, results: dict[str, list[Result]], reference: str, rivals: dict[str, str]) -> Table:
    sheet = sheet_of(title, tuple(column.format(reference) for column in COLUMNS))
    base = speed(results[reference])
    for name, rows in results.items():
        tokens, steps = sum(len(r.tokens) for r in rows), sum(r.steps for r in rows)
        same = all(r.tokens == b.tokens for r, b in zip(rows, results[reference], strict=True))
        rival = f"{speed(rows) / speed(results[rivals[name]]):.2f} {rivals[name]}" if name in rivals else ""
        forwarded = sum(r.rows for r in rows)
        sheet.add_row(
            name, str(tokens), f"{tokens / steps:.2f}" if steps else "", f"{forwarded / steps:.1f}" if steps else "",
            f"{draft_share(rows):.0%}" if steps else "", f"{speed(rows):.1f}", f"{speed(rows) / base:.2f}", rival,
            f"{peak / 2**20:.0f}" if (peak := max(r.memory for r in rows)) else "",
            f"{statistics.mean(repeat_share(r.tokens) for r in rows):.0%}", "same" if same else "differs",
        )  # fmt: skip
    return sheet


def draft_share(results: list[Result]) -> float:
    """Drafting's share of the decoding time: the mean over prompts of the repeats' medians."""
    return statistics.mean(statistics.median(r.draft_share) for r in results)


def figures(results: dict[str, list[Result]]) -> dict[str, dict[str, float]]:
    """What the table shows, for the JSON file."""
    return {
        name: {
            "tokens": sum(len(r.tokens) for r in rows),
            "steps": sum(r.steps for r in rows),
            "rows": sum(r.rows for r in rows),
            "draft_share": draft_share(rows) if rows[0].steps else 0.0,
            "tokens_per_second": speed(rows),
            "peak_bytes": max(r.memory for r in rows),
            "repeat_share": statistics.mean(repeat_share(r.tokens) for r in rows),
        }
        for name, rows in results.items()
    }


def oracle_table(title: str, points: list[OraclePoint]) -> Table:
    columns = ("depth", "accuracy", "tokens/step", "x plain", "x plain / tokens", "T(rows)/T(1)", "engine", "text")
    sheet = sheet_of(title, columns)
    for p in points:
        numbers = (p.tokens_per_step, p.speedup, p.kept, p.row_cost, p.engine_share)
        cells = [str(p.depth), f"{p.accuracy:g}", *(f"{number:.2f}" for number in numbers)]
        sheet.add_row(*cells, "same" if p.same else "differs")
    return sheet


def load(args: argparse.Namespace) -> Engine:
    if args.shape is None:
        names = ("model", "dtype", "device", "attention", "execution", "threads")
        return load_model(ModelOptions(**{name: getattr(args, name) for name in names}))
    dtype = torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)
    model = random_model(args.shape, dtype, args.device or "cpu")
    return Engine(TransformersTarget(model, attention=args.attention, execution=args.execution, owned=True))


def systems_of(args: argparse.Namespace, engine: Engine, sampling: SamplingParams) -> tuple[dict[str, Any], Any]:
    """Name -> what to run, the reference first; and name -> the rival that it is compared with."""
    names = [name for name in args.drafters.split(",") if name]
    given = {
        "rest": {"name": "rest", "datastore": args.datastore},
        "medusa": {"name": "medusa", "heads": args.heads},
    }
    systems: dict[str, Any] = {
        name: Ours(
            engine, given.get(name, name), sampling, args.max_new_tokens, "off" if name == "none" else args.policy
        )
        for name in names
    }
    if args.grid:
        for w, n, g in GRID:
            for pool in (False, True):
                options = {"name": "lookahead", "window": w, "ngram": n, "guesses": g, "pool_from_prompt": pool}
                name = f"lookahead {w},{n},{g}" + (" +prompt" if pool else "")
                systems[name] = Ours(engine, options, sampling, args.max_new_tokens)
    if args.no_transformers:
        return systems, {}
    systems["transformers"] = Theirs(engine, sampling, args.max_new_tokens)
    systems["transformers lookup"] = Theirs(engine, sampling, args.max_new_tokens, prompt_lookup_num_tokens=10)
    rivals = dict.fromkeys(names, "transformers")
    if "prompt_lookup" in names:
        rivals["prompt_lookup"] = "transformers lookup"
    return systems, rivals


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape instead of a checkpoint")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--execution", choices=EXECUTIONS, default="auto", help="which code runs the layers")
    parser.add_argument("--drafters", default=",".join(DEFAULT_DRAFTERS), help="the first one is the reference")
    parser.add_argument("--policy", default="acceptance", help="of our drafters: acceptance, cost, a cost file or off")
    parser.add_argument("--datastore", help="for rest; see `specdec datastore build`")
    parser.add_argument("--heads", help="for medusa; a folder that training wrote, instead of the shipped ones")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--grid", action="store_true", help="lookahead at several (W, N, G), beside prompt lookup")
    parser.add_argument("--oracle", default="", metavar="A,B", help="accuracies of a drafter that knows the answer")
    parser.add_argument("--oracle-depths", default="4,8", metavar="A,B", help="tokens that it proposes a step")
    parser.add_argument("--oracle-figure", type=Path, metavar="PNG", help="its speed at the first temperature")
    parser.add_argument("--no-transformers", action="store_true", help="leave out transformers' own generate")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


def run_oracle(
    args: argparse.Namespace, engine: Engine, prompts: list[list[int]], sampling: SamplingParams, title: str
) -> list[OraclePoint]:
    accuracies, depths = [float(a) for a in args.oracle.split(",")], [int(d) for d in args.oracle_depths.split(",")]
    with tqdm(total=(args.repeats + 1) * len(prompts), unit="round", file=sys.stderr) as bar:
        points = sweep_oracle(
            engine, prompts, accuracies=accuracies, depths=depths, max_new_tokens=args.max_new_tokens,
            repeats=args.repeats, sampling=sampling, on_round=bar.update,
        )  # fmt: skip
    if args.oracle_figure and sampling.temperature == float(args.temperatures.split(",")[0]):
        dtype, about = str(engine.target.dtype).removeprefix("torch."), describe_environment(engine.target.device)
        below = f"{args.shape or args.model}, {dtype}, {title}, {len(prompts)} prompts\n{caption(about)}"
        draw_oracle(points, "What the engine makes of acceptance", below).savefig(args.oracle_figure)
    return points


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


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    console = Console(width=160)
    engine = load(args)
    target = engine.target
    if engine.tokenizer is not None:
        prompts = held_out_prompts(lambda text: engine.tokenizer(text)["input_ids"], args.prompts, args.prompt_tokens)
    else:
        prompts = [random_prompt(target.vocab_size, args.prompt_tokens, seed) for seed in range(args.prompts)]
    about = describe_environment(target.device) | {"command": " ".join(["python", *sys.argv])}
    report: dict[str, Any] = {"environment": about, "tables": {}, "oracle": {}}
    size = f"{len(prompts)} prompts of {args.prompt_tokens} tokens, {args.max_new_tokens} new, {args.repeats} repeats"
    for temperature in map(float, args.temperatures.split(",")):
        title, sampling = f"T={temperature:g}", SamplingParams(temperature=temperature)
        systems, rivals = systems_of(args, engine, sampling)
        results = run(systems, prompts, args.repeats, target.device)
        console.print(table(f"{title}, {size}", results, next(iter(systems)), rivals))
        report["tables"][title] = figures(results)
        if args.oracle:
            points = run_oracle(args, engine, prompts, sampling, title)
            console.print(oracle_table(f"Oracle, {title}, {size}", points))
            report["oracle"][title] = [asdict(p) | {"kept": p.kept, "engine_share": p.engine_share} for p in points]
    report["overhead"] = overhead(engine, prompts[0], args.max_new_tokens)
    console.print(f"engine overhead: a plain step takes {report['overhead']:.3f} x the bare walk of one row")
    curve = measure(target, rows=(1, 2, 4, 8, 16, 32, 64), lengths=(len(prompts[0]),))
    report["cost"] = {
        rows: taken / curve.seconds[0][0] for rows, taken in zip(curve.rows, curve.seconds[0], strict=True)
    }
    shown = ", ".join(f"{rows}: {cost:.2f}" for rows, cost in report["cost"].items())
    console.print(f"rows -> cost in plain steps: {shown}")
    console.print(json.dumps(about))
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
