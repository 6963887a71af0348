"""Kangaroo's choices, measured: exit layer, adapter variant, eta, gamma, branch (the paper's Figure 3 and Table 2).

    python scripts/ablate_kangaroo.py --out runs/ablate

All adapters are trained at once on the same batches, so that the frozen target runs once for all of them; then every
setting decodes the same held-out prompts. The run continues where it was interrupted. Writes ``table.md``,
``figures.json`` and ``plot.png``.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specdec import Engine
from specdec.bench.environment import describe_environment
from specdec.bench.metrics import OVERALL, measure
from specdec.bench.plan import Plan
from specdec.bench.runner import answer_prompts
from specdec.costs.plots import new_figure
from specdec.errors import SpecdecError
from specdec.settings.files import write_json, write_text
from specdec.settings.parsing import load_yaml, parse
from training.acceptance import continued_texts
from training.data import read_samples
from training.features import FrozenTarget
from training.kangaroo import Config, KangarooTraining, new_adapter
from training.loop import new_accelerator, train
from training.losses import Labels
from training.packing import Batch, pack
from training.skips import Skips

LAYERS, VARIANT_LAYER = (1, 2, 3, 4, 6), 4  # exit layers, and that of the four variants
ETAS, GAMMAS, BRANCHES = (0.0, 0.2, 0.4, 0.6, 0.8), (1, 2, 3, 4, 6, 8), (1, 2, 3, 4)
TEMPERATURES = (0.0, 1.0)
EVERY = 4  # train on one token in this many
NEW, ROUNDS = 96, 3  # tokens of an answer, answers to a prompt


class Together:
    """Several adapters as one trainable: the same target pass feeds them all."""

    metric, judges = "mean", True

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
            labels = Labels.of(self.frozen.head(states).float())
        total = torch.zeros(())
        for part in self.parts.values():
            early = features[part.adapter.config.exit_layer].float()
            guess = part.adapter(early, batch.positions, self.frozen.head, mask=batch.mask, rows=batch.targets)
            total = total + labels.loss(guess.float()).sum()
        return total * self.every / len(self.parts)

    def evaluate(self) -> dict[str, float]:
        scores = {name: part.evaluate()["tokens_per_step"] for name, part in self.parts.items()}
        return {**scores, "mean": sum(scores.values()) / len(scores)}

    def evaluation_seconds(self, clock: Callable[[], float]) -> float:
        return sum(part.evaluation_seconds(clock) for part in self.parts.values())

    def save(self, folder: Path) -> None:
        for name, part in self.parts.items():
            part.save(folder / name)


Figures = dict[str, float]
Group = dict[str, dict[str, Figures]]
"""Setting -> temperature -> figures."""


def compare(plain: Engine, drafters: dict[str, dict[str, Any]], prompts: list[list[int]], plan: Plan) -> Group:
    """Every setting against plain decoding, prompt by prompt in turn; decoding time only, the prefill is the same."""
    found: Group = {"none": {}, **{name: {} for name in drafters}}
    settings = [{"name": "kangaroo", "label": name, **options} for name, options in drafters.items()]
    for temperature in TEMPERATURES:
        here = replace(plan, drafters=settings, temperature=temperature)
        metrics = measure(answer_prompts(here, plain, prompts), list(found))
        for name, groups in metrics.rows.items():
            row = groups[OVERALL]
            assert row.tokens_per_step is not None
            assert row.decode_speedup is not None
            found[name][f"{temperature:g}"] = {
                "tokens_per_step": row.tokens_per_step.value,
                "rows_per_step": row.rows_per_step or 0.0,
                "speedup": row.decode_speedup.value,
            }
    return found


def table(title: str, found: Group) -> str:
    heads = [f"T={t:g}: tokens per step | rows | speedup" for t in TEMPERATURES]
    lines = [f"### {title}", "", f"| setting | {' | '.join(heads)} |", "|---|" + "---:|" * (3 * len(heads))]
    for name, by_temperature in found.items():
        cells = [f"{value:.2f}" for figures in by_temperature.values() for value in figures.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(groups: dict[str, Group], path: Path) -> None:
    """Tokens per step above, speedup below, a column for each group and a line for each temperature."""
    figure = new_figure(3 * len(groups), 5)
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
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/train/kangaroo.yaml"))
    parser.add_argument("--out", type=Path, default=Path("runs/ablate"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=8)
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
    texts = continued_texts(Engine(plain.target), held, replace(config.evaluation, prompts=args.prompts, new=NEW))
    kinds = {f"l={layer}": (layer, "attention") for layer in LAYERS}
    kinds |= {variant: (VARIANT_LAYER, variant) for variant in ("head", "layer", "mlp")}
    parts: dict[str, KangarooTraining] = {}
    for name, (layer, variant) in kinds.items():
        adapter = new_adapter(replace(config.adapter, exit_layer=layer, variant=variant), plain.target)
        parts[name] = KangarooTraining(adapter, plain.target, texts, config)
    windows = pack([sample for sample in samples if not sample.held_out], config.text.length)
    train(Together(parts, EVERY), windows, loop, accelerator, args.out, run={"kinds": kinds, "every": EVERY})

    attention = f"l={VARIANT_LAYER}"
    trained = {name: {"adapter": str(args.out / "last" / name)} for name in kinds}
    tuned = trained[attention] if args.tuned is None else {"adapter": str(args.tuned)}
    groups = {
        "exit layer": {f"l={layer}": trained[f"l={layer}"] for layer in LAYERS},
        "variant": {"attention": trained[attention], **{name: trained[name] for name in ("head", "layer", "mlp")}},
        "eta": {f"{eta:g}": {**tuned, "eta": eta} for eta in ETAS},
        "gamma": {f"{gamma}": {**tuned, "gamma": gamma} for gamma in GAMMAS},
        "branch": {f"{branch}": {**tuned, "branch": branch} for branch in BRANCHES},
    }
    plan = Plan(systems=[], acceptance="auto", policy="off", persistent=True, max_new_tokens=NEW, repeats=ROUNDS)
    prompts = [text.tokens[: text.prompt] for text in texts]
    found = {title: compare(plain, drafters, prompts, plan) for title, drafters in groups.items()}
    about = {"command": shlex.join(["python", *sys.argv]), **describe_environment(plain.target.device)}
    write_json(args.out / "figures.json", {"environment": about, **found})
    tables = "\n".join(table(title, rows) for title, rows in found.items())
    write_text(args.out / "table.md", tables)
    draw(found, args.out / "plot.png")
    print(tables)


if __name__ == "__main__":
    try:
        main()
    except SpecdecError as error:
        raise SystemExit(f"error: {error}") from error
