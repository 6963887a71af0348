"""Trees as lists of rank paths, as the paper's authors write them down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from specdec.errors import ConfigError, shown, unknown
from specdec.settings.parsing import read_value

__all__ = ["TREES", "Node", "check_tree", "nodes_of", "paths_of"]

TREES = {
    "chain": "0 00 000 0000 00000",
    # For where every row costs: the seven likeliest of the embedded model's heads.
    "small": "0 1 00 2 000 01 3",
    # The authors' tree for Vicuna 7B with five heads: 63 nodes, 42 leaves, depth 4.
    "mc_sim_7b_63": (
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 "
        "0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
    ),
}
"""Named trees: a rank path per word, a digit per rank, likeliest first."""

Path_ = Sequence[int]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a tree: the row of its parent (0 is the root, node i is row i + 1), its rank and its depth."""

    parent: int
    rank: int
    depth: int


def paths_of(tree: str | list[list[int]]) -> list[list[int]]:
    """The rank paths that an option ``tree`` means.

    Raises:
        ConfigError: no such name or file, or a file that holds no tree.
    """
    if not isinstance(tree, str):
        return tree
    if tree in TREES:
        return [[int(rank) for rank in word] for word in TREES[tree].split()]
    if Path(tree).suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(unknown("medusa.tree", tree, sorted(TREES)))
    try:
        content = read_value(Path(tree).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot read the tree {tree!r}: {reason}; it holds rank paths, as [[0], [1]]") from error
    for key in ("drafter", "tree"):
        content = content.get(key, content) if isinstance(content, dict) else content
    is_tree = isinstance(content, list) and all(isinstance(path, list) for path in content)
    if not is_tree or not all(type(rank) is int for path in content for rank in path):
        raise ConfigError(f"the file {tree!r} holds no tree; it must hold rank paths, such as [[0], [0, 0], [1]]")
    return list(content)


def check_tree(paths: Sequence[Path_], *, heads: int | None = None, ranks: int | None = None) -> None:
    """Raises ConfigError for a tree that is none, or is deeper or wider than there are heads and ranks."""
    seen, before = {tuple(path) for path in paths}, set[tuple[int, ...]]()
    if not paths:
        raise ConfigError("medusa.tree is empty; give at least the path [0]")
    for path in paths:
        if not path or min(path) < 0:
            raise ConfigError(f"medusa.tree holds {shown(list(path))}; a path is one rank or more, each at least 0")
        if tuple(path) in before:
            raise ConfigError(f"medusa.tree holds {shown(list(path))} twice; leave one out")
        before.add(tuple(path))
        if len(path) > 1 and tuple(path[:-1]) not in seen:
            raise ConfigError(
                f"medusa.tree holds {shown(list(path))} without its parent {shown(list(path[:-1]))}; add the parent"
            )
        if heads is not None and len(path) > heads:
            raise ConfigError(f"medusa.tree holds {shown(list(path))}, {len(path)} deep, but there are {heads} heads")
        if ranks is not None and max(path) >= ranks:
            raise ConfigError(f"medusa.tree holds {shown(list(path))}; the model's vocabulary has {ranks} ranks only")


def nodes_of(paths: Sequence[Path_]) -> list[Node]:
    """The nodes in the given order, but each parent before its children.

    Example: ``[[0, 1], [0], [2]]`` gives (0, 0, depth 1), (1, 1, depth 2), (0, 2, depth 1).
    """
    rows: dict[tuple[int, ...], int] = {(): 0}
    nodes: list[Node] = []
    for path in paths:
        for depth in range(1, len(path) + 1):
            prefix = tuple(path[:depth])
            if prefix not in rows:
                nodes.append(Node(rows[prefix[:-1]], prefix[-1], depth))
                rows[prefix] = len(nodes)
    return nodes
