"""The report and the commands: a page, its files, a real browser where there is one, exit statuses and messages."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from specdec import Engine
from specdec.bench.audit import audit
from specdec.bench.cli import SHOWN_OF_BATCHES, terminal_table
from specdec.bench.metrics import measure
from specdec.bench.plan import Plan
from specdec.bench.records import RunFolder
from specdec.bench.report import write_report
from specdec.bench.runner import Runner
from specdec.bench.tables import system_table
from specdec.cli import main as cli
from specdec.settings.sampling_params import SamplingParams

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

PROMPTS = "import os\nimport sys\nimport os\nimport\n---\n# <b>&amp;</b>\nclass ATest(unittest.TestCase):\n"


@pytest.fixture(scope="module")
def run(tiny_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A small run with its report, one answer of which failed."""
    place = tmp_path_factory.mktemp("bench")
    questions = place / "mine.txt"
    questions.write_text(PROMPTS)
    plan = Plan(
        questions=str(questions),
        drafters=["none", "prompt_lookup", "lookahead"],
        systems=["transformers"],
        max_new_tokens=12,
        repeats=2,
    )
    folder = Runner(plan, place / "run", command="specdec bench <x>", engine=tiny_engine, cost=False).run()
    target = tiny_engine.target
    manifest = folder.manifest()
    manifest["cost"] = {"context": 20, "seconds": {"1": 0.001, "2": 0.0011, "8": 0.002, "64": 0.01}}
    folder.write_manifest(manifest)
    record = folder.records()[-1]
    folder.append(dataclasses.replace(record, turns=[], error="RuntimeError: <broken>"))
    found = audit(folder.records(), manifest["systems"], target, SamplingParams())
    write_report(folder, found, measure(folder.records(), list(manifest["systems"])))
    return folder


@pytest.mark.slow
def test_files_of_a_report(run: RunFolder) -> None:
    there = {path.name for path in run.path.iterdir()}
    files = {"answers.jsonl", "audit.json", "manifest.json", "metrics.json", "report.html", "spec_bench"}
    assert {name for name in there if "lock" not in name} == files
    metrics = json.loads((run.path / "metrics.json").read_text())
    assert set(metrics["systems"]) == {"none", "prompt_lookup", "lookahead", "transformers"}
    assert json.loads((run.path / "audit.json").read_text())["passed"]
    assert len(list((run.path / "spec_bench").rglob("*.jsonl"))) == 8


def test_tables_have_a_row_per_system_and_the_page_says_how_it_was_made(run: RunFolder) -> None:
    tables, page = run.manifest()["tables"], (run.path / "report.html").read_text()
    assert list(tables) == ["systems", "time", "reach"]
    for table in tables.values():
        assert [row[0] for row in table[1:]] == ["`none`", "`prompt_lookup`", "`lookahead`", "`transformers`"]
        assert {len(row) for row in table} == {len(table[0])}
    shown = {html.unescape(cell) for cell in re.findall(r"<td[^>]*>([^<]*)</td>", page)}
    cells = {cell.strip("`") for table in tables.values() for row in table[1:] for cell in row}
    assert cells - shown <= {""}
    for part in ("torch 2", "transformers 5", "T=0", "12 new tokens"):
        assert part in page


@pytest.mark.slow
def test_report_of_batches(tiny_engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(PROMPTS)
    plan = Plan(
        questions=str(tmp_path / "mine.txt"), drafters=["none"], systems=["transformers", "transformers_lookup"],
        batch=[2], max_new_tokens=4, repeats=1,
    )  # fmt: skip
    folder = Runner(plan, tmp_path / "run", engine=tiny_engine, cost=False).run()
    systems, target = folder.manifest()["systems"], tiny_engine.target
    found, metrics = (
        audit(folder.records(), systems, target, SamplingParams()),
        measure(folder.records(), list(systems)),
    )
    page = write_report(folder, found, metrics).read_text()
    labels = ["none", "none@2", "transformers", "transformers@2", "transformers_lookup"]
    alone = [label for label in labels if "@" not in label]
    reason = "transformers_lookup answers one prompt at a time"
    tables = folder.manifest()["tables"]
    one, several = ([row[0].strip("`") for row in tables[name][1:]] for name in ("systems", "batch"))
    assert (one, several) == (alone, labels)
    assert all("identical" in row[-1] for row in tables["batch"][1:])
    assert f"<li>transformers_lookup@2: {reason}" in page
    assert 'alt="Many at once"' in page
    assert not list((folder.path / "spec_bench").rglob("*2*"))
    out = Console(width=80, record=True, file=io.StringIO())
    texts = {label: verdict.brief for label, verdict in found.systems.items()}
    out.print(terminal_table(system_table(metrics, SHOWN_OF_BATCHES, texts=texts)))
    rows = out.export_text().splitlines()[-len(labels) :]
    assert [row.split()[0] for row in rows] == labels
    assert all(row.endswith("same") for row in map(str.rstrip, rows))


def test_page_needs_nothing_else_and_escapes_the_text(run: RunFolder) -> None:
    page = (run.path / "report.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)|url\(|@import|https?://(?!www\.w3\.org)""", page)
    assert "RuntimeError: &lt;broken&gt;" in page
    assert "specdec bench &lt;x&gt;" in page
    images = re.findall(r'data:image/png;base64,([^"]*)', page)
    assert len(images) == 2
    for data in images:
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert min(image.size) > 100
    traced = re.findall(r'<span(?: class="s\d")? title="lookahead, step \d+: [^"]*">([^<]*)</span>', page)
    answers = {r.question_id: r.turns[0].text for r in run.records() if r.system == "lookahead" and r.repeat == 0}
    assert html.unescape("".join(traced)) == answers[1]


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on this machine")
def test_page_in_a_browser(run: RunFolder, tmp_path: Path) -> None:
    """Images decode, nothing overflows, and steps have colours."""
    page = (run.path / "report.html").read_text()
    check = """<script>
    const spans = document.querySelectorAll(".trace span");
    spans[spans.length - 1].closest("details").open = true;
    const widths = [...document.images].map(image => image.naturalWidth);
    const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
    const table = document.querySelector(".scroll");
    document.title = JSON.stringify({tip: spans[0].title, widths, wide,
      cut: table.scrollWidth - table.clientWidth,
      colours: new Set([...spans].map(span => getComputedStyle(span).backgroundColor)).size});
    </script></body>"""
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", check))
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1100,1000"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [BROWSER, *options, profile, "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r"<title>(.*?)</title>", done.stdout)
    assert found is not None
    seen = json.loads(html.unescape(found[1]))
    assert seen["tip"] == "none, step 1: 1 token from 1 rows"
    assert len(seen["widths"]) == 2
    assert min(seen["widths"]) > 100
    assert seen["wide"] <= 0
    assert seen["cut"] <= 0  # the first table is seen whole
    assert seen["colours"] >= 3  # none, and at least two shades


# ------------------------------------------------------------------------------------------------------------ commands


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Options of a run that takes seconds."""
    questions = tmp_path / "mine.txt"
    questions.write_text(PROMPTS)
    return ["--questions", str(questions), "--drafters", "none,lookahead", "--max-new-tokens", "8", "--threads", "1"]


@pytest.mark.slow
def test_bench_then_audit_then_compare(small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert cli.main(["bench", *small, "--systems", "", "--repeats", "1", "--out", out]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"report: {out}/report.html"
    assert RunFolder(out).manifest()["plan"]["systems"] == []
    assert cli.main(["audit", out]) == 0
    compared = "2 answers were compared with plain decoding's, 0 failed"
    assert capsys.readouterr().out.splitlines() == ["none: identical", "lookahead: identical", compared]
    assert cli.main(["compare", out, out]) == 0
    assert "0 of 6 figures moved beyond noise" in capsys.readouterr().out


@pytest.mark.slow
def test_audit_of_a_wrong_answer_fails(small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert cli.main(["bench", *small, "--systems", "", "--repeats", "1", "--out", str(out)]) == 0
    folder = RunFolder(out)
    record = next(record for record in folder.records() if record.system == "lookahead")
    first = record.turns[0]
    wrong = dataclasses.replace(first, token_ids=[first.token_ids[0] ^ 1, *first.token_ids[1:]])
    folder.append(dataclasses.replace(record, turns=[wrong]))
    capsys.readouterr()
    assert cli.main(["audit", str(out)]) == 1
    assert "BUG: lookahead, question" in capsys.readouterr().out


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--questions", "absent.jsonl"], "there is no question file 'absent.jsonl'"),
        (["bench", "--drafters", "lokahead"], "unknown drafter 'lokahead'; did you mean 'lookahead'?"),
        (["bench", "--systems", "vlm"], "unknown system 'vlm'"),
        (["bench", "--batch", "0"], "bench.batch is [0], of type list; it must be a list of sizes of at least 1"),
        (
            ["bench", "--batch", "1,x"],
            "bench.batch is [1, 'x'], of type list; it must be a list of sizes of at least 1",
        ),
        (["bench", "--batch", f"2,{10**9}"], "a batch of 1000000000 is never full with 42 questions; lower --batch"),
        (["bench", "--set", "batch=4"], "bench.batch is 4, of type int; it must be a list of sizes of at least 1"),
        (["bench", "--categories", "tabels"], "unknown category 'tabels'; did you mean 'tables'?"),
        (["audit", "absent"], "'absent' holds no run"),
        (["compare", "absent", "absent"], "'absent' holds no run"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("module", ["matplotlib", "jinja2"])
def test_without_the_extra_it_says_what_to_install(
    module: str, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    assert cli.main(["bench", *small, "--out", str(tmp_path / "run")]) == 2
    assert "pip install '.[bench]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_command_line_loads_without_the_extra() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = sys.modules['jinja2'] = None\n"
        "import specdec.bench.cli, specdec.bench.report, specdec.bench.runner"
    )
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_nothing_answered_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = tmp_path / "long.txt"
    questions.write_text("x = 1\n" * 3000)
    arguments = ["--questions", str(questions), "--drafters", "none", "--systems", "", "--threads", "1"]
    assert cli.main(["bench", *arguments, "--repeats", "1", "--out", str(tmp_path / "run")]) == 2
    assert "all 1 answers failed; the first: PromptError" in capsys.readouterr().err
