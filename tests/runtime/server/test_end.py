"""The end of the server: requests that have begun are finished, or told that it stops."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.server.conftest import SECONDS, serving
from zoo_runtime.server import process
from zoo_runtime.server.http.service import RequestLimits
from zoo_runtime.server.models import ModelPlace, ModelSettings


def test_sigterm_drains(writer: Path) -> None:
    """The stream that has begun is finished, new connections are refused, and the status is 0."""
    with serving(writer, "--unverified") as server:
        url = server.url
        body = {"prompt": ["a"] * 20, "max_tokens": 60, "temperature": 1, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for(lambda: server.events("stopping"))
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/healthz")
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(SECONDS) == 0
        assert server.events("stopped")


@pytest.mark.slow
def test_requests_that_do_not_end_in_time(writer: Path) -> None:
    """A stream ends with an error, and an answer that has not begun is one."""
    body = {"prompt": ["a"] * 130, "max_tokens": 4000, "min_new_tokens": 4000}
    answers: list[httpx.Response] = []
    with serving(writer, "--unverified", "--drain-seconds", 0) as server:
        url = f"{server.url}/v1/completions"
        whole = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=SECONDS)))
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=SECONDS) as stream:
            lines = stream.iter_lines()
            next(lines)
            whole.start()
            full = 'zoo_waiting{model="writer"} 2'
            server.wait_for(lambda: full in httpx.get(f"{server.url}/metrics", timeout=SECONDS).text)
            server.process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        whole.join(SECONDS)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
        assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "stopping")
        assert "retry-after" in answers[0].headers
        assert server.process.wait(SECONDS) == 0
        assert [line["status"] for line in server.events("request") if line["method"] == "POST"] == [503, 503]
        assert not any("kind" in json.loads(line) for line in server.lines)


def test_signal_before_the_first_request(writer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes after the models are open, and before the server handles signals, is not lost."""
    place = ModelPlace("writer", writer, {"unverified": True, "threads": 1})
    original = asyncio.run

    def late(coroutine: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return original(coroutine)

    monkeypatch.setattr(process.asyncio, "run", late)
    again = threading.Timer(SECONDS, lambda: os.kill(os.getpid(), signal.SIGTERM))
    again.start()
    before = signal.getsignal(signal.SIGTERM)
    process.serve(
        lambda: [place], host="127.0.0.1", port=0, api_keys=(), origins=(), drain_seconds=1, limits=RequestLimits(),
        logs_texts=False, settings=ModelSettings(),
    )  # fmt: skip
    assert again.is_alive()
    again.cancel()
    assert signal.getsignal(signal.SIGTERM) is before
