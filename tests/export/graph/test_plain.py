"""Graphs in the form that the tools of ONNX Runtime process: the tools run, and compute nearly the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers import optimizer

from zoo.artifact import Export, ModelDirectory
from zoo_export.graph.plain import OPSET, plain
from zoo_export.publish.copies import write_graph

Exported = Callable[..., Path]
Arrays = list[np.ndarray[Any, Any]]
SIZES = {"batch": 2, "sequence": 5, "past_sequence": 3, "past_sequence + sequence": 8}


def run(path: Path) -> Arrays:
    """Return every output of a graph, for inputs that follow from its signature."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    rng, feeds = np.random.default_rng(0), {}
    for item in session.get_inputs():
        shape = [SIZES.get(dim, dim) for dim in item.shape]
        ids = rng.integers(1, 9, shape) if item.name == "input_ids" else np.ones(shape, np.int64)
        feeds[item.name] = ids if "int64" in item.type else rng.standard_normal(shape).astype(np.float32)
    return list(session.run(None, feeds))


def similarity(found: Arrays, wanted: Arrays) -> float:
    """Return the lowest cosine of two lists of outputs."""
    pairs = [(a.ravel(), b.ravel()) for a, b in zip(found, wanted, strict=True)]
    return min(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in pairs)


def written(source: Path, folder: Path) -> Path:
    """Write the plain form of an exported graph, lowered, with its weights."""
    stored = ModelDirectory.open(source)
    write_graph(stored, plain(Export(stored).read()["model"], lowered=True), folder, "model")
    return folder / "model.onnx"


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", ["bert-tiny", "gpt-tiny", "llama-tiny", "modernbert-tiny", "vit-tiny"])
def test_tools_process_the_graph(exported_model: Exported, tmp_path: Path, name: str) -> None:
    source = exported_model(name, noise=True)
    path = written(source, tmp_path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert not model.functions
    assert [(item.domain, item.version) for item in model.opset_import] == [("", OPSET)]
    wanted = run(source / "model.onnx")
    for found, exact in zip(run(path), wanted, strict=True):
        np.testing.assert_allclose(found, exact, atol=1e-5)
    layers = sum(node.op_type == "Gemm" for node in model.graph.node)
    assert layers >= 12
    quantize_dynamic(path, tmp_path / "quantised.onnx")
    operators = [node.op_type for node in onnx.load(tmp_path / "quantised.onnx").graph.node]
    assert operators.count("MatMulInteger") == layers
    assert similarity(run(tmp_path / "quantised.onnx"), wanted) > 0.98
    quant_pre_process(path, tmp_path / "prepared.onnx", auto_merge=True)
    assert similarity(run(tmp_path / "prepared.onnx"), wanted) > 0.999999
    half = optimizer.optimize_model(str(path), opt_level=0)
    half.convert_float_to_float16(keep_io_types=True)
    half.save_model_to_file(str(tmp_path / "half.onnx"))
    assert similarity(run(tmp_path / "half.onnx"), wanted) > 0.999


def test_tied_weights_are_kept_once(exported_model: Exported, tmp_path: Path) -> None:
    """The embedding of a decoder is its last layer too. Quantising it in place would break the embedding."""
    path = written(exported_model("gpt-tiny"), tmp_path)
    graph = onnx.load(path).graph
    (tied,) = [tensor.name for tensor in graph.initializer if tensor.name == "token_embedding.weight"]
    assert sorted(node.op_type for node in graph.node if tied in node.input) == ["Gather", "Transpose"]
