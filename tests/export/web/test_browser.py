"""Sessions of onnxruntime-web: results, caches in place, weights, errors, and tabs that never answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zoo.artifact import Export, ModelDirectory
from zoo.contract import Graph
from zoo.errors import IncomparableError
from zoo.probe.inputs import Point, make_feeds
from zoo.probe.pipeline import Arrays, Executor, run_pipeline
from zoo_export import export_model
from zoo_export.trace.make import Options
from zoo_export.web.browser import Browser, WebGraph, open_browser
from zoo_export.web.subjects import WebExecutor, _run_in_buffers, with_files
from zoo_runtime.onnx_runtime.executor import OnnxExecutor
from zoo_runtime.onnx_runtime.providers import open_session

Exported = Callable[..., Path]
BUSY = "for (;;);"
SILENT = "await new Promise(() => {});"


@pytest.fixture(scope="module")
def wasm(onnxruntime_web: Path) -> Iterator[Browser]:
    with open_browser("web-wasm") as browser:
        yield browser


@pytest.fixture
def both(wasm: Browser) -> Iterator[Callable[[Export], tuple[Executor, Executor]]]:
    """Return what runs an export in the browser, and what runs it on ONNX Runtime."""

    def open_(export: Export) -> tuple[Executor, Executor]:
        folder, float32 = export.stored.path, np.dtype(np.float32)
        graphs = {name: with_files(graph, folder) for name, graph in export.read().items()}
        native = {name: open_session(folder / file) for name, file in export.graph_files.items()}
        return WebExecutor(wasm.open(graphs, optimize=True), float32), OnnxExecutor(native, float32)

    yield open_
    wasm.close_tabs()


def assert_same(export: Export, executors: tuple[Executor, Executor], point: Point) -> None:
    feeds = make_feeds(export.graphs, point, 0, 32)
    found, wanted = (run_pipeline(executor, export.graphs, feeds, point, split=True) for executor in executors)
    for graph, outputs in wanted.items():
        assert found[graph].keys() == outputs.keys()
        for name, value in outputs.items():
            assert found[graph][name].dtype == value.dtype
            np.testing.assert_allclose(found[graph][name], value, rtol=1e-5, atol=1e-5, err_msg=f"{graph} {name}")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["bert-tiny", "transformer-tiny", "rnn-tiny", "vit-tiny"])
def test_results_are_those_of_onnx_runtime(exported_model: Exported, both: Any, name: str) -> None:
    export = Export(ModelDirectory.open(exported_model(name)))
    assert_same(export, both(export), Point(2, 5, 3 if export.graphs[-1].pasts else 0, "none"))


def test_caches_in_place(exported_build: Exported, both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is given buffers with spare positions, and its presents are as long as the tokens so far."""
    folder = exported_build("gpt-tiny", noise=True, gain=3.0)
    export_model(folder, options=Options(profile="cpu"))
    export = Export(ModelDirectory.open(folder), "cpu")
    spare = []

    def spied(session: Any, graph: Graph, arrays: Arrays) -> Arrays:
        run = session.run

        def run_spied(given: Arrays) -> Arrays:
            outputs = run(given)
            past, present = graph.growing_pairs()[0]
            total = arrays[past.name].shape[2] + arrays["input_ids"].shape[1]
            spare.append(given[past.name].shape[2] - total)
            assert given["past_length"] == arrays[past.name].shape[2]
            assert outputs[present.name].shape == given[past.name].shape
            return outputs

        with monkeypatch.context() as patch:
            patch.setattr(session, "run", run_spied)
            return _run_in_buffers(session, graph, arrays)

    monkeypatch.setattr("zoo_export.web.subjects._run_in_buffers", spied)
    web, _ = executors = both(export)
    assert isinstance(web, WebExecutor)
    for point in (Point(2, 5, 3, "left"), Point(1, 1, 30, "none"), Point(1, 7, 0, "none")):
        assert_same(export, executors, point)
    assert spare
    assert min(spare) > 0


def test_weights_are_read_through_external_data(exported_model: Exported, wasm: Browser) -> None:
    """A file of other weights gives other results; a file that is too short does not load."""
    export = Export(ModelDirectory.open(exported_model("bert-tiny")))
    graph = with_files(export.read()["model"], export.stored.path)
    (name,) = graph.weights
    content = (export.stored.path / name).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    halved = np.frombuffer(content[start:], np.float32) / 2
    others = WebGraph(graph.data, {name: content[:start] + halved.tobytes()})
    feeds = make_feeds(export.graphs, Point(1, 5, 0, "none"), 0, 32)
    results = [wasm.open({"model": item}, optimize=True)["model"].run(feeds) for item in (graph, others)]
    assert np.abs(results[0]["last_hidden_state"] - results[1]["last_hidden_state"]).max() > 1e-3
    with pytest.raises(RuntimeError, match=r"(?i)external|out of bounds|offset"):
        wasm.open({"model": WebGraph(graph.data, {name: content[: start + 64]})}, optimize=True)
    wasm.close_tabs()


def test_errors_have_the_message_of_the_runtime(exported_model: Exported, wasm: Browser) -> None:
    export = Export(ModelDirectory.open(exported_model("bert-tiny")))
    with pytest.raises(RuntimeError, match="protobuf"):
        wasm.open({"model": WebGraph(b"no graph")}, optimize=True)
    session = wasm.open({"model": with_files(export.read()["model"], export.stored.path)}, optimize=True)["model"]
    with pytest.raises(RuntimeError, match=r"input_ids.*is missing"):
        session.run({})
    wasm.close_tabs()


@pytest.mark.parametrize("body", [BUSY, SILENT])
def test_tab_that_never_answers_is_left(wasm: Browser, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Also if its script leaves no time for others; the browser can be used afterwards."""
    with monkeypatch.context() as patch:
        patch.setattr(wasm, "timeout", 1.5)
        patch.setitem(wasm._server.files, "page.mjs", f"export async function start() {{ {body} }}".encode())
        with pytest.raises(IncomparableError, match=r"onnxruntime-web .* wasm did not answer within 1\.5 s: .*timeout"):
            wasm.open({}, optimize=True)
    wasm.close_tabs()
    assert wasm.open({}, optimize=True) == {}
    wasm.close_tabs()
