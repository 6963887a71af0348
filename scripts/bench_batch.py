"""Many prompts at once: throughput and latency over the batch size, beside transformers' own batched generate.

    python scripts/bench_batch.py --model PATH --threads 2 --batch 1,2,4,8 --drafters none,auto

All prompts are there at the start, of unequal lengths. Systems and batch sizes take turns, repeat by repeat; a figure
is the median of the repeats. Latencies are over all prompts and repeats: the time to the first token, waiting for a
place in the batch included, and the time between tokens, a step's tokens sharing the time since the step before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench_engine import held_out_prompts, sheet_of

from specdec import Engine, SamplingParams
from specdec.batch import Request, Scheduler
from specdec.bench.environment import caption, describe_environment, synchronize
from specdec.bench.figures import new_figure, sign, tidy
from specdec.config import ModelOptions
from specdec.load import load

RIVAL = "transformers"
COLUMNS = ("system", "batch", "tokens/s", "x batch 1", "x transformers", "tokens/step", "first token ms", "p95",
           "between ms", "p95", "host us", "text")  # fmt: skip


@dataclass
class Run:
    """One system at one batch size."""

    seconds: list[float] = field(default_factory=list)  # per repeat
    tokens: dict[int, list[int]] = field(default_factory=dict)  # of the latest repeat
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)  # seconds outside of forwards, per step of a sequence
    steps: int = 0

    @property
    def speed(self) -> float:
        return sum(map(len, self.tokens.values())) / statistics.median(self.seconds)

    def figures(self) -> dict[str, Any]:
        """For the table and the JSON file."""
        tokens = sum(map(len, self.tokens.values()))
        found: dict[str, Any] = {"tokens": tokens, "tokens_per_second": self.speed}
        if self.steps:
            found |= {"tokens_per_step": tokens / self.steps, "host_us": 1e6 * statistics.median(self.host)}
            for name, values in (("first_ms", self.first), ("between_ms", self.between)):
                found[name] = [1e3 * statistics.median(values), 1e3 * statistics.quantiles(values, n=20)[-1]]
        return found


def ours(engine: Engine, prompts: list[list[int]], new: int, sampling: SamplingParams, batch: int, run: Run) -> None:
    """Drive a scheduler to the end, and note when each step came."""
    began = time.perf_counter()
    last: dict[int, float] = {}
    scheduler = Scheduler(engine, [Request(prompt, new, {"sampling": sampling}) for prompt in prompts], batch=batch)
    done = []
    with engine.target.active():
        for events in scheduler.run():
            now = time.perf_counter()
            for event in events:
                if event.error is not None or event.decoding is None or event.step is None:
                    raise event.error or RuntimeError("a prompt failed")
                if event.index in last:
                    count = len(event.step.tokens)
                    run.between += [(now - last[event.index]) / count] * count
                else:
                    run.first.append(now - began)
                last[event.index] = now
                if event.last:
                    done.append(event.decoding.stats)
                    run.tokens[event.index] = event.decoding.tokens[len(prompts[event.index]) :]
    seconds = time.perf_counter() - began
    run.steps = sum(one.steps for one in done)
    run.host.append((seconds - sum(one.seconds.target + one.seconds.prefill for one in done)) / run.steps)
    run.seconds.append(seconds)


def theirs(model: Any, prompts: list[list[int]], new: int, sampling: SamplingParams, batch: int, run: Run) -> None:
    """Transformers' generate on left-padded batches, in the prompts' order."""
    options = {"max_new_tokens": new, "do_sample": sampling.temperature > 0, "pad_token_id": 0}
    if sampling.temperature > 0:
        options |= {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
    began = time.perf_counter()
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        width = max(map(len, some))
        ids = torch.tensor([[0] * (width - len(one)) + one for one in some], device=model.device)
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in some], device=model.device)
        out = model.generate(ids, attention_mask=mask, **options)[:, width:].tolist()
        run.tokens |= {start + row: _cut(tokens, model) for row, tokens in enumerate(out)}
    synchronize(model.device)
    run.seconds.append(time.perf_counter() - began)


def _cut(tokens: list[int], model: Any) -> list[int]:
    """Up to the token that ends the text; what follows is padding."""
    eos = torch.as_tensor(model.generation_config.eos_token_id or ()).flatten().tolist()
    ends = [place for place, token in enumerate(tokens, 1) if token in eos]
    return tokens[: ends[0]] if ends else tokens


def draw(runs: dict[str, dict[int, Run]], title: str, foot: str) -> Any:
    """Speedup over batch size: tokens per second by those of plain decoding one by one."""
    figure = new_figure(6.0, 4.2)
    axes = figure.subplots()
    base = runs["none"][min(runs["none"])].speed
    for name, sizes in runs.items():
        axes.plot(list(sizes), [run.speed / base for run in sizes.values()], marker="o", label=name)
    tidy(axes, title, "sequences at once", "tokens/s, x plain decoding one by one")
    axes.legend(frameon=False)
    sign(figure, foot)
    return figure


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    for name in ("dtype", "execution"):
        parser.add_argument(f"--{name}", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--batch", default="1,2,4,8")
    parser.add_argument("--drafters", default="none,auto", help="none is always run")
    parser.add_argument("--policy", default="acceptance")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of the longest; the shortest has half as many")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    engine = load(ModelOptions(**{n: getattr(args, n) for n in ("model", "dtype", "device", "execution", "threads")}))
    sizes = [int(size) for size in args.batch.split(",")]
    names = list(dict.fromkeys(["none", *args.drafters.split(",")]))
    sampling = SamplingParams(temperature=args.temperature)
    whole = held_out_prompts(lambda text: list(engine.tokenizer(text)["input_ids"]), args.prompts, args.prompt_tokens)
    half = args.prompt_tokens // 2
    prompts = [ids[: half + (len(ids) - half) * (place * 7 % 16) // 15] for place, ids in enumerate(whole)]
    drivers: dict[str, Any] = {name: (ours, engine.with_drafter(name, policy=args.policy)) for name in names}
    if not args.no_transformers:
        drivers[RIVAL] = (theirs, engine.target.plain_model())
    runs: dict[str, dict[int, Run]] = defaultdict(dict)
    for repeat in tqdm(range(-1, args.repeats), unit="repeat", file=sys.stderr):
        for size in sizes:
            for name, (drive, driven) in drivers.items():
                some = prompts[:size] if repeat < 0 else prompts  # the first round warms up
                run = Run() if repeat < 0 else runs[name].setdefault(size, Run())
                drive(driven, some, args.max_new_tokens, sampling, size, run)
    environment = describe_environment(engine.target.device)
    foot = caption(environment)
    title = f"{args.model}, T={args.temperature:g}, {len(prompts)} prompts, {args.max_new_tokens} new tokens"
    sheet = sheet_of(title, COLUMNS)
    for name, found in runs.items():
        for size, run in found.items():
            figures = run.figures()
            rival = runs[RIVAL][size].speed if RIVAL in runs else None
            times = [*figures.get("first_ms", ()), *figures.get("between_ms", ())]
            sheet.add_row(
                name, str(size), f"{run.speed:.1f}", f"{run.speed / found[sizes[0]].speed:.2f}",
                f"{run.speed / rival:.2f}" if rival else "", f"{figures.get('tokens_per_step', 1):.2f}",
                *([f"{t:.1f}" for t in times] or [""] * 4),
                f"{figures['host_us']:.0f}" if run.steps else "",
                "same" if run.tokens == runs["none"][sizes[0]].tokens else "differs",
            )  # fmt: skip
    Console(width=160).print(sheet)
    Console(width=160).print(foot)
    if args.figure is not None:
        draw(runs, title, foot).savefig(args.figure)
    if args.out is not None:
        tables = {name: {size: run.figures() for size, run in found.items()} for name, found in runs.items()}
        report = {"title": title, "environment": environment, "systems": tables}
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
