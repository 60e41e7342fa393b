"""A copy that needs nothing else, for runtimes that know nothing of zoo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from zoo_export import standalone

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
FILES = {
    "gpt-tiny": {"model": "model"},
    "bert-tiny": {"model": "model"},
    "transformer-tiny": {"encoder": "encoder_model", "decoder": "decoder_model"},
}


def run(path: Path) -> list[np.ndarray[Any, Any]]:
    """Every output of a graph, on inputs made from its own signature."""
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


@pytest.mark.parametrize("largest", [standalone._LARGEST, 1000])
@pytest.mark.parametrize("name", FILES)
def test_a_copy_computes_the_same(
    exported_model: Exported, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, largest: int
) -> None:
    """With the weights inside the graph, and beside it."""
    monkeypatch.setattr(standalone, "_LARGEST", largest)
    source = exported_model(name)
    result = zoo("export", source, "--onnx", "--standalone", "copy", "--json")
    assert result.status == 0, result.err
    assert {str(path.relative_to("copy")) for path in Path("copy").rglob("*") if path.is_file()} == set(
        result.json["files"]
    )
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


def test_a_preset_is_built_exported_and_copied(zoo: Zoo) -> None:
    assert zoo("export", "gpt-tiny", "--onnx", "--standalone", "copy", "--set", "max_seq_len=32").status == 0
    assert Path("gpt-tiny/model.onnx").exists()
    assert run(Path("copy/onnx/model.onnx"))
    zoo("export", "gpt-tiny", "--onnx", "--standalone", "copy").failed(2, "already exists", "copy")
    assert zoo("export", "gpt-tiny", "--onnx", "--standalone", "copy2").status == 0


def test_only_what_is_verified_is_copied(zoo: Zoo) -> None:
    assert zoo("export", "gpt-tiny", "--onnx", "--graph-only").status == 0
    assert zoo("build", "gpt-tiny", "-o", "built").status == 0
    assert zoo("export", "built", "--onnx", "--graph-only").status == 0
    zoo("export", "built", "--onnx", "--standalone", "copy").failed(4, "not verified")
    zoo("export", "built", "--onnx", "--standalone", "copy", "--graph-only").failed(2, "--standalone")
    assert not Path("copy").exists()


def test_a_copy_that_computes_something_else_is_not_kept(
    exported_model: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = standalone._read
    monkeypatch.setattr(standalone, "_read", lambda stored, place: read(stored, place)[::-1])
    zoo("export", exported_model("gpt-tiny"), "--onnx", "--standalone", "copy").failed(4, "does not compute")
    assert not Path("copy").exists()
