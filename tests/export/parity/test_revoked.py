"""Exports that were verified, and fail a later verification."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.precisions import quantize
from zoo.contract import Graph
from zoo.errors import IncomparableError, ParityError
from zoo.probe.inputs import Feeds
from zoo.probe.pipeline import Arrays
from zoo.tokenizers.files import load
from zoo_export.comparison import Comparison
from zoo_export.variants.traced import Traced
from zoo_export.verify import verify_model
from zoo_runtime.onnx_runtime.executor import OnnxExecutor

Exported = Callable[..., Path]
Zoo = Callable[..., Any]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Return a context in which the first output of every graph is off by 1 %, as on a faulty runtime."""
    call = OnnxExecutor.__call__

    def faulty_call(self: OnnxExecutor, graph: Graph, feeds: Feeds) -> Arrays:
        outputs = call(self, graph, feeds)
        name = graph.output_tensors()[0].name
        return {**outputs, name: outputs[name] * outputs[name].dtype.type(1.01)}

    @contextmanager
    def context() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(OnnxExecutor, "__call__", faulty_call)
            yield

    return context


def test_failure_revokes_the_evidence_until_it_passes(
    exported_copy: Exported, zoo: Zoo, snapshot: Callable[[], Any], faulty: Callable[[], Any]
) -> None:
    folder = exported_copy("bert-tiny")
    before = snapshot()
    with faulty():
        zoo("verify", folder).failed(4, "is not equal to the model")
    evidence = json.loads((folder / "parity.json").read_text())
    assert evidence["verified"] is False
    assert evidence["reason"].startswith(
        "zoo verify failed: the ONNX graph is not equal to the model: last_hidden_state"
    )
    zoo("run", folder, "hello").failed(4, "the export is not verified (zoo verify failed", "--unverified")
    assert "NOT VERIFIED (zoo verify failed" in zoo("show", folder).out
    revoked = snapshot()
    with faulty():
        zoo("verify", folder).failed(4, "is not equal to the model")
    assert snapshot() == revoked
    assert zoo("verify", folder).status == 0
    assert snapshot() == before
    assert zoo("run", folder, "hello").status == 0


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("reads", [0, 4, 5])
def test_unreadable_file_revokes_nothing(
    exported_copy: Exported, zoo: Zoo, snapshot: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    """A failing disk says nothing about a graph, however many reads succeed before."""
    folder = exported_copy("gpt-tiny")
    before, original, done = snapshot(), load._read_json, []

    def read(path: Path) -> Any:
        done.append(path)
        if len(done) == reads + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(path)

    monkeypatch.setattr(load, "_read_json", read)
    zoo("verify", folder).failed(3, "cannot read (Input/output error)", "tokenizer.json")
    assert len(done) > reads
    assert snapshot() == before


@pytest.mark.slow
def test_failure_over_the_full_grid_is_repeated_there(
    exported_copy: Exported, monkeypatch: pytest.MonkeyPatch, faulty: Callable[[], Any]
) -> None:
    folder = exported_copy("bert-tiny")
    with faulty(), pytest.raises(ParityError):
        verify_model(folder, full_grid=True)
    grids = []

    def compare(recipe: Traced, candidate: Any, comparison: Comparison) -> Any:
        grids.append(comparison.full_grid)
        raise IncomparableError("too large to verify here")

    monkeypatch.setattr(Traced, "compare", compare)
    with pytest.raises(ParityError):
        verify_model(folder)
    assert grids == [True]


def test_lack_of_memory_revokes_nothing(
    exported_copy: Exported, zoo: Zoo, snapshot: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exported_copy("bert-tiny")
    before = snapshot()
    monkeypatch.setattr("zoo_export.parity.memory.free_memory", lambda: 1)
    zoo("verify", folder).failed(4, "too large to verify here")

    def fail(*_: Any) -> None:
        raise MemoryError("12 GiB")

    monkeypatch.undo()
    monkeypatch.setattr(OnnxExecutor, "__call__", fail)
    zoo("verify", folder).failed(4, "too little memory at batch", "12 GiB")
    monkeypatch.undo()
    assert snapshot() == before


@pytest.mark.slow
def test_evidence_in_a_read_only_directory(
    exported_copy: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch, faulty: Callable[[], Any]
) -> None:
    """The failure is reported with its status, and that the evidence remains."""
    folder = exported_copy("bert-tiny")
    before = (folder / "parity.json").read_bytes()

    def forbid(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with faulty(), monkeypatch.context() as patch:
        patch.setattr("zoo.storage.add_to_directory", forbid)
        still = "parity.json still says that it is verified, and cannot be changed"
        zoo("verify", folder).failed(4, "is not equal to the model", still, "Permission denied")
    assert (folder / "parity.json").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "float16"])
def test_smaller_precision(exported_copy: Exported, precision: Any, zoo: Zoo, faulty: Callable[[], Any]) -> None:
    """Its certificate is kept. The other export stays verified."""
    folder = exported_copy("gpt-tiny")
    quantize(folder, precision, max_kl=1.0)
    place = folder / f"parity.{precision}.json"
    before = json.loads(place.read_text())
    assert before["laws"]["cache"] == "passed"
    with faulty():
        zoo("verify", folder, "--variant", precision).failed(4)
    zoo("run", folder, "hello", "--variant", precision).failed(
        4, "zoo verify failed", f"zoo verify {folder} --variant {precision}, or run it with --unverified"
    )
    assert zoo("run", folder, "hello").status == 0
    assert zoo("verify", folder, "--variant", precision).status == 0
    after = json.loads(place.read_text())
    assert after["certificate"] == before["certificate"]
    assert after.keys() == before.keys()
    assert (
        after["files"].keys()
        == before["files"].keys()
        == {*(f"model.{precision}.{end}" for end in ("onnx", "safetensors")), f"recorded.{precision}.safetensors.gz"}
    )
    assert zoo("run", folder, "hello", "--variant", precision).status == 0
