"""What a chat needs to call functions: the prompt, and the options of the text."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zoo.errors import UsageError
from zoo_runtime.generation.json_schemas import close_objects
from zoo_runtime.running.inputs import Pair
from zoo_runtime.server.http.openai.bodies import Chat, JsonObject, JsonSchema
from zoo_runtime.server.http.openai.tool_bodies import Function, NamedTool
from zoo_runtime.server.http.openai.tools.messages import for_template, without_calls, without_results
from zoo_runtime.server.models import Served
from zoo_runtime.server.request_error import RequestError, as_request_error
from zoo_runtime.server.tools.formats import FORMATS, ToolFormat, find_format
from zoo_runtime.server.tools.grammar import call_grammar

__all__ = ["Calling", "chat_prompts", "plan_calls"]

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, kw_only=True)
class Calling:
    """How the answer to a chat may call functions. Without a form, it does not."""

    form: ToolFormat | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    """The tools, for the chat template."""
    names: Collection[str] = ()
    """Names of the functions that may be called."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the text."""
    certain: bool = False
    """Whether the text is constrained, so that what begins as a call becomes one."""
    named: bool = False
    """Whether the request names the function."""
    several: bool = True
    """Whether there may be several calls."""


def plan_calls(served: Served, body: Chat) -> Calling:
    """Return how a chat may call functions.

    Raises :class:`RequestError` if the form in which the model writes calls is not known, or the request sets a
    constraint besides a function that must be called.
    """
    if not body.calls:
        return Calling()
    form = _form_of(served)
    functions = {tool.function.name: tool.function for tool in body.tools}
    named = isinstance(body.tool_choice, NamedTool)
    if isinstance(body.tool_choice, NamedTool):
        functions = {body.tool_choice.function.name: functions[body.tool_choice.function.name]}
    forced = named or body.tool_choice == "required"
    several = body.parallel_tool_calls and not named
    added = _added_tokens(served)
    tokens = {text: token for token, text in added.items() if text in form.texts}
    options: dict[str, Any] = {"shown_tokens": tuple(sorted(tokens))} if tokens else {}
    answer = _answer_schema(body)
    strict = any(function.strict for function in functions.values())
    if forced and (body.regex is not None or body.grammar is not None):
        problem = "a function that must be called and another constraint exclude each other"
        raise RequestError(400, problem, "invalid_value", "tool_choice")
    is_constrained = forced or ((strict or answer is not None) and body.regex is None and body.grammar is None)
    if is_constrained:
        schemas = {name: _schema(function, everywhere=forced) for name, function in functions.items()}
        if not body.additional_properties:
            schemas, answer = {name: _closed(schema) for name, schema in schemas.items()}, _closed(answer)
        others = sorted(set(added) - set(tokens.values()) - set(served.ends))
        free = None if forced or answer is not None else others
        options |= {"json_schema": None}
        schema = None if forced else answer
        try:
            options["grammar"] = call_grammar(form, schemas, tokens, several=several, free=free, answer=schema)
        except UsageError as error:
            raise as_request_error(error, "tools") from error
    return Calling(
        form=form,
        tools=[tool.for_template() for tool in body.tools],
        names=functions.keys(),
        options=options,
        certain=forced or (is_constrained and bool(form.opening)),
        named=named,
        several=several,
    )


def chat_prompts(served: Served, messages: Sequence[Mapping[str, Any]], calling: Calling) -> list[Any]:
    """Return the prompt of a chat: token ids, or a pair of an image and these.

    Raises :class:`RequestError` if it is not a chat, or the chat template does not write its tools, calls or results,
    or the model does not read its image.
    """
    values = {} if calling.tools is None else {"tools": calling.tools}
    chat, image = served.without_image(for_template(messages))
    ids = served.chat_prompt(chat, **values)
    if calling.tools is not None and not served.writes("tools", ids, lambda: served.chat_prompt(chat)):
        problem = f"the chat template of {served.name!r} does not write tools"
        raise RequestError(400, problem, "unsupported_tools", "tools")
    for what, key, others in (("calls", "tool_calls", without_calls), ("results", "tool_call_id", without_results)):
        if any(key in message for message in chat):
            changed = others(chat)
            if not served.writes(what, ids, lambda: served.chat_prompt(changed, **values)):  # noqa: B023 - called now
                problem = f"the chat template of {served.name!r} does not write {what} of tools"
                raise RequestError(400, problem, "unsupported_tools", "messages")
    return [ids if image is None else Pair(image, ids)]


def _form_of(served: Served) -> ToolFormat:
    if served.place.tool_format is not None:
        return FORMATS[served.place.tool_format]
    form = None if served.template is None else find_format(served.template.source)
    if form is None:
        problem = (
            f"it is not known how the model {served.name!r} calls functions: its chat template has none of the known "
            f"forms; start the server with --tool-format and one of {', '.join(FORMATS)}"
        )
        raise RequestError(400, problem, "unsupported_tools", "tools")
    return form


def _added_tokens(served: Served) -> dict[int, str]:
    """Return the tokens of a model's own, which texts are not divided into, by their ids."""
    tokenizer = served.session.tokenizer
    added = {} if tokenizer is None else tokenizer.target.backend.get_added_tokens_decoder()
    return {number: token.content for number, token in added.items()}


def _answer_schema(body: Chat) -> dict[str, Any] | None:
    """Return the schema of a text that calls no functions, if the request has one."""
    if isinstance(body.response_format, JsonSchema):
        return body.response_format.json_schema.schema_
    return {"type": "object"} if isinstance(body.response_format, JsonObject) else None


def _closed(schema: dict[str, Any] | None) -> Any:
    """Return a copy of a schema with closed objects: see :func:`close_objects`."""
    closed = copy.deepcopy(schema)
    if closed is not None:
        close_objects(closed)
    return closed


def _schema(function: Function, *, everywhere: bool) -> dict[str, Any]:
    """Return the schema of the arguments of a function, or of any arguments if it need not be followed."""
    if not (everywhere or function.strict):
        return {"type": "object"}
    schema = _NO_ARGUMENTS if function.parameters is None else {"type": "object", **function.parameters}
    if schema["type"] != "object":
        problem = f"the arguments of {function.name!r} must be an object, but its parameters have another type"
        raise RequestError(400, problem, "invalid_value", "tools")
    return schema
