"""The routes of OpenAI's API, and ``/v1/tasks`` for all other tasks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from zoo.errors import UsageError, ZooError
from zoo_runtime.server.http.observe import FACTS
from zoo_runtime.server.http.openai.bodies import Chat, Embeddings, TaskInputs, task_input
from zoo_runtime.server.http.openai.completions import Completion
from zoo_runtime.server.http.openai.generate import generate
from zoo_runtime.server.http.openai.responses.answers import ResponseAnswer
from zoo_runtime.server.http.openai.responses.bodies import Responses
from zoo_runtime.server.http.openai.shapes import embeddings_answer
from zoo_runtime.server.http.openai.tools.answers import CallAnswer
from zoo_runtime.server.http.openai.tools.calling import chat_prompts, plan_calls
from zoo_runtime.server.http.operations import Operation
from zoo_runtime.server.http.responses import as_json, as_long_json
from zoo_runtime.server.http.service import Service
from zoo_runtime.server.models import Served, find_model
from zoo_runtime.server.request_error import RequestError, as_request_error

__all__ = ["OpenAI"]

_SERVER_OPTIONS = {"draft"}
"""Options of tasks that name files."""
_RESPONSE_FIELDS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
"""Fields of ``/v1/responses`` that become others of a chat."""
_FEWER = "send fewer inputs at a time"
_STREAMED: dict[str, dict[str, Any]] = {"application/json": {"type": "object"}, "text/event-stream": {"type": "string"}}


class OpenAI:
    """The handlers.

    Args:
        service: the models and limits.
    """

    def __init__(self, service: Service) -> None:
        self.service = service

    def operations(self) -> list[Operation]:
        """Return the routes."""
        return [
            Operation(method="POST", path="/v1/completions", handler=self.complete, summary="Continue prompts.",
                      body=Completion, answers=_STREAMED),
            Operation(method="POST", path="/v1/chat/completions", handler=self.chat, summary="Answer a chat.",
                      body=Chat, answers=_STREAMED),
            Operation(method="POST", path="/v1/responses", handler=self.respond, summary="Answer items of a chat.",
                      body=Responses, answers=_STREAMED),
            Operation(method="POST", path="/v1/embeddings", handler=self.embed, summary="Embed texts.",
                      body=Embeddings),
            Operation(method="POST", path="/v1/tasks/{name}", handler=self.run_task, summary="Run a task.",
                      body=TaskInputs),
            Operation(method="GET", path="/v1/models", handler=self.list_models, summary="List the models."),
            Operation(method="GET", path="/v1/models/{name}", handler=self.show_model, summary="Describe a model."),
        ]  # fmt: skip

    async def complete(self, request: Request) -> Response:
        """``/v1/completions``."""
        body = await self.service.read_json(request, Completion)
        served = self.service.find(request, body.model)
        self.service.note_texts(request, input=body.prompt)
        return await generate(self.service, request, served, body, lambda: body.prompts, "prompt")

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        body = await self.service.read_json(request, Chat)
        served = self.service.find(request, body.model)
        return await self.answer_chat(request, served, body)

    async def respond(self, request: Request) -> Response:
        """``/v1/responses``."""
        body = await self.service.read_json(request, Responses)
        served = self.service.find(request, body.model)
        try:
            return await self.answer_chat(request, served, body.chat(), partial(ResponseAnswer, request=body))
        except RequestError as error:
            error.param = _RESPONSE_FIELDS.get((error.param or "").partition("[")[0], error.param)
            raise

    async def answer_chat(
        self, request: Request, served: Served, body: Chat, make: Callable[..., CallAnswer] = CallAnswer
    ) -> Response:
        """Answer a chat in the shapes of ``make``."""
        messages = [message.plain() for message in body.messages]
        self.service.note_texts(request, input=[message.described() for message in body.messages])
        calling = await run_in_threadpool(plan_calls, served, body)
        answer = make(served.name, True, served.token_bytes, options=calling.options, calling=calling)
        prompts = partial(chat_prompts, served, messages, calling)
        return await generate(self.service, request, served, body, prompts, "messages", answer)

    async def embed(self, request: Request) -> Response:
        """``/v1/embeddings``."""
        body = await self.service.read_json(request, Embeddings)
        served = self.service.find(request, body.model)
        if not served.embeds:
            raise RequestError(400, f"the model {served.name!r} makes no embeddings", "wrong_task", "model")
        self.service.note_texts(request, input=body.input)
        options = {} if body.dimensions is None else {"dimensions": body.dimensions}
        try:
            runner = served.runner("sentence-embedding", options)
        except ZooError as error:
            raise as_request_error(error, "dimensions") from error
        results = await self.service.answer(request, served, runner, body.inputs, "input")
        request.scope[FACTS]["prompt_tokens"] = sum(result["tokens"] for result in results)
        return await as_long_json(
            lambda: embeddings_answer(served.name, results, body.encoding_format), f"{_FEWER}, or ask for base64"
        )

    async def run_task(self, request: Request) -> Response:
        """``/v1/tasks/NAME``."""
        body = await self.service.read_json(request, TaskInputs)
        served = self.service.find(request, body.model)
        self.service.note_texts(request, input=[value for value in body.inputs if isinstance(value, str)])
        task = request.path_params["name"]
        if task in ("text-generation", "text2text-generation"):
            raise RequestError(400, "texts are generated by /v1/completions", "wrong_task")
        try:
            served.session.options(task)
        except UsageError as error:
            raise RequestError(404, error.what, "unknown_task") from error
        if not body.options.keys().isdisjoint(_SERVER_OPTIONS):
            raise RequestError(400, "the option 'draft' is a directory of the server", "invalid_value", "options")
        try:
            runner = await run_in_threadpool(served.runner, task, body.options)
        except ZooError as error:
            raise as_request_error(error, "options") from error
        inputs = [task_input(runner, value, place) for place, value in enumerate(body.inputs)]
        results = await self.service.answer(request, served, runner, inputs, "inputs")
        facts = {"object": "list", "model": served.name, "task": task}
        return await as_long_json(lambda: {**facts, "data": results}, _FEWER)

    async def list_models(self, request: Request) -> Response:
        """``/v1/models``."""
        return as_json({"object": "list", "data": [_described(served) for served in self.service.models.values()]})

    async def show_model(self, request: Request) -> Response:
        """``/v1/models/NAME``."""
        return as_json(_described(find_model(self.service.models, request.path_params["name"])))


def _described(served: Served) -> dict[str, Any]:
    facts = {"id": served.name, "object": "model", "created": served.created, "owned_by": "zoo", "task": served.task}
    return facts | {"max_model_len": served.positions}
