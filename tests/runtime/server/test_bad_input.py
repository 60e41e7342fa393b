"""Bad requests: the right status, one error in OpenAI's shape, and nothing else disturbed."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.runtime.server.conftest import KEPT, POSITIONS, SECONDS, Server, serving
from zoo_runtime.server.http.bodies import Body
from zoo_runtime.server.http.inference.tensors import InferBody
from zoo_runtime.server.http.openai.bodies import Chat, Embeddings, TaskInputs
from zoo_runtime.server.http.openai.completions import Completion

COMPLETIONS, CHATS, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, limits=KEPT, timeout=SECONDS) as client:
        yield client


@pytest.fixture(autouse=True)
def undisturbed(http: httpx.Client) -> Iterator[None]:
    """An answer is the same before and after each test, and no row stays taken."""

    def ask() -> Any:
        body = {"model": "writer", "prompt": "hello", "max_tokens": 5, "temperature": 2, "seed": 1}
        return http.post(COMPLETIONS, json=body).json()["choices"]

    before = ask()
    yield
    assert ask() == before
    assert 'zoo_waiting{model="writer"} 0.0' in http.get("/metrics").text


def refused(response: httpx.Response, status: int, code: str | None = None, param: str | None = None) -> str:
    """Assert that a response is an error, and return its message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert 0 < len(error["message"]) <= 1000
    assert "\n" not in error["message"]
    return str(error["message"])


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "writer", "prompt": "a", "max_tokens": 2} | fields


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"a"', b'{"a": NaN}', b"\xff", b'{"prompt": "\\ud800"}', b"[" * 9000, b"1" * 9000,
     b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a", "metadata": {"a": [{"b": 1, "b": 1}]}}',
     b'{"prompt": "a", "\\u0070rompt": "b"}', b'{"prompt": "a"} {}', b'\xef\xbb\xbf{"prompt": "a"}',
     b'{"a\\nb": 1, "a\\nb": 1}'],
)  # fmt: skip
def test_body_that_is_no_json_object(http: httpx.Client, body: bytes) -> None:
    refused(http.post(COMPLETIONS, content=body, headers=JSON), 400, "invalid_json")


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": 5}, "invalid_type", "prompt"),
        ({"prompt": [1.5]}, "invalid_type", "prompt"),
        ({"prompt": [[1], "a"]}, "invalid_type", "prompt"),
        ({"prompt": None}, "missing_field", "prompt"),
        ({"prompt": []}, "invalid_value", "prompt"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": [10**9]}, "invalid_value", "prompt"),
        ({"prompt": [-1]}, "invalid_value", "prompt"),
        ({"prompt": [10**40]}, "invalid_value", "prompt"),
        ({"prompt": "a" * POSITIONS * 2}, "context_length_exceeded", "prompt"),
        ({"prompt": [5] * POSITIONS}, "context_length_exceeded", "prompt"),
        ({"prompt": ["a"] * 1000}, "invalid_value", "prompt"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"temperature": True}, "invalid_type", "temperature"),
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"temperature": 1, "top_p": 7}, "invalid_value", "top_p"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": 10**9}, "invalid_value", "max_tokens"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": 10**6}, "invalid_value", "n"),
        ({"seed": 2**64}, "invalid_value", "seed"),
        ({"seed": -(2**63) - 1}, "invalid_value", "seed"),
        ({"stop": 1}, "invalid_type", "stop"),
        ({"stop": [""]}, "invalid_value", "stop"),
        ({"stream": "yes"}, "invalid_type", "stream"),
        ({"stream_options": []}, "invalid_type", "stream_options"),
        ({"logit_bias": {"a": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": 1.7e308}}, "invalid_value", "logit_bias"),
        ({"repetition_penalty": 1e-320}, "invalid_value", "repetition_penalty"),
        ({"repetition_penalty": 1e5}, "invalid_value", "repetition_penalty"),
        ({"logit_bias": {"5": "x"}}, "invalid_type", "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "invalid_value", "logit_bias"),
        ({"stop_token_ids": [99999999]}, "invalid_value", "stop_token_ids"),
        ({"suppress_tokens": [-1]}, "invalid_value", "suppress_tokens"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objct"}}}},
            "invalid_value",
            "response_format",
        ),
        ({"response_format": {"type": "json_schema"}}, "missing_field", "response_format"),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format"),
        ({"stream_options": {"usage": True}}, "unknown_field", "stream_options"),
        ({"regex": "("}, "invalid_value", "regex"),
        ({"regex": "(a{1000}){1000}"}, "invalid_value", "regex"),
        ({"presence_penalty": 2.1}, "invalid_value", "presence_penalty"),
        ({"frequency_penalty": "x"}, "invalid_type", "frequency_penalty"),
        ({"echo": 1}, "invalid_type", "echo"),
        ({"best_of": 0}, "invalid_value", "best_of"),
        ({"ignore_eos": "yes"}, "invalid_type", "ignore_eos"),
        ({"stream_options": {"continuous_usage_stats": 1}}, "invalid_type", "stream_options"),
        ({"draft": "/etc"}, "unknown_field", "draft"),
        ({"num_beams": 1000}, "unknown_field", "num_beams"),
        ({"tempratur": 1}, "unknown_field", "tempratur"),
    ],
)
def test_wrong_field(http: httpx.Client, fields: dict[str, Any], code: str, param: str | None) -> None:
    refused(http.post(COMPLETIONS, json=asked(**fields)), 400, code, param)
    refused(http.post(COMPLETIONS, json=asked(**{"stream": True} | fields)), 400, code, param)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"suffix": "x"}, "suffix is not supported"),
        ({"best_of": 2, "n": 3}, "best_of must be at least n, got 2 and 3"),
        ({"best_of": 3, "stream": True}, "best_of must equal n in a stream, got 3 and 1"),
        ({"max_tokens": 0}, "max_tokens 0 requires echo"),
    ],
)
def test_fields_that_are_not_supported(http: httpx.Client, fields: dict[str, Any], message: str) -> None:
    assert http.post(COMPLETIONS, json=asked(**fields)).json()["error"]["message"] == message


def test_too_many_probabilities_are_refused_before_they_are_computed(http: httpx.Client) -> None:
    fields = {"n": 40, "max_tokens": 2_000, "logprobs": 20}
    message = refused(http.post(COMPLETIONS, json=asked(**fields)), 400, "answer_too_large", "max_tokens")
    assert "ask for fewer, or for a stream" in message
    read = {"prompt": [[5] * 90] * 40, "max_tokens": 1_200, "logprobs": 20}
    assert http.post(COMPLETIONS, json=asked(**read, stream=True, n=1)).status_code == 200
    refused(http.post(COMPLETIONS, json=asked(**read, echo=True)), 400, "answer_too_large", "max_tokens")


def test_wrong_model(http: httpx.Client, encoder: Path, translator: Path) -> None:
    assert "'writer'" in refused(http.post(COMPLETIONS, json=asked(model="writr")), 404, "model_not_found", "model")
    refused(http.post(COMPLETIONS, json={"prompt": "a"}), 400, "missing_field", "model")
    refused(http.post(COMPLETIONS, json=asked(model=encoder.name)), 400, "wrong_task", "model")
    refused(http.post(EMBEDDINGS, json={"model": "writer", "input": "a"}), 400, "wrong_task", "model")
    refused(http.get("/v1/models/none"), 404, "model_not_found", "model")
    talk = {"model": translator.name, "messages": [{"role": "user", "content": "a"}]}
    refused(http.post(CHATS, json=talk), 400, "no_chat_template", "model")


@pytest.mark.parametrize(
    "messages",
    [[], ["a"], [{"role": "user"}], [{"content": "a"}], [{"role": "system", "content": "a"}],
     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
     [{"role": "user", "content": [5]}]],
)  # fmt: skip
def test_wrong_messages(http: httpx.Client, messages: list[Any]) -> None:
    response = http.post(CHATS, json={"model": "writer", "messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages")


def test_wrong_input_of_embeddings(http: httpx.Client, encoder: Path) -> None:
    for value, code in (("", "invalid_value"), ([], "invalid_value"), ({}, "invalid_type"),
                        ("a" * 500, "context_length_exceeded"), (["a", ""], "invalid_value")):  # fmt: skip
        refused(http.post(EMBEDDINGS, json={"model": encoder.name, "input": value}), 400, code, "input")
    body = {"model": encoder.name, "input": "a", "dimensions": 3}
    refused(http.post(EMBEDDINGS, json=body), 400, "invalid_value", "dimensions")


def test_wrong_route_method_and_type(http: httpx.Client) -> None:
    for path in ("/v1/nothing", "/v1/models/", "/v1/models/%2F"):
        refused(http.get(path), 404, "unknown_route")
    refused(http.get(COMPLETIONS), 405, "wrong_method")
    refused(http.post(COMPLETIONS, content=json.dumps(asked()), headers={"content-type": "text/plain"}), 415,
            "invalid_content_type")  # fmt: skip


@pytest.mark.parametrize("route", [COMPLETIONS, "/v2/models/writer/infer"])
def test_other_charsets_and_compressed_bodies(http: httpx.Client, route: str) -> None:
    """They would be read as if they were plain UTF-8."""
    text = json.dumps(asked())
    other = {"content-type": 'application/json; charset="ISO-8859-1"'}
    response = http.post(route, content=text.encode("latin-1"), headers=other)
    assert response.status_code == 415
    assert "charset" in response.text
    for encoding in ("gzip", "identity, br"):
        response = http.post(route, content=gzip.compress(text.encode()), headers=JSON | {"content-encoding": encoding})
        assert response.status_code == 415
        assert response.headers["accept-encoding"] == "identity"
    for headers in ({"content-type": "application/json; Charset=UTF-8"}, JSON | {"content-encoding": "identity"}):
        assert http.post(route, content=text, headers=headers).status_code == (200 if route == COMPLETIONS else 400)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "a": 1}}, "response_format.json_schema.a"),
        ({"type": "text", "text": 1}, "response_format.text"),
    ],
)
def test_paths_in_messages_are_those_of_the_body(http: httpx.Client, given: dict[str, Any], path: str) -> None:
    code = "missing_field" if path.endswith("schema") else "unknown_field"
    assert f"field {path!r}" in refused(
        http.post(COMPLETIONS, json=asked(response_format=given)), 400, code, "response_format"
    )


def test_long_texts_are_refused_by_their_bytes(writer: Path) -> None:
    """Without encoding them: each token of this tokenizer has at most 13 bytes, those of <|endoftext|>."""
    text = "é" * (13 * POSITIONS // 2 + 1)
    with (
        serving(writer, "--unverified") as server,
        httpx.Client(base_url=server.url, limits=KEPT, timeout=SECONDS) as client,
    ):
        talk = {"model": "writer", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        for route, body, param in ((COMPLETIONS, asked(prompt=text), "prompt"), (CHATS, talk, "messages")):
            message = refused(client.post(route, json=body), 400, "context_length_exceeded", param)
            assert message == "more than 96 tokens exceed the model's 96 positions"
        message = refused(client.post(COMPLETIONS, json=asked(prompt=text[:POSITIONS])), 400, "context_length_exceeded",
                          "prompt")  # fmt: skip
        assert message.startswith("192 tokens")


def test_body_beyond_the_limit(http: httpx.Client, server: Server) -> None:
    """Said by its length before it is sent, or found out while it is read in parts."""
    refused(http.post(COMPLETIONS, json=asked(prompt="a" * 30_000)), 413, "body_too_large")

    def parts() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 1000

    refused(http.post(COMPLETIONS, content=parts(), headers=JSON), 413, "body_too_large")
    address = urlsplit(server.url)
    with socket.create_connection((str(address.hostname), int(address.port or 0)), SECONDS) as raw:
        raw.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                    f"content-length: {10**9}\r\n\r\n".encode())  # fmt: skip
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


def test_idle_connections_and_broken_ones(http: httpx.Client, server: Server) -> None:
    """Connections that send nothing, half a request or nonsense do not keep others from being answered."""
    address = urlsplit(server.url)
    place = (str(address.hostname), int(address.port or 0))
    opened = [socket.create_connection(place, SECONDS) for _ in range(200)]
    try:
        opened[0].sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-le")
        opened[1].sendall(b"\x00\x01nonsense\r\n\r\n")
        assert opened[1].recv(100).startswith(b"HTTP/1.1 400")
        opened[2].sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                          b"content-length: 50\r\n\r\n{")  # fmt: skip
        opened[2].close()
        assert http.post(COMPLETIONS, json=asked()).status_code == 200
    finally:
        for connection in opened:
            connection.close()


def test_reader_that_does_not_read(http: httpx.Client, server: Server) -> None:
    """Its texts are generated to their end, and others are answered meanwhile."""
    body = asked(prompt=["a"] * 20, max_tokens=80, stream=True, temperature=2)
    with http.stream("POST", COMPLETIONS, json=body):
        assert http.post(COMPLETIONS, json=asked()).status_code == 200


def test_client_raises_the_classes_of_openai(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="writer", prompt="a" * 500)
        assert bad.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="none", prompt="a")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = ["model", "prompt", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "logprobs",
         "logit_bias", "response_format", "stream_options", "suppress_tokens", "regex", "messages",
         "input", "user", "x"]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(fields=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), route=st.sampled_from([COMPLETIONS, CHATS]))
def test_any_body_is_answered_or_refused(http: httpx.Client, fields: dict[str, Any], route: str) -> None:
    """No body causes a failure of the server."""
    talk = {"model": "writer", "max_tokens": 2}
    talk |= {"prompt": "a"} if route == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    response = http.post(route, json=talk | fields)
    assert response.status_code in (200, 400, 404), (fields, response.text)
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"suppress_tokens": [*range(260)]}, "forbid every token as new token 1"),
        ({"regex": "a", "suppress_tokens": [97]}, "forbid every token as new token 1"),
    ],
)
def test_options_that_leave_no_token_are_errors_of_the_request(
    http: httpx.Client, options: dict[str, Any], reason: str
) -> None:
    assert reason in refused(http.post(COMPLETIONS, json=asked(**options)), 400, "invalid_value")
    with http.stream("POST", COMPLETIONS, json=asked(stream=True, **options)) as response:
        assert response.status_code == 400


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "suppress_tokens", "logit_bias"])
def test_lists_of_options_are_limited(name: str) -> None:
    tokens = [*range(10_001)]
    value = {"stop": ["a"] * 1_001, "logit_bias": {str(token): 0.5 for token in tokens}}.get(name, tokens)
    with pytest.raises(ValidationError, match="at most"):
        Completion.model_validate({"prompt": "a", name: value})


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (Completion, {"prompt": [1.5] * 3_000}),
        (Completion, {"prompt": [[0.5] * 3_000]}),
        (Completion, {"prompt": [[0.5]] * 3_000}),
        (Completion, {"prompt": "a", "suppress_tokens": ["a"] * 3_000}),
        (Completion, {"prompt": "a", "stop": [1] * 900}),
        (Completion, {"prompt": "a"} | {f"unknown{number}": 1 for number in range(3_000)}),
        (Completion, {"prompt": "a", "stream_options": {f"unknown{number}": 1 for number in range(3_000)}}),
        (Chat, {"messages": [1] * 3_000}),
        (Chat, {"messages": [{"role": "user", "content": [1] * 3_000}]}),
        (Embeddings, {"input": [None] * 3_000}),
        (TaskInputs, {"inputs": [None] * 3_000}),
        (InferBody, {"inputs": [1] * 3_000}),
        (InferBody, {"inputs": [{"name": "a", "shape": ["1"] * 3_000, "datatype": "BOOL"}]}),
    ],
)
def test_long_lists_of_errors_end_early(body: type[Body], fields: dict[str, Any]) -> None:
    """Each error takes more time and memory than the item that it is about."""
    with pytest.raises(ValidationError) as caught:
        body.model_validate(fields)
    assert caught.value.error_count() < 8


def test_errors_of_many_biases_are_limited() -> None:
    with pytest.raises(ValidationError) as caught:
        Completion.model_validate({"prompt": "a", "logit_bias": {f"a{number}": 1.0 for number in range(50_000)}})
    assert caught.value.error_count() <= 10_001


def test_request_with_two_lengths_is_refused_and_its_connection_closed(server: Server) -> None:
    where = urlsplit(server.url)
    request = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 48\r\n"
        "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    )
    with socket.create_connection((where.hostname, where.port), SECONDS) as connection:
        connection.sendall(request.encode())
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"two_lengths" in answer


def test_tokens_with_parts_of_characters_stay_apart(http: httpx.Client) -> None:
    """Their bytes are no text, and several have the same replacement character."""
    body = asked(max_tokens=16, temperature=2, seed=1, logprobs=5)
    (choice,) = http.post(COMPLETIONS, json=body).json()["choices"]
    found = choice["logprobs"]["top_logprobs"]
    for chance, tops in zip(choice["logprobs"]["token_logprobs"], found, strict=True):
        assert len(tops) in (5, 6)
        assert chance in tops.values()
    assert any(name.startswith("token_id:") for tops in found for name in tops)
