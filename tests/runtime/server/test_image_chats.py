"""``zoo serve``: chats with an image, as OpenAI's API has them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.exported import sign_export
from tests.runtime.image_chat_models import NEW, picture, save_llava
from tests.runtime.server.conftest import KEPT, SECONDS, Server, serving
from zoo.checkpoints import import_checkpoint
from zoo_runtime import Pair, load_session


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    save_llava(folder / "hub")
    import_checkpoint(folder / "hub", folder / "llava", verify=False)
    sign_export(folder / "llava")
    picture(folder)
    return folder / "llava"


@pytest.fixture(scope="module")
def server(model: Path, encoder: Path, cache: Path) -> Iterator[Server]:
    with serving(model, encoder, "--unverified", "--max-body", 1_000_000, "--log-texts") as running:
        yield running


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, limits=KEPT, timeout=SECONDS) as client:
        yield client


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def ask(*urls: str, text: str = "w3 w9 w1", **more: Any) -> dict[str, Any]:
    """Return the body of a request about images."""
    images = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    content = [{"type": "text", "text": text}, *images]
    return {"model": "llava", "messages": [{"role": "user", "content": content}], "max_tokens": NEW, **more}


def test_chats_with_an_image_are_answered_as_by_the_session(model: Path, server: Server, http: httpx.Client) -> None:
    cat = model.parent / "cat.png"
    with load_session(model, chat=True, threads=1) as session:
        wanted = session.run(Pair(str(cat), "w3 w9 w1"), max_new_tokens=NEW)
        alone = session.run("w3 w9 w1", max_new_tokens=NEW)
    url = data_url(cat.read_bytes())
    found = http.post("/v1/chat/completions", json=ask(url))
    assert found.status_code == 200, found.text
    body = found.json()
    assert body["choices"][0]["message"]["content"] == wanted["generated"]
    assert body["usage"]["prompt_tokens"] == wanted["tokens"] == 22
    streamed = http.post("/v1/chat/completions", json=ask(url, stream=True))
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: {")]
    parts = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    assert "".join(parts) == wanted["generated"]
    plain = [ask(), {**ask(), "messages": [{"role": "user", "content": "w3 w9 w1"}]}]
    for request in plain:
        answer = http.post("/v1/chat/completions", json=request).json()
        assert answer["choices"][0]["message"]["content"] == alone["generated"]
        assert answer["usage"]["prompt_tokens"] == alone["tokens"]
    tokens = http.post("/tokenize", json={"model": "llava", "messages": plain[1]["messages"]}).json()["tokens"]
    assert len(tokens) == alone["tokens"]
    logged = str([line for line in server.lines if "w3 w9 w1" in line])
    assert "image_url" in logged
    assert url[30:60] not in logged


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        (("https://a.example/cat.png",), "expected data:image/png;base64,..., got 'https://a.example/cat.png'"),
        (("file:///etc/passwd",), "images are not fetched"),
        (("cat.png",), "images are not fetched"),
        (("data:text/plain;base64,aGk=",), "cannot be read as an image (none of BMP"),
        (("data:image/svg+xml,<svg/>",), "encode the image as base64"),
        (("data:image/png;base64,%%%",), "the image is not base64"),
        ((data_url(b"not an image"),), "cannot be read as an image"),
        ((data_url(b"1"), data_url(b"2")), "the chat has 2 images, of which only one is supported"),
    ],
)
def test_images_that_are_refused(http: httpx.Client, urls: tuple[str, ...], said: str) -> None:
    for path, body in (("/v1/chat/completions", ask(*urls)), ("/v1/chat/completions", ask(*urls, stream=True))):
        found = http.post(path, json=body)
        assert found.status_code == 400, found.text
        error = found.json()["error"]
        assert said in error["message"]
        assert (error["param"], error["type"]) == ("messages", "invalid_request_error")


def test_other_requests_that_are_refused(model: Path, http: httpx.Client) -> None:
    url = data_url((model.parent / "cat.png").read_bytes())
    messages = ask(url)["messages"]
    refused = http.post("/tokenize", json={"model": "llava", "messages": messages})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_image")
    text = {"role": "user", "content": "<image> w1"}
    refused = http.post("/v1/chat/completions", json={"model": "llava", "messages": [text]})
    assert refused.status_code == 400
    assert "place for an image, but there is none" in refused.json()["error"]["message"]
    for part in ({"type": "image", "path": "cat.png"}, {"type": "image_url"}, {"type": "input_audio"}):
        refused = http.post(
            "/v1/chat/completions", json={"model": "llava", "messages": [{"role": "user", "content": [part]}]}
        )
        assert refused.status_code == 400, part
    encoder = http.post("/v1/chat/completions", json={**ask(url), "model": "bert-tiny"})
    assert encoder.status_code == 400


def test_pairs_of_a_task_have_the_image_itself_and_never_name_a_file(model: Path, http: httpx.Client) -> None:
    cat, prompt = model.parent / "cat.png", "w3 <image> w9"
    with load_session(model, threads=1) as session:
        wanted = session.run(Pair(str(cat), prompt), max_new_tokens=NEW)
    task = "/v1/tasks/image-text-to-text"
    body: dict[str, Any] = {"model": "llava", "options": {"max_new_tokens": NEW}}
    image = {"base64": base64.b64encode(cat.read_bytes()).decode()}
    found = http.post(task, json={**body, "inputs": [{"pair": [image, prompt]}, "w3"]})
    assert found.status_code == 200, found.text
    assert found.json()["data"][0]["generated_ids"] == wanted["generated_ids"]
    for first in (str(cat), {"base64": "?"}, {"path": str(cat)}, {**image, "path": str(cat)}):
        refused = http.post(task, json={**body, "inputs": [{"pair": [first, prompt]}]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "inputs[0]"), first
