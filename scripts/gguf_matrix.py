"""Which GGUF files are read, and as what: docs/gguf.md, from a tiny random file of each architecture and setting.

    python scripts/gguf_matrix.py         # writes docs/gguf.md; half a minute
    python scripts/gguf_matrix.py phi3    # prints the rows of these architectures

Each file is in float32, so that its logits are the same in every program that reads it rightly. They are compared with
llama.cpp's (pip install xllamacpp), after a short prompt and after one longer than windows and original contexts. A
file that is read as another model than llama.cpp reads it as stops the script: it is a defect.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1]))

from specdec import TransformersTarget
from specdec.errors import SpecdecError
from specdec.native.library import library
from tests.gguf_families import (
    CONTEXT,
    DIM,
    FAMILIES,
    HEADS,
    INNER,
    KEYS,
    VOCABULARY,
    WIDTH,
    biases_of,
    fused_of,
    predicting_of,
    shapes_of,
    write_family,
)
from tests.llama_cpp import LlamaCpp, apart
from tests.models import logits_of

PAGE = Path(__file__).parents[1] / "docs/gguf.md"
PROMPTS = [[7, 3, 9], [*range(5, CONTEXT - 4)]]
GELU = ("gemma", "gemma2", "gemma3", "starcoder2")  # which llama.cpp has as a table in float16

HEAD = """# GGUF files by architecture

One row for each architecture and setting that was tried with a tiny random file. *KL* is the larger divergence, in
nats, of the next token's distribution from llama.cpp's on the same file, after a prompt of 3 tokens and one of
{length}, in float64. In float32 on a CPU, layers run `native` (in C) or `fused` (in torch), by
their description. A file that is not read is refused, for the reason given. `mixtral` is a `llama` with experts.

Made by `python scripts/gguf_matrix.py`; the tests hold some rows of each commit to what the script says.

| architecture | file | read | layers run | KL |
| --- | --- | --- | --- | ---: |
"""


@dataclass(frozen=True)
class Case:
    """A file: an architecture, and what is changed of it; ``asked``: the longest text that is asked for."""

    family: str
    change: str = "as converted"
    settings: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    asked: int | None = None

    @property
    def bound(self) -> float:
        """How far apart the same model may be."""
        return 1e-6 if self.family in GELU else 1e-9


def _scaled(kind: str) -> dict[str, Any]:
    return {"rope.scaling.type": kind, "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}


def _command_r_plus() -> dict[str, tuple[int, ...]]:
    """The tensors of 64 layers, in which each head has a norm of its own."""
    own = {name: shape for name, shape in shapes_of("command-r").items() if name.startswith("blk.0.")}
    own |= {f"blk.0.attn_{one}_norm.weight": (heads, DIM) for one, heads in (("q", HEADS), ("k", KEYS))}
    return {name.replace("blk.0", f"blk.{layer}"): shape for layer in range(64) for name, shape in own.items()}


def _shared_expert(family: str, inner: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate": (inner, WIDTH), "up": (inner, WIDTH), "down": (WIDTH, inner)}
    layers = range(FAMILIES[family].layers)
    return {f"blk.{layer}.ffn_{part}_shexp.weight": shape for layer in layers for part, shape in shapes.items()}


def _without(family: str, layers: int) -> dict[str, None]:
    """The tensors of all layers from this one on."""
    return {name: None for name in shapes_of(family) if name.startswith("blk.") and int(name.split(".")[1]) >= layers}


_FACTORS = {"rope_factors_long.weight": (DIM // 2,), "rope_factors_short.weight": (DIM // 2,)}


def _dense_first() -> dict[str, tuple[int, ...] | None]:
    """GLM-4 MoE with a first layer without experts, and with norms of heads."""
    mixed = [name for name in shapes_of("glm4moe") if name.startswith("blk.0.") and ("ffn" in name or "probs" in name)]
    plain = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    layers = range(FAMILIES["glm4moe"].layers)
    return {
        **dict.fromkeys(mixed),
        **{f"blk.0.ffn_{part}.weight": shape for part, shape in plain.items()},
        **{f"blk.{layer}.attn_{one}_norm.weight": (DIM,) for layer in layers for one in "qk"},
    }


_HEAD_BIAS = {"output.bias": (VOCABULARY,)}
_QKVO = ("mixtral", "granite", "granitemoe", "mistral3")  # that llama.cpp reads all biases of
_QKV = (
    *("llama", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi3", "smollm3", "glm4", "olmo2", "olmoe"),
    *("command-r", "cohere2", "exaone4", "ernie4_5", "hunyuan-dense", "hunyuan-moe"),
)
CASES = [
    *map(Case, FAMILIES),
    Case("llama", "frequencies divided one by one (Llama 3.1)", tensors={"rope_freqs.weight": (DIM // 2,)}),
    Case("llama", "head tied to the embedding", tensors={"output.weight": None}),
    *(Case(family, "biases of queries, keys and values", tensors=biases_of(family)) for family in _QKV),
    *(Case(family, "biases of attention", tensors=biases_of(family, output=True)) for family in _QKVO),
    Case("qwen2", "a bias of the head", tensors=_HEAD_BIAS),
    Case("qwen2", "a bias of the head, which is tied", tensors={**_HEAD_BIAS, "output.weight": None}),
    *(
        Case(family, "queries, keys and values in one", tensors=fused_of(family))
        for family in ("llama", "gemma3", "qwen3moe")
    ),
    *(
        Case(family, "queries, keys and values in one, with biases", tensors=fused_of(family, bias=True))
        for family in ("mixtral", "qwen2", "phi3", "ernie4_5", "mistral3")
    ),
    *(Case(family, "linear scaling", _scaled("linear")) for family in ("llama", "qwen2", "gemma3")),
    *(
        Case(family, "YaRN", _scaled("yarn"))
        for family in ("llama", "qwen2", "qwen3", "qwen3moe", "gpt-oss", "mistral3")
    ),
    Case("phi3", "half of each head rotated", {"rope.dimension_count": DIM // 2}),
    Case("phi3", "linear scaling", _scaled("linear")),
    Case("phi3", "short factors, up to the original context", {"rope.scaling.original_context_length": 512}, _FACTORS),
    Case(
        "phi3", "long factors, as more was asked for", {"rope.scaling.original_context_length": 16}, _FACTORS, CONTEXT
    ),
    Case("granitemoe", "a shared expert", {"expert_shared_feed_forward_length": 48}, _shared_expert("granitemoe", 48)),
    Case("command-r", "of 64 layers, which norm queries and keys (Command R+)", {"block_count": 64}, _command_r_plus()),
    Case("glm4moe", "a dense first layer, and norms of heads", {"leading_dense_block_count": 1}, _dense_first()),
    Case("mistral3", "queries that are not scaled", {"attention.temperature_scale": None}),
    Case("olmo2", "a window (OLMo 3)", {"attention.sliding_window": 8}),
    Case("exaone4", "of 5 layers, which have no windows", {"block_count": 5}, _without("exaone4", 5)),
]
CASES += [
    Case(
        family,
        "a layer of multi-token prediction, which `mtp` alone runs",
        {"block_count": FAMILIES[family].layers + 1, "nextn_predict_layers": 1},
        predicting_of(family),
    )
    for family in ("glm4", "glm4moe", "exaone4")
]
CASES.sort(key=lambda case: [*FAMILIES].index(case.family))


@dataclass(frozen=True)
class Row:
    """What a file is read as; ``reason``: why it is refused."""

    case: Case
    runner: str = ""
    apart: float | None = None
    reason: str = ""

    @property
    def said(self) -> str:
        """The row without its last cell."""
        read = f"no: {self.reason}" if self.reason else "yes"
        return f"| `{self.case.family}` | {self.case.change} | {read} | {self.runner} |"

    def __str__(self) -> str:
        return f"{self.said} {'' if self.apart is None else f'{self.apart:.0e}'} |"


def row_of(case: Case, llama_cpp: LlamaCpp, folder: Path) -> Row:
    """Write the case's file, and read it with both.

    Raises:
        RuntimeError: llama.cpp does not read it, or reads another model.
    """
    file = write_family(folder / "a.gguf", case.family, case.settings, case.tensors)
    expected = llama_cpp.logits(file, PROMPTS, VOCABULARY)
    if expected is None:
        raise RuntimeError(f"llama.cpp does not read {case}: the file is written wrongly")
    try:
        target = TransformersTarget.from_pretrained(file, dtype="float64", max_model_len=case.asked)
    except SpecdecError as error:
        return Row(case, reason=_brief(str(error), file))
    found = torch.stack([logits_of(target, prompt)[-1].log_softmax(-1) for prompt in PROMPTS])
    if (far := apart(found, expected)) > case.bound:
        raise RuntimeError(f"{case} is read as another model: its logits are {far:.1e} from llama.cpp's")
    own = TransformersTarget.from_pretrained(file, dtype="float32", max_model_len=case.asked)
    return Row(case, str(own.options["runner"]), far)


def _brief(message: str, file: Path) -> str:
    """The reason of a message, without the file's name and the remedy."""
    reason = message.replace(f" of {str(file)!r}", "").replace(f"{str(file)!r} ", "")
    for end in (";", " here, ", " here: ", ", which"):
        reason = reason.partition(end)[0]
    return reason.removeprefix("the GGUF file ")


def rows(cases: Sequence[Case]) -> Iterator[Row]:
    """The cases' rows, in order."""
    llama_cpp = LlamaCpp()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for case in cases:
                yield row_of(case, llama_cpp, Path(folder))
    finally:
        llama_cpp.close()


def drawn(by: str, count: int) -> list[Case]:
    """Some cases; the same for the same text."""
    return Random(by).sample(CASES, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", choices=[*FAMILIES, []], help="only these, and nothing is written")
    only = parser.parse_args().architectures
    warnings.filterwarnings("ignore")
    if library() is None:
        parser.error("the page tells of native layers, which need a C compiler (cc, gcc or clang)")
    chosen = [case for case in CASES if not only or case.family in only]
    found = [*track(rows(chosen), "files", len(chosen), console=Console(stderr=True))]
    lines = "".join(f"{row}\n" for row in found)
    if only:
        print(lines, end="")
    else:
        PAGE.write_text(HEAD.format(length=len(PROMPTS[1])) + lines, encoding="utf-8")


if __name__ == "__main__":
    main()
