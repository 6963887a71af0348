"""Checks that every request passes first: its key, origin, host name and the size of its body."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
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

_OPEN = ("/", "/health", "/version")  # these paths reveal nothing of other clients' requests


class Guard:
    """ASGI middleware that refuses a request before its body is read.

    Args:
        app: the application behind it.
        key: the key that clients send as ``Authorization: Bearer KEY``; None where they need none. Without a key, the
            host must be a name of this machine: else a foreign web page could point its own host name at it.
        origins: origins of other web pages that may call the server; ``*`` allows any.
        max_body_bytes: limit of a body, in bytes.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, origins: Collection[str], max_body_bytes: int) -> None:
        self._app, self._origins, self._most = app, frozenset(origins), max_body_bytes
        self._key = None if key is None else _digest(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if len(scope["path"]) > 1 and scope["path"].endswith("/"):  # a redirect would lose a POST's body
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        headers = Headers(scope=scope)
        try:
            self._check(scope, headers)
        except ApiError as error:
            answer = JSONResponse(error.body, error.status, {**error.headers, "Connection": "close"})
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
        if self._key is None and not is_loopback(_hostname(host)):
            raise ApiError(
                f"the Host header is {shown(host)}, and this server answers programs of its own machine; call it "
                "127.0.0.1 or localhost, or start it with a key",
                status=403,
                kind="permission_error",
                code="wrong_host",
            )
        if origin is not None and urlsplit(origin).netloc != host and not self._origins & {origin, "*"}:
            raise ApiError(
                f"the page {shown(origin)} may not call this server; start it with --allow-origin {shown(origin)}",
                status=403,
                kind="permission_error",
                code="wrong_origin",
            )
        if self._key is not None and scope["path"] not in _OPEN and scope["method"] != "OPTIONS":
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(_digest(given.strip()), self._key):
                raise ApiError(
                    "the Authorization header holds no valid key; send 'Bearer KEY' with the key of this server",
                    status=401,
                    kind="authentication_error",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
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


def _digest(key: str) -> bytes:
    """The key's hash. All hashes have one length, so a comparison in constant time does not reveal the key's length."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
