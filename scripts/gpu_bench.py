"""What a GPU makes of specdec at the size of 7 B models, in one call.

    python scripts/gpu_bench.py --out docs/figures/gpu                    # Mistral-7B and Llama-7B shapes, bfloat16
    python scripts/gpu_bench.py --shapes toy --device cpu --dtype float32 --contexts 64 --rows 1,2 --repeats 1

Random weights are made on the device; nothing is fetched, and nothing written but OUT.json and OUT.md. Both are written
anew after every part, so a run that is cut short keeps what it has. A part that fails is recorded with its error, and
the next one goes on.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scripts.checkout import use_checkout

use_checkout()

import torch
import transformers

from drafters.kangaroo.adapter import Adapter, AdapterConfig, fitting_heads
from drafters.medusa.heads import HeadsConfig, MedusaHeads
from specdec import Engine, TransformersTarget
from specdec.bench.environment import MemoryMeter, caption, describe_environment
from specdec.bench.oracle import sweep_oracle
from specdec.bench.plan import Plan
from specdec.bench.records import Output
from specdec.bench.shapes import SHAPES, random_model, random_prompt, weight_bytes
from specdec.bench.systems import make_systems
from specdec.costs.measuring import measure
from specdec.runners import EXECUTIONS
from specdec.runners.attention import BACKENDS
from specdec.settings.arguments import DTYPES
from specdec.settings.files import write_text
from specdec.step.device_copies import wait

LOOKAHEAD = {"name": "lookahead", "window": 15, "ngram": 5, "guesses": 15}
# What a goal is about -> its bound, and whether a smaller or a larger figure reaches it.
GOALS = {
    "plain decoding, share of the copied bandwidth": (0.85, "at least"),
    "T(64) / T(1) at 1,024 tokens, best backend": (1.15, "at most"),
    "oracle, speedup / tokens per step, worst": (0.90, "at least"),
}
BANDWIDTH, ROWS, ORACLE = GOALS
GOAL_ROWS, GOAL_CONTEXT = 64, 1024

Figures = dict[str, Any]


class Report:
    """The figures so far, in a JSON file and a Markdown one beside it."""

    def __init__(self, out: Path, about: Figures) -> None:
        self.json, self.markdown = out.with_suffix(".json"), out.with_suffix(".md")
        self.values: Figures = {**about, "complete": False, "shapes": {}}
        out.parent.mkdir(parents=True, exist_ok=True)

    def run(self, where: Figures, name: str, part: Callable[[], Any]) -> None:
        """Run a part, keep its figures as ``where[name]``, and write all."""
        began = time.perf_counter()
        try:
            where[name] = part()
        except Exception as error:  # an hour's figures must not be lost to one kernel that is missing
            where[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]}
        print(f"{name}: {time.perf_counter() - began:.1f} s {where[name].get('error', '')}", file=sys.stderr)
        self.write()

    def write(self) -> None:
        for path, text in ((self.json, json.dumps(self.values, indent=2) + "\n"), (self.markdown, page(self.values))):
            write_text(path, text)


# -- Parts -------------------------------------------------------------------------------------------------------------


def measure_bandwidth(device: torch.device, nbytes: int, repeats: int = 20) -> dict[str, float]:
    """Bytes per second of a device's memory: of copying a tensor of ``nbytes``, and of summing it."""
    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    sink = torch.empty_like(source)
    best: dict[str, float] = {}
    works: tuple[tuple[str, Callable[[], object], int], ...] = (
        ("copy", lambda: sink.copy_(source), 2 * nbytes),
        ("read", lambda: source.sum(), nbytes),
    )
    for name, work, moved in works:
        times = []
        for _ in range(repeats + 2):
            wait(device)
            began = time.perf_counter()
            work()
            wait(device)
            times.append(time.perf_counter() - began)
        best[name] = moved / min(times[2:])
    return best


def warm_up(target: TransformersTarget, rows: int) -> Figures:
    """Seconds until a step of every bucket was compiled and recorded, so that nothing else is timed with it."""
    began = time.perf_counter()
    target.warm_up(rows)
    wait(target.device)
    return {"seconds": time.perf_counter() - began, "graphs": target.runner.graphs(target.backend)}


def plain(engine: Engine, prompt: list[int], new: int, repeats: int, speed: float) -> Figures:
    """Plain decoding against the time that reading the weights takes; the keys and values come on top."""
    target: Any = engine.target
    memory, seconds = MemoryMeter(target.device), []
    memory.reset()
    for repeat in range(-1, repeats):
        out = engine.with_drafter("none").generate(prompt, new)
        if repeat >= 0:
            seconds.append(out.stats.seconds.decode)
    tokens_per_second = new / statistics.median(seconds)
    weights = weight_bytes(target.model)
    return {
        "context": len(prompt),
        "tokens_per_second": tokens_per_second,
        "weight_bytes": weights,
        "bandwidth_share": tokens_per_second * weights / speed,
        "peak_bytes": memory.read(),
    }


@contextmanager
def attending(target: Any, backend: str) -> Iterator[None]:
    """While inside, attention is by this backend: with ``auto`` steps are replayed from CUDA graphs, else launched."""
    former, target.backend = target.backend, backend
    try:
        yield
    finally:
        target.backend = former


def cost(target: TransformersTarget, context: int, rows: list[int], backend: str, tree: bool) -> Figures:
    """T(rows) after ``context`` tokens, in seconds and in forwards of one row; the rows are a chain or a tree.

    Where the model's context holds no so many with the rows, they are as many as it holds.
    """
    with attending(target, backend):
        curve = measure(target, rows=sorted({1, *rows}), lengths=[context], seconds=math.inf, tree=tree)
    seconds = dict(zip(curve.rows, curve.seconds[0], strict=True))
    return {
        "context": curve.lengths[0],
        "backend": backend,
        "graphs": target.runner.graphs(backend),
        "rows": "tree" if tree else "chain",
        "seconds": seconds,
        "ratio": {count: taken / seconds[1] for count, taken in seconds.items()},
    }


def oracle(engine: Engine, prompt: list[int], new: int, repeats: int) -> Figures:
    points = sweep_oracle(engine, [prompt], max_new_tokens=new, repeats=repeats)
    return {"points": [asdict(p) | {"kept": p.kept, "engine_share": p.engine_share} for p in points]}


def untrained(target: TransformersTarget, folder: Path) -> list[Figures]:
    """Kangaroo and Medusa with random weights.

    Kangaroo's rounds stay on the device, and are short once its guesses are known to be wrong. With an eta they are
    read guess by guess; this one ends none, so that all guesses are made.
    """
    size, vocabulary = target.hidden_size, target.vocab_size
    heads = fitting_heads(size, max(1, size // 128))
    adapter = Adapter(
        AdapterConfig(
            hidden_size=size, vocab_size=vocabulary, heads=heads, exit_layer=min(2, target.num_layers - 1),
            variant="attention", eta=None, gamma=4,
        )
    )  # fmt: skip
    adapter.start_from(target)
    adapter.save_pretrained(folder / "adapter")
    config = HeadsConfig(heads=4, layers=1, hidden_size=size, vocab_size=vocabulary)
    MedusaHeads(config).save_pretrained(folder / "heads")
    kangaroo = {"name": "kangaroo", "adapter": str(folder / "adapter"), "check_target": False}
    return [
        kangaroo,
        {**kangaroo, "label": "kangaroo, eta 0", "eta": 0.0},
        {"name": "medusa", "heads": str(folder / "heads"), "check_target": False},
    ]


def head_to_head(engine: Engine, prompt: list[int], new: int, repeats: int, temperature: float) -> Figures:
    """Drafters and transformers' own decoding, in turn. Random weights cannot be guessed: look at what steps cost."""
    outputs: dict[str, list[Output]] = {}
    with TemporaryDirectory() as folder:
        drafters = ["none", "prompt_lookup", LOOKAHEAD, *untrained(engine.target, Path(folder))]
        rivals = ["transformers", "transformers_lookup"]
        plan = Plan(drafters=drafters, systems=rivals, temperature=temperature, max_new_tokens=new, policy="off")
        systems = [one.system for one in make_systems(plan, engine)[0]]
        for system in systems:
            system.warm_up(prompt, new)
        for _ in range(repeats):
            for system in systems:
                system.reset()
                outputs.setdefault(system.label, []).append(system.answer(prompt, new))
    seconds = {
        label: statistics.median(out.seconds["wall"] - out.seconds["prefill"] for out in outs)
        for label, outs in outputs.items()
    }
    plain = outputs["none"][0].token_ids
    return {
        label: {
            "tokens_per_step": len(out.token_ids) / len(out.accept_lengths),
            "rows_per_step": statistics.mean(out.rows) if out.rows else None,
            "step_ms": 1e3 * seconds[label] / len(out.accept_lengths),
            "tokens_per_second": (len(out.token_ids) - 1) / seconds[label],
            "speedup": seconds["none"] / len(plain) * len(out.token_ids) / seconds[label],
            "draft_share": out.seconds.get("draft", 0.0) / seconds[label],
            "same": out.token_ids == plain,
        }
        for label, (out, *_) in outputs.items()
    }


def backend_runs(name: str, device: str) -> bool:
    """Whether a backend can be had on a device; what it makes of a model is another question."""
    if name in ("aten", "flash") and not device.startswith("cuda"):
        return False
    return name != "flash" or importlib.util.find_spec("flash_attn") is not None


def bench_shape(report: Report, shape: str, args: argparse.Namespace) -> None:
    """All parts for one shape; its model is made here, and gone afterwards."""
    found: Figures = report.values["shapes"].setdefault(shape, {})
    made: list[TransformersTarget] = []

    def build() -> Figures:
        model = random_model(shape, getattr(torch, args.dtype), args.device)
        made.append(TransformersTarget(model, execution=args.execution, owned=True))
        return {"parameters": sum(p.numel() for p in model.parameters()), "execution": args.execution}

    report.run(found, "model", build)
    if not made:
        return
    engine = Engine(made.pop())
    prompt = random_prompt(engine.target.vocab_size, args.prompt_tokens)
    speed = report.values["bandwidth"].get("copy", float("nan"))
    target: Any = engine.target
    report.run(found, "warm up", lambda: warm_up(target, max(args.rows)))
    report.run(found, "plain", lambda: plain(engine, prompt, args.max_new_tokens, args.repeats, speed))
    if args.device.startswith("cuda"):
        with attending(target, "aten"):
            run = lambda: plain(engine, prompt, args.max_new_tokens, args.repeats, speed)  # noqa: E731
            report.run(found, "plain, launched", run)
    for context in [size for size in args.contexts if size <= target.context_length]:
        for backend in args.backends:
            for tree in (False, True):
                report.run(
                    found,
                    f"rows, {context} tokens, {backend}, {'tree' if tree else 'chain'}",
                    lambda t=target, c=context, b=backend, s=tree: cost(t, c, args.rows, b, s),
                )
    report.run(found, "oracle", lambda: oracle(engine, prompt, args.max_new_tokens, args.repeats))
    for temperature in (0.0, 0.8):
        report.run(
            found,
            f"head to head, T={temperature:g}",
            lambda t=temperature: head_to_head(engine, prompt, args.max_new_tokens, args.repeats, t),
        )


# -- The page ----------------------------------------------------------------------------------------------------------


def goals(found: Figures) -> dict[str, float]:
    """The figures of one shape that goals are about, as far as they are there."""
    values: dict[str, float] = {}
    if "bandwidth_share" in found.get("plain", {}):
        values[BANDWIDTH] = found["plain"]["bandwidth_share"]
    seconds = [p["seconds"] for p in costs(found) if p["context"] == GOAL_CONTEXT and GOAL_ROWS in p["seconds"]]
    if seconds:  # the best backend for many rows need not be the best for one
        values[ROWS] = min(s[GOAL_ROWS] for s in seconds) / min(s[1] for s in seconds)
    if found.get("oracle", {}).get("points"):
        values[ORACLE] = min(point["kept"] for point in found["oracle"]["points"])
    return values


def costs(found: Figures) -> list[Figures]:
    return [part for name, part in found.items() if name.startswith("rows") and "ratio" in part]


def page(values: Figures) -> str:
    """The report as Markdown."""
    about, speed = values["environment"], values.get("bandwidth", {})
    lines = ["# specdec on a GPU", ""]
    if not values["complete"]:
        lines += ["This run is not finished.", ""]
    lines += [
        f"{caption(about)}; CUDA {about['cuda']}, Python {about['python']}, {about['cpu']}, {about['cores']} cores.",
        "",
        f"`{values['command']}`",
        "",
    ]
    if "copy" in speed:
        copied, summed = speed["copy"] / 1e9, speed["read"] / 1e9
        lines += [f"Memory bandwidth, measured: {copied:.0f} GB/s of copies, {summed:.0f} GB/s of reads.", ""]
    for shape, found in values["shapes"].items():
        lines += [f"## {shape}", "", *shape_page(found)]
    return "\n".join(lines)


def shape_page(found: Figures) -> Iterable[str]:
    values = goals(found)
    table = [
        [goal, f"{way} {bound:.2f}", f"{values[goal]:.3f}", "yes" if good(values[goal], bound, way) else "no"]
        for goal, (bound, way) in GOALS.items()
        if goal in values
    ]
    yield from sheet(["goal", "bound", "measured", "reached"], table)
    if "tokens_per_second" in (part := found.get("plain", {})):
        weights, peak = part["weight_bytes"] / 1e9, (part["peak_bytes"] or 0) / 1e9
        yield f"Plain decoding after {part['context']} tokens: {part['tokens_per_second']:.1f} tokens/s;"
        yield f"{weights:.2f} GB of weights read a token; {peak:.2f} GB at the peak."
        if "graphs" in found.get("warm up", {}):
            yield f"CUDA graphs: {found['warm up']['graphs']}."
        if "tokens_per_second" in found.get("plain, launched", {}):
            yield f"Launched kernel by kernel: {found['plain, launched']['tokens_per_second']:.1f} tokens/s."
        yield ""
    if costs(found):
        counts = list(costs(found)[0]["ratio"])
        body = [
            [
                str(p["context"]),
                f"{p['backend']}, {p['rows']}",
                f"{1e3 * p['seconds'][1]:.2f}",
                *(f"{p['ratio'][n]:.2f}" for n in counts),
            ]
            for p in costs(found)
        ]
        yield from sheet(["context", "attention", "T(1), ms", *(f"T({n}) / T(1)" for n in counts)], body)
    if points := found.get("oracle", {}).get("points"):
        names = ("depth", "accuracy", "tokens_per_step", "speedup", "kept", "row_cost", "engine_share")
        titles = ["depth", "accuracy", "tokens/step", "speedup", "speedup / tokens", "T(rows) / T(1)", "engine"]
        yield from sheet(titles, [[f"{point[name]:.3g}" for name in names] for point in points])
    for name, part in found.items():
        if name.startswith("head to head") and "none" in part:
            yield f"Decoding alone, {name[14:]}, random weights:"
            yield ""
            titles = ["system", "tokens/step", "rows/step", "step, ms", "of it drafting", "tokens/s", "x plain", "text"]
            yield from sheet(
                titles,
                [
                    [
                        label,
                        f"{one['tokens_per_step']:.2f}",
                        "" if one["rows_per_step"] is None else f"{one['rows_per_step']:.1f}",
                        f"{one['step_ms']:.2f}",
                        f"{one['draft_share']:.0%}",
                        f"{one['tokens_per_second']:.1f}",
                        f"{one['speedup']:.2f}",
                        "the same" if one["same"] else "another",
                    ]
                    for label, one in part.items()
                ],
            )
    for name, part in found.items():
        if "error" in part:
            yield f"- {name} failed: {part['error']}"
            yield ""


def good(value: float, bound: float, way: str) -> bool:
    return value >= bound if way == "at least" else value <= bound


def sheet(titles: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table, or nothing."""
    if not rows:
        return []
    lines = [titles, ["---"] * len(titles), *rows]
    return [*("| " + " | ".join(cells) + " |" for cells in lines), ""]


def main(arguments: list[str] | None = None) -> None:
    def listed(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    def numbers(text: str) -> list[int]:
        return [int(part) for part in listed(text)]

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_bench"), help="report: OUT.json and OUT.md")
    shapes = ["mistral-7b", "llama-7b"]
    parser.add_argument("--shapes", type=listed, default=shapes, help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--execution", choices=EXECUTIONS, default="auto", help="which code runs the layers")
    parser.add_argument("--backends", type=listed, help="of the attention; all that are here")
    parser.add_argument("--contexts", type=numbers, default=[512, 1024, 4096, 16384])
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(arguments)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device here; try the parts with --device cpu --shapes toy --dtype float32")
    if args.backends is None:
        args.backends = [name for name in BACKENDS if backend_runs(name, args.device)]
    for given, known in ((args.shapes, SHAPES), (args.backends, BACKENDS), ([args.dtype], DTYPES[1:])):
        if odd := [name for name in given if name not in known]:
            parser.error(f"{odd[0]!r} is none of {', '.join(known)}")
    transformers.utils.logging.set_verbosity_error()
    device = torch.device(args.device)
    command = " ".join(["python scripts/gpu_bench.py", *(sys.argv[1:] if arguments is None else arguments)])
    report = Report(args.out, {"command": command, "environment": describe_environment(device)})
    report.run(
        report.values, "bandwidth", lambda: measure_bandwidth(device, 1 << (32 if device.type == "cuda" else 24))
    )
    for shape in args.shapes:
        bench_shape(report, shape, args)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    report.values["complete"] = True
    report.write()
    print(report.markdown.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
