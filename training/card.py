"""The model card of trained weights, and the identity of a training run."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from specdec.settings.files import write_text, writing
from training.packing import Windows

__all__ = ["CardText", "among", "command_line", "identity", "model_card", "write_card"]

_PLACES = ("model", "data", "eval_data", "out", "features_folder", "text")  # hashes identify these better


def identity(config: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The values that must not change when a run continues: ``weights``, which is their config with the target's
    fingerprint, and all options of the training config except paths and intervals of writing.
    """
    options = {name: value for name, value in asdict(config).items() if name not in _PLACES}
    options["loop"] |= {"wandb": "off", "log_every": 1, "save_every": 1}
    return {**options, **weights}


def command_line(words: Sequence[str] | None = None) -> str:
    """The command that is running, without its program's folder."""
    program, *rest = sys.argv if words is None else words
    name = Path(program).name
    return shlex.join([*(["python", "-m", "specdec"] if name == "__main__.py" else [name]), *rest])


@dataclass(frozen=True, slots=True, kw_only=True)
class CardText:
    """A card's texts about one kind of weights.

    Attributes:
        title: title of the card.
        about: short description of the weights.
        opening: paragraph about the weights.
        columns: figures of ``evaluate`` to show: key -> heading.
        note: what the figures mean; it follows the description of how they were measured.
    """

    title: str
    about: str
    opening: str
    columns: Mapping[str, str]
    note: str


def model_card(text: CardText, config: Any, windows: Windows, lines: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown card: what the weights are, how they were made, and their figures.

    Args:
        config: the training config, whose options end the card.
        windows: the training data.
        lines: lines of the training log.
    """
    judged = config.evaluation
    steps = [line for line in lines if "loss" in line]
    tokens = sum(line["tokens"] for line in steps) / max(len(steps), 1) * (steps[-1]["step"] if steps else 0)
    options = asdict(config)
    for name in ("data", "eval_data"):
        options[name] = [Path(source).name for source in options[name]]
    for name in ("out", "start"):
        del options[name]
    begun = "from nothing" if config.start is None else f"on from the weights in {Path(config.start).name}"
    return f"""# {text.title}

{text.opening}

```
{command_line()}
```

- Data: {", ".join(options["data"])}; {len(windows):,} windows of {windows.length} tokens, {windows.trained:,} of them \
trained tokens, hash {windows.digest}.
- Training: {begun}, about {tokens / 1e6:.1f} M tokens in {steps[-1]["seconds"] / 60 if steps else 0:.1f} minutes, \
python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}.
- Evaluation: {judged.prompts} held-out prompts of up to {judged.prompt} tokens, {judged.new} new tokens each, greedy. \
{text.note}

{_table(lines, steps, text.columns)}
```yaml
{yaml.safe_dump(options, sort_keys=False).strip()}
```
"""


def among(draft_vocab: int) -> str:
    """A card's sentence about a draft vocabulary."""
    return f", over the {draft_vocab:,} tokens that are the most frequent in the data" if draft_vocab else ""


def write_card(folder: Path, text: str) -> None:
    """Write ``README.md`` into the weights' folder.

    Raises:
        CheckpointError: the file could not be written.
    """
    with writing("the card in", folder, "the weights are there"):
        write_text(folder / "README.md", text)


def _table(lines: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A table with a row for each evaluation: its step, the latest training loss before it, and its figures."""
    rows = [["step", "loss", *columns.values()], ["---:"] * (len(columns) + 2)]
    for line in lines:
        if not columns.keys() <= line.keys():
            continue
        losses = [s["loss"] for s in steps if s["step"] <= line["step"]]
        loss = f"{losses[-1]:.3f}" if losses else ""
        rows.append([str(line["step"]), loss, *(f"{line[key]:.3f}" for key in columns)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
