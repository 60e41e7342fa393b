"""The routes of the server."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from zoo.errors import ZooError
from zoo_runtime.generation.options import Generation
from zoo_runtime.results import plain
from zoo_runtime.runner import Runner
from zoo_runtime.server.bodies import (
    Chat,
    Completion,
    Embeddings,
    GenerationBody,
    TaskInputs,
    plain_messages,
    task_input,
)
from zoo_runtime.server.errors import RequestError, as_request_error, server_error
from zoo_runtime.server.models import Served, find_model
from zoo_runtime.server.observe import FACTS, LEFT, Metrics, Observed, log
from zoo_runtime.server.responses import Events, LeftError, Stream, as_json, failed, sent, while_connected
from zoo_runtime.server.shapes import Answer, embeddings_answer
from zoo_runtime.server.work import FullError, Work

__all__ = ["Limits", "make_app"]

_SERVER_OPTIONS = {"draft"}
"""Options of tasks that name files."""
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a request."""

    body: int = 4 * 2**20
    """Bytes of a body."""
    tokens: int = 4096
    """New tokens of a text."""
    seconds: float = 600.0
    """Time for an answer."""
    body_seconds: float = 30.0
    """Time for a client to send its body."""


def make_app(models: Mapping[str, Served], limits: Limits, api_key: str | None = None) -> ASGIApp:
    """Return the application.

    Args:
        models: the open models by name, which the caller closes.
        limits: limits of a request.
        api_key: the key that requests below ``/v1`` must have as a bearer token, if any.
    """
    return _Server(models, limits, api_key).app


class _Server:
    def __init__(self, models: Mapping[str, Served], limits: Limits, api_key: str | None) -> None:
        self.models, self.limits = models, limits
        self.api_key = None if api_key is None else f"Bearer {api_key}".encode()
        self.metrics = Metrics(models)
        handlers: dict[str, tuple[str, Handler]] = {
            "/v1/completions": ("POST", self.complete),
            "/v1/chat/completions": ("POST", self.chat),
            "/v1/embeddings": ("POST", self.embed),
            "/v1/models": ("GET", self.list_models),
            "/healthz": ("GET", self.healthz),
            "/readyz": ("GET", self.readyz),
            "/metrics": ("GET", self.show_metrics),
        }
        routes = [Route(path, self._guarded(handler), methods=[method]) for path, (method, handler) in handlers.items()]
        routes.append(Route("/v1/tasks/{name}", self._guarded(self.run_task), methods=["POST"]))
        routes.append(Route("/v1/models/{name}", self._guarded(self.show_model), methods=["GET"]))
        inner = Starlette(routes=routes, exception_handlers={HTTPException: _unknown_route})
        self.app = Observed(inner, self.metrics, frozenset(handlers))

    def _guarded(self, handler: Handler) -> Handler:
        """Return a handler whose exceptions become errors of the API, and which checks the key."""

        async def call(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handler(request)
            except RequestError as error:
                return failed(error)
            except FullError as error:
                wait = {"retry-after": str(math.ceil(error.seconds))}
                return failed(RequestError(429, "the queue is full, try again later", "queue_full", headers=wait))
            except ZooError as error:
                return failed(as_request_error(error))
            except (LeftError, ClientDisconnect):
                request.scope[FACTS]["status"] = LEFT
                return Response(status_code=LEFT)
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                places = [f"{frame.filename}:{frame.lineno}" for frame in frames[-5:]]
                log("exception", kind=type(error).__name__, places=places)
                return failed(RequestError(500, "internal error", "internal_error"))

        return call

    def _check_key(self, request: Request) -> None:
        if self.api_key is None or not request.url.path.startswith("/v1/"):
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        if not secrets.compare_digest(given, self.api_key):
            headers = {"www-authenticate": "Bearer"}
            raise RequestError(401, "a valid API key is needed", "invalid_api_key", headers=headers)

    # Routes.

    async def complete(self, request: Request) -> Response:
        """``/v1/completions``."""
        body, objects = Completion.read(await self._read(request))
        served = self._served(request, body.model)
        return await self._generate(request, served, body, objects, lambda: body.prompts, "prompt")

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        body, objects = Chat.read(await self._read(request))
        served = self._served(request, body.model)
        messages = plain_messages(objects["messages"])
        return await self._generate(request, served, body, objects, lambda: [served.chat_prompt(messages)], "messages")

    async def embed(self, request: Request) -> Response:
        """``/v1/embeddings``."""
        body, _ = Embeddings.read(await self._read(request))
        served = self._served(request, body.model)
        if not served.embeds:
            raise RequestError(400, f"the model {served.name!r} makes no embeddings", "wrong_task", "model")
        runner = served.runner("sentence-embedding", {})
        results = await self._answer(request, served, runner, body.inputs, "input")
        request.scope[FACTS]["prompt_tokens"] = sum(result["tokens"] for result in results)
        return as_json(embeddings_answer(served.name, results, body.encoding_format))

    async def run_task(self, request: Request) -> Response:
        """``/v1/tasks/NAME``."""
        body, objects = TaskInputs.read(await self._read(request))
        served = self._served(request, body.model)
        task, options = request.path_params["name"], objects.get("options", {})
        if task in ("text-generation", "text2text-generation"):
            raise RequestError(400, "texts are generated by /v1/completions", "wrong_task")
        if not options.keys().isdisjoint(_SERVER_OPTIONS):
            raise RequestError(400, "the option 'draft' is a directory of the server", "invalid_value", "options")
        try:
            runner = served.runner(task, options)
        except ZooError as error:
            raise as_request_error(error, "options") from error
        inputs = [task_input(runner, value, place) for place, value in enumerate(objects["inputs"])]
        results = await self._answer(request, served, runner, inputs, "inputs")
        return as_json({"object": "list", "model": served.name, "task": task, "data": plain(results)})

    async def list_models(self, request: Request) -> Response:
        """``/v1/models``."""
        return as_json({"object": "list", "data": [_described(served) for served in self.models.values()]})

    async def show_model(self, request: Request) -> Response:
        """``/v1/models/NAME``."""
        return as_json(_described(find_model(self.models, request.path_params["name"])))

    async def healthz(self, request: Request) -> Response:
        """Whether the process answers."""
        return as_json({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """Whether the engines run."""
        stopped = [name for name, served in self.models.items() if not all(one.is_alive for one in served.engines)]
        return as_json({"status": "stopped" if stopped else "ready"}, 503 if stopped else 200)

    async def show_metrics(self, request: Request) -> Response:
        """``/metrics``."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    # Parts of routes.

    async def _read(self, request: Request) -> bytes:
        """Read the body of a request. Raises :class:`RequestError` if it is too long, too slow, or not JSON."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # pages of other origins cannot send this type without asking
            raise RequestError(415, "the content type must be application/json", "invalid_content_type")
        close = {"connection": "close"}
        refusal = RequestError(413, f"the body has more than {self.limits.body} bytes", "body_too_large", headers=close)
        if request.headers.get("content-length", "0").rjust(20, "0") > str(self.limits.body).rjust(20, "0"):
            raise refusal
        data = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for part in request.stream():
                    data += part
                    if len(data) > self.limits.body:
                        raise refusal
        except TimeoutError:
            raise RequestError(408, "the body did not arrive in time", "timeout", headers=close) from None
        return bytes(data)

    def _served(self, request: Request, name: str) -> Served:
        served = find_model(self.models, name)
        request.scope[FACTS]["model"] = served.name
        return served

    async def _generate(
        self,
        request: Request,
        served: Served,
        body: GenerationBody,
        objects: Mapping[str, Any],
        prompts: Callable[[], Sequence[str | list[int]]],
        param: str,
    ) -> Response:
        """Answer a request for generated text."""
        if not served.generates:
            raise RequestError(400, f"the model {served.name!r} generates no text", "wrong_task", "model")
        if body.stream and body.ranks is not None:
            raise RequestError(400, "probabilities cannot be streamed", "unsupported", "logprobs")
        most = self.limits.tokens if body.most_tokens is None else body.most_tokens
        if most > self.limits.tokens:
            what = f"at most {self.limits.tokens} tokens can be generated, not {most}"
            raise RequestError(400, what, "invalid_value", "max_tokens")
        options = {**body.options(objects), "max_new_tokens": most}
        if body.ranks is not None:
            options["logprobs"] = body.ranks
        events = Events()

        def prepare() -> tuple[list[Work], int]:
            runner = served.runner(None, options)
            assert isinstance(runner.chosen, Generation)
            seed = secrets.randbits(31) if body.seed is None and runner.chosen.temperature else body.seed
            given = prompts()
            self._check_count(served, runner, len(given) * body.n, param)
            works = []
            for place in range(len(given) * body.n):
                item = served.read(runner, given[place // body.n], place + 1, param)
                works.append(Work(runner, item, events.deliver(place), seed, body.stream))
            return works, sum(len(work.item.ids) for work in works[:: body.n])

        begun = time.monotonic()
        works, prompt_tokens = await run_in_threadpool(prepare)
        facts = request.scope[FACTS]
        facts["prompt_tokens"] = prompt_tokens
        answer = Answer(served.name, isinstance(body, Chat))
        served.engine(works[0].runner).submit(works)
        if body.stream:
            wants_usage = bool(objects.get("stream_options", {}).get("include_usage"))
            return await self._stream(request, works, events, answer, begun, wants_usage=wants_usage)
        results = await self._results(request, works, events)
        facts["tokens"] = sum(len(result["generated_ids"]) for result in results)
        return as_json(answer.whole(results, _usage(facts)))

    async def _answer(
        self, request: Request, served: Served, runner: Runner[Any], inputs: Sequence[Any], param: str
    ) -> list[dict[str, Any]]:
        """Return the results of a task."""
        events = Events()
        self._check_count(served, runner, len(inputs), param)

        def prepare() -> list[Work]:
            items = [served.read(runner, value, number, param) for number, value in enumerate(inputs, 1)]
            return [Work(runner, item, events.deliver(place)) for place, item in enumerate(items)]

        works = await run_in_threadpool(prepare)
        served.engine(runner).submit(works)
        return await self._results(request, works, events)

    def _check_count(self, served: Served, runner: Runner[Any], count: int, param: str) -> None:
        if not count:
            raise RequestError(400, "there is no input", "invalid_value", param)
        if count > (most := served.engine(runner).most):
            raise RequestError(400, f"at most {most} inputs can be answered together", "invalid_value", param)

    async def _results(self, request: Request, works: Sequence[Work], events: Events) -> list[dict[str, Any]]:
        """Wait for the results of works, and cancel them if the client leaves or the time is over."""
        results: list[dict[str, Any]] = [{} for _ in works]

        async def collect() -> None:
            for _ in works:
                index, event = await events.next()
                if event.error is not None:
                    raise server_error(event.error)
                assert event.result is not None
                results[index] = event.result

        try:
            await while_connected(request, collect(), self.limits.seconds)
        finally:
            for work in works:
                work.cancel()
        return results

    async def _stream(
        self,
        request: Request,
        works: Sequence[Work],
        events: Events,
        answer: Answer,
        begun: float,
        *,
        wants_usage: bool,
    ) -> Response:
        """Answer with server-sent events. An error before the first text has its own status."""
        facts = request.scope[FACTS]
        facts["tokens"] = 0

        def finish() -> None:
            if not all(done):
                facts["status"] = LEFT
            for work in works:
                work.cancel()

        done, tokens = [False] * len(works), [0] * len(works)
        try:
            first = await while_connected(request, events.next(), self.limits.seconds)
            if first[1].error is not None:
                raise server_error(first[1].error)
        except BaseException:
            for work in works:
                work.cancel()
            raise
        facts["first_token_seconds"] = round(time.monotonic() - begun, 6)

        async def pieces() -> AsyncIterator[bytes]:
            for place in range(len(works)):
                if (opening := answer.opening(place)) is not None:
                    yield sent(opening)
            index, event = first
            try:
                async with asyncio.timeout(begun + self.limits.seconds - time.monotonic()):
                    while True:
                        if event.error is not None:
                            raise server_error(event.error)
                        tokens[index], done[index] = event.tokens, event.is_last
                        facts["tokens"] = sum(tokens)
                        reason = event.result["finish_reason"] if event.result is not None else None
                        yield sent(answer.chunk(index, event.text, reason))
                        if all(done):
                            break
                        index, event = await events.next()
            except (RequestError, TimeoutError) as error:
                late = RequestError(504, f"no answer within {self.limits.seconds:g} s", "timeout")
                failure = error if isinstance(error, RequestError) else late
                done[:], facts["status"] = [True] * len(done), failure.status
                yield sent(failure.body)
                return
            if wants_usage:
                yield sent(answer.usage(_usage(facts)))
            yield b"data: [DONE]\n\n"

        return Stream(pieces(), finish)


def _described(served: Served) -> dict[str, Any]:
    facts = {"id": served.name, "object": "model", "created": served.created, "owned_by": "zoo", "task": served.task}
    return facts | {"max_model_len": served.positions}


def _usage(facts: Mapping[str, Any]) -> dict[str, int]:
    read, made = facts["prompt_tokens"], facts["tokens"]
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


async def _unknown_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: "there is no such route", 405: "the route has another method"}.get(error.status_code, error.detail)
    code = {404: "unknown_route", 405: "wrong_method"}.get(error.status_code)
    return failed(RequestError(error.status_code, what, code, headers=dict(error.headers or {})))
