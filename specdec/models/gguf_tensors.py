"""The tensors of a GGUF file against those that its model reads: what is left over is refused by its cause."""

from __future__ import annotations

import re
from collections.abc import Collection

from specdec.decoder.gguf_said import factors_read
from specdec.decoder.names import Names, shapes_of
from specdec.decoder.spec import DecoderSpec
from specdec.errors import CheckpointError
from specdec.models.gguf_source import GGUF_NAMES
from specdec.models.gguf_table import TensorTable

__all__ = ["check_blocks", "check_tensors", "predicting"]

_REMEDY = "load the model's folder of safetensors"
_CAUSES = (  # what a tensor's name looks like, what it is, and what to do
    (r"^rope_f|\.rope_f", "scale the rotary frequencies", _REMEDY),
    (r"\.(input_)?scale$", "scale weights that were quantised as NVFP4 or BitNet", _REMEDY),
    (r"\.bias$", "are biases", _REMEDY),
    (r"\.attn_sinks\.", "are sinks of attention", _REMEDY),
    (r"\.ffn_gate_up_exps\.", "are gate and up of experts in one", "get a file in which they are apart"),
    (r"\.ffn_(gate|up|down)\.\d+\.", "are experts one by one, as files of early 2024 have them", "get a newer file"),
    (r"\.nextn\.", "are of multi-token-prediction layers, where its header has none", "get it again"),
    (r"^(v|mm|a)\.", "are of a vision or audio projector", "get the file of the language model alone"),
)
_BLOCK = re.compile(r"blk\.(\d+)\.")


def check_blocks(table: TensorTable, layers: int, behind: int) -> None:
    """Raises CheckpointError where a file has tensors of another number of layers than its settings say.

    ``behind``: layers of multi-token prediction, which may be left out.
    """
    blocks = _blocks(table)
    if behind and blocks and min(blocks) >= layers:
        raise CheckpointError(
            f"{table.where} holds layers of multi-token prediction alone, from blk.{min(blocks)} on, and no model; "
            "give the model's file, and this one as mtp.head"
        )
    have = max(blocks, default=-1) + 1
    if have not in (layers, layers + behind):
        raise CheckpointError(
            f"{table.where} says {table.architecture}.block_count {layers + behind} and has tensors of {have} layers; "
            "it is incomplete or broken: get it again"
        )


def predicting(table: TensorTable, layers: int) -> tuple[str, ...]:
    """Patterns of the tensors behind the model's layers, which predict further tokens: a model is the same without."""
    behind = sorted(number for number in _blocks(table) if number >= layers)
    return (rf"^blk\.({'|'.join(map(str, behind))})\.",) if behind else ()


def _blocks(table: TensorTable) -> set[int]:
    return {int(found[1]) for entry in table.entries if (found := _BLOCK.match(entry.name))}


def check_tensors(table: TensorTable, spec: DecoderSpec, names: Names) -> None:
    """Raises CheckpointError, by its cause, for a tensor that the decoder has no place for."""
    have, missing = {entry.name for entry in table.entries}, False
    expected, ignored = {*factors_read(table.architecture)}, predicting(table, len(spec.layers))
    expected |= {name for name in have if any(re.match(one, name) for one in ignored)}
    stacked = {**names.stacked, **GGUF_NAMES.stacked}
    for weight in shapes_of(spec):
        wholes = [weight._replace(part=whole) for whole, parts in stacked.items() if weight.part in parts]
        own = {name for one in (weight, *wholes) for name in GGUF_NAMES.candidates(one, "")}
        if weight.expert is not None:  # those of a layer are in one
            own = {name.replace(f".{weight.expert}.", ".") for name in own}
        expected |= own
        missing = missing or (weight.kind == "weight" and not own & have)
    _check_known(table, expected)
    if not missing:  # else that is said first
        _check_read(table, expected)


def _check_known(table: TensorTable, read: Collection[str]) -> None:
    """Raises CheckpointError, which says what they are, for tensors that are not among ``read`` and of a known kind."""
    left = [entry.name for entry in table.entries if entry.name not in read]
    for pattern, what, remedy in _CAUSES:
        if found := [name for name in left if re.search(pattern, name)]:
            raise CheckpointError(
                f"{table.where} has {len(found)} tensors that {what}, such as {found[0]}, which are not read from GGUF "
                f"here: the model would be another one; {remedy}"
            )


def _check_read(table: TensorTable, read: Collection[str]) -> None:
    """Raises CheckpointError for tensors that are not among ``read``."""
    if left := [entry.name for entry in table.entries if entry.name not in read]:
        raise CheckpointError(
            f"{table.where} has {len(left)} tensors that {table.architecture!r} does not read here, such as "
            f"{left[0]}: the model would be another one; {_REMEDY}"
        )
