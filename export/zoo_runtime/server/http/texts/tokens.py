"""Tokens of texts and of chats, texts of tokens, and the settings of tokenizers."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from zoo.artifact import TOKENIZER_CONFIG
from zoo.artifact.weights import load_json
from zoo.errors import ArtifactError
from zoo.tokenizers.inputs import LongInputError
from zoo.tokenizers.tokenizer import Tokenizer
from zoo_runtime.server.http.openai.bodies import Message, ModelBody
from zoo_runtime.server.http.openai.tool_bodies import Tool
from zoo_runtime.server.http.openai.tools.messages import for_template
from zoo_runtime.server.http.operations import Operation
from zoo_runtime.server.http.responses import as_json, as_long_json
from zoo_runtime.server.http.service import Service
from zoo_runtime.server.models import Served
from zoo_runtime.server.request_error import RequestError, as_request_error

__all__ = ["Detokenize", "TokenRoutes", "Tokenize"]

_MOST_POSITIONS = 16
"""A text with more tokens than this many times the model's positions is refused before all of it is encoded."""


class Tokenize(ModelBody):
    """Body of ``/tokenize``: either a prompt or the messages of a chat."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """Put special tokens around a prompt, by default true. In a chat, the chat template writes them."""
    add_generation_prompt: bool = True
    """End a chat with the start of the assistant's answer."""
    tools: Annotated[list[Tool], Field(fail_fast=True, default_factory=list)]
    """Functions that a chat may call."""
    return_token_strs: bool = False
    """Return the tokens as the vocabulary has them, too."""

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.tools and self.messages is None:
            raise ValueError("tools requires messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens requires prompt: the chat template writes special tokens")
        return self


class Detokenize(ModelBody):
    """Body of ``/detokenize``."""

    tokens: Annotated[list[int], Field(fail_fast=True)]
    """Token ids."""


class TokenRoutes:
    """The handlers.

    Args:
        service: the models and limits.
    """

    def __init__(self, service: Service) -> None:
        self.service = service

    def operations(self) -> list[Operation]:
        """Return the routes."""
        return [
            Operation(method="POST", path="/tokenize", handler=self.tokenize, summary="Convert a text to token ids.",
                      body=Tokenize),
            Operation(method="POST", path="/detokenize", handler=self.detokenize,
                      summary="Convert token ids to a text.", body=Detokenize),
            Operation(method="GET", path="/tokenizer_info", handler=self.describe,
                      summary="Settings of the tokenizer of a model, the only one or the query parameter 'model'."),
        ]  # fmt: skip

    async def tokenize(self, request: Request) -> Response:
        """``/tokenize``."""
        body = await self.service.read_json(request, Tokenize)
        served = self.service.find(request, body.model)
        tokenizer = _tokenizer(served)
        messages = None if body.messages is None else [message.plain() for message in body.messages]
        self.service.note_texts(request, input=messages or body.prompt)

        def ids() -> list[int]:
            if messages is not None:
                values = {"tools": [tool.for_template() for tool in body.tools]} if body.tools else {}
                chat, image = served.without_image(for_template(messages))
                if image is not None:
                    problem = "chats with an image are not converted to tokens alone"
                    raise RequestError(400, problem, "unsupported_image", "messages")
                return served.chat_prompt(chat, add_generation_prompt=body.add_generation_prompt, **values)
            assert body.prompt is not None
            return _encoded(served, tokenizer, body.prompt, body.add_special_tokens is not False)

        tokens = await run_in_threadpool(ids)
        pieces = [tokenizer.backend.id_to_token(token) for token in tokens] if body.return_token_strs else None
        facts = {"count": len(tokens), "max_model_len": served.positions, "tokens": tokens, "token_strs": pieces}
        return await as_long_json(lambda: facts, "send a shorter text")

    async def detokenize(self, request: Request) -> Response:
        """``/detokenize``."""
        body = await self.service.read_json(request, Detokenize)
        served = self.service.find(request, body.model)
        tokenizer = _tokenizer(served)
        size = tokenizer.backend.get_vocab_size()
        if wrong := [token for token in body.tokens if not 0 <= token < size]:
            raise RequestError(400, f"token {wrong[0]} is outside the vocabulary of {size}", "invalid_value", "tokens")
        text = await run_in_threadpool(tokenizer.decode, body.tokens, special_tokens=True)
        self.service.note_texts(request, output=text)
        return as_json({"prompt": text})

    async def describe(self, request: Request) -> Response:
        """``/tokenizer_info``."""
        served = self.service.find(request, request.query_params.get("model", ""))
        tokenizer = _tokenizer(served)
        stored = served.session.stored
        said = load_json(stored.path / TOKENIZER_CONFIG) if TOKENIZER_CONFIG in stored.files else {}
        facts: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **said}
        facts |= {"vocab_size": tokenizer.backend.get_vocab_size(), "max_model_len": served.positions}
        if served.template is not None:
            facts |= served.template.tokens | {"chat_template": served.template.source}
        return as_json(facts)


def _tokenizer(served: Served) -> Tokenizer:
    if served.session.tokenizer is None:
        raise RequestError(400, f"the model {served.name!r} has no tokenizer", "no_tokenizer", "model")
    return served.session.tokenizer


def _encoded(served: Served, tokenizer: Tokenizer, text: str, special_tokens: bool) -> list[int]:
    """Return the token ids of a text. Raises :class:`RequestError` if it cannot be encoded or is far too long."""
    plain = Tokenizer(tokenizer.backend, special_tokens=special_tokens)
    most = None if served.positions is None else _MOST_POSITIONS * served.positions
    try:
        if most is not None and tokenizer.exceeds(text, most, "prompt"):
            problem = f"more than {most} tokens, {_MOST_POSITIONS} times the model's {served.positions} positions"
            raise LongInputError(problem, "prompt", "shorten it")
        return list(plain.encode(text, where="prompt", offsets=False).ids)
    except ArtifactError as error:
        raise as_request_error(error, "prompt") from error
