"""What each process of ``test_processes.py`` runs: a case by its name, the result written down as JSON.

Started once, it makes the other ranks of itself, so that what takes seconds to import is imported once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from specdec import Engine, SamplingParams
from specdec.errors import SpecdecError
from specdec.models.transformers_target import TransformersTarget
from specdec.parallel.ranks import Ranks, join
from specdec.parallel.rows import ShardedTarget
from tests.models import new_model, prompt_of, target_of

PROMPT, NEW = prompt_of(7), 24
SAMPLING = SamplingParams(temperature=0.8, seed=5)
TEXT = "import re\nimport sys\n\ndef main():\n    for line in sys.stdin:\n        print(line)\n\ndef"
WIDE = {"name": "lookahead", "window": 15, "ngram": 5, "guesses": 15}


def sharded(late: float = 30.0) -> Engine:
    return Engine(ShardedTarget(TransformersTarget(new_model("llama")), ranks=Ranks(late)))


def random_families() -> dict[str, Any]:
    """Random models, lookahead and auto, greedy and drawn, by all ranks and by this one alone."""
    found: dict[str, Any] = {"together": [], "alone": []}
    for family in ("llama", "gemma3"):
        target = ShardedTarget(TransformersTarget(new_model(family)))
        for drafter in (WIDE, "auto"):
            for sampling in (None, SAMPLING):
                found["together"].append(Engine(target, None, drafter).generate(PROMPT, NEW, sampling).token_ids)
                found["alone"].append(Engine(target_of(family)).generate(PROMPT, NEW, sampling).token_ids)
    return found


def quick() -> dict[str, Any]:
    """One text, its collectives counted."""
    gather, sent = dist.all_gather, list[int]()

    def counted(found: Any, words: torch.Tensor, group: Any = None) -> Any:
        if group is not None:  # of a step
            sent.append(words.nbytes)
        return gather(found, words, group=group)

    dist.all_gather = counted
    out = sharded().with_drafter(WIDE).generate(PROMPT, NEW, SAMPLING)
    return {"text": out.token_ids, "steps": out.stats.steps, "rows": out.stats.rows, "sent": sent}


def loaded(model: str, kind: str, drafters: list[Any], **options: Any) -> dict[str, Any]:
    """Texts of a checkpoint by all ranks, and by this one alone, with the same drafter."""
    together = Engine.from_pretrained(model, parallel=kind, **options)
    alone = Engine.from_pretrained(model, policy="off", **options)
    found: dict[str, Any] = {"together": [], "alone": [], "runner": together.describe()["execution"]}
    for drafter in drafters:
        for sampling in (None, SAMPLING):
            policy = "acceptance" if drafter == "auto" else "off"
            own = "none" if kind == "rows" else drafter
            for engine, name, chosen in ((together, "together", drafter), (alone, "alone", own)):
                made = engine.with_drafter(chosen, policy=policy)
                out = made.generate(TEXT, NEW, sampling, stop=["\n\n"])
                found[name].append([out.token_ids, out.finish_reason])
    return found


def tiny_rows() -> dict[str, Any]:
    return loaded("tiny", "rows", [WIDE, "medusa", "union"], dtype=torch.float64)


def tiny_tensor() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        names = ["medusa", "draft_model"]
        return {**loaded("tiny", "tensor", names, dtype=torch.float64), "folder": bool(folder)}


def folder_rows() -> dict[str, Any]:
    return loaded(sys.argv[2], "rows", ["lookahead", "auto"], dtype=torch.float32, execution="modules")


def failing(then: Callable[[], None]) -> dict[str, Any]:
    """The error that this rank gets when rank 1 calls ``then`` in the middle of a text."""
    engine = sharded(late=3.0).with_drafter("lookahead")

    def on_step(step: Any) -> None:
        if step.index == 3 and dist.get_rank() == 1:
            then()

    try:
        engine.generate(PROMPT, NEW, on_step=on_step)
    except SpecdecError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def killed() -> dict[str, Any]:
    return failing(lambda: os.kill(os.getpid(), signal.SIGKILL))


def stopped() -> dict[str, Any]:
    return failing(lambda: time.sleep(5))


def main() -> None:
    torch.set_num_threads(1)
    rank = next((rank for rank in range(1, int(os.environ["WORLD_SIZE"])) if not os.fork()), 0)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    join()
    found = globals()[sys.argv[1]]()
    place = Path(os.environ["SPECDEC_TEST_OUT"]) / f"{dist.get_rank()}.json"
    place.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
