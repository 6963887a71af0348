"""Answer files: the prompts of a file are decoded in batches into a file of generations, in the prompts' order.

The file appears when it is complete. Until then, finished answers are lines of a file with the suffix ``.partial``,
after a line that identifies the run. The same call continues after them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec.cli.output import to_json
from specdec.engine.config import RunConfig
from specdec.engine.engine import Engine
from specdec.engine.prompt import Prompt
from specdec.errors import ConfigError
from specdec.settings.files import write_text
from specdec.settings.formats import read_records
from specdec.settings.unfinished import unfinished

__all__ = ["answer", "read_prompts"]


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of JSON lines (or of a JSON list): texts, or records with a ``prompt`` or with chat ``messages``.

    Raises:
        ConfigError: no such file, or a record without either.
    """
    prompts: list[Prompt] = []
    for item in read_records(path, "the prompts"):
        record = prompt = item.value
        if isinstance(record, Mapping):
            prompt = record.get("prompt", record.get("messages"))
        chat = isinstance(prompt, list) and prompt and all(isinstance(one, Mapping) for one in prompt)
        if not isinstance(prompt, str) and not chat:
            raise ConfigError(
                f"{item.place} of {str(path)!r} is no prompt: {json.dumps(record)[:80]}; give a text, "
                '{"prompt": text}, or {"messages": [{"role": ..., "content": ...}]}'
            )
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{str(path)!r} holds no prompts")
    return prompts


def answer(engine: Engine, prompts: list[Prompt], out: Path, run: RunConfig, *, batch: int, progress: bool) -> int:
    """Answer the prompts and put the file at ``out``, a JSON line for each in their order; how many failed.

    Raises:
        ConfigError: ``out`` exists, or is half done with other options.
        CheckpointError: the disk refuses.
    """
    options = {name: getattr(run, name) for name in ("model", "dtype", "drafter", "max_new_tokens", "stop")}
    if run.stop_token_ids:
        options["stop_token_ids"] = run.stop_token_ids
    with unfinished(out, {**options, **asdict(run.sampling)}, prompts, _check_line) as answers:
        left = answers.left
        engine.generate_batch(
            [prompts[index] for index in left],
            run.max_new_tokens,
            run.sampling,
            **run.stops,
            batch=batch,
            progress=progress,
            on_done=lambda place, generation: answers.add(left[place], to_json(generation, engine.drafter.name)),
        )
        lines = [answers.done[index] for index in range(len(prompts))]
        write_text(out, "".join(json.dumps(line) + "\n" for line in lines))
    return sum(line["finish_reason"] == "error" for line in lines)


def _check_line(line: Mapping[str, Any]) -> None:
    if "finish_reason" not in line:
        raise ValueError("it does not say how its answer ended")
