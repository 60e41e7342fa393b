"""Bodies of requests to OpenAI's API."""

from __future__ import annotations

import base64
import json
import re
from itertools import islice
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from zoo_runtime.generation.bias import MOST_BIAS
from zoo_runtime.generation.options import MOST_PENALTY, MOST_SUBTRACTED, SEEDS
from zoo_runtime.running.inputs import Pair, are_ids, is_pair, texts_of
from zoo_runtime.running.runner import Runner
from zoo_runtime.running.text_runner import TextRunner
from zoo_runtime.server.http.bodies import Body, BodyPart
from zoo_runtime.server.http.openai.tool_bodies import NamedTool, ToolCall, ToolChoice, Tools
from zoo_runtime.server.request_error import RequestError
from zoo_runtime.tasks.speech.recognition import SpeechRecognition

__all__ = [
    "Chat", "Count", "Embeddings", "GenerationBody", "Message", "ModelBody", "Natural", "Prompt", "TaskInputs", "Texts",
    "Tops", "inputs_of", "task_input",
]  # fmt: skip

TokenList = Annotated[list[int], Field(fail_fast=True)]
Prompt = (
    str
    | Annotated[list[str], Field(min_length=1, fail_fast=True)]
    | Annotated[list[int], Field(min_length=1, fail_fast=True)]
    | Annotated[list[TokenList], Field(min_length=1, fail_fast=True)]
)
"""A text, several, token ids, or several lists of them."""
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Stops = Annotated[list[str], Field(max_length=1000, fail_fast=True)]
TokenIds = Annotated[list[int], Field(max_length=10_000, fail_fast=True)]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,18}$")]
_MOST_BIASES = 10_000
Bias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]],
    Field(max_length=_MOST_BIASES, json_schema_extra={"additionalProperties": False}),
    BeforeValidator(lambda given: _shortened(given, _MOST_BIASES + 1)),  # each wrong one would be an error
]
Texts = Annotated[int, Field(ge=1, le=128)]
"""Number of texts for each prompt."""
Subtracted = Annotated[float, Field(ge=-MOST_SUBTRACTED, le=MOST_SUBTRACTED)]
Tops = Annotated[int, Field(ge=0, le=20)]
_PLAIN = ("temperature", "top_p", "top_k", "min_p", "min_new_tokens", "repetition_penalty", "presence_penalty",
          "frequency_penalty", "no_repeat_ngram_size", "stop_token_ids", "suppress_tokens", "ignore_eos", "regex",
          "grammar", "additional_properties")  # fmt: skip
"""Fields that are options of :class:`zoo_runtime.Generation`."""


class ModelBody(Body):
    """Fields of every request."""

    model: str = ""
    """Name of the model; may be left out if the server has one."""
    user: str | None = None
    """Ignored."""


class StreamOptions(BodyPart):
    """Options of a stream."""

    include_usage: bool = False
    """Send the numbers of tokens at the end."""
    continuous_usage_stats: bool = False
    """With ``include_usage``, also send those of a text so far with each part of it."""
    include_obfuscation: bool = False
    """Ignored."""


class PlainText(BodyPart):
    """The text is free."""

    type: Literal["text"]


class JsonObject(BodyPart):
    """The text is a JSON object."""

    type: Literal["json_object"]


class NamedSchema(BodyPart):
    """A JSON schema."""

    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    """Ignored."""
    description: str | None = None
    """Ignored."""
    strict: bool | None = None
    """Ignored: texts always match the schema."""


class JsonSchema(BodyPart):
    """The text matches a JSON schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class GenerationBody(ModelBody):
    """Fields of both kinds of generation: OpenAI's, and options of :class:`zoo_runtime.Generation`."""

    max_tokens: Count | None = None
    """Maximum number of new tokens."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """Divides logits before sampling. 0 takes the likeliest token each time."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the likeliest tokens that together have this probability. No effect without a temperature."""
    n: Texts = 1
    """Number of texts for each prompt."""
    stop: str | Stops | None = None
    """Strings before the first of which a text ends."""
    seed: Annotated[int, Field(ge=SEEDS[0], le=SEEDS[1])] | None = None
    """Random seed, an integer of 64 bits with or without a sign."""
    stream: bool = False
    """Send the texts as server-sent events while they are generated."""
    stream_options: StreamOptions | None = None
    presence_penalty: Subtracted | None = None
    """Subtracted from the logits of tokens that the new text has."""
    frequency_penalty: Subtracted | None = None
    """Subtracted from the logit of a token for each time that the new text has it."""
    logit_bias: Bias | None = None
    """Values that are added to the logits of tokens."""
    response_format: Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")] | None = None
    metadata: dict[str, Any] | None = None
    """Ignored."""
    store: bool | None = None
    """Ignored: nothing is stored."""
    service_tier: str | None = None
    """Ignored."""
    modalities: list[Literal["text"]] | None = None
    """Ignored: answers are texts."""
    prompt_cache_key: str | None = None
    """Ignored."""
    prompt_cache_retention: str | None = None
    """Ignored."""
    safety_identifier: str | None = None
    """Ignored."""
    reasoning_effort: str | None = None
    """Ignored."""
    verbosity: str | None = None
    """Ignored."""
    top_k: Count | None = None
    """Sample from the k likeliest tokens. No effect without a temperature."""
    min_p: Fraction | None = None
    """Sample from tokens with at least this fraction of the likeliest one's probability. No effect without a
    temperature."""
    min_new_tokens: Natural | None = None
    """Minimum number of new tokens before an end token."""
    repetition_penalty: Annotated[float, Field(ge=1 / MOST_PENALTY, le=MOST_PENALTY)] | None = None
    """Divides positive logits, and multiplies negative ones, of tokens already in the text."""
    no_repeat_ngram_size: Natural | None = None
    """Forbid repeating n-grams of this size. 0 allows repetition."""
    stop_token_ids: TokenIds | None = None
    """Tokens that end a text, in addition to the model's end tokens."""
    ignore_eos: bool | None = None
    """Go on after the model's end tokens."""
    suppress_tokens: TokenIds | None = None
    """Tokens that are never chosen."""
    regex: str | None = None
    """Regular expression that the whole text matches."""
    grammar: str | None = None
    """Context-free grammar of the text, in llguidance's variant of Lark."""
    additional_properties: bool | None = None
    """Allow objects of a JSON schema to have properties that it does not name, where it does not say whether they
    may."""

    @property
    def most_tokens(self) -> int | None:
        """Maximum number of new tokens; None for all that fit."""
        return self.max_tokens

    @property
    def ranks(self) -> int | None:
        """Number of likeliest tokens to report in the place of each; None for no probabilities."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether texts begin with their prompts."""
        return False

    @property
    def drawn(self) -> int:
        """Number of texts that are generated for each prompt."""
        return self.n

    @property
    def selects(self) -> bool:
        """Whether only some of the generated texts are returned."""
        return self.drawn > self.n

    @property
    def wants_running_usage(self) -> bool:
        """Whether each part of a stream comes with the numbers of tokens so far."""
        return self.wants_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self, temperature: float) -> dict[str, Any]:
        """Return the options of the task that the request sets, without the seed and the number of new tokens.

        Args:
            temperature: the temperature of a request that sets none.
        """
        options: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN}
        options["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        if self.logit_bias is not None:
            options["logit_bias"] = {int(key): value for key, value in self.logit_bias.items()}
        if isinstance(self.response_format, JsonObject):
            options["json_schema"] = json.dumps({"type": "object"})
        elif isinstance(self.response_format, JsonSchema):
            options["json_schema"] = json.dumps(self.response_format.json_schema.schema_)
        if not (temperature if self.temperature is None else self.temperature):
            # the likeliest token is in every nucleus
            options |= dict.fromkeys(("top_p", "top_k", "min_p"))
        return {name: value for name, value in options.items() if value is not None}

    def field_of(self, message: str) -> str | None:
        """Return the field of the option that an error of the task names first; None without one."""
        fields = dict.fromkeys((*_PLAIN, "stop", "logit_bias")) | {"json_schema": "response_format"}
        words = re.findall(r"\w+", message)
        return next((fields[word] or word for word in words if word in fields), None)


class TextPart(BodyPart):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(BodyPart):
    """Where an image is."""

    url: str
    """A data URL with the image itself, as base64. No other is fetched."""
    detail: str | None = None
    """Ignored."""


class ImagePart(BodyPart):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


class Message(BodyPart):
    """A message of a chat. The model's chat template may read further fields."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: (
        str
        | Annotated[list[Annotated[TextPart | ImagePart, Field(discriminator="type")]], Field(fail_fast=True)]
        | None
    ) = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    """Calls that the assistant has written."""
    tool_call_id: str | None = None
    """The call whose result a message with the role ``tool`` is."""

    def plain(self) -> dict[str, Any]:
        """Return the message with the texts of its parts joined, unless some of them are images."""
        content = self.model_dump(exclude_unset=True)
        if isinstance(self.content, list):
            texts = [part.text for part in self.content if isinstance(part, TextPart)]
            if len(texts) == len(self.content):
                content["content"] = "".join(texts)
        return content

    def described(self) -> dict[str, Any]:
        """Return the message for the log, without the contents of images."""
        plain = self.plain()
        if isinstance(plain.get("content"), list):
            plain["content"] = [part if part["type"] == "text" else {"type": part["type"]} for part in plain["content"]]
        return plain


class Chat(GenerationBody):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    """Maximum number of new tokens."""
    logprobs: bool = False
    """Report the log-probability of each token."""
    top_logprobs: Tops | None = None
    """Number of likeliest tokens whose log-probabilities are reported in each place; requires ``logprobs``."""
    tools: Tools = Field(default_factory=list)
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """Whether the model may call functions, must call some, or must call this one; by default it may."""
    parallel_tool_calls: bool = True
    """Allow several calls in an answer."""

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(f"top_logprobs requires logprobs, got {self.top_logprobs} and false")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        wanted = self.tool_choice
        if wanted == "required" and not names:
            raise ValueError("tool_choice 'required' needs tools")
        if isinstance(wanted, NamedTool) and wanted.function.name not in names:
            raise ValueError(f"tool_choice names {wanted.function.name!r}, which is none of the tools")
        return self

    @property
    def calls(self) -> bool:
        """Whether the answer may call functions."""
        return bool(self.tools) and self.tool_choice != "none"

    def field_of(self, message: str) -> str | None:
        found = super().field_of(message)
        return "tools" if found == "grammar" and self.grammar is None else found

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def ranks(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class Embeddings(ModelBody):
    """Body of ``/v1/embeddings``."""

    input: Prompt
    """A text, several, token ids, or several lists of them."""
    encoding_format: Literal["float", "base64"] = "float"
    """Vectors as lists, or as base64 of float32 in little-endian order."""
    dimensions: Count | None = None
    """Size of the vectors: the model's, or one to which it is trained to shorten them."""

    @property
    def inputs(self) -> list[str | list[int]]:
        """The inputs, each a text or token ids."""
        return inputs_of(self.input)


class PairInput(BodyPart):
    """Two texts, or two lists of token ids."""

    pair: list[Any]


class FileInput(BodyPart):
    """The content of a file: an image or a sound."""

    base64: str


class TaskInputs(ModelBody):
    """Body of ``/v1/tasks/NAME``."""

    inputs: Annotated[list[str | PairInput | FileInput | list[Any]], Field(min_length=1, fail_fast=True)]
    """Texts, token ids, pairs, files, or arrays of numbers, as the task reads them."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task, as ``zoo run --option`` has them."""


def task_input(runner: Runner[Any], value: str | PairInput | FileInput | list[Any], place: int) -> Any:
    """Return the input of a task that an element of ``inputs`` stands for. A text is never the name of a file."""
    param = f"inputs[{place}]"
    if isinstance(value, FileInput):
        return _content(value.base64, param)
    if runner.image_chats and isinstance(value, PairInput):
        match value.pair:
            case [{"base64": str(content), **rest}, prompt] if not rest and (
                isinstance(prompt, str) or are_ids(prompt)
            ):
                return Pair(_content(content, param), prompt)
    elif isinstance(runner, TextRunner) and not isinstance(runner, SpeechRecognition):
        if isinstance(value, str) or are_ids(value):
            return value
        if isinstance(value, PairInput) and len(value.pair) == 2:
            pair = Pair(*value.pair)
            if is_pair(pair) or texts_of(pair):
                return pair
    elif isinstance(value, list):
        return value
    problem = 'an input must be a text, token ids, {"pair": [...]} or {"base64": "..."}, as the task reads it'
    raise RequestError(400, problem, "invalid_type", param)


def _content(text: str, param: str) -> bytes:
    """Return the content of a file. Raises :class:`RequestError` unless it is base64."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise RequestError(400, f"not base64 ({error})", "invalid_value", param) from error


def inputs_of(prompt: Prompt) -> list[str | list[int]]:
    """Return the texts or lists of token ids of a prompt or an input."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _shortened(value: Any, count: int) -> Any:
    """Return a dictionary with its first items only."""
    return dict(islice(value.items(), count)) if isinstance(value, dict) else value
