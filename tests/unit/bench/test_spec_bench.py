"""The download of Spec-Bench's questions, from a server on this machine: whole, broken off, wrong, and not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specdec.bench.spec_bench import download_spec_bench
from specdec.engine.questions import find_questions, spec_bench_path
from specdec.errors import ConfigError

GROUPS = ("writing", "translation", "summarization", "qa", "math_reasoning", "rag")


def questions(per_group: int = 80) -> bytes:
    groups = [group for group in GROUPS for _ in range(per_group)]
    lines = [{"question_id": n, "category": group, "turns": ["?"]} for n, group in enumerate(groups)]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@dataclass
class Site:
    """What the server sends: ``content``, of which each answer ends after ``most`` bytes."""

    url: str = ""
    content: bytes = field(default_factory=questions)
    most: int | None = None
    status: int | None = None
    asked: int = 0


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    site = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.asked += 1
            if site.status:
                self.send_error(site.status)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(site.content)))
            self.end_headers()
            self.wfile.write(site.content[: site.most])

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        site.url = f"http://127.0.0.1:{server.server_port}/question.jsonl"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()


def left() -> list[str]:
    """Names of what lies in the cache's folder."""
    return sorted(file.name for file in spec_bench_path().parent.iterdir())


def test_file_is_kept_with_its_checksum(site: Site) -> None:
    path, digest = download_spec_bench(url=site.url)
    assert path.read_bytes() == site.content
    assert find_questions("spec_bench") == path
    assert left() == ["question.jsonl", "question.sha256"]
    assert download_spec_bench(url=site.url) == (path, digest)
    assert site.asked == 1  # the second call had it already
    path.write_text(path.read_text().replace("?", "!"))  # still a good file, but not the one that was fetched
    with pytest.raises(ConfigError, match=r"question.jsonl' has the SHA-256 .*; delete it and fetch it again"):
        download_spec_bench(url=site.url)


def test_broken_connection_leaves_nothing(site: Site) -> None:
    site.most = 1000
    with pytest.raises(ConfigError, match=r"cannot fetch .*IncompleteRead\(1000 bytes read, .*run this again"):
        download_spec_bench(url=site.url)
    assert left() == []
    with pytest.raises(ConfigError, match=r"run `specdec bench --download`"):
        find_questions("spec_bench")


def test_wrong_count_leaves_nothing(site: Site) -> None:
    site.content = questions(per_group=3)
    with pytest.raises(ConfigError, match=r"is not Spec-Bench's file: it has {.*'qa': 3.*and 80 questions are wanted"):
        download_spec_bench(url=site.url)
    assert left() == []


def test_page_in_place_of_the_file_leaves_nothing(site: Site) -> None:
    site.content = b"<html>Please log in</html>"
    with pytest.raises(ConfigError, match="line 1"):
        download_spec_bench(url=site.url)
    assert left() == []


def test_without_the_file_or_a_server_it_says_where_to_put_the_file(site: Site) -> None:
    site.status = 404
    for url in (site.url, "http://127.0.0.1:9/question.jsonl", "nonsense"):
        with pytest.raises(ConfigError, match=rf"cannot fetch {url}: .* save the file as") as caught:
            download_spec_bench(url=url)
        assert str(spec_bench_path()) in str(caught.value)
