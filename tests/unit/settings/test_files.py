"""Files are replaced whole or not at all, whatever writes them, and nothing is left beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from specdec.errors import ConfigError, SpecdecWarning
from specdec.settings import files
from specdec.settings.files import cache_folder, check_place, held_folder, read_text, replacing, write_json, write_text
from specdec.settings.unfinished import unfinished


def content(place: Path) -> dict[str, str]:
    return {str(path.relative_to(place)): path.read_text() for path in sorted(place.rglob("*")) if path.is_file()}


def write_folder(path: Path, text: str) -> None:
    with replacing(path) as new:
        new.mkdir()
        (new / "a.txt").write_text(text)


def write_bytes(path: Path, text: str) -> None:
    with replacing(path) as new:
        assert new.suffix == path.suffix  # writers such as matplotlib go by it
        new.write_bytes(text.encode())


WRITERS = pytest.mark.parametrize("write", [write_text, write_json, write_bytes, write_folder])


@WRITERS
def test_the_new_one_takes_the_old_ones_place(write: Callable[[Path, str], None], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "thing.txt"
    write(path, "first")
    first = content(tmp_path)
    write(path, "second")
    assert content(tmp_path) == {name: text.replace("first", "second") for name, text in first.items()}
    assert len(first) == 1


@WRITERS
@pytest.mark.parametrize("there", [True, False])
def test_a_move_that_fails_leaves_the_old_one_alone(
    write: Callable[[Path, str], None], there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "thing.txt"
    if there:
        write(path, "first")
    before = content(tmp_path)

    def stuck(path: Path, target: Path) -> Path:
        raise OSError("device busy")

    monkeypatch.setattr(Path, "replace", stuck)
    with pytest.raises(OSError, match="device busy"):
        write(path, "second")
    assert content(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thing.txt"] * there


@pytest.mark.parametrize("folder", [True, False])
def test_a_write_that_fails_leaves_nothing(folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "thing.txt"
    (write_folder if folder else write_text)(path, "first")
    before = content(tmp_path)

    def interrupted() -> None:
        with replacing(path) as new:
            if folder:
                new.mkdir()
            ((new / "half") if folder else new).write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert content(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["thing.txt"]


def test_json_is_json(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": [1, None]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1, None]}


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for path in (tmp_path / "none", tmp_path / "latin", tmp_path):
        with pytest.raises(ConfigError, match=f"cannot read the thing '{path}': .*; give another"):
            read_text(path, "the thing", "give another")


def test_the_cache_is_where_the_platform_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    assert cache_folder() == tmp_path / "specdec"


def test_a_user_without_a_home_folder_has_a_cache_for_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(name: str) -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr(files.platformdirs, "user_cache_path", homeless)
    files._passing_folder.cache_clear()
    with pytest.warns(SpecdecWarning, match="no home folder, so nothing is kept for later processes; set HOME, or XDG"):
        folder = cache_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == folder


@pytest.mark.parametrize(
    "line", ["{", "[]", "7", '{"index": "x"}', '{"index": 9}', '{"index": 1, "bad": 1}', "[" * 100_000]
)
def test_a_broken_line_of_an_unfinished_run_is_named(tmp_path: Path, line: str) -> None:
    def check(found: Mapping[str, object]) -> None:
        if "bad" in found:
            raise ValueError("it is bad")

    def left(model: str) -> list[int]:
        with suppress(KeyboardInterrupt), unfinished(tmp_path / "run", {"model": model}, ["a", "b"], check) as lines:
            left = lines.left
            raise KeyboardInterrupt
        return left

    partial = tmp_path / "run.partial"
    assert left("tiny") == [0, 1]
    header = partial.read_text()
    partial.write_text(header + '{"index": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"run\.partial', line 3: .*delete that line and all below it"):
        left("tiny")
    partial.write_text(header + '{"index": 1}\n{"ind')  # as a kill leaves it
    with pytest.warns(SpecdecWarning, match="interrupted: 1 of 2 answers are kept; the same command goes on"):
        assert left("tiny") == [0]
    with pytest.raises(ConfigError, match="is of a run with model 'tiny', this one has 'other'"):
        left("other")


def test_a_place_that_can_be_written_is_known_before_it_is(tmp_path: Path) -> None:
    """And nothing is left there by asking."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    good = [
        ("new.json", False),
        ("a/b/new.json", False),
        ("file", False),
        ("folder", True),
        ("a/b", True),
        ("é" * 100, False),
    ]
    for name, folder in good:
        check_place(tmp_path / name, "it", folder=folder)
    long, odd = "x" * 240, "a\0b"
    bad = [
        ("file/new", False),
        ("file", True),
        ("folder", False),
        (long, False),
        (long, True),
        (odd, True),
        ("é" * 120, False),
    ]
    for name, folder in bad:
        with pytest.raises(ConfigError, match=r"cannot write it to .*; give another --plot"):
            check_place(tmp_path / name, "it", folder=folder, option="--plot")
    assert content(tmp_path) == {"file": "mine"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_the_longest_name_that_is_taken_can_be_replaced_and_gone_on_with(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 226 + ".json")
    check_place(long, "it")
    with unfinished(long, {}, ["a"], lambda line: None) as answers:
        answers.add(0, {})
        write_text(long, "[]")
    assert [path.name for path in tmp_path.iterdir()] == [long.name]


def test_a_lock_is_one_process_s(tmp_path: Path) -> None:
    with (
        held_folder(tmp_path / "run"),
        pytest.raises(ConfigError, match=r"another run is writing to .*run'; wait for it"),
        held_folder(tmp_path / "run"),
    ):
        pass
    with held_folder(tmp_path / "run"):
        pass
    for place in ("/proc/no", "a\0b"):
        with pytest.raises(ConfigError, match="cannot write to"), held_folder(Path(place)):
            pass
