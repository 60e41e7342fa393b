"""Bodies of requests to ``/v1/responses``, which become those of chats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator

from zoo_runtime.server.http.bodies import BodyPart
from zoo_runtime.server.http.openai.bodies import Chat, Count, JsonObject, ModelBody, PlainText
from zoo_runtime.server.http.openai.tool_bodies import FunctionName, check_kind

__all__ = ["Responses"]


class _Echoed(BodyPart):
    """A part of an answer that comes back in a request, with fields that are ignored."""

    model_config = ConfigDict(extra="allow")


class Part(_Echoed):
    """A part of a text."""

    type: Literal["input_text", "output_text", "text"]
    text: str


Text = str | Annotated[list[Part], Field(fail_fast=True)]


class MessageItem(_Echoed):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Add the message to those of a chat."""
        role = "system" if self.role == "developer" else self.role
        messages.append({"role": role, "content": _joined(self.content)})


class CallItem(_Echoed):
    """A call of the assistant."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Add the call to a chat, to the last message of the assistant if nothing was said since."""
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        call = {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        messages[-1].setdefault("tool_calls", []).append(call)


class ResultItem(_Echoed):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Add the result to a chat."""
        messages.append({"role": "tool", "tool_call_id": self.call_id, "content": _joined(self.output)})


def _joined(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _kind(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, Mapping) else getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="item",
        custom_error_message="an item must be a message, a function_call or a function_call_output",
    ),
]


class FlatTool(BodyPart):
    """A function that the model may call."""

    type: Annotated[str, Field(json_schema_extra={"enum": ["function"]})]
    name: FunctionName
    description: str | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments, which are an object; by default it has none."""
    strict: bool | None = None
    """Constrain the arguments to the schema also where the model chooses whether to call."""

    @field_validator("type")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        return check_kind(kind)


class FlatChoice(BodyPart):
    """The function that the model must call."""

    type: Literal["function"]
    name: FunctionName


class FlatSchema(BodyPart):
    """The text matches a JSON schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    """Ignored."""
    description: str | None = None
    """Ignored."""
    strict: bool | None = None
    """Ignored: texts always match the schema."""


class TextOptions(BodyPart):
    """Options of texts."""

    format: Annotated[PlainText | JsonObject | FlatSchema, Field(discriminator="type")] | None = None
    verbosity: str | None = None
    """Ignored."""


class EventOptions(BodyPart):
    """Options of a stream."""

    include_obfuscation: bool = False
    """Ignored."""


class Responses(ModelBody):
    """Body of ``/v1/responses``."""

    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    """A text of the user, or the messages, calls and results so far."""
    instructions: str | None = None
    """A message of the system before all others."""
    max_output_tokens: Count | None = None
    """Maximum number of new tokens."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """Divides logits before sampling. 0 takes the likeliest token each time."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the likeliest tokens that together have this probability. No effect without a temperature."""
    text: TextOptions | None = None
    tools: Annotated[list[FlatTool], Field(max_length=128, fail_fast=True)] = Field(default_factory=list)
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | FlatChoice = "auto"
    """Whether the model may call functions, must call some, or must call this one."""
    parallel_tool_calls: bool = True
    """Allow several calls in an answer."""
    stream: bool = False
    """Send events while the answer is generated."""
    stream_options: EventOptions | None = None
    """Ignored."""
    metadata: dict[str, Any] | None = None
    """Returned with the answer."""
    store: bool | None = None
    """Ignored: nothing is stored."""
    include: list[str] | None = None
    """Ignored, except that log-probabilities are refused."""
    reasoning: dict[str, Any] | None = None
    """Ignored."""
    service_tier: str | None = None
    """Ignored."""
    prompt_cache_key: str | None = None
    """Ignored."""
    safety_identifier: str | None = None
    """Ignored."""
    truncation: Literal["disabled"] = "disabled"
    """Not supported: a text that is too long is an error."""
    background: Literal[False] = False
    """Not supported."""
    previous_response_id: Literal[""] = ""
    """Not supported: nothing is stored, send the items so far as ``input``."""
    conversation: Literal[""] = ""
    """Not supported: nothing is stored, send the items so far as ``input``."""

    @field_validator("include")
    @classmethod
    def _check_include(cls, value: list[str] | None) -> list[str] | None:
        if value and "message.output_text.logprobs" in value:
            raise ValueError("log-probabilities are not supported: use /v1/chat/completions")
        return value

    def chat(self) -> Chat:
        """Return the chat that is answered. Raises :class:`RequestError` if it is not valid."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for item in self.input:
                item.add_to(messages)
        fields: dict[str, Any] = {"messages": messages, "max_tokens": self.max_output_tokens}
        for name in ("model", "temperature", "top_p", "stream", "parallel_tool_calls"):
            fields[name] = getattr(self, name)
        fields["tools"] = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools]
        choice = self.tool_choice
        fields["tool_choice"] = (
            {"type": "function", "function": {"name": choice.name}} if isinstance(choice, FlatChoice) else choice
        )
        form = None if self.text is None else self.text.format
        if isinstance(form, FlatSchema):
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        elif form is not None:
            fields["response_format"] = form.model_dump()
        return Chat.check(fields)
