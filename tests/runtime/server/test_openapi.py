"""The OpenAPI document, and random requests made from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.server.conftest import KEPT, SECONDS, Server
from tests.runtime.server.schemas import JSON, values


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, limits=KEPT, timeout=SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/openapi.json").json()
    return found


def bodies(document: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas of bodies in JSON, by path."""
    return {
        path: operation["requestBody"]["content"]["application/json"]["schema"]
        for path, item in document["paths"].items()
        for operation in item.values()
        if "requestBody" in operation
    }


def test_document_is_sound(document: dict[str, Any]) -> None:
    """Its schemas are valid, its references lead somewhere, and each operation has a name of its own."""
    assert document["openapi"].startswith("3.1.")
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)

    def check(part: Any) -> None:
        if isinstance(part, dict):
            if isinstance(part.get("$ref"), str):
                name = part["$ref"].removeprefix("#/components/schemas/")
                assert name in document["components"]["schemas"]
            for inner in part.values():
                check(inner)
        elif isinstance(part, list):
            for inner in part:
                check(inner)

    check(document)
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations) > 8
    for path, item in document["paths"].items():
        for operation in item.values():
            wanted = {part[1:-1] for part in path.split("/") if part.startswith("{")}
            assert {parameter["name"] for parameter in operation.get("parameters", [])} == wanted


def test_document_says_what_is_checked(document: dict[str, Any], http: httpx.Client) -> None:
    """Bodies on both sides of a declared bound are treated as the schema says."""
    schema = {**document["components"]["schemas"]["Completion"], "components": document["components"]}
    check = jsonschema.Draft202012Validator(schema)
    for fields in ({"n": 0}, {"n": 1}, {"temperature": -0.1}, {"temperature": 0}, {"logprobs": 20}, {"logprobs": 21},
                   {"logit_bias": {"a": 1}}, {"logit_bias": {"5": 1}}, {"echo": True}, {"echo": 1}, {"x": 1},
                   {"seed": -(2**63)}, {"seed": 2**64}, {"presence_penalty": -2}, {"frequency_penalty": 2.1},
                   {"best_of": 2}, {"best_of": 0}, {"ignore_eos": True}, {"additional_properties": 0},
                   {"stop": "a"}, {"stop": 1}, {"response_format": {"type": "xml"}}, {"prompt": []},
                   {"response_format": {"type": "text"}}, {"stream_options": {"usage": 1}}):  # fmt: skip
        body = {"model": "writer", "prompt": "a", "max_tokens": 1, **fields}
        assert check.is_valid(body) == (http.post("/v1/completions", json=body).status_code == 200), fields


def paths(document: dict[str, Any], models: list[str]) -> st.SearchStrategy[tuple[str, str, Any]]:
    """Return methods, paths and bodies: fitting ones for the most part, with one part replaced by any value."""
    names = st.sampled_from([*models, "fill-mask", "next-token", "feature-extraction", "1"]) | st.text(min_size=1)

    @st.composite
    def one(draw: Any) -> tuple[str, str, Any]:
        path = draw(st.sampled_from(list(document["paths"])))
        method = draw(st.sampled_from(list(document["paths"][path])))
        body = None
        if path in bodies(document):
            body = draw(values(bodies(document)[path], document))
            if draw(st.integers(0, 4)):
                body["model"] = models[0] if path == "/v1/embeddings" else "writer"
            if not draw(st.integers(0, 9)):
                body["model"] = draw(st.sampled_from(models))
            if "max_tokens" in body:
                body["max_tokens"] = draw(st.integers(1, 8))
            if body and not draw(st.integers(0, 3)):
                body[draw(st.sampled_from(sorted(body)))] = draw(JSON)
        while "{" in path:
            start, end = path.index("{"), path.index("}")
            path = path[:start] + quote(draw(names), safe="") + path[end + 1 :]
        return method, path, body

    return one()


def check_random_requests(server: Server, http: httpx.Client, document: dict[str, Any], count: int) -> None:
    """No request fails in the server, and an error has the declared shape and a reason."""
    listed = http.get("/v1/models").json()["data"]
    models = [model["id"] for model in sorted(listed, key=lambda model: model["task"] != "fill-mask")]
    seen: Counter[int] = Counter()

    @settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(request=paths(document, models))
    def run(request: tuple[str, str, Any]) -> None:
        method, path, body = request
        response = http.request(method.upper(), path, json=body)
        seen[response.status_code] += 1
        assert response.status_code in (200, 400, 404, 413, 429), (request, response.text)
        if response.status_code != 200:
            name = "InferenceError" if path.startswith("/v2") else "Error"
            jsonschema.validate(response.json(), document["components"]["schemas"][name])
            error = response.json()["error"]
            assert error if isinstance(error, str) else error["message"]

    run()
    assert seen[200] >= count // 50
    assert seen[400] >= count // 20
    assert not server.events("exception")


def test_random_requests(server: Server, http: httpx.Client, document: dict[str, Any]) -> None:
    check_random_requests(server, http, document, 60)


@pytest.mark.slow
def test_many_random_requests(server: Server, http: httpx.Client, document: dict[str, Any]) -> None:
    check_random_requests(server, http, document, 1500)
