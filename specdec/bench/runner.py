"""Runner: every system answers every question, in turn, repeat by repeat; a killed run continues when started again.

A system that answers several questions at once gets a group of them: several times the largest batch, so that its batch
is full most of the time. Other systems get the group's questions one by one.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from specdec.bench.environment import MemoryMeter, describe_environment, describe_model
from specdec.bench.plan import Plan
from specdec.bench.records import AnsweredTurn, Output, Record, RunFolder
from specdec.bench.systems import Contestant, System, check_specs, make_systems
from specdec.costs.measuring import measure
from specdec.engine.engine import Engine
from specdec.engine.load import load
from specdec.engine.questions import (
    Question,
    QuestionId,
    build_prompt,
    find_questions,
    group_of,
    read_questions,
    select,
)
from specdec.engine.text_stream import TextStream, continuation
from specdec.errors import ConfigError, ParallelError
from specdec.parallel.target import ParallelTarget
from specdec.settings.files import check_same_run, digest_of

__all__ = ["Runner", "answer_prompts"]

COST_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

# Options that can differ between two parts of one run: a run can grow when it continues.
_FREE = ("model", "questions", "drafters", "systems", "categories", "limit", "repeats", "batch")
_ROUNDS = 4  # least ratio of a lot's questions to the largest batch

Entry = tuple[int, list[Question], Contestant]
"""A repeat, the questions that are asked together, and the system that answers."""


class Runner:
    """A run, new or begun earlier in the same folder.

    Args:
        plan: the options of the run.
        out: the run's folder.
        command: the command line, for the manifest.
        engine: the engine; None loads it from the plan.
        on_system: called before answers begin, with the label and the number of counted answers (0 for a warm-up).
        cost: whether to measure the cost of a forward by its rows at the end.

    Raises:
        ConfigError: a question file or a system is wrong, or the folder has another run.
    """

    def __init__(
        self,
        plan: Plan,
        out: str | Path,
        *,
        command: str = "",
        engine: Engine | None = None,
        on_system: Callable[[str, int], None] = lambda label, answers: None,
        cost: bool = True,
    ) -> None:
        path = find_questions(plan.questions)
        self._all = read_questions(path)
        self.questions = select(self._all, plan.categories, plan.limit)
        if plan.sizes[-1] > len(self.questions):
            raise ConfigError(
                f"a batch of {plan.sizes[-1]} is never full with {len(self.questions)} questions; lower --batch, or "
                "ask more questions"
            )
        self.plan, self.folder = plan, RunFolder(out)
        self._on_system, self._measure_cost = on_system, cost
        check_specs(plan)  # before a large model is loaded; the folder is checked early as well
        self.folder.check()
        old = self.folder.manifest() if self.folder.manifest_path.exists() else None
        done = {record.key for record in self.folder.records()}
        if done and old is None:
            raise ConfigError(
                f"{str(self.folder.path)!r} holds answers and no manifest, which says of what run they are; choose "
                "another --out, or delete them"
            )
        self.engine = engine or load(plan, parallel=plan.parallel)
        self.follows = isinstance(self.engine.target, ParallelTarget) and self.engine.target.ranks.rank > 0
        self.target = self.engine.target
        self._memory = MemoryMeter(self.target.device)
        self.systems, left_out = make_systems(plan, self.engine)
        environment = describe_environment(self.target.device)
        self.manifest: dict[str, Any] = {
            "plan": asdict(plan),
            "questions": {"file": path.name, "sha256": digest_of(path), "asked": len(self.questions)},
            "model": describe_model(plan.model, self.target),
            "systems": {entrant.label: _about(entrant.system) for entrant in self.systems},
            "left_out": left_out,
            "environment": environment,
            "runs": [{"command": command, "began": time.time(), "commit": environment["commit"]}],
        }
        self.manifest["questions"]["groups"] = dict(Counter(group_of(q.category) for q in self.questions))
        if old is not None:
            self._join(old)
        self.todo: list[Entry] = []
        self.resumed = 0
        for repeat, asked, system in self._schedule():
            if all((question.id, system.label, repeat) in done for question in asked):
                self.resumed += len(asked)
            else:
                self.todo.append((repeat, asked, system))

    def _join(self, old: dict[str, Any]) -> None:
        """Continue the run in the folder, if it is the same run."""
        new = self.manifest
        before = asdict(Plan()) | old["plan"]  # an option that the old run did not know had its default
        pairs = {f"plan.{name}": (before[name], now) for name, now in new["plan"].items() if name not in _FREE}
        pairs["questions"] = (old["questions"]["sha256"], new["questions"]["sha256"])
        pairs["model"] = (old["model"]["fingerprint"], new["model"]["fingerprint"])
        for label in old["systems"].keys() & new["systems"].keys():
            pairs[label] = (old["systems"][label]["options"], _plain(new["systems"][label]["options"]))
        former, now = ({name: pair[side] for name, pair in pairs.items()} for side in (0, 1))
        check_same_run(self.folder.path, former, now, "choose another --out, or the same options")
        new["systems"] = {**new["systems"], **old["systems"]}
        new["runs"] = [*old["runs"], *new["runs"]]
        if "cost" in old:
            new["cost"] = old["cost"]

    def _schedule(self) -> list[Entry]:
        """The order of answers: repeat by repeat, lot by lot, with another system first each time."""
        largest, count = self.plan.sizes[-1], len(self.questions)
        lots = count if largest == 1 else max(1, count // (_ROUNDS * largest))
        entries: list[Entry] = []
        for repeat in range(self.plan.repeats):
            for place in range(lots):
                lot, turn = self.questions[place::lots], (place + repeat) % len(self.systems)
                for system in [*self.systems[turn:], *self.systems[:turn]]:
                    together = [lot] if system.size > 1 else [[question] for question in lot]
                    entries += [(repeat, asked, system) for asked in together]
        return entries

    def run(self) -> RunFolder:
        """Answer what is left.

        Raises:
            ConfigError: another process writes to the folder.
        """
        with self.folder.writing():
            if self.todo:
                self._warm_up()
            self.folder.write_manifest(_plain(self.manifest))
            with _unswept():
                for repeat, asked, system in self.todo:
                    self._on_system(system.label, len(asked))
                    self.folder.append(*self._answer(repeat, asked, system))
            if self._measure_cost and "cost" not in self.manifest:
                self.manifest["cost"] = self._cost()
            self.manifest["runs"][-1]["ended"] = time.time()
            self.folder.write_manifest(_plain(self.manifest))
        return self.folder

    def follow(self) -> None:
        """Take part in answers as another rank than 0, and store nothing."""
        self.systems = [entrant for entrant in self.systems if entrant.system.ours]
        if self.todo:
            self._warm_up()
        with _unswept():
            for repeat, asked, system in self.todo:
                if system.system.ours:
                    self._answer(repeat, asked, system)

    def _warm_up(self) -> None:
        """An uncounted answer of each system; an error is ignored, as it will occur again where it is recorded."""
        for system in self.systems:
            self._on_system(f"{system.label} (warm-up)", 0)
            with _failing({}):
                system.warm_up(self._prompt(self.questions[0], ()), min(32, self.plan.max_new_tokens))

    def _answer(self, repeat: int, asked: Sequence[Question], system: Contestant) -> list[Record]:
        """A system's answers: all first turns, then all second turns, each behind the system's own first answer."""
        turns: dict[QuestionId, list[AnsweredTurn]] = {question.id: [] for question in asked}
        errors: dict[QuestionId, str] = {}
        trace = repeat == 0 and system.size == 1
        for number in range(max(len(question.turns) for question in asked)):
            prompts: dict[QuestionId, list[int]] = {}
            outputs: dict[QuestionId, Output | Exception] = {}
            for question in asked:
                if number < len(question.turns) and question.id not in errors:
                    with _failing(errors, question.id):
                        prompts[question.id] = self._prompt(question, turns[question.id])
            with _failing(errors, *prompts):
                if number == 0:
                    system.system.reset()
                self._memory.reset()
                answers = system.answer(list(prompts.values()), self.plan.max_new_tokens)
                outputs = dict(zip(prompts, answers, strict=True))
            memory = self._memory.read()
            for known, output in outputs.items():
                with _failing(errors, known):
                    if isinstance(output, Exception):
                        raise output
                    turns[known].append(self._turn(prompts[known], output, memory, trace=trace))
        return [
            Record(
                question_id=question.id,
                category=question.category,
                system=system.label,
                repeat=repeat,
                turns=[] if question.id in errors else turns[question.id],
                error=errors.get(question.id),
                time=time.time(),
            )
            for question in asked
        ]

    def _prompt(self, question: Question, turns: Sequence[AnsweredTurn]) -> list[int]:
        said = [turn.text.strip() if question.format != "plain" else turn.text for turn in turns]
        return self.engine.encode(build_prompt(question, said, self.plan.format, self.engine.tokenizer))

    def _turn(self, prompt: list[int], output: Output, memory: int | None, *, trace: bool) -> AnsweredTurn:
        tokenizer: Any = self.engine.tokenizer
        text = continuation(tokenizer, prompt, output.token_ids)
        times = [round(seconds, 6) for seconds in output.times]
        return AnsweredTurn(
            **asdict(replace(output, times=times)),
            prompt_ids=prompt,
            text=text,
            retokenized=len(tokenizer(text.strip())["input_ids"]),
            peak_memory=memory,
            pieces=_pieces(tokenizer, prompt, output) if trace else [],
        )

    def _cost(self) -> dict[str, Any]:
        """Cost of a forward by rows, at a typical context of this run."""
        last = [record.turns[-1] for record in self.folder.records() if record.turns]
        if not last:
            return {}
        typical = statistics.median_high(len(turn.prompt_ids) + len(turn.token_ids) // 2 for turn in last)
        curve = measure(self.target, rows=COST_ROWS, lengths=[typical])
        return {"context": curve.lengths[0], "seconds": dict(zip(map(str, curve.rows), curve.seconds[0], strict=True))}


def answer_prompts(
    plan: Plan, engine: Engine, prompts: Sequence[list[int]], on_round: Callable[[], object] = lambda: None
) -> list[Record]:
    """Answers of a plan's systems to prompts that are tokens, in turn, prompt by prompt and repeat by repeat.

    Nothing is written, and errors are raised. Each system first answers the first prompt once, uncounted; ``on_round``
    is called when all have answered a prompt. A record's question is its prompt's index.
    """
    systems = [entrant.system for entrant in make_systems(plan, engine)[0]]
    memory = MemoryMeter(engine.target.device)
    for system in systems:
        system.warm_up(prompts[0], plan.max_new_tokens)
    records = []
    for repeat in range(plan.repeats):
        for number, prompt in enumerate(prompts):
            for system in systems:
                system.reset()
                memory.reset()
                output = asdict(system.answer(prompt, plan.max_new_tokens))
                turn = AnsweredTurn(**output, prompt_ids=prompt, text="", retokenized=0, peak_memory=memory.read())
                about: dict[str, Any] = {"question_id": number, "category": "prompts", "repeat": repeat}
                records.append(Record(**about, system=system.label, turns=[turn]))
            on_round()
    return records


@contextmanager
def _unswept() -> Iterator[None]:
    """A context in which the garbage collector ignores all existing objects.

    These are some 400,000 objects of models and libraries. A collection of them takes 0.1 to 0.25 s, which would be
    counted to the system that is answering. Objects that the program
    has frozen itself stay frozen: then nothing is frozen here, as unfreezing would release them, too.
    """
    gc.collect()
    own = gc.get_freeze_count() == 0
    if own:
        gc.freeze()
    try:
        yield
    finally:
        if own:
            gc.unfreeze()


@contextmanager
def _failing(errors: dict[QuestionId, str], *questions: QuestionId) -> Iterator[None]:
    """Record an exception within as those questions' error and let the run go on; KeyboardInterrupt still ends it."""
    try:
        yield
    except ParallelError:
        raise
    except Exception as failure:
        message = f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:2000]
        errors |= dict.fromkeys(questions, message)


def _pieces(tokenizer: Any, prompt: list[int], output: Output) -> list[str]:
    """The text of each step with special tokens; half a character waits for the step that completes it."""
    stream, tokens = TextStream(tokenizer, prompt=prompt, skip_special_tokens=False), iter(output.token_ids)
    pieces: list[str] = []
    for count in output.accept_lengths:
        stream.extend(list(islice(tokens, count)))
        pieces.append(stream.take())
    return [*pieces[:-1], pieces[-1] + stream.finish()] if pieces else []


def _about(system: System) -> dict[str, Any]:
    known = {name: getattr(system, name) for name in ("ours", "lossy", "comparable")}
    return {**known, "options": dict(system.options)}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Values as they come back from JSON; values of types that JSON lacks become texts."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain
