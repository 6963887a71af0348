"""Metrics, answer files and comparisons, on records whose figures can be worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.bench.compare import compare_runs
from specdec.bench.metrics import OVERALL, Metrics, measure, ratio_interval, repeat_share
from specdec.bench.records import AnsweredTurn, Record, RunFolder
from specdec.bench.report import plots
from specdec.bench.spec_bench import answer_of, write_answers
from specdec.errors import ConfigError


def turn(lengths: Sequence[int], wall: float, prefill: float = 0.0, **more: Any) -> AnsweredTurn:
    tokens = list(range(sum(lengths)))
    values: dict[str, Any] = {
        "prompt_ids": [1, 2],
        "token_ids": tokens,
        "text": " text ",
        "finish_reason": "length",
        "accept_lengths": list(lengths),
        "rows": [],
        "seconds": {"wall": wall, "prefill": prefill},
        "retokenized": len(tokens),
    }
    return AnsweredTurn(**{**values, **more})


def record(
    system: str, question: int, *turns: AnsweredTurn, category: str = "qa", repeat: int = 0, error: str | None = None
) -> Record:
    return Record(question_id=question, category=category, system=system, repeat=repeat, turns=list(turns), error=error)


def test_counts_of_steps_by_hand() -> None:
    row = measure([record("fast", 1, turn([1, 3, 4], 1.0, rows=[1, 5, 6]))], ["fast"]).rows["fast"][OVERALL]
    assert (row.tokens, row.steps) == (8, 3)
    assert row.tokens_per_step is not None
    assert row.tokens_per_step.value == pytest.approx(8 / 3)
    assert row.ctar[:4] == pytest.approx([2 / 3, 2 / 3, 1 / 3, 0])
    assert row.acceptance[:5] == [pytest.approx(2 / 3), 1, 0.5, 0, None]
    assert row.histogram == {1: 1, 3: 1, 4: 1}
    assert row.rows_per_step == 4


def test_speedup_is_of_medians_over_questions_that_both_answered() -> None:
    records = [
        *(record("none", 1, turn([1] * 10, wall), repeat=n) for n, wall in enumerate((9.0, 10.0, 90.0))),
        *(record("fast", 1, turn([5, 5], wall), repeat=n) for n, wall in enumerate((4.0, 5.0, 0.1))),
        record("none", 2, turn([1] * 10, 1.0)),
        record("fast", 2, error="RuntimeError: no"),
    ]
    row = measure(records, ["none", "fast"]).rows["fast"][OVERALL]
    assert row.speedup is not None
    assert row.speedup.value == pytest.approx(10 / 4)  # medians 10 and 4; question 2 does not count
    assert (row.answered, row.failed) == (3, 1)


def test_unequal_texts_are_compared_by_tokens_per_second() -> None:
    records = [record("none", 1, turn([1] * 10, 10.0)), record("fast", 1, turn([4, 4], 2.0))]
    row = measure(records, ["none", "fast"]).rows["fast"][OVERALL]
    assert row.speedup is not None
    assert row.speedup.value == pytest.approx((8 / 2) / (10 / 10))


def test_latency_and_what_is_outside_of_forwards_by_hand() -> None:
    seconds = {"wall": 6.0, "prefill": 1.0, "target": 3.0, "draft": 0.5}
    turns = [turn([1, 2, 1], 6.0, seconds=seconds, times=[first, first + 1.0, first + 3.0]) for first in (2.0, 4.0)]
    records = [
        record("none", 1, turns[0]),
        record("none", 1, turns[1], repeat=1),
        record("other", 1, turn([1, 1], 2.0)),
    ]
    metrics = measure(records, ["none", "other"])
    row = metrics.rows["none"][OVERALL]
    assert row.first_seconds == pytest.approx([3.0, 3.9])
    gaps = [0.5, 0.5, 2.0] * 2  # the second step's two tokens share its second
    assert row.between_seconds == pytest.approx(np.percentile(gaps, [50, 95]).tolist())
    assert row.rest_seconds == pytest.approx((6 - 1 - 3 - 0.5) / 3)
    other = metrics.rows["other"][OVERALL]
    assert (other.first_seconds, other.between_seconds, other.rest_seconds) == ([], [], None)


def batches() -> Metrics:
    """Plain decoding is three times as fast with two at once, the rival twice, and another takes one at a time."""
    walls = {"none": 12.0, "none@2": 4.0, "transformers": 24.0, "transformers@2": 12.0, "alone": 8.0}
    return measure([record(name, 1, turn([1] * 12, wall)) for name, wall in walls.items()], list(walls))


def test_batches_are_held_against_plain_decoding_one_by_one_and_a_rival_of_their_size() -> None:
    rows = {name: groups[OVERALL] for name, groups in batches().rows.items()}
    speedups = {name: (row.speedup and row.speedup.value, row.speedup_rival) for name, row in rows.items()}
    assert {name: (plain, rival and rival.value) for name, (plain, rival) in speedups.items()} == {
        "none": (1, 2),
        "none@2": (3, 3),
        "transformers": (0.5, 1),
        "transformers@2": (1, 1),
        "alone": (1.5, 3),
    }


def test_the_figure_of_batches_has_a_line_per_system() -> None:
    pytest.importorskip("matplotlib")
    drawn = plots(batches(), {})
    (axes,) = drawn["batch"].axes
    points = {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines[:3]}
    assert points == {"none": ([1, 2], [1, 3]), "transformers": ([1, 2], [0.5, 1]), "alone": ([1], [1.5])}
    assert [label.get_text() for label in drawn["systems"].axes[0].get_yticklabels()] == ["transformers", "alone"]
    assert "batch" not in plots(batches().one_by_one(), {})


def test_prefill_is_apart() -> None:
    records = [record("none", 1, turn([1] * 10, 12.0, 2.0)), record("fast", 1, turn([5, 5], 7.0, 2.0))]
    row = measure(records, ["none", "fast"]).rows["fast"][OVERALL]
    assert row.speedup is not None
    assert row.decode_speedup is not None
    assert row.speedup.value == pytest.approx(12 / 7)
    assert row.decode_speedup.value == pytest.approx(10 / 5)
    assert row.decode_tokens_per_second == pytest.approx(2)


def test_shares_add_up_to_the_wall_clock() -> None:
    seconds = {"wall": 10.0, "prefill": 1.0, "draft": 2.0, "target": 5.0, "rest": 1.5}
    row = measure([record("none", 1, turn([1], 10.0, seconds=seconds))], ["none"]).rows["none"][OVERALL]
    assert row.shares == pytest.approx({"prefill": 0.1, "draft": 0.2, "target": 0.5, "rest": 0.2})


def test_spec_bench_counts_the_baseline_by_its_text() -> None:
    """Means of the questions' speeds; the baseline's tokens are those of its text less one."""
    records = [
        record("none", 1, turn([1] * 10, 10.0, retokenized=9)),
        record("none", 2, turn([1] * 10, 5.0, retokenized=11)),
        record("fast", 1, turn([5, 5], 5.0)),
        record("fast", 2, turn([5, 5], 2.0)),
    ]
    row = measure(records, ["none", "fast"]).rows["fast"][OVERALL]
    mine, base = (10 / 5 + 10 / 2) / 2, ((9 - 1) / 10 + (11 - 1) / 5) / 2
    assert row.spec_bench["speedup"] == pytest.approx(mine / base)
    assert row.speedup is not None
    assert row.speedup.value == pytest.approx(15 / 7)


def test_answers_that_took_no_time_have_no_speed() -> None:
    records = [record(system, 1, turn([1] * 10, 0.0)) for system in ("none", "fast")]
    row = measure(records, ["none", "fast"]).rows["fast"][OVERALL]
    assert (row.tokens_per_second, row.speedup, row.spec_bench) == (None, None, {})


def test_groups_join_mt_bench() -> None:
    records = [
        record("none", 1, turn([1, 1], 1.0), category="writing"),
        record("none", 2, turn([1], 1.0), category="math"),
        record("none", 3, turn([1], 1.0), category="rag"),
    ]
    metrics = measure(records, ["none"])
    assert metrics.groups == ["mt_bench", "rag"]
    assert [metrics.rows["none"][group].tokens for group in ("mt_bench", "rag", OVERALL)] == [3, 1, 4]


def test_an_interval_is_the_same_every_time_and_covers() -> None:
    # The interval of a mean is about two standard errors to each side.
    values = np.random.default_rng(0).normal(10, 1, 400)
    found = ratio_interval([list(values)], [[1.0] * 400])
    assert found is not None
    assert found == ratio_interval([list(values)], [[1.0] * 400])
    assert found.low < found.value < found.high
    assert found.high - found.low == pytest.approx(4 * values.std() / 20, rel=0.15)


def test_repeat_share() -> None:
    assert repeat_share(list(range(100))) == 0
    assert repeat_share([*range(8), *range(8)]) == 0.5
    assert repeat_share([]) == 0


# ----------------------------------------------------------------------------------------------------- Spec-Bench files


def test_answer_file_reads_as_spec_bench_reads_it(tmp_path: Path) -> None:
    records = [
        record("my drafter", 81, turn([1, 3], 2.0), turn([2, 2], 3.0), category="writing"),
        record("my drafter", 82, error="RuntimeError: no"),
        record("my drafter", 81, turn([1, 3], 2.5), turn([2, 2], 3.5), category="writing", repeat=1),
    ]
    files = write_answers(records, tmp_path, "org/model")
    assert [str(file.relative_to(tmp_path)) for file in files] == [
        "run_1/model-my-drafter.jsonl",
        "run_2/model-my-drafter.jsonl",
    ]
    (line,) = files[0].read_text().splitlines()
    answer = json.loads(line)
    assert set(answer) == {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "turns": ["text", "text"],
        "decoding_steps": [2, 2],
        "new_tokens": [4, 4],
        "wall_time": [2.0, 3.0],
        "accept_lengths": [1, 3, 2, 2],
    }
    assert answer_of(records[0], "m")["answer_id"] != answer_of(records[2], "m")["answer_id"]


# ------------------------------------------------------------------------------------------------------------ compare


def folder_of(path: Path, speed: float, *, fingerprint: str = "a", asked: int = 20, answered: int = 20) -> RunFolder:
    """A run whose drafter is ``speed`` times as fast as plain decoding, give or take a percent."""
    noise = np.random.default_rng(round(speed * 1000)).normal(1, 0.01, (2, answered))
    about = {"ours": True, "lossy": False, "comparable": True, "options": {}}
    folder = RunFolder(path)
    folder.write_manifest(
        {
            "plan": {"temperature": 0.0, "max_new_tokens": 12, "repeats": 1, "model": "tiny"},
            "model": {"name": "tiny", "dtype": "float32", "fingerprint": fingerprint},
            "questions": {"file": "q.jsonl", "sha256": "s", "asked": asked},
            "systems": {"none": about, "fast": about},
            "left_out": {},
            "environment": {
                "commit": path.name,
                "uncommitted_changes": False,
                "versions": {"torch": "2", "transformers": "5"},
                "device": "cpu",
                "cuda": None,
                "cpu": "abacus",
                "threads": 1,
            },
            "runs": [{"command": ""}],
        }
    )
    for question in range(answered):
        folder.append(record("none", question, turn([1] * 12, 12.0 * noise[0, question])))
        folder.append(record("fast", question, turn([4, 4, 4], 12.0 / speed * noise[1, question])))
    return folder


def test_compare_tells_a_change_from_noise(tmp_path: Path) -> None:
    a, same, faster = (folder_of(tmp_path / name, speed) for name, speed in (("a", 2.0), ("b", 2.001), ("c", 2.2)))
    still = [c for c in compare_runs(a, same).changes if c.system == "fast" and c.group == OVERALL]
    assert [c.figure for c in still] == ["x plain", "tokens/step"]
    assert not any(c.moved for c in still)
    speed, steps = [c for c in compare_runs(a, faster).changes if c.system == "fast" and c.group == OVERALL]
    assert speed.moved
    assert speed.ratio.value == pytest.approx(1.1, abs=0.02)
    assert not steps.moved
    assert compare_runs(a, faster).notes == ["commit: 'a' and 'c'"]


@pytest.mark.parametrize("speed", [1.3, 1.7, 2.1, 2.3, 2.9, 3.1])
def test_a_run_beside_itself_has_not_moved(tmp_path: Path, speed: float) -> None:
    """Not even by the rounding of one question's products."""
    run = folder_of(tmp_path / "a", speed, asked=1, answered=1)
    assert not any(change.moved for change in compare_runs(run, run).changes)


def test_compare_refuses_another_model_and_missing_answers(tmp_path: Path) -> None:
    a = folder_of(tmp_path / "a", 2.0)
    with pytest.raises(ConfigError, match=r"different models: tiny \(a\) and tiny \(b\)"):
        compare_runs(a, folder_of(tmp_path / "b", 2.0, fingerprint="b"))
    with pytest.raises(ConfigError, match="plain answers to 7 of 20 questions"):
        compare_runs(a, folder_of(tmp_path / "c", 2.0, answered=7))
    with pytest.raises(ConfigError, match="holds no run"):
        compare_runs(a, RunFolder(tmp_path / "absent"))


def test_compare_leaves_out_a_question_that_fails(tmp_path: Path) -> None:
    """It fails again where the bench is run again, so the others have to do."""
    a = folder_of(tmp_path / "a", 2.0)
    b = folder_of(tmp_path / "b", 2.0, asked=20, answered=19)
    b.append(record("none", 19, error="PromptError: too long"), record("fast", 19, error="PromptError: too long"))
    found = compare_runs(a, b)
    assert (found.answered, found.asked) == (19, 20)
    assert "1 answers of none failed in B; question 19: PromptError: too long" in found.notes
    assert [change.system for change in found.changes].count("fast") == 4


def test_compare_refuses_runs_without_an_answer(tmp_path: Path) -> None:
    runs = [folder_of(tmp_path / name, 2.0, asked=1, answered=0) for name in "ab"]
    for run in runs:
        run.append(record("none", 0, error="PromptError: too long"))
    with pytest.raises(ConfigError, match=r"answered no question in both .* there is nothing to compare"):
        compare_runs(*runs)
