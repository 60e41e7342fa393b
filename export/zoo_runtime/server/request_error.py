"""Errors of requests, in the shape of OpenAI's API."""

from __future__ import annotations

from typing import Any

from zoo.errors import ArtifactError, UsageError, ZooError
from zoo.tokenizers.inputs import LongInputError
from zoo_runtime.generation.choices import ForbiddenError

__all__ = ["RequestError", "as_request_error", "server_error"]

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(Exception):
    """A request that is not answered.

    Args:
        status: HTTP status.
        message: what is wrong.
        code: a name for programs.
        param: the field of the body that is wrong.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:1000]
        self.code = code
        self.param = param
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def as_request_error(error: ZooError, param: str | None = None) -> RequestError:
    """Return the error of a request whose options or input a task has refused."""
    if isinstance(error, UsageError | ArtifactError):
        code = "context_length_exceeded" if isinstance(error, LongInputError) else "invalid_value"
        return RequestError(400, error.what, code, param)
    return server_error(error)


def server_error(error: ZooError) -> RequestError:
    """Return the error of a request that failed after it was accepted: status 400 if its own options are the cause."""
    if isinstance(error, ForbiddenError):
        return RequestError(400, error.what, "invalid_value")
    return RequestError(500, error.what, "failed")
