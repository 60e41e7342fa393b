"""Requests for generated text, answered whole or as a stream of events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from zoo.errors import ZooError
from zoo_runtime.generation.options import Generation
from zoo_runtime.server.engines.work import Work
from zoo_runtime.server.http.encoding import MOST_NUMBERS
from zoo_runtime.server.http.observe import FACTS, LEFT
from zoo_runtime.server.http.openai.bodies import Chat, GenerationBody
from zoo_runtime.server.http.openai.shapes import AnswerShapes
from zoo_runtime.server.http.responses import Events, Stream, as_json, as_long_json, sent, while_connected
from zoo_runtime.server.http.service import Service
from zoo_runtime.server.models import Served
from zoo_runtime.server.request_error import RequestError, as_request_error, server_error

__all__ = ["generate"]


async def generate(
    service: Service,
    request: Request,
    served: Served,
    body: GenerationBody,
    prompts: Callable[[], Sequence[str | list[int]]],
    param: str,
) -> Response:
    """Answer a request for generated text.

    Args:
        service: the models and limits.
        request: the request.
        served: its model.
        body: its body.
        prompts: returns the prompts, in a thread of its own.
        param: the field of the body that has them, for errors.
    """
    if not served.generates:
        raise RequestError(400, f"the model {served.name!r} generates no text", "wrong_task", "model")
    most = service.limits.tokens if body.most_tokens is None else body.most_tokens
    if most > service.limits.tokens:
        problem = f"at most {service.limits.tokens} tokens can be generated, not {most}"
        raise RequestError(400, problem, "invalid_value", "max_tokens")
    events = Events(service.mailbox)

    def prepare() -> tuple[list[Work], int]:
        options = {**body.options(served.temperature), "max_new_tokens": most}
        if body.ranks is not None:
            options["logprobs"] = body.ranks
        try:
            runner = served.runner(None, options)
        except ZooError as error:
            raise as_request_error(error, body.field_of(str(error))) from error
        assert isinstance(runner.chosen, Generation)
        seed = secrets.randbits(31) if body.seed is None and runner.chosen.temperature else body.seed
        inputs = prompts()
        service.check_count(served, runner, len(inputs) * body.n, param)
        ranked = 0 if body.stream or body.ranks is None else body.ranks + 1
        if len(inputs) * body.n * most * ranked > MOST_NUMBERS:
            problem = f"the answer could have more than {MOST_NUMBERS} probabilities: ask for fewer, or for a stream"
            raise RequestError(400, problem, "answer_too_large", "max_tokens")
        works = []
        for place in range(len(inputs) * body.n):
            item = served.read(runner, inputs[place // body.n], place + 1, param)
            works.append(Work(runner, item, events.deliver(place), seed, body.stream))
        return works, sum(len(work.item.ids) for work in works[:: body.n])

    begun = time.monotonic()
    works, prompt_tokens = await run_in_threadpool(prepare)
    facts = request.scope[FACTS]
    facts["prompt_tokens"] = prompt_tokens
    answer = AnswerShapes(served.name, isinstance(body, Chat), served.token_bytes)
    service.note_texts(request, output=answer.texts)
    served.engine(works[0].runner).submit(works)
    if body.stream:
        stream = _Streamed(service, works, events, answer, begun, begun + service.limits.seconds, facts)
        async with service.while_running():
            return await stream.respond(request, wants_usage=body.wants_usage)
    results = await service.collect(request, works, events)
    facts["tokens"] = sum(len(result["generated_ids"]) for result in results)
    if body.ranks is None:
        return as_json(answer.whole(results, _usage(facts)))
    return await as_long_json(lambda: answer.whole(results, _usage(facts)))


@dataclass
class _Streamed:
    """The texts of a request, sent while they are generated."""

    service: Service
    works: Sequence[Work]
    events: Events
    answer: AnswerShapes
    begun: float
    end: float
    """The time at which the request fails."""
    facts: dict[str, Any]
    tokens: list[int] = field(init=False)
    """Number of tokens of each text."""
    done: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [0] * len(self.works)
        self.done = [False] * len(self.works)
        self.facts["tokens"] = 0

    async def respond(self, request: Request, *, wants_usage: bool) -> Response:
        """Return a stream that begins with the first text. An error before it has a status of its own."""
        seconds = self.end - self.begun
        try:
            index, event = await while_connected(request, self.events.next(), seconds)
            if event.error is not None:
                raise server_error(event.error) from event.error
        except BaseException:
            self._cancel()
            raise
        self.facts["first_token_seconds"] = round(time.monotonic() - self.begun, 6)

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal index, event
            for place in range(len(self.works)):
                if (opening := self.answer.opening(place)) is not None:
                    yield sent(opening)
            try:
                async with self.service.while_running(self.end - time.monotonic()):
                    while True:
                        if event.error is not None:
                            raise server_error(event.error)
                        self.tokens[index], self.done[index] = event.tokens, event.is_last
                        self.facts["tokens"] = sum(self.tokens)
                        reason = event.result["finish_reason"] if event.result is not None else None
                        yield sent(self.answer.chunk(index, event.text, reason, event.ranks))
                        if all(self.done):
                            break
                        index, event = await self.events.next()
            except (RequestError, TimeoutError) as error:
                late = RequestError(504, f"no answer within {seconds:g} s", "timeout")
                failure = error if isinstance(error, RequestError) else late
                self.done = [True]
                self.facts["status"] = failure.status
                yield sent(failure.body)
                return
            if wants_usage:
                yield sent(self.answer.usage(_usage(self.facts)))
            yield b"data: [DONE]\n\n"

        return Stream(pieces(), self._finish)

    def _finish(self) -> None:
        if not all(self.done):
            self.facts["status"] = LEFT if time.monotonic() < self.end else 504
        self._cancel()

    def _cancel(self) -> None:
        for work in self.works:
            work.cancel()


def _usage(facts: Mapping[str, Any]) -> dict[str, int]:
    read, written = facts["prompt_tokens"], facts["tokens"]
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
