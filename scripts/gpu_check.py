"""What a GPU makes of specdec, in the minutes of a short loan: one command, most important sections first.

    python scripts/gpu_check.py --out runs/gpu_check                     # all sections, ten minutes at most
    python scripts/gpu_check.py --only bits,step --limits step=60        # some of them, one with another time limit
    python scripts/gpu_check.py --model SmolLM2.gguf                     # real text, of a model that is here already
    python scripts/gpu_check.py --dry-run                                # without a GPU: all parts by name, all imports

Nothing is fetched. Every figure is printed as it comes and kept in OUT.jsonl; OUT.md has them as tables, with what was
to be reached. A part that is kept there is not run again, so a run that was cut short goes on where it was, and so does
one with ``--only``. A part that fails, or a section that has no time left, is recorded, and the next one goes on.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from scripts.checkout import use_checkout

use_checkout()

import torch
import transformers

from scripts.gpu_sections import GOALS, KERNELS, LIMITS, SECTIONS
from scripts.gpu_shapes import SHAPES
from specdec import TransformersTarget
from specdec.bench.environment import caption, describe_environment
from specdec.bench.shapes import random_model


class OutOfTime(BaseException):
    """A section has had its time; no part takes it for an error of its own."""


class Check:
    """The figures, printed and kept; and what sections share.

    Attributes:
        args: as they were given; ``device``, ``dtype``, and the two shapes ``big`` and ``small`` among them.
        on_gpu: whether the device is a GPU; elsewhere the parts that only one can run are left out.
        kept: section and part -> figures, of this run and of those before it.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.dtype = getattr(torch, args.dtype)
        self.big, self.small = args.big, args.small
        self.on_gpu = self.device.type == "cuda"
        self.began = time.perf_counter()
        self.file = args.out.with_suffix(".jsonl")
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        self.kept = {(line.pop("section"), line.pop("part")): line for line in map(json.loads, lines)}
        self._targets: dict[tuple[str, torch.dtype], TransformersTarget] = {}

    def keep(self, section: str, part: str, figures: Mapping[str, Any]) -> None:
        """Print and keep them; what was known of the part before is replaced."""
        told = " ".join(f"{name} {short(value)}" for name, value in figures.items())
        print(f"[{time.perf_counter() - self.began:6.1f}] {section}, {part}: {told}", flush=True)
        line = json.dumps({"section": section, "part": part, **figures}, default=str)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.kept[section, part] = {name: value for name, value in json.loads(line).items() if name in figures}
        self.file.with_suffix(".md").write_text(page(self.kept), encoding="utf-8")

    def target(self, shape: str, dtype: torch.dtype | None = None) -> TransformersTarget:
        """A random model of a shape; a large one is held alone."""
        key = shape, dtype or self.dtype
        if key not in self._targets:
            if shape == self.big or len(self._targets) > 2:
                self.forget()
            model = random_model(shape, key[1], self.device)
            self._targets[key] = TransformersTarget(model, execution=self.args.execution, owned=True)
        return self._targets[key]

    def forget(self) -> None:
        """Hold no target any more."""
        self._targets.clear()
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def run(self, section: str, limit: float) -> None:
        """Run the parts that are not kept yet, for so many seconds at most."""
        try:
            with limited(limit):
                for part, work in SECTIONS[section](self):
                    if "failed" not in self.kept.get((section, part), {"failed": ""}):
                        print(f"{section}, {part}: kept already", flush=True)
                        continue
                    try:
                        self.keep(section, part, work())
                    except Exception as error:  # one kernel that is missing must not cost the other parts
                        self.keep(section, part, {"failed": f"{type(error).__name__}: {error}"[:800]})
        except OutOfTime as error:
            self.keep(section, "the rest", {"failed": f"no time left {error}; run it again, or with --limits"})
        else:
            if (section, "the rest") in self.kept:
                self.keep(section, "the rest", {"kept": "all"})


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """While inside, OutOfTime is raised after so many seconds."""

    def late(*_: Any) -> None:
        raise OutOfTime(f"after {seconds:g} s")

    former = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def short(value: Any) -> str:
    """A figure as it is printed."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {short(one)}" for key, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(short, value)) or "none"
    return str(value)


def page(kept: Mapping[tuple[str, str], Mapping[str, Any]]) -> str:
    """The figures as tables of Markdown: what was to be reached, and each section's parts."""
    lines = ["# specdec on a GPU", "", short(kept.get(("about", "machine"), {}).get("what", "")), ""]
    lines += ["| to reach | bound | measured | reached |", "| --- | --- | --- | --- |"]
    for goal, (bound, read) in GOALS.items():
        found = read(kept)
        if found is not None:
            value, good = found
            lines.append(f"| {goal} | {bound} | {short(value)} | {'yes' if good else 'no'} |")
    for section in dict.fromkeys(section for section, _ in kept if section != "about"):
        parts = {part: figures for (own, part), figures in kept.items() if own == section}
        names = list(dict.fromkeys(name for figures in parts.values() for name in figures))
        lines += ["", f"## {section}", "", f"| part | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
        for part, figures in parts.items():
            cells = (short(figures[name]) if name in figures else "" for name in names)
            lines.append(f"| {part} | {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def dry_run(check: Check) -> str | None:
    """Name every part that a GPU would run, and import what the parts and ``tests/gpu`` import; an error if one fails.

    Nothing of a loan is then lost to a name that is wrong or a package that is missing.
    """
    check.on_gpu = True
    for section in check.args.only:
        for part, _ in SECTIONS[section](check):
            print(f"{section}, {part}")
    for name in KERNELS:
        importlib.import_module(name)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        "tests/gpu",
    ]
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([*command, "tests/gpu"], cwd=ROOT, capture_output=True, text=True, env=known)
    print(done.stdout.strip().rpartition("\n")[2])
    return done.stdout[-700:] if done.returncode else None


def options(arguments: list[str] | None) -> argparse.Namespace:
    """What was asked for; ends with a message where it cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="OUT.jsonl and OUT.md")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"some of {', '.join(SECTIONS)}; in this order")
    parser.add_argument("--limits", default="", help="SECTION=SECONDS, ...")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", help="of speeds; bits and texts take bfloat16 and float16")
    parser.add_argument("--execution", default="auto")
    parser.add_argument("--big", default="mistral-7b", choices=SHAPES)
    parser.add_argument("--small", default="smollm2", choices=SHAPES)
    parser.add_argument("--new", type=int, default=64, help="tokens of a text")
    parser.add_argument("--texts", type=int, default=8, help="texts of each drafter")
    parser.add_argument("--batches", default="1,8,32,64", help="sequences at once")
    parser.add_argument("--model", help="a model for real text: a named one, a folder or a GGUF file that is here")
    parser.add_argument("--dry-run", action="store_true", help="name every part as on a GPU, import all, run nothing")
    parser.add_argument("--pytest", nargs="*", default=[], help="more for pytest, such as -k bits")
    args = parser.parse_args(arguments)
    args.only = [name for name in args.only.split(",") if name]
    pairs = (part.partition("=") for part in args.limits.split(",") if part)
    args.limits = {name: float(seconds) for name, _, seconds in pairs}
    args.batches = [int(size) for size in args.batches.split(",")]
    if odd := [name for name in (*args.only, *args.limits) if name not in SECTIONS]:
        parser.error(f"{odd[0]!r} is none of {', '.join(SECTIONS)}")
    if args.dry_run:
        args.device = "cpu"
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device here; try --device cpu --dtype float32 --big toy --small toy")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    transformers.utils.logging.set_verbosity_error()
    check = Check(args)
    if args.dry_run:
        sys.exit(dry_run(check))
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    here = f"{caption(describe_environment(check.device))}; {args.big}, {args.small}, {args.dtype}, {args.execution}"
    before = check.kept.get(("about", "machine"), {}).get("what", here)
    if before != here:
        sys.exit(f"{check.file} has figures of something else: {before}; here it is {here}. Name another --out")
    check.keep("about", "machine", {"what": here, "command": f"python scripts/gpu_check.py {given}"})
    for name in args.only:
        check.run(name, args.limits.get(name, LIMITS[name]))
    print(page(check.kept))


if __name__ == "__main__":
    main()
