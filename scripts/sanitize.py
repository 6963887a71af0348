"""Run the native library's and the batches' tests under sanitizers.

    make sanitize    (python scripts/sanitize.py [--only address|thread] [tests and options of pytest])

``layers.c`` is compiled with a sanitizer in it, and its tests run in a process that has the sanitizer's own library:

- ``address``: reads and writes outside of what was allocated, or after it was freed, and undefined behaviour. Weights
  lie on the heap then, each by itself, not in huge pages, and scratch is not kept for the next call, so that what lies
  beside them is seen.
- ``thread``: the team of threads: what one writes and another uses with no barrier between. Two threads have the place
  of one in every test. OpenMP's own entry is by plain threads (``sanitize_team.c``), as gcc's is not compiled for it.

Before its tests pass for anything each sanitizer has to see faults that are put into a copy of the source on purpose.
It needs gcc with its sanitizers, on Linux, and takes some minutes, so CI does not run it on each change.
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from specdec.native import library  # noqa: E402

SOURCE = ROOT / "specdec" / "native" / "layers.c"
TEAM = Path(__file__).with_name("sanitize_team.c")
COMMON = ("-O1", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
COMMON += ("-g1", "-fno-omit-frame-pointer")
SECONDS = 900  # of a compiler: a sanitizer's code is long


@dataclass(frozen=True)
class Sanitizer:
    """One that runs by itself.

    Attributes:
        flags: of the compiler.
        libraries: that the process has to have from its beginning; C++'s among them, whose exceptions are caught.
        environment: of the process.
        tests: that are run.
    """

    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    environment: dict[str, str]
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Fault:
    """Put in on purpose: ``before`` becomes ``after``, and ``test`` ends with a report of it."""

    name: str
    sanitizer: str
    before: str
    after: str
    test: str
    report: str


CHAIN = tuple(f"tests/unit/drafters/test_native_{part}.py" for part in ("chain", "growth", "block", "block_growth"))
BLOCKS = ("tests/unit/native/test_blocks.py", "tests/unit/models/test_broken_gguf.py")
NATIVE, BATCH = (
    "tests/unit/native/test_native.py",
    ("tests/unit/engine/test_batch.py", "tests/integration/test_batch.py"),
)
SANITIZERS = {
    "address": Sanitizer(
        ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        ("libasan.so", "libubsan.so", "libstdc++.so"),
        {
            # What Python keeps to its end is no leak of the library's; a test asks for more memory than there is.
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",  # Python's own allocator gives pieces of what the sanitizer knows as one
        },
        (NATIVE, *BLOCKS, "tests/unit/native/test_native_library.py", *CHAIN, *BATCH),
    ),
    "thread": Sanitizer(
        ("-fsanitize=thread", "-Wl,-Bsymbolic", str(TEAM)),
        ("libtsan.so", "libstdc++.so"),
        {"TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1", "PYTHONMALLOC": "malloc"},
        (NATIVE, BLOCKS[0], *CHAIN, *BATCH),
    ),
}
FAULTS = (
    Fault(
        "scratch that is too short",
        "address",
        "(size_t)(count / 16 + 2) * 64",
        "(size_t)(count / 16 / 2 + 2) * 64",
        f"{NATIVE}::test_threads_change_nothing[vectors-5-dtype0]",
        "AddressSanitizer: heap-buffer-overflow",
    ),
    Fault(
        "a sign that is shifted out",
        "address",
        "uint32_t bits = (uint32_t)half << 16;",
        "uint32_t bits = (int32_t)half << 16;",
        f"{NATIVE}::test_no_bit_of_a_weight_is_lost",
        "runtime error: left shift",
    ),
    Fault(
        "no barrier between keys and attention",
        "thread",
        "    meet(team);\n    const int64_t room = room_for(all->keys)",
        "    const int64_t room = room_for(all->keys)",
        f"{NATIVE}::test_threads_change_nothing[vectors-5-dtype0]",
        "ThreadSanitizer: data race",
    ),
)


def run_inside(name: str, source: Path, arguments: Sequence[str]) -> int:
    """Run pytest in this process, whose library is compiled from ``source`` with a sanitizer in it."""
    import pytest
    import torch

    from specdec.runners.memory_pages import HugePages

    library._SOURCE, library._SECONDS = source, SECONDS
    library._FLAGS = (*COMMON, *SANITIZERS[name].flags)  # type: ignore[assignment]
    HugePages.take = lambda self, count: torch.empty(count, dtype=torch.uint8)  # type: ignore[method-assign]

    class Team:
        @pytest.hookimpl(trylast=True)
        def pytest_configure(self) -> None:
            torch.set_num_threads(2 if name == "thread" else 1)

    return pytest.main(
        ["-x", "-q", "-s", "-p", "no:faulthandler", "-p", "no:cacheprovider", *arguments], plugins=[Team()]
    )


def run_under(name: str, source: Path, folder: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own, which begins with the sanitizer's library; its report is among its output.

    What is compiled goes into ``folder``.
    """
    sanitizer = SANITIZERS[name]
    libraries = [found for library in sanitizer.libraries if (found := path_of(library))]
    environment = {
        **os.environ,
        **sanitizer.environment,
        "LD_PRELOAD": ":".join(libraries),
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    fixed = [] if (setarch := shutil.which("setarch")) is None else [setarch, "-R"]  # else some kernels leave no room
    inside = ["--inside", name, "--source", str(source)]
    command = [*fixed, sys.executable, __file__, *inside, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def path_of(library: str) -> str | None:
    """Where gcc has a library of its own, if it has it."""
    found = subprocess.run(["gcc", f"-print-file-name={library}"], capture_output=True, text=True, check=True)
    return path if os.path.isabs(path := found.stdout.strip()) else None


def sees(fault: Fault, folder: Path) -> str | None:
    """Why a fault that was put in is not seen, if it is not."""
    source = folder / f"{fault.name.replace(' ', '_')}.c"
    text = library.source(SOURCE)  # with its headers in their places
    assert text.count(fault.before) == 1, f"{fault.name} has no place in the source"
    source.write_text(text.replace(fault.before, fault.after), encoding="utf-8")
    done = run_under(fault.sanitizer, source, folder, [fault.test])
    return None if done.returncode and fault.report in done.stdout else f"exit {done.returncode}\n{done.stdout}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SANITIZERS, help="one of them")
    parser.add_argument("--inside", choices=SANITIZERS, help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, default=SOURCE, help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.inside:
        sys.exit(run_inside(options.inside, options.source, arguments))
    names = [options.only] if options.only else list(SANITIZERS)
    if shutil.which("gcc") is None:
        sys.exit("sanitizers need gcc; install it")
    lacking = [library for name in names for library in SANITIZERS[name].libraries[:1] if path_of(library) is None]
    if lacking:
        sys.exit(f"this gcc lacks {', '.join(lacking)}; install its sanitizers (Debian: libgcc-12-dev or later)")

    failed = False
    with ThreadPoolExecutor(os.cpu_count()) as pool, tempfile.TemporaryDirectory() as scratch:
        folder, faults = Path(scratch), [fault for fault in FAULTS if fault.sanitizer in names]
        seen = {fault.name: pool.submit(sees, fault, folder) for fault in faults}
        runs = {
            name: pool.submit(run_under, name, SOURCE, folder, ["-m", "not slow", *(arguments or of.tests)])
            for name, of in SANITIZERS.items()
            if name in names
        }
        for fault in faults:
            unseen = seen[fault.name].result()
            failed |= unseen is not None
            print(f"{fault.sanitizer}: {fault.name}, put in on purpose: {'seen' if unseen is None else 'NOT SEEN'}")
            print(unseen or "", end="")
        for name, run in runs.items():
            done = run.result()
            failed |= done.returncode != 0
            told = f"exit {done.returncode}" if done.returncode else "nothing to report"
            print(f"{name}: {told}\n{done.stdout[-20_000:]}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
