"""Speed of the engine, side by side with what a user would pick instead.

    python scripts/bench_engine.py                                 # the embedded model on held-out code
    python scripts/bench_engine.py --model PATH --dtype bfloat16   # any checkpoint
    python scripts/bench_engine.py --shape mistral-7b --dtype bfloat16 --device cuda   # random weights

Systems run in turn, prompt by prompt and repeat by repeat, and every figure is a ratio of medians from the one run, so
that a machine that drifts drifts for all. The last line of each part says what was compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from specdec import Engine, SamplingParams, TransformersTarget
from specdec.bench.metrics import repeat_share
from specdec.block import Block
from specdec.draft import Draft
from training.stdlib_corpus import read_files

SHAPES = {
    "0.5b": LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
        num_key_value_heads=8, max_position_embeddings=4096,
    ),
    "mistral-7b": MistralConfig(sliding_window=4096),
    "llama-7b": LlamaConfig(max_position_embeddings=4096),
}  # fmt: skip
DEFAULT_DRAFTERS = ("none", "jacobi", "prompt_lookup", "lookahead")
GRID = ((5, 3, 3), (5, 5, 5), (7, 5, 7), (10, 5, 10), (15, 5, 15))  # (W, N, G)


@dataclass
class Result:
    """What one system did on one prompt, over the repeats."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    rows: int = 0
    step_seconds: list[float] = field(default_factory=list)
    draft_share: list[float] = field(default_factory=list)


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

    def __init__(self, engine: Engine, drafter: Any, sampling: SamplingParams, budget: int) -> None:
        self.engine, self.sampling, self.budget = engine.with_drafter(drafter), sampling, budget

    def __call__(self, prompt: list[int], result: Result) -> list[int]:
        out = self.engine.generate(prompt, self.budget, self.sampling)
        result.steps, result.rows = out.stats.steps, sum(out.stats.rows)
        result.step_seconds.append(out.stats.seconds.decode / out.stats.steps)
        result.draft_share.append(out.stats.seconds.draft / out.stats.seconds.decode)
        return out.token_ids


class Theirs:
    """Transformers' own generate."""

    def __init__(self, engine: Engine, sampling: SamplingParams, budget: int, **options: Any) -> None:
        self.model = engine.target.model
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
    rounds = [(repeat, index) for repeat in range(-1, repeats) for index in range(len(prompts))]
    for repeat, index in tqdm(rounds, unit="round", file=sys.stderr):
        if repeat < 0 and index > 0:
            continue  # one prompt warms up
        for name, system in systems.items():
            result = results[name][index] if repeat >= 0 else Result()
            began = time.perf_counter()
            result.tokens = system(prompts[index], result)
            if device.type == "cuda":
                torch.cuda.synchronize()
            result.seconds.append(time.perf_counter() - began)
    return results


def speed(results: list[Result]) -> float:
    """New tokens per second: over the prompts, medians of the repeats."""
    return sum(len(r.tokens) for r in results) / sum(statistics.median(r.seconds) for r in results)


def draft_share(results: list[Result]) -> float:
    """Share of the decoding time that drafting takes, observing included: over the prompts, medians of the repeats."""
    return statistics.mean(statistics.median(r.draft_share) for r in results)


def bare_forward(engine: Engine, prompt: list[int], rows: int, repeats: int = 200) -> float:
    """Median seconds of the target's walk alone for ``rows`` rows after the prompt: no draft, no verifying."""
    target = engine.target
    with target.active():
        cache = target.new_cache(capacity=len(prompt) + 256, rows=max(512, rows))
        for start in range(0, len(prompt), 512):
            target.forward(Block(cache, prompt[start : start + 512], device=target.device), rows=())
            cache.commit(range(len(prompt[start : start + 512])))
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            target.forward(Block.of(Draft.chain(prompt[:rows]), cache, target.device, target.backend))
            if target.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def overhead(engine: Engine, prompt: list[int], budget: int) -> float:
    """Step time of plain decoding by the walk alone at the same context, interleaved; median of five."""
    ratios = []
    for _ in range(5):
        out = engine.with_drafter("none").generate(prompt, budget)
        middle = [*prompt, *out.token_ids[: len(out.token_ids) // 2]]  # attention at the mean context
        ratios.append(out.stats.seconds.decode / out.stats.steps / bare_forward(engine, middle, 1))
    return statistics.median(ratios)


def table(title: str, results: dict[str, list[Result]], reference: str, rivals: dict[str, str]) -> Table:
    sheet = Table(title=title, title_justify="left")
    for column in (
        "system",
        "new tokens",
        "tokens/step",
        "rows/step",
        "draft",
        "tokens/s",
        f"x {reference}",
        "x rival",
        "repeats",
        "text",
    ):
        sheet.add_column(column, justify="left" if column in ("system", "text") else "right")
    base = speed(results[reference])
    for name, rows in results.items():
        tokens, steps = sum(len(r.tokens) for r in rows), sum(r.steps for r in rows)
        same = all(r.tokens == b.tokens for r, b in zip(rows, results[reference], strict=True))
        rival = f"{speed(rows) / speed(results[rivals[name]]):.2f} {rivals[name]}" if name in rivals else ""
        forwarded = sum(r.rows for r in rows)
        sheet.add_row(
            name, str(tokens), f"{tokens / steps:.2f}" if steps else "", f"{forwarded / steps:.1f}" if steps else "",
            f"{draft_share(rows):.0%}" if steps else "", f"{speed(rows):.1f}", f"{speed(rows) / base:.2f}", rival,
            f"{statistics.mean(repeat_share(r.tokens) for r in rows):.0%}", "same" if same else "differs",
        )  # fmt: skip
    return sheet


def load(args: argparse.Namespace) -> Engine:
    if args.shape is None:
        return Engine.from_pretrained(
            args.model, dtype=args.dtype, device=args.device, attention=args.attention, optimize=args.optimize
        )
    torch.manual_seed(0)
    dtype = torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)
    with torch.device(args.device or "cpu"):
        model = AutoModelForCausalLM.from_config(SHAPES[args.shape], dtype=dtype)
    return Engine(TransformersTarget(model, attention=args.attention, optimize=args.optimize))


def environment(args: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": device,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape instead of a checkpoint")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--optimize", choices=("auto", "off"), default="auto", help="off: transformers' own layers")
    parser.add_argument("--drafters", default=",".join(DEFAULT_DRAFTERS))
    parser.add_argument("--datastore", help="for rest; see `specdec datastore build`")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--grid", action="store_true", help="lookahead at several (W, N, G), beside prompt lookup")
    parser.add_argument("--no-transformers", action="store_true", help="leave out transformers' own generate")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    console = Console(width=150)
    engine = load(args)
    target = engine.target
    if engine.tokenizer is not None:
        prompts = held_out_prompts(lambda text: engine.tokenizer(text)["input_ids"], args.prompts, args.prompt_tokens)
    else:  # random weights: the prompt's content does not matter, its length does
        generator = torch.Generator().manual_seed(0)
        size = (args.prompts, args.prompt_tokens)
        prompts = torch.randint(target.vocab_size, size, generator=generator).tolist()
    report: dict[str, Any] = {"environment": environment(args), "tables": {}}
    names = [name for name in args.drafters.split(",") if name]
    for temperature in map(float, args.temperatures.split(",")):
        sampling = SamplingParams(temperature=temperature)
        given = {"rest": {"name": "rest", "datastore": args.datastore}}
        systems: dict[str, Any] = {
            name: Ours(engine, given.get(name, name), sampling, args.max_new_tokens) for name in names
        }
        if args.grid:
            for w, n, g in GRID:
                for pool in (False, True):
                    options = {"name": "lookahead", "window": w, "ngram": n, "guesses": g, "pool_from_prompt": pool}
                    name = f"lookahead {w},{n},{g}" + (" +prompt" if pool else "")
                    systems[name] = Ours(engine, options, sampling, args.max_new_tokens)
        rivals = {}
        if not args.no_transformers:
            systems["transformers"] = Theirs(engine, sampling, args.max_new_tokens)
            systems["transformers lookup"] = Theirs(engine, sampling, args.max_new_tokens, prompt_lookup_num_tokens=10)
            rivals = dict.fromkeys(names, "transformers")
            if "prompt_lookup" in names:
                rivals["prompt_lookup"] = "transformers lookup"
        results = run(systems, prompts, args.repeats, target.device)
        size = (
            f"{len(prompts)} prompts of {args.prompt_tokens} tokens, {args.max_new_tokens} new, {args.repeats} repeats"
        )
        console.print(table(f"T={temperature:g}, {size}", results, names[0], rivals))
        report["tables"][f"T={temperature:g}"] = {
            name: {
                "tokens": sum(len(r.tokens) for r in rows),
                "steps": sum(r.steps for r in rows),
                "rows": sum(r.rows for r in rows),
                "tokens_per_second": speed(rows),
                "draft_share": draft_share(rows) if rows[0].draft_share else None,
                "repeat_share": statistics.mean(repeat_share(r.tokens) for r in rows),
            }
            for name, rows in results.items()
        }
    report["overhead"] = overhead(engine, prompts[0], args.max_new_tokens)
    console.print(f"engine overhead: a plain step takes {report['overhead']:.3f} x the bare walk of one row")
    one = bare_forward(engine, prompts[0], 1)
    report["cost"] = {rows: bare_forward(engine, prompts[0], rows, 50) / one for rows in (1, 2, 4, 8, 16, 32, 64)}
    console.print(
        "rows -> cost in plain steps: " + ", ".join(f"{rows}: {cost:.2f}" for rows, cost in report["cost"].items())
    )
    console.print(json.dumps(report["environment"]))
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
