"""Fields of requests about tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from zoo_runtime.server.http.bodies import BodyPart

__all__ = ["Function", "FunctionName", "NamedTool", "Tool", "ToolCall", "ToolChoice", "Tools", "check_kind"]

FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
_MOST = 128
"""Number of tools, as in OpenAI's API."""


def check_kind(kind: str) -> str:
    """Check the type of a tool. Raises ValueError unless it is a function."""
    if kind != "function":
        raise ValueError(f"the tool {kind[:100]!r} is not supported: only functions are")
    return kind


class Function(BodyPart):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments, which are an object; by default it has none."""
    strict: bool | None = None
    """Constrain the arguments to the schema also where the model chooses whether to call."""


class Tool(BodyPart):
    """A tool: a function."""

    type: Annotated[str, Field(json_schema_extra={"enum": ["function"]})]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates read it."""
        content = self.function.model_dump(exclude_none=True, exclude={"strict"})
        content.setdefault("parameters", {"type": "object", "properties": {}})
        return {"type": "function", "function": content}

    @field_validator("type")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        return check_kind(kind)


class NamedFunction(BodyPart):
    """The name of a function."""

    name: FunctionName


class NamedTool(BodyPart):
    """The tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool
Tools = Annotated[list[Tool], Field(max_length=_MOST, fail_fast=True)]


class CalledFunction(BodyPart):
    """A function that was called."""

    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str
    """A JSON object, as a text."""


class ToolCall(BodyPart):
    """A call in a message of the assistant."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
