"""The tree for a set of heads: the one with the most expected tokens per second on this machine.

Calibration text says how often each head's guess of each rank is right (Cai et al. 2024, section 2.3.3), this machine
what a step of so many rows costs. Trees grow by the path that is likeliest to be right, which is the longest expected
step at every size; the size is the one at which tokens by measured seconds are the most.

How often is asked where steps begin. Text that is easy is crossed in few steps, so over all of its positions heads look
better than decoding finds them: which positions count follows from the tree, and the tree from them, a few times round.
"""

from __future__ import annotations

import heapq
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from drafters.medusa.drafter import Medusa, MedusaConfig
from drafters.medusa.heads import MedusaHeads
from drafters.medusa.rank_paths import nodes_of
from drafters.rest.stdlib_corpus import STDLIB
from drafters.shared.weights import check_fit, weights_folder
from specdec.drafter import Drafter
from specdec.engine.engine import Engine
from specdec.engine.sequence import SequenceState
from specdec.errors import ConfigError, pip_line
from specdec.results import Statistics
from specdec.settings.files import write_text, writing
from specdec.settings.sampling_params import SamplingParams
from training.acceptance import EvalConfig, Written, continued_texts
from training.data import TextConfig, read_samples
from training.log import draw_curves
from training.medusa import Config, MedusaTraining, roots_of
from training.skips import Skips

__all__ = [
    "Judged",
    "Odds",
    "Size",
    "Speed",
    "decode",
    "expected",
    "grow",
    "judge",
    "plot",
    "report",
    "search",
    "step_seconds",
    "write_tree",
]

RankPath = tuple[int, ...]

_RANKS = 10  # that a tree may use
_ROUNDS = 3  # of tree and positions; they agree after two
_PRIOR = 30.0  # positions that the product of accuracies counts as, beside a path's own frequency


class Odds:
    """How likely a rank path is to be right.

    A path's own frequency where it was seen often, else its parent's and the head's accuracy: heads that are right
    together make deep paths likelier than the product says.

    Args:
        found: per position that counts, the rank of the right token with each of the K heads.
        ranks: ranks that a tree may use.

    Attributes:
        accuracy: [K][ranks], how often head k's rank r was right.
    """

    def __init__(self, found: Sequence[RankPath], ranks: int) -> None:
        if not found:
            raise ConfigError("the calibration text has no position that all heads can be judged at; give longer text")
        self.heads, self.ranks, self._total = len(found[0]), ranks, len(found)
        self._seen = Counter(path[:depth] for path in found for depth in range(self.heads + 1))
        heads = [Counter(column) for column in zip(*found, strict=True)]
        self.accuracy = [[head[rank] / self._total for rank in range(ranks)] for head in heads]
        self._known: dict[RankPath, float] = {(): 1.0}

    def of(self, path: RankPath) -> float:
        """P(all tokens of ``path`` are right).

        Example: with accuracies .5 and .4 of ranks 0, path (0, 0) is .2 by the product alone, and nearly .4 where the
        second head was often seen to be right, and always together with the first.
        """
        if path not in self._known:
            prior = _PRIOR * self.accuracy[len(path) - 1][path[-1]]
            share = (self._seen[path] + prior) / (self._seen[path[:-1]] + _PRIOR)
            self._known[path] = self.of(path[:-1]) * share
        return self._known[path]


@dataclass(frozen=True, slots=True)
class Size:
    """A tree's nodes, the tokens that its steps are expected to yield (bonus counted), and a step's seconds."""

    nodes: int
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Speed:
    """What decoding gave: tokens per step, and tokens per second."""

    per_step: float
    per_second: float


@dataclass(frozen=True, slots=True)
class Judged:
    """A text, and for each of K heads the ranks of its tokens; see ``MedusaTraining.judge``."""

    text: Written
    ranks: Sequence[Sequence[int]]

    def paths(self, tree: Sequence[RankPath] | None = None) -> list[RankPath]:
        """What the K heads say of the right tokens, wherever a step with ``tree`` begins; None is everywhere."""
        nodes = nodes_of(tree or [])
        roots = range(1, len(self.text.tokens)) if tree is None else roots_of(self.ranks, nodes, self.text)
        # The deepest head is judged at the fewest positions; before the prompt's end nothing is drafted.
        found = [tuple(own[root - 1] for own in self.ranks) for root in roots if 0 < root <= len(self.ranks[-1])]
        return [path for path in found if min(path) >= 0]


def judge(heads: MedusaHeads, engine: Engine, texts: Sequence[Written]) -> list[Judged]:
    """Judge heads on texts that the target wrote."""
    judging = MedusaTraining(heads, engine.target, texts, Config(data=[STDLIB], tree=[[0]]))  # type: ignore[arg-type]
    return [Judged(text, judging.judge(text)) for text in texts]


def grow(odds: Odds, most: int) -> list[RankPath]:
    """The ``most`` likeliest paths, likeliest first; as a child is no likelier than its parent, parents come first."""
    tree: list[RankPath] = []
    ahead = [(-odds.of((rank,)), (rank,)) for rank in range(odds.ranks)]
    heapq.heapify(ahead)
    while ahead and len(tree) < most:
        _, path = heapq.heappop(ahead)
        tree.append(path)
        if len(path) < odds.heads:
            for rank in range(odds.ranks):
                heapq.heappush(ahead, (-odds.of((*path, rank)), (*path, rank)))
    return tree


def timed_sizes(most: int) -> list[int]:
    """Node counts at which steps are timed: every one up to 8, then every fourth number of rows, and the largest."""
    return [n for n in range(1, most + 1) if n <= 8 or (n + 1) % 4 == 0 or n == most]


def expected(judged: Sequence[Judged], tree: Sequence[RankPath], seconds: Mapping[int, float]) -> list[Size]:
    """Every size of a grown tree, its steps counted through the texts.

    Args:
        seconds: of a step, by nodes, at some sizes; between them lines are drawn.
    """
    known, nodes, sizes = sorted(seconds.items()), nodes_of(tree), list[Size]()
    tokens = sum(len(own.text.tokens) - own.text.prompt for own in judged)
    for size in range(1, len(tree) + 1):
        steps = sum(len(roots_of(own.ranks, nodes[:size], own.text)) for own in judged)
        sizes.append(Size(size, tokens / steps, float(np.interp(size, *zip(*known, strict=True)))))
    return sizes


def step_seconds(
    engine: Engine, drafters: Mapping[int, Drafter], prompt: Sequence[int], *, steps: int = 60
) -> dict[int, float]:
    """Median seconds of a whole decoding step under each drafter: drafting, the target's forward, verification.

    All take turns, a step each, so that a machine that drifts drifts for all.
    """
    budget = min(4 * steps, engine.target.context_length - len(prompt))
    times: dict[int, list[float]] = {key: [] for key in drafters}
    with engine.target.active():
        running: dict[int, SequenceState] = {}
        for turn in range(-3, steps):  # the first ones warm up
            for key, drafter in drafters.items():
                if key not in running or running[key].finish_reason is not None:
                    running[key] = engine.with_drafter(drafter, policy="off").start(prompt, budget, eos_ids=frozenset())
                    running[key].prefill()
                began = perf_counter()
                running[key].step()
                if turn >= 0:
                    times[key].append(perf_counter() - began)
    return {key: statistics.median(found) for key, found in times.items()}


def search(
    heads: MedusaHeads,
    engine: Engine,
    texts: Sequence[Written],
    *,
    most: int = 32,
    nodes: int | None = None,
    cost: Callable[[Engine, Mapping[int, Drafter], Sequence[int]], Mapping[int, float]] = step_seconds,
) -> tuple[list[list[int]], list[Size], Size]:
    """Find the tree.

    Args:
        texts: calibration text.
        most: nodes of the largest tree that is considered.
        nodes: take this size instead of the fastest.
        cost: how steps are timed.

    Returns:
        The tree's rank paths, every size with what was expected of it, and the chosen one.

    Raises:
        ConfigError: a size below one, or no text that is long enough.
    """
    if most < 1 or not 1 <= (nodes or 1) <= most:
        raise ConfigError(f"most nodes are {most} and nodes {nodes}; they must satisfy 1 <= nodes <= most")
    judged = judge(heads, engine, texts)
    odds = Odds([path for own in judged for path in own.paths()], _RANKS)
    tree = grow(odds, most)
    drafters = {
        size: Medusa(MedusaConfig(tree=[list(path) for path in tree[:size]]), heads, engine.target)
        for size in timed_sizes(len(tree))
    }
    seconds = cost(engine, drafters, texts[0].tokens[: texts[0].prompt])
    for _ in range(_ROUNDS):
        sizes = expected(judged, tree, seconds)
        chosen = max(sizes, key=lambda size: size.speed) if nodes is None else sizes[min(nodes, len(tree)) - 1]
        best = [list(path) for path in tree[: chosen.nodes]]
        odds = Odds([path for own in judged for path in own.paths(tree[: chosen.nodes])], _RANKS)
        tree = grow(odds, len(tree))
    return best, sizes, chosen


def decode(
    engine: Engine,
    drafters: Mapping[str, Drafter | str],
    prompts: Sequence[Sequence[int]],
    new: int,
    sampling: SamplingParams,
    *,
    repeats: int = 3,
) -> dict[str, Speed]:
    """Decode prompts under each drafter in turn; speeds are of the medians over repeats."""
    engines = {name: engine.with_drafter(drafter, policy="off") for name, drafter in drafters.items()}
    runs: dict[str, list[list[Statistics]]] = {name: [[] for _ in prompts] for name in engines}
    for _ in range(repeats):
        for place, prompt in enumerate(prompts):
            for name, own in engines.items():
                runs[name][place].append(own.generate(prompt, new, sampling).stats)
    found = {}
    for name, stats in runs.items():
        tokens, steps = sum(own[0].new_tokens for own in stats), sum(own[0].steps for own in stats)
        seconds = sum(statistics.median(run.seconds.decode for run in own) for own in stats)
        found[name] = Speed(tokens / steps, tokens / max(seconds, 1e-9))
    return found


def report(
    engine: Engine,
    folder: str | None,
    data: Sequence[str],
    out: Path,
    judged: EvalConfig,
    sampling: SamplingParams,
    *,
    most: int,
    nodes: int | None,
    chart: Path | None,
) -> Speed:
    """Search a tree for heads, write it, and print what was expected of it beside what decoding then gave.

    Args:
        folder: the heads; None is those in this package that were trained for the model.
        data: texts as for training; those that training holds out are decoded, the others calibrate.
        judged: how many texts of each side the target continues, after how many tokens, by how many.
        most, nodes: see :func:`training.tree_search.search`.
        chart: where to draw speed over nodes.

    Raises:
        SpecdecError: whatever is wrong with heads, data, sizes or disk.
    """
    console = Console()
    heads = MedusaHeads.from_pretrained(weights_folder(folder, engine.target, "medusa.heads"))
    check_fit(heads.config, engine.target, "medusa")
    heads.to(engine.target.head_device, engine.target.dtype)
    skips = Skips()
    samples = list(read_samples(data, engine.tokenizer, TextConfig(), skips))
    for line in skips.lines():
        console.print(line, markup=False)
    learnt, held = ([s for s in samples if s.held_out is side] for side in (False, True))
    if not learnt or not held:
        raise ConfigError(f"{', '.join(data)}: {len(learnt)} texts to calibrate, {len(held)} held out; give more text")
    quick = engine.with_drafter("suffix_automaton")
    calibration = continued_texts(quick, learnt, judged, sampling)
    tree, sizes, chosen = search(heads, engine, calibration, most=most, nodes=nodes)
    console.print(_table(sizes, chosen))

    drafter = Medusa(MedusaConfig(tree=tree), heads, engine.target)
    prompts = [text.tokens[: text.prompt] for text in continued_texts(quick, held, replace(judged, new=1))]
    measured = decode(engine, {"none": "none", "medusa": drafter}, prompts, judged.new, sampling)
    plain, found = measured["none"], measured["medusa"]
    lines = [
        f"{chosen.nodes} nodes, {max(map(len, tree))} deep: {chosen.tokens:.3f} tokens per step expected, "
        f"{found.per_step:.3f} measured on {len(prompts)} held-out texts;",
        f"{chosen.speed:.0f} tokens per second expected, {found.per_second:.0f} measured, "
        f"{found.per_second / plain.per_second:.2f} of plain decoding's {plain.per_second:.0f}.",
    ]
    options = {} if folder is None else {"heads": folder}
    remarks = [
        f'specdec generate --config {out} "import os"',
        "",
        "Found by specdec tree-search on one machine:",
        *lines,
    ]
    write_tree(out, tree, options, remarks)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    if chart is not None and not plot(sizes, chosen, chart):
        console.print(f"no plot: matplotlib is not installed; {pip_line('bench')}", markup=False)
    console.print(f"wrote {out}; to use it: --drafter medusa --set medusa.tree={out}", soft_wrap=True)
    return found


def _table(sizes: Sequence[Size], chosen: Size) -> Table:
    """A row for the smallest trees, every fourth one, and the chosen one."""
    sheet = Table(title="expected", title_justify="left")
    for column in ("nodes", "tokens/step", "ms/step", "tokens/s"):
        sheet.add_column(column, justify="right")
    for size in sizes:
        if size.nodes <= 8 or size.nodes % 4 == 0 or size is chosen:
            sheet.add_row(
                str(size.nodes), f"{size.tokens:.3f}", f"{1000 * size.seconds:.2f}", f"{size.speed:.1f}",
                style="bold" if size is chosen else None,
            )  # fmt: skip
    return sheet


def write_tree(path: Path, tree: list[list[int]], options: Mapping[str, Any], remarks: Sequence[str]) -> None:
    """A drafter's YAML, for ``--config`` or ``medusa.tree``.

    Raises:
        CheckpointError: the file could not be written.
    """
    head = "".join(f"# {line}".rstrip() + "\n" for line in remarks)
    body = yaml.safe_dump({"drafter": {"name": "medusa", **options}}, sort_keys=False)
    rows = "".join(f"    - {node}\n" for node in tree)
    with writing("the tree to", path, "give another --out"):
        write_text(path, f"{head}{body}  tree:\n{rows}")


def plot(sizes: Sequence[Size], chosen: Size, path: Path) -> bool:
    """Draw expected tokens per second and per step over nodes; False where matplotlib is not installed."""
    speeds, tokens = [(s.nodes, s.speed) for s in sizes], [(s.nodes, s.tokens) for s in sizes]
    labels = ("nodes", "expected tokens per second", "expected tokens per step")
    return draw_curves(path, speeds, tokens, labels=labels, mark=(chosen.nodes, chosen.speed))
