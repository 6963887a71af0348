"""Configuration: what wins over what, what is refused and how, and the files in configs/drafter."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main
from specdec.drafting.registry import parse_drafter
from specdec.engine.config import RunConfig, override
from specdec.engine.config import resolve as resolve_given
from specdec.errors import ConfigError
from specdec.settings.options import Given
from specdec.settings.parsing import load_yaml, parse, read_value

ROOT = Path(__file__).parents[3]
DRAFTER_FILES = sorted((ROOT / "configs" / "drafter").glob("*.yaml"))
CORE = {"none", "jacobi", "lookahead", "prompt_lookup"}


def resolve(file: Path | None = None, settings: Sequence[str] = (), options: dict[str, Any] | None = None) -> RunConfig:
    return resolve_given(RunConfig, Given(file=file, settings=settings, values=options or {}))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that differs from every default that the tests look at."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "drafter: {name: lookahead, window: 7, ngram: 5}\n"
        "sampling: {temperature: 0.5, seed: 3}\n"
        "max_new_tokens: 11\n"
        "stop: ['x', 'y']\n"
    )
    return path


def test_defaults() -> None:
    run = resolve()
    assert run == RunConfig()
    assert (run.model, run.drafter, run.max_new_tokens, run.sampling.temperature) == ("tiny", "none", 128, 0)


def test_file_wins_over_defaults(file: Path) -> None:
    run = resolve(file)
    assert run.drafter == {"name": "lookahead", "window": 7, "ngram": 5}
    assert (run.sampling.temperature, run.sampling.seed, run.sampling.top_p) == (0.5, 3, 1.0)
    assert (run.max_new_tokens, run.stop) == (11, ["x", "y"])


def test_settings_win_over_the_file(file: Path) -> None:
    run = resolve(file, ["lookahead.window=9", "sampling.seed=4", "max_new_tokens=12", "stop=z"])
    assert run.drafter == {"name": "lookahead", "window": 9, "ngram": 5}
    assert (run.sampling.temperature, run.sampling.seed) == (0.5, 4)
    assert (run.max_new_tokens, run.stop) == (12, "z")


def test_options_win_over_the_file(file: Path) -> None:
    run = resolve(file, ["sampling.top_k=5"], {"sampling": {"seed": 5}, "max_new_tokens": 13, "stop": ["w"]})
    assert (run.sampling.seed, run.sampling.top_k, run.sampling.temperature) == (5, 5, 0.5)
    assert (run.max_new_tokens, run.stop) == (13, ["w"])


def test_settings_have_the_last_word(file: Path) -> None:
    run = resolve(file, ["sampling.seed=4", "max_new_tokens=12"], {"sampling": {"seed": 5}, "max_new_tokens": 13})
    assert (run.sampling.seed, run.max_new_tokens) == (4, 12)


def test_an_option_of_zero_is_an_option(file: Path) -> None:
    run = resolve(file, [], {"sampling": {"seed": 0, "temperature": 0.0}})
    assert (run.sampling.seed, run.sampling.temperature) == (0, 0.0)


def test_words_are_no_booleans(tmp_path: Path) -> None:
    """As in YAML 1.2: a policy that is off is not False."""
    path = tmp_path / "run.yaml"
    path.write_text("policy: off\n")
    assert resolve(path).policy == resolve(None, ["policy=off"]).policy == "off"
    with pytest.raises(ConfigError, match=r"pool_from_prompt is 'no', of type str; it must be of type bool"):
        parse_drafter(resolve(None, ["lookahead.pool_from_prompt=no"], {"drafter": "lookahead"}).drafter)
    _, config = parse_drafter(resolve(None, ["lookahead.verify=False"], {"drafter": "lookahead"}).drafter)
    assert config.verify is False


def test_the_same_drafter_keeps_its_options(file: Path) -> None:
    run = resolve(file, ["lookahead.guesses=2"], {"drafter": "lookahead"})
    assert run.drafter == {"name": "lookahead", "window": 7, "ngram": 5, "guesses": 2}


def test_another_drafter_drops_the_options_of_the_former(file: Path) -> None:
    assert resolve(file, ["jacobi.guesses=2"], {"drafter": "jacobi"}).drafter == {"name": "jacobi", "guesses": 2}
    assert resolve(file, ["drafter=jacobi", "jacobi.guesses=3"]).drafter == {"name": "jacobi", "guesses": 3}
    assert resolve(file, ["drafter=jacobi", "jacobi.guesses=3"], {"drafter": "none"}).drafter == {
        "name": "jacobi", "guesses": 3,
    }  # fmt: skip


def test_a_drafter_may_be_a_bare_name(tmp_path: Path) -> None:
    path = tmp_path / "bare.yaml"
    path.write_text("drafter: jacobi\n")
    assert resolve(path, ["jacobi.guesses=2"]).drafter == {"name": "jacobi", "guesses": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["window"], "--set takes KEY=VALUE, such as lookahead.window=15; got 'window'"),
        (["=3"], "--set takes KEY=VALUE, such as lookahead.window=15; got '=3'"),
        (["lookahead.window=[1"], "--set 'lookahead.window=[1': the value is no YAML: line 1, column 3"),
        (["jacobi.guesses=2"], "is for 'jacobi', but the drafter is 'lookahead': write that or sampling, or"),
        (["max_new_token=3"], "unknown option of run 'max_new_token'; did you mean 'max_new_tokens'?"),
        (["sampling.temprature=1"], "unknown option of sampling 'temprature'; did you mean 'temperature'?"),
        (["sampling=3", "sampling.seed=3"], "sampling is 3, of type int; it must be a mapping of options"),
        (["drafter=3"], "run.drafter is 3, of type int; it must be of type str | dict[str, Any]"),
        (["max_new_tokens=0"], "max_new_tokens is 0; it must be an integer >= 1"),
        (["max_new_tokens=-5"], "max_new_tokens is -5; it must be an integer >= 1"),
        (["max_new_tokens=many"], "run.max_new_tokens is 'many', of type str; it must be an integer"),
        (["max_new_tokens=1.5"], "run.max_new_tokens is 1.5, of type float; it must be an integer"),
        (["sampling.seed=true"], "sampling.seed is True, of type bool; it must be an integer"),
        (["sampling.temperature=-1"], "temperature is -1; it must be a finite number >= 0"),
        (["threads=0"], "threads is 0; it must be an integer from 1 to 4096"),
        (["dtype=flot32"], "unknown dtype 'flot32'; did you mean 'float32'?"),
        (["execution=compiled"], "unknown execution 'compiled'; known: auto, fused, modules, native"),
        (["policy=credits"], "'credits' is unknown; choose"),
        (["attention=fast"], "unknown attention 'fast'"),
        (["attention=sdpa"], "unknown attention 'sdpa'; known: auto, flash"),
        (["stop=''"], "stop is ''"),
        (["stop=[x, '']"], "stop is ['x', ''], of type list; it must be non-empty text, or a list of such"),
    ],
)
def test_bad_settings(file: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(file, settings)
    assert message in str(error.value)


def test_override_leaves_its_argument_alone() -> None:
    values = {"drafter": {"name": "lookahead"}, "sampling": {"seed": 1}}
    changed = override(values, ["lookahead.window=3", "sampling.seed=2", "drafter.ngram=4"], RunConfig)
    assert changed == {"drafter": {"name": "lookahead", "window": 3, "ngram": 4}, "sampling": {"seed": 2}}
    assert values == {"drafter": {"name": "lookahead"}, "sampling": {"seed": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: b: c\n", "is no YAML: line 1, column 5: mapping values are not allowed here"),
        ("- a\n- b\n", "holds list; it must be a mapping of options"),
        ("", "holds NoneType; it must be a mapping of options"),
        ("a: !!python/object:os.system x\n", "is no YAML: line 1, column 4: could not determine a constructor"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_yaml(path)
    assert message in str(error.value)
    assert "bad.yaml" in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config '.*gone.yaml': No such file"):
        load_yaml(tmp_path / "gone.yaml")


@pytest.mark.parametrize("text", ["5e-5", "5E-05", "+.5e+2", "1.e3"])
def test_numbers_with_an_exponent_are_numbers(tmp_path: Path, text: str) -> None:
    path = tmp_path / "numbers.yaml"
    path.write_text(f"rate: {text}\nname: 5e-5x\n")
    assert load_yaml(path) == {"rate": float(text), "name": "5e-5x"}


@dataclass(frozen=True, kw_only=True)
class Needy:
    path: str
    scale: float = 1.0


def test_parse_wants_what_has_no_default_and_takes_a_whole_number_for_a_float() -> None:
    assert parse(Needy, {"path": "x", "scale": 2}, where="needy") == Needy(path="x", scale=2)
    with pytest.raises(ConfigError, match=r"needy.path is missing and has no default"):
        parse(Needy, {"scale": 2.0}, where="needy")


def test_the_core_drafters_have_files() -> None:
    assert {path.stem for path in DRAFTER_FILES} >= CORE


@pytest.mark.parametrize("path", DRAFTER_FILES, ids=lambda path: path.stem)
def test_drafter_file_spells_out_all_options_with_their_defaults(path: Path) -> None:
    drafter = resolve(path).drafter
    assert isinstance(drafter, dict)
    assert drafter.pop("name") == path.stem
    kind, config = parse_drafter(path.stem)
    assert drafter == {f.name: getattr(config, f.name) for f in fields(kind.Config)}


@pytest.mark.slow
@pytest.mark.parametrize("path", DRAFTER_FILES, ids=lambda path: path.stem)
def test_drafter_file_opens_with_the_command_that_runs_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    comment, *command = shlex.split(path.read_text().splitlines()[0])
    assert (comment, command[:4]) == ("#", ["specdec", "generate", "--config", str(path.relative_to(ROOT))])
    if path.stem in CORE:  # others may want weights or a corpus
        monkeypatch.chdir(ROOT)
        assert main([*command[1:], "--max-new-tokens", "2"]) == 0
        assert capsys.readouterr().err.startswith(f"{path.stem}: 2 tokens in ")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("0o10", 8),
        ("-0x1F", -31),
        ("+5", 5),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("5.", 5.0),
        (".5", 0.5),
    ],
)
def test_a_number_is_what_yaml_1_2_says(text: str, value: Any) -> None:
    assert read_value(f"window: {text}") == {"window": value}
    assert type(read_value(text)) is type(value)


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3", "lookahead: {window: 5, window: 7}", "- {'a': 1, a: 1}"])
def test_a_key_stands_once(text: str, tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    with pytest.raises(
        ConfigError, match=r"line \d+, column \d+: the key '(a|window)' stands twice, first in line 1; keep one"
    ):
        load_yaml(path)


def test_a_merged_key_is_another_s() -> None:
    text = "d: &d {a: 1}\np: {q: &e {<<: *d, a: 2}}\nz: {<<: *e}"
    assert read_value(text) == {"d": {"a": 1}, "p": {"q": {"a": 2}}, "z": {"a": 2}}


def test_a_setting_is_given_once() -> None:
    settings = ["max_new_tokens=5", "drafter=jacobi", "max_new_tokens=7"]
    with pytest.raises(ConfigError, match="--set max_new_tokens is given twice, as 5 and as 7; keep one"):
        resolve(settings=settings)
