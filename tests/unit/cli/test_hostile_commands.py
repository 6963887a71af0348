"""Command lines that make no sense: one line that says so and what to do, status 2, nothing on standard output."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import main as cli

DIGITS = "9" * 5000
DEEP = "[" * 1000 + "]" * 1000

# What follows `specdec generate TEXT`, and what the message says.
GENERATE: list[tuple[list[str], str]] = [
    (["--max-new-tokens", "1.5"], "--max-new-tokens"),
    (["--max-new-tokens", "many"], "--max-new-tokens"),
    (["--max-new-tokens", ""], "--max-new-tokens"),
    (["--max-new-tokens", "nan"], "--max-new-tokens"),
    (["--max-new-tokens", "0"], "max_new_tokens is 0"),
    (["--max-new-tokens", DIGITS], "--max-new-tokens"),
    (["--set", "max_new_tokens=null"], "run.max_new_tokens is None, of type NoneType"),
    (["--set", "max_new_tokens=true"], "run.max_new_tokens is True, of type bool"),
    (["--set", "max_new_tokens=.nan"], "run.max_new_tokens is nan, of type float"),
    (["--set", "max_new_tokens=[1]"], "run.max_new_tokens is [1], of type list"),
    (["--set", f"max_new_tokens={DIGITS}"], "--set 'max_new_tokens=9999"),
    (["--set", f"max_new_tokens={DEEP}"], "--set 'max_new_tokens=[[[["),
    (["--set", "stop=null"], "run.stop is None"),
    (["--set", "stop=3"], "run.stop is 3"),
    (["--set", "stop=''"], "stop is ''"),
    (["--set", "stop=[x, 3]"], "run.stop is ['x', 3]"),
    (["--set", "stop=[x, '']"], "stop is ['x', '']"),
    (["--stop", ""], "stop is ['']"),
    (["--temperature", "hot"], "--temperature"),
    (["--temperature", "nan"], "temperature is nan"),
    (["--temperature", "inf"], "temperature is inf"),
    (["--temperature", "1e400"], "temperature is inf"),
    (["--top-k", "-1"], "top_k is -1"),
    (["--top-k", "2.5"], "--top-k"),
    (["--top-p", "nan"], "top_p is nan"),
    (["--min-p", "2"], "min_p is 2.0"),
    (["--repetition-penalty", "0"], "repetition_penalty is 0.0"),
    (["--seed", "x"], "--seed"),
    (["--set", "sampling.seed=1.5"], "sampling.seed is 1.5"),
    (["--set", "sampling=null", "--set", "sampling.sed=1"], "unknown option of sampling 'sed'"),
    (["--set", "sampling=[1]"], "sampling is [1], of type list"),
    (["--acceptance", "always"], "acceptance is 'always'"),
    (["--policy", ""], "policy='' is unknown"),
    (["--policy", "/"], "policy='/' is unknown"),
    (["--policy", "x" * 5000], "is unknown; choose acceptance"),
    (["--set", "policy=3"], "run.policy is 3"),
    (["--drafter", ""], "unknown drafter ''"),
    (["--drafter", "a\nb"], "unknown drafter 'a\\nb'"),
    (["--set", "drafter=3"], "run.drafter is 3"),
    (["--set", "drafter=[lookahead]"], "run.drafter is ['lookahead']"),
    (["--set", "drafter={name: 3}"], "has no name; choose one of"),
    (["--set", "drafter={}"], "has no name; choose one of"),
    (["--drafter", "lookahead", "--set", "lookahead.window=1.5"], "lookahead.window is 1.5"),
    (["--drafter", "lookahead", "--set", "lookahead.=3"], "unknown option of lookahead ''"),
    (["--drafter", "lookahead", "--set", ".window=3"], "unknown option of run 'window'"),
    (["--drafter", "lookahead", "--set", "a.b.c=3"], "the setting is for 'a.b'"),
    (["--drafter", "union", "--set", "union.parts=3"], "union.parts is 3"),
    (["--drafter", "union", "--set", "union.parts=[3]"], "drafter is 3; it must be a name"),
    (["--set", "=3"], "--set takes KEY=VALUE"),
    (["--set", ""], "--set takes KEY=VALUE"),
    (["--set", "model=[1]"], "run.model is [1]"),
    (["--set", "model=null"], "run.model is None"),
    (["--set", "seed=!!python/object:os.system x"], "is no YAML"),
    (["--set", "a=*b"], "is no YAML"),
    (["--model", ""], "path is ''"),
    (["--model", "~nobody-at-all/x"], "there is no such folder"),
    (["--model", "x" * 5000], "there is no such folder"),
    (["--model", "a/b/c"], "there is no such folder"),
    (["--model", __file__], "that is a file"),
    (["--dtype", "int8"], "unknown dtype 'int8'"),
    (["--dtype", ""], "unknown dtype ''"),
    (["--device", ""], "device '' cannot be used"),
    (["--device", "cuda:77"], "device 'cuda:77' cannot be used"),
    (["--device", "cpu:x"], "device 'cpu:x' cannot be used"),
    (["--device", "meta"], "device 'meta' cannot be used"),
    (["--set", "device=3.5"], "run.device is 3.5"),
    (["--device-map", "nowhere"], "device 'nowhere' cannot be used"),
    (["--set", "device_map={'': nowhere}"], "device 'nowhere' cannot be used"),
    (["--set", "device_map={1: cpu}"], "run.device_map is {1: 'cpu'}"),
    (["--device", "cpu", "--device-map", "auto"], "give only one of them"),
    (["--execution", "fast"], "unknown execution 'fast'"),
    (["--attention", "fast"], "unknown attention 'fast'; did you mean 'flash'? known: auto, flash"),
    (["--threads", "0"], "threads is 0"),
    (["--threads", "-1"], "threads is -1"),
    (["--threads", "1e3"], "--threads"),
    (["--threads", "99999999999999999999"], "threads is 99999999999999999999"),
    (["--set", "threads=.inf"], "run.threads is inf"),
    (["--config", "/"], "cannot read the config '/'"),
    (["--config", ""], "cannot read the config"),
    (["--config", "a\nb"], "cannot read the config"),
    (["--config", "x" * 5000], "cannot read the config"),
    (["--prompt-file", "/"], "prompt"),
    (["--nosuch"], "--nosuch"),
    (["more"], "more"),
]

# Commands that write, before anything that takes time is done; and places that cannot be.
WRITING = [
    ["generate", "--prompts", "/no/such", "--out"],
    ["distill-data", "/no/such", "--model", "/no/such", "--out"],
    ["train", "medusa", "--data", "/no/such", "--model", "/no/such", "--out"],
    ["train", "kangaroo", "--data", "/no/such", "--model", "/no/such", "--out"],
    ["convert", "kangaroo", "/no/such", "--exit-layer", "2", "--model", "/no/such", "--out"],
    ["tune", "--model", "/no/such", "--out"],
    ["tune", "--model", "/no/such", "--plot"],
    ["bench", "--model", "/no/such", "--out"],
    ["datastore", "build", "/no/such", "--out"],
]
NO_PLACES = [("x" * 250, "File name too long"), (f"{__file__}/x", "is a file"), ("/proc/no/such", "/proc")]

OTHERS: list[tuple[list[str], str]] = [
    (["nosuch"], "nosuch"),
    (["generate"], "no prompt was given"),
    (["generate", "--prompt-file", "/no/such"], "/no/such"),
    (["generate", "--prompt-file", "x" * 5000], "xxx"),
    (["generate", "a\udcff"], "the prompt is no UTF-8 text"),
    (["generate", "x", "--batch", "4"], "--batch 4 is of many prompts"),
    (["generate", "--prompts", "x", "--out", "y", "--json"], "--json and --no-stream are of a prompt alone"),
    (["generate", "--prompts", "x", "--out", "y", "--no-stream"], "--json and --no-stream are of a prompt alone"),
    (["generate", "x", "--prompts", "x", "--out", "y"], "without another prompt or a prediction"),
    (["generate", "--prompts", "x"], "--prompts FILE and --out FILE go together"),
    (["generate", "x", "--prompt-file", "y"], "a prompt and --prompt-file 'y' were given"),
    (["chat", "--system", "a\udcff"], "message 0 of the prompt holds '\\udcff'"),
    (["chat", "--temperature", "x"], "--temperature"),
    (["demo", "--max-new-tokens", "0"], "max_new_tokens is 0"),
    (["demo", "--temperature", "nan"], "temperature is nan"),
    (["demo", "--threads", "0"], "threads is 0"),
    (["demo", "--drafters", "none,nosuch"], "unknown drafter 'nosuch'"),
    (["info", "--model", ""], "path is ''"),
    (["info", "--device", "abacus"], "device 'abacus' cannot be used"),
    (["tune", "--threads", "0"], "threads is 0"),
    (["tune", "--dtype", "x"], "unknown dtype 'x'"),
    (["tune", "--rows", "0,2"], "tune.rows is [0, 2], of type list; it must be a list of sizes of at least 1"),
    (["drafters", "more"], "more"),
    (["train", "nosuch"], "nosuch"),
    (["--nosuch"], "--nosuch"),
    *(([*command, place], message) for command in WRITING for place, message in NO_PLACES),
]

FILES: dict[str, tuple[bytes, str]] = {
    "a list": (b"- a\n", "holds list; it must be a mapping"),
    "nothing": (b"", "holds NoneType"),
    "a number": (b"3\n", "holds int"),
    "latin": (b"stop: caf\xe9\n", "is no YAML"),
    "null bytes": (b"\x00\x01", "is no YAML"),
    "tabs": (b"a:\n\t- b\n", "is no YAML"),
    "deep": (DEEP.encode(), "is no YAML"),
    "deep mapping": (("{a: " * 1000).encode(), "is no YAML"),
    "digits": (f"max_new_tokens: {DIGITS}\n".encode(), "is no YAML"),
    "a bomb": (
        b"a: &a [x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (c, c, c - 1, c - 1) for c in range(98, 123)),
        "is no YAML: it is nested more than",
    ),
    "a circle": (b"stop: &a [*a]\n", "is no YAML: it is nested more than"),
    "a tag": (b"stop: !!python/name:os.system\n", "is no YAML"),
    "an odd key": (b"[1, 2]: 3\n", "is no YAML"),
    "a null key": (b"null: 3\n", "unknown option of run 'None'"),
    "a set": (b"stop: !!set {a}\n", "run.stop is {'a'}"),
    "twice": (b"sampling: {seed: 1}\nsampling: 3\n", "the key 'sampling' stands twice, first in line 1; keep one"),
}


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """``refused([...], message)``: what the command line says is one line on standard error, with the message in it."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))

    def run(arguments: list[str], message: str) -> None:
        status = cli.main(arguments)
        out, err = capsys.readouterr()
        assert status == 2, err
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        assert message in err
        assert len(err) < 1000

    return run


@pytest.mark.few(12)
@pytest.mark.parametrize(("arguments", "message"), GENERATE, ids=lambda value: str(value)[:40])
def test_generate(refused: Any, arguments: list[str], message: str) -> None:
    refused(["generate", "import", *arguments], message)


@pytest.mark.few(10)
@pytest.mark.parametrize(("arguments", "message"), OTHERS, ids=lambda value: str(value)[:40])
def test_other_commands(refused: Any, arguments: list[str], message: str) -> None:
    refused(arguments, message)


@pytest.mark.few(5)
@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES)
def test_config_files(refused: Any, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    refused(["generate", "import", "--config", str(tmp_path / "run.yaml")], message)


def test_the_model_s_own_files(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 0}))
    refused(["generate", "import", "--model", str(tmp_path)], "config.json', num_hidden_layers is 0; it must be")
