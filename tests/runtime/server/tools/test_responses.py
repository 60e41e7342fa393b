"""``/v1/responses`` over a real socket, with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.runtime.server.caller import CHATS, TOOLS
from tests.runtime.server.conftest import KEPT, SECONDS, Server, serving

FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture(scope="module")
def server(caller: Path) -> Iterator[Server]:
    with serving(caller, "--unverified") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as found:
        yield found


def test_texts(client: openai.OpenAI) -> None:
    """The answer is that of the chat with the same messages."""
    chat = client.chat.completions.create(
        model="caller", messages=[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}],
        max_tokens=12, temperature=1.5, seed=None, n=1, top_p=0.01,
    )  # fmt: skip
    done = client.responses.create(
        model="caller", input="hello", instructions="Be kind.", max_output_tokens=12, temperature=1.5, top_p=0.01,
        store=True, metadata={"a": "b"},
    )  # fmt: skip
    assert done.output_text == chat.choices[0].message.content
    assert (done.status == "incomplete") == (chat.choices[0].finish_reason == "length")
    assert (done.metadata, done.instructions, done.store if hasattr(done, "store") else False) == (
        {"a": "b"},
        "Be kind.",
        False,
    )
    assert chat.usage is not None
    assert done.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    cut = client.responses.create(model="caller", input="hello", max_output_tokens=2, tools=FLAT)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_conversation_with_calls(client: openai.OpenAI) -> None:
    """Output items go back as input, as the client returns them."""
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "weather in Oslo?"}]}]
    first = client.responses.create(model="caller", input=items, tools=FLAT, max_output_tokens=60)
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("get_weather", {"city": "Oslo"}, "completed")
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    second = client.responses.create(model="caller", input=items, tools=FLAT, max_output_tokens=60)
    assert second.output_text == "It is sunny in Oslo."
    both = client.responses.create(model="caller", input="add 2 and 3", tools=FLAT, max_output_tokens=60)
    assert [item.type for item in both.output] == ["message", "function_call"]
    assert both.output_text == "Let me see."
    named = client.responses.create(
        model="caller", input="hello", tools=FLAT, tool_choice={"type": "function", "name": "add"}, max_output_tokens=60
    )
    assert [item.type for item in named.output] == ["function_call"]


@pytest.mark.parametrize("chat", CHATS[2:], ids=lambda chat: chat[0]["content"])
def test_events(client: openai.OpenAI, chat: list[dict[str, Any]]) -> None:
    """The events describe the whole answer, in the order of OpenAI's API."""
    options: dict[str, Any] = {
        "model": "caller", "input": chat[0]["content"], "tools": FLAT, "max_output_tokens": 80
    }  # fmt: skip
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    shown = [(item.type, getattr(item, "arguments", None), getattr(item, "name", None)) for item in whole.output]
    assert [
        (item.type, getattr(item, "arguments", None), getattr(item, "name", None)) for item in final.output
    ] == shown
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    raw = list(client.responses.create(**options, stream=True))
    assert [event.sequence_number for event in raw] == [*range(len(raw))]
    types = [event.type for event in raw]
    assert types[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    deltas: dict[str, str] = {}
    for event in raw:
        if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
        elif event.type == "response.output_text.done":
            assert deltas[event.item_id] == event.text
        elif event.type == "response.function_call_arguments.done":
            assert deltas[event.item_id] == event.arguments
        elif event.type == "response.output_item.done":
            assert event.item.status == "completed"  # type: ignore[union-attr]
    assert types.count("response.output_item.added") == types.count("response.output_item.done") == len(whole.output)


def test_events_of_an_incomplete_answer(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"tools": FLAT, "tool_choice": "required", "max_output_tokens": 14}
    raw = list(client.responses.create(model="caller", input="hello", stream=True, **options))
    assert raw[-1].type == "response.incomplete"
    assert raw[-1].response.incomplete_details.reason == "max_output_tokens"  # type: ignore[union-attr]
    (item,) = raw[-1].response.output
    whole = client.responses.create(model="caller", input="hello", **options).output
    assert (item.type, item.status, item.arguments) == ("function_call", "incomplete", whole[0].arguments)  # type: ignore[union-attr]


def test_names_of_events(server: Server) -> None:
    body = {"input": "hello", "stream": True, "max_output_tokens": 4}
    with httpx.Client(base_url=server.url, limits=KEPT, timeout=SECONDS) as http:
        text = http.post("/v1/responses", json=body).text
    events = [block.split("\n") for block in text.strip().split("\n\n")]
    for name, data in events:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_texts_in_json(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    done = client.responses.create(model="caller", input="hello", text=form, max_output_tokens=30)
    assert json.loads(done.output_text) == {"a": 7}
    assert done.text is not None
    assert done.text.format is not None
    assert done.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("fields", "param", "fragment"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "the tool 'web_search' is not supported"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0]", "file_search"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "an item must be a message, a function_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]", "input_text"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input", "none of the calls"),
        ({"input": []}, "input", ""),
        ({"tool_choice": "required"}, None, "needs tools"),
        ({"background": True}, "background", "not supported"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "at most 4096 tokens"),
        ({"max_tokens": 3}, "max_tokens", "unknown field"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}}, "text", "invalid"),
        ({"model": "other"}, "model", "no model 'other'"),
    ],
)  # fmt: skip
def test_refusals(server: Server, fields: dict[str, Any], param: str | None, fragment: str) -> None:
    with httpx.Client(base_url=server.url, limits=KEPT, timeout=SECONDS) as http:
        done = http.post("/v1/responses", json={"model": "caller", "input": "hello", **fields})
    assert done.status_code in (400, 404)
    error = done.json()["error"]
    assert str(error["param"]).partition("[")[0] == str(param).partition("[")[0]
    assert fragment in error["message"]
