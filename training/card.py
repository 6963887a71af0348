"""The model card of trained weights."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from specdec.settings.files import write_text, writing
from training.packing import Windows

__all__ = ["CardText", "Report", "among", "command_line", "model_card", "write_card"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was judged, and how.

    Attributes:
        chose: number of prompts that chose the best checkpoint.
        others: number of other prompts that the figures are about; 0 where they are about those that chose it.
        longest: tokens of the longest prompt.
        figures: the best checkpoint's evaluation; empty where nothing was held out.
        spread: standard error of tokens per step over the texts.
    """

    chose: int
    others: int = 0
    longest: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.0

    @property
    def sentence(self) -> str:
        """Tokens per step, and on what, in words."""
        if not self.chose:
            return "not judged, as nothing was held out"
        on = f"on {self.others} held-out texts, others than the {self.chose} that chose it"
        if not self.others:
            on = f"on the {self.chose} held-out texts that chose it, so on others it may be less"
        return f"{self.figures['tokens_per_step']:.3f} tokens per step (standard error {self.spread:.3f}) {on}"


def model_card(
    text: CardText, config: Any, windows: Windows, lines: Sequence[Mapping[str, Any]], report: Report
) -> str:
    """A Markdown card: what the weights are, how they were made, and their figures.

    Args:
        config: the training config, whose options end the card.
        windows: the training data.
        lines: lines of the training log.
        report: what was judged.
    """
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
- Evaluation: {report.chose + report.others} held-out prompts of up to {report.longest} tokens, up to \
{config.evaluation.new} new tokens each, greedy. {text.note}
- Result: {report.sentence}.

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
