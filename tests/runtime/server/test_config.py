"""The configuration file of the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.server.conftest import KEPT, SECONDS, serving
from zoo.errors import UsageError
from zoo_runtime.server.config import ServeConfig, read_config

Zoo = Callable[..., Any]


def write(folder: Path, text: str) -> Path:
    path = folder / "serve.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = ", "not TOML"),
        ("prot = 1", "unknown key 'prot' for ServeConfig"),
        ("port = '1'", "port must be int"),
        ("host = ''", "host is empty"),
        ("port = 70000", "port must be from 0 to 65535, got 70000"),
        ("cors_origins = 'https://a.b'", "cors_origins must be"),
        ("cors_origins = ['https://a.b', 'https://a.b/c']", "'https://a.b/c' is not an origin"),
        ("queue = 0", "queue must be positive, got 0"),
        ("timeout = inf", "timeout must be finite"),
        ("prefix_cache_bytes = -1", "prefix_cache_bytes must not be negative"),
        ("dtype = 'float17'", "did you mean"),
        ("models = ['a']", "models must be tables"),
        ("[models.a]", "path is missing"),
        ("[models.a]\npath = 'a'\npth = 'a'", "unknown key 'pth' for ModelConfig"),
        ("[models.a]\npath = 'a'\nthreads = 0", "threads must be positive"),
        ("[models.'a/b']\npath = 'a'", "is not a name for requests"),
        ("[models.a.b]\npath = 'a'", "path is missing"),
        ("port = 8000", "no models are given"),
    ],
)
def test_wrong_file(zoo: Zoo, tmp_path: Path, text: str, message: str) -> None:
    """One line that names the file."""
    done = zoo("serve", "--config", write(tmp_path, text))
    assert done.status == 2
    assert message in done.err
    assert "serve.toml" in done.err
    assert done.err.count("\n") == 1


def test_no_models_and_no_file(zoo: Zoo, tmp_path: Path) -> None:
    zoo("serve").failed(2, "no models are given")
    zoo("serve", "--config", tmp_path / "none.toml").failed(2, "cannot be read")


def test_fields_are_read(tmp_path: Path) -> None:
    text = 'queue = 3\nthreads = 2\napi_key_file = "key"\n[models.a]\npath = "b"\ndtype = "int8"\n'
    given, models = read_config(write(tmp_path, text))
    config = ServeConfig.from_dict(given)
    assert (config.queue, config.api_key_file) == (3, str(tmp_path / "key"))
    assert models["a"].path == str(tmp_path / "b")
    options = config.options(models["a"])
    assert (options["dtype"], options["threads"], options["provider"]) == ("int8", 2, "cpu")
    with pytest.raises(UsageError):
        ServeConfig.from_dict({"drain_seconds": -1})


def test_file_and_flags(writer: Path, encoder: Path, tmp_path: Path) -> None:
    """Names are those of the file, and flags win over it."""
    (tmp_path / "key").write_text("word")
    path = write(
        tmp_path,
        f'port = 1\nunverified = true\nmax_tokens = 3\nmax_body = 300\napi_key_file = "key"\n'
        f'[models.a]\npath = "{writer}"\n[models.b]\npath = "{encoder}"\n',
    )
    with serving("--config", path, "--max-body", 2000) as server:
        headers = {"authorization": "Bearer word"}
        with httpx.Client(base_url=server.url, limits=KEPT, timeout=SECONDS, headers=headers) as http:
            assert {model["id"] for model in http.get("/v1/models").json()["data"]} == {"a", "b"}
            body: dict[str, Any] = {"model": "a", "prompt": "a", "max_tokens": 4}
            assert "at most 3 tokens" in http.post("/v1/completions", json=body).json()["error"]["message"]
            body |= {"max_tokens": 2, "metadata": {"a": "b" * 500}}
            assert http.post("/v1/completions", json=body).status_code == 200
            assert http.get("/v1/models", headers={"authorization": ""}).status_code == 401
