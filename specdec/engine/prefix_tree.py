"""Prefix tree: keys and values of many texts, with common beginnings stored once, up to a number of bytes.

It is a radix tree over token ids. A node is a piece of text that was run, with the keys and values of its tokens and
the hidden states that drafters read. A new text walks down as far as its tokens agree and gets copies; it may also
copy from a text that is still being decoded. A text that ends adds to the tree what is missing. When the tree is full,
the least recently used leaf is removed.

The rules are those of :mod:`specdec.engine.prefix_cache`, and nodes give their keys as a running text's cache does
(:class:`specdec.step.cache.Known`). For layers with a sliding window a node holds the keys that were left; if these
lack a key that the next token sees, the text starts from a shorter beginning. After a change of the model the tree
starts empty.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from threading import RLock
from typing import Any, NoReturn

import torch

from specdec.engine.prefix_cache import KeptText, PrefixCache, alike
from specdec.settings.parsing import check_positive
from specdec.step.state import LayerState, Piece
from specdec.target import Target

__all__ = ["PrefixTree"]


@dataclass(slots=True, eq=False)
class _Piece:
    """Keys and values [layers, 1, heads, n, dim] of one group of layers, at the last n positions of a node."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, group: LayerState, start: int, end: int) -> _Piece:
        """A copy of what a cache holds of the positions [start, end)."""
        first = min(max(start, group.first), end)
        return cls(*group.read(first, end))

    @property
    def size(self) -> int:
        return self.keys.shape[3]

    def part(self, first: int, last: int) -> _Piece:
        """A copy, so that the rest may be freed."""
        return _Piece(*(store.narrow(3, first, last - first).clone() for store in (self.keys, self.values)))

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


@dataclass(slots=True, eq=False)
class _Node:
    """Tokens at the positions [start, end) of all texts that go through it.

    Attributes:
        taps: layer -> [n, D] hidden states of all its tokens.
        used: when it last was, on the tree's clock.
    """

    tokens: list[int]
    start: int
    parent: _Node | None
    pieces: list[_Piece]
    taps: dict[int, torch.Tensor]
    used: int = 0
    children: dict[int, _Node] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces) + sum(hidden.nbytes for hidden in self.taps.values())

    def split(self, size: int) -> _Node:
        """Have no more than the tokens behind the first ``size``; the node of those, put between it and its parent."""
        pieces, rest = list[_Piece](), list[_Piece]()
        for piece in self.pieces:
            held = max(0, piece.size - (len(self.tokens) - size))  # of the first tokens
            pieces.append(piece.part(0, held))
            rest.append(piece.part(held, piece.size))
        taps = {layer: hidden[:size].clone() for layer, hidden in self.taps.items()}
        upper = _Node(self.tokens[:size], self.start, self.parent, pieces, taps, self.used, {self.tokens[size]: self})
        assert self.parent is not None
        self.parent.children[self.tokens[0]] = upper
        self.pieces, self.taps = rest, {layer: hidden[size:].clone() for layer, hidden in self.taps.items()}
        self.tokens, self.start, self.parent = self.tokens[size:], self.start + size, upper
        return upper


class _Salted(PrefixCache):
    """A tree for the texts of one salt."""

    def __init__(self, tree: PrefixTree, salt: str) -> None:
        self._tree, self._salt = tree, salt

    def begin(self, *text: Any, **options: Any) -> tuple[KeptText, dict[int, torch.Tensor]]:
        return self._tree.begin(*text, **options, salt=self._salt)

    def keep(self, text: KeptText) -> None:
        self._tree.keep(text)


@dataclass(slots=True, eq=False)
class _Running:
    """A text that may go on: what is known of it, and whether its sequence, which has the text, still is there."""

    known: KeptText
    text: weakref.ref[KeptText]


class PrefixTree(PrefixCache):
    """Keeps the beginnings of many texts: ``prefix_cache=`` of any number of generations, in sequence or at once.

    Generations are the same as without one, see :class:`specdec.engine.prefix_cache.PrefixCache`.

    Args:
        max_bytes: most bytes that the tree holds. The caches of texts that are still being decoded do not count; what
            does not fit when a text ends is not kept.

    Raises:
        ConfigError: a bound below 1.
    """

    instead = "share it, in any number of threads; in another process make a new one"

    def __copy__(self) -> NoReturn:
        self._refuse_copy()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._refuse_copy()

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        check_positive(max_bytes=max_bytes)
        self.max_bytes, self._left = max_bytes, sys.maxsize
        self._lock = RLock()  # engines in several threads may share one
        self._roots: dict[tuple[int, str], tuple[Target, object, _Node]] = {}  # by target and salt
        self._running: list[_Running] = []
        self._bytes = self._clock = 0

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        with self._lock:
            self._sweep()
            return self._bytes

    def bound(self, max_bytes: int) -> None:
        """Lower the limit of kept bytes. A limit above the tree's own ``max_bytes`` has no effect."""
        with self._lock:
            self._left = max(0, max_bytes)
            self._let_go(self._most)

    @property
    def _most(self) -> int:
        return min(self.max_bytes, self._left)

    def clear(self) -> None:
        """Forget all texts."""
        with self._lock:
            self._roots, self._running, self._bytes = {}, [], 0

    def salted(self, salt: str) -> PrefixCache:
        """The same tree for texts with this salt, which share beginnings with each other only, as in vLLM.

        So nobody learns by the time of a first token what others have asked. The salt ``""`` is the tree itself.
        """
        return _Salted(self, salt) if salt else self

    def _taken(self, text: KeptText) -> dict[int, torch.Tensor]:
        with self._lock:
            self._sweep()
            hidden = self._take(text)
            self._running = [one for one in self._running if one.known.cache is not text.cache]  # where it looks again
            self._running.append(_Running(replace(text), weakref.ref(text)))
        return hidden

    def keep(self, text: KeptText) -> None:
        with self._lock:
            self._running = [one for one in self._running if one.known.cache is not text.cache]
            if text.version == text.target.version():
                self._insert(text)

    def _sweep(self) -> None:
        """Keep the texts that were left in the middle, as where they were cancelled."""
        left = [one for one in self._running if one.text() is None]
        for one in left:
            self.keep(one.known)
        if len(self._roots) > 1:  # salts of which nothing is kept any more
            self._roots = {place: found for place, found in self._roots.items() if found[2].children}

    def _root(self, text: KeptText) -> _Node:
        """What begins all texts of a model as it is now; whatever was known of it as it was before is forgotten."""
        place = id(text.target), text.salt
        target, version, root = self._roots.get(place, (None, None, None))
        if root is None or target is not text.target or version != text.version:
            if root is not None:
                self._bytes -= sum(node.nbytes for node in _below(root))
            root = _Node([], 0, None, [], {})
            self._roots[place] = text.target, text.version, root
        return root

    def _take(self, text: KeptText) -> dict[int, torch.Tensor]:
        """Fill a text's empty cache with the longest beginning that is known; the hidden states of these tokens."""
        path, count = self._path(text)
        if (hidden := text.take((running.known for running in self._running), count)) is not None:
            return hidden
        self._clock += 1
        for node in path:
            node.used = self._clock
        if not count or not text.cache.take(_Path(path), count):
            return {}
        seen = [*takewhile(lambda node: text.taps.keys() <= node.taps.keys(), path)]
        return {layer: torch.cat([node.taps[layer] for node in seen])[:count] for layer in text.taps if seen}

    def _path(self, text: KeptText) -> tuple[list[_Node], int]:
        """The nodes that a text begins with, and how many of their tokens it may copy; its last token is its root."""
        node, tokens, path, size = self._root(text), text.tokens, list[_Node](), 0
        most = len(tokens) - 1
        counts = list[int]()
        while size < most and (child := node.children.get(tokens[size])) is not None:
            if not text.forgoes and any(layer not in child.taps for layer in text.taps):
                break
            shared = min(alike(child.tokens, tokens[size : size + len(child.tokens)]), most - size)
            if not shared:
                break
            node, size = child, size + shared
            path.append(child)
            counts.append(size)
            if shared < len(child.tokens):
                break
        while path and text.cache.points(_Path(path), counts[-1]) < counts[-1]:
            path.pop()
            counts.pop()
        return path, counts[-1] if counts else 0

    def _insert(self, text: KeptText) -> None:
        """Put into the tree what of a text is not there."""
        node, tokens = self._root(text), list(text.tokens[: min(text.cache.length, len(text.tokens))])
        known = {layer: torch.cat(pieces) for layer, pieces in text.taps.items() if pieces}
        size, path = 0, list[_Node]()
        self._clock += 1
        while size < len(tokens) and (child := node.children.get(tokens[size])) is not None:
            shared = alike(child.tokens, tokens[size : size + len(child.tokens)])
            node = child if shared == len(child.tokens) else child.split(shared)
            node.used = self._clock
            path.append(node)
            for layer, hidden in known.items():
                if layer not in node.taps and len(hidden) >= node.end:
                    rows = hidden[node.start : node.end]
                    if self._make_room(rows.nbytes, path):
                        node.taps[layer] = rows.clone()
                        self._bytes += rows.nbytes
            size += shared
        # Tokens of which hidden states are known, and those behind them, are nodes of their own.
        seen = {len(hidden) for hidden in known.values() if size < len(hidden) < len(tokens)}
        for end in [*sorted(seen), len(tokens)]:
            if node.end < end and (leaf := self._add(text, known, tokens[:end], node, path)) is not None:
                node = leaf
                path.append(leaf)

    def _add(
        self, text: KeptText, known: dict[int, torch.Tensor], tokens: list[int], parent: _Node, path: list[_Node]
    ) -> _Node | None:
        """A leaf with the tokens behind those that its parent ends with; None where there is no room."""
        start, end, cache = parent.end, len(tokens), text.cache
        taps = {layer: hidden[start:end] for layer, hidden in known.items() if len(hidden) >= end}
        held = [(group, end - min(max(start, group.first), end)) for group in cache.groups]
        size = sum(count * group.slot_bytes for group, count in held)
        if not self._make_room(size + sum(rows.nbytes for rows in taps.values()), path):
            return None
        pieces = [_Piece.of(group, start, end) for group in cache.groups]
        leaf = _Node(tokens[start:], start, parent, pieces, {layer: rows.clone() for layer, rows in taps.items()})
        leaf.used = self._clock
        parent.children[tokens[start]] = leaf
        self._bytes += leaf.nbytes
        return leaf

    def _make_room(self, size: int, path: Collection[_Node]) -> bool:
        """Let go of the leaves that were not used for longest until ``size`` bytes fit.

        The nodes of ``path``, which are in use, would be the last: where the others do not make room, nothing goes.
        """
        if size + sum(node.nbytes for node in path) > self._most:
            return False
        self._let_go(self._most - size)
        return True

    def _let_go(self, size: int) -> None:
        """Keep at most ``size`` bytes."""
        while self._bytes > size:
            leaves = (node for node in self._nodes() if not node.children)
            oldest = min(leaves, key=lambda node: node.used)
            assert oldest.parent is not None
            del oldest.parent.children[oldest.tokens[0]]
            self._bytes -= oldest.nbytes

    def _nodes(self) -> Iterator[_Node]:
        for _, _, root in self._roots.values():
            yield from _below(root)


def _below(root: _Node) -> Iterator[_Node]:
    """All nodes below one."""
    left = list(root.children.values())
    while left:
        node = left.pop()
        left += node.children.values()
        yield node


class _Path:
    """Nodes one below the other, as what is known of a text."""

    def __init__(self, nodes: Sequence[_Node]) -> None:
        self.groups = [_Pieces(nodes, place) for place in range(len(nodes[0].pieces))]


class _Pieces:
    """What a path has of one group of layers."""

    def __init__(self, nodes: Sequence[_Node], place: int) -> None:
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
