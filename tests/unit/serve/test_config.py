"""Options of `specdec serve`: who may reach the server, its key, and what is told in one line."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from specdec.cli import main as cli
from specdec.errors import ConfigError
from specdec.serve.config import API_KEY, ServeConfig, is_loopback
from specdec.serve.server import address_of, bound_socket
from specdec.serve.service import sampling_defaults


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.1", "::", "example.org", ""])
def test_any_host_but_loopback_needs_a_key(host: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    with pytest.raises(ConfigError, match="there is no key: give --api-key-file"):
        ServeConfig(host=host)
    assert ServeConfig(host=host, api_key="sesame").keys == ["sesame"]
    (tmp_path / "key").write_text("from-file\n")
    assert ServeConfig(host=host, api_key_file=str(tmp_path / "key")).keys == ["from-file"]
    monkeypatch.setenv(API_KEY, "from-environment")
    assert ServeConfig(host=host).keys == ["from-environment"]


def test_clients_call_the_model_by_the_served_name() -> None:
    assert ServeConfig(model="folder/of-it").names == ["folder/of-it"]
    assert ServeConfig(model="folder/of-it", served_model_name=["mine", "ours"]).names == ["mine", "ours"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_none(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    assert is_loopback(host)
    assert ServeConfig(host=host).keys == []


@pytest.mark.parametrize("key", ["", " ", "two words", "schlüssel"])
def test_a_key_is_visible_ascii(key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no key"):
        ServeConfig(host="0.0.0.0", api_key=key)
    (tmp_path / "key").write_text(key)
    with pytest.raises(ConfigError, match="holds no key"):
        ServeConfig(host="0.0.0.0", api_key_file=str(tmp_path / "key"))
    with pytest.raises(ConfigError, match="cannot read the key file"):
        ServeConfig(host="0.0.0.0", api_key_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="give one of them"):
        ServeConfig(api_key="a", api_key_file="b")
    with pytest.raises(ConfigError, match="holds no key"):
        ServeConfig(host="0.0.0.0", api_key="a\nb")
    (tmp_path / "key").write_text("a\nb c\n")
    with pytest.raises(ConfigError, match="holds no key"):
        ServeConfig(host="0.0.0.0", api_key_file=str(tmp_path / "key"))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], "port is 70000; it must be a port"),
        (["--port", "http"], "--port"),
        (["--host", "no.such.host.invalid"], "there is no key"),
        (["--host", "192.0.2.1", "--api-key", "x"], "cannot listen on 192.0.2.1, port 0"),
        (["--host", "host.invalid", "--api-key", "x"], "'host.invalid' is no address"),
        (["--model", "nosuch/model/here"], "nosuch/model/here"),
        (["--drafter", "jacoby"], "did you mean 'jacobi'"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["--max-queue", "-1"], "max_queue is -1"),
        (["--grace", "-1"], "grace is -1"),
        (["--request-timeout", "nan"], "request_timeout is nan"),
        (["--cache-bytes", "-1"], "cache_bytes is -1"),
        (["--generation-config", "mine"], "unknown generation_config 'mine'"),
        (["--allow-origin", "example.org"], "allow_origin holds 'example.org'"),
        (["--allow-origin", "https://example.org/page"], "without a path"),
        (["--root-path", "llm/"], "root_path is 'llm/'"),
        (["--unknown-fields", "drop"], "unknown unknown_fields 'drop'"),
        (["--max-model-len", "1000000"], "max_model_len is 1000000, and the model's context holds"),
        (["--max-num-batched-tokens", "2"], "max_num_batched_tokens is 2, and one draft may have"),
    ],
)
def test_one_line_says_what_is_wrong(
    arguments: list[str], words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    assert cli.main(["serve", "--model", "tiny", "--port", "0", *arguments]) == 2
    told = capfd.readouterr()
    assert told.out == ""
    assert words in told.err
    assert len(told.err.strip().splitlines()) == 1, told.err


def test_a_port_in_use_is_told_before_a_model_is_loaded(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert cli.main(["serve", "--model", "nosuch", "--port", str(port)]) == 2
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {port}: .*give another --port"):
            bound_socket("127.0.0.1", port)
    assert f"port {port}" in capfd.readouterr().err
    with bound_socket("127.0.0.1", 0) as free:
        assert address_of(free) == f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.few(1)
@pytest.mark.parametrize("package", ["uvicorn", "starlette", "prometheus_client", "llguidance"])
def test_a_missing_package_is_told_with_the_extra(
    package: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.startswith("specdec.serve.") and name != "specdec.serve.config":
            monkeypatch.delitem(sys.modules, name)
        if name.partition(".")[0] == package:
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["serve", "--model", "nosuch", "--port", "0"]) == 2
    assert "run pip install '.[serve]'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1), None),
        (GenerationConfig(do_sample=False), {"temperature": 0.0}),
        (None, {}),
    ],
)
def test_defaults_are_the_checkpoint_s_where_they_are_asked_for(own: Any, expected: dict[str, float] | None) -> None:
    engine: Any = SimpleNamespace(target=SimpleNamespace(generation_config=own))
    assert sampling_defaults(engine, ServeConfig(model="tiny")) == {}
    defaults = sampling_defaults(engine, ServeConfig(model="tiny", generation_config="model"))
    if expected is None:
        expected = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    assert defaults == expected
