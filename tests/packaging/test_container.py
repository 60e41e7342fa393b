"""The steps of docs/howto/deploy/Dockerfile, run without a container: what it installs, and how it serves."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

DOCKERFILE = ROOT / "docs/howto/deploy/Dockerfile"
UNWANTED = ("torch", "onnx", "onnx_ir", "onnxscript", "transformers", "pip")


def instructions(kind: str) -> list[str]:
    """Return the arguments of each instruction of a kind."""
    lines = DOCKERFILE.read_text().replace("\\\n", "").splitlines()
    return [line.removeprefix(f"{kind} ") for line in lines if line.startswith(f"{kind} ")]


def test_container_runs_without_privileges() -> None:
    assert instructions("USER") == ["10001:10001"]
    assert all(image.startswith("python:3.11-slim") for image in instructions("FROM"))
    command = json.loads(instructions("ENTRYPOINT")[0])
    assert command[:2] == ["zoo", "serve"]
    assert "--api-key-file" in command


def copy_context(folder: Path) -> None:
    """Copy the tracked files that the ignore file beside the Dockerfile lets through."""
    rules = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert rules[1] == "*"
    kept = tuple(rule.removeprefix("!") for rule in rules if rule.startswith("!"))
    listed = subprocess.run(["git", "ls-files", "-z", *kept], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)


@pytest.fixture(scope="module")
def installed() -> Iterator[Path]:
    """Run the build stage in a folder that other users can read."""
    place = Path(tempfile.mkdtemp(prefix="zoo-container-"))
    place.chmod(0o755)
    assert instructions("COPY")[0] == ". /src"
    copy_context(place / "src")
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "ZOO"))}
    requirement = json.loads(dict(item.split("=", 1) for item in instructions("ARG"))["ZOO"])
    variables["ZOO"] = requirement.replace("/src", str(place / "src"))
    for step in instructions("RUN"):
        command = re.sub(r"(?<= )/(zoo|src)\b", rf"{place}/\1", step)
        command = re.sub(r"(?<!\S)pip ", f"{sys.executable} -m pip ", command)
        command = re.sub(r"^python ", f"{sys.executable} ", command)
        subprocess.run(command, shell=True, env=variables, check=True, stdout=subprocess.DEVNULL)
    yield place / "zoo"
    shutil.rmtree(place)


def other_user(interpreter: Path) -> dict[str, Any]:
    """Return options of a process of an unprivileged user, if there may be one and it can read the interpreter."""
    user = {"user": 10001, "group": 10001, "extra_groups": []}
    try:
        subprocess.run([interpreter, "-c", ""], check=True, cwd="/", **user)
    except (PermissionError, subprocess.CalledProcessError):
        return {}
    return user


@pytest.mark.slow
def test_installation_is_small_and_serves(installed: Path, zoo: Callable[..., Any]) -> None:
    packages = next(installed.glob("lib/python*/site-packages"))
    assert not [name for name in UNWANTED if (packages / name).exists()]
    assert sum(path.lstat().st_size for path in installed.rglob("*") if path.is_file()) < 250e6

    assert zoo("export", "gpt-tiny", "--onnx", "--set", "max_seq_len=32").status == 0
    model = Path(shutil.copytree("gpt-tiny", installed.parent / "gpt-tiny"))
    key = installed.parent / "key"
    key.write_text("secret")
    for path in (*model.iterdir(), model):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path.name: path.stat().st_mtime_ns for path in (model, *model.iterdir())}

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(key) if part.startswith("/run/") else part for part in json.loads(instructions("ENTRYPOINT")[0])]
    command[0] = str(installed / "bin/zoo")
    settings = dict(part.split("=", 1) for part in shlex.split(instructions("ENV")[0]) if not part.startswith("PATH"))
    options = other_user(installed / "bin/python")
    server = subprocess.Popen(
        [*command, "--port", str(port), model], env={"PATH": os.defpath, **settings}, cwd="/", stderr=subprocess.PIPE,
        **options,
    )  # fmt: skip
    try:
        assert server.stderr is not None
        assert b"listening" in server.stderr.readline()
        check = json.loads(instructions("HEALTHCHECK")[0].partition("CMD ")[2])
        check = [str(installed / "bin/python"), *(part.replace("8000", str(port)) for part in check[1:])]
        for _ in range(60):
            if subprocess.run(check, check=False, capture_output=True).returncode == 0:
                break
            time.sleep(1)
        assert subprocess.run([check[0], "-c", check[2].replace("/readyz", "/none")], check=False).returncode != 0
        assert ask(port, None)[0] == 401
        status, answer = ask(port, "secret")
        wanted = zoo("run", "gpt-tiny", "hello", "--max-new-tokens", "8").out.strip()
        assert (status, "hello" + answer["choices"][0]["text"]) == (200, wanted)
    finally:
        server.terminate()
        assert server.wait(60) == 0
    assert {path.name: path.stat().st_mtime_ns for path in (model, *model.iterdir())} == before


def ask(port: int, key: str | None) -> tuple[int, Any]:
    """Send a request, and return its status and answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    body = json.dumps({"model": "gpt-tiny", "prompt": "hello", "max_tokens": 8})
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connection.request("POST", "/v1/completions", body, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())
