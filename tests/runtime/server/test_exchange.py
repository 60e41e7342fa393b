"""Models are loaded, exchanged and unloaded while requests are answered."""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.exported import LIVELY
from tests.runtime.server.conftest import POSITIONS, ROWS, SECONDS, Server, serving
from zoo.errors import ZooError
from zoo_export.export import export_graphs_only
from zoo_export.trace.make import Options
from zoo_runtime import load_session
from zoo_runtime.server.models import ModelPlace, ModelSettings, ServedModels
from zoo_runtime.server.request_error import RequestError

Exported = Callable[..., Path]
OPTIONS = {"unverified": True, "threads": 1}


@pytest.fixture(scope="module")
def other(exported_build: Exported) -> Path:
    """A decoder with other weights than ``writer``."""
    folder = exported_build("llama-tiny", f"max_seq_len={POSITIONS}", **LIVELY["llama-tiny"] | {"seed": 5})
    export_graphs_only(folder, options=Options(profile="serving", fix={"batch": ROWS, "sequence": 7}))
    return folder


def test_a_held_model_stays_open(writer: Path, other: Path) -> None:
    """Until it is released; what is asked for by its name meanwhile is the new one."""
    models = ServedModels(ModelSettings())
    try:
        models.replace([ModelPlace("a", writer, OPTIONS)])
        first = models.hold("a")
        changes = models.replace([ModelPlace("a", other, OPTIONS), ModelPlace("b", writer, OPTIONS)])
        assert (changes.loaded, changes.exchanged, changes.unloaded) == (["b"], ["a"], [])
        second = models.hold("a")
        assert second is not first
        assert first.is_alive
        assert not models.replace([ModelPlace("a", other, OPTIONS), ModelPlace("b", writer, OPTIONS)]).exchanged
        with pytest.raises(ZooError):
            models.replace([ModelPlace("c", writer, OPTIONS), ModelPlace("a", writer / "absent", OPTIONS)])
        assert list(models) == ["a", "b"]
        assert models["a"] is second
        ends = [thread for thread in threading.enumerate() if thread.name == "end of a"]
        assert not ends
        first.release()
        for thread in threading.enumerate():
            if thread.name == "end of a":
                thread.join(SECONDS)
        assert not first.is_alive
        assert not first.hold()
        assert models.replace([]).unloaded == ["a", "b"]
        with pytest.raises(RequestError):
            models.hold("a")
        second.release()
    finally:
        models.close()


def reload(server: Server, name: str = "reloaded") -> dict[str, Any]:
    """Send SIGHUP, and return what the log says."""
    before = len(server.events(name))
    server.process.send_signal(signal.SIGHUP)
    found: dict[str, Any] = server.wait_for(lambda: server.events(name)[before:])[0]
    return found


@pytest.mark.slow
def test_exchange_drops_no_request(writer: Path, other: Path, tmp_path: Path) -> None:
    """Under load, every answer is that of the old or of the new model, and a stream ends with that of its start."""
    prompts = [f"prompt {number}" for number in range(6)]
    wanted, long = [], ""
    for folder in (writer, other):
        with load_session(folder, variant="serving", unverified=True) as session:
            wanted.append([session.run(prompt, max_new_tokens=12)["generated"] for prompt in prompts])
            long = session.run("a", max_new_tokens=80)["generated"] if folder == writer else long
    assert not set(wanted[0]) & set(wanted[1])
    config = tmp_path / "serve.toml"

    def table(folder: Path) -> str:
        return f'[models.m]\npath = "{folder}"\n'

    config.write_text(table(writer))
    with serving("--config", config, "--unverified") as server:
        url = server.url

        async def load(client: httpx.AsyncClient, ends: asyncio.Event) -> list[bool]:
            """Return for each answer whether it was the new model's."""
            news, place = [], 0
            while not ends.is_set():
                place = (place + 1) % len(prompts)
                body = {"model": "m", "prompt": prompts[place], "max_tokens": 12}
                found = await client.post("/v1/completions", json=body)
                assert found.status_code == 200, found.text
                text = found.json()["choices"][0]["text"]
                assert text in (wanted[0][place], wanted[1][place])
                news.append(text == wanted[1][place])
            return news

        async def run() -> None:
            async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:
                ends = asyncio.Event()
                loads = [asyncio.create_task(load(client, ends)) for _ in range(5)]
                body = {"model": "m", "prompt": "a", "max_tokens": 80, "stream": True}
                async with client.stream("POST", "/v1/completions", json=body) as stream:
                    lines = stream.aiter_lines()
                    kept = [await anext(lines)]
                    config.write_text(table(other))
                    assert (await asyncio.to_thread(reload, server))["exchanged"] == ["m"]
                    kept += [line async for line in lines]
                for _ in range(3):
                    body = {"model": "m", "prompt": prompts[0], "max_tokens": 12}
                    assert (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"] == wanted[1][
                        0
                    ]
                ends.set()
                news = await asyncio.gather(*loads)
                assert all(one == sorted(one) and one[-1] for one in news)  # old answers, then new ones
                pieces = [line.removeprefix("data: ") for line in kept if line.startswith("data: {")]
                assert "".join(httpx.Response(200, text=one).json()["choices"][0]["text"] for one in pieces) == long

        asyncio.run(run())
        config.write_text("[models.m]\npath = 'absent'\n")
        assert "absent" in reload(server, "reload failed")["error"]
        config.write_text("nonsense")
        assert "not TOML" in reload(server, "reload failed")["error"]
        assert httpx.get(f"{url}/readyz", timeout=SECONDS).json() == {"status": "ready"}
        assert server.stop() == 0


def test_changed_files_are_noticed(writer: Path, other: Path, tmp_path: Path) -> None:
    """A directory on the command line that is replaced. Closed models leave no threads behind."""
    place = tmp_path / "model"
    shutil.copytree(writer, place)
    with serving(place, "--unverified") as server:
        url = f"{server.url}/v1/completions"
        body = {"prompt": "hello", "max_tokens": 12}
        before = httpx.post(url, json=body, timeout=SECONDS).json()["choices"][0]["text"]
        assert reload(server)["exchanged"] == []
        process = psutil.Process(server.process.pid)
        threads = process.num_threads()
        for folder in (other, writer, other):
            shutil.rmtree(place)
            shutil.copytree(folder, place)
            assert reload(server)["exchanged"] == ["model"]
        assert httpx.post(url, json=body, timeout=SECONDS).json()["choices"][0]["text"] != before
        server.wait_for(lambda: process.num_threads() <= threads + 2)


def test_changed_weights_are_noticed(writer: Path, tmp_path: Path) -> None:
    """The manifest alone does not show them."""
    folder = tmp_path / "copy"
    shutil.copytree(writer, folder)
    models = ServedModels(ModelSettings())
    try:
        models.replace([ModelPlace("a", folder, OPTIONS)])
        assert not models.replace([ModelPlace("a", folder, OPTIONS)]).exchanged
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").write_bytes(data)
        with pytest.raises(ZooError, match="SHA-256"):
            models.replace([ModelPlace("a", folder, OPTIONS)])
        assert models["a"].is_alive
    finally:
        models.close()
