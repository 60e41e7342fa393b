"""Open models."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.runtime.server.conftest import KEPT, SECONDS, serving
from zoo.errors import UsageError
from zoo_runtime.server.models import ModelPlace, ModelSettings, Served


def test_model_is_not_locked_while_a_constraint_is_compiled(translator: Path) -> None:
    """The event loop holds and releases models."""
    served = Served(ModelPlace("t5", translator, {"unverified": True}), ModelSettings())
    grammar = "start: A\nA: " + " & ".join(f"/(a|b)*a(a|b){{{count}}}/" for count in range(10, 22))
    refusals: list[UsageError] = []

    def make() -> None:
        try:
            served.runner(None, {"grammar": grammar})
        except UsageError as error:
            refusals.append(error)

    thread, held = threading.Thread(target=make), list[float]()
    begun = time.monotonic()
    thread.start()
    while thread.is_alive():
        assert served.hold()
        served.release()
        held.append(time.monotonic())
    middle = (begun + time.monotonic()) / 2
    served.close()
    assert "too many steps" in str(refusals[0])
    assert sum(time > middle for time in held) > 10


@pytest.mark.parametrize("name", ["writer", "translator"])
def test_changed_weights_are_an_error_of_requests(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Neither the end of the process, which reading lost pages would be, nor other answers."""
    folder = tmp_path / name
    shutil.copytree(request.getfixturevalue(name), folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    body = {"prompt": "hello", "max_tokens": 3}
    options = ("--unverified", "--memory", "mapped")
    with serving(folder, *options) as server, httpx.Client(base_url=server.url, limits=KEPT, timeout=SECONDS) as client:
        before = client.post("/v1/completions", json=body).json()["choices"]
        for size, change in ((1_000, "truncated"), (len(whole) - 1_000, "altered")):
            with weights.open("r+b") as file:
                file.truncate(size)
                file.truncate(len(whole) if change == "altered" else size)
            for stream in (False, True):
                answer = client.post("/v1/completions", json=body | {"stream": stream})
                assert answer.status_code == 500
                assert f"has been {change}" in answer.json()["error"]["message"]
            assert client.get("/readyz").status_code == 503
            with weights.open("r+b") as file:
                file.write(whole)
            assert client.get("/readyz").status_code == 200
            assert client.post("/v1/completions", json=body).json()["choices"] == before
