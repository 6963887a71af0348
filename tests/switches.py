"""What scripts set of torch around code of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch


@contextmanager
def _switched(switch: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    switch(value)
    try:
        yield
    finally:
        switch(before)


SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a device in a context": lambda: torch.device("meta"),
    "a default device": partial(_switched, torch.set_default_device, "meta", None),
    "a wide dtype": partial(_switched, torch.set_default_dtype, torch.float64, torch.float32),
    "a narrow dtype": partial(_switched, torch.set_default_dtype, torch.bfloat16, torch.float32),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "deterministic algorithms": partial(_switched, torch.use_deterministic_algorithms, True, False),
    "two threads": partial(_switched, torch.set_num_threads, 2, 1),
    "gradients": torch.enable_grad,
}
"""Name -> a context in which it is set, as a script does for code of its own."""
