"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the last hidden state guess several tokens at once.

The root stands at position n, and the last accepted row left the hidden state of position n - 1, from which the target
chose the root. Head k reads that state and guesses position n + k, knowing of no token in between. So the tree is
fixed, a list of *rank paths*: path (0, 2) is the first head's best token and behind it the second head's third best.
Ranks are chosen, not drawn, so a draft carries no q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml

from drafters.medusa_heads import MedusaHeads
from drafters.tree import grow, paying
from drafters.vocabulary import DraftVocabulary
from drafters.weights import check_fit, weights_folder
from specdec.config import read_value
from specdec.draft import Draft
from specdec.drafter import BatchedSession, Context, DrafterBase, Observation, Question
from specdec.errors import ConfigError, shown, unknown
from specdec.passes import Pass, Passes
from specdec.target import FINAL, Target

__all__ = ["TREES", "Medusa", "MedusaConfig", "Node", "check_tree", "nodes_of", "paths_of"]

TREES = {
    "chain": "0 00 000 0000 00000",
    # For where every row costs; `specdec tree-search --nodes 7` for the embedded model's heads.
    "small": "0 1 00 2 000 01 3",
    # The authors' tree for Vicuna 7B with five heads: 63 nodes, 42 leaves, depth 4.
    "mc_sim_7b_63": (
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 "
        "0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
    ),
}
"""Named trees: a rank path per word, a digit per rank, likeliest first."""

Path_ = Sequence[int]
_MOST = 63  # nodes of a tree, as the authors' has


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Options.

    Attributes:
        heads: folder of trained heads, ours or published ones; None is the one in this package that was trained for the
            model.
        tree: a name in ``TREES``, a ``.yaml`` file (of ``specdec tree-search``, or with a list), or rank paths such as
            ``[[0], [0, 0], [1]]``, likeliest first, since a narrow room cuts the end; None grows one by how often the
            heads were right in training, or takes the authors' where that is not known, as many rows as pay.
        check_target: refuse a model that is not the one the heads were trained for.
    """

    heads: str | None = None
    tree: str | list[list[int]] | None = None
    check_target: bool = True

    def __post_init__(self) -> None:
        if self.tree is not None:
            check_tree(paths_of(self.tree))


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
    if Path(tree).suffix not in (".yaml", ".yml"):
        raise ConfigError(unknown("medusa.tree", tree, sorted(TREES)))
    try:
        found = read_value(Path(tree).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot read the tree {tree!r}: {reason}; `specdec tree-search` writes one") from error
    for key in ("drafter", "tree"):
        found = found.get(key, found) if isinstance(found, dict) else found
    ranks = [rank for path in found if isinstance(path, list) for rank in path] if isinstance(found, list) else [None]
    if not all(type(rank) is int for rank in ranks) or not all(isinstance(path, list) for path in found):
        raise ConfigError(f"the file {tree!r} holds no tree; it must hold rank paths, such as [[0], [0, 0], [1]]")
    return list(found)


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


class Medusa(DrafterBase):
    """Trained heads, stacked so that all run at once, and the tree."""

    name = "medusa"
    draws = False
    Config = MedusaConfig
    taps = frozenset({FINAL})
    fixed_cost_rows = 2  # the heads' own products, and the output matrix once more

    def __init__(self, config: MedusaConfig, heads: MedusaHeads, target: Target) -> None:
        super().__init__(config)
        self.vocabulary = DraftVocabulary(heads.draft_tokens, target)
        own = heads.config
        weights = {name: weight.detach() for name, weight in heads.named_parameters()}
        numbers = range(own.heads)
        # Per layer [K, D, D], transposed, and [K, 1, D].
        self._blocks = [
            (
                torch.stack([weights[f"{head}.{layer}.linear.weight"].T for head in numbers]),
                torch.stack([weights[f"{head}.{layer}.linear.bias"][None] for head in numbers]),
            )
            for layer in range(own.layers)
        ]
        self._matrices = [weights[f"{head}.{own.layers}.weight"] for head in numbers] if own.own_head else None
        self.grown = grow(own.accuracy, _MOST) if config.tree is None and own.accuracy else []
        if self.grown:
            self.nodes = [Node(node.parent, node.rank, node.depth) for node in self.grown]
        else:
            paths = paths_of(config.tree or "mc_sim_7b_63")
            if config.tree is None:
                paths = [path for path in paths if len(path) <= own.heads and max(path) < own.ranks]
            check_tree(paths, heads=own.heads, ranks=own.ranks)
            self.nodes = nodes_of(paths)
        self._depth = max(node.depth for node in self.nodes)
        self.ranks = max(node.rank for node in self.nodes) + 1

    @classmethod
    def build(cls, config: MedusaConfig, target: Target) -> Medusa:
        """Load the heads for a target.

        Raises:
            CheckpointError: no heads, broken ones, or those of another model.
            ConfigError: a tree that the heads or the vocabulary cannot fill.
        """
        heads = MedusaHeads.from_pretrained(weights_folder(config.heads, target, "medusa.heads"))
        check_fit(heads.config, target, cls.name, check_target=config.check_target)
        return cls(config, heads.to(target.head_device, target.dtype), target)

    def start(self, context: Context) -> MedusaSession:
        return MedusaSession(self, context)

    @torch.no_grad()
    def guesses(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, heads, ranks] per head the numbers of its likeliest tokens, best first, from hidden states [N, D]."""
        weight, _ = self._blocks[0]
        states = hidden.to(weight.device, weight.dtype).expand(self._depth, *hidden.shape)  # [K, N, D]
        for weight, bias in self._blocks:
            states = states + F.silu(torch.baddbmm(bias[: self._depth], states, weight[: self._depth]))
        if self._matrices is None:
            logits = self.vocabulary.head(states.flatten(0, 1)).view(*states.shape[:2], -1)
        else:
            logits = torch.stack([F.linear(rows, own) for rows, own in zip(states, self._matrices, strict=False)])
        return logits.topk(self.ranks, -1).indices.transpose(0, 1)

    def numbers(self, hidden: Sequence[torch.Tensor]) -> list[list[list[int]]]:
        """The same as lists, of the [1, D] that each sequence brought."""
        found: list[list[list[int]]] = self.guesses(torch.cat([*hidden])).tolist()
        return found


class MedusaSession(BatchedSession):
    def __init__(self, drafter: Medusa, context: Context) -> None:
        self._drafter, self._context, self._nodes = drafter, context, drafter.nodes
        costs, length = context.costs, context.prompt_length
        if drafter.grown:
            self._nodes = drafter.nodes[: paying(drafter.grown, costs, length)]
        elif drafter.config.tree is None:
            self._nodes = drafter.nodes[: costs.tree_rows(length, len(drafter.nodes))]
        self._seen: torch.Tensor | None = None  # [T, D] of the latest step; none for a prompt of one token ...
        self._last = 0  # ... and the row before the root
        self._guesses: list[list[int]] | None = None  # numbers, where they came with the step

    def passes(self, room: int) -> Passes[Draft]:
        """The tree, less what is deeper than the text may get or does not fit."""
        context = self._context
        deepest = context.remaining - 1
        tokens, parents = [context.root], [-1]
        if self._seen is None or room < 2 or deepest < 1:
            return Draft(tokens, parents)
        guesses, vocabulary = self._guesses, self._drafter.vocabulary
        if guesses is None:
            guesses = yield Pass(self._drafter.numbers, self._seen[self._last : self._last + 1])
        rows = [0]
        for node in self._nodes:
            if len(tokens) == room:
                break
            rows.append(len(tokens))
            if node.depth <= deepest:  # its parent is no deeper, so it is there
                tokens.append(vocabulary.token(guesses[node.depth - 1][node.rank]))
                parents.append(rows[node.parent])
        return Draft(tokens, parents)

    def ask(self, question: Question) -> torch.Tensor | None:
        hidden = question.taps[FINAL]
        if question.last is None:
            return None
        return self._drafter.guesses(hidden.index_select(0, question.last.to(hidden.device)))

    def observe(self, seen: Observation) -> None:
        self._seen, self._last, self._guesses = seen.taps[FINAL], seen.path[-1], None
        if seen.answer is not None:
            size = self._drafter.ranks
            self._guesses = [list(seen.answer[at : at + size]) for at in range(0, len(seen.answer), size)]
