"""Errors as OpenAI's JSON: each has a status, says the value and the remedy, and names the field where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import ConfigError, PromptError, SpecdecError

__all__ = ["ApiError", "told_to_client"]


class ApiError(SpecdecError):
    """What a client is answered in place of a text.

    Attributes:
        status: of HTTP.
        kind: OpenAI's ``type``.
        param: the field.
        code: a word for programs.
        headers: more headers of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def told_to_client(error: Exception) -> ApiError:
    """An error of any kind as a client is told it: one of the request's own, or that the server failed, and no more."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError | PromptError):
        return ApiError(str(error))
    return ApiError(
        "the server failed to decode this request, and its log says why; send it again, or tell those who run it",
        status=500,
        kind="server_error",
        code="internal_error",
    )
