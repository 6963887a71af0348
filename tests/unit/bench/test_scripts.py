"""The scripts that measure: their arithmetic, and that they run, on a toy."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from specdec.bench.oracle import OraclePoint
from specdec.bench.shapes import random_model, weight_bytes
from specdec.drafting.registry import drafter_names
from specdec.engine.questions import read_questions
from specdec.execute.native import NativeExecutor
from specdec.execute.torch import TorchExecutor
from specdec.native import library as native
from specdec.runners import cuts
from tests.gguf_files import new_llama, write_gguf
from tests.launching import fused
from tests.models import new_model
from tests.unit.runners.test_cuts import Device

SCRIPTS = Path(__file__).parents[3] / "scripts"
SOURCE = native.source()


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def test_expected_tokens_are_those_of_independent_guesses() -> None:
    """E by simulation: W guesses of g tokens, each right with probability alpha; the best one counts, and the bonus."""
    script = load("scaling_law")
    rng = np.random.default_rng(0)
    alpha, window, ngram = 0.4, 5, 4
    right = rng.random((200_000, window, ngram - 1)) < alpha
    lengths = np.cumprod(right, axis=2).sum(2).max(1) + 1
    assert script.expected(alpha, window, ngram) == pytest.approx(lengths.mean(), abs=0.01)


def test_fit_finds_the_law_that_made_the_points() -> None:
    script = load("scaling_law")
    grid = [(w, n) for w in (1, 2, 4, 8, 16) for n in (3, 5)]
    points = [(w, n, script.law(*script.PAPER, w, n), 0.0) for w, n in grid]
    alpha, f, error = script.fit(points)
    assert (alpha, f) == pytest.approx(script.PAPER, abs=2e-3)
    assert error < 1e-3


# -- The engine's benchmark --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_engine_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure, out = tmp_path / "oracle.png", tmp_path / "figures.json"
    app = typer.Typer()
    app.command()(load("bench_engine").main)
    arguments = (
        "--shape toy --prompts 1 --prompt-tokens 16 --max-new-tokens 12 --repeats 1 --temperatures 0 "
        "--drafters none,prompt_lookup --set prompt_lookup.tokens=3 --oracle 0,1 --oracle-depths 3 --policy off"
    )
    command = [*arguments.split(), "--oracle-figure", str(figure), "--out", str(out)]
    shown = CliRunner().invoke(app, command, catch_exceptions=False).output
    report = json.loads(out.read_text())
    systems = report["tables"]["T=0"]
    assert list(systems) == ["none", "prompt_lookup", "transformers", "transformers_lookup"]
    assert {system["tokens"] for system in systems.values()} == {12}
    assert 0 < systems["prompt_lookup"]["shares"]["draft"] < 1
    assert [p["tokens_per_step"] for p in report["oracle"]["T=0"]] == [1, 4]
    assert report["cost"]["1"] == 1
    assert figure.stat().st_size > 1000
    assert "Oracle, T=0, 1 prompts of 16 tokens" in shown
    assert "drafting" in shown
    assert "differs" not in shown


@pytest.mark.slow
def test_peak_memory_is_of_a_process_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The processes are played here; what they would do runs as well."""
    script, sides = load("peak_memory"), list[str]()

    def process(function: Callable[..., Any], *arguments: Any) -> Any:
        found = function(*arguments)
        if function is script.place_of:
            return found
        sides.append(arguments[0])
        assert found > 0
        return 100.0 + len(sides)

    monkeypatch.setattr(script, "alone", process)
    monkeypatch.setattr(
        sys, "argv", ["peak_memory.py", "--repeats", "1", "--prompt-tokens", "4", "--max-new-tokens", "2"]
    )
    script.main()
    assert sides == ["transformers", "specdec"]
    assert "102 MiB (102), 1.010" in capsys.readouterr().out


# -- What a GPU is asked in a short loan, on a CPU ---------------------------------------------------------------------

QUICK = ["--device=cpu", "--dtype=float32", "--big=toy", "--small=toy", "--new=6", "--texts=1", "--batches=1,2"]


def kept_in(out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    lines = map(json.loads, out.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines())
    return {(line.pop("section"), line.pop("part")): line for line in lines}


def test_gpu_check_keeps_every_figure_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part that fails is told of and run again, as is a section that has no time left; what is kept is not."""
    script, out, fails = load("gpu_check"), tmp_path / "new" / "check", [True]
    asked: list[str] = []

    def weak() -> dict[str, Any]:
        asked.append("weak")
        if fails:
            raise RuntimeError("no kernel\nfor | this")
        return {"differing": 2}

    def strong() -> dict[str, Any]:
        asked.append("strong")
        return {"differing": 0, "ratio": {64: 1.5}}

    def endless() -> dict[str, Any]:
        while fails:
            pass
        return {"tokens_per_second": 5.0}

    monkeypatch.setitem(script.SECTIONS, "bits", lambda check: [("weak", weak), ("strong", strong)])
    monkeypatch.setitem(script.SECTIONS, "batches", lambda check: [("endless", endless)])

    def run(*arguments: str) -> tuple[dict[tuple[str, str], dict[str, Any]], str]:
        script.main([*QUICK, "--out", str(out), *arguments])
        return kept_in(out), out.with_suffix(".md").read_text()

    kept, page = run("--only=bits,batches", "--limits=batches=0.1")
    assert kept["bits", "weak"] == {"failed": "RuntimeError: no kernel\nfor | this"}
    assert "| weak | RuntimeError: no kernel for / this |  |  |" in page
    assert "| rows and products that differ | 0 | 0 | yes |" in page
    assert kept["batches", "the rest"]["failed"] == "no time left after 0.1 s; run it again, or with --limits"
    fails.clear()
    kept, page = run("--only=batches,bits")
    assert asked == ["weak", "strong", "weak"]
    assert "bits, strong: kept already" in capsys.readouterr().out
    assert kept["bits", "weak"] == {"differing": 2}
    assert kept["bits", "strong"] == {"differing": 0, "ratio": {"64": 1.5}}
    assert kept["batches", "endless"] == {"tokens_per_second": 5.0}
    assert "| rows and products that differ | 0 | 2 | no |" in page
    assert "no time left" not in page
    with pytest.raises(SystemExit, match="has figures of something else"):
        run("--execution=fused")


def test_gpu_check_runs_on_a_cpu(tmp_path: Path) -> None:
    """All sections but those that only a GPU can run; native layers round alike whatever rows are beside."""
    script, out = load("gpu_check"), tmp_path / "check"
    script.main([*QUICK, "--out", str(out), "--only=bandwidth,bits,step,batches,tests,profile,products"])
    kept = kept_in(out)
    assert not [part for part, figures in kept.items() if "failed" in figures]
    counted = Counter(section for section, _ in kept)
    assert counted == {"about": 1, "bandwidth": 1, "bits": 7, "step": 4, "batches": 3}
    differing = [figures["differing"] for (section, _), figures in kept.items() if section == "bits"]
    assert set(differing) == {0}
    assert kept["step", "toy, plain"]["share_of_copies"] > 0
    assert kept["step", "toy, T(rows) / T(1), tree"]["ratio"].keys() == {"1", "4"}
    assert "| rows and products that differ | 0 | 0 | yes |" in out.with_suffix(".md").read_text()


def test_gpu_check_sees_rows_that_depend_on_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, kind = load("gpu_check"), NativeExecutor if native.library() else TorchExecutor
    run = kind.run

    def leaning(executor: Any, step: Any) -> Any:
        output = run(executor, step)
        if output.logits is not None and step.rows > 3:
            output.logits[-1] *= 1 + 1e-6
        return output

    monkeypatch.setattr(kind, "run", leaning)
    script.main([*QUICK, "--out", str(tmp_path / "check"), "--only=bits"])
    kept = kept_in(tmp_path / "check")
    assert kept["bits", "toy, float32, chain of 5 rows"]["differing"] == 1
    assert kept["bits", "toy, float32, chain of 2 rows"]["differing"] == 0


@pytest.mark.slow
def test_gpu_check_compares_every_drafter_s_texts(tmp_path: Path) -> None:
    script, out = load("gpu_check"), tmp_path / "check"
    script.main([*QUICK, "--out", str(out), "--only=texts"])
    kept = kept_in(out)
    names = {part.rpartition(", ")[2] for section, part in kept if section == "texts"}
    assert names == {"none", *script.DRAFTERS}
    assert not [part for part, figures in kept.items() if figures.get("differing") or "failed" in figures]


@pytest.mark.slow
def test_gpu_check_says_what_drafters_bring_and_what_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, out = load("gpu_check"), tmp_path / "check"
    monkeypatch.setattr(script, "DRAFTERS", ("prompt_lookup",))
    script.main([*QUICK, "--out", str(out), "--only=drafting,rivals"])
    kept = kept_in(out)
    names = [f"T = {temperature}, {drafter}" for temperature in (0, 1) for drafter in ("none", "auto", "prompt_lookup")]
    assert [part for section, part in kept if section == "drafting"] == names
    assert all(kept["drafting", name]["differing"] == kept["drafting", name]["first_times"] == 0 for name in names)
    assert kept["drafting", "T = 0, none"]["of_plain"] == 1
    assert kept["rivals", "toy, transformers, dynamic cache"]["tokens_per_second"] > 0
    assert "| texts that differ, under a policy | 0 | 0 | yes |" in out.with_suffix(".md").read_text()


@pytest.mark.slow
def test_gpu_check_times_products_under_triton_s_interpreter(tmp_path: Path) -> None:
    """The parts that only a GPU runs, with its numbers' kernels."""
    pytest.importorskip("triton")
    script = load("gpu_check")
    check = script.Check(script.options([*QUICK[:1], "--dtype=float16", *QUICK[2:], f"--out={tmp_path / 'check'}"]))
    check.on_gpu = True
    parts = dict(script.SECTIONS["products"](check))
    found = next(work for part, work in parts.items() if "cuts of qkv" in part)()
    assert found.keys() == {"1 rows", "64 rows"}
    assert all(rows["its TB/s"] >= rows["of it"] > 0 for rows in found.values()), "what is taken is among them"
    assert next(work for part, work in parts.items() if "qkv" in part)()["own"][64] > 0


@pytest.mark.slow
def test_gpu_check_compares_cuts_that_are_chosen_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that says another cut is always faster; choices of before, and files, are as they were."""
    pytest.importorskip("triton")
    device = Device(monkeypatch, lambda weight, bucket, cut: 1e-3 / cut.stages)
    monkeypatch.setattr(cuts, "cache_folder", lambda: tmp_path)
    script = load("gpu_check")
    check = script.Check(script.options([*QUICK[:1], "--dtype=float16", *QUICK[2:], f"--out={tmp_path / 'check'}"]))
    check.on_gpu, target = True, fused(new_model("llama", torch.float16, num_hidden_layers=1))
    monkeypatch.setattr(check, "target", lambda shape: target)
    target.warm_up(1)
    before, files = target.executor.cuts(), sorted(tmp_path.rglob("*.json"))
    monkeypatch.setattr(script, "time", SimpleNamespace(perf_counter=lambda: device.now))
    found = dict(script.SECTIONS["cuts"](check))["toy"]()
    assert all(found["chosen, ms"][rows] < found["table's, ms"][rows] for rows in (1, 16, 64))
    assert found["warm-up, choosing, s"] > found["warm-up, chosen before, s"] > 0
    assert "up to 64 rows: " in found["cuts"]
    assert target.executor.cuts() == before
    assert sorted(tmp_path.rglob("*.json")) == files


def test_a_dry_run_of_gpu_check_names_every_part_and_runs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, collected = load("gpu_check"), list[list[str]]()

    def collecting(command: list[str], **_: Any) -> Any:
        collected.append(command)
        return subprocess.CompletedProcess(command, len(collected) - 1, stdout="tests/gpu/test_device.py: 5\n")

    monkeypatch.setattr(script.subprocess, "run", collecting)
    arguments = ["--dry-run", "--out", str(tmp_path / "check")]
    with pytest.raises(SystemExit) as ended:
        script.main(arguments)
    assert ended.value.code is None
    told = capsys.readouterr().out
    assert {line.partition(",")[0] for line in told.splitlines()[:-1]} == script.SECTIONS.keys()
    assert "rivals, mistral-7b, transformers, static cache and torch.compile" in told
    assert not [*tmp_path.iterdir()]
    with pytest.raises(SystemExit, match="test_device"):
        script.main(arguments)


def test_gpu_check_ends_within_ten_minutes() -> None:
    script = load("gpu_check")
    assert script.LIMITS.keys() == script.SECTIONS.keys()
    assert sum(script.LIMITS.values()) <= 600


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "bits,speed"], "'speed' is none of bandwidth"),
        (["--limits", "speed=3"], "'speed' is none of bandwidth"),
        (["--big", "tiny"], "invalid choice: 'tiny'"),
        (["--device", "cuda"], "no CUDA device here; try --device cpu"),
    ],
)
def test_gpu_check_refuses_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        load("gpu_check").main([*QUICK, "--out", str(tmp_path / "report"), *arguments])
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_weights_that_a_step_reads() -> None:
    """An embedding of its own is looked up, one row of it; a tied one is the head, and read whole."""
    model = random_model("toy")
    whole = sum(weight.nbytes for weight in model.parameters())
    assert weight_bytes(model) == whole - 256 * 64 * 4
    tied = new_model("llama", tie_word_embeddings=True)
    assert weight_bytes(tied) == sum(weight.nbytes for weight in tied.parameters())


def test_oracle_s_figure_has_a_line_per_depth() -> None:
    pytest.importorskip("matplotlib")
    common: dict[str, Any] = {"rows_per_step": 5.0, "row_cost": 1.2, "same": True}
    points = [
        OraclePoint(depth=depth, accuracy=a, tokens_per_step=1 + depth * a, speedup=1 + a, **common)
        for depth in (4, 8)
        for a in (0.5, 1.0)
    ]
    (axes,) = load("bench_engine").draw_oracle(points, "title", "caption").axes
    assert [line.get_label() for line in axes.lines] == ["nothing lost", "depth 4", "depth 8"]


def test_a_machine_without_a_package_is_told_which_wheels_to_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = importlib.import_module("scripts.checkout")
    assert checkout.lacking({"dependencies": ["torch>=2.9", "numpy>=2.0"]}) == []
    found = checkout.lacking({"dependencies": ["torch>=99", "no-such-package>=1"]})
    assert found == [f"torch>=99 (here: {torch.__version__})", "no-such-package>=1"]
    monkeypatch.setattr(checkout, "lacking", lambda project: found)
    with pytest.raises(SystemExit, match=r"(?s)lacks packages.*no-such-package>=1.*pip download --no-deps"):
        checkout.use_checkout()


def test_drafters_of_a_checkout_that_is_not_installed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = importlib.import_module("scripts.checkout")
    expected = drafter_names()
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(checkout, "entry_points", lambda group: ())
    checkout.use_checkout()
    added = list(importlib.metadata.distributions(path=[sys.path[-1]]))
    assert sorted(e.name for e in added[0].entry_points if e.group == "specdec.drafters") == expected


def test_prompts_of_all_kinds_are_put_together_of_what_was_written(tmp_path: Path) -> None:
    """Texts end with a sentence, every kind is there, nothing is left to be filled in; a stranger's file is named."""
    made, run = load("make_prompts"), CliRunner()
    app = typer.Typer()
    app.command()(made.main)
    asked, written, out = tmp_path / "asked.jsonl", tmp_path / "written.jsonl", tmp_path / "kinds.jsonl"
    assert run.invoke(app, ["--out", str(asked)]).exit_code == 0
    questions = read_questions(asked)
    assert len({question.turns for question in questions}) == len(questions) > 100
    sentence = "It stood there for many years, and nobody {who came} by asked why that was so. "
    talks = [
        [{"from": "human", "value": question.turns[0]}, {"from": "gpt", "value": 3 * sentence + "Then the"}]
        for question in questions[:5]
    ]
    written.write_text("".join(json.dumps({"conversations": talk}) + "\n" for talk in talks))
    arguments = ["--articles", str(written), "--translations", "7", "--out", str(out)]
    assert run.invoke(app, arguments).exit_code == 0
    kinds = read_questions(out)
    counts = Counter(question.category for question in kinds)
    assert (counts["summarization"], counts["rag"], counts["translation"]) == (5, 5, 7)
    assert counts["qa"] > 50
    texts = [question.turns[0] for question in kinds]
    assert not any("Then the" in text or "{}" in text or "{s" in text or "{q" in text for text in texts)
    assert sum(sentence.strip() in text for text in texts) == 10
    first = out.read_text()
    assert run.invoke(app, arguments).exit_code == 0
    assert out.read_text() == first
    written.write_text(json.dumps({"conversations": talks[0][1:]}) + "\n")
    assert "conversation 1" in str(run.invoke(app, arguments).exception)


def test_every_mutant_can_be_made() -> None:
    """None of them has lost its place in the source; whether tests notice them takes longer to say."""
    listed = SCRIPTS / "mutants.yaml"
    mutants = load("mutation_check").read_mutants(listed)
    assert len(mutants) > 100
    names = re.findall(r"^ {2}(\S+):", listed.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(names) == len({*names})  # of two with one name, YAML's readers keep the last
    assert not [fault for mutant in mutants if (fault := mutant.fault()) is not None]


def test_the_table_of_shares_keeps_the_rows_of_other_machines() -> None:
    script = load("shares_table")
    begin, end = script.MARKS
    page = f"before\n{begin}| processor |\n|---|\n{end}\nbehind\n"
    numbers = ["10", "90", "1", "2", "3", "4", "5", "6", "7"]
    for row in (["A", "x", "m", *numbers], ["B", "x", "m", *numbers], ["A", "x", "m", "11", *numbers[1:]]):
        page = script.merged(page, [row])
    before, titles, _, *rows, behind = page.replace(begin, "").replace(f"{end}\n", "").splitlines()
    assert (before, behind, len(rows)) == ("before", "behind", 2)
    assert rows[0].startswith("| A | x | m | 11 | 90 |")
    assert rows[1].startswith("| B | x | m | 10 | 90 |")
    assert titles.count("|") == rows[0].count("|") == 13


def test_shares_are_of_the_library_s_call() -> None:
    """What runs before and behind it takes no time by the clock that they are measured with."""
    time = itertools.count(10.0)
    clock = load("shares_table").CallClock(lambda one, other: (next(time), one + other)[1], lambda: next(time))
    assert clock() == 0
    assert clock.timed(2, 3) == 5
    for _ in range(7):
        next(time)
    assert clock() == 2
    assert clock.timed(2, 4) == 6
    assert clock() == 4


def test_the_table_of_activations_keeps_the_rows_of_other_files() -> None:
    script = load("activations_table")
    begin, end = script.MARKS
    page = f"<!-- end -->\nbefore\n{begin}| file |\n|---|\n{end}\nbehind\n"
    cells = script.cells({name: [0.002, 3] for name in script.SYSTEMS}, 4)
    for row in (["A", "1", *cells], ["B", "2", *cells], ["A", "3", *cells]):
        page = script.merged(page, [row])
    *_, before, titles, _, first, second, behind = page.replace(begin, "").replace(f"{end}\n", "").splitlines()
    assert (before, behind) == ("before", "behind")
    assert first.startswith("| A | 3 | 0.500; 75.00 % | 0.500; ")
    assert second.startswith("| B | 2 | ")
    assert titles.count("|") == first.count("|") == 3 + len(script.SYSTEMS)


def test_divergences_of_logits() -> None:
    """Of rows with other sums, and of a vocabulary that is padded on one side."""
    script = load("activations_table")
    chances = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.6, 0.2]])
    other = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.6, 0.2]])
    padded = torch.cat((other.log() + 7, torch.full((2, 1), 50.0)), 1)
    divergence, equal = script.compare(chances.log() - 3, padded)
    assert divergence == pytest.approx(0.25 * math.log(2), rel=1e-5)
    assert equal == 1


@pytest.mark.slow
def test_activations_are_held_against_llama_cpp_s_own_logits(tmp_path: Path) -> None:
    """On a file in float32 both say the same, of all windows and parts; in a process of its own, which it may end."""
    pytest.importorskip("xllamacpp")
    code = (
        "import sys, activations_table as script; script.SYSTEMS = {'llama.cpp': None}; "
        "script.WINDOW, script.PART = 24, 9; print(script.measured(sys.argv[1], 70, 1))"
    )
    file = str(write_gguf(tmp_path / "toy.gguf", new_llama()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(SCRIPTS), str(SCRIPTS.parent)))}
    done = subprocess.run(
        [sys.executable, "-c", code, file], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines()[-1:] == ["['toy.gguf', '72', '0.000; 100.00 %']"], done.stderr


def test_a_race_leaves_out_who_fails_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One engine takes twice our time, one breaks at its second task, and one has no package."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = load("race")
    twice = SimpleNamespace(ask=lambda task: [2.0 * len(task[0]), 0.2])
    asked: list[Any] = []

    def breaks(task: Any) -> list[float]:
        asked.append(task)
        if len(asked) > 1:
            raise OSError("it is broken")
        return [1.0, 1.0]

    engines = {"specdec": SimpleNamespace(ask=lambda task: [1.0 * len(task[0]), 0.1]), "slow": twice}
    engines["broken"] = SimpleNamespace(ask=breaks)
    tasks = {"decoding": ([1], 3), "prompt": ([1] * 10, 2)}
    seconds = script.race(engines, tasks, 3)
    assert "left out broken: it is broken" in capsys.readouterr().out
    assert [len(found["prompt"]) for found in seconds.values()] == [3, 3]
    _, _, ours, slow = script.table(seconds, ["specdec"], 10)
    assert ours == "| specdec | 10.0 |  | 1.0 |  |"
    assert slow == "| slow | 5.0 | 2.00 (2.00 to 2.00) | 0.5 | 2.00 (2.00 to 2.00) |"
    with pytest.raises(OSError, match="No module named 'ik_llama_cpp'"):
        script.Process(Path(sys.executable), "ik_llama", tmp_path / "log", {"file": "a", "threads": 1, "flash": True})
