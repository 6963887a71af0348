"""``specdec quantize``: a model's weights in quantised blocks, as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["quantize"]


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A named model, a folder or a hub id.")],
    out: Annotated[Path, typer.Option("--out", help="The GGUF file to write.", show_default=False)],
    kind: Annotated[str, typer.Option("--type", metavar="TYPE", help="Of blocks, such as q8_0 or q4_0.")] = "q8_0",
) -> None:
    """Write a model's weights in quantised blocks to a GGUF file, which --model takes.

    Needs the package gguf, whose quantisers make the blocks; llama.cpp reads the file, too.
    """
    from specdec.models.quantise import quantise_model

    quantise_model(model, kind, out)
    typer.echo(out)
