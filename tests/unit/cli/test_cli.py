"""The command line, through ``main``: what goes to which stream, exit statuses, and one line for every error."""

from __future__ import annotations

import errno
import inspect
import io
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from rich.console import Console

import specdec
from specdec import Chunk, Engine, SamplingParams, Step
from specdec.cli import main as cli
from specdec.cli import output as output_module
from specdec.cli.race import Lane, Panes, Race, question_for
from specdec.costs import measuring as measuring_module
from specdec.drafting.registry import drafter_names
from specdec.engine.config import RunConfig
from specdec.engine.decoding import Decoding
from specdec.engine.questions import build_prompt
from specdec.errors import ConfigError
from specdec.native.library import library
from tests.unit.conftest import Install

PROMPT = "import os\nimport sys\nimport os\nimport"


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("generate", "text", stdin="...")``: a command line with its streams caught; none of them is a terminal."""
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)

    def run_main(*arguments: str, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        status = cli.main(list(arguments))
        return Outcome(status, *capsys.readouterr())

    return run_main


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "lokahead"], "unknown drafter 'lokahead'; did you mean 'lookahead'?"),
        (
            ["--drafter", "lookahead", "--set", "lookahead.windw=3"],
            "unknown option of lookahead 'windw'; did you mean 'window'?",
        ),
        (["--drafter", "lookahead", "--set", "lookahead.window=0"], "lookahead.window is 0; it must be at least 1"),
        (["--drafter", "lookahead", "--set", "lookahead.guesses=-3"], "lookahead.guesses is -3; it must be at least 1"),
        (["--drafter", "jacobi", "--set", "jacobi.guesses=big"], "jacobi.guesses is 'big', of type str; it must be of"),
        (["--set", "window"], "--set takes KEY=VALUE, such as lookahead.window=15; got 'window'"),
        (["--set", "max_new_token=4"], "unknown option of run 'max_new_token'; did you mean 'max_new_tokens'?"),
        (["--max-new-tokens", "-4"], "max_new_tokens is -4; it must be an integer >= 1"),
        (["--temperature", "-1"], "temperature is -1.0; it must be a finite number >= 0"),
        (["--top-p", "0"], "top_p is 0.0; it must be a number in (0, 1]"),
        (["--acceptance", "typical", "--temperature", "1"], "acceptance='typical' changes the output distribution"),
        (
            ["--config", "no/such.yaml"],
            "cannot read the config 'no/such.yaml': No such file or directory; give a YAML file",
        ),
        (["--device", "abacus"], "device 'abacus' cannot be used: "),
        (
            ["--model", "no/such/folder"],
            "cannot load a model from 'no/such/folder': there is no such folder; give 'tiny'",
        ),
        (["--model", "/nowhere"], "cannot load a model from '/nowhere': there is no such folder; give 'tiny'"),
        (["--model", "./missing"], "cannot load a model from './missing': there is no such folder; give 'tiny'"),
        (["--prompt-file", "x"], "a prompt and --prompt-file 'x' were given; give one of them"),
        (["--widow", "3"], "No such option: --widow"),
        (["--top-k", "many"], "Invalid value for '--top-k'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_are_one_line_and_status_2(run: Run, arguments: list[str], message: str) -> None:
    outcome = run("generate", "hello", *arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ")
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_bad_drafter_option_is_told_before_a_model_is_loaded(run: Run) -> None:
    bad = ["--drafter", "lookahead", "--set", "lookahead.window=0"]
    assert "lookahead.window is 0" in run("generate", "hello", "--model", "no/such/folder", *bad).err


def test_a_prompt_is_wanted(run: Run) -> None:
    assert run("generate").err == "error: no prompt was given; write one, or --prompt-file FILE (- is standard input)\n"


def test_a_prompt_has_to_be_text(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"caf\xe9")
    for arguments in (["--prompt-file", str(path)], ["caf\udce9"]):
        outcome = run("generate", *arguments)
        assert (outcome.status, outcome.out) == (2, "")
        assert "the prompt is no UTF-8 text" in outcome.err


def test_bad_yaml_says_where(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("drafter:\n  name: lookahead\n  window: 3: 4\n")
    outcome = run("generate", "hello", "--config", str(path))
    assert outcome.status == 2
    assert re.fullmatch(r"error: the config '.*bad.yaml' is no YAML: line 3, column 12: .*\n", outcome.err)


def test_unknown_command_and_no_command(run: Run) -> None:
    assert run("generat").status == 2
    nothing = run()
    assert nothing.status == 2
    assert "generate" in nothing.out
    assert nothing.err == ""


@pytest.mark.parametrize("place", ["build", "_read_prompt"])
def test_an_interrupt_is_quiet(run: Run, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, place, interrupt)
    assert run("generate", "hello") == (130, "", "")


# -------------------------------------------------------------------------------------------------------- generate


@pytest.mark.slow
def test_the_text_alone_is_on_stdout(run: Run, tiny_engine: Engine) -> None:
    expected = tiny_engine.generate(PROMPT, 24).text
    for arguments in ([], ["--no-stream"], ["--drafter", "prompt_lookup"], ["--dtype", "float32"]):
        outcome = run("generate", PROMPT, "--max-new-tokens", "24", *arguments)
        assert (outcome.status, outcome.out) == (0, expected)
        assert re.fullmatch(
            r"(none|prompt_lookup): 24 tokens in \d+ target steps, \d+\.\d\d per step, \d+ tokens/s; ended by length\n",
            outcome.err,
        )


def test_json(run: Run, tiny_engine: Engine) -> None:
    options = [
        "--drafter",
        "lookahead",
        "--set",
        "lookahead.window=3",
        "--set",
        "lookahead.ngram=5",
        "--set",
        "lookahead.guesses=3",
        "--max-new-tokens",
        "24",
        "--policy",
        "off",
    ]
    outcome = run("generate", PROMPT, "--json", *options)
    assert (outcome.status, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    drafter = {"name": "lookahead", "window": 3, "ngram": 5, "guesses": 3}
    expected = tiny_engine.with_drafter(drafter, policy="off").generate(PROMPT, 24)
    assert found["text"] == expected.text
    assert found["token_ids"] == expected.token_ids
    assert (found["finish_reason"], found["lossy"], found["drafter"]) == ("length", False, "lookahead")
    stats = found["stats"]
    assert stats["acceptance_lengths"] == expected.stats.acceptance_lengths
    assert stats["tokens_per_step"] == pytest.approx(24 / stats["steps"])
    assert stats["rows_per_step"] == pytest.approx(expected.stats.rows_per_step)
    assert set(stats["seconds"]) == {"prefill", "draft", "target", "rest"}


@pytest.mark.slow
def test_options_reach_the_sampling(run: Run, tiny_engine: Engine) -> None:
    options = {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "seed": 5,
        "acceptance": "match",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    outcome = run("generate", PROMPT, "--max-new-tokens", "16", *arguments)
    sampling = SamplingParams(**options)  # type: ignore[arg-type]
    assert outcome.out == tiny_engine.generate(PROMPT, 16, sampling).text
    assert outcome.out != tiny_engine.generate(PROMPT, 16).text


@pytest.mark.slow
def test_lossy_says_so(run: Run) -> None:
    options = ["--acceptance", "typical", "--allow-lossy", "--temperature", "1", "--max-new-tokens", "4"]
    assert "none (lossy: not the target's distribution): 4 tokens" in run("generate", PROMPT, *options).err
    assert json.loads(run("generate", PROMPT, "--json", *options).out)["lossy"] is True


@pytest.mark.slow
def test_stop_strings(run: Run, tiny_engine: Engine) -> None:
    text = tiny_engine.generate(PROMPT, 24).text
    first, second = text[3:5], text[8:10]
    outcome = run("generate", PROMPT, "--max-new-tokens", "24", "--stop", second, "--stop", first)
    assert outcome.out == text[: min(text.index(first), text.index(second))]
    assert outcome.err.endswith("; ended by stop\n")


HOT = ("--max-new-tokens", "8", "--seed", "4", "--temperature", "3")  # broken bytes, mostly


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "words",
    [
        ["generate", PROMPT, *HOT],
        pytest.param(["generate", PROMPT, "--no-stream", *HOT], marks=pytest.mark.slow),
        ["chat", *HOT],
        ["show-sample", "été.txt"],
        ["drafters"],
        pytest.param(["demo", "--model", "tiny", "--drafters", "none", *HOT[:2]], marks=pytest.mark.slow),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("colours", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_terminal_whose_encoding_lacks_a_character(
    words: list[str], colours: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It shows a replacement character in its place, and nothing ends; rich itself draws with what there is."""
    monkeypatch.chdir(tmp_path)
    Path("été.txt").write_text("été\n" * 40, encoding="utf-8")
    if colours:
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO("été\nwhat?\n"))
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(words) == 0
    sys.stdout.flush()
    assert b"?" in written.getvalue() or words[0] in ("drafters", "demo")


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("encoding", "errors", "then"),
    [
        ("ascii", "strict", "replace"),
        ("ascii", "surrogateescape", "replace"),  # of a locale without a language
        ("cp1252", "strict", "replace"),
        ("UTF-8", "strict", "replace"),  # a lone half of a surrogate pair, as in a file's name
        ("utf-8", "surrogateescape", "surrogateescape"),
        ("ascii", "backslashreplace", "backslashreplace"),
    ],
)
def test_what_cannot_be_shown_never_raises(
    encoding: str, errors: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.main(["--version"]) == 0
    assert stream.errors == then


@pytest.mark.slow
def test_stop_tokens(run: Run, tiny_engine: Engine) -> None:
    tokens = tiny_engine.generate(PROMPT, 24).token_ids
    last = min(tokens.index(tokens[5]), tokens.index(tokens[9]))
    options = ("--max-new-tokens", "24", "--stop-token-ids", f"{tokens[9]}, {tokens[5]}")
    assert json.loads(run("generate", PROMPT, "--json", *options).out)["token_ids"] == tokens[: last + 1]
    wrong = run("generate", PROMPT, "--stop-token-ids", "end")
    assert wrong.status == 2
    assert "stop_token_ids is ['end']" in wrong.err


@pytest.mark.slow
def test_the_prompt_may_come_from_a_file_or_stdin(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT)
    expected = run("generate", PROMPT, "--max-new-tokens", "4").out
    assert run("generate", "--prompt-file", str(path), "--max-new-tokens", "4").out == expected
    assert run("generate", "--prompt-file", "-", "--max-new-tokens", "4", stdin=PROMPT).out == expected


def test_every_run_option_is_on_the_command_line_and_its_help_tells_the_default() -> None:
    parameters = inspect.signature(cli.generate).parameters
    run, told = RunConfig(), 0
    sampling = {f.name for f in fields(SamplingParams)} - {"typical_epsilon", "typical_delta"}
    for name in {f.name for f in fields(RunConfig)} - {"sampling"} | sampling:
        text = parameters[name].annotation.__metadata__[0].help
        default = re.search(r"\(default ([^ )]+)\)", text)
        if default:
            told += 1
            assert default[1] == str(getattr(run, name) if hasattr(run, name) else getattr(run.sampling, name))
    assert told == 16
    assert {"config", "settings"} <= parameters.keys()


# ------------------------------------------------------------------------------------------------------ a terminal


def _painted(*chunks: Chunk) -> str:
    file = io.StringIO()
    painter = output_module.StepPainter(
        Console(file=file, force_terminal=True, color_system="256", no_color=False, width=20)
    )
    for chunk in chunks:
        painter(chunk)
    return file.getvalue()


def _chunk(text: str, tokens: int) -> Chunk:
    return Chunk(text, [0] * tokens, Step(0, [0] * tokens, tokens, "any"))


@pytest.mark.parametrize("same", [True, False])
def test_statistics_begin_a_line_where_they_go_to_the_text_s_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        monkeypatch.setattr(sys, "stderr", out if same else err)
        painter = output_module.StepPainter(Console(file=out))
        painter.write("text")
        painter.end()
    assert (tmp_path / "out").read_text() == ("text\n" if same else "text")


def test_tokens_of_one_step_share_a_colour_and_neighbours_differ() -> None:
    painted = _painted(_chunk("one two", 2), _chunk(" three", 1), _chunk(" four", 3), _chunk(" five", 2))
    parts = re.findall(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", painted)
    assert [text for _, text in parts] == ["one two", " four", " five"]
    assert parts[0][0] != parts[1][0] != parts[2][0]
    assert " three\x1b" in painted  # a plain step has no colour


def test_a_terminal_keeps_lines_and_obeys_no_escape_of_the_model() -> None:
    text = "a line longer than the terminal is wide\n\n    and a short one\n"
    assert _painted(_chunk(text, 1)) == text
    assert _painted(_chunk("\x1b[2J\x07[red]", 1)) == "␛[2J␇[red]"


# ------------------------------------------------------------------------------------------------------------ chat


def test_chat_has_turns(run: Run, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    start = Engine.start

    def watched(engine: Engine, prompt: Any, *given: Any, **named: Any) -> Any:
        asked.append(prompt)
        return start(engine, prompt, *given, **named)

    monkeypatch.setattr(Engine, "start", watched)
    lines = "hello\n\nand now?\n/reset\nhello\n/exit\nnever\n"
    arguments = ["--system", "be brief", "--max-new-tokens", "6", "--dtype", "float64", "--drafter", "prompt_lookup"]
    outcome = run("chat", *arguments, stdin=lines)
    monkeypatch.undo()
    hello = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    first = tiny_engine.generate(hello, 6).text
    turns = [*hello, {"role": "assistant", "content": first}, {"role": "user", "content": "and now?"}]
    assert asked == [hello, turns, hello]
    assert outcome.status == 0
    assert outcome.out == f"{first}\n{tiny_engine.generate(turns, 6).text}\n{first}\n"
    read = re.findall(r"ended by \w+; read (\d+) of (\d+) prompt tokens in \d+\.\d\d s$", outcome.err, re.M)
    sizes = [len(tiny_engine.encode(prompt)) for prompt in (hello, turns, hello)]
    assert [int(size) for _, size in read] == sizes
    assert int(read[0][0]) == sizes[0]
    assert int(read[1][0]) < sizes[1] - len(tiny_engine.encode(hello)) // 2  # the first turn was not read again
    assert int(read[2][0]) == 1


class Someone(io.StringIO):
    """A terminal's keyboard."""

    def isatty(self) -> bool:
        return True


@pytest.mark.slow
def test_ctrl_c_ends_an_answer_and_not_the_talk(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was shown of the answer stays in the talk; at the prompt, Ctrl-C says how to leave."""
    asked: list[Any] = []
    said = iter(["hello", KeyboardInterrupt(), "never mind", "and now?", EOFError()])
    start, step = Engine.start, Decoding.step

    def say(prompt: str) -> str:
        line = next(said)
        if isinstance(line, BaseException):
            raise line
        return line

    def watched(engine: Engine, prompt: Any, *given: Any, **named: Any) -> Any:
        asked.append(prompt)
        return start(engine, prompt, *given, **named)

    def interrupted(decoding: Decoding) -> Any:
        if len(decoding.steps) == {1: 3, 2: 0}.get(len(asked), 99):
            raise KeyboardInterrupt
        return step(decoding)

    monkeypatch.setattr("builtins.input", say)
    monkeypatch.setattr(sys, "stdin", Someone())
    monkeypatch.setattr(Engine, "start", watched)
    monkeypatch.setattr(Decoding, "step", interrupted)
    arguments = ["--max-new-tokens", "8", "--dtype", "float64", "--drafter", "none"]
    assert cli.main(["chat", *arguments]) == 0
    monkeypatch.undo()
    hello = [{"role": "user", "content": "hello"}]
    cut = tiny_engine.generate(hello, 3).text
    so_far = [*hello, {"role": "assistant", "content": cut}]
    last = [*so_far, {"role": "user", "content": "and now?"}]
    assert asked == [hello, [*so_far, {"role": "user", "content": "never mind"}], last]
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{cut}\n\n/exit or Ctrl-D ends the talk\n\n")
    assert shown.out.endswith(f"{tiny_engine.generate(last, 8).text}\n\n")
    assert shown.err.count("ended by you") == 2


@pytest.mark.slow
def test_chat_names_its_commands(run: Run) -> None:
    outcome = run("chat", stdin="/rest\n/exit\n")
    assert outcome == (0, "", "error: unknown command '/rest'; did you mean '/reset'? known: /exit, /reset\n")


@pytest.mark.slow
def test_chat_that_outgrows_the_context_fails_when_piped(run: Run) -> None:
    outcome = run("chat", stdin="word " * 3000)
    assert outcome.status == 2
    assert "the model's context holds" in outcome.err


# -------------------------------------------------------------------------------------------------------- drafters


@dataclass(frozen=True, kw_only=True)
class _Config:
    """Options. Not one of them: a sentence with a colon.

    Attributes:
        first, second: what both are,
            on two lines.
        third: ``code`` in it.

    Raises:
        ConfigError: never.
    """

    first: int = 1
    second: list[str] = None  # type: ignore[assignment]
    third: str


class _Described:
    """One line.

    And more.
    """

    Config = _Config


def test_describe_reads_docstrings_and_fields() -> None:
    found = output_module.describe("any", _Described)
    assert (found["name"], found["summary"], found["error"]) == ("any", "One line.", None)
    assert [tuple(option.values()) for option in found["options"]] == [
        ("first", "int", "1", "what both are, on two lines."),
        ("second", "list[str]", "None", "what both are, on two lines."),
        ("third", "str", None, "code in it."),
    ]


def test_drafters_lists_options_and_survives_a_broken_package(run: Run, install: Install) -> None:
    install("[specdec.drafters]\nbroken = no_such_module:Drafter\n")
    table = run("drafters")
    assert table.status == 0
    assert re.search(r"^prompt_lookup  Copies from the text so far\.$", table.out, re.M)
    assert re.search(r"^ +matches +1 +how many occurrences to propose", table.out, re.M)
    assert re.search(r"^broken  drafter 'broken' is registered as 'no_such_module:Drafter'", table.out, re.M)
    listed = {drafter["name"]: drafter for drafter in json.loads(run("drafters", "--json").out)}
    assert "No module named 'no_such_module'" in listed["broken"]["error"]
    assert listed["none"] == {"name": "none", "summary": "Proposes the root alone.", "options": [], "error": None}


def test_every_option_of_every_drafter_has_a_meaning(run: Run) -> None:
    for drafter in json.loads(run("drafters", "--json").out):
        assert drafter["error"] is None
        assert drafter["summary"]
        for option in drafter["options"]:
            assert option["help"], f"{drafter['name']}.{option['name']} is not in its Config's Attributes"


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="no C compiler works here")
def test_a_warning_of_ours_is_one_line(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file of times that is broken: what is wrong and what is done, and no line of our source."""
    monkeypatch.setattr(measuring_module, "cache_folder", lambda: tmp_path)
    assert run("generate", PROMPT, "--drafter", "auto", "--max-new-tokens", "1").status == 0
    stored = min((tmp_path / "cost").iterdir())
    stored.write_text("{")
    warnings.simplefilter("default")
    outcome = run("generate", PROMPT, "--drafter", "auto", "--max-new-tokens", "1")
    assert outcome.status == 0
    first, statistics = outcome.err.splitlines()
    assert re.fullmatch(rf"warning: {re.escape(str(stored))} is no cost curve .*; measuring anew", first)
    assert statistics.startswith("auto: 1 token")


def test_warnings_of_others_stay_as_they_are(
    run: Run, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def load(config: RunConfig) -> None:
        warnings.warn("of others", UserWarning, stacklevel=1)
        raise ConfigError("enough")

    monkeypatch.setattr("specdec.engine.load.load_run", load)
    warnings.simplefilter("always")
    former = warnings.showwarning
    assert run("generate", PROMPT).err == "error: enough\n"
    assert [str(warning.message) for warning in recwarn] == ["of others"]
    assert warnings.showwarning is former


# ------------------------------------------------------------------------------------------------- demo, and the rest


@pytest.mark.slow
def test_demo(run: Run) -> None:
    """Nobody pulled a model into the cache of the tests."""
    outcome = run("demo", "--max-new-tokens", "8")
    assert outcome.status == 0
    assert "Showing the embedded model instead: smollm2 is not on this machine yet; run `specdec pull" in outcome.err
    heads = re.findall(r"^--- (\w+) ---$", outcome.out, re.M)
    assert heads == ["none", "prompt_lookup", "lookahead", "auto"]
    texts = [text.split("\n\n")[0] for text in re.split(r"--- \w+ ---\n", outcome.out)[1:]]
    assert len(set(texts)) == 1
    rows = {line.split()[0]: line.split() for line in outcome.out.splitlines() if re.search(r"\dx ", line)}
    assert list(rows) == heads
    assert rows["none"][1:4] == ["24", "24", "1.00"]  # in three rounds
    assert rows["none"][5:] == ["1.00x", "reference"]
    assert [rows[name][-1] for name in heads[1:]] == ["identical"] * 3


@pytest.mark.slow
def test_demo_takes_drafters(run: Run) -> None:
    arguments = ["--model", "tiny", "--max-new-tokens", "4", "--drafters", "jacobi", "--temperature", "0.8"]
    outcome = run("demo", *arguments)
    assert re.findall(r"^--- (\w+) ---$", outcome.out, re.M) == ["none", "jacobi"]
    assert run("demo", "--drafters", "jacoby").err.endswith(
        "error: unknown drafter 'jacoby'; did you mean 'jacobi'? known: " + ", ".join(drafter_names()) + "\n"
    )
    assert run("demo", "--max-new-tokens", "0").err == "error: max_new_tokens is 0; it must be at least 1\n"


def test_a_race_tells_where_texts_differ(tiny_engine: Engine) -> None:
    two, three = Lane("any", tiny_engine), Lane("any", tiny_engine)
    for lane, size in ((two, 2), (three, 3)):
        lane.generations.append(tiny_engine.generate(PROMPT, size))
    assert two.first_difference(two) is None
    assert two.first_difference(three) == 3


@pytest.mark.slow
def test_a_race_goes_through_a_conversation(tiny_engine: Engine) -> None:
    race = Race(tiny_engine, ["prompt_lookup"], max_new_tokens=6, sampling=SamplingParams())
    seen: list[str] = []
    answers: list[str] = []
    asked = []
    question = question_for("any")
    for _ in question.turns:
        prompt: Any = build_prompt(question, answers, "chat", SimpleNamespace(chat_template="..."))
        asked.append(prompt)
        answers.append(race.turn(prompt, lambda name, chunk, speed: seen.append(name)))
    assert [message["content"] for message in asked[1]] == [question.turns[0], answers[0], question.turns[1]]
    assert answers == [tiny_engine.generate(prompt, 6).text for prompt in asked]
    plain, drafted = race.lanes
    assert drafted.first_difference(plain) is None
    assert (plain.tokens, plain.steps) == (12, 12)
    assert all(lane.generations[1].stats.reused_tokens > 30 for lane in race.lanes)
    assert seen.count("none") == 12


@pytest.mark.parametrize(("width", "across"), [(200, 4), (100, 2), (50, 1)])
def test_panes_stand_side_by_side_where_there_is_room(width: int, across: int) -> None:
    names = ["first", "second", "two", "last"]
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width, height=40)
    panes = Panes(console, names)
    with panes:
        panes("two", _chunk("a text of\nthree lines\n\x1b[2J", 3), 12.3)
    with console.capture() as shown:
        console.print(panes.drawn())
    first, *_ = shown.get().splitlines()
    assert sum(name in first for name in names) == across
    assert "two  12 tokens/s" in shown.get()
    assert "␛[2J" in shown.get()


@pytest.mark.slow
def test_one_file_and_one_entry_point_make_a_drafter(run: Run, install: Install) -> None:
    source = Path(__file__).parents[1].joinpath("third_party_drafter.py").read_text()
    install("[specdec.drafters]\nshout = shout:Shout\n", shout=source)
    options = ["--max-new-tokens", "16", "--json"]
    plain = json.loads(run("generate", PROMPT, *options).out)
    shouted = json.loads(run("generate", PROMPT, "--drafter", "shout", "--set", "shout.times=4", *options).out)
    assert shouted["token_ids"] == plain["token_ids"]
    assert shouted["drafter"] == "shout"
    assert shouted["stats"]["rows_per_step"] < 3  # its guesses fail, so it is seldom asked ...
    options += ["--drafter", "shout", "--set", "shout.times=4", "--policy", "off"]
    assert json.loads(run("generate", PROMPT, *options).out)["stats"]["rows_per_step"] > 4  # ... unless one insists
    listed = run("drafters").out
    assert re.search(r"^shout  Proposes the last token, over and over\.\n +times +3 +how often", listed, re.M)


def test_installed_packages_add_commands(run: Run, install: Install) -> None:
    source = """
import typer

group = typer.Typer()

def wave(name: str) -> None:
    print("hello", name)

@group.command()
def one() -> None:
    print("one")

@group.command()
def two() -> None:
    print("two")
"""
    entries = "wave = more:wave\ncount = more:group\nlost = lost:run\n"
    install("[specdec.commands]\n" + entries, more=source, lost="raise OSError('two\\nlines')\n")
    assert run("wave", "you").out == "hello you\n"
    assert run("count", "two").out == "two\n"
    assert run("--version").status == 0
    lost = run("lost")
    assert (lost.status, lost.out) == (2, "")
    assert lost.err.startswith(
        "error: command 'lost' is registered as 'lost:run', which does not import: OSError: two lines;"
    )
    assert lost.err.count("\n") == 1


@pytest.mark.parametrize(
    "encode", [str.encode, lambda text: text.encode("utf-8-sig"), lambda text: text.encode("utf-16")]
)
def test_a_mark_and_the_lines_of_windows_are_no_part_of_a_prompt(
    encode: Callable[[str], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode("import ös\r\n")
    (tmp_path / "prompt.txt").write_bytes(data)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    for file in (str(tmp_path / "prompt.txt"), "-"):
        assert cli._read_prompt(None, file) == "import ös\n"


@pytest.mark.parametrize("command", [["chat"], ["generate", "--prompt-file", "-"]])
def test_closed_input_is_told(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a shell's <&- leaves it."""
    monkeypatch.setattr("specdec.engine.load.load_run", lambda config: pytest.fail("loaded"))
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(command) == 2
    assert capsys.readouterr().err.partition("standard input, which is closed; ")[0].count(";") == 0


@pytest.mark.few(1)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
@pytest.mark.parametrize(
    "command",
    [["--version"], ["--help"], ["drafters"], ["drafters", "--json"], ["generate", "x", "--max-new-tokens", "1"]],
)
def test_an_output_that_takes_no_more_is_told(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(command) == 2
        full.flush()  # as Python does at its end
    assert "error: cannot write the output: [Errno 28] No space left on device; make room" in capsys.readouterr().err


def test_errors_of_files_are_not_the_output_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOENT, "No such file", "x")

    monkeypatch.setattr(output_module, "drafter_list", fail)
    with pytest.raises(FileNotFoundError):
        cli.main(["drafters"])


def test_version_and_module(run: Run) -> None:
    assert run("--version").out == f"specdec {specdec.__version__}\n"
    shown = subprocess.run([sys.executable, "-m", "specdec", "--version"], capture_output=True, text=True, check=True)
    assert (shown.stdout, shown.stderr) == (f"specdec {specdec.__version__}\n", "")


def test_the_command_line_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from specdec.cli.main import main; main(['--version']); "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.endswith("\nset()\n")


def test_the_package_offers_all_its_names() -> None:
    assert sorted(name for names in specdec._HOMES.values() for name in names) == sorted(specdec.__all__)
    for name in specdec.__all__:
        assert getattr(specdec, name) is not None
        assert name in dir(specdec)
    missing: Any = specdec
    with pytest.raises(AttributeError, match="module 'specdec' has no attribute 'Engin'"):
        missing.Engin  # noqa: B018
