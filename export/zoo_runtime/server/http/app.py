"""The application: the routes of all protocols, observed."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from zoo_runtime.server.http.inference.routes import Inference, refused
from zoo_runtime.server.http.observe import Metrics, Observed
from zoo_runtime.server.http.openai.routes import OpenAI
from zoo_runtime.server.http.openapi import document_operation
from zoo_runtime.server.http.operations import Failed, route
from zoo_runtime.server.http.operator import Operator
from zoo_runtime.server.http.origins import Origins
from zoo_runtime.server.http.responses import failed
from zoo_runtime.server.http.service import Service
from zoo_runtime.server.http.texts.ranking import RankingRoutes
from zoo_runtime.server.http.texts.tokens import TokenRoutes
from zoo_runtime.server.request_error import RequestError

__all__ = ["make_app"]


def make_app(service: Service, api_keys: Sequence[str] = (), origins: Sequence[str] = ()) -> ASGIApp:
    """Return the application.

    Args:
        service: the open models, which the caller closes, and the limits of a request.
        api_keys: keys of which requests must have one as a bearer token, if there are any, except those of operators.
        origins: origins of pages in browsers that may use the server; ``*`` for all.
    """
    metrics = Metrics(service.models)
    keys = [key.encode() for key in api_keys]
    protocols = (
        OpenAI(service), TokenRoutes(service), RankingRoutes(service), Inference(service), Operator(service, metrics),
    )  # fmt: skip
    operations = [operation for protocol in protocols for operation in protocol.operations()]
    operations.append(document_operation(operations))
    routes = [route(operation, _errors(operation.path), keys) for operation in operations]
    inner = Starlette(routes=routes, exception_handlers={HTTPException: _unknown_route})
    inner.router.redirect_slashes = False  # a redirection is no answer of these protocols
    shared = Origins(_OneLength(inner), origins, _errors)
    return _AnyForm(Observed(shared, metrics, [operation.path for operation in operations]))


class _OneLength:
    """An application that refuses requests with two lengths, of which a proxy may use the other (RFC 9112, 6.3)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = [name for name, _ in scope.get("headers", ())]
        if b"transfer-encoding" not in names or b"content-length" not in names:
            await self.app(scope, receive, send)
            return
        problem = "a request must not have both content-length and transfer-encoding"
        refusal = RequestError(400, problem, "two_lengths", headers={"connection": "close"})
        await _errors(scope["path"])(refusal)(scope, receive, send)


class _AnyForm:
    """An application for which a target with a host is the path in it and the host of the request (RFC 9112, 3.2.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scheme, separator, rest = scope.get("raw_path", b"").partition(b"://")
        if separator and scheme.lower() in (b"http", b"https"):
            host, _, path = rest.partition(b"/")
            headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
            raw = b"/" + path
            scope.update(raw_path=raw, path=unquote(raw.decode("ascii")), headers=[(b"host", host), *headers])
        await self.app(scope, receive, send)


def _errors(path: str) -> Failed:
    """Return what makes the errors of the protocol of a path."""
    return refused if path == "/v2" or path.startswith("/v2/") else failed


async def _unknown_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = {404: "there is no such route", 405: "the route has another method"}.get(error.status_code, error.detail)
    code = {404: "unknown_route", 405: "wrong_method"}.get(error.status_code)
    refusal = RequestError(error.status_code, problem, code, headers=dict(error.headers or {}))
    return _errors(request.url.path)(refusal)
