"""Answer files in Spec-Bench's format, so that its own ``speed.py`` reads them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.bench.records import Record
from specdec.files import write_text

__all__ = ["answer_of", "write_answers"]


def write_answers(records: Sequence[Record], folder: Path, model: str) -> list[Path]:
    """One file per system and repeat, ``run_1/<model>-<system>.jsonl``; questions that failed are left out.

    Returns the files, sorted.
    """
    lines: dict[Path, list[str]] = {}
    for record in sorted(records, key=lambda r: (r.repeat, str(r.system))):
        name = re.sub(r"[^\w.+-]+", "-", f"{Path(model).name}-{record.system}")
        file = folder / f"run_{record.repeat + 1}" / f"{name}.jsonl"
        if record.error is None:
            lines.setdefault(file, []).append(json.dumps(answer_of(record, name), ensure_ascii=False))
    for file, content in lines.items():
        write_text(file, "".join(line + "\n" for line in content))
    return sorted(lines)


def answer_of(record: Record, model_id: str) -> dict[str, Any]:
    """A record as Spec-Bench writes it: lists over turns, and the accepted lengths of all turns in one list."""
    key = f"{record.question_id}/{record.system}/{record.repeat}/{record.time}"
    return {
        "question_id": record.question_id,
        "category": record.category,
        "answer_id": hashlib.sha256(key.encode()).hexdigest()[:22],
        "model_id": model_id,
        "choices": [
            {
                "index": 0,
                "turns": [turn.text.strip() for turn in record.turns],
                "decoding_steps": [len(turn.accept_lengths) for turn in record.turns],
                "new_tokens": [len(turn.token_ids) for turn in record.turns],
                "wall_time": [turn.seconds["wall"] for turn in record.turns],
                "accept_lengths": [length for turn in record.turns for length in turn.accept_lengths],
            }
        ],
        "tstamp": record.time,
    }
