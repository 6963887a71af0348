"""Kangaroo's choices, measured: exit layer, adapter variant, eta, gamma, branch (the paper's Figure 3 and Table 2).

    python scripts/ablate_kangaroo.py --out runs/ablate

All adapters are trained at once on the same batches, so that the frozen target runs once for all of them; then every
setting decodes the same held-out prompts. The run continues where it was interrupted. Writes ``table.md``,
``figures.json`` and ``plot.png``.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from matplotlib.figure import Figure
from torch import nn

from drafters.adapter import Adapter
from drafters.kangaroo import Kangaroo, KangarooConfig
from specdec import Engine, SamplingParams
from specdec.config import load_yaml, parse
from specdec.errors import SpecdecError
from training.acceptance import continued_texts
from training.data import Skips, read_samples
from training.features import FrozenTarget
from training.kangaroo import Config, KangarooTraining, new_adapter, soft_loss
from training.loop import new_accelerator, train
from training.packing import Batch, pack


class Together:
    """Several adapters as one trainable: the same target pass feeds them all."""

    metric = "mean"

    def __init__(self, parts: dict[str, KangarooTraining], every: int) -> None:
        self.parts, self.every = parts, every
        self.module: nn.Module = nn.ModuleDict({name: part.adapter for name, part in parts.items()})
        target = next(iter(parts.values())).frozen.target
        self.frozen = FrozenTarget(target, [part.adapter.config.exit_layer for part in parts.values()])

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        # One target in `every` is enough for a comparison; the head over the vocabulary is most of an adapter's cost.
        batch = replace(batch, targets=batch.targets[:: self.every])
        features, states = self.frozen.read(batch)
        with torch.no_grad():
            wanted = self.frozen.head(states).float()
        total = torch.zeros(())
        for part in self.parts.values():
            early = features[part.adapter.config.exit_layer].float()
            guess = part.adapter(early, batch.positions, self.frozen.head, mask=batch.mask, rows=batch.targets)
            total = total + soft_loss(guess.float(), wanted)
        return total * self.every / len(self.parts)

    def evaluate(self) -> dict[str, float]:
        scores = {name: part.evaluate()["tokens_per_step"] for name, part in self.parts.items()}
        return {**scores, "mean": sum(scores.values()) / len(scores)}

    def save(self, folder: Path) -> None:
        for name, part in self.parts.items():
            part.save(folder / name)


Figures = dict[str, float]
Group = dict[str, dict[str, Figures]]
"""Setting -> temperature -> figures."""


def compare(
    plain: Engine, settings: dict[str, Kangaroo], prompts: Sequence[Sequence[int]], args: argparse.Namespace
) -> Group:
    """Every setting against plain decoding, prompt by prompt in turn; decoding time only, the prefill is the same.

    A prompt's time is the median of its rounds, a setting's speed what its prompts' times add up to.
    """
    engines = {"none": plain, **{name: plain.with_drafter(drafter, policy="off") for name, drafter in settings.items()}}
    found: Group = {name: {} for name in engines}
    for temperature in args.temperatures:
        sampling = SamplingParams(temperature=temperature)
        seconds: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in engines}
        counts = dict.fromkeys(engines, (0, 0, 0))
        for _ in range(args.rounds):
            for number, prompt in enumerate(prompts):
                for name, engine in engines.items():
                    stats = engine.generate(prompt, args.new, sampling).stats
                    seconds[name][number].append(stats.seconds.decode / stats.new_tokens)
                    counts[name] = tuple(
                        a + b
                        for a, b in zip(counts[name], (stats.new_tokens, stats.steps, sum(stats.rows)), strict=True)
                    )
        per_token = {name: sum(map(statistics.median, times)) for name, times in seconds.items()}
        for name, (tokens, steps, rows) in counts.items():
            found[name][f"{temperature:g}"] = {
                "tokens_per_step": tokens / steps,
                "rows_per_step": rows / steps,
                "speedup": per_token["none"] / per_token[name],
            }
    return found


def drafter_of(adapter: Path, plain: Engine, **options: object) -> Kangaroo:
    return Kangaroo.build(parse(KangarooConfig, {"adapter": str(adapter), **options}, where="kangaroo"), plain.target)


def table(title: str, found: Group) -> str:
    temperatures = list(next(iter(found.values())))
    heads = " | ".join(f"T={t}: tokens per step | rows | speedup" for t in temperatures)
    lines = [f"### {title}", "", f"| setting | {heads} |", "|---|" + "---:|" * (3 * len(temperatures))]
    for name, by_temperature in found.items():
        cells = [f"{v:.2f}" for t in temperatures for v in by_temperature[t].values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(groups: dict[str, Group], path: Path) -> None:
    """Tokens per step above, speedup below, a column for each group and a line for each temperature."""
    figure = Figure(figsize=(3 * len(groups), 5), layout="constrained")
    grid = figure.subplots(2, len(groups), squeeze=False, sharey="row", sharex="col")
    shown = {"tokens_per_step": "tokens per step", "speedup": "speedup over plain decoding"}
    for column, (title, found) in enumerate(groups.items()):
        names = [name for name in found if name != "none"]
        for axes, (key, label) in zip(grid[:, column], shown.items(), strict=True):
            for temperature in next(iter(found.values())):
                axes.plot(names, [found[n][temperature][key] for n in names], marker="o", label=f"T={temperature}")
            axes.axhline(1, color="grey", linewidth=0.8)
            axes.tick_params(axis="x", rotation=40, labelsize=8)
            if column == 0:
                axes.set_ylabel(label, fontsize=9)
        grid[0, column].set_title(title, fontsize=10)
    grid[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def environment() -> dict[str, object]:
    """What a figure is worth nothing without."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/train/kangaroo.yaml"))
    parser.add_argument("--out", type=Path, default=Path("runs/ablate"))
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3, 4, 6])
    parser.add_argument("--variant-layer", type=int, default=4, help="exit layer of the four variants")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=4, help="train on one token in this many")
    parser.add_argument("--eta", type=float, nargs="+", default=[0.0, 0.2, 0.4, 0.6, 0.8])
    parser.add_argument("--gamma", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--branch", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tuned", type=Path, help="adapter for eta, gamma and branch; without it, the attention one")
    parser.add_argument("--threads", type=int, default=0, help="0 leaves torch's own choice")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    config = parse(Config, load_yaml(args.config), where=str(args.config))
    loop = replace(config.loop, steps=args.steps, eval_every=max(1, args.steps // 4), wandb="off")
    accelerator = new_accelerator(loop)
    plain = Engine.from_pretrained(config.model, device=accelerator.device)
    samples = list(read_samples(config.data, plain.tokenizer, config.text, Skips()))
    held = [sample for sample in samples if sample.held_out]
    texts = continued_texts(Engine(plain.target), held, replace(config.evaluation, prompts=args.prompts, new=args.new))
    kinds = {f"l={layer}": (layer, "attention") for layer in args.layers}
    kinds |= {variant: (args.variant_layer, variant) for variant in ("head", "layer", "mlp")}
    parts: dict[str, KangarooTraining] = {}
    for name, (layer, variant) in kinds.items():
        adapter: Adapter = new_adapter(replace(config.adapter, exit_layer=layer, variant=variant), plain.target)
        parts[name] = KangarooTraining(adapter, plain.target, texts)
    windows = pack([sample for sample in samples if not sample.held_out], config.text.length)
    train(Together(parts, args.every), windows, loop, accelerator, args.out, run={"kinds": kinds, "every": args.every})

    prompts = [text.tokens[: text.prompt] for text in texts]
    last = args.out / "last"
    same = last / f"l={args.variant_layer}" if args.tuned is None else args.tuned
    names = {**{n: n for n in kinds}, f"l={args.variant_layer}": "attention"}
    groups = {
        "exit layer": {f"l={layer}": drafter_of(last / f"l={layer}", plain) for layer in args.layers},
        "variant": {
            names[n]: drafter_of(last / n, plain) for n, (layer, _) in kinds.items() if layer == args.variant_layer
        },
        "eta": {f"{eta:g}": drafter_of(same, plain, eta=eta) for eta in args.eta},
        "gamma": {f"{gamma}": drafter_of(same, plain, gamma=gamma) for gamma in args.gamma},
        "branch": {f"{branch}": drafter_of(same, plain, branch=branch) for branch in args.branch},
    }
    found = {title: compare(plain, settings, prompts, args) for title, settings in groups.items()}
    (args.out / "figures.json").write_text(json.dumps({"environment": environment(), **found}, indent=1) + "\n")
    (args.out / "table.md").write_text("\n".join(table(title, rows) for title, rows in found.items()))
    draw(found, args.out / "plot.png")
    print((args.out / "table.md").read_text())


if __name__ == "__main__":
    began = time.time()
    try:
        main()
    except SpecdecError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{time.time() - began:.0f} s")
