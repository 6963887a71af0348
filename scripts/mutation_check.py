"""Break the source in one place at a time, and see that the tests notice.

    python scripts/mutation_check.py [--only WORD] [--jobs N]

A suite that shows exactness has to fail where exactness is lost. Each mutant in ``mutants.yaml`` is a mistake that
somebody could make, or that published code has made: a cache that is cropped where rows must be gathered, positions by
row instead of depth, a rejection without its residual. It is made in a copy of the repository, and the tests that it
names run there: the quick ones, and where these pass the ``slow`` ones, which CI runs. A mutant that passes all has
*survived*, which fails the check. So does one whose place is no longer in the source: it would never be made again. It
takes an hour, so neither pytest nor CI runs it; that all mutants have their place a quick test sees.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter

import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("specdec", "drafters", "training", "tests", "scripts", "docs", "pyproject.toml")
SECONDS = 600  # a mutant that loops for ever has been noticed
QUICK, SLOW = "not slow", "slow"


@dataclass(frozen=True)
class Mutant:
    """``before`` in ``file`` becomes ``after``."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def fault(self) -> str | None:
        """Why it cannot be made, if it cannot."""
        path = ROOT / self.file
        if not path.exists():
            return f"{self.name!r}: there is no {self.file}"
        times = path.read_text(encoding="utf-8").count(self.before)
        return None if times == 1 else f"{self.name!r}: {self.file} holds {self.before!r} {times} times, not once"

    def apply(self, folder: Path) -> None:
        """Make the mistake in a copy of the repository."""
        source = (ROOT / self.file).read_text(encoding="utf-8")
        (folder / self.file).write_text(source.replace(self.before, self.after), encoding="utf-8")

    def undo(self, folder: Path) -> None:
        shutil.copyfile(ROOT / self.file, folder / self.file)


@dataclass(frozen=True)
class Outcome:
    """``verdict``: noticed, survived, or broken (the tests did not run); ``by``: the first test that failed."""

    verdict: str
    by: str
    seconds: float


def read_mutants(path: Path) -> list[Mutant]:
    """The mutants of the file, their tests spelt out."""
    spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [
        Mutant(
            entry["name"], file, entry["replace"], entry["by"], tuple(spec["tests"][name] for name in entry["tests"])
        )
        for file, entries in spec["mutants"].items()
        for entry in entries
    ]


def run_tests(folder: Path, tests: Sequence[str], *tiers: str) -> Outcome:
    """Run tests in a copy until the first failure, one tier (as ``-m`` names it) after the other."""
    spent = 0.0
    for tier in tiers:
        outcome = run_tier(folder, tests, tier)
        spent += outcome.seconds
        if outcome.verdict != "survived":
            break
    return replace(outcome, seconds=spent, by=f"{outcome.by} ({tier})" if tier == SLOW else outcome.by)


def run_tier(folder: Path, tests: Sequence[str], tier: str) -> Outcome:
    """Run those that ``-m tier`` chooses, until the first failure."""
    # No bytecode: two sources of one size, written within a second, would share it.
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        tier,
        "--tb=line",
        *tests,
    ]
    began = perf_counter()
    try:
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Outcome("noticed", f"no end within {SECONDS} s", perf_counter() - began)
    seconds = perf_counter() - began
    if run.returncode in (0, 5):  # 5: there are no such tests in this tier
        return Outcome("survived", "", seconds)
    lines = run.stdout.splitlines()
    failed = [line.removeprefix("FAILED ").split(" - ")[0] for line in lines if line.startswith("FAILED ")]
    if run.returncode != 1 or not failed:
        return Outcome("broken", (lines or run.stderr.splitlines() or ["no output"])[-1], seconds)
    return Outcome("noticed", failed[0].partition("::")[2], seconds)


def copy_of_the_repository(folder: Path) -> Path:
    folder.mkdir()
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            shutil.copyfile(source, folder / part)
    return folder


def check(mutants: Sequence[Mutant], jobs: int) -> list[Outcome]:
    """The outcome of every mutant, after the unbroken copy passed all of their tests."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = SimpleQueue[Path]()
        for job in range(jobs):
            folders.put(copy_of_the_repository(Path(scratch) / str(job)))

        def outcome(mutant: Mutant | None, tests: Sequence[str], *tiers: str) -> Outcome:
            folder = folders.get()
            try:
                if mutant is not None:
                    mutant.apply(folder)
                return run_tests(folder, tests, *tiers)
            finally:
                if mutant is not None:
                    mutant.undo(folder)
                folders.put(folder)

        with ThreadPoolExecutor(jobs) as pool:
            suites = sorted({test for mutant in mutants for test in mutant.tests})
            # The slow tests pass without a mutant, too, or CI would say so.
            unbroken_runs = pool.map(lambda suite: outcome(None, [suite], QUICK), suites)
            for suite, unbroken in zip(suites, unbroken_runs, strict=True):
                if unbroken.verdict != "survived":
                    sys.exit(f"{suite} fails without any mutant: {unbroken.by}")
            found = pool.map(lambda mutant: outcome(mutant, mutant.tests, QUICK, SLOW), mutants)
            return list(track(found, "Mutants", total=len(mutants)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="mutants whose name or file holds this word")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="copies at work at once")
    options = parser.parse_args()
    known = read_mutants(Path(__file__).with_name("mutants.yaml"))
    mutants = [mutant for mutant in known if options.only in mutant.name or options.only in mutant.file]
    if not mutants:
        sys.exit(f"no mutant's name or file holds {options.only!r}")

    faults = [fault for mutant in known if (fault := mutant.fault())]
    print(*faults, sep="\n", end="\n" * bool(faults))
    mutants = [mutant for mutant in mutants if mutant.fault() is None]
    outcomes = check(mutants, options.jobs)
    table = Table("mutant", "file", "outcome", "noticed by", "s")
    for mutant, result in zip(mutants, outcomes, strict=True):
        colour = "green" if result.verdict == "noticed" else "bold red"
        verdict = f"[{colour}]{result.verdict}[/]"
        table.add_row(
            mutant.name, Path(mutant.file).name, verdict, result.by.replace("[", r"\["), f"{result.seconds:.0f}"
        )
    Console().print(table)
    noticed = sum(result.verdict == "noticed" for result in outcomes)
    late = sum(result.by.endswith(f" ({SLOW})") for result in outcomes if result.verdict == "noticed")
    print(f"{noticed} of {len(mutants)} mutants noticed, {late} by slow tests alone; {len(faults)} could not be made")
    sys.exit(noticed < len(mutants) or bool(faults))


if __name__ == "__main__":
    main()
