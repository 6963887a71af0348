"""What two defects of the official training code cost: the loss mask two positions late, and the lost begin token.

    python scripts/ablate_defects.py --data sharegpt.json --out runs/defects

The same adapter is trained on the same conversations four times, as it should be and with either defect or both, and
judged on held-out conversations as they are decoded: with the begin token. Repeated over seeds, because a difference
is only worth what it exceeds their spread by. A run that is interrupted goes on where it was. Writes ``figures.json``
and ``table.md``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from specdec import Engine
from specdec.engine.config import merge, override
from specdec.errors import SpecdecError
from specdec.settings.files import write_json, write_text
from specdec.settings.parsing import load_yaml, parse
from training.acceptance import Written, continued_texts
from training.data import Sample, load_samples
from training.kangaroo import Config, KangarooTraining, new_adapter
from training.loop import new_accelerator, train
from training.packing import pack

CASES = {"as it should be": (False, False), "mask late": (True, False), "no BOS": (False, True), "both": (True, True)}
SHOWN = {"tokens_per_step": "tokens per step", "accepted_1": "first draft accepted", "overlap": "overlap"}
SHOWN |= {"opening": "right on an answer's first two tokens"}

OPTIONS = {
    "adapter": {"variant": "attention"},
    "evaluation": {"prompts": 64, "prompt": 384, "new": 64},  # prompts that end where the answer begins
    "loop": {"steps": 150, "wandb": "off"},
}


def damaged(sample: Sample, *, late: bool, no_bos: bool, bos: int | None) -> Sample:
    """A sample as the official code would learn it.

    Example: with ``late``, of the tokens ``Q Q A A A Q Q`` the last three are trained and not the three A: the answer's
    first two are lost, and two of the next question are learnt instead.
    """
    tokens, trained = sample.tokens, sample.trained
    if late:
        trained = [False, False, *trained[:-2]]
    if no_bos and tokens and tokens[0] == bos:
        tokens, trained = tokens[1:], trained[1:]
    return Sample(tokens, trained, sample.held_out)


def trained_once(
    config: Config, engine: Engine, samples: Sequence[Sample], texts: Sequence[Written], out: Path
) -> dict[str, float]:
    """Train to the end, and judge what came out last."""
    accelerator = new_accelerator(config.loop)
    adapter = new_adapter(config.adapter, engine.target, seed=config.loop.seed)
    trainable = KangarooTraining(adapter, engine.target, texts, config)
    train(trainable, pack(samples, config.text.length), config.loop, accelerator, out, run={"case": out.name})
    with torch.no_grad():
        openings = [rank == 0 for text in texts for rank in trainable.judge(text)[0][:2]]
    return {**trainable.evaluate(), "opening": statistics.mean(openings)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/train/kangaroo.yaml"))
    parser.add_argument("--data", nargs="+", required=True, help="conversations: .json or .jsonl")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as of `specdec train kangaroo`"
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="0 leaves torch's own choice")
    parser.add_argument("--out", type=Path, default=Path("runs/defects"))
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    values = merge(load_yaml(args.config), {**OPTIONS, "data": args.data})
    config = parse(Config, override(values, args.set, Config), where=str(args.config))
    config = replace(config, loop=replace(config.loop, eval_every=config.loop.steps))
    engine = Engine.from_pretrained(config.model)
    samples, held = load_samples(config.data, config.eval_data, config.text, engine.tokenizer)
    texts = continued_texts(Engine(engine.target), held, config.evaluation)
    figures: dict[str, list[dict[str, float]]] = {}
    for name, (late, no_bos) in CASES.items():
        bos = engine.tokenizer.bos_token_id
        learnt = [damaged(sample, late=late, no_bos=no_bos, bos=bos) for sample in samples]
        for seed in range(args.seeds):
            here = replace(config, loop=replace(config.loop, seed=seed))
            out = args.out / f"{name.replace(' ', '_')}_{seed}"
            figures.setdefault(name, []).append(trained_once(here, engine, learnt, texts, out))
    write_json(args.out / "figures.json", figures)
    lines = [f"| training | {' | '.join(SHOWN.values())} |", "|---|" + "---:|" * len(SHOWN)]
    for name, runs in figures.items():
        cells = [" ".join(f"{run[key]:.3f}" for run in runs) for key in SHOWN]
        means = [statistics.mean(run[key] for run in runs) for key in SHOWN]
        lines.append(f"| {name} | " + " | ".join(f"{m:.3f} ({c})" for m, c in zip(means, cells, strict=True)) + " |")
    write_text(args.out / "table.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    try:
        main()
    except SpecdecError as error:
        raise SystemExit(f"error: {error}") from error
