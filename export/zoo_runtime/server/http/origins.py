"""Pages in browsers: those of allowed origins may use the server (CORS), and those of others are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from zoo_runtime.server.http.operations import Failed
from zoo_runtime.server.request_error import RequestError

__all__ = ["Origins"]

_EXPOSED = ("inference-header-content-length", "retry-after")


class Origins:
    """An application for pages of some origins.

    A request whose ``Origin`` is another is refused, even where the browser sees no other origin, because the name of
    the page's host has come to mean this machine (DNS rebinding).

    Args:
        app: the application.
        allowed: origins, such as ``https://example.org``; ``*`` for all.
        errors: makes the errors of the protocol of a path.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], errors: Callable[[str], Failed]) -> None:
        self.app = app
        self.allowed = allowed
        self.errors = errors
        self.sharing = CORSMiddleware(
            app, allow_origins=allowed, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=_EXPOSED
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        origin = dict(scope["headers"]).get(b"origin")
        if origin is not None:
            is_allowed = "*" in self.allowed or origin.decode("latin-1") in self.allowed
            app = self.sharing if is_allowed else self._refusal(scope["path"])
        await app(scope, receive, send)

    def _refusal(self, path: str) -> Response:
        problem = "pages of this origin may not use the server: allow it with --cors-origin"
        return self.errors(path)(RequestError(403, problem, "origin_not_allowed"))
