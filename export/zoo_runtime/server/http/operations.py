"""Operations: the routes of the server, declared once for the application and for its OpenAPI document."""

from __future__ import annotations

import errno
import math
import secrets
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from zoo.errors import ZooError
from zoo_runtime.server.engines.work import FullError
from zoo_runtime.server.http.bodies import Body
from zoo_runtime.server.http.observe import CLIENT, FACTS, LEFT, log
from zoo_runtime.server.http.responses import LeftError
from zoo_runtime.server.request_error import RequestError, as_request_error

__all__ = ["Failed", "Handler", "Operation", "route"]

Handler = Callable[[Request], Awaitable[Response]]
Failed = Callable[[RequestError], Response]
"""Makes the response of a request that is not answered, in the shape of a protocol."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A route with one method."""

    method: Literal["GET", "POST"]
    path: str
    """The path, with parameters in braces."""
    handler: Handler
    summary: str
    body: type[Body] | None = None
    """The body, if there is one."""
    binary: bool = False
    """Whether the body may also be binary."""
    answers: Mapping[str, Mapping[str, Any]] | None = None
    """JSON schemas of the answer, by content type; by default any JSON object."""
    public: bool = False
    """Whether it can be used without a key."""


def route(operation: Operation, failed: Failed, keys: Sequence[bytes]) -> Route:
    """Return the route of an operation, whose exceptions become errors of the protocol, and which checks the key.

    Args:
        operation: its declaration.
        failed: the errors of its protocol.
        keys: bearer tokens of which requests must have one, if there are any.
    """

    async def call(request: Request) -> Response:
        try:
            if not operation.public:
                request.scope[CLIENT] = _check_key(request, keys)
            return await operation.handler(request)
        except (LeftError, ClientDisconnect):
            request.scope[FACTS]["status"] = LEFT
            return Response(status_code=LEFT)
        except Exception as error:
            return failed(_refusal(error))

    return Route(operation.path, call, methods=[operation.method])


def _refusal(error: Exception) -> RequestError:
    """Return the error of a request whose handler has raised an exception."""
    if _lacks_files(error):
        wait = {"retry-after": "1"}
        return RequestError(503, "too many files are open, try again later", "overloaded", headers=wait)
    if isinstance(error, RequestError):
        return error
    if isinstance(error, FullError):
        wait = {"retry-after": str(math.ceil(error.seconds))}
        return RequestError(429, "the queue is full, try again later", "queue_full", headers=wait)
    if isinstance(error, ZooError):
        return as_request_error(error)
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename}:{frame.lineno}" for frame in frames[-5:]]
    log("exception", kind=type(error).__name__, places=places)
    return RequestError(500, "internal error", "internal_error")


def _lacks_files(error: BaseException | None) -> bool:
    """Return whether an exception, or its cause, is that a file could not be opened beside so many others."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__
    return False


def _check_key(request: Request, keys: Sequence[bytes]) -> int | None:
    """Return the number of the key that a request has; None if the server has no keys."""
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    same = [secrets.compare_digest(credentials.encode("latin-1"), key) for key in keys]
    if keys and not (scheme.lower() == "bearer" and any(same)):
        headers = {"www-authenticate": "Bearer"}
        raise RequestError(401, "a valid API key is needed", "invalid_api_key", headers=headers)
    return same.index(True) if keys else None
