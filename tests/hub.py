"""A stand-in for the Hugging Face hub: a server on this machine, which huggingface_hub asks in the hub's place."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

Files = Mapping[str, bytes]

_LISTED = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?")
_TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


def files_in(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by their paths in it."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class StandIn:
    """The server.

    Attributes:
        repos: repository -> revision -> its files.
        gated: repositories without access.
        fetched: files that were asked for, of all repositories.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Files]] = {}
        self.gated: set[str] = set()
        self.fetched: set[str] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, repo: str, files: Files, revision: str = "main") -> None:
        self.repos.setdefault(repo, {})[revision] = files

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        asked = _TREE.fullmatch(path) or _LISTED.fullmatch(path) or _FILE.fullmatch(path)
        status, code, content, revision = 404, "RepoNotFound", b"", "main"
        if asked is not None and asked["repo"] in self.repos:
            revision = asked["revision"] or "main"
            known = self.repos[asked["repo"]]
            named = {**{commit_of(name): name for name in known}, **{name: name for name in known}}
            if asked["repo"] in self.gated and asked.re is not _LISTED:
                status, code = 403, "GatedRepo"
            elif revision not in named:
                code = "RevisionNotFound"
            else:
                revision = named[revision]
                status, code, content = self._found(asked, known[revision], revision)
        request.send_response(status)
        if status != 200:
            request.send_header("X-Error-Code", code)
        request.send_header("X-Repo-Commit", commit_of(revision))
        request.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if body:
            request.wfile.write(content)

    def _found(self, asked: re.Match[str], files: Files, revision: str) -> tuple[int, str, bytes]:
        if asked.re is _LISTED:
            names = [{"rfilename": name} for name in files]
            return 200, "", json.dumps({"id": asked["repo"], "sha": commit_of(revision), "siblings": names}).encode()
        if asked.re is _TREE:
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            return 200, "", json.dumps(entries).encode()
        if asked["file"] not in files:
            return 404, "EntryNotFound", b""
        self.fetched.add(asked["file"])
        return 200, "", files[asked["file"]]

    def stand_in(self, patch: pytest.MonkeyPatch, cache: Path) -> None:
        """Have huggingface_hub ask this server, and keep what it gets in a folder."""
        patch.setattr(constants, "ENDPOINT", self.address)
        patch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
