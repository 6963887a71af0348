"""What all tests share: one thread per worker, fixed seeds, quiet libraries, and the models."""

from __future__ import annotations

import gc
import os
import random
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from specdec.settings.files import cache_folder

if TYPE_CHECKING:
    from specdec import Engine
    from specdec.models.transformers_target import TransformersTarget

settings.register_profile(
    "specdec",
    deadline=None,  # a busy machine is no defect
    derandomize=True,  # the same examples on every machine
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("specdec")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests; one that only hands them out to workers waits for no library."""
    if getattr(config.option, "numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        return
    import torch

    if not torch.cuda.is_available():
        asked = os.environ.get("TRITON_INTERPRET") is not None or "triton" not in sys.modules
        assert asked, "the conftest.py of a folder imports Triton, before it is known that it is to be interpreted"
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, which transformers does
    import transformers

    if "TRITON_INTERPRET" in os.environ:
        _multiply_in_order()
    torch.set_num_threads(1)  # the workers are the parallelism
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _multiply_in_order() -> None:
    """Have Triton's interpreter sum a product's terms from the first to the last.

    It asks BLAS, whose order depends on the processor and on how many rows and columns there are.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return

    def create_dot(_: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        left, right, total = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype), d.data.copy()
        for k in range(left.shape[-1]):
            total += left[..., :, k, None] * right[..., None, k, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def pytest_collection_finish() -> None:
    """Spare the garbage collector what is there for good: a look at all imported objects takes half a second."""
    gc.collect()
    gc.freeze()


_BEFORE_5_23 = {  # part of a test's name -> what of transformers it compares with
    "gemma2": "its attention leaves Gemma 2's soft caps out",
    "test_another_models_layers_are_refused": "its attention leaves Gemma 2's soft caps out",
    "test_guesses_are_those_of_transformers": "its MTP layers have other methods",
}


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks for tests that an older transformers cannot judge, and for ``few``.

    ``few(n)``: n of a test's cases, evenly spread over them, are in the first tier; the others are ``slow``.
    """
    if tuple(map(int, version("transformers").split(".")[:2])) < (5, 23):
        for item in items:
            for reason in {why for name, why in _BEFORE_5_23.items() if name in item.nodeid}:
                item.add_marker(pytest.mark.skip(reason=f"transformers before 5.23: {reason}"))
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for own in cases.values():
        number = own[0].get_closest_marker("few").args[0]
        part = max(1, len(own) // number)  # not the first of each part, as these may have one value of another axis
        quick = {turn * len(own) // number + turn % part for turn in range(number)}
        for place, item in enumerate(own):
            if place not in quick:
                item.add_marker("slow")


_spent = pytest.StashKey[float]()


def _processor_seconds(*whose: int) -> float:
    used = [resource.getrusage(one) for one in whose]
    return sum(one.ru_utime + one.ru_stime for one in used)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What a worker and all that it started took of processors, told to the process that hands out tests."""
    if (told := getattr(session.config, "workeroutput", None)) is not None:
        told["processor_seconds"] = _processor_seconds(resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    told = getattr(node, "workeroutput", {}).get("processor_seconds", 0.0)
    node.config.stash[_spent] = node.config.stash.get(_spent, 0.0) + told


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """How much work a run is, on any number of cores: processes that tests started are counted, too. And whether GGUF
    files were compared with llama.cpp, which is the truth about them.
    """
    # Workers are children as well, and say by themselves what they took.
    own = [resource.RUSAGE_SELF] if _spent in config.stash else [resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN]
    seconds = config.stash.get(_spent, 0.0) + _processor_seconds(*own)
    terminalreporter.write_line(f"{seconds:.0f} seconds of processors, all workers together")
    skipped = [str(one.longrepr) for one in terminalreporter.stats.get("skipped", ())]
    if count_of := sum("pip install xllamacpp" in why for why in skipped):
        terminalreporter.write_line(f"{count_of} tests were skipped, as llama.cpp is not there: pip install xllamacpp")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the tests measure and keep stays out of the user's cache folder; workers and child processes share it.

    It begins with a copy of the user's native library, as to compile it takes 20 seconds of a processor.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-cache"
    with pytest.MonkeyPatch.context() as patch:
        library = _native_library()
        patch.setenv("XDG_CACHE_HOME", str(folder))
        for file in library:
            _copy_into(cache_folder() / "native", file)
        yield


def _native_library() -> list[Path]:
    """The compiled library, the notes that hold its hash and what was measured of it; empty without a compiler."""
    from specdec.native.invariance import products_vary
    from specdec.native.library import library

    if (loaded := library()) is None:
        return []
    products_vary()
    path = Path(loaded._name)
    notes = [note for note in path.parent.glob("*.sha256") if note.read_text() in path.name]
    return [path, *notes, *path.parent.glob("rows-*.json")]


def _copy_into(folder: Path, file: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    copy = folder / f"{os.getpid()}-{file.name}"  # another worker copies it, too
    shutil.copy2(file, copy)
    copy.replace(folder / file.name)


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test's verdict depends on who else has the processor: measurements are short, and count as undisturbed."""
    from specdec.costs import measuring

    monkeypatch.setattr(measuring, "_QUICK_SECONDS", 0.1)
    monkeypatch.setattr(measuring, "thread_time", count(step=10**9).__next__)
    monkeypatch.setattr(gc, "unfreeze", lambda: None)  # a benchmark ends with it, see pytest_collection_finish


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(scope="session")
def tiny_engine() -> Engine:
    """The embedded model with plain decoding; ``with_drafter`` gives the others.

    In float64, because equality of texts is only promised up to rounding. Nothing is timed, as steps that follow from
    what rows cost on a busy machine would be others on every run.
    """
    import torch

    from specdec import Engine
    from specdec.costs.curve import roofline
    from specdec.models.tokenizer import load_tokenizer
    from specdec.models.transformers_target import TransformersTarget

    target = TransformersTarget.from_pretrained("tiny", dtype=torch.float64, execution="fused")
    return Engine(target, load_tokenizer("tiny"), policy="acceptance", costs=roofline())


@pytest.fixture(scope="session")
def target_of() -> Callable[..., TransformersTarget]:
    """``target_of(family, dtype, execution)``, see :mod:`tests.models`."""
    from tests import models

    return models.target_of
