"""The compiled library on disk: kept, built anew where broken, not loaded where others may have put it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import Engine
from specdec.errors import ConfigError, SpecdecWarning
from specdec.native import library as native
from specdec.settings.files import digest_of, held
from tests import models
from tests.models import target_for

LIBRARY = native.library()
needs_compiler = pytest.mark.skipif(LIBRARY is None, reason="no C compiler")
SIZES = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
PLANTED = """
#include <stdio.h>
__attribute__((constructor)) static void ran(void) { fclose(fopen("%s", "w")); }
"""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine that has compiled nothing yet; gives the cache folder, in which "native" is the library's."""
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


@pytest.fixture
def built() -> Path:
    """The library that this machine has compiled for itself; tests keep copies of it and load them."""
    assert LIBRARY is not None
    return Path(LIBRARY._name)


@pytest.fixture
def compiled(fresh: Path, built: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the compiler was told to write; it is quick here, and writes what it did the last time."""
    told: list[str] = []
    run = subprocess.run

    def quick(command: list[str], **options: Any) -> Any:
        if str(native._SOURCE) not in command:
            return run(command, **options)
        told.append(command[command.index("-o") + 1])
        shutil.copy(built, told[-1])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", quick)
    return told


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A library that leaves a mark, ``ran``, when it is loaded."""
    source, library = tmp_path / "planted.c", tmp_path / "planted.so"
    source.write_text(PLANTED % (tmp_path / "ran"))
    compiler = native.compiler()
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    library.chmod(0o600)
    return library


def kept(folder: Path) -> tuple[Path, Path]:
    """The note and the library in a cache folder."""
    (note,), (library,) = (list((folder / "native").glob(pattern)) for pattern in ("*.sha256", "layers-*.so"))
    return note, library


def test_without_a_compiler_torch_does_it(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    model, prompt = models.new_model("llama", torch.float32, **SIZES), models.prompt_of(7)
    expected = models.reference(model, prompt, 20)
    target = target_for(model, execution="auto")
    assert target.options["runner"] == "fused"
    assert Engine(target).generate(prompt, 20).token_ids == expected
    with pytest.raises(ConfigError, match=r"'native' .* native products need a C compiler .*, and none works"):
        target_for(models.new_model("llama", torch.float32, **SIZES), execution="native")


@needs_compiler
def test_a_compiler_that_fails_is_warned_of(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_FLAGS", ("--no-such-flag",))
    with pytest.warns(SpecdecWarning, match="no native layers, so decoding is slower: .*no-such-flag"):
        assert native.library() is None
    assert not list(fresh.rglob("*.so"))


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for the simplest of these processors")
def test_a_compiler_without_openmp_is_warned_of(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "cc"  # as clang is where there is no libomp
    own.write_text(f'#!/bin/sh\ncase "$*" in *-fopenmp*) exit 1;; esac\nexec {native.compiler()} "$@"\n')
    own.chmod(0o700)
    monkeypatch.setattr(native, "compiler", lambda: str(own))
    monkeypatch.setenv("SPECDEC_CFLAGS", "-O0 -march=x86-64")
    with pytest.warns(SpecdecWarning, match="native layers run on one thread: the compiler has no OpenMP; install gcc"):
        assert native.library() is not None


@needs_compiler
def test_flags_of_the_environment_make_another_library(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = native._key(native.compiler()), native._machine()
    monkeypatch.setenv("SPECDEC_CFLAGS", "-mno-avx512f '-DNAME=of two words'")
    assert native.flags()[-2:] == ["-mno-avx512f", "-DNAME=of two words"]
    assert native._key(native.compiler()) != own[0]
    assert native._machine() != own[1]
    monkeypatch.setenv("SPECDEC_CFLAGS", "-DNAME='")
    with pytest.raises(ConfigError, match=r"SPECDEC_CFLAGS=\"-DNAME='\": No closing quotation; write it as a shell"):
        native.flags()


@needs_compiler
def test_a_library_is_kept_for_the_user_alone(fresh: Path, compiled: list[str]) -> None:
    assert native.library() is not None
    note, library = kept(fresh)
    assert digest_of(library) == note.read_text()
    assert [path.stat().st_mode & 0o777 for path in (note.parent, note, library)] == [0o700, 0o600, 0o600]
    assert sorted(path.name for path in note.parent.iterdir()) == sorted([".lock", note.name, library.name])
    native.library.cache_clear()
    assert native.library() is not None
    assert len(compiled) == 1


@needs_compiler
def test_what_a_killed_compiler_left_is_cleared_away(
    fresh: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """A kill, of which a folder for a while knows nothing."""

    run, folder = subprocess.run, fresh / "native"
    with monkeypatch.context() as patch:
        patch.setattr(native.tempfile, "TemporaryDirectory", lambda **named: nullcontext(tempfile.mkdtemp(**named)))

        def killed(command: list[str], **options: Any) -> Any:
            if str(native._SOURCE) not in command:
                return run(command, **options)
            Path(options["env"]["TMPDIR"], "half.s").touch()
            raise Killed

        patch.setattr(subprocess, "run", killed)
        with pytest.raises(Killed):
            native.library()
    assert len(list(folder.glob(".*/half.s"))) == 1
    assert native.library() is not None
    assert len(compiled) == 1
    assert not [path for path in folder.iterdir() if path.is_dir()]


@needs_compiler
def test_one_process_compiles_and_another_waits_for_it(
    fresh: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native.library() is not None
    native.library.cache_clear()
    note, _ = kept(fresh)
    done = note.rename(fresh / "done")

    @contextmanager
    def waited(*given: Any) -> Iterator[None]:
        with held(*given):
            done.rename(note)  # by then the other one is done
            yield

    monkeypatch.setattr(native, "held", waited)
    assert native.library() is not None
    assert len(compiled) == 1


@needs_compiler
def test_a_process_that_compiles_for_ever_is_not_waited_for(
    fresh: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_SECONDS", 0.01)
    monkeypatch.setattr(native, "_key", lambda compiler: "key")
    native.own_folder(fresh / "native")
    with held(fresh / "native" / ".lock", ""), pytest.warns(SpecdecWarning, match="another process has been compiling"):
        assert native.library() is not None
    assert not compiled[-1].startswith(str(fresh))


WITHOUT_TILES = """
import torch
from specdec.native import library as native
native.library().specdec_tiles = lambda: 0
from tests import models, seam
from tests.models import target_for
model = models.new_model("llama", torch.bfloat16, hidden_size=96, head_dim=64, num_attention_heads=4)
target = target_for(model, execution="native")
with target.active():
    seam.text(target, rows=40).run(models.prompt_of(40))
print(native.products(), native.digest_of_library())
"""


@pytest.mark.slow
@needs_compiler
def test_a_process_that_is_lent_no_tiles_multiplies_by_vectors() -> None:
    """It would be killed for any instruction on them. oneDNN, which asks for them too, is told not to."""
    if not native.library().specdec_tiles():
        pytest.skip("this processor has no tiles")
    assert native.products() == "by tiles of 16 rows (AMX)"
    options = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    done = subprocess.run([sys.executable, "-c", WITHOUT_TILES], capture_output=True, text=True, env=options)
    assert done.returncode == 0, done.stderr
    told, _, digest = done.stdout.strip().rpartition(" ")
    assert told.startswith("by vectors (16 lanes, fused, pairs of bfloat16), and not by its tiles (AMX): ")
    assert f"{digest}-tiles" == native.digest_of_library()


Harm = Callable[[Path, Path, Path], object]  # of the note, the library and a planted one


def foreign(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, 12345, 12345)


def replaced(library: Path, content: bytes) -> None:
    library.unlink()  # this process has it mapped
    library.touch(mode=0o600)
    library.write_bytes(content)


def linked(library: Path, planted: Path) -> None:
    library.unlink()
    library.symlink_to(planted)


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda note, library, planted: replaced(library, library.read_bytes()[:5000]), "is not what was compiled"),
        (lambda note, library, planted: replaced(library, planted.read_bytes()), "is not what was compiled"),
        (lambda note, library, planted: linked(library, planted), "symbolic links"),
        (lambda note, library, planted: library.unlink(), "No such file"),
        (lambda note, library, planted: library.chmod(0o644), r"is open to other users \(mode 644\); remove it"),
        (lambda note, library, planted: foreign(library), "belongs to user 12345, not to you"),
        (lambda note, library, planted: foreign(note), "belongs to user 12345, not to you"),
        (lambda note, library, planted: note.write_text("../../planted"), r"'../../planted' is no hash"),
        (lambda note, library, planted: (library.unlink(), os.mkfifo(library, 0o600)), "no plain file"),
    ],
)
def test_a_file_that_is_not_the_user_s_own_is_built_anew(
    fresh: Path, compiled: list[str], planted: Path, harm: Harm, message: str
) -> None:
    native.library()
    harm(*kept(fresh), planted)
    for warns in (True, False):  # then it is whole again
        native.library.cache_clear()
        if warns:
            with pytest.warns(SpecdecWarning, match=f"native layers are compiled anew: .*{message}"):
                assert native.library() is not None
        else:
            assert native.library() is not None
    assert len(compiled) == 2
    assert not (fresh / "ran").exists()


@needs_compiler
def test_a_library_without_its_functions_is_built_anew(fresh: Path, compiled: list[str], planted: Path) -> None:
    """As the user's own, with its hash: nobody else could have written that."""
    native.library()
    note, _ = kept(fresh)
    shutil.copy(planted, note.parent / f"layers-{digest_of(planted)}.so")
    note.write_text(digest_of(planted))
    native.library.cache_clear()
    with pytest.warns(SpecdecWarning, match="compiled anew: .* is no such library: .*undefined symbol"):
        assert native.library() is not None
    assert (fresh / "ran").exists()  # as its hash was right; so the mark can be seen


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize(
    ("change", "message"),
    [("mode", r"is open to other users \(mode 777\)"), ("owner", "belongs to user 12345"), ("link", "is a link")],
)
def test_a_folder_that_others_can_write_is_not_used(
    fresh: Path, compiled: list[str], planted: Path, change: str, message: str
) -> None:
    """All that is in it was put there by somebody else, and fits."""
    native.library()
    native.library.cache_clear()
    folder, (note, library) = fresh / "native", kept(fresh)
    library.unlink()
    shutil.copy(planted, folder / f"layers-{digest_of(planted)}.so")
    note.write_text(digest_of(planted))
    if change == "mode":
        folder.chmod(0o777)
    elif change == "owner":
        foreign(folder)
    else:
        folder.rename(fresh / "elsewhere")
        folder.symlink_to(fresh / "elsewhere")
    with pytest.warns(SpecdecWarning, match=f"compiled anew by every process: .*{message}.*; remove it"):
        assert native.library() is not None
    assert not (fresh / "ran").exists()
    assert not compiled[-1].startswith(str(fresh))
    assert not Path(compiled[-1]).exists()


@needs_compiler
def test_a_folder_without_room_is_not_used(fresh: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run

    def full(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if command[-1] == "-lm" and command[-2].startswith(str(fresh)):
            said = "layers.c:28: fatal error: error writing to a.s: No space left on device\ncompilation terminated."
            return subprocess.CompletedProcess(command, 1, "", said)
        return run(command, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(subprocess, "run", full)
    with pytest.warns(SpecdecWarning, match="compiled anew by every process: .*: No space left on device$"):
        assert native.library() is not None
    assert not list(fresh.rglob("*.so"))


@needs_compiler
def test_a_library_cut_short_kills_no_process(tmp_path: Path, built: Path) -> None:
    """In a process of its own, as what is mapped beyond a file's end is a bus error."""
    size = built.stat().st_size
    for number, cut in enumerate((0, 1, 64, 4096, 8192, size // 2, size - 4096, size - 1)):
        folder = tmp_path / str(number)
        folder.mkdir(mode=0o700)
        digest = digest_of(built)
        for name, content in ((f"layers-{digest}.so", built.read_bytes()[:cut]), ("note", digest.encode())):
            (folder / name).touch(mode=0o600)
            (folder / name).write_bytes(content)
    code = (
        "import sys, warnings; from pathlib import Path; from specdec.native import library as native\n"
        "warnings.simplefilter('ignore')\n"
        "print([native._kept(folder, 'note') for folder in sorted(Path(sys.argv[1]).iterdir())])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{[None] * 8}\n")


@needs_compiler
def test_a_library_built_into_the_package_needs_no_compiler_and_is_held_against_its_hash(
    fresh: Path, built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For read-only machines and those without a compiler; one for another processor is not looked at."""
    place = tmp_path / "installed"
    monkeypatch.setattr(native, "_INSTALLED", place)
    monkeypatch.setattr(native, "_build", lambda compiler, folder, note: _copied(built, folder, note))
    path = native.install()
    assert (path.stat().st_mode & 0o777, path.parent) == (0o644, place)

    monkeypatch.setattr(native, "compiler", lambda: None)
    native.library.cache_clear()
    assert native.library()._name == str(path)
    assert not (fresh / "native").exists()

    replaced(path, path.read_bytes()[:100])
    native.library.cache_clear()
    with pytest.warns(SpecdecWarning, match=r"not what was compiled; run python -m specdec\.native again"):
        assert native.library() is None

    monkeypatch.setattr(native, "_machine", lambda: "another.sha256")
    native.library.cache_clear()
    assert native.library() is None


def _copied(built: Path, folder: Path, note: str) -> Path:
    path = folder / f"layers-{digest_of(built)}.so"
    shutil.copy(built, path)
    (folder / note).write_text(digest_of(built))
    return path
