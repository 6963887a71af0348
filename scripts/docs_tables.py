"""The tables of README and docs, filled in from the manifests of the runs that they show.

    python scripts/docs_tables.py            # writes the pages anew
    python scripts/docs_tables.py --check    # says which pages would change, and exits with 1

A table stands between ``<!-- NAME of RUN -->`` and ``<!-- end -->``. RUN is ``docs/figures/RUN_manifest.json``, a copy
of ``manifest.json`` in a run's folder. NAME is one of its tables (:func:`specdec.bench.tables.tables_of`). The tables
``overview`` and ``short`` are made of a greedy run and a sampled one: ``<!-- overview of RUN, SAMPLED -->``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- (\w+) of ([\w, ]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Cells = list[list[str]]
Tables = dict[str, Cells]

SHORT = {  # system -> how README calls it, and what its text is
    "none": ("specdec, plain (`none`)", "the reference"),
    "auto": ("specdec, `auto`", "the same, bit for bit"),
    "suffix_automaton": ("specdec, `suffix_automaton`", "the same, bit for bit"),
    "llama_cpp": ("llama.cpp, the same weights", "its own rounding"),
    "transformers": ("transformers, `generate`", "its own rounding"),
}


def overview(greedy: Tables, sampled: Tables) -> Cells:
    """Every system at both temperatures: tokens per step, decoding as the mean of the kinds and at the worst one."""
    greedily = ["T=0: tokens/step", "decoding", "worst kind", "overall x transformers"]
    table = [["drafter", *greedily, "T=1: tokens/step", "decoding", "worst kind"]]
    for name in rows_of(greedy["systems"]):
        cells = decoding(greedy, name)
        table.append([name, *cells, rows_of(greedy["systems"])[name]["x transformers"], *decoding(sampled, name)])
    return table


def short(greedy: Tables, sampled: Tables) -> Cells:
    """The few systems that README begins with."""
    table = [["system", "tokens per step", "speed, T = 0", "speed, T = 1", "text"]]
    for system, (title, text) in SHORT.items():
        tokens, speed, _ = decoding(greedy, f"`{system}`")
        bold = "**{}**" if system == "auto" else "{}"
        cells = [bold.format(one) if one else "" for one in (speed, decoding(sampled, f"`{system}`")[1])]
        table.append([title, tokens, *cells, text])
    return table


def decoding(tables: Tables, name: str) -> list[str]:
    """Tokens per step, the mean of the kinds and the worst kind of a system; empty where it was not in the run."""
    kinds = rows_of(tables["kinds"]).get(name)
    if kinds is None:
        return ["", "", ""]
    *speeds, mean = kinds.values()
    return [rows_of(tables["systems"])[name]["tokens/step"], mean, min(speeds, key=float)]


def rows_of(table: Cells) -> dict[str, dict[str, str]]:
    """System -> title -> cell."""
    titles, *rows = table
    return {row[0]: dict(zip(titles[1:], row[1:], strict=True)) for row in rows}


def markdown(cells: Cells) -> list[str]:
    """The lines of a table; names and texts are aligned left, figures right."""
    rules = ["---" if not place or title == "text" else "--:" for place, title in enumerate(cells[0])]
    return [f"| {' | '.join(row)} |" for row in (cells[0], rules, *cells[1:])]


MADE: dict[str, Callable[[Tables, Tables], Cells]] = {"overview": overview, "short": short}


def tables_of(run: str) -> Tables:
    """The tables of a run that docs/figures keeps."""
    manifest = json.loads((ROOT / f"docs/figures/{run}_manifest.json").read_text(encoding="utf-8"))
    return dict(manifest["tables"])


def filled(page: str) -> str:
    """A page with all of its tables as the manifests have them."""

    def table(block: re.Match[str]) -> str:
        opening, name, runs, end = block.groups()
        tables = [tables_of(run) for run in runs.split(", ")]
        cells = MADE[name](*tables) if name in MADE else tables[0][name]
        return "\n".join([opening.rstrip(), *markdown(cells), end])

    return BLOCK.sub(table, page)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    stale = list[str]()
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        page = path.read_text(encoding="utf-8")
        new = filled(page)
        if new != page:
            stale.append(str(path.relative_to(ROOT)))
            if not options.check:
                path.write_text(new, encoding="utf-8")
    print(f"{'stale' if options.check else 'written'}: {', '.join(stale) or 'none'}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
