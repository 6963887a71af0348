"""``specdec datastore``: build and show datastores. Heavy imports happen within the commands, as in specdec's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from drafters.rest.datastore import Datastore

__all__ = ["app"]

app = typer.Typer(help="Corpora to draft from: for the drafters rest and suffix_automaton.", no_args_is_help=True)


@app.command()
def build(
    sources: Annotated[list[Path], typer.Argument(help="Folders, text files, ShareGPT files, or stdlib.")],
    out: Annotated[Path, typer.Option(help="Folder to write; an older datastore there is replaced.")],
    tokenizer: Annotated[
        str, typer.Option(help="Model whose tokenizer to use: tiny, smollm2, a folder, or a hub id.")
    ] = "tiny",
) -> None:
    """Tokenize SOURCES and sort their suffixes."""
    from drafters.rest.datastore import build_datastore
    from specdec.models.tokenizer import load_tokenizer

    _show(build_datastore(sources, load_tokenizer(tokenizer), out))


@app.command()
def show(datastore: Annotated[Path, typer.Argument(help="Folder of a datastore.")]) -> None:
    """Say what a datastore holds."""
    from drafters.rest.datastore import Datastore

    _show(Datastore(datastore))


def _show(store: Datastore) -> None:
    meta = store.meta
    typer.echo(f"{store.path}: {meta['tokens']} tokens of {meta['documents']} documents")
    typer.echo(f"sha256 {meta['sha256']}, tokenizer {meta['tokenizer'][:16]} ({meta['vocab_size']} tokens)")
