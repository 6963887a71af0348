"""Checks that every request passes first: its key, origin, host name and the size of its body; and its id."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection
from secrets import token_hex
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.errors import shown
from specdec.serve.config import is_loopback
from specdec.serve.errors import ApiError

__all__ = ["HEADER_BYTES", "Guard"]

HEADER_BYTES = 64 << 10
"""Limit of a request's headers, in bytes."""

_ID = re.compile(r"[!-~]{1,128}")  # visible ASCII
_OPEN = ("/", "/health", "/ping", "/version")  # these paths reveal nothing of other clients' requests


class Guard:
    """ASGI middleware that refuses a request before its body is read.

    Args:
        app: the application behind it.
        keys: the keys of which clients send one as ``Authorization: Bearer KEY``; empty where they need none. Without
            keys, the host must be a name of this machine: else a foreign web page could point its own host name at it.
        origins: origins of other web pages that may call the server; ``*`` allows any.
        max_body_bytes: limit of a body, in bytes.
        root_path: what a proxy has before the server's paths, such as ``/llm``; it may have taken it off already.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Collection[str], origins: Collection[str], max_body_bytes: int, root_path: str = ""
    ) -> None:
        self._app, self._origins, self._most, self._root = app, frozenset(origins), max_body_bytes, root_path
        self._keys = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if self._root and f"{path}/".startswith(f"{self._root}/"):
            path = path[len(self._root) :] or "/"
        if len(path) > 1 and path.endswith("/"):  # a redirect would lose a POST's body
            path = path.rstrip("/") or "/"
        headers = Headers(scope=scope)
        named = _request_id(headers.get("x-request-id"))
        scope, send = {**scope, "path": path, "specdec.request_id": named}, _with_id(send, named)
        try:
            self._check(scope, headers)
        except ApiError as error:
            answer = JSONResponse(error.body_of(path), error.status, {**error.headers, "Connection": "close"})
            await answer(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if sum(len(name) + len(value) for name, value in headers.raw) > HEADER_BYTES:
            raise ApiError(
                f"the headers have more than {HEADER_BYTES} bytes; send fewer, or shorter ones",
                status=431,
                code="headers_too_large",
            )
        host, origin = headers.get("host", ""), headers.get("origin")
        plain = "host" not in headers and scope["method"] == "GET" and scope["path"] == "/health"  # never a browser's
        if not self._keys and not plain and not is_loopback(_hostname(host)):
            raise ApiError(
                f"the Host header is {shown(host)}, and this server answers programs of its own machine; call it "
                "127.0.0.1 or localhost, or start it with a key",
                status=403,
                code="wrong_host",
            )
        if origin is not None and urlsplit(origin).netloc != host and not self._origins & {origin, "*"}:
            raise ApiError(
                f"the page {shown(origin)} may not call this server; start it with --allow-origin {shown(origin)}"
                + (", which allows every page without an origin, such as a file" if origin == "null" else ""),
                status=403,
                code="wrong_origin",
            )
        if self._keys and scope["path"] not in _OPEN and scope["method"] != "OPTIONS":
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme == "" and "x-api-key" in headers:  # Anthropic's clients
                scheme, given = "bearer", headers["x-api-key"]
            digest, right = _digest(given.strip()), False
            for key in self._keys:  # all of them, so that the time does not say which one it is
                right |= hmac.compare_digest(digest, key)
            if scheme.lower() != "bearer" or not right:
                raise ApiError(
                    "the Authorization header holds no valid key; send 'Bearer KEY' with the key of this server",
                    status=401,
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            scope["specdec.owner"] = digest.hex()
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise ApiError(
                f"the body's Content-Encoding is {shown(coding)}, and this server reads plain JSON; send it "
                "uncompressed, without that header",
                status=415,
                code="unsupported_encoding",
            )
        size = headers.get("content-length", "")
        if size.isdecimal() and int(size) > self._most:
            raise self._too_large(f"{int(size)} bytes")

    def _bounded(self, receive: Receive) -> Receive:
        """The ``receive`` that raises an error once a body exceeds its limit."""
        left = self._most

        async def bounded() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise self._too_large("more")
            return message

        return bounded

    def _too_large(self, size: str) -> ApiError:
        return ApiError(
            f"the body has {size}, and this server takes {self._most} bytes; send less, or start it with a larger "
            "--max-body-bytes",
            status=413,
            code="body_too_large",
        )


def _request_id(given: str | None) -> str:
    """The client's id of a request where it is short and plain, or a new one."""
    return given if given is not None and _ID.fullmatch(given) else f"req-{token_hex(12)}"


def _with_id(send: Send, named: str) -> Send:
    """The ``send`` that adds the request's id to the headers."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", named.encode())]}
        await send(message)

    return sending


def _digest(key: str) -> bytes:
    """The key's hash. All hashes have one length, so a comparison in constant time does not reveal the key's length."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
