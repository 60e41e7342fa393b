"""Metrics and the log of requests. Neither contains texts."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zoo_runtime.server.models import Served

__all__ = ["CLIENT", "FACTS", "HELD", "LEFT", "JsonLines", "Metrics", "Observed", "log", "log_to"]

CLIENT = "zoo.client"
"""The number of the key that a request has, if the server has keys."""
FACTS = "zoo.facts"
"""Key of the scope of a request, for what its handler adds to the log."""
HELD = "zoo.held"
"""Key of the scope of a request, for the list of models that are released when it ends."""
LEFT = 499
"""Status in the log and the metrics of a request whose client left."""
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


_LOGGER = logging.getLogger("zoo.server")


def log(event: str, **facts: Any) -> None:
    """Log an event with its facts."""
    _LOGGER.info(event, extra={"facts": facts})


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON. Messages of exceptions are left out, since they could have texts."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        facts = dict(getattr(record, "facts", {}))
        if record.exc_info and record.exc_info[0] is not None:
            facts["kind"] = record.exc_info[0].__name__
        event = record.getMessage().partition("\n")[0]  # asyncio lists objects in further lines
        return json.dumps({"time": stamp, "event": event} | facts)


def log_to(stream: TextIO) -> None:
    """Write the log of the server, the warnings of uvicorn, and the errors of asyncio, to a stream.

    asyncio also warns of each write to a client that has left.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    for name, level in (
        ("zoo.server", logging.INFO),
        ("uvicorn.error", logging.WARNING),
        ("asyncio", logging.ERROR),
    ):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = False
        logger.handlers = [handler]


class Metrics:
    """Metrics for Prometheus.

    Args:
        models: the open models, whose queues are measured.
    """

    def __init__(self, models: Mapping[str, Served]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "zoo_requests", "Requests, by route and status.", ("route", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "zoo_request_seconds", "Time to the end of an answer.", ("route",), buckets=_SECONDS, registry=self.registry
        )
        self.first = Histogram(
            "zoo_first_token_seconds",
            "Time from a request to the first text of a stream.",
            ("model",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter("zoo_prompt_tokens", "Tokens read.", ("model",), registry=self.registry)
        self.tokens = Counter("zoo_generated_tokens", "Tokens generated.", ("model",), registry=self.registry)
        self.registry.register(_Queues(models))

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class _Queues(Collector):
    """Measures the queues of the models that are open when the metrics are read."""

    def __init__(self, models: Mapping[str, Served]) -> None:
        self.models = models

    def collect(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("zoo_waiting", "Inputs that wait.", labels=("model",))
        running = GaugeMetricFamily("zoo_running", "Inputs that are being answered.", labels=("model",))
        about = "Memory of kept beginnings of prompts, or of encoded inputs."
        size = GaugeMetricFamily("zoo_prefix_bytes", about, labels=("model",))
        reused = CounterMetricFamily("zoo_prefix_tokens", "Tokens of prompts not read anew.", labels=("model",))
        sources = CounterMetricFamily("zoo_reused_sources", "Inputs not encoded anew.", labels=("model",))
        for name, served in self.models.items():
            waiting.add_metric((name,), sum(engine.waiting for engine in served.engines))
            running.add_metric((name,), sum(engine.running for engine in served.engines))
            if served.prefixes is not None:
                size.add_metric((name,), served.prefixes.used)
                reused.add_metric((name,), served.prefixes.reused)
            if served.sources is not None:
                size.add_metric((name,), served.sources.used)
                sources.add_metric((name,), served.sources.reused)
        yield from (waiting, running, size, reused, sources)


class Observed:
    """An application whose requests are logged and counted.

    Args:
        app: the application.
        metrics: the counters.
        routes: the paths of the routes, with parameters in braces.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Sequence[str]) -> None:
        self.app = app
        self.metrics = metrics
        self.routes = {path for path in routes if "{" not in path}
        self.patterns = [(path, compile_path(path)[0]) for path in routes if "{" in path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        facts: dict[str, Any] = {}
        held: list[Served] = []
        scope[FACTS] = facts
        scope[HELD] = held
        begun = time.monotonic()
        status = 500

        async def observing(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, observing)
        finally:
            for served in held:
                served.release()
            seconds = time.monotonic() - begun
            status = facts.pop("status", status)
            route = self._route(scope["path"])
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(seconds)
            if (model := facts.get("model")) is not None:
                self.metrics.prompt_tokens.labels(model).inc(facts.get("prompt_tokens", 0))
                self.metrics.tokens.labels(model).inc(facts.get("tokens", 0))
                if "first_token_seconds" in facts:
                    self.metrics.first.labels(model).observe(facts["first_token_seconds"])
            if scope["path"] not in ("/healthz", "/readyz", "/metrics"):
                log("request", method=scope["method"], route=route, status=status, seconds=round(seconds, 6), **facts)

    def _route(self, path: str) -> str:
        """Return the label of a path, of which there are few."""
        if path in self.routes:
            return path
        return next((route for route, pattern in self.patterns if pattern.match(path)), "other")
