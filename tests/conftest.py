"""What all tests share: one thread per worker, fixed seeds, quiet libraries, and the models."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings

from specdec import Engine, cost
from specdec.cost import roofline
from specdec.model import TransformersTarget
from specdec.text import load_tokenizer
from tests import models

torch.set_num_threads(1)  # the workers are the parallelism
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
settings.register_profile(
    "specdec",
    deadline=None,  # a busy machine is no defect
    derandomize=True,  # the same examples on every machine
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("specdec")


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
    """No test's verdict depends on who else has the processor: measurements count as undisturbed."""
    monkeypatch.setattr(cost, "thread_time", count(step=10**9).__next__)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(scope="session")
def tiny_engine() -> Engine:
    """The embedded model with plain decoding; ``with_drafter`` gives the others.

    In float64, because equality of texts is only promised up to rounding. Nothing is timed, as steps that follow from
    what rows cost on a busy machine would be others on every run.
    """
    target = TransformersTarget.from_pretrained("tiny", dtype=torch.float64, execution="fused")
    return Engine(target, load_tokenizer("tiny"), policy="acceptance", costs=roofline("cpu"))


@pytest.fixture(scope="session")
def target_of() -> Callable[..., TransformersTarget]:
    """``target_of(family, dtype, attention, execution)``, see :mod:`tests.models`."""
    return models.target_of
