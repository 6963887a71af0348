"""The compiled library: ``layers.c`` with its headers, compiled once per machine and compiler, and cached on disk.

Without a working C compiler there is no library, and torch's kernels compute instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError, SpecdecWarning
from specdec.native.types import FUNCTIONS, Kind
from specdec.settings.files import cache_folder, digest_of, held

__all__ = [
    "arithmetic",
    "check_done",
    "compiler",
    "digest_of_library",
    "features",
    "install",
    "library",
    "own_folder",
    "products",
    "read_own",
    "source",
]

_SOURCE = Path(__file__).with_name("layers.c")
# Products and sums are fused where the source says so, and nowhere else: see vectors.h.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
_INSTALLED = Path(__file__).with_name("installed")
_NO_ROW = 2  # functions that embed tokens return this for a token without an embedding
_UNFINISHED = ".unfinished-"  # prefix of the folder in which the compiler writes
_SECONDS = 600  # after this time, the compiler is taken to hang


def flags() -> list[str]:
    """The compiler's flags: the library's own, and behind them those of the environment's ``SPECDEC_CFLAGS``.

    Raises:
        ConfigError: these end inside of a quotation.
    """
    own = os.environ.get("SPECDEC_CFLAGS", "")
    try:
        return [*_FLAGS, *shlex.split(own)]
    except ValueError as error:
        raise ConfigError(f"SPECDEC_CFLAGS={own!r}: {error}; write it as a shell would read it") from error


def compiler() -> str | None:
    """Path of the C compiler to use, or None."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def source(path: Path | None = None) -> str:
    """The text of a C file (None: ``layers.c``), with the files that it includes expanded."""
    path = path or _SOURCE

    def part(match: re.Match[str]) -> str:
        return (path.parent / match[1]).read_text(encoding="utf-8")

    return re.sub(r'(?m)^#include "(\w+\.h)"$', part, path.read_text(encoding="utf-8"))


@cache
def library() -> Any:
    """The loaded library, compiled at this user's first use; None where it cannot be compiled.

    The library runs with this user's rights, so a file that another user could have written is not loaded. The cache
    is a folder that only this user can open, and each library's name is the hash of its content. Where no such folder
    can be made, or it has no room, a temporary one is used, with a SpecdecWarning that gives the reason. A library that
    ``python -m specdec.native`` compiled into this package is tried first: it deserves the same trust as the source.
    """
    if (installed := _kept(_INSTALLED, _machine(), installed=True)) is not None:
        return installed
    found = compiler()
    if found is None:
        return None
    try:
        note = _key(found) + ".sha256"
        try:
            folder = own_folder(cache_folder() / "native")
            return _kept(folder, note) or _compiled(found, folder, note)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = _reason(error)
        with tempfile.TemporaryDirectory() as private:  # a loaded library stays when its file is deleted
            loaded = _load(_build(found, Path(private)))
        warnings.warn(f"native layers are compiled anew by every process: {reason}", SpecdecWarning, stacklevel=2)
        return loaded
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(f"no native layers, so decoding is slower: {_reason(error)}", SpecdecWarning, stacklevel=2)
        return None


def _reason(error: Exception) -> str:
    """What a compiler or the system said."""
    said = getattr(error, "stderr", None) or ""
    faults = [line for line in said.splitlines() if "error" in line.lower() or "No space" in line]
    return f"{error.cmd[0]}: {faults[0]}" if faults and isinstance(error, subprocess.CalledProcessError) else str(error)


def digest_of_library() -> str | None:
    """Hash of the loaded library and its kind of products; the same source has another hash under another compiler."""
    loaded = library()
    if loaded is None:
        return None
    return Path(loaded._name).stem.rpartition("-")[2][:16] + ("-tiles" if loaded.specdec_tiles() else "")


def arithmetic() -> str | None:
    """The class of the library's arithmetic; None where there is no library.

    Within a class results are the same bits, whatever compiler and flags made the library; between classes they differ.
    """
    loaded = library()
    if loaded is None:
        return None
    name: str = loaded.specdec_arithmetic().decode()
    return name + (", tiles" if loaded.specdec_tiles() else "")


def products() -> str | None:
    """The name of the library's bfloat16 product on this processor; None where there is none."""
    loaded = library()
    if loaded is None:
        return None
    if loaded.specdec_tiles():
        return "by tiles of 16 rows (AMX)"
    refused = ", and not by its tiles (AMX): the compiler has no code for them, or the system does not lend them"
    return f"by vectors ({arithmetic()}){refused if 'amx_bf16' in features() else ''}"


def install() -> Path:
    """Compile the library into this package, for machines of this kind without a compiler or a cache folder.

    Raises:
        OSError: there is no compiler, or this package's folder is not writable.
        subprocess.SubprocessError: the compiler fails.
    """
    found = compiler()
    if found is None:
        raise OSError("there is no C compiler (cc, gcc or clang) on PATH")
    _INSTALLED.mkdir(exist_ok=True)
    note = _machine()
    with _alone_in(_INSTALLED):
        path = _build(found, _INSTALLED, note)
    for file in (path, _INSTALLED / note):
        file.chmod(0o644)  # other users of this package must be able to read it
    return path


def _machine() -> str:
    """File name of the note for this source and processor; computing it needs no compiler."""
    made_of = "|".join((source(), platform.machine(), *features(), *flags()))
    return hashlib.sha256(made_of.encode()).hexdigest()[:16] + ".sha256"


def features() -> list[str]:
    """The processor's features, under the names that it reports."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [f"flags: {platform.processor()}"]
    return sorted(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())  # x86, Arm


def own_folder(folder: Path) -> Path:
    """The folder, created where it is missing.

    Raises:
        OSError: it cannot be created, is not a folder, belongs to another user, or is open to other users.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder, folder.lstat(), stat.S_ISDIR)
    return folder


def _check_owner(path: Path, found: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    """Raises OSError for a link or another kind of file, and for a file of another user or open to other users."""
    if not is_kind(found.st_mode):
        raise OSError(f"{str(path)!r} is a link, or no plain file or folder; remove it")
    if found.st_uid != os.geteuid():
        raise OSError(f"{str(path)!r} belongs to user {found.st_uid}, not to you; remove it")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise OSError(f"{str(path)!r} is open to other users (mode {mode:o}); remove it")


def read_own(path: Path) -> bytes:
    """The content of a file that only this user can open; raises OSError for any other file."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        _check_owner(path, os.fstat(file.fileno()), stat.S_ISREG)
        return file.read()


def _kept(folder: Path, note: str, *, installed: bool = False) -> Any:
    """The library whose hash a note holds, or None; one with another hash causes a SpecdecWarning.

    ``installed``: it is in this package, whose files are not the user's own.
    """
    place, read = folder / note, Path.read_bytes if installed else read_own
    if not os.path.lexists(place):
        return None
    remedy = "; run python -m specdec.native again" if installed else ""
    try:
        digest = read(place).decode("ascii", errors="replace")
        path = _path(folder, digest)
        if hashlib.sha256(read(path)).hexdigest() != digest:
            raise OSError(f"{str(path)!r} is not what was compiled{remedy}")
        return _load(path)
    except OSError as error:
        said = "the library in this package is not used" if installed else "native layers are compiled anew"
        warnings.warn(f"{said}: {error}", SpecdecWarning, stacklevel=3)
        return None


def _compiled(compiler: str, folder: Path, note: str) -> Any:
    """The library, compiled into the user's folder; where another process is compiling it, this waits for that one."""
    missing = not os.path.lexists(folder / note)
    with _alone_in(folder):
        return (_kept(folder, note) if missing else None) or _load(_build(compiler, folder, note))


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder for compiling, and delete what killed processes left unfinished in it.

    Raises:
        OSError: another process has held the lock for longer than a compiler may take.
    """
    busy = f"another process has been compiling in {str(folder)!r} for {2 * _SECONDS} s; stop it"
    try:
        with held(folder / ".lock", busy, 2 * _SECONDS):
            for left in folder.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(left, ignore_errors=True)
            yield
    except ConfigError as error:
        raise OSError(str(error)) from error


def _path(folder: Path, digest: str) -> Path:
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise OSError(f"a note in {str(folder)!r} is broken: {digest[:64]!r} is no hash")
    return folder / f"layers-{digest}.so"


def _load(path: Path) -> Any:
    """Load the library from a file that has been checked.

    Raises:
        OSError: the file cannot be loaded, or lacks a function.
    """
    loaded = ctypes.CDLL(str(path))
    try:
        for name, arguments in FUNCTIONS.items():
            getattr(loaded, name).argtypes = arguments
        for allocating in (
            loaded.specdec_product,
            loaded.specdec_attend,
            loaded.specdec_guess,
            loaded.specdec_chances,
            loaded.specdec_run_chain,
            loaded.specdec_grow,
            loaded.specdec_absorb,
            loaded.specdec_grow_block,
        ):
            allocating.errcheck = check_done
        loaded.specdec_panel_bytes.restype = loaded.specdec_multiply.restype = ctypes.c_int64
        loaded.specdec_sigmoid.restype = ctypes.c_double
        loaded.specdec_kind.restype = loaded.specdec_arithmetic.restype = ctypes.c_char_p
        if [loaded.specdec_kind(n) for n in range(len(Kind) + 1)] != [*(kind.name.encode() for kind in Kind), None]:
            raise OSError(f"{str(path)!r} is of another version: its kinds of weights are others")
    except AttributeError as error:
        raise OSError(f"{str(path)!r} is no such library: {error}") from error
    if not loaded.specdec_teams():
        text = "native layers run on one thread: the compiler has no OpenMP; install gcc, or clang's libomp"
        warnings.warn(text, SpecdecWarning, stacklevel=3)
    return loaded


def check_done(failed: Any, function: Any, arguments: Any) -> Any:
    """What ctypes is to make of such functions' results; that of a step looks at its result itself.

    Raises:
        IndexError: an embedding lacks a token.
        MemoryError: the library cannot allocate buffers for this number of rows.
    """
    if failed == _NO_ROW:
        raise IndexError(f"{function.__name__} has no embedding for one of its tokens")
    if failed:
        raise MemoryError(f"{function.__name__} has no memory for its rows; take smaller chunks of prompts, or batches")
    return None


def _key(compiler: str) -> str:
    """A hash of this source, compiler and machine.

    Raises:
        subprocess.SubprocessError: the compiler cannot print its macros.
    """
    # The macros hold its version and every instruction set that it enables here; a processor's name may not tell these.
    command = [compiler, *flags(), "-dM", "-E", "-x", "c", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS).stdout
    made_of = "|".join((source(), macros, *flags()))
    return hashlib.sha256(made_of.encode()).hexdigest()[:16]


def _build(compiler: str, folder: Path, note: str | None = None) -> Path:
    """Compile into a folder, under the hash of the content, and then write that hash into a note.

    Raises:
        OSError: the folder is not writable.
        subprocess.SubprocessError: the compiler fails.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=_UNFINISHED) as made:
        built, environment = Path(made) / "layers.so", {**os.environ, "TMPDIR": made}  # for its files, too
        for threads in (["-fopenmp"], []):  # without OpenMP, the library runs on one thread
            command = [compiler, *flags(), *threads, str(_SOURCE), "-o", str(built), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=environment)
            if done.returncode == 0:
                break
        done.check_returncode()
        built.chmod(0o600)
        digest = digest_of(built)
        path = _path(folder, digest)
        built.replace(path)
        if note is not None:
            note_file = Path(made) / note
            note_file.touch(mode=0o600)
            note_file.write_text(digest, encoding="ascii")
            note_file.replace(folder / note)
    return path
