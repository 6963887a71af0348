"""Answers: a file of prompts decoded in batches into a file of generations, in order, whole or not at all.

Until all are answered they are lines of the file's name + ``.partial``, as each one ends, behind a line that says what
run this is. The same call goes on from there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec import show
from specdec.config import RunConfig
from specdec.conversations import read_records
from specdec.engine import Engine, Prompt
from specdec.errors import CheckpointError, ConfigError
from specdec.files import resume, write_text
from specdec.results import Generation

__all__ = ["answer", "check_out", "read_prompts"]


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of JSON lines (or of a JSON list): texts, or records with a ``prompt`` or with chat ``messages``.

    Raises:
        ConfigError: no such file, or a record without either.
    """
    prompts: list[Prompt] = []
    for number, record in enumerate(read_records(path), 1):
        prompt = record
        if isinstance(record, Mapping):
            prompt = record.get("prompt", record.get("messages"))
        chat = isinstance(prompt, list) and prompt and all(isinstance(one, Mapping) for one in prompt)
        if not isinstance(prompt, str) and not chat:
            raise ConfigError(
                f"record {number} of {str(path)!r} is no prompt: {json.dumps(record)[:80]}; give a text, "
                '{"prompt": text}, or {"messages": [{"role": ..., "content": ...}]}'
            )
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{str(path)!r} holds no prompts")
    return prompts


def check_out(out: Path) -> None:
    """Raises ConfigError where there is such a file."""
    if out.exists():
        raise ConfigError(f"{str(out)!r} exists; delete it, or give another --out")


def answer(engine: Engine, prompts: list[Prompt], out: Path, run: RunConfig, *, batch: int, progress: bool) -> int:
    """Answer the prompts and put the file at ``out``, a JSON line for each in their order; how many failed.

    Raises:
        ConfigError: ``out`` exists, or is half done with other options.
        CheckpointError: the disk refuses.
    """
    check_out(out)
    partial = out.with_name(out.name + ".partial")
    asked = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    options = {name: getattr(run, name) for name in ("model", "dtype", "drafter", "max_new_tokens", "stop")}
    header = {**options, **asdict(run.sampling), "prompts": len(prompts), "asked": asked}
    try:
        done = {line["index"]: line for line in resume(partial, header, lambda line: _check_line(line, len(prompts)))}
        left = [index for index in range(len(prompts)) if index not in done]
        with partial.open("a", encoding="utf-8") as file:

            def keep(place: int, generation: Generation) -> None:
                line = {"index": left[place], **show.to_json(generation, engine.drafter.name)}
                done[left[place]] = line
                file.write(json.dumps(line) + "\n")
                file.flush()

            engine.generate_batch(
                [prompts[index] for index in left],
                run.max_new_tokens,
                run.sampling,
                stop=run.stop,
                batch=batch,
                progress=progress,
                on_done=keep,
            )
        write_text(out, "".join(json.dumps(done[index]) + "\n" for index in range(len(prompts))))
        partial.unlink()
    except OSError as error:
        raise CheckpointError(
            f"cannot write {str(out)!r}: {error}; make room, and the same command goes on where it was"
        ) from error
    return sum(line["finish_reason"] == "error" for line in done.values())


def _check_line(line: Mapping[str, Any], prompts: int) -> None:
    """ValueError for a line of an unfinished file that is no answer to one of so many prompts."""
    index = line.get("index")
    if type(index) is not int or not 0 <= index < prompts or "finish_reason" not in line:
        raise ValueError(f"it holds no answer to one of {prompts} prompts")
