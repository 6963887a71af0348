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
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from threading import RLock
from typing import Any, NoReturn

import torch

from specdec.engine.prefix_cache import KeptText, PrefixCache, alike
from specdec.engine.prefix_nodes import Node, NodePiece, Path, below
from specdec.settings.parsing import check_positive
from specdec.target import Target

__all__ = ["PrefixTree"]


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
        self._roots: dict[tuple[int, str], tuple[Target, object, Node]] = {}  # by target and salt
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

    def _root(self, text: KeptText) -> Node:
        """What begins all texts of a model as it is now; whatever was known of it as it was before is forgotten."""
        place = id(text.target), text.salt
        target, version, root = self._roots.get(place, (None, None, None))
        if root is None or target is not text.target or version != text.version:
            if root is not None:
                self._bytes -= sum(node.nbytes for node in below(root))
            root = Node([], 0, None, [], {})
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
        if not count or not text.cache.take(Path(path), count):
            return {}
        seen = [*takewhile(lambda node: text.taps.keys() <= node.taps.keys(), path)]
        return {layer: torch.cat([node.taps[layer] for node in seen])[:count] for layer in text.taps if seen}

    def _path(self, text: KeptText) -> tuple[list[Node], int]:
        """The nodes that a text begins with, and how many of their tokens it may copy; its last token is its root."""
        node, tokens, path, size = self._root(text), text.tokens, list[Node](), 0
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
        while path and text.cache.points(Path(path), counts[-1]) < counts[-1]:
            path.pop()
            counts.pop()
        return path, counts[-1] if counts else 0

    def _insert(self, text: KeptText) -> None:
        """Put into the tree what of a text is not there."""
        node, tokens = self._root(text), list(text.tokens[: min(text.cache.length, len(text.tokens))])
        known = {layer: torch.cat(pieces) for layer, pieces in text.taps.items() if pieces}
        size, path = 0, list[Node]()
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
        self, text: KeptText, known: dict[int, torch.Tensor], tokens: list[int], parent: Node, path: list[Node]
    ) -> Node | None:
        """A leaf with the tokens behind those that its parent ends with; None where there is no room."""
        start, end, cache = parent.end, len(tokens), text.cache
        taps = {layer: hidden[start:end] for layer, hidden in known.items() if len(hidden) >= end}
        held = [(group, end - min(max(start, group.first), end)) for group in cache.groups]
        size = sum(count * group.slot_bytes for group, count in held)
        if not self._make_room(size + sum(rows.nbytes for rows in taps.values()), path):
            return None
        pieces = [NodePiece.of(group, start, end) for group in cache.groups]
        leaf = Node(tokens[start:], start, parent, pieces, {layer: rows.clone() for layer, rows in taps.items()})
        leaf.used = self._clock
        parent.children[tokens[start]] = leaf
        self._bytes += leaf.nbytes
        return leaf

    def _make_room(self, size: int, path: Collection[Node]) -> bool:
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

    def _nodes(self) -> Iterator[Node]:
        for _, _, root in self._roots.values():
            yield from below(root)
