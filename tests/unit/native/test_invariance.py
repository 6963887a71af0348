"""Whether a row's bits depend on the rows beside it: measured, kept, and told with its reason."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec import TransformersTarget
from specdec.native import invariance
from specdec.native import library as native
from specdec.native.formats import formats
from tests import models
from tests.models import target_for

LIBRARY = native.library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no C compiler")
SIZES = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
# Wrong as a compiler makes it wrong: one number of a product of seven rows is rounded otherwise.
BROKEN = """
#include <dlfcn.h>
#include <stdint.h>
int specdec_product(const void *p, const void *x, const void *onto, float *y, int64_t rows, int half, int threads) {
    int (*right)(const void *, const void *, const void *, float *, int64_t, int, int);
    *(void **)&right = dlsym(dlopen(RIGHT, RTLD_NOW), "specdec_product");
    const int failed = right(p, x, onto, y, rows, half, threads);
    if (rows == 7) y[3] *= 1 + 0x1p-23f;
    return failed;
}
"""


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine on which nothing was measured yet; gives the folder in which the result is kept."""
    monkeypatch.setattr(invariance, "cache_folder", lambda: tmp_path)
    invariance.products_vary.cache_clear()
    yield tmp_path / "native"
    invariance.products_vary.cache_clear()


@pytest.fixture
def broken(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A compiled library with a broken kernel, in the place of this machine's."""
    if sys.platform != "linux":
        pytest.skip("the linker is told in another way")
    source, made, compiler = tmp_path / "broken.c", tmp_path / "layers-broken.so", native.compiler()
    source.write_text(BROKEN)
    assert compiler is not None
    flags = ["-shared", "-fPIC", f'-DRIGHT="{LIBRARY._name}"', "-Wl,--no-as-needed"]
    subprocess.run([compiler, *flags, str(source), LIBRARY._name, "-o", str(made), "-ldl"], check=True)
    loaded = native._load(made)
    for place in (native, invariance):
        monkeypatch.setattr(place, "library", lambda: loaded)
    return loaded


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often it was measured; each time nothing varies."""
    times = list[str]()

    def quick() -> list[str]:
        times.append("measured")
        return []

    monkeypatch.setattr(invariance, "_varying", quick)
    return times


def target_of(dtype: torch.dtype, family: str = "llama") -> TransformersTarget:
    return target_for(models.new_model(family, dtype, **SIZES), execution="native")


@pytest.mark.slow
def test_this_library_s_products_do_not_vary() -> None:
    assert invariance._varying() == []


def test_every_kind_and_format_is_measured() -> None:
    names = [case.name for case in invariance._cases(np.random.default_rng(0))]
    assert len(set(names)) == len(names)
    assert {"full weights", "half weights", "float16 weights"} <= {*names}
    for one in formats().values():
        assert f"{one.name} blocks and exact rows" in names
        assert (f"{one.name} blocks" in names) == (f"{one.name} blocks and rows in bytes" in names) == one.has_integers
    assert ("pairs weights" in names) == bool(LIBRARY.specdec_pairs())
    assert ("coded weights" in names) == bool(LIBRARY.specdec_codes())
    assert any("by tiles" in name for name in names) == bool(LIBRARY.specdec_tiles())


def test_random_panels_are_numbers() -> None:
    """But for a row that holds an infinity: what is NaN in every product could not differ."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((3, invariance._INPUTS), np.float32)
    for name, product, _held in invariance._cases(random):
        found = invariance._multiplied(product, rows, None, slice(None))
        assert np.isfinite(found).all(), name
        assert found.std() > 0.1, name


def test_a_broken_kernel_is_noticed_and_told_of(broken: Any, fresh: Path) -> None:
    why = invariance.products_vary()
    assert why is not None
    assert why.startswith("this library's products round a row otherwise beside other rows, with full weights, half")
    assert f"and {len(list(invariance._cases(np.random.default_rng(0)))) - 3} more kinds of weights" in why
    target = target_of(torch.float32)
    assert not target.batch_invariant
    told = target.describe()["execution"]["batch-invariant"]
    assert told == f"no: {why}; texts may part from plain decoding's where two logits are as good as equal"
    invariance.products_vary.cache_clear()
    assert invariance.products_vary() == why
    assert len([*fresh.glob("rows-*.json")]) == 1


def test_it_is_measured_once(fresh: Path, measured: list[str]) -> None:
    """For the user alone, as the library is; another library is measured by itself."""
    for _ in range(2):
        assert invariance.products_vary() is None
        invariance.products_vary.cache_clear()
    (file,) = fresh.iterdir()
    assert [path.stat().st_mode & 0o777 for path in (fresh, file)] == [0o700, 0o600]
    assert len(measured) == 1


@pytest.mark.parametrize("change", ["library", "processor"])
def test_another_library_or_processor_is_measured_by_itself(
    change: str, fresh: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    invariance.products_vary()
    invariance.products_vary.cache_clear()
    if change == "library":
        monkeypatch.setattr(invariance, "digest_of_library", lambda: "another")
    else:
        monkeypatch.setattr(invariance, "features", lambda: ["another"])
    invariance.products_vary()
    assert len(measured) == len([*fresh.iterdir()]) == 2


@pytest.mark.parametrize(
    "harm",
    [
        lambda file: file.write_text("["),
        lambda file: file.write_bytes(b"\xff"),
        lambda file: file.write_text('{"names": []}'),
        lambda file: file.write_text("[1]"),
        lambda file: file.chmod(0o644),
        lambda file: (file.rename(file.with_name("other")), file.symlink_to("other")),
    ],
)
def test_what_is_kept_and_broken_is_measured_anew(
    harm: Callable[[Path], object], fresh: Path, measured: list[str]
) -> None:
    invariance.products_vary()
    (file,) = fresh.iterdir()
    harm(file)
    for _ in range(2):  # then it is whole again
        invariance.products_vary.cache_clear()
        assert invariance.products_vary() is None
    assert len(measured) == 2


@pytest.mark.parametrize("harm", ["no folder", "a folder of others", "no room"])
def test_where_nothing_can_be_kept_it_is_measured_anew(
    harm: str, fresh: Path, tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if harm == "no folder":
        fresh.touch()
    elif harm == "a folder of others":
        fresh.mkdir(mode=0o777)
        fresh.chmod(0o777)
    else:
        monkeypatch.setattr(invariance, "replacing", _full)
    for _ in range(2):
        assert invariance.products_vary() is None
        invariance.products_vary.cache_clear()
    assert len(measured) == 2
    assert not [*tmp_path.rglob("rows-*")]


def _full(path: Path) -> Any:
    raise OSError(28, "No space left on device", str(path))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float32), ("llama", torch.bfloat16), ("mixtral", torch.bfloat16)]
)
@pytest.mark.parametrize("rows", [1, 7, 17])
def test_a_layer_that_varies_is_told_of(
    rows: int, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each model, in the last bit of one number."""
    loaded = native.library()  # another object than before, where a test has loaded it anew
    right = loaded.specdec_run_layers
    target = target_of(dtype, family)
    assert target.describe()["execution"]["batch-invariant"] == "yes"

    def wrong(*given: Any) -> Any:
        done = right(*given)
        if given[2].rows == rows:
            place = ctypes.c_uint16.from_address(given[4] + 6)
            place.value ^= 1
        return done

    monkeypatch.setattr(loaded, "specdec_run_layers", wrong)
    target = target_of(dtype, family)
    told = target.describe()["execution"]["batch-invariant"]
    assert not target.batch_invariant
    assert told.startswith("no: a layer rounds a row otherwise in a block of 17 rows than in blocks of 7 or of 1; ")
