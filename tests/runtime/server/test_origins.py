"""Pages in browsers: those of allowed origins may use the server, and those of others are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.runtime.server.conftest import SECONDS, Server, serving

OURS, THEIRS = "https://app.example.org", "https://example.org"
BODY = {"model": "writer", "prompt": "a", "max_tokens": 2}
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}


@pytest.fixture(scope="module")
def open_url(writer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server for pages of one origin, with a key."""
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("word")
    with serving(writer, "--unverified", "--cors-origin", OURS, "--api-key-file", key) as server:
        yield server.url


@pytest.mark.parametrize("origin", [OURS, THEIRS, "null", ""])
def test_no_page_may_use_the_server_by_default(server: Server, origin: str) -> None:
    """Also one that the browser takes for the server's own, after its name has changed to this machine's address."""
    for path in ("/v1/completions", "/v2/models/writer/infer", "/nothing"):
        for method, headers in (("POST", {}), ("GET", {}), ("OPTIONS", ASKS)):
            found = httpx.request(
                method, server.url + path, json=BODY, headers={"origin": origin, **headers}, timeout=SECONDS
            )
            assert found.status_code == 403
            assert not any(name.startswith("access-control") for name in found.headers)
            error = found.json()["error"]
            assert "--cors-origin" in (error if path.startswith("/v2") else error["message"])


def test_page_of_an_allowed_origin(open_url: str) -> None:
    """It asks without a key, may send one, and can read answers and errors."""
    url = f"{open_url}/v1/completions"
    asked = httpx.options(url, headers={"origin": OURS, **ASKS}, timeout=SECONDS)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == OURS
    assert {"authorization", "content-type"} <= set(asked.headers["access-control-allow-headers"].split(", "))
    for key, status in (("word", 200), ("other", 401)):
        headers = {"origin": OURS, "authorization": f"Bearer {key}"}
        found = httpx.post(url, json=BODY, headers=headers, timeout=SECONDS)
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (status, OURS)
        assert "retry-after" in found.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in found.headers


def test_page_of_another_origin(open_url: str) -> None:
    headers = {"origin": THEIRS, "authorization": "Bearer word"}
    assert httpx.post(f"{open_url}/v1/completions", json=BODY, headers=headers, timeout=SECONDS).status_code == 403
    assert httpx.options(f"{open_url}/v1/completions", headers=headers | ASKS, timeout=SECONDS).status_code == 403


def test_all_origins(writer: Path) -> None:
    with serving(writer, "--unverified", "--cors-origin", "*") as server:
        found = httpx.post(f"{server.url}/v1/completions", json=BODY, headers={"origin": THEIRS}, timeout=SECONDS)
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, "*")
