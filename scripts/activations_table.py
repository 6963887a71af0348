"""The table of ``activations`` in docs/quantised.md: how far each arithmetic is from float32, on GGUF files.

    python scripts/activations_table.py FILE.gguf [FILE.gguf ...]        # where xllamacpp is installed

All systems read the same tokens, this repository's pages in windows of 512. The reference is the
dequantised model in float32. A cell is the mean Kullback-Leibler divergence of the reference's distribution from the
system's, in thousandths of a nat, and the share of positions at which both have the same likeliest token. Rows of these
files are replaced, all others stay. A system whose logits are no numbers is said, and the script exits with 1.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/quantised.md"
MARKS = "<!-- activations_table -->\n", "<!-- end -->"
WINDOW, PART = 512, 128  # tokens that see each other; rows of a forward, for whose logits there must be memory
REFERENCE = {"execution": "modules", "dtype": "float32"}
SYSTEMS: dict[str, dict[str, Any] | None] = {
    "default rows": {},
    "int8 rows": {"activations": "int8"},
    "int8 rows, float32": {"activations": "int8", "dtype": "float32"},
    "llama.cpp": None,
    "dequantised, bfloat16": {"execution": "modules", "dtype": "bfloat16"},
}
LLAMA = "2026.9.11063"
"""The version of xllamacpp whose structures these are."""

SILENCE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)

Logits = Callable[[list[int]], Iterator[Any]]
"""From a window's tokens to its parts' logits [rows, vocabulary], float32."""


class ModelParams(ctypes.Structure):
    """``llama_model_params``: its defaults are taken, so that its size alone matters."""

    _fields_ = (
        ("pointers", ctypes.c_void_p * 2),
        ("numbers", ctypes.c_int32 * 5),
        ("others", ctypes.c_void_p * 4),
        ("switches", ctypes.c_bool * 6),
    )


class ContextParams(ctypes.Structure):
    """``llama_context_params``; what is set has a name."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("context", "batch", "rows")),
        ("most", ctypes.c_uint32 * 4),
        *((name, ctypes.c_int32) for name in ("threads", "threads_of_batch")),
        ("kinds", ctypes.c_int32 * 5),
        ("rotary", ctypes.c_float * 8),
        ("called", ctypes.c_void_p * 2),
        ("stored", ctypes.c_int32 * 2),
        ("aborts", ctypes.c_void_p * 2),
        ("switches", ctypes.c_bool * 6),
        ("samplers", ctypes.c_void_p * 3),
    )


class Batch(ctypes.Structure):
    """``llama_batch``; positions and sequences are followed where they are NULL."""

    _fields_ = (
        ("count", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("tokens", "embeddings", "positions", "counts", "sequences", "wanted")),
    )


FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_model_default_params": (ModelParams, []),
    "llama_context_default_params": (ContextParams, []),
    "llama_model_load_from_file": (ctypes.c_void_p, [ctypes.c_char_p, ModelParams]),
    "llama_init_from_model": (ctypes.c_void_p, [ctypes.c_void_p, ContextParams]),
    "llama_model_get_vocab": (ctypes.c_void_p, [ctypes.c_void_p]),
    "llama_vocab_n_tokens": (ctypes.c_int32, [ctypes.c_void_p]),
    "llama_get_memory": (ctypes.c_void_p, [ctypes.c_void_p]),
    "llama_memory_clear": (None, [ctypes.c_void_p, ctypes.c_bool]),
    "llama_decode": (ctypes.c_int32, [ctypes.c_void_p, Batch]),
    "llama_log_set": (None, [type(SILENCE), ctypes.c_void_p]),
    "llama_get_logits": (ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p]),
}
"""What they return, and what they take."""


def llama(file: str, threads: int) -> Logits:
    """llama.cpp's, as it computes by default. Raises OSError where it does not read the file."""
    import numpy
    import torch
    import xllamacpp

    found = ctypes.CDLL(next(iter(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))).as_posix())
    for name, (result, arguments) in FUNCTIONS.items():
        getattr(found, name).restype, getattr(found, name).argtypes = result, arguments
    found.llama_log_set(SILENCE, None)
    found.llama_backend_init()
    model = found.llama_model_load_from_file(file.encode(), found.llama_model_default_params())
    given = found.llama_context_default_params()
    given.context, given.batch, given.rows = WINDOW, PART, PART
    given.threads = given.threads_of_batch = threads
    context = found.llama_init_from_model(model, given) if model else None
    if not context:
        raise OSError(f"llama.cpp does not read {file}")
    vocabulary = found.llama_vocab_n_tokens(found.llama_model_get_vocab(model))

    def logits(window: list[int]) -> Iterator[Any]:
        found.llama_memory_clear(found.llama_get_memory(context), True)
        for begin in range(0, len(window), PART):
            part = numpy.array(window[begin : begin + PART], dtype=numpy.int32)
            wanted = numpy.ones(len(part), dtype=numpy.int8)
            if failed := found.llama_decode(context, Batch(len(part), part.ctypes.data, wanted=wanted.ctypes.data)):
                raise OSError(f"llama_decode returned {failed}")
            yield torch.from_numpy(numpy.ctypeslib.as_array(found.llama_get_logits(context), (len(part), vocabulary)))

    return logits


def own(file: str, given: dict[str, Any]) -> Logits:
    """Those of the engine's target."""
    from specdec import Engine
    from specdec.step.step_io import StepInput

    target: Any = Engine.from_pretrained(file, drafter="none", **given).target

    def logits(window: list[int]) -> Iterator[Any]:
        with target.active():
            cache = target.new_cache(capacity=len(window), rows=PART)
            for begin in range(0, len(window), PART):
                part = window[begin : begin + PART]
                yield target.forward(StepInput.of(cache, part)).logits.float()
                cache.commit(range(len(part)))

    return logits


def windows(file: str, count: int) -> list[list[int]]:
    """Tokens of this repository's pages, each window beginning as a text does."""
    from specdec.models.gguf import GgufFile

    tokenizer: Any = GgufFile.read(Path(file)).tokenizer()
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids, each = list[int](), WINDOW - len(first)
    for place in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        ids += tokenizer(place.read_text("utf-8"), add_special_tokens=False)["input_ids"]
    return [first + ids[begin : begin + each] for begin in range(0, min(count, len(ids)) // each * each, each)]


def compare(expected: Any, found: Any) -> tuple[float, int]:
    """The sum of the rows' divergences in nats, and how many rows have the same likeliest token."""
    size = min(expected.shape[-1], found.shape[-1])  # of an embedding that has more rows than there are tokens
    one, other = (rows[:, :size].log_softmax(-1) for rows in (expected, found))
    divergences = (one.exp() * (one - other)).sum(-1).double()
    return float(divergences.sum()), int((one.argmax(-1) == other.argmax(-1)).sum())


def measured(file: str, count: int, threads: int) -> list[str]:
    """A file's row of the table."""
    import torch

    torch.set_num_threads(threads)
    texts = windows(file, count)
    reference = own(file, REFERENCE)
    systems = {name: llama(file, threads) if given is None else own(file, given) for name, given in SYSTEMS.items()}
    totals, rows = {name: [0.0, 0.0] for name in SYSTEMS}, 0
    for number, window in enumerate(texts):
        for expected, *parts in zip(*(logits(window) for logits in (reference, *systems.values())), strict=True):
            rows += len(expected)
            for name, found in zip(SYSTEMS, parts, strict=True):
                totals[name] = [a + b for a, b in zip(totals[name], compare(expected, found), strict=True)]
        print(f"{Path(file).name}: {number + 1} of {len(texts)} windows", *cells(totals, rows), sep="  ", flush=True)
    if broken := [name for name, (divergence, _) in totals.items() if divergence != divergence]:
        sys.exit(f"{file}: not a number by {', '.join(broken)}")
    return [Path(file).name, f"{rows:,}", *cells(totals, rows)]


def cells(totals: dict[str, list[float]], rows: int) -> list[str]:
    """A system's divergence in thousandths of a nat, and its share of equal tokens."""
    return [f"{1000 * nats / rows:.3f}; {100 * equal / rows:.2f} %" for nats, equal in totals.values()]


def merged(page: str, rows: list[list[str]]) -> str:
    """The page with these rows in place of those of the same files."""
    begin, end = page.index(MARKS[0]) + len(MARKS[0]), page.index(MARKS[1], page.index(MARKS[0]))
    former = [[cell.strip() for cell in line.strip("|").split("|")] for line in page[begin:end].splitlines()[2:]]
    table = {row[0]: row for row in (*former, *rows)}
    lines = ["| " + " | ".join(("file", "tokens", *SYSTEMS)) + " |", "|---|" + "---:|" * (1 + len(SYSTEMS))]
    lines += ["| " + " | ".join(table[name]) + " |" for name in sorted(table)]
    return page[:begin] + "\n".join(lines) + "\n" + page[end:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    found = {package.version for package in metadata.distributions(name="xllamacpp")}
    if LLAMA not in found:
        there = " and ".join(sorted(found)) or "none"
        sys.exit(f"this script calls xllamacpp {LLAMA}, and {there} is installed: pip install xllamacpp=={LLAMA}")
    for file in options.files:
        row = measured(str(Path(file).resolve()), options.tokens, options.threads)
        PAGE.write_text(merged(PAGE.read_text("utf-8"), [row]), "utf-8")


if __name__ == "__main__":
    main()
