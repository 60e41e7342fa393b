"""Bodies of requests to OpenAI's API, checked field by field."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from zoo.config import Settings
from zoo.errors import UsageError
from zoo_runtime.runner import Pair, Runner, TextRunner, are_ids, is_pair
from zoo_runtime.server.errors import RequestError
from zoo_runtime.tasks.speech import SpeechRecognition

__all__ = [
    "Body",
    "Chat",
    "Completion",
    "Embeddings",
    "GenerationBody",
    "TaskInputs",
    "parse_object",
    "plain_messages",
    "task_input",
]

Prompt = str | tuple[str, ...] | tuple[int, ...] | tuple[tuple[int, ...], ...]
_PLAIN = ("temperature", "top_p", "stop", "top_k", "min_p", "min_new_tokens", "repetition_penalty",
          "no_repeat_ngram_size", "stop_token_ids", "suppress_tokens", "regex", "grammar", "json_schema",
          "logit_bias")  # fmt: skip
"""Fields that are options of :class:`zoo_runtime.Generation`."""
_MOST_CHOICES = 128
_COMPLETION_TOKENS = 16
"""Default number of new tokens of a completion, as in OpenAI's API."""


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a body. Raises :class:`RequestError` unless it is a JSON object of Unicode texts."""
    try:
        found = json.loads(data, parse_constant=_refuse_constant)
        if b"\\ud" in data.lower():  # lone surrogates, which no tokenizer reads
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(400, f"the body is not valid JSON ({reason})", "invalid_json") from error
    if not isinstance(found, dict):
        raise RequestError(400, f"the body must be a JSON object, got {type(found).__name__}", "invalid_json")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


@dataclass(frozen=True, kw_only=True)
class Body(Settings):
    """Fields of every request."""

    objects: ClassVar[Mapping[str, type]] = {}
    """Types of the fields that are objects or lists of them, whose contents are checked elsewhere."""
    required: ClassVar[tuple[str, ...]] = ()

    model: str = ""
    """Name of the model; may be left out if the server has one."""
    user: str | None = None
    """Ignored."""

    @classmethod
    def read(cls, data: bytes) -> tuple[Self, dict[str, Any]]:
        """Parse a body; return its plain fields, and its objects by name.

        Raises :class:`RequestError` for an unknown or missing field, or one of the wrong type.
        """
        given = {key: value for key, value in parse_object(data).items() if value is not None}
        objects = {key: given.pop(key) for key in cls.objects if key in given}
        for key, value in objects.items():
            if not isinstance(value, cls.objects[key]):
                raise RequestError(400, f"{key} has the wrong type {type(value).__name__}", "invalid_type", key)
        checked = {}
        for key, value in given.items():
            if key not in cls.field_types():
                raise RequestError(400, f"unknown field {key!r}"[:200], "unknown_field", key[:100])
            try:
                checked[key] = cls.check_field(key, value)
            except UsageError as error:
                raise RequestError(400, error.what[:300], "invalid_type", key) from error
        for key in cls.required:
            if key not in checked and key not in objects:
                raise RequestError(400, f"the field {key!r} is missing", "missing_field", key)
        try:
            return cls(**checked), objects
        except ValueError as error:
            raise RequestError(400, str(error), "invalid_value") from error


@dataclass(frozen=True, kw_only=True)
class GenerationBody(Body):
    """Fields of both kinds of generation: OpenAI's, and options of :class:`zoo_runtime.Generation`."""

    objects: ClassVar[Mapping[str, type]] = dict.fromkeys(
        ("logit_bias", "metadata", "response_format", "stream_options"), dict
    )

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    stop: str | tuple[str, ...] | None = None
    seed: int | None = None
    stream: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_k: int | None = None
    min_p: float | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    suppress_tokens: tuple[int, ...] | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.n <= _MOST_CHOICES:
            raise ValueError(f"n must be from 1 to {_MOST_CHOICES}, got {self.n}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if (self.seed or 0) < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported, use repetition_penalty")

    @property
    def most_tokens(self) -> int | None:
        """Maximum number of new tokens; None for all that fit."""
        return self.max_tokens

    @property
    def ranks(self) -> int | None:
        """Number of likeliest tokens to report in the place of each; None for no probabilities."""
        return None

    def options(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the task that the request sets, without the seed and the number of new tokens."""
        found: dict[str, Any] = {name: getattr(self, name, None) for name in _PLAIN}
        if isinstance(self.stop, str):
            found["stop"] = (self.stop,)
        if (bias := objects.get("logit_bias")) is not None:
            found["logit_bias"] = _bias(bias)
        found["json_schema"] = _schema(objects.get("response_format", {}))
        if found["temperature"] == 0:  # the likeliest token is in every nucleus
            found |= dict.fromkeys(("top_p", "top_k", "min_p"))
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Completion(GenerationBody):
    """Body of ``/v1/completions``."""

    required = ("prompt",)

    prompt: Prompt = ""
    logprobs: int | None = None
    echo: Literal[False] = False
    best_of: int | None = None
    suffix: Literal[""] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of must equal n, got {self.best_of} and {self.n}")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise ValueError(f"logprobs must be from 0 to 20, got {self.logprobs}")

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or _COMPLETION_TOKENS

    @property
    def ranks(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(isinstance(part, int) for part in self.prompt):
            return [list(self.prompt)]  # type: ignore[arg-type]  # as just checked
        return [part if isinstance(part, str) else list(part) for part in self.prompt]  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Chat(GenerationBody):
    """Body of ``/v1/chat/completions``."""

    objects: ClassVar[Mapping[str, type]] = {**GenerationBody.objects, "messages": list}
    required = ("messages",)

    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_completion_tokens is not None and self.max_completion_tokens < 1:
            raise ValueError(f"max_completion_tokens must be at least 1, got {self.max_completion_tokens}")
        if self.top_logprobs is not None and not (self.logprobs and 0 <= self.top_logprobs <= 20):
            raise ValueError(f"top_logprobs must be from 0 to 20, with logprobs, got {self.top_logprobs}")

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def ranks(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


@dataclass(frozen=True, kw_only=True)
class Embeddings(Body):
    """Body of ``/v1/embeddings``."""

    required = ("input",)

    input: Prompt = ""
    encoding_format: Literal["float", "base64"] = "float"

    @property
    def inputs(self) -> list[str | list[int]]:
        """The inputs, each a text or token ids."""
        return Completion(prompt=self.input).prompts


@dataclass(frozen=True, kw_only=True)
class TaskInputs(Body):
    """Body of ``/v1/tasks/NAME``."""

    objects: ClassVar[Mapping[str, type]] = {"inputs": list, "options": dict}
    required = ("inputs",)


def task_input(runner: Runner[Any], value: Any, place: int) -> Any:
    """Return the input of a task that an element of ``inputs`` stands for.

    It is a text, token ids, ``{"pair": [first, second]}``, or ``{"base64": "..."}`` with the content of a file. A text
    is never the name of a file.
    """
    param = f"inputs[{place}]"
    if isinstance(value, dict) and value.keys() == {"base64"} and isinstance(value["base64"], str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except ValueError as error:
            raise RequestError(400, f"not base64 ({error})", "invalid_value", param) from error
    if isinstance(runner, TextRunner) and not isinstance(runner, SpeechRecognition):
        if isinstance(value, str) or are_ids(value):
            return value
        if isinstance(value, dict) and value.keys() == {"pair"} and is_pair(value["pair"]):
            return Pair(*value["pair"])
    elif isinstance(value, list):
        return value
    what = 'an input must be a text, token ids, {"pair": [...]} or {"base64": "..."}, as the task reads it'
    raise RequestError(400, what, "invalid_type", param)


def plain_messages(messages: list[Any]) -> list[Any]:
    """Return the messages of a chat with contents of text parts joined.

    Raises :class:`RequestError` for other parts, such as images.
    """
    return [
        {**message, "content": _joined(message["content"])}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _joined(parts: list[Any]) -> str:
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(400, "messages may have parts of the type 'text' only", "unsupported", "messages")
    return "".join(map(str, texts))


def _bias(given: Mapping[str, Any]) -> dict[int | str, Any]:
    for key, value in given.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise RequestError(400, "logit_bias must be numbers by token id", "invalid_type", "logit_bias")
        if not key.isdecimal():
            raise RequestError(
                400, f"logit_bias has the key {key!r:.50}, not a token id", "invalid_value", "logit_bias"
            )
    return {int(key): value for key, value in given.items()}


def _schema(form: Mapping[str, Any]) -> str | None:
    """Return the JSON schema that a ``response_format`` asks for."""
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return json.dumps({"type": "object"})
    inner = form.get("json_schema")
    if kind != "json_schema" or not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        what = "response_format must be text, json_object, or json_schema with a schema"
        raise RequestError(400, what, "invalid_value", "response_format")
    return json.dumps(inner["schema"])
