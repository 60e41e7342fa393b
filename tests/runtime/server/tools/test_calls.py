"""Calls of functions over a real socket, with OpenAI's own client and a model that has learned to write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from tokenizers import Tokenizer

from tests.runtime.server.caller import ADD, CHATS, TOOLS, WEATHER, called
from tests.runtime.server.conftest import SECONDS, Server, serving

REQUIRED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def server(caller: Path) -> Iterator[Server]:
    with serving(caller, "--unverified", "--log-texts") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as found:
        yield found


def ask(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    """Return the choices of an answer."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    settings: dict[str, Any] = {"model": "caller", "tools": TOOLS, "max_tokens": 120, **options}
    return client.chat.completions.create(messages=messages, **settings)


def shown(message: Any) -> tuple[str | None, list[tuple[str, dict[str, Any]]]]:
    """Return the content and the calls of a message."""
    calls = message.tool_calls or []
    return message.content, [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def refusal(client: openai.OpenAI, messages: Any = "hello", **options: Any) -> tuple[str, str]:
    """Return the field and the message of an error with status 400."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages, **options)
    assert isinstance(caught.value.body, dict)
    return str(caught.value.param), str(caught.value.body["message"])


@pytest.mark.parametrize("chat", CHATS, ids=lambda chat: chat[0]["content"])
def test_model_calls_by_itself(client: openai.OpenAI, chat: list[dict[str, Any]]) -> None:
    """The answers are what the model has learned, as a message, whole and as a stream."""
    for place, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        wanted = json.loads(json.dumps(message))
        calls = [(call["function"]["name"], json.loads(call["function"]["arguments"]))
                 for call in wanted.get("tool_calls", [])]  # fmt: skip
        (choice,) = ask(client, chat[:place]).choices
        assert shown(choice.message) == (wanted.get("content"), calls)
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        ids = [call.id for call in choice.message.tool_calls or []]
        assert len(set(ids)) == len(ids)
        assert all(re.fullmatch("call_[a-zA-Z0-9]{24}", one) for one in ids)
        with client.chat.completions.stream(
            model="caller", messages=chat[:place], tools=TOOLS, max_tokens=120  # type: ignore[arg-type]
        ) as stream:  # fmt: skip
            final = stream.get_final_completion().choices[0]
        assert shown(final.message) == shown(choice.message)
        assert final.finish_reason == choice.finish_reason


def test_markers_are_no_content(client: openai.OpenAI) -> None:
    chunks = list(ask(client, "add 2 and 3", stream=True, n=2, stream_options={"include_usage": True}))
    for index in range(2):
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert "".join(delta.content or "" for delta in deltas) == "Let me see."
        pieces = [call for delta in deltas for call in delta.tool_calls or []]
        assert [(call.index, call.function.name, call.type) for call in pieces if call.id] == [(0, "add", "function")]
        assert json.loads("".join(call.function.arguments for call in pieces)) == {"a": 2, "b": 3}
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count("tool_calls") == 2


@pytest.mark.parametrize("temperature", [0, 2.0])
@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool["function"]["name"])
def test_named_function_is_called(client: openai.OpenAI, tool: dict[str, Any], temperature: float) -> None:
    """Whatever the text would be, the arguments fit the schema."""
    choice = {"type": "function", "function": {"name": tool["function"]["name"]}}
    done = ask(client, "hello", tool_choice=choice, temperature=temperature, seed=5, n=3)
    for one in done.choices:
        (call,) = one.message.tool_calls
        assert (one.finish_reason, one.message.content) == ("stop", None)
        assert call.function.name == tool["function"]["name"]
        jsonschema.validate(json.loads(call.function.arguments), tool["function"]["parameters"])
    chunks = ask(client, "hello", tool_choice=choice, temperature=temperature, seed=5, n=3, stream=True)
    streamed = ["", "", ""]
    count = 0
    for chunk in chunks:
        (part,) = chunk.choices
        assert not part.delta.content
        for piece in part.delta.tool_calls or []:
            streamed[part.index] += piece.function.arguments
            count += 1
    assert streamed == [one.message.tool_calls[0].function.arguments for one in done.choices]
    assert count > 9  # as they are generated


def test_required_calls(client: openai.OpenAI) -> None:
    (one,) = ask(client, "hello", tool_choice="required", parallel_tool_calls=False).choices
    assert one.finish_reason == "tool_calls"
    assert len(one.message.tool_calls) == 1
    (several,) = ask(client, "weather in Paris and Rome?", tool_choice="required").choices
    assert shown(several.message)[1][:2] == [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]
    (first,) = ask(client, "weather in Paris and Rome?", parallel_tool_calls=False).choices
    assert shown(first.message) == (None, [("get_weather", {"city": "Paris"})])


@pytest.mark.parametrize("strict", [None, True])
def test_schemas_of_calls_are_closed(client: openai.OpenAI, strict: bool | None) -> None:
    """At a high temperature, an open object would get properties that nobody has declared."""
    schema = {"type": "object", "properties": {"p": {"type": "boolean"}}, "required": ["p"]}
    tools = [{"type": "function", "function": {"name": "switch", "parameters": schema, "strict": strict}}]
    for seed in range(6):
        answer = ask(client, "hello", tools=tools, tool_choice="required", temperature=3.0, seed=seed)
        for name, arguments in shown(answer.choices[0].message)[1]:
            assert (name, arguments.keys()) == ("switch", {"p"})
    opened = {"tools": tools, "tool_choice": "required", "temperature": 3.0, "n": 8, "seed": 0}
    answer = ask(client, "hello", **opened, extra_body={"additional_properties": True})
    assert any('", "' in call.function.arguments or call.function.arguments.count('":') > 1
               for choice in answer.choices for call in choice.message.tool_calls or [])  # fmt: skip


def test_call_that_a_stop_text_cuts_is_not_complete(client: openai.OpenAI) -> None:
    for stream in (False, True):
        answer = ask(client, "hello", tool_choice="required", stop=["}"], stream=stream)
        last = list(answer)[-1] if stream else answer
        assert last.choices[0].finish_reason == "stop"


def test_tokens_of_a_chat_with_tools(client: openai.OpenAI, server: Server) -> None:
    """They are those that the model reads."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]  # fmt: skip
    read = ask(client, messages, max_tokens=1).usage.prompt_tokens
    body = {"model": "caller", "messages": messages, "tools": TOOLS}
    found = httpx.post(f"{server.url}/tokenize", json=body, timeout=SECONDS).json()
    assert found["count"] == read
    body = {"model": "caller", "prompt": "a", "tools": TOOLS}
    assert httpx.post(f"{server.url}/tokenize", json=body, timeout=SECONDS).status_code == 400


def test_schemas_with_references(client: openai.OpenAI) -> None:
    place = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    schema = {"$defs": {"place": place}, "properties": {"at": {"$ref": "#/$defs/place"}}, "required": ["at"]}
    tool = {
        "type": "function",
        "function": {"name": "go-to_9", "parameters": {**schema, "additionalProperties": False}},
    }
    (choice,) = ask(client, "hello", tools=[tool], tool_choice="required", parallel_tool_calls=False).choices
    (call,) = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), {"type": "object", **schema})
    bare = {"type": "function", "function": {"name": "stop"}}
    (choice,) = ask(client, "hello", tools=[bare], tool_choice="required", parallel_tool_calls=False).choices
    assert shown(choice.message) == (None, [("stop", {})])


def test_cut_call_keeps_its_beginning(client: openai.OpenAI) -> None:
    """A call that must be made and does not end in time is returned as far as it goes, as OpenAI does."""
    whole = ask(client, "hello", tool_choice=REQUIRED).choices[0].message.tool_calls[0].function.arguments
    for limit in (3, 14):
        (choice,) = ask(client, "hello", tool_choice=REQUIRED, max_tokens=limit).choices
        assert (choice.finish_reason, choice.message.content or None) == ("length", None)
        cut = "".join(call.function.arguments for call in choice.message.tool_calls or [])
        assert whole.startswith(cut)
        assert (cut == "") == (limit == 3)
        chunks = list(ask(client, "hello", tool_choice=REQUIRED, max_tokens=limit, stream=True))
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert "".join(call.function.arguments for call in calls) == cut
        assert chunks[-1].choices[0].finish_reason == "length"
    (choice,) = ask(client, "weather in Oslo?", max_tokens=14).choices  # free text: not known to become a call
    assert choice.message.tool_calls is None
    assert choice.message.content.startswith('<tool_call>\n{"name": "get_weather"')


def test_strict_functions_follow_their_schema(client: openai.OpenAI) -> None:
    """The model chooses whether to call; if it does, the arguments fit."""
    never = json.loads(json.dumps(WEATHER))
    never["function"]["parameters"]["properties"]["city"] = {"enum": ["Bern"]}
    (choice,) = ask(client, "weather in Oslo?", tools=[never, ADD]).choices
    assert shown(choice.message) == (None, [("get_weather", {"city": "Oslo"})])
    never["function"]["strict"] = True
    (choice,) = ask(client, "weather in Oslo?", tools=[never, ADD]).choices
    assert shown(choice.message)[1][0] == ("get_weather", {"city": "Bern"})
    (choice,) = ask(client, "hello", tools=[never, ADD]).choices
    assert shown(choice.message) == ("Hello! How are you?", [])
    chunks = ask(client, "weather in Oslo?", tools=[never, ADD], stream=True)
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert len([piece for piece in pieces if piece.index == 0]) > 3


def test_answers_in_json_beside_calls(client: openai.OpenAI, caller: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    (choice,) = ask(client, "weather in Oslo?", response_format=form).choices
    assert shown(choice.message)[1] == [("get_weather", {"city": "Oslo"})]
    mark = Tokenizer.from_file(str(caller / "tokenizer.json")).token_to_id("<tool_call>")
    (choice,) = ask(client, "hello", response_format=form, logit_bias={str(mark): -1000}).choices
    assert json.loads(choice.message.content) == {"a": 1}
    (choice,) = ask(client, "hello", response_format=form, tool_choice=REQUIRED).choices
    assert shown(choice.message)[1][0][0] == "get_weather"


def test_harmless_forms(client: openai.OpenAI) -> None:
    """Without a tool that may be called, nothing about tools is shown to the model."""
    message = [{"role": "user", "content": "hello"}]
    plain = client.chat.completions.create(model="caller", messages=message, max_tokens=9)  # type: ignore[arg-type]
    for options in ({"tools": []}, {"tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}):
        done = ask(client, "hello", max_tokens=9, **options)
        assert done.choices[0].message == plain.choices[0].message
        assert done.usage == plain.usage


def test_probabilities_are_those_of_all_tokens(client: openai.OpenAI) -> None:
    done = ask(client, "add 2 and 3", logprobs=True)
    content = done.choices[0].logprobs.content
    assert len(content) == done.usage.completion_tokens
    assert "".join(token.token for token in content).startswith("Let me see.\n<tool_call>")
    chunks = list(ask(client, "add 2 and 3", logprobs=True, stream=True))
    found = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for part in found if part for token in part.content] == content


def test_refusals(client: openai.OpenAI) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    assert refusal(client, tool_choice=other) == ("None", "tool_choice names 'other', which is none of the tools")
    assert "needs tools" in refusal(client, tools=[], tool_choice="required")[1]
    assert "same name" in refusal(client, tools=[ADD, ADD])[1]
    for name in ("", "a b", "ü", "x" * 65, "a.b", 'a"', "a\n"):
        assert refusal(client, tools=[{"type": "function", "function": {"name": name}}])[0] == "tools[0]"
    field, problem = refusal(client, tools=[{"type": "web_search"}])
    assert (field, "web_search" in problem) == ("tools[0]", True)
    for schema in ({"type": "string"}, {"type": "object", "properties": {"a": {"type": "no"}}}):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        assert refusal(client, tools=[tool], tool_choice="required")[0] == "tools"
    assert refusal(client, tool_choice="required", extra_body={"regex": "a"})[0] == "tool_choice"
    assert refusal(client, tools=[ADD] * 129)[0] == "tools"
    call = called("add", a=1)
    asked = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_2", "content": "3"}
    assert refusal(client, [CHATS[0][0], asked, result]) == (
        "messages[2]", "tool_call_id 'call_2' is none of the calls before it"
    )  # fmt: skip
    for arguments in ("[1]", "{", "3"):
        broken = {**asked, "tool_calls": [{**call, "function": {"name": "add", "arguments": arguments}}]}
        assert refusal(client, [CHATS[0][0], broken])[0] == "messages[1]"


def test_hostile_tools(client: openai.OpenAI, server: Server) -> None:
    """Deep, large and slow schemas are errors of the request."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    wide = {"type": "object", "properties": {f"p{place}": {"type": "string"} for place in range(30_000)}}
    slow = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a{1,900}){1,900}$"}}}
    for schema in (deep, wide, slow):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        try:
            ask(client, "hello", tools=[tool], tool_choice="required", max_tokens=5)
        except openai.BadRequestError as error:
            assert error.param in ("tools", "messages"), error
    assert not server.events("exception")
    assert ask(client, "hello").choices[0].message.content == "Hello! How are you?"
