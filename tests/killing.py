"""A run that is killed, that finds the disk full, and that is begun again, beside one that nobody disturbs.

``python -m tests.killing bench|DRAFTER FOLDER`` exits with 0 where both end alike. One process imports
everything and forks for every attempt, as imports take longer than the runs. Kills come by progress, lines of a file,
and never by the clock.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specdec.bench.audit import audit
from specdec.bench.metrics import measure
from specdec.bench.plan import Plan
from specdec.bench.records import RunFolder
from specdec.bench.report import write_report
from specdec.bench.runner import Runner
from specdec.engine.load import load
from specdec.errors import SpecdecError
from specdec.settings.parsing import parse
from training.log import read_log

KILLED, REFUSED = -signal.SIGKILL, 2
TALK = {"conversations": [{"from": "human", "value": "What is {0}?"}, {"from": "gpt", "value": "It is {0} of course."}]}


def attempt(run: Callable[[], Any], *, kill: Callable[[], bool] = lambda: False, largest: int | None = None) -> int:
    """The exit status of ``run`` in a process of its own; an error of ours is ``REFUSED``.

    Args:
        kill: asked again and again; SIGKILL once it says yes.
        largest: bytes that a file may grow to, as if the disk were full then.
    """
    process = os.fork()
    if not process:
        status = 1
        try:
            if largest is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            run()
            status = 0
        except SpecdecError as error:
            print(error, file=sys.stderr)
            status = REFUSED
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if kill():
            os.kill(process, signal.SIGKILL)
        time.sleep(0.002)


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def disturbed(run: Callable[[Path], Any], folder: Path, progress: str, moments: list[int], large: str) -> None:
    """Run it in ``folder``/whole, and in ``folder``/cut with a kill at each moment and then with no room for ``large``.

    Args:
        progress: the file whose lines tell how far a run is.
        moments: numbers of lines.
        large: the file that does not fit; half of what it is in the end does.
    """
    whole, cut = folder / "whole", folder / "cut"
    assert attempt(lambda: run(whole)) == 0
    total = lines_of(whole / progress)
    for moment in moments:
        for _ in range(20):
            status = attempt(lambda: run(cut), kill=lambda: lines_of(cut / progress) >= moment)  # noqa: B023
            if status == KILLED and moment <= lines_of(cut / progress) < total:
                break
            assert status in (KILLED, 0)
            shutil.rmtree(cut)  # a busy machine looked away until the end: once more
    before = (cut / large).read_bytes()
    status = attempt(lambda: run(cut), largest=max((whole / large).stat().st_size * 3 // 4, len(before) // 2))
    assert status == REFUSED, status
    assert (cut / large).read_bytes().startswith(before), "what was there is not there any more"
    assert attempt(lambda: run(cut)) == 0


def bench(folder: Path) -> None:
    questions = folder / "questions.jsonl"
    asked = [{"question_id": n, "category": "qa", "turns": [f"import {n}\n"], "format": "plain"} for n in range(3)]
    questions.write_text("".join(json.dumps(question) + "\n" for question in asked))
    plan = Plan(
        questions=str(questions), drafters=["none", "prompt_lookup"], systems=[], repeats=2, max_new_tokens=24,
        policy="off",
    )  # fmt: skip
    engine = load(plan)
    disturbed(
        lambda out: Runner(plan, out, engine=engine, cost=False).run(),
        folder,
        "answers.jsonl",
        [1, 4, 6],
        "answers.jsonl",
    )
    whole, cut = (told(RunFolder(folder / name)) for name in ("whole", "cut"))
    assert len(cut) == 3 * 2 * 2
    assert cut == whole
    assert lines_of(folder / "cut" / "answers.jsonl") == len(cut), "a question was answered twice"

    def report() -> None:
        run = RunFolder(folder / "cut")
        about, records = run.manifest()["systems"], run.records()
        write_report(run, audit(records, about, engine.target, plan.sampling()), measure(records, list(about)))

    assert attempt(report, largest=100) == REFUSED


def told(run: RunFolder) -> list[Any]:
    """Everything of a run's answers that is no time and no memory."""
    return [
        (
            record.key,
            record.error,
            [(t.prompt_ids, t.token_ids, t.text, t.accept_lengths, t.rows) for t in record.turns],
        )
        for record in run.records()
    ]


def training(drafter: str, folder: Path) -> None:
    data = folder / "talks.json"
    talks = [{**TALK, "conversations": [{**turn, "value": turn["value"].format(n)} for turn in TALK["conversations"]]}
             for n in range(40)]  # fmt: skip
    data.write_text(json.dumps(talks))
    module = importlib.import_module(f"training.{drafter}")
    loop = {"steps": 16, "batch": 2, "eval_every": 6, "save_every": 2, "log_every": 1, "wandb": "off"}
    loop["precision"] = "no"  # on a busy machine either may look the faster
    values = {
        "model": "tiny", "data": [str(data)], "loop": loop, "text": {"length": 32, "held_out_one_in": 6},
        "evaluation": {"prompts": 2, "prompt": 16, "new": 8},
    }  # fmt: skip

    def run(out: Path) -> None:
        module.run(parse(module.Config, {**values, "out": str(out)}, where="test"))

    disturbed(run, folder, "log.jsonl", [3, 6, 9], "checkpoint.safetensors")
    whole, cut = folder / "whole", folder / "cut"
    for weights in sorted(whole.glob("*/*.safetensors")):
        assert weights.read_bytes() == (cut / weights.relative_to(whole)).read_bytes(), weights
    logs = [[{**line, "seconds": 0} for line in read_log(run / "log.jsonl")] for run in (whole, cut)]
    assert logs[0] == logs[1]


def main() -> None:
    torch.set_num_threads(1)
    kind, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "bench":
        bench(folder)
    else:
        training(kind, folder)


if __name__ == "__main__":
    main()
