"""``specdec tree-search``: calibrate, search, write the tree, then decode held-out text with it; told in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from drafters.medusa import Medusa, MedusaConfig
from drafters.medusa_heads import MedusaHeads
from drafters.weights import check_fit, weights_folder
from specdec.engine import Engine
from specdec.errors import CheckpointError, ConfigError, pip_line
from specdec.files import write_text
from specdec.sampling import SamplingParams
from training.acceptance import EvalConfig, continued_texts
from training.data import Skips, TextConfig, read_samples
from training.log import draw_curves
from training.tree_search import Size, Speed, decode, search

__all__ = ["plot", "report", "write_tree"]


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
    samples = list(read_samples(data, engine.tokenizer, TextConfig(), Skips()))
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
    try:
        write_text(path, f"{head}{body}  tree:\n{rows}")
    except OSError as error:
        raise CheckpointError(f"cannot write the tree to {str(path)!r}: {error}; give another --out") from error


def plot(sizes: Sequence[Size], chosen: Size, path: Path) -> bool:
    """Draw expected tokens per second and per step over nodes; False where matplotlib is not installed."""
    speeds, tokens = [(s.nodes, s.speed) for s in sizes], [(s.nodes, s.tokens) for s in sizes]
    labels = ("nodes", "expected tokens per second", "expected tokens per step")
    return draw_curves(path, speeds, tokens, labels=labels, mark=(chosen.nodes, chosen.speed))
