"""Compile the driver of the native library in many ways, and see that all builds of a class print the same hashes.

    python scripts/native_bits.py [--all] [--only WORD ...] [--jobs N]

The driver (``tests/unit/native/bits/driver.c``) sees by itself that a row's result does not depend on the rows beside
it. Compilers, levels of optimisation, tunings and ``-ffp-contract`` must not change it either: an expression that a
compiler may fuse, or sum in another order, shows here as a group whose hash differs. Without ``--all`` each of these
choices is met in some build of each class, which CI compiles, too; ``--all`` takes every combination, which takes hours
of a processor. Builds whose compiler or instructions this machine lacks are named.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DRIVER = ROOT / "tests" / "unit" / "native" / "bits" / "driver.c"
SECONDS = 1800  # of a compiler, or of a machine that is emulated, on a busy processor

_V4 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_PAIRS = ("avx512bf16", "avx512vnni", "avx512vbmi")
TARGETS = {
    "v2": (("-march=x86-64-v2",), ("sse4_2", "ssse3")),
    "v3": (("-march=x86-64-v3",), ("avx2", "fma", "bmi2", "f16c")),
    "v3 and AVX-VNNI": (("-march=x86-64-v3", "-DEMULATE_VNNI"), ("avx2", "fma", "bmi2", "f16c")),
    "v4": (("-march=x86-64-v4",), _V4),
    "pairs": (("-march=x86-64-v4", *(f"-m{one}" for one in _PAIRS)), (*_V4, "avx512_bf16", "avx512_vnni")),
    "tiles": (
        ("-march=x86-64-v4", *(f"-m{one}" for one in _PAIRS), "-mamx-tile", "-mamx-bf16"),
        (*_V4, "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"),
    ),
    "tiles, emulated": (
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512vbmi", "-DEMULATE_TILES"),
        (*_V4, "avx512_vnni", "avx512vbmi"),
    ),
    "arm": (("-march=armv8-a", "-static"), ()),
}
"""Flags of the compiler, and the processor's features that a build needs, as the system names them."""

TUNES = ("generic", "haswell", "znver2", "znver3", "alderlake", "sapphirerapids")
ARM = "aarch64-linux-gnu-gcc"


@dataclass(frozen=True)
class Build:
    """One way to compile the driver; ``contract`` is what the compiler may do with a * b + c."""

    compiler: str
    target: str
    level: str = "-O2"
    tune: str = "generic"
    contract: str = "off"
    small: bool = False  # only the groups without products, which compile in seconds

    @property
    def _compiler(self) -> str:
        """gcc takes the place of a clang that is missing: level, tuning and contraction still differ."""
        return "gcc" if self.compiler == "clang" and shutil.which("clang") is None else self.compiler

    @property
    def name(self) -> str:
        """The same on every machine."""
        how = f"{self.compiler} {self.level} for {self.target}, tuned for {self.tune}, contract {self.contract}"
        return how + (", without products" if self.small else "")

    def __str__(self) -> str:
        return self.name if self._compiler == self.compiler else f"{self.name}, by {self._compiler}"

    @property
    def _emulator(self) -> list[str]:
        return ["qemu-aarch64"] if self.target == "arm" else []

    def missing(self) -> str | None:
        """What this machine lacks for it, or None."""
        if lacking := [one for one in (self._compiler, *self._emulator) if shutil.which(one) is None]:
            return f"no {lacking[0]}"
        if lacking := sorted({*TARGETS[self.target][1]} - _features()):
            return f"a processor without {lacking[0]}"
        return None

    def command(self, made: Path) -> list[str]:
        """The compiler's command line."""
        tune = () if self.target == "arm" else (f"-mtune={self.tune}",)
        flags = (self.level, *TARGETS[self.target][0], *tune, f"-ffp-contract={self.contract}", "-fno-math-errno", "-w")
        part = ("-DSMALL", "-fwhole-program") if self.small else ()  # what is not called is not compiled
        include = f"-I{ROOT / 'specdec' / 'native'}"
        return [self._compiler, *flags, *part, "-fopenmp", include, str(DRIVER), "-o", str(made), "-lm"]

    def run(self, folder: Path, quick: bool = False) -> tuple[str, dict[str, str]]:
        """Its class, and the hash of each group of results; `quick` tries fewer numbers of rows beside a row.

        Raises:
            ValueError: the driver does not compile, or found rows that differ.
        """
        made = folder / "driver"
        compiled = subprocess.run(self.command(made), capture_output=True, text=True, timeout=SECONDS)
        if compiled.returncode:
            raise ValueError(f"{self}: {compiled.stderr[-2000:]}")
        command = [*self._emulator, str(made), *(["quick"] if quick or self._emulator else [])]
        quiet = os.environ | {"OMP_WAIT_POLICY": "passive"}  # threads that wait take no processor's time
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=quiet)
        first, *lines = done.stdout.splitlines() or [""]
        if done.returncode:
            told = [line for line in lines if line.startswith(("DIFFERS", "FAILED"))]
            raise ValueError(f"{self}: exit {done.returncode}\n" + "\n".join(told[:20]) + done.stderr[-2000:])
        return first, {name: found for found, _, name in (line.partition(" ") for line in lines)}


SMALL = (
    Build("gcc", "v3", "-O2", "generic", "off", small=True),
    Build("gcc", "v3", "-O3", "haswell", "fast", small=True),
)
"""Tuned for Haswell, gcc fuses all that it may, and for Zen 3 no sums of a loop."""

CHOSEN = (
    Build("gcc", "v3", "-O3", "haswell", "fast"),
    Build("clang", "v3 and AVX-VNNI", "-O2", "alderlake", "off"),
    Build("gcc", "v2", "-O2", "znver3", "off"),
    Build("clang", "v2", "-O3", "znver2", "fast"),
    Build("gcc", "v4", "-O3", "sapphirerapids", "fast"),
    Build("clang", "v4", "-O2", "generic", "off"),
    Build("clang", "pairs", "-O2", "generic", "fast"),
    Build("gcc", "tiles", "-O3", "sapphirerapids", "off"),
    Build("gcc", "tiles, emulated", "-O2", "generic", "fast"),
    Build(ARM, "arm", "-O1", "generic", "fast"),
)
"""In each class both compilers, both levels, and contraction off and fast. CI has all that its machine runs but Arm."""


def every() -> Iterator[Build]:
    """All combinations."""
    targets = [target for target in TARGETS if target != "arm"]
    for target, *others in product(targets, ("gcc", "clang"), ("-O2", "-O3"), TUNES, ("off", "fast")):
        compiler, level, tune, contract = others
        yield Build(compiler, target, level, tune, contract)
    for level, contract in product(("-O2", "-O3"), ("off", "fast")):
        yield Build(ARM, "arm", level, "generic", contract)


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Groups whose hashes differ between two builds of a class; groups by tiles may be in one of them alone."""
    names = [*one, *(name for name in other if name not in one)]
    by_one = [name for name in names if not name.endswith("by tiles") or (name in one and name in other)]
    return [name for name in by_one if one.get(name) != other.get(name)]


def _features() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return {*next((line for line in lines if line.startswith("flags")), "").split()}


def _try(build: Build) -> tuple[Build, tuple[str, dict[str, str]] | str]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return build, build.run(Path(folder))
        except (ValueError, subprocess.SubprocessError) as error:
            return build, str(error)


def check(builds: Iterable[Build], jobs: int) -> int:
    """Run them, and print each one's outcome; returns the number of faults."""
    faults, first = 0, dict[str, tuple[Build, dict[str, str]]]()
    with ThreadPoolExecutor(jobs) as pool:
        for build, found in pool.map(_try, builds):
            if isinstance(found, str):
                faults += 1
                print(f"FAILED  {found}", flush=True)
                continue
            name, hashes = found
            other, expected = first.setdefault(name, (build, hashes))
            parts = differences(expected, hashes)
            faults += bool(parts)
            print(f"{'DIFFERS' if parts else 'equal  '} {build} ({name}): {hashes['all']}", flush=True)
            if parts:
                print(f"        from {other} in {len(parts)} groups: {'; '.join(parts[:12])}", flush=True)
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every combination")
    parser.add_argument("--only", nargs="*", default=[], help="builds that are described with all of these words")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="builds at a time")
    options = parser.parse_args()
    builds = [one for one in (every() if options.all else CHOSEN) if all(word in str(one) for word in options.only)]
    for build in builds:
        if why := build.missing():
            print(f"skipped {build}: {why}")
    if faults := check([one for one in builds if one.missing() is None], options.jobs):
        sys.exit(f"{faults} builds differ from others, or in themselves")


if __name__ == "__main__":
    main()
