"""The routes of the Open Inference Protocol, version 2."""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from zoo.contract import Graph
from zoo.errors import nearest
from zoo.version import __version__
from zoo_runtime.server.http.inference.graphs import GraphRunner, described, graph_names
from zoo_runtime.server.http.inference.tensors import InferBody, decode, encode
from zoo_runtime.server.http.operations import Operation
from zoo_runtime.server.http.responses import as_json
from zoo_runtime.server.http.service import Service, content_type
from zoo_runtime.server.models import Served
from zoo_runtime.server.request_error import RequestError, as_request_error

__all__ = ["Inference", "refused"]

_HEADER = "inference-header-content-length"
_BINARY: dict[str, dict[str, Any]] = {"application/json": {"type": "object"}, "application/octet-stream": {}}


def refused(error: RequestError) -> Response:
    """Return the response of a request that is not answered."""
    return as_json({"error": error.message}, error.status, error.headers)


class Inference:
    """The handlers.

    Args:
        service: the models and limits.
    """

    def __init__(self, service: Service) -> None:
        self.service = service

    def operations(self) -> list[Operation]:
        """Return the routes."""
        operations = [
            Operation(method="GET", path="/v2", handler=self.describe_server, summary="Describe the server."),
            Operation(method="GET", path="/v2/health/live", handler=self.live, summary="Whether the process answers.",
                      public=True),
            Operation(method="GET", path="/v2/health/ready", handler=self.ready, summary="Whether models are ready.",
                      public=True),
        ]  # fmt: skip
        for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            operations += [
                Operation(method="GET", path=path, handler=self.describe, summary="Describe a graph."),
                Operation(method="GET", path=f"{path}/ready", handler=self.model_ready,
                          summary="Whether a graph is ready."),
                Operation(method="POST", path=f"{path}/infer", handler=self.infer, summary="Run a graph on tensors.",
                          body=InferBody, binary=True, answers=_BINARY),
            ]  # fmt: skip
        return operations

    async def describe_server(self, request: Request) -> Response:
        """``/v2``."""
        return as_json({"name": "zoo", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def live(self, request: Request) -> Response:
        """``/v2/health/live``."""
        return as_json({"live": True})

    async def ready(self, request: Request) -> Response:
        """``/v2/health/ready``."""
        ready = all(served.is_alive for served in self.service.models.values())
        return as_json({"ready": ready}, 200 if ready else 503)

    async def model_ready(self, request: Request) -> Response:
        """``/v2/models/NAME/ready``."""
        served, name, _ = self._find(request)
        return as_json({"name": name, "ready": served.is_alive}, 200 if served.is_alive else 503)

    async def describe(self, request: Request) -> Response:
        """``/v2/models/NAME``."""
        return as_json(described(*self._find(request)))

    async def infer(self, request: Request) -> Response:
        """``/v2/models/NAME/infer``."""
        if content_type(request) not in ("application/json", "application/octet-stream", ""):
            problem = "the content type must be application/json or application/octet-stream"
            raise RequestError(415, problem, "invalid_content_type")
        served, name, graph = self._find(request)
        data = await self.service.read(request)
        lengths = request.headers.getlist(_HEADER)
        if len(lengths) > 1:
            raise RequestError(400, "Inference-Header-Content-Length is given twice", "invalid_value")
        body, arrays = await run_in_threadpool(_parse, data, lengths[0] if lengths else None)
        names = [tensor.name for tensor in graph.output_tensors()]
        requested = {name: body.binary(None) for name in names}
        if body.outputs:
            requested = {output.name: body.binary(output) for output in body.outputs}
            if len(requested) < len(body.outputs):
                raise RequestError(400, "an output is given twice", "invalid_value", "outputs")
        for output in requested:
            if output not in names:
                problem = f"unknown output {output!r:.100}, known: {', '.join(names)}"
                raise RequestError(400, problem[:900], "invalid_value", "outputs")
        runner = GraphRunner(served, graph)
        (result,) = await self.service.results(request, served, runner, [runner.read(arrays)], as_request_error)
        facts = {"model_name": name, "model_version": "1"} | ({} if body.id is None else {"id": body.id})
        outputs = [(output, result[output], binary) for output, binary in requested.items()]
        content, length = await run_in_threadpool(encode, facts, outputs)
        if length is None:
            return Response(content, media_type="application/json")
        return Response(content, headers={_HEADER: str(length)}, media_type="application/octet-stream")

    def _find(self, request: Request) -> tuple[Served, str, Graph]:
        """Return the model of a request, which stays open, with the name and the declaration of the graph.

        Raises :class:`RequestError` if there is no such graph or version.
        """
        name = request.path_params["name"]
        version = request.path_params.get("version", "1")
        owners = {graph: served.name for served in self.service.models.values() for graph in graph_names(served)}
        if name not in owners:
            raise RequestError(404, f"no model {name!r:.100}: {nearest(name[:100], owners)}", "model_not_found")
        if version != "1":
            raise RequestError(404, f"the model {name!r:.100} has the version 1 only", "model_not_found")
        served = self.service.find(request, owners[name])
        return served, name, graph_names(served)[name]


def _parse(data: bytes, length: str | None) -> tuple[InferBody, dict[str, Any]]:
    """Return a body and its arrays; the JSON has ``length`` bytes if binary data follow."""
    end = len(data)
    if length is not None:
        if not (length.isascii() and length.isdecimal() and len(length) < 20 and int(length) <= end):
            raise RequestError(400, f"Inference-Header-Content-Length is not a length within {end}", "invalid_value")
        end = int(length)
    body = InferBody.read(data[:end])
    return body, decode(body.inputs, data[end:])
