"""What a file is, for all that read data: the same records, or the same text, however it is called and encoded."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from drafters.rest.datastore import read_documents
from specdec.cli.answer_file import read_prompts
from specdec.engine.questions import read_questions
from specdec.errors import ConfigError
from specdec.models.loading import embedded_model
from specdec.settings.formats import read_content
from tests.tiers import each_once
from training.data import TextConfig, read_samples
from training.distill import prompts_of
from training.skips import Skips

TALKS: list[Any] = [
    {"conversations": [{"from": "human", "value": f"Grüße {n}?"}, {"from": "gpt", "value": f"Ja {n} – 你好"}]}
    for n in range(3)
]
ASKED: list[Any] = [{"question_id": n, "category": "qa", "turns": [f"Warum {n}? 😀", "Und?"]} for n in range(3)]
PROMPTS: list[Any] = [{"prompt": f"def f{n}(ä):\n"} for n in range(3)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_model())


def trained(path: Path, tokenizer: Any) -> Any:
    return list(read_samples([str(path)], tokenizer, TextConfig(), Skips()))


def asked_of(path: Path, tokenizer: Any) -> Any:
    return [(prompt.turns, prompt.format) for prompt in prompts_of([str(path)], tokenizer, turns="all")]


READERS: dict[str, tuple[Callable[[Path, Any], Any], list[Any]]] = {
    "training": (trained, TALKS),
    "distillation": (asked_of, TALKS),
    "distillation of questions": (asked_of, ASKED),
    "bench": (lambda path, _: read_questions(path), ASKED),
    "bench of prompts": (lambda path, _: [(one.turns, one.format) for one in read_questions(path)], PROMPTS),
    "prompts": (lambda path, _: read_prompts(path), PROMPTS),
    "datastore": (lambda path, _: list(read_documents([path])), TALKS),
    "datastore of a folder": (lambda path, _: list(read_documents([path.parent])), TALKS),
}


def listed(records: list[Any]) -> str:
    return json.dumps(records, ensure_ascii=False)


def lined(records: list[Any]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def one_each(records: list[Any]) -> str:
    return "[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n"


FORMS: dict[str, tuple[str, Callable[[list[Any]], bytes]]] = {
    "a list": ("data.json", lambda records: listed(records).encode()),
    "a list over many lines": ("data.json", lambda records: json.dumps(records, indent=2).encode()),
    "a list, one each line": ("data.json", lambda records: one_each(records).encode()),
    "a list called lines": ("data.jsonl", lambda records: listed(records).encode()),
    "lines called a list": ("data.json", lambda records: lined(records).encode()),
    "ndjson": ("data.ndjson", lambda records: lined(records).encode()),
    "capitals": ("DATA.JSON", lambda records: listed(records).encode()),
    "capital lines": ("DATA.JsonL", lambda records: lined(records).encode()),
    "a mark": ("data.json", lambda records: listed(records).encode("utf-8-sig")),
    "a mark before lines": ("data.jsonl", lambda records: lined(records).encode("utf-8-sig")),
    "utf-16": ("data.json", lambda records: listed(records).encode("utf-16")),
    "utf-16, the other way": ("data.jsonl", lambda records: b"\xfe\xff" + lined(records).encode("utf-16-be")),
    "utf-32": ("data.jsonl", lambda records: lined(records).encode("utf-32")),
    "windows": ("data.jsonl", lambda records: lined(records).replace("\n", "\r\n").encode("utf-8-sig")),
    "no newline at the end": ("data.jsonl", lambda records: lined(records)[:-1].encode()),
    "empty lines": ("data.jsonl", lambda records: ("\n \n" + lined(records).replace("\n", "\n\n")).encode()),
    "no suffix": ("data", lambda records: lined(records).encode()),
    "another suffix": ("data.json.bak", lambda records: listed(records).encode()),
    "a suffix of text": ("data.txt", lambda records: lined(records).encode()),
    "a suffix of text, a list": ("data.md", lambda records: listed(records).encode("utf-8-sig")),
}


@pytest.mark.parametrize("reader", READERS)
def test_records_however_they_are_called_and_encoded(reader: str, tokenizer: Any, tmp_path: Path) -> None:
    read, records = READERS[reader]
    (tmp_path / "plain").mkdir()
    plain = tmp_path / "plain" / "data.jsonl"
    plain.write_text(lined(records), encoding="utf-8")
    wanted = read(plain, tokenizer)
    assert len(wanted) == 3
    for number, (form, (name, encode)) in enumerate(FORMS.items()):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        path.write_bytes(encode(records))
        found = read(path, tokenizer)
        assert found == wanted, form


@pytest.mark.parametrize("reader", READERS)
def test_a_record_alone_is_one(reader: str, tokenizer: Any, tmp_path: Path) -> None:
    read, records = READERS[reader]
    for number, (name, indent) in enumerate(
        (("a.json", None), ("b.JSONL", None), ("c.json", 2), ("d.txt", 2), ("e", 2))
    ):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        path.write_text(json.dumps(records[0], indent=indent), encoding="utf-8-sig")
        assert len(read(path, tokenizer)) == 1, name


TEXT = "def f(x):\n    return x  # ä – 😀\n"
PROSE: dict[str, tuple[str, bytes]] = {
    "capitals": ("TEXT.TXT", TEXT.encode()),
    "markdown": ("text.md", TEXT.encode()),
    "python": ("text.py", TEXT.encode()),
    "a mark": ("text.txt", TEXT.encode("utf-8-sig")),
    "utf-16": ("text.txt", TEXT.encode("utf-16")),
    "windows": ("text.py", TEXT.replace("\n", "\r\n").encode("utf-8-sig")),
    "an old Mac": ("text.rst", TEXT.replace("\n", "\r").encode()),
}


@pytest.mark.parametrize("form", PROSE)
def test_text_however_it_is_called_and_encoded(form: str, tmp_path: Path) -> None:
    name, data = PROSE[form]
    (tmp_path / name).write_bytes(data)
    assert read_content(tmp_path / name) == TEXT
    assert list(read_documents([tmp_path / name])) == list(read_documents([tmp_path])) == [TEXT]
    assert [question.turns for question in read_questions(tmp_path / name)] == [(TEXT,)]


@pytest.mark.parametrize(
    "text",
    [
        "[Verse 1]\nLa\n", "{{ name }} went\n", "{x} is\n", "[1] A note\n", '["a", b]', '{ "quoted" }', "[x", "7\n",
        '"a"\n', "", "null", "x: 1\n{}\ny\n", '"a": 1\nb\n', '---\n{"a": 1}\n---\nx',
    ],
)  # fmt: skip
def test_text_that_is_no_json_whatever_it_begins_with(text: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text)
    assert read_content(path) == text


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.json", "[]")
    return file.getvalue()


REFUSED: dict[str, tuple[str, bytes, str]] = {
    "gzip": ("data.json.gz", gzip.compress(lined(TALKS).encode()), "it is compressed by gzip; unpack it"),
    "gzip called lines": ("data.jsonl", gzip.compress(lined(TALKS).encode()), "it is compressed by gzip; unpack it"),
    "zip": ("data.zip", zipped(), "it is a zip archive; unpack it"),
    "parquet": ("data.parquet", b"PAR1\x15\x04\x00\xff", "it is a Parquet table; make JSON lines of it"),
    "a table": ("DATA.CSV", b"question,answer\nWhy?,So.\n", "is a table, which is not read"),
    "junk": ("data.txt", bytes(range(256)), "cannot read"),
    "zeros": ("data.txt", bytes(64), "it holds bytes of zero"),
    "utf-16 without a mark": ("data.txt", "Why?".encode("utf-16-le"), "UTF-16 without a byte order mark"),
    "half of utf-16": ("data.txt", b"\xff\xfea", "truncated"),
    "latin": ("data.txt", b"caf\xe9", "cannot read"),
    "text of no name": ("data", b"Once upon a time", "call it 'data.txt'"),
    "text of another name": ("data.dat", b"Once upon a time", "call it 'data.txt'"),
    "text called JSON": ("data.Json", b"Once upon a time", "is no JSON"),
    "nothing called JSON": ("data.json", b"", "is empty; it must hold a list"),
    "nothing of no name": ("data", b"", "does not say what else it is"),
    "a list cut short": ("data.json", one_each(TALKS).encode()[:-40], "is no JSON"),
    "a list cut short, called text": ("data.txt", listed(TALKS).encode()[:-40], "text that only begins as JSON does"),
    "many lines cut short, called text": ("data.txt", json.dumps(TALKS, indent=1).encode()[:-40], "is no JSON"),
    "a broken line": ("data.jsonl", (lined(TALKS) + '{"conv\n' + lined(TALKS)).encode(), "line 4"),
    "a broken line, called text": ("a_data.txt", (lined(TALKS) + '{"conv\n' + lined(TALKS)).encode(), "line 4 is no"),
    "a broken first line, called text": ("data.txt", ("{conv\n" + lined(TALKS)).encode(), "line 1 is no JSON"),
}  # fmt: skip


@pytest.mark.parametrize(("form", "reader"), each_once(REFUSED, READERS))
def test_what_is_neither_is_refused_by_name(form: str, reader: str, tokenizer: Any, tmp_path: Path) -> None:
    name, data, words = REFUSED[form]
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_content(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    if reader == "datastore of a folder":
        return  # which may hold anything, as text
    if reader == "training" and "a broken" in form:  # which leaves a few out
        skips = Skips()
        assert len(list(read_samples([str(path)], tokenizer, TextConfig(), skips))) >= 3
        assert [line.startswith("1 skipped: a line that is no JSON") for line in skips.lines()] == [True]
        return
    with pytest.raises(ConfigError, match=r"DATA|data"):
        READERS[reader][0](path, tokenizer)


def test_a_folder_of_anything(tmp_path: Path) -> None:
    """Texts are texts, conversations are their answers, and pictures are nothing."""
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\xff")
    (tmp_path / "b.foo").write_bytes(b"\xef\xbb\xbfany text")
    (tmp_path / "c.json").write_text('{"name": "package"}')
    (tmp_path / "d.NDJSON").write_text(lined(TALKS))
    (tmp_path / "e.json").write_text("[broken")
    answers = [turn["conversations"][1]["value"] for turn in TALKS]
    assert list(read_documents([tmp_path])) == ["any text", '{"name": "package"}', *answers, "[broken"]
