"""Which kernel a weight's shape gets: measured once per machine and model, kept on disk.

A matrix that is read again and again stays in the CPU's cache, which a decoding model's never do; and which kernel wins
depends on that. So the products are timed as a step runs them, layer after layer through the model's own weights, with
1 row and with 8, all kernels in turn.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from specdec.errors import ConfigError, SpecdecWarning
from specdec.lowering.products import PRODUCTS, Product, usable
from specdec.machine import cache_folder, processor, write_json
from specdec.native.library import library

__all__ = ["KERNELS", "check_kernels", "choose_kernels"]

KERNELS = ("auto", *PRODUCTS)

Shape = tuple[int, ...]  # (out, in)

_SMALL = 1 << 20  # bytes; a model below that is all overhead, and not worth a measurement
_SAMPLE = 32 << 20  # bytes of weights that are timed: with one copy per kernel, more than a core's caches hold
_ROWS = (1, 8)
_REPEATS, _SECONDS = 9, 1.0  # at most, per number of rows
# What a kernel must win to be taken: `packed` makes the model's own forward slow, `linear` costs nothing. `tiled` may
# lose a little: where all products are, the layers run in one call, and rounding is plain decoding's.
_MARGIN = {"linear": 1.0, "transposed": 0.97, "packed": 0.93, "tiled": 1.1}


def check_kernels(choice: str) -> str:
    """The choice, if it is one.

    Raises:
        ConfigError: it is none.
    """
    if choice not in KERNELS:
        raise ConfigError(f"kernels={choice!r} is unknown; choose one of {', '.join(KERNELS)}")
    return choice


def choose_kernels(weights: Sequence[torch.Tensor], choice: str = "auto") -> dict[Shape, str]:
    """The kernel of each shape among ``weights``, which come in the order in which a step reads them.

    ``auto`` measures, unless this machine has measured the same shapes before; other choices say it for all shapes.
    Shapes that are not in the answer stay ``linear``.

    Raises:
        ConfigError: ``tiled``, on a machine without a C compiler.
    """
    if choice != "auto":
        if choice == "tiled" and library() is None:
            raise ConfigError(
                "kernels='tiled' needs a C compiler (cc, gcc or clang), and none works here; install one, or leave "
                "kernels at auto"
            )
        return {tuple(weight.shape): choice for weight in weights if usable(choice, weight)}
    weights = [weight for weight in weights if weight.device.type == "cpu"]
    if sum(weight.nbytes for weight in weights) < _SMALL:
        return {}
    machine = _machine()
    name = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:12]
    path = cache_folder() / f"kernels-{name}.json"
    known, signature = _read(path, machine), _signature(weights)
    if signature not in known:
        known[signature] = _measure(weights)
        with suppress(OSError):  # it costs a measurement next time
            write_json(path, {"machine": machine, "choices": known})
    return {_shape(text): kernel for text, kernel in known[signature].items()}


def _machine() -> dict[str, str | bool]:
    """What a measurement depends on, but for threads, dtype and shapes."""
    return {
        "cpu": processor(torch.device("cpu")),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "native": library() is not None,
    }


def _signature(weights: Sequence[torch.Tensor]) -> str:
    counts = sorted(Counter(_text(weight) for weight in weights).items())
    dtype = str(weights[0].dtype).removeprefix("torch.")
    return f"{dtype}, {torch.get_num_threads()} threads: " + ", ".join(f"{n} x {text}" for text, n in counts)


def _text(weight: torch.Tensor) -> str:
    return "x".join(map(str, weight.shape))


def _shape(text: str) -> Shape:
    return tuple(map(int, text.split("x")))


def _read(path: Path, machine: dict[str, str | bool]) -> dict[str, dict[str, str]]:
    """What is known; nothing where there is no file, or a warning that says why the file is left alone."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        choices = content["choices"]
        if content["machine"] != machine:
            other = content["machine"].get("cpu", "another machine")
            warnings.warn(
                f"{path} was measured on {other}, not on this machine; measuring anew", SpecdecWarning, stacklevel=4
            )
            return {}
        if any(_shape(text) and kernel not in PRODUCTS for made in choices.values() for text, kernel in made.items()):
            raise ValueError("unknown kernel")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(
            f"{path} cannot be read ({type(error).__name__}: {error}); measuring anew", SpecdecWarning, stacklevel=4
        )
        return {}
    return dict(choices)


def _measure(weights: Sequence[torch.Tensor]) -> dict[str, str]:
    """Shape -> its fastest kernel, by the mean over ``_ROWS`` of the time relative to ``linear``."""
    sample, held = list[torch.Tensor](), 0
    for weight in weights:
        # Every shape at least once, and no more than it takes to leave the caches.
        if held < _SAMPLE or all(weight.shape != other.shape for other in sample):
            sample.append(weight)
            held += weight.nbytes
    with torch.inference_mode():
        products = {
            name: [make(weight, None) for weight in sample]
            for name, make in PRODUCTS.items()
            if all(usable(name, weight) for weight in sample)
        }
        shares: dict[str, dict[str, float]] = {}
        for rows in _ROWS:
            seconds = _time(sample, products, rows)
            for text, times in seconds.items():
                for name, value in times.items():
                    share = value / times["linear"] / len(_ROWS)
                    shares.setdefault(text, dict.fromkeys(products, 0.0))[name] += share
    return {text: min(found, key=lambda name: found[name] / _MARGIN[name]) for text, found in shares.items()}


def _time(sample: Sequence[torch.Tensor], products: dict[str, list[Product]], rows: int) -> dict[str, dict[str, float]]:
    """Shape -> kernel -> seconds for all weights of that shape, the best repeat: a busy machine only ever adds."""
    inputs = {shape: torch.randn(rows, shape[1]).to(sample[0].dtype) for shape in {w.shape for w in sample}}
    steps = [(_text(weight), inputs[weight.shape]) for weight in sample]
    found: dict[str, dict[str, list[float]]] = {_text(w): {name: [] for name in products} for w in sample}
    began = perf_counter()
    for repeat in range(-1, _REPEATS):
        for name, kernels in products.items():
            total: Counter[str] = Counter()
            for (text, rows_in), kernel in zip(steps, kernels, strict=True):
                start = perf_counter()
                kernel(rows_in)
                total[text] += perf_counter() - start  # type: ignore[assignment]
            if repeat >= 0:
                for text, seconds in total.items():
                    found[text][name].append(seconds)
        if repeat >= 2 and perf_counter() - began > _SECONDS:
            break
    return {text: {name: min(times) for name, times in of.items()} for text, of in found.items()}
