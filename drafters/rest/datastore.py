"""A corpus on disk to draft from: its tokens and their suffix array, both memory-mapped.

A datastore is a folder of three files. ``tokens.npy`` has big-endian 32-bit unsigned token ids, so that the order of
bytes is the order of tokens; ``suffixes.npy`` has the start of every suffix in ascending order; ``meta.json`` describes
their sources. The same sources and tokenizer give the same bytes.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from drafters.rest.stdlib_corpus import STDLIB, read_files
from drafters.shared.fingerprint import known_tokenizer, tokenizer_fingerprint
from specdec.engine.conversations import is_text, turns_of
from specdec.errors import CheckpointError, ConfigError, shown
from specdec.settings.files import check_place, decoded, replacing, write_json
from specdec.settings.formats import Record, json_records, read_content
from specdec.settings.validation import AtLeast1, read_json
from specdec.target import Target

__all__ = ["SEPARATOR", "Datastore", "build_datastore", "opened", "read_documents", "suffix_array"]

SEPARATOR = 2**32 - 1
"""The separator behind every document; it is in no text, so no match crosses documents."""

_TOKENS, _SUFFIXES, _META = "tokens.npy", "suffixes.npy", "meta.json"

Array = npt.NDArray[Any]


class Datastore:
    """An open datastore.

    Args:
        path: the datastore's folder.

    Attributes:
        tokens: [n] '>u4', each document with ``SEPARATOR`` behind it.
        suffixes: [n] start of every suffix, in ascending order of the suffixes.
        meta: the record that ``build_datastore`` wrote.

    Raises:
        CheckpointError: there is no datastore, or an empty one, or one with a file that is truncated or of another
            build.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.meta = _read_meta(self.path)
        self.tokens = self._map(_TOKENS)
        self.suffixes = self._map(_SUFFIXES)
        # Plain memoryviews: indexing a numpy array costs ten times as much, and a search does it a hundred times.
        self._bytes = memoryview(self.tokens.view(np.uint8))  # type: ignore[arg-type]
        self._starts = memoryview(self.suffixes)  # type: ignore[arg-type]

    def _map(self, name: str) -> Array:
        path, size = self.path / name, self.meta["tokens"]
        try:
            array: Array = np.load(path, mmap_mode="r")
            if not isinstance(array, np.ndarray):
                raise ValueError("it is an archive of arrays")
        except Exception as error:  # numpy parses the first line as Python literals, which can fail in many ways
            raise CheckpointError(
                f"the datastore file {str(path)!r} is missing or cut short: {error}; "
                "run `specdec datastore build` again"
            ) from error
        if array.shape != (size,) or array.dtype != np.dtype(">u4" if name == _TOKENS else self.meta["suffix_type"]):
            raise CheckpointError(
                f"the datastore file {str(path)!r} holds {list(array.shape)} of {array.dtype}, its meta.json says "
                f"{size} tokens; the files are of two builds: run `specdec datastore build` again"
            )
        return array

    def __len__(self) -> int:
        return len(self.tokens)

    def check(self, target: Target) -> Datastore:
        """The datastore itself, after a check that its tokenizer is the target's, as far as both are known.

        Raises:
            CheckpointError: the tokenizers differ.
        """
        if self.meta["vocab_size"] > target.vocab_size:
            raise CheckpointError(
                f"the datastore {str(self.path)!r} was built with a tokenizer of {self.meta['vocab_size']} tokens, the "
                f"target's vocabulary has {target.vocab_size}; build it with the target's tokenizer"
            )
        theirs, own = known_tokenizer(target), self.meta.get("tokenizer")
        if theirs is not None and own is not None and theirs != own:
            raise CheckpointError(
                f"the datastore {str(self.path)!r} was built with another tokenizer ({own[:12]}) than the target's "
                f"({theirs[:12]}), of the same size; build it with `specdec datastore build --tokenizer MODEL`"
            )
        return self

    def find(self, tokens: Sequence[int]) -> range:
        """The range in ``suffixes`` of those that start with ``tokens``; empty where there are none."""
        pattern = np.asarray(tokens, ">u4").tobytes()
        size, data = len(pattern), self._bytes

        def head(start: int) -> bytes:
            return data[4 * start : 4 * start + size].tobytes()

        first = bisect_left(self._starts, pattern, key=head)
        if first == len(self._starts) or head(self._starts[first]) != pattern:
            return range(first, first)
        return range(first, bisect_right(self._starts, pattern, lo=first, key=head))

    def longest_suffix(self, tokens: Sequence[int], least: int) -> tuple[int, range]:
        """The length of the longest suffix of ``tokens`` in the corpus, if ``least`` or more, else 0; and its range.

        Every suffix of a suffix in the corpus is in the corpus too, so bisection finds the length.
        """
        best, places = 0, range(0)
        low, high = least, len(tokens)
        while low <= high:
            size = (low + high) // 2 if best else low
            matches = self.find(tokens[len(tokens) - size :])
            if matches:
                best, places, low = size, matches, size + 1
            else:
                high = size - 1
        return best, places

    def continuations(self, places: range, skip: int, size: int, limit: int) -> Array:
        """[M, size] int64 tokens behind ``skip`` tokens, at no more than ``limit`` of ``places``, evenly spread.

        The rows are in ascending order; from the end of a document on, tokens are -1.
        """
        count = min(len(places), limit)
        chosen = places.start + np.arange(count, dtype=np.int64) * len(places) // max(count, 1)
        index = self.suffixes[chosen].astype(np.int64)[:, None] + np.arange(skip, skip + size)  # [M, size]
        rows: Array = self.tokens[np.clip(index, 0, len(self) - 1)].astype(np.int64)
        # The separator is not a token, and a broken file may have others that are not, and starts outside the corpus.
        outside = (rows >= self.meta["vocab_size"]) | (index < 0) | (index >= len(self))
        ended = np.logical_or.accumulate(outside, axis=1)
        rows[ended] = -1
        return rows


_OPEN: WeakValueDictionary[tuple[str, str], Datastore] = WeakValueDictionary()


def opened(path: str | Path) -> Datastore:
    """The datastore in a folder; one that is open already is shared, as its pages are in memory.

    Raises:
        CheckpointError: as for ``Datastore``.
    """
    meta = _read_meta(Path(path))
    key = (str(Path(path).resolve()), json.dumps(meta, sort_keys=True))
    store = _OPEN.get(key)
    if store is None:
        store = _OPEN[key] = Datastore(path)
    return store


@dataclass(frozen=True, kw_only=True)
class _Meta:
    """The content of ``meta.json``."""

    __pydantic_config__: ClassVar = {"strict": True}

    format: Literal[1]
    tokens: AtLeast1
    documents: int
    vocab_size: AtLeast1
    suffix_type: Literal["<u4", "<i8"]
    sha256: str
    tokenizer: str | None = None


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        return asdict(read_json(_Meta, (path / _META).read_bytes()))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"no datastore at {str(path)!r}, as {_META} says: {error}; make one with `specdec datastore build SOURCE "
            f"--out {path}`"
        ) from error


def build_datastore(sources: Iterable[str | Path], tokenizer: Any, out: str | Path) -> Datastore:
    """Tokenize sources, sort their suffixes, and move the finished datastore to ``out``.

    Args:
        sources: folders (every text file in them that is not hidden, in order of path), text files, ShareGPT files (the
            assistant's turns), or ``stdlib`` (Python's own sources, except those that training holds out); see
            :mod:`specdec.settings.formats` for file formats. In a folder, JSON of any other kind counts as text.
        tokenizer: transformers' tokenizer of the model that will draft from the datastore.
        out: the folder to write; it replaces an older datastore there.

    Raises:
        ConfigError: a source does not exist, the sources have no tokens, or ``out`` exists and is not a datastore.
    """
    out, paths = Path(out), [Path(source) for source in sources]
    if out.exists() and not (out / _META).exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{str(out)!r} exists and is no datastore; give a new folder")
    check_place(out, "the datastore", folder=True)
    pieces, documents = [], 0
    for text in read_documents(paths):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if ids:
            pieces.append(np.asarray([*ids, SEPARATOR], np.uint32))
            documents += 1
    if not pieces:
        raise ConfigError(
            f"the sources {', '.join(map(str, paths)) or '(none)'} hold no tokens; give UTF-8 text, a folder of it, "
            "or a ShareGPT file with assistant turns"
        )
    tokens = np.concatenate(pieces).astype(">u4")
    suffixes = suffix_array(tokens)
    meta = {
        "format": 1,
        "tokens": len(tokens),
        "documents": documents,
        "vocab_size": len(tokenizer),
        "suffix_type": suffixes.dtype.str,
        "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
        "tokenizer": tokenizer_fingerprint(tokenizer),
    }
    with replacing(out) as new:
        new.mkdir()
        np.save(new / _TOKENS, tokens)
        np.save(new / _SUFFIXES, suffixes)
        write_json(new / _META, meta)
    return Datastore(out)


def read_documents(sources: Sequence[Path]) -> Iterator[str]:
    """The texts of the sources, one for each file, or for each assistant turn of a ShareGPT file.

    Raises:
        ConfigError: a source does not exist, or its content does not fit its name.
    """
    for source in sources:
        if str(source) == STDLIB and not source.exists():
            yield from (text for _, text in read_files(held_out=False))
        elif source.is_dir():
            for path in sorted(source.rglob("*")):
                hidden = any(part.startswith(".") for part in path.relative_to(source).parts)
                if path.is_file() and not hidden:
                    yield from _texts_in(path)
        else:
            content = read_content(source, "the source")
            yield from [content] if isinstance(content, str) else _assistant_turns(source, content)


def _texts_in(path: Path) -> Iterator[str]:
    """The texts of a file in a folder; other kinds of files have none."""
    try:
        text = decoded(path.read_bytes())
    except ValueError:  # not text, for example a picture
        return
    records = json_records(text) or []
    if any(turns_of(record.value) is not None for record in records):
        yield from _assistant_turns(path, records)
    else:
        yield text


def _assistant_turns(source: Path, records: Sequence[Record]) -> Iterator[str]:
    """The assistant's turns in a ShareGPT file."""
    for record in records:
        turns = turns_of(record.value)
        if turns is None:
            raise ConfigError(
                f"{str(source)!r} is no ShareGPT file: its {record.place} is {shown(record.value)}; a conversation is "
                '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}'
            )
        yield from (text for role, text in turns if role == "assistant" and is_text(text))


def suffix_array(tokens: Array) -> Array:
    """The starts of all suffixes in ascending order, as uint32, or as int64 where there are too many.

    The package ``pydivsufsort`` computes the array if it is installed; otherwise ``_doubling`` does, more slowly. Both
    give the same result, since no two suffixes are equal.
    """
    ranks = np.unique(tokens, return_inverse=True)[1].astype(np.uint32)
    try:
        order = importlib.import_module("pydivsufsort").divsufsort(ranks)
    except ImportError:
        order = _doubling(ranks)
    return np.asarray(order, np.uint32 if len(tokens) < 2**32 else np.int64)


def _doubling(ranks: Array) -> Array:
    """Prefix doubling (Manber and Myers 1993): sort by 1, 2, 4, ... tokens, each by pairs of the previous ranks."""
    size, rank = 1, ranks.astype(np.int64)
    while True:
        after = np.zeros_like(rank)  # 0: the end of the text, which sorts before any token
        after[:-size] = rank[size:] + 1
        pairs = rank * (int(after.max()) + 1) + after
        order = np.argsort(pairs, kind="stable")
        fresh = np.concatenate([[0], np.cumsum(np.diff(pairs[order]) != 0)])
        if fresh[-1] == len(rank) - 1:
            return order
        rank = np.empty_like(rank)
        rank[order] = fresh
        size *= 2
