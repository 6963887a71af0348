"""One decoding step of the embedded model, as docs/step.md shows it: its tables, printed, and its picture.

    python scripts/draw_step.py --figure docs/figures/step.png        # a few seconds

The step is one of a real generation: greedy, float64, drafts by token recycling. ``tests/unit/docs/test_step_page.py``
    holds
the page to what this prints.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drafters.token_recycling.drafter import TokenRecycling, TokenRecyclingConfig
from specdec import Context, Draft, Engine, Observation, SamplingParams
from specdec.costs.plots import new_figure
from specdec.sampling.sampler import Sampler
from specdec.sampling.verify import Verdict, match
from specdec.step.step_output import StepOutput
from specdec.step.tree import ancestors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PROMPT, STEP = "import re\nimport", 4
SAMPLED = SamplingParams(temperature=0.8, seed=2)
# Okabe and Ito's colours, told apart by most colour-blind eyes.
ACCEPTED, REJECTED, EMPTY = "#E69F00", "#DDDDDD", "#FFFFFF"
COMMITTED, ANCESTOR, ITSELF = "#9BD0F0", "#7FCDB8", "#009E73"


@dataclass(frozen=True)
class RecordedStep:
    """One step: the text before it, what was drafted, and what came of it."""

    tokens: list[int]
    draft: Draft
    verdict: Verdict
    scores: StepOutput

    @property
    def length(self) -> int:
        """Committed slots before the step."""
        return len(self.tokens) - 1


class Recorder(TokenRecycling):
    """Token recycling that keeps its steps; its rows are fixed, so that they are the same on every machine."""

    def __init__(self) -> None:
        super().__init__(TokenRecyclingConfig(rows=7))
        self.steps: list[RecordedStep] = []

    def start(self, context: Context) -> Any:
        return _RecorderSession(super().start(context), context, self.steps)


class _RecorderSession:
    def __init__(self, inner: Any, context: Context, steps: list[RecordedStep]) -> None:
        self._inner, self._context, self._steps = inner, context, steps

    def propose(self, row_budget: int) -> Draft:
        self._before = list(self._context.tokens)
        draft: Draft = self._inner.propose(row_budget)
        return draft

    def observe(self, seen: Observation) -> None:
        assert seen.draft is not None
        assert seen.scores is not None
        verdict = Verdict(list(seen.path), list(seen.tokens))
        self._steps.append(RecordedStep(self._before, seen.draft, verdict, seen.scores))
        self._inner.observe(seen)


def record(engine: Engine) -> RecordedStep:
    """The step that is shown, of an engine on the embedded model."""
    recorder = Recorder()
    # A generation's last step tells its drafter nothing, so one more token is asked for than the step needs.
    Engine(engine.target, engine.tokenizer, recorder).generate(PROMPT, max_new_tokens=16)
    return recorder.steps[STEP]


class Tables:
    """What the page shows of a step, as Markdown."""

    def __init__(self, step: RecordedStep, tokenizer: Any) -> None:
        self._step, self._tokenizer = step, tokenizer

    def text(self, token: int) -> str:
        """A token as it is shown: one line, its spaces visible."""
        return str(self._tokenizer.decode([token])).replace("\n", "\\n").replace(" ", "␣")

    def all(self) -> list[str]:
        """The tables in the page's order, and what the target accepts at T = 0 and at T = 0.8."""
        verdicts = [f"path {v.path}, tokens {v.tokens}" for v in (self._step.verdict, self.sampled())]
        tables = [self.committed(), self.draft(), self.mask(), self.logits()]
        return [*tables, verdicts[0], self.draw(), verdicts[1], self.commit(), self.told()]

    def committed(self) -> str:
        tokens, length = self._step.tokens, self._step.length
        slots = [*range(length), "none yet"]
        return _table("position|slot|token|text", ((p, slots[p], t, self._code(t)) for p, t in enumerate(tokens)))

    def draft(self) -> str:
        draft, length = self._step.draft, self._step.length
        rows = zip(draft.tokens, draft.parents, draft.depths, strict=True)
        return _table(
            "row|token|text|parent|depth|slot|position",
            (
                (row, token, self._code(token), parent, depth, length + row, length + depth)
                for row, (token, parent, depth) in enumerate(rows)
            ),
        )

    def mask(self) -> str:
        length, sees = self._step.length, ancestors(self._step.draft.parents)
        slots = "|".join(str(length + row) for row in range(len(sees)))
        return _table(
            f"row|slots 0 to {length - 1}|{slots}",
            ((row, "all", *("x" if seen else "" for seen in line)) for row, line in enumerate(sees)),
        )

    def logits(self) -> str:
        rows = []
        for row in range(len(self._step.draft)):
            (best, next_best), (token, other) = (found.tolist() for found in self._step.scores.at(row).topk(2))
            child = self._step.draft.child(row, token)
            after = "".join(map(self.text, self._path_to(row)))
            rows.append(
                (
                    f"{row}",
                    f"`{after}`",
                    f"{token} {self._code(token)}",
                    f"{best:.2f}",
                    f"{self._code(other)} {next_best:.2f}",
                    "no row" if child is None else f"row {child}",
                )
            )
        return _table("row|after|target's own token|its logit|runner-up|drafted as", rows)

    def draw(self) -> str:
        """The root's token at a temperature: logits, noise, and their sums."""
        sampler = self._sampler()
        scaled = sampler.processed(self._step.scores, 0, [])
        noise = sampler.noise.gumbel(len(self._step.tokens))
        drawn = int((scaled + noise).argmax())
        tokens = [*dict.fromkeys([*scaled.topk(4).indices.tolist(), drawn])]
        logits = self._step.scores.at(0)
        return _table(
            "token|text|logit|logit / 0.8|Gumbel noise at position 10|sum",
            (
                (token, self._code(token), *(f"{x[token]:.2f}" for x in (logits, scaled, noise, scaled + noise)))
                for token in tokens
            ),
        )

    def sampled(self) -> Verdict:
        """What the same draft yields at that temperature."""
        return match(self._step.draft, self._step.scores, self._sampler())

    def commit(self) -> str:
        path, length = self._step.verdict.path, self._step.length
        end = length + len(path)
        return _table(
            "slot|before|after",
            (
                (
                    length + row,
                    f"row {row} {self._code(token)}",
                    "free"
                    if length + row >= end
                    else f"row {path[row]} {self._code(self._step.draft.tokens[path[row]])}",
                )
                for row, token in enumerate(self._step.draft.tokens)
            ),
        )

    def told(self) -> str:
        verdict, draft = self._step.verdict, self._step.draft
        successors = [self._step.scores.at(row).topk(3).indices.tolist() for row in verdict.path]
        return _table(
            "token|its likeliest successors from now on",
            (
                (self._code(draft.tokens[row]), ", ".join(map(self._code, best)) + ", ...")
                for row, best in zip(verdict.path, successors, strict=True)
            ),
        )

    def _sampler(self) -> Sampler:
        logits = self._step.scores.logits
        return Sampler(SAMPLED, self._step.tokens, logits.shape[-1], logits.device)

    def _code(self, token: int) -> str:
        return "`" + self.text(token).replace("|", "\\|") + "`"  # a bar would end the table's cell

    def _path_to(self, row: int) -> list[int]:
        """The tokens from the root down to a row."""
        parent, token = self._step.draft.parents[row], self._step.draft.tokens[row]
        return [*(self._path_to(parent) if parent >= 0 else ()), token]


def _table(head: str, rows: Iterable[Sequence[Any]]) -> str:
    names = head.split("|")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def draw(step: RecordedStep, tables: Tables) -> Figure:
    """The tree, what its rows see, and the slots before and after the commit."""
    figure = new_figure(8.2, 4.2)
    tree, mask, slots = figure.subplots(1, 3, width_ratios=(1.25, 1.55, 1.2))
    _draw_tree(tree, step, tables)
    _draw_mask(mask, step, tables)
    _draw_slots(slots, step, tables)
    figure.align_titles()
    return figure


def _draw_tree(axes: Axes, step: RecordedStep, tables: Tables) -> None:
    draft, path = step.draft, step.verdict.path
    places: dict[int, tuple[float, float]] = {}
    leaves = 0

    def place(row: int) -> float:
        """Put a row's subtree down; leaves from top to bottom, a parent beside the middle of its children."""
        nonlocal leaves
        below = [place(child) for child in draft.children()[row]]
        if not below:
            leaves += 1
        height = sum(below) / len(below) if below else 1.0 - leaves
        places[row] = (float(draft.depths[row]), height)
        return height

    place(0)
    for row, parent in enumerate(draft.parents):
        if parent >= 0:
            kept = row in path
            (x0, y0), (x1, y1) = places[parent], places[row]
            axes.plot([x0, x1], [y0, y1], color=ACCEPTED if kept else "#AAAAAA", lw=3.5 if kept else 1.2, zorder=1)
    last = path[-1]
    bonus = (places[last][0] + 1, places[last][1])
    axes.plot([places[last][0], bonus[0]], [places[last][1], bonus[1]], color=ACCEPTED, lw=1.5, ls=":", zorder=1)
    labels = [(places[row], f"{row}\n{tables.text(token)}", row in path) for row, token in enumerate(draft.tokens)]
    for (x, y), label, kept in [*labels, (bonus, f"bonus\n{tables.text(step.verdict.tokens[-1])}", None)]:
        face = EMPTY if kept is None else ACCEPTED if kept else REJECTED
        edge = {"ec": ACCEPTED, "ls": ":"} if kept is None else {"ec": "#555555"}
        axes.text(
            x, y, label, ha="center", va="center", fontsize=8, bbox={"boxstyle": "round,pad=0.3", "fc": face, **edge}
        )
    axes.set(xlim=(-0.4, 3.6), ylim=(-leaves - 0.3, 0.6))
    axes.set_title("1. draft: row and token", fontsize=10)
    axes.text(1.5, -leaves - 0.1, "orange: accepted by the target", ha="center", va="center", fontsize=8)
    axes.set_axis_off()


def _draw_mask(axes: Axes, step: RecordedStep, tables: Tables) -> None:
    draft, length = step.draft, step.length
    sees, rows = ancestors(draft.parents), len(draft)
    for row in range(rows):
        for slot in range(length + rows):
            below = slot - length
            face = COMMITTED if below < 0 else ITSELF if below == row else ANCESTOR if sees[row, below] else EMPTY
            axes.fill([slot, slot + 1, slot + 1, slot], [row, row, row + 1, row + 1], fc=face, ec="#999999", lw=0.5)
    axes.plot([length, length], [0, rows], color="#222222", lw=1.5)
    held = [*step.tokens[:-1], *draft.tokens]
    axes.set_xticks([slot + 0.5 for slot in range(len(held))], [tables.text(t) for t in held], rotation=90, fontsize=8)
    axes.xaxis.tick_top()
    axes.set_yticks([row + 0.5 for row in range(rows)], [f"row {row}" for row in range(rows)], fontsize=8)
    for row in step.verdict.path:
        axes.get_yticklabels()[row].set_fontweight("bold")
    for slot in range(length + rows):
        axes.text(slot + 0.5, rows + 0.45, str(slot), ha="center", va="center", fontsize=7.5)
    axes.text(-0.3, rows + 0.45, "slot", ha="right", va="center", fontsize=8)
    kinds = ((COMMITTED, "committed"), (ANCESTOR, "ancestor"), (ITSELF, "itself"), (EMPTY, "not seen"))
    handles = [axes.fill([], [], fc=face, ec="#999999", label=label)[0] for face, label in kinds]
    axes.legend(handles=handles, ncols=2, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0.0), frameon=False)
    axes.set(xlim=(0, length + rows), ylim=(rows + 0.9, 0))
    axes.set_title("2. mask: what each row sees", fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _draw_slots(axes: Axes, step: RecordedStep, tables: Tables) -> None:
    draft, path, length = step.draft, step.verdict.path, step.length
    width, second = 1.2, 1.75  # of a cell; where the second column begins
    texts = [f"{row} {tables.text(token)}" for row, token in enumerate(draft.tokens)]

    def cell(x: float, y: float, face: str, label: str) -> None:
        axes.fill([x, x + width, x + width, x], [y, y, y + 1, y + 1], fc=face, ec="#777777", lw=0.8)
        axes.text(x + width / 2, y + 0.5, label, ha="center", va="center", fontsize=8)

    for x, name in ((0.0, "before"), (second, "after")):
        axes.text(x + width / 2, -0.4, name, ha="center", va="center", fontsize=8)
        cell(x, 0, COMMITTED, "committed")
    axes.text(-0.1, 0.5, f"0-{length - 1}", ha="right", va="center", fontsize=8)
    for row in range(len(draft)):
        cell(0, row + 1, ACCEPTED if row in path else REJECTED, texts[row])
        axes.text(-0.1, row + 1.5, str(length + row), ha="right", va="center", fontsize=8)
        if row < len(path):
            cell(second, row + 1, ACCEPTED, texts[path[row]])
            arrow = {"arrowstyle": "-|>", "color": "#333333", "lw": 1.2}
            axes.annotate("", xy=(second, row + 1.5), xytext=(width, path[row] + 1.5), arrowprops=arrow)
        else:
            cell(second, row + 1, EMPTY, "free")
    axes.set(xlim=(-0.5, second + width + 0.05), ylim=(len(draft) + 1.1, -0.8))
    axes.set_title("3. commit: slots", fontsize=10)
    axes.set_axis_off()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="where to draw the picture")
    args = parser.parse_args()
    engine = Engine.from_pretrained("tiny", dtype=torch.float64)
    step = record(engine)
    tables = Tables(step, engine.tokenizer)
    for table in tables.all():
        print(table, end="\n\n")
    if args.figure:
        draw(step, tables).savefig(args.figure, dpi=200)


if __name__ == "__main__":
    main()
