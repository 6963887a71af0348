"""What a GPTQ or AWQ checkpoint's ``quantization_config`` says of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.errors import CheckpointError, shown

__all__ = ["Int4Settings"]

_REMEDY = (
    "install the packages gptqmodel and optimum, with which transformers may load it, or give a checkpoint that is not "
    "quantised, or a GGUF file"
)


@dataclass(frozen=True, slots=True)
class Int4Settings:
    """How 4-bit weights are packed.

    Attributes:
        method: ``gptq`` or ``awq``.
        group_size: inputs that have one scale; -1: all.
        zero_offset: what is added to a stored zero.
        ordered: groups may be of any inputs, by ``g_idx``.
    """

    method: str
    group_size: int
    zero_offset: int
    ordered: bool

    @classmethod
    def of(cls, told: Any, where: str) -> Int4Settings | None:
        """Those of a config's ``quantization_config``, or None where it is of neither method.

        Raises:
            CheckpointError: weights of another number of bits, or in another layout.
        """
        if not isinstance(told, Mapping) or told.get("quant_method") not in ("gptq", "awq"):
            return None
        method = str(told["quant_method"])

        def refuse_unless(good: bool, name: str, value: Any, wanted: str) -> None:
            if not good:
                raise CheckpointError(
                    f"{where} is quantised by {method} with {name} {shown(value)}, and native blocks have {wanted}; "
                    f"{_REMEDY}"
                )

        bits = told.get("bits", told.get("w_bit", 4 if method == "awq" else None))
        refuse_unless(type(bits) is int and bits == 4, "bits", bits, "4")
        size = told.get("group_size", told.get("q_group_size", 128))
        fits = type(size) is int and (size == -1 or (size > 0 and size % 32 == 0))
        refuse_unless(fits, "group_size", size, "whole groups of 32 inputs")
        if method == "awq":
            kind = str(told.get("version", told.get("format", "gemm"))).lower()
            refuse_unless(kind == "gemm", "version", kind, "'gemm'")
            zero = told.get("zero_point", True)
            refuse_unless(zero is True, "zero_point", zero, "True")
            return cls(method, size, 0, ordered=False)
        kind = str(told.get("checkpoint_format") or told.get("format") or "gptq").lower()
        marlin = bool(told.get("is_marlin_format"))
        refuse_unless(kind in ("gptq", "gptq_v2"), "checkpoint_format", kind, "'gptq' or 'gptq_v2'")
        refuse_unless(not marlin, "is_marlin_format", marlin, "False")
        dtype = told.get("pack_dtype") or "int32"
        refuse_unless(str(dtype).removeprefix("torch.") == "int32", "pack_dtype", dtype, "'int32'")
        return cls(method, size, 1 if kind == "gptq" else 0, ordered=bool(told.get("desc_act")))
