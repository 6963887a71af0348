"""Nodes of a prefix tree: pieces of texts with the keys and values of their tokens, and paths of such pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from specdec.step.state import LayerState, Piece

__all__ = ["Node", "NodePiece", "Path", "below"]


@dataclass(slots=True, eq=False)
class NodePiece:
    """Keys and values [layers, 1, heads, n, dim] of one group of layers, at the last n positions of a node."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, group: LayerState, start: int, end: int) -> NodePiece:
        """A copy of what a cache holds of the positions [start, end)."""
        first = min(max(start, group.first), end)
        return cls(*group.read(first, end))

    @property
    def size(self) -> int:
        return self.keys.shape[3]

    def part(self, first: int, last: int) -> NodePiece:
        """A copy, so that the rest may be freed."""
        return NodePiece(*(store.narrow(3, first, last - first).clone() for store in (self.keys, self.values)))

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


@dataclass(slots=True, eq=False)
class Node:
    """Tokens at the positions [start, end) of all texts that go through it.

    Attributes:
        taps: layer -> [n, D] hidden states of all its tokens.
        used: when it last was, on the tree's clock.
    """

    tokens: list[int]
    start: int
    parent: Node | None
    pieces: list[NodePiece]
    taps: dict[int, torch.Tensor]
    used: int = 0
    children: dict[int, Node] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces) + sum(hidden.nbytes for hidden in self.taps.values())

    def split(self, size: int) -> Node:
        """Have no more than the tokens behind the first ``size``; the node of those, put between it and its parent."""
        pieces, rest = list[NodePiece](), list[NodePiece]()
        for piece in self.pieces:
            held = max(0, piece.size - (len(self.tokens) - size))  # of the first tokens
            pieces.append(piece.part(0, held))
            rest.append(piece.part(held, piece.size))
        taps = {layer: hidden[:size].clone() for layer, hidden in self.taps.items()}
        upper = Node(self.tokens[:size], self.start, self.parent, pieces, taps, self.used, {self.tokens[size]: self})
        assert self.parent is not None
        self.parent.children[self.tokens[0]] = upper
        self.pieces, self.taps = rest, {layer: hidden[size:].clone() for layer, hidden in self.taps.items()}
        self.tokens, self.start, self.parent = self.tokens[size:], self.start + size, upper
        return upper


def below(root: Node) -> Iterator[Node]:
    """All nodes below one."""
    left = list(root.children.values())
    while left:
        node = left.pop()
        left += node.children.values()
        yield node


class Path:
    """Nodes one below the other, as what is known of a text."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.groups = [_Pieces(nodes, place) for place in range(len(nodes[0].pieces))]


class _Pieces:
    """What a path has of one group of layers."""

    def __init__(self, nodes: Sequence[Node], place: int) -> None:
        self._pieces = [(node.start, node.end, node.pieces[place]) for node in nodes]
        lacking = ((end - piece.size, start) for start, end, piece in reversed(self._pieces))
        self.first = next((held for held, start in lacking if held > start), 0)

    def parts(self, first: int, last: int) -> Iterator[Piece]:
        for begin, end, piece in self._pieces:
            start, stop = max(first, begin), min(end, last)
            if start < stop:
                offset = start - (end - piece.size)
                keys, values = (store.narrow(3, offset, stop - start) for store in (piece.keys, piece.values))
                yield start, keys, values
