"""Errors as OpenAI's JSON: each has an HTTP status, names the value, the remedy and, where there is one, the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import CacheError, ConfigError, PromptError, SpecdecError

__all__ = ["ApiError", "told_to_client"]


class ApiError(SpecdecError):
    """An error that a client receives in place of an answer.

    Attributes:
        status: HTTP status.
        param: name of the request's field, or None.
        code: a short code that programs can test, by default that a field's value does not fit.
        headers: additional headers of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.code = "invalid_value" if code is None and param is not None else code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the error."""
        kind = _OPENAI.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def body_of(self, path: str) -> dict[str, Any]:
        """The JSON object of the error in the form of a path's protocol: OpenAI's, or Anthropic's."""
        if not path.startswith("/v1/messages"):
            return self.body
        usual = "invalid_request_error" if self.status < 500 else "api_error"
        return {"type": "error", "error": {"type": _ANTHROPIC.get(self.status, usual), "message": str(self)}}


_OPENAI = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC = {
    **_OPENAI,
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}

_WORDS = {
    "max_new_tokens": "max_tokens",
    "raise cache_bytes": "start the server with a larger --cache-bytes",
    "cache_bytes is": "the server's --cache-bytes is",
}
"""Words of the library -> words of requests and of the server's options, so that a remedy can be followed."""


def _in_words_of_requests(message: str) -> str:
    for ours, theirs in _WORDS.items():
        message = message.replace(ours, theirs)
    return message


def told_to_client(error: Exception) -> ApiError:
    """The error that clients receive; an exception that is not the request's fault becomes a bare status 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError | PromptError):
        message = _in_words_of_requests(str(error))
        first = message.partition(" ")[0]
        return ApiError(message, param=first if "_" in first else None)
    if isinstance(error, CacheError):
        return ApiError(_in_words_of_requests(str(error)), status=503, code="out_of_memory")
    return ApiError(
        "the server failed to decode this request, and its log says why; send it again, or tell its operator",
        status=500,
        code="internal_error",
    )
