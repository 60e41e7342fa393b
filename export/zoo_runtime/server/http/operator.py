"""The routes for operators: health, readiness and metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from zoo_runtime.server.http.observe import Metrics
from zoo_runtime.server.http.operations import Operation
from zoo_runtime.server.http.responses import as_json
from zoo_runtime.server.http.service import Service

__all__ = ["Operator"]


class Operator:
    """The handlers.

    Args:
        service: the models and limits.
        metrics: the metrics.
    """

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self.service = service
        self.metrics = metrics

    def operations(self) -> list[Operation]:
        """Return the routes."""
        text = {"text/plain": {"type": "string"}}
        return [
            Operation(method="GET", path="/healthz", handler=self.healthz, summary="Whether the process answers.",
                      public=True),
            Operation(method="GET", path="/readyz", handler=self.readyz, summary="Whether the models are ready.",
                      public=True),
            Operation(method="GET", path="/health", handler=self.readyz, summary="The same, as in vLLM's server.",
                      public=True),
            Operation(method="GET", path="/metrics", handler=self.show_metrics, summary="Metrics for Prometheus.",
                      answers=text, public=True),
        ]  # fmt: skip

    async def healthz(self, request: Request) -> Response:
        """``/healthz``."""
        return as_json({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """``/readyz``."""
        ready = all(served.is_alive for served in self.service.models.values())
        return as_json({"status": "ready" if ready else "stopped"}, 200 if ready else 503)

    async def show_metrics(self, request: Request) -> Response:
        """``/metrics``."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")
