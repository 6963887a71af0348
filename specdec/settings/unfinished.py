"""Unfinished files of answers: finished answers are kept, and the same call continues after them."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecWarning
from specdec.settings.files import (
    append_lines,
    check_same_run,
    drop_unfinished,
    held,
    parse_json,
    read_lines,
    refuse_existing,
    write_text,
    writing,
)

__all__ = ["Unfinished", "unfinished"]


class Unfinished:
    """The lines of a file that is not finished, each the answer to one of many prompts.

    Attributes:
        done: number of the prompt -> line.
    """

    def __init__(
        self, partial: Path, header: Mapping[str, Any], prompts: int, check: Callable[[Mapping[str, Any]], None]
    ) -> None:
        drop_unfinished(partial)

        def read(number: int, text: bytes) -> dict[str, Any]:
            line = parse_json(text)
            if not isinstance(line, dict):
                raise ValueError(f"it holds {type(line).__name__}, not an object")
            if number > 1:
                if type(line.get("index")) is not int or not 0 <= line["index"] < prompts:
                    raise ValueError(f"it holds no answer to one of {prompts} prompts")
                check(line)
            return line

        remedy = "delete that line and all below it, and the same command goes on from there"
        former, *lines = read_lines(partial, read, "line of an unfinished run", remedy) or [dict(header)]
        check_same_run(partial, former, header, "give the same options to go on with it, another --out, or delete it")
        if not lines:
            write_text(partial, json.dumps(header) + "\n")
        self._partial, self._prompts = partial, prompts
        self.done = {line["index"]: line for line in lines}

    @property
    def left(self) -> list[int]:
        """The prompts that have no answer yet."""
        return [index for index in range(self._prompts) if index not in self.done]

    def add(self, index: int, line: Mapping[str, Any]) -> None:
        """Keep the answer to a prompt."""
        self.done[index] = {"index": index, **line}
        append_lines(self._partial, self.done[index])


@contextmanager
def unfinished(
    out: Path, run: Mapping[str, Any], prompts: Sequence[Any], check: Callable[[Mapping[str, Any]], None]
) -> Iterator[Unfinished]:
    """The answers so far to all of ``prompts``: lines of the file's name + ``.partial``, until ``out`` is written.

    If the block is interrupted (Ctrl-C), a SpecdecWarning names what is kept.

    Args:
        out: the file, which the block writes when all answers are there.
        run: JSON values that identify the run; an unfinished file of another run is refused.
        prompts: JSON values; an unfinished file of other prompts is refused.
        check: raises ValueError for a line that such a run does not write.

    Raises:
        ConfigError: ``out`` exists, was begun with other options, or is being written by another process.
        CheckpointError: the disk refuses the write.
    """
    refuse_existing(out)
    partial, lock = out.with_name(out.name + ".partial"), out.with_name(f".{out.name}.lock")
    busy = f"another run is answering into {str(out)!r}; wait for it, stop it, or give another --out"
    asked = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    with writing("the answers", out, "make room, and the same command goes on where it was"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with held(lock, busy):
            refuse_existing(out)  # which another run may have finished just now
            answers = Unfinished(partial, {**run, "prompts": len(prompts), "asked": asked}, len(prompts), check)
            try:
                yield answers
            except KeyboardInterrupt:
                if answers.done:
                    kept = f"{len(answers.done)} of {len(prompts)} answers are kept"
                    warnings.warn(
                        f"interrupted: {kept}; the same command goes on from there", SpecdecWarning, stacklevel=2
                    )
                raise
            partial.unlink()
            lock.unlink(missing_ok=True)  # while it is held: who takes it after this finds the file done
