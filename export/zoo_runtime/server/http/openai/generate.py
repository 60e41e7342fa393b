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
from zoo_runtime.generation.choices import seed_of
from zoo_runtime.server.engines.work import Event, Work
from zoo_runtime.server.http.encoding import MOST_NUMBERS
from zoo_runtime.server.http.observe import CLIENT, FACTS, LEFT
from zoo_runtime.server.http.openai.bodies import Chat, GenerationBody
from zoo_runtime.server.http.openai.completions import Echo, best
from zoo_runtime.server.http.openai.shapes import AnswerShapes
from zoo_runtime.server.http.responses import Events, Stream, as_json, as_long_json, sent, while_connected
from zoo_runtime.server.http.service import Service
from zoo_runtime.server.models import Served
from zoo_runtime.server.request_error import RequestError, as_request_error, server_error
from zoo_runtime.tasks.generate.base import Generate
from zoo_runtime.tasks.generate.scoring import require_scores

__all__ = ["generate"]


async def generate(
    service: Service,
    request: Request,
    served: Served,
    body: GenerationBody,
    prompts: Callable[[], Sequence[Any]],
    param: str,
    answer: AnswerShapes | None = None,
) -> Response:
    """Answer a request for generated text.

    Args:
        service: the models and limits.
        request: the request.
        served: its model.
        body: its body.
        prompts: returns the prompts, each an input of the task, in a thread of its own.
        param: the field of the body that has them, for errors.
        answer: the shapes of the answer; by default those of a completion or a chat.
    """
    most = _most_tokens(service, served, body)
    events = Events(service.mailbox)
    answer = answer or AnswerShapes(served.name, isinstance(body, Chat), served.token_bytes)

    def prepare() -> tuple[list[Work], list[Echo]]:
        options = {**body.options(served.temperature), "max_new_tokens": max(most, 1), **answer.options}
        if body.ranks is not None or body.selects:
            options["logprobs"] = body.ranks or 0
        try:
            runner = served.runner(None, options)
        except ZooError as error:
            raise as_request_error(error, body.field_of(str(error))) from error
        assert isinstance(runner, Generate)
        if body.echoes:
            _require_scores(runner)
        seed = None if body.seed is None else seed_of(body.seed)
        if seed is None and runner.chosen.temperature:
            seed = secrets.randbits(31)
        inputs = prompts()
        count = len(inputs) * body.drawn
        service.check_count(served, runner, count, param)
        ranked = 0 if body.ranks is None else body.ranks + 1
        _check_numbers(0 if body.stream else count * most * ranked)
        works, echoes = [], []
        scores = body.echoes and body.ranks is not None
        for place in range(count):
            prompt = inputs[place // body.drawn]
            item = served.read(runner, prompt, place + 1, param, new=min(most, 1))
            how = {"streams": body.stream, "scores_prompt": scores, "reads_only": not most}
            works.append(Work(runner, item, events.deliver(place), seed, **how))
            if body.echoes and place % body.drawn < body.n:
                echoes.append(Echo.of(prompt, item, served.session.tokenizer))
        read = sum(len(work.item.ids) for work in works) if scores else 0
        _check_numbers((read + (0 if body.stream else count * most)) * ranked)
        return works, echoes

    begun = time.monotonic()
    works, echoes = await run_in_threadpool(prepare)
    facts = request.scope[FACTS]
    facts["prompt_tokens"] = sum(len(work.item.ids) for work in works[:: body.drawn])
    answer.echoes = echoes
    service.note_texts(request, output=answer.texts)
    served.engine(works[0].runner).submit(works, request.scope.get(CLIENT))
    if body.stream:
        stream = _Streamed(service, works, events, answer, begun, begun + service.limits.seconds, facts)
        async with service.while_running():
            return await stream.respond(request, body)
    results = await service.collect(request, works, events)
    facts["tokens"] = sum(len(result["generated_ids"]) for result in results)
    if body.selects:
        results = best(results, body.drawn, body.n)
    if body.ranks is None:
        results = [result | {"logprobs": None} for result in results]
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

    async def respond(self, request: Request, body: GenerationBody) -> Response:
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
            for place, opening in enumerate(self.answer.openings(len(self.works), with_ranks=body.ranks is not None)):
                yield self.answer.encoded(opening | self._running_usage(place, body))
            try:
                async with self.service.while_running(self.end - time.monotonic()):
                    while True:
                        if event.error is not None:
                            raise server_error(event.error)
                        self.tokens[index], self.done[index] = event.tokens, event.is_last
                        self.facts["tokens"] = sum(self.tokens)
                        reason = event.result["finish_reason"] if event.result is not None else None
                        if event.is_prompt:
                            yield await run_in_threadpool(self._sent_prompt, index, event, body)
                        else:
                            for chunk in self.answer.chunks(index, event.text, reason, event.ranks):
                                yield self.answer.encoded(chunk | self._running_usage(index, body))
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
            for piece in self.answer.closing(_usage(self.facts), wants_usage=body.wants_usage):
                yield piece

        return Stream(pieces(), self._finish)

    def _sent_prompt(self, index: int, event: Event, body: GenerationBody) -> bytes:
        """Return the chunk of a prompt with its probabilities, which may be long."""
        return sent(self.answer.prompt_chunk(index, event.ranks or ()) | self._running_usage(index, body))

    def _running_usage(self, index: int, body: GenerationBody) -> dict[str, Any]:
        """Return the field ``usage`` of a chunk, null if the numbers of tokens come at the end alone."""
        if not body.wants_running_usage:
            return {"usage": None} if body.wants_usage else {}
        tokens = {"prompt_tokens": len(self.works[index].item.ids), "tokens": self.tokens[index]}
        return {"usage": _usage(tokens)}

    def _finish(self) -> None:
        if not all(self.done):
            self.facts["status"] = LEFT if time.monotonic() < self.end else 504
        self._cancel()

    def _cancel(self) -> None:
        for work in self.works:
            work.cancel()


def _most_tokens(service: Service, served: Served, body: GenerationBody) -> int:
    """Return the maximum number of new tokens of each text.

    Raises :class:`RequestError` if it is out of bounds, or the model generates no text.
    """
    if not served.generates:
        raise RequestError(400, f"the model {served.name!r} generates no text", "wrong_task", "model")
    most = service.limits.tokens if body.most_tokens is None else body.most_tokens
    if most > service.limits.tokens:
        problem = f"at most {service.limits.tokens} tokens can be generated, not {most}"
        raise RequestError(400, problem, "invalid_value", "max_tokens")
    if not most and not body.echoes:
        raise RequestError(400, "max_tokens 0 requires echo", "invalid_value", "max_tokens")
    return most


def _require_scores(runner: Generate) -> None:
    """Raise :class:`RequestError` unless prompts can be returned with their texts."""
    try:
        require_scores(runner)
    except ZooError as error:
        raise as_request_error(error, "echo") from error


def _check_numbers(count: int) -> None:
    """Raise :class:`RequestError` for an answer with too many log-probabilities."""
    if count > MOST_NUMBERS:
        problem = f"the answer could have more than {MOST_NUMBERS} probabilities: ask for fewer, or for a stream"
        raise RequestError(400, problem, "answer_too_large", "max_tokens")


def _usage(facts: Mapping[str, Any]) -> dict[str, int]:
    read, written = facts["prompt_tokens"], facts["tokens"]
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
