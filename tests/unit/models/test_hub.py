"""Models by their names on the hub: what is fetched and nothing else, the cache alone, and errors with a remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from specdec import Engine, TransformersTarget
from specdec.cli.main import main
from specdec.errors import CheckpointError, ConfigError
from specdec.models.hub import HubModel
from specdec.models.names import model_source
from specdec.models.tokenizer import load_tokenizer
from tests.gguf_files import new_llama, split_gguf, write_gguf
from tests.hub import StandIn, commit_of, files_in

PROMPT = [3, 4, 5]
SETTINGS = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
NEVER = {  # beside a model in many repositories
    "pytorch_model.bin": b"pickle",
    "training_args.bin": b"pickle",
    "model.ckpt.index": b"",
    "modeling_own.py": b"raise SystemExit",
    "README.md": b"",
    "notes.txt": b"",
    "onnx/model.onnx": b"",
    "original/consolidated.safetensors": b"",
    "rust_model.ot": b"",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    served = StandIn()
    served.stand_in(monkeypatch, tmp_path / "cache")
    yield served
    served.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, in safetensors."""
    place = tmp_path_factory.mktemp("model")
    model = new_llama()
    load_tokenizer(write_gguf(place / "a.gguf", model)).save_pretrained(place)
    (place / "a.gguf").unlink()
    model.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "whole.gguf", new_llama())


def text(model: str | Path, **options: Any) -> list[int]:
    return Engine.from_pretrained(model, policy="off", **options).generate(PROMPT, 8).token_ids


def test_a_repository_is_its_folder(hub: StandIn, folder: Path) -> None:
    files = files_in(folder)
    hub.add("me/model", {**files, **NEVER})
    assert text("me/model") == text(folder)
    assert hub.fetched == set(files)
    assert set(files) <= SETTINGS | {"model.safetensors"}


def test_shards_are_those_of_the_index(hub: StandIn, folder: Path, tmp_path: Path) -> None:
    new_llama().save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    parts = files_in(tmp_path / "parts")
    shards = {name for name in parts if name.endswith(".safetensors")}
    assert len(shards) > 2
    settings = {name: content for name, content in files_in(folder).items() if name != "model.safetensors"}
    hub.add("me/model", {**settings, **parts, **NEVER, "consolidated.safetensors": b"", "model.fp16.safetensors": b""})
    assert text("me/model") == text(folder)
    assert hub.fetched == {*settings, *parts}


def test_a_tokenizer_needs_no_weights(hub: StandIn, folder: Path) -> None:
    words = {name: content for name, content in files_in(folder).items() if name != "model.safetensors"}
    hub.add("me/model", files_in(folder))
    hub.add("me/files", {**words, "a.Q4_0.gguf": b"", "a.Q8_0.gguf": b""})
    for repo in ("me/model", "me/files"):
        assert load_tokenizer(repo)("a12")["input_ids"] == load_tokenizer(folder)("a12")["input_ids"]
        assert hub.fetched == set(words)


def test_code_is_fetched_where_it_is_trusted(hub: StandIn, folder: Path) -> None:
    hub.add("me/model", {**files_in(folder), **NEVER})
    model_source("me/model", code=True)
    assert hub.fetched == {*files_in(folder), "modeling_own.py"}


def test_revision_subfolder_and_tokenizer(
    hub: StandIn, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = new_llama()
    with torch.no_grad():
        other.lm_head.weight.mul_(-1)
    other.save_pretrained(tmp_path / "other" / "small")
    words = {name: content for name, content in files_in(folder).items() if "token" in name}
    hub.add("me/words", words)
    hub.add("me/model", files_in(folder))
    hub.add("me/model", files_in(tmp_path / "other"), "old")
    named: dict[str, Any] = {"revision": "old", "subfolder": "small", "tokenizer": "me/words"}
    expected = text(tmp_path / "other", subfolder="small", tokenizer=folder)
    assert text("me/model", **named) == expected
    assert expected != text("me/model")
    target = TransformersTarget.from_pretrained("me/model", revision="old", subfolder="small")
    assert torch.equal(dict(target.named_weights())["lm_head.weight"], other.lm_head.weight)
    asked = [f"--{name}={value}" for name, value in named.items()]
    ours = Engine.from_pretrained("me/model", **named)
    capsys.readouterr()
    assert main(["generate", "a12", "--model", "me/model", *asked, "--max-new-tokens", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == ours.generate("a12", 8).token_ids
    assert main(["info", "--model", "me/model", *asked]) == 0


FILES = [
    *("tiny.Q8_0.gguf", "tiny.Q4_K_M.gguf", "tiny-UD-Q4_K_XL.gguf", "tiny.Q4_0_4_4.gguf", "mmproj-F16.gguf"),
    *("BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf", "a/own.gguf", "b/own.gguf"),
    *("F32/tiny-F32-00002-of-00002.gguf", "config.json", "imatrix_unsloth.gguf", *NEVER),
]


@pytest.mark.parametrize(
    ("tag", "place", "count"),
    [
        ("Q4_K_M", "tiny.Q4_K_M.gguf", 1),
        ("q8_0", "tiny.Q8_0.gguf", 1),
        ("UD-Q4_K_XL", "tiny-UD-Q4_K_XL.gguf", 1),
        ("Q4_K_XL", "tiny-UD-Q4_K_XL.gguf", 1),
        ("tiny.Q4_0_4_4.gguf", "tiny.Q4_0_4_4.gguf", 1),
        ("b/own.gguf", "b/own.gguf", 1),
        ("BF16", "BF16/tiny-BF16-00001-of-00002.gguf", 2),
        ("tiny-BF16-00002-of-00002.gguf", "BF16/tiny-BF16-00001-of-00002.gguf", 2),
    ],
)
def test_a_tag_is_a_quantisation_or_a_file(hub: StandIn, tag: str, place: str, count: int) -> None:
    hub.add("me/files", {name: name.encode() for name in FILES})
    for name in (f"me/files:{tag}", f"hf.co/me/files:{tag}"):
        found = model_source(name)
        assert found.as_posix().endswith(f"/snapshots/{commit_of('main')}/{place}")
        assert found.read_text() == place
    assert len(hub.fetched) == count
    assert place in hub.fetched


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("me/files:Q4_0", r"'me/files:Q4_0': none of its GGUF files is 'Q4_0'; it has BF16/tiny-BF16-00001-of-00002"),
        (
            "me/files:own.gguf",
            r"'own\.gguf' can be 2 models in GGUF, a/own\.gguf, b/own\.gguf: give one, such as 'me/f",
        ),
        ("me/files:F16", "none of its GGUF files is 'F16'"),
        ("me/files:F32", r"1 of the parts of 'F32/tiny-F32-00001-of-00002\.gguf' are not there"),
        ("me/files", r"it has 8 models in GGUF, BF16/tiny-BF16-00001-of-00002\.gguf, .*: give one, such as 'me/files:"),
    ],
)
def test_tags_that_are_not_one_model(hub: StandIn, name: str, message: str) -> None:
    hub.add("me/files", dict.fromkeys(FILES, b""))
    with pytest.raises(CheckpointError, match=message):
        model_source(name)
    assert not hub.fetched


def test_parts_are_fetched_together_and_run(hub: StandIn, file: Path) -> None:
    parts = {path.name: path.read_bytes() for path in split_gguf(file, 3, "tiny-F32")}
    hub.add("me/files", {**parts, "tiny-Q8_0.gguf": b"", "mmproj.gguf": b"", "README.md": b""})
    engine = Engine.from_pretrained("me/files:F32", policy="off")
    assert engine.generate(PROMPT, 8).token_ids == text(file)
    assert hub.fetched == set(parts)


def test_the_one_model_in_gguf_needs_no_tag(hub: StandIn, file: Path) -> None:
    hub.add("me/files", {"a.gguf": file.read_bytes(), "mmproj-a.gguf": b"", "config.json": b"{}", "README.md": b""})
    assert text("me/files") == text(file)
    assert hub.fetched == {"a.gguf"}
    assert load_tokenizer("me/files")("a12")["input_ids"] == load_tokenizer(file)("a12")["input_ids"]


@pytest.mark.parametrize("how", ["asked for", "no network"])
def test_the_cache_alone(hub: StandIn, folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("me/model", files_in(folder))
    hub.add("me/files", {name: name.encode() for name in FILES})
    expected, file = text("me/model"), model_source("me/files:BF16")
    hub.fetched.clear()
    if how == "asked for":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        why = r"the hub's cache does not hold it and is all that may be used \(HF_HUB_OFFLINE\): unset that"
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        why = r"http://127\.0\.0\.1:9/me/\w+ cannot be fetched: .*: see that the network reaches it"
    assert text("me/model") == expected
    assert model_source("me/files:BF16") == file
    assert not hub.fetched
    with pytest.raises(CheckpointError, match=rf"'me/other': there is no such folder, and {why}"):
        model_source("me/other")
    with pytest.raises(CheckpointError, match=rf"none of its GGUF files is 'Q8_0'; it has BF16.*looked at, as {why}"):
        model_source("me/files:Q8_0")


def test_a_cache_that_others_have_filled(
    hub: StandIn, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers leaves it, without a list of the repository's files."""
    commit = commit_of("other")
    cached = tmp_path / "cache" / "models--me--model"
    (place := cached / "snapshots" / commit).mkdir(parents=True)
    for name, content in files_in(folder).items():
        (place / name).write_bytes(content)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert text("me/model") == text(folder) == text("me/model", revision=commit)
    (place / "model.safetensors").unlink()
    load_tokenizer("me/model", local_files_only=True)
    with pytest.raises(CheckpointError, match=r"it has no \*\.safetensors.*Only the hub's cache was looked at"):
        model_source("me/model")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        model_source("me/model", revision="another")


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("me/gone", {}, r"there is no http://\S+/me/gone that you may read: see that its name is right"),
        ("me/gated", {}, r"/me/gated is gated: accept its terms there, and log in"),
        ("me/model", {"revision": "v9"}, r"/me/model has no revision 'v9': give one of its branches"),
        ("me/model", {"subfolder": "x"}, r"it has no folder 'x'; it has onnx, original"),
        ("me/model:Q4_K_M", {}, r"none of its GGUF files is 'Q4_K_M'; it has none"),
        ("me/bare", {}, r"it has no config\.json; give the repository of a language model"),
        ("me/pickles", {}, r"no \*\.safetensors, and 'pytorch_model\.bin' is a pickle, which is never loaded"),
        ("me/inside", {}, r"it has no config\.json there; its folders fp16 have weights: give one as subfolder"),
        ("me/adapter", {}, r"it is an adapter and has no config\.json; load base and adapter with peft"),
        ("me/torn", {}, r"index\.json names 'model-00001-of-00002\.safetensors', which is not there"),
        ("me/-model-", {}, "that is no name on the hub"),
    ],
)
def test_errors_say_what_to_do(hub: StandIn, folder: Path, name: str, more: dict[str, str], message: str) -> None:
    index = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}).encode()
    hub.add("me/model", {**files_in(folder), **NEVER})
    hub.add("me/gated", files_in(folder))
    hub.gated.add("me/gated")
    hub.add("me/bare", {"README.md": b""})
    hub.add("me/pickles", {"config.json": b"{}", "pytorch_model.bin": b""})
    hub.add("me/inside", {"fp16/config.json": b"{}", "fp16/model.safetensors": b""})
    hub.add("me/adapter", {"adapter_config.json": b"{}", "adapter_model.safetensors": b""})
    hub.add("me/torn", {"config.json": b"{}", "model.safetensors.index.json": index, "model-2.safetensors": b""})
    with pytest.raises(CheckpointError, match=rf"cannot load a model from '{name}': .*{message}"):
        model_source(name, **more)


def test_what_is_here_has_no_revision(folder: Path, file: Path) -> None:
    for place, options, what in (
        ("tiny", {"revision": "v1"}, "revision is 'v1', and 'tiny' comes with specdec"),
        (folder, {"revision": "v1"}, "revision is 'v1', and .* is a folder"),
        (file, {"subfolder": "x"}, "subfolder is 'x', and .* is a file"),
    ):
        with pytest.raises(ConfigError, match=what):
            Engine.from_pretrained(place, **options)
    with pytest.raises(CheckpointError, match="there is no folder 'x' in"):
        model_source(folder, subfolder="x")
    with pytest.raises(CheckpointError, match=r"there is no folder '\.\.' in"):
        model_source(folder, subfolder="..")


@pytest.mark.parametrize(
    "name", ["./me/repo", "me/repo:", "me:Q4", "a/b/c", "me/repo:a:b", "~/x", "me\\repo", "hf.co/"]
)
def test_names_that_are_no_repository(name: str) -> None:
    assert HubModel.named(name) is None
