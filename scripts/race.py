"""Plain decoding of a GGUF file, and reading of prompts, beside ik_llama.cpp and OpenVINO, by interleaved rounds.

    python scripts/race.py FILE.gguf [FILE.gguf ...] --venvs runs/race [--ik-llama CHECKOUT]

``--ik-llama`` names a folder of ik_llama.cpp's sources with the libraries that were built there (``cmake -B build
-DBUILD_SHARED_LIBS=ON && make -C build llama``), which then race beside its wheel.

Each engine has a process, and each package a virtual environment of its own below ``--venvs``, at the version that its
file in scripts/racers names. What does not install, or does not read a file, is said and left out. Only one process
runs at a time, and the order turns from round to round. A figure is the geometric mean of the rounds' ratios, the other
engine's seconds over ours, with its 90 % interval: above 1 specdec is faster.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RACERS = Path(__file__).with_name("racers")
WORKER = "SPECDEC_RACER"
SECONDS = 900  # of pip
BUILT = "ik_llama_built"
RACING = (
    ("own", "specdec"),
    ("ik_llama", "ik_llama.cpp"),
    (BUILT, "ik_llama.cpp, built here"),
    ("with_openvino", "OpenVINO"),
)


def racer(name: str) -> Any:
    """A file of scripts/racers, as a module that hides no package of its name."""
    spec = importlib.util.spec_from_file_location(f"racer_{name}", RACERS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve(name: str) -> None:
    """What an engine's process does: one JSON task a line, one answer a line; what libraries print is an error's."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = racer(name).build(**json.loads(sys.stdin.readline()))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(*json.loads(line))), file=answers, flush=True)


class Process:
    """An engine's process."""

    def __init__(self, python: Path, name: str, log: Path, setup: dict[str, Any]) -> None:
        with log.open("w") as errors:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), WORKER: name}
            self.process = subprocess.Popen(
                [str(python), __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=environment,
            )  # fmt: skip
        self.log = log
        self.ask(setup)

    def ask(self, task: Any) -> Any:
        """Its answer. Raises OSError where the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps(task), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.end()
            lines = self.log.read_text(errors="replace").strip().splitlines() or [""]
            raise OSError(f"{lines[-1][:200]} (all of it: {self.log})")
        return json.loads(line)

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        with suppress(BrokenPipeError), self.process:
            pass


def environment_of(name: str, packages: list[str] | None, venvs: Path) -> Path:
    """The interpreter that has the packages. Raises OSError where they cannot be installed."""
    if packages is None:
        return Path(sys.executable)
    folder = venvs / name
    python, done = folder / "bin/python", folder / "packages.json"
    if not done.is_file() or json.loads(done.read_text()) != packages:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        command = [python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", *packages]
        tried = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if tried.returncode:
            raise OSError(tried.stderr.strip().splitlines()[-1][:200])
        done.write_text(json.dumps(packages))
    return python


def started(file: str, options: argparse.Namespace) -> dict[str, Process]:
    """The engines that run here and read the file; ours come first."""
    found: dict[str, Process] = {}
    for name, title in RACING:
        module = racer(name)
        if name == BUILT and options.ik_llama is None:
            continue
        shared = {"checkout": str(options.ik_llama.resolve())} if name == BUILT else {}
        for variant, given in module.variants.items():
            full = f"{title}, {variant}" if variant else title
            try:
                python = environment_of(name, module.dependencies, options.venvs)
                log = options.venvs / f"{name}-{len(found)}.log"
                setup = {"file": file, "threads": options.threads, **shared, **given}
                found[full] = Process(python, name, log, setup)
            except (OSError, subprocess.SubprocessError) as error:
                print(f"skipped {full}: {error}", flush=True)
    return found


def race(engines: dict[str, Process], tasks: dict[str, tuple[list[int], int]], rounds: int) -> dict[str, Any]:
    """Seconds of each engine by round: of each task, a prompt and one token of the answer."""
    seconds: dict[str, dict[str, list[list[float]]]] = {name: {task: [] for task in tasks} for name in engines}
    for turn in range(-1, rounds):  # the first one warms up
        names = [*engines] if turn % 2 else [*reversed(engines)]
        for task, given in tasks.items():
            for name in names:
                if name not in engines:
                    continue
                try:
                    answer = engines[name].ask(given)
                except OSError as error:
                    print(f"left out {name}: {error}", flush=True)
                    del engines[name], seconds[name]
                    continue
                if turn >= 0:
                    seconds[name][task].append(answer)
    return seconds


def ratio(theirs: list[float], ours: list[float]) -> str:
    from checkout_pairs import interval

    low, middle, high = interval([math.log(a / b) for a, b in zip(theirs, ours, strict=True)])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def table(seconds: dict[str, Any], ours: list[str], prompt: int) -> list[str]:
    """Tokens a second of each engine, and how many times as fast ours are, in Markdown."""
    kinds = ("decoding", 1, 1), ("prompt", 0, prompt)
    titles = [title for task, *_ in kinds for title in (f"{task}, tokens/s", *(f"{name} by it" for name in ours))]
    lines = ["| | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(titles)]
    for name, found in seconds.items():
        cells = []
        for task, part, count in kinds:
            own = [one[part] for one in found[task]]
            cells.append(f"{count / statistics.median(own):.1f}")
            for other in ours:
                cells.append("" if name in ours else ratio(own, [one[part] for one in seconds[other][task]]))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--venvs", type=Path, required=True, help="the folder of the environments")
    parser.add_argument("--ik-llama", type=Path, help="a checkout of ik_llama.cpp that was built on this machine")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the long prompt")
    options = parser.parse_args()
    options.venvs = options.venvs.resolve()
    options.venvs.mkdir(parents=True, exist_ok=True)
    ids = [100 + i * 7919 % 20_000 for i in range(options.prompt)]
    tasks = {"decoding": (ids[:64], options.tokens), "prompt": (ids, 2)}
    for file in options.files:
        engines = started(str(Path(file).resolve()), options)
        seconds = race(engines, tasks, options.rounds)
        ours = [name for name in seconds if name.startswith("specdec")]
        if not ours:
            sys.exit(f"specdec does not run {file}; see above")
        print(f"\n{Path(file).name}, {options.threads} thread(s), {options.rounds} rounds\n", flush=True)
        print("\n".join(table(seconds, ours, options.prompt)), flush=True)
        for process in engines.values():
            process.end()


if __name__ == "__main__":
    if WORKER in os.environ:
        serve(os.environ[WORKER])
    else:
        main()
