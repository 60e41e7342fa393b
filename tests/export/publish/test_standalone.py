"""Self-contained copies for other runtimes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from zoo_export.publish import copies
from zoo_export.publish.standalone import write_standalone

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
FILES = {
    "gpt-tiny": {"model": "model"},
    "bert-tiny": {"model": "model"},
    "transformer-tiny": {"encoder": "encoder_model", "decoder": "decoder_model"},
}


def run(path: Path) -> list[np.ndarray[Any, Any]]:
    """Return every output of a graph, on inputs generated from its signature."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    sizes = {"batch": 2, "sequence": 5, "encoder_sequence": 4, "past_sequence": 3, "past_sequence + sequence": 8}
    feeds = {}
    for item in session.get_inputs():
        shape = [sizes.get(dim, dim) for dim in item.shape]
        feeds[item.name] = (
            np.ones(shape, np.int64) if "int64" in item.type else rng.standard_normal(shape).astype(np.float32)
        )
    return list(session.run(None, feeds))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("largest", [copies._LARGEST, 1000])
@pytest.mark.parametrize("name", FILES)
def test_copy_computes_the_same(
    exported_model: Exported, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, largest: int
) -> None:
    """With the weights inside the graph, and in a separate file."""
    monkeypatch.setattr(copies, "_LARGEST", largest)
    source = exported_model(name)
    result = zoo("publish", source, "copy", "--layout", "standalone", "--json")
    assert result.status == 0, result.err
    files = {str(path.relative_to("copy")) for path in Path("copy").rglob("*") if path.is_file()}
    assert files == {*result.json["files"], ".zoo-files.json"}
    moved = Path("copy").rename(tmp_path / "moved")
    for graph, file in FILES[name].items():
        model = onnx.load(moved / "onnx" / f"{file}.onnx", load_external_data=False)
        locations = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
        assert locations == (set() if largest > 1000 else {f"{file}.onnx_data"})
        onnx.checker.check_model(str(moved / "onnx" / f"{file}.onnx"))
        for found, wanted in zip(run(moved / "onnx" / f"{file}.onnx"), run(source / f"{graph}.onnx"), strict=True):
            np.testing.assert_array_equal(found, wanted)
    weights = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    copied = sum(path.stat().st_size for path in (moved / "onnx").iterdir())
    assert copied < 2 * weights if len(FILES[name]) > 1 else copied < 1.3 * weights  # tied weights once


def test_export_is_copied_once(exported_model: Exported, zoo: Zoo) -> None:
    source = exported_model("gpt-tiny")
    assert zoo("publish", source, "copy", "--layout", "standalone").status == 0
    assert run(Path("copy/onnx/model.onnx"))
    zoo("publish", source, "copy", "--layout", "standalone").failed(2, "already exists", "copy")
    zoo("publish", source, "other", "--layout", "standalone", "--model-type", "gpt2").failed(2, "--model-type")
    assert zoo("publish", source, "copy2", "--layout", "standalone").status == 0


@pytest.mark.slow
def test_json_is_one_document(zoo: Zoo) -> None:
    """Even for a preset that is built and exported first, including generate.onnx."""
    result = zoo("export", "gpt-tiny", "--onnx", "--generate", "--json").json
    assert (result["directory"], result["verified"], result["provider"]) == ("gpt-tiny", True, "cpu")
    assert result["files"] == ["model.onnx", "generate.onnx"]


def test_only_verified_exports_are_copied(zoo: Zoo) -> None:
    assert zoo("export", "gpt-tiny", "--onnx", "--graph-only").status == 0
    assert zoo("build", "gpt-tiny", "-o", "built").status == 0
    assert zoo("export", "built", "--onnx", "--graph-only").status == 0
    zoo("publish", "built", "copy", "--layout", "standalone").failed(4, "not verified")
    assert not Path("copy").exists()


def test_force_replaces_only_a_copy(
    exported_model: Exported, zoo: Zoo, tmp_path: Path, snapshot: Callable[[], Any]
) -> None:
    command = ("publish", exported_model("gpt-tiny"), "copy", "--layout", "standalone")
    assert zoo(*command).status == 0
    written = snapshot()
    zoo(*command).failed(2, "already exists", "copy: use --force")
    write_standalone(exported_model("gpt-tiny"), tmp_path / "copy", force=True)
    assert snapshot() == written
    Path("copy/onnx/notes.txt").write_text("mine")
    before = snapshot()
    zoo(*command, "--force").failed(2, "contains files other than those zoo wrote (onnx/notes.txt): copy: move them")
    Path("app/onnx").mkdir(parents=True)
    Path("app/config.json").write_text("{}")
    zoo(*command[:2], "app", *command[3:], "--force").failed(
        2, "not a directory written by zoo publish --layout standalone: app"
    )
    assert {name: content for name, content in snapshot().items() if not name.startswith("app")} == before


def test_copy_that_differs_is_not_kept(exported_model: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read = exported_model("gpt-tiny"), copies._read
    monkeypatch.setattr(copies, "_read", lambda place: read(place)[::-1])
    zoo("publish", folder, "copy", "--layout", "standalone").failed(4, "outputs differ")
    assert not Path("copy").exists()
