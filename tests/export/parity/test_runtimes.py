"""Exports are compared on runtimes other than ONNX Runtime."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from zoo.artifact import Export, ModelDirectory
from zoo.registry import registry
from zoo_export import export_model
from zoo_export.parity.foreign import compare_on
from zoo_export.trace.make import Options
from zoo_export.verify import verify_model

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
UNSUPPORTED = {
    "rnn-tiny": "OpenVINO's result of padded rows is that without lengths",
    "seq2seq-tiny": "OpenVINO does not convert the Scan of the decoder",
}


@pytest.mark.slow
def test_export_is_verified_by_the_evaluator_of_onnx(
    exported_model: Exported, zoo: Zoo, snapshot: Callable[[], Any]
) -> None:
    """The evaluator supports functions, and the verification writes nothing."""
    folder = exported_model("bert-tiny")
    before = snapshot()
    result = zoo("verify", folder, "--runtime", "reference", "--json")
    assert (result.status, result.err) == (0, "")
    assert (result.json["verified"], result.json["provider"]) == (True, f"onnx.reference {onnx.__version__}")
    assert result.json["evidence"]["any_weights"] is True
    assert result.json["points"] >= 30
    assert snapshot() == before


def test_wrong_graph_is_detected(exported_model: Exported) -> None:
    """Its norms have the epsilon 1e-3."""
    export = Export(ModelDirectory.open(exported_model("bert-tiny")))
    model = onnx.load_model_from_string(export.read()["model"])
    for node in (node for function in model.functions for node in function.node):
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f = 1e-3
    report = compare_on("reference", export.stored, {"model": model.SerializeToString()})
    assert not report.passed
    assert report.verdict().startswith("the export on onnx.reference")


def test_refusals(exported_model: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = exported_model("bert-tiny")
    monkeypatch.setitem(sys.modules, "openvino", None)
    zoo("verify", folder, "--runtime", "openvino").failed(
        2, "openvino is not installed: --runtime openvino: pip install attention-zoo[openvino]"
    )
    for options, reason in (
        (("--provider", "cpu"), "--provider is only for onnxruntime"),
        (("--retrace",), "--retrace is only for onnxruntime"),
        (("--variant", "int8"), "the variant int8 runs on onnxruntime only"),
        (("--format", "other"), "--runtime is only for ONNX"),
    ):
        zoo("verify", folder, "--runtime", "reference", *options).failed(2, reason)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(reason=UNSUPPORTED[name])) if name in UNSUPPORTED else name
        for name in registry().names("*-tiny")
        if registry().resolve(name).source is None  # no published size
    ],
)
def test_preset_is_verified_on_openvino(exported_build: Exported, name: str, opset: int) -> None:
    pytest.importorskip("openvino")
    folder = exported_build(name, noise=True)
    export_model(folder, options=Options(opset=opset))
    assert verify_model(folder, runtime="openvino").passed
