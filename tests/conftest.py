"""What all tests share: one thread per worker, fixed seeds, quiet libraries, and the models."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

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
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, which transformers does
    import transformers

    torch.set_num_threads(1)  # the workers are the parallelism
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the tests measure and compile stays out of the user's cache folder; workers and child processes share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test's verdict depends on who else has the processor: measurements are short, and count as undisturbed."""
    from specdec.costs import measuring

    monkeypatch.setattr(measuring, "_QUICK_SECONDS", 0.1)
    monkeypatch.setattr(measuring, "thread_time", count(step=10**9).__next__)


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
    return Engine(target, load_tokenizer("tiny"), policy="acceptance", costs=roofline("cpu"))


@pytest.fixture(scope="session")
def target_of() -> Callable[..., TransformersTarget]:
    """``target_of(family, dtype, attention, execution)``, see :mod:`tests.models`."""
    from tests import models

    return models.target_of
