"""The scripts that measure: their arithmetic, and that they run, on a toy."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from specdec import Engine
from specdec.bench.oracle import OraclePoint
from specdec.bench.shapes import random_model, weight_bytes
from specdec.drafting.registry import drafter_names
from specdec.engine.questions import read_questions
from specdec.models.transformers_target import TransformersTarget
from specdec.native import library as native
from specdec.native.library import library
from specdec.runners.linear import PackedWeight
from tests.models import new_model, target_of

SCRIPTS = Path(__file__).parents[3] / "scripts"
SOURCE = native.source()


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def test_simulated_ranks_take_as_long_as_the_longest_share() -> None:
    """Two branches of two rows; the second rank then has to run the first one's accepted rows once more."""
    script = load("parallel_scaling")
    steps = [((-1, 0, 1, 0, 3), [0, 1, 2]), ((-1,), [0])]
    assert script.simulate(steps, 1, float, 0.5) == 5 + 1
    assert script.simulate(steps, 2, float, 0.5) == (3 + 0.5) + (1 + 2 + 0.5)


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
        "--drafters none,prompt_lookup --set prompt_lookup.tokens=3 --oracle 0,1 --oracle-depths 3"
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


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize(("change", "needed"), [("codes", "AVX-512"), ("tiles", "AMX")])
def test_layers_are_timed_with_and_without_a_change(
    change: str, needed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, packed = load("ablate_native"), list[PackedWeight]()
    took = PackedWeight.__init__

    def noted(self: PackedWeight, *arguments: Any) -> None:
        took(self, *arguments)
        packed.append(self)

    monkeypatch.setattr(PackedWeight, "__init__", noted)
    options = ["--seconds", "0", "--rows", "1,2", "--change", change]
    monkeypatch.setattr(sys, "argv", ["ablate_native.py", *options])
    if not getattr(library(), f"specdec_{change}")():
        with pytest.raises(SystemExit, match=needed):
            script.main()
        return
    script.main()
    for line, side in zip(capsys.readouterr().out.splitlines(), script.SIDES[change], strict=True):
        assert line.startswith(f"{side}: 1: ")
    half = len(packed) // 2
    if change == "codes":
        assert sum(one.nbytes for one in packed[half:]) < 0.8 * sum(one.nbytes for one in packed[:half])
    else:
        assert not any(one.described.tiles for one in packed[:half])
        assert all(one.described.tiles for one in packed[half:])


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.slow  # it compiles the whole of another file
def test_another_c_file_is_timed_beside_this_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its numbers are the other file's: here of one that rounds otherwise."""
    other, answers = tmp_path / "before.c", list[torch.Tensor]()
    other.write_text(SOURCE.replace("1.f / sqrtf(", "1.000001f / sqrtf("), encoding="utf-8")
    ran = TransformersTarget.forward

    def noted(self: TransformersTarget, *arguments: Any, **options: Any) -> Any:
        output = ran(self, *arguments, **options)
        answers.append(output.logits)
        return output

    script = load("ablate_native")
    monkeypatch.setattr(TransformersTarget, "forward", noted)
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    options = ["--seconds", "0", "--rows", "2", "--sequences", "3", "--context", "3", "--before", str(other)]
    monkeypatch.setattr(sys, "argv", ["ablate_native.py", *options])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": 2: ")[0] for line in lines] == ["before", "after"]
    assert not torch.equal(answers[-1], answers[-2])
    assert answers[-1].shape[0] == 6


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read"),
        ("int main(void) { return 0; }", "has no specdec_run_layers"),
        ("specdec_run_layers( specdec_product( specdec_look_up( specdec_top(", "in another way than this version's"),
        (SOURCE.replace("int specdec_product(", "int specdec_product( no C"), "returned non-zero exit status"),
        (SOURCE.replace("int64_t tiles;", "int64_t other, tiles;"), "in another way than this version's"),
    ],
)
def test_a_c_file_that_is_none_is_told_of(
    text: str | None, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "before.c"
    if text is not None:
        other.write_text(text, encoding="utf-8")
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(sys, "argv", ["ablate_native.py", "--seconds", "0", "--before", str(other)])
    with pytest.raises(SystemExit) as ended:
        load("ablate_native").main()
    assert words in f"{ended.value.code} {capsys.readouterr().err}"


# -- The GPU's benchmark, on a CPU -------------------------------------------------------------------------------------

SIZES = {"shapes": "toy", "contexts": "32,64", "rows": "1,4", "repeats": 1, "prompt-tokens": 16, "max-new-tokens": 12}
QUICK = [*(f"--{name}={value}" for name, value in SIZES.items()), "--device=cpu", "--dtype=float32"]


@pytest.fixture
def gpu_bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    script = load("gpu_bench")
    monkeypatch.setattr(script, "GOAL_CONTEXT", 64)
    monkeypatch.setattr(script, "GOAL_ROWS", 4)
    return script


def run_quick(script: ModuleType, tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run it to its end, or to the key that ends it; returns what it wrote."""
    out = tmp_path / "new" / "report"
    try:
        script.main([*QUICK, "--out", str(out), *arguments])
    finally:
        written = json.loads(out.with_suffix(".json").read_text()), out.with_suffix(".md").read_text()
        assert sorted(file.name for file in out.parent.iterdir()) == ["report.json", "report.md"]
    return written


def test_gpu_benchmark_runs_every_part(gpu_bench: ModuleType, tmp_path: Path) -> None:
    values, page = run_quick(gpu_bench, tmp_path)
    found = values["shapes"]["toy"]
    shapes = [f"{backend}, {shape}" for backend in ("auto", "sdpa", "split") for shape in ("chain", "tree")]
    rows = [f"rows, {context} tokens, {shape}" for context in (32, 64) for shape in shapes]
    assert list(found) == ["model", "warm up", "plain", *rows, "oracle", "head to head, T=0", "head to head, T=0.8"]
    assert not [name for name, part in found.items() if "error" in part]
    assert values["complete"]
    assert "not finished" not in page
    assert all(f"| {goal} |" in page for goal in gpu_bench.GOALS)
    for label in ("none", "prompt_lookup", "lookahead", "kangaroo", "kangaroo, eta 0", "medusa"):
        assert all(found[f"head to head, T={t}"][label]["same"] for t in ("0", "0.8")), label
        assert page.count(f"\n| {label} | ") == 2
    assert found["head to head, T=0"]["transformers_lookup"]["same"]
    assert page.count("\n| 64 |") == 6
    assert values["command"].startswith("python scripts/gpu_bench.py --shapes=toy")


def test_gpu_benchmark_outlives_a_part_that_fails(
    gpu_bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = gpu_bench.measure

    def sometimes(target: Any, **options: Any) -> Any:
        if target.backend == "split":
            raise RuntimeError("no kernel\nfor this")
        return measure(target, **options)

    monkeypatch.setattr(gpu_bench, "measure", sometimes)
    values, page = run_quick(gpu_bench, tmp_path)
    assert values["shapes"]["toy"]["rows, 32 tokens, split, tree"] == {"error": "RuntimeError: no kernel for this"}
    assert "- rows, 32 tokens, split, tree failed: RuntimeError: no kernel for this" in page
    assert "speedup" in values["shapes"]["toy"]["head to head, T=0"]["lookahead"]
    assert values["complete"]


def test_gpu_benchmark_that_is_cut_short_keeps_what_it_has(
    gpu_bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_bench, "oracle", cut)
    with pytest.raises(KeyboardInterrupt):
        run_quick(gpu_bench, tmp_path)
    values = json.loads((tmp_path / "new" / "report.json").read_text())
    assert "ratio" in values["shapes"]["toy"]["rows, 64 tokens, split, tree"]
    assert "oracle" not in values["shapes"]["toy"]
    assert "This run is not finished." in (tmp_path / "new" / "report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "toy,tiny"], "'tiny' is none of toy"),
        (["--backends", "fast"], "'fast' is none of auto"),
        (["--dtype", "half"], "'half' is none of float64"),
        (["--device", "cuda"], "no CUDA device here; try the parts with --device cpu"),
    ],
)
def test_gpu_benchmark_refuses_before_it_starts(
    gpu_bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        gpu_bench.main([*QUICK, "--out", str(tmp_path / "report"), *arguments])
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_goals_are_read_off_the_figures(gpu_bench: ModuleType) -> None:
    found = {
        "plain": {"bandwidth_share": 0.9},
        "rows, 64 tokens, a": {"context": 64, "seconds": {1: 1.0, 4: 1.4}, "ratio": {}},
        "rows, 64 tokens, b": {"context": 64, "seconds": {1: 1.2, 4: 1.3}, "ratio": {}},
        "rows, 32 tokens, a": {"context": 32, "seconds": {1: 1.0, 4: 1.0}, "ratio": {}},
        "oracle": {"points": [{"kept": 0.95}, {"kept": 0.91}]},
    }
    values = gpu_bench.goals(found)
    assert list(values.values()) == [0.9, 1.3, 0.91]
    assert [gpu_bench.good(values[goal], *gpu_bench.GOALS[goal]) for goal in values] == [True, False, True]
    assert gpu_bench.goals({"plain": {"error": "x"}, "oracle": {"error": "x"}}) == {}


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


def test_a_text_is_played_back_without_forwards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, rows = load("host_time"), list[int]()
    ran = TransformersTarget.forward

    def noted(self: TransformersTarget, block: Any, **options: Any) -> Any:
        rows.append(block.rows)
        return ran(self, block, **options)

    monkeypatch.setattr(TransformersTarget, "forward", noted)
    sides, measured = list[int](), script.host_time

    def host_time(*arguments: Any) -> Any:
        rows.clear()
        found = measured(*arguments)
        sides.append(len(rows))
        return found

    monkeypatch.setattr(script, "host_time", host_time)
    options = [
        "--batch",
        "1,2",
        "--drafters",
        "auto,kangaroo",
        "--limit",
        "3",
        "--max-new-tokens",
        "6",
        "--repeats",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", ["host_time.py", *options])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"{name}, {size} at once" for size in (1, 2) for name in ("auto", "kangaroo")
    ]
    assert all(re.fullmatch(r".*: by the clock \d+, played back \d+ us", line) for line in lines)
    assert all(sides[::2])
    assert sides[1::2] == [0] * 8


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--batch", "x"], "--batch is 'x'; it must be sizes of at least 1"),
        (["--batch", "1,0"], "--batch is '1,0'; it must be sizes of at least 1"),
        (["--limit", "0"], "--limit is 0; it must be at least 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0; it must be at least 1"),
        (["--drafters", "nope"], "unknown drafter 'nope'"),
    ],
)
def test_host_time_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["host_time.py", *options])
    with pytest.raises(SystemExit):
        load("host_time").main()
    assert told in capsys.readouterr().err


def test_other_steps_than_those_that_were_kept_are_an_error() -> None:
    script, engine = load("host_time"), Engine(target_of("llama"))
    played = script.Played(engine.target)
    with played.kept():
        engine.generate([1, 2, 3, 4], 3)
    with pytest.raises(SystemExit, match="a forward of 4 rows had 3 before"), played.again():
        engine.generate([1, 2, 3, 4, 5], 3)


def test_every_mutant_can_be_made() -> None:
    """None of them has lost its place in the source; whether tests notice them takes longer to say."""
    mutants = load("mutation_check").read_mutants(SCRIPTS / "mutants.yaml")
    assert len(mutants) > 100
    assert not [fault for mutant in mutants if (fault := mutant.fault()) is not None]
