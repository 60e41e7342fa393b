"""The profile ``web``: verified natively, and without attention on the CPU in the browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from tests.conftest import Result
from zoo.artifact import ModelDirectory
from zoo.registry import registry
from zoo_export import export_model
from zoo_export.trace.make import Options, make_graphs
from zoo_export.web.browser import open_browser
from zoo_export.web.subjects import with_files

Exported = Callable[..., Path]
Zoo = Callable[..., Result]
TINY = sorted(name for name in registry().names("*-tiny") if registry().resolve(name).source is None)
IN_FLOAT64 = ["detr-tiny", "transformer-tiny", "whisper-test"]
"""Presets with sinusoidal positions or mel filters, which are computed in float64."""
COMPUTE = {"Attention", "Gelu", "Gemm", "LayerNormalization", "MatMul", "RMSNormalization", "Softmax", "Sum", "Tanh"}
POSITIONS = {"Clip", "CumSum", "Expand", "LessOrEqual"}
SIZES = {"Add", "Cast", "Concat", "Gather", "Range", "Reshape", "Shape", "Slice", "Squeeze", "Sub", "Unsqueeze"}
"""Operators on integers that onnxruntime-web computes on the CPU."""


def test_profile_is_verified_and_runs(exported_build: Exported, zoo: Zoo) -> None:
    folder = exported_build("gpt-tiny", noise=True)
    assert zoo("export", folder, "--onnx", "--profile", "web").status == 0
    model = onnx.load(folder / "model.web.onnx", load_external_data=False)
    assert not model.functions
    assert "Attention" not in {node.op_type for node in model.graph.node}
    assert not {value.name for value in model.graph.input} & {tensor.name for tensor in model.graph.initializer}
    assert json.loads((folder / "parity.web.json").read_text())["options"]["profile"] == "web"
    assert zoo("run", folder, "--variant", "web", "--ids", "1,2", "--max-new-tokens", "2").status == 0
    assert zoo("verify", folder, "--variant", "web", "--retrace").status == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*TINY} - {*IN_FLOAT64}))
def test_preset_is_verified(exported_build: Exported, name: str) -> None:
    assert export_model(exported_build(name, noise=True), options=Options(profile="web")).passed


def test_options_that_do_not_fit_the_profile(exported_build: Exported, zoo: Zoo) -> None:
    command = ("export", exported_build("gpt-tiny"), "--onnx", "--profile", "web")
    zoo(*command, "--opset", 24).failed(2, "opset 24 is not supported in the profile web", "choose one of 23")
    zoo(*command, "--fix", "batch=1").failed(2, "graphs of this profile cannot have fixed dimensions")


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_FLOAT64)
def test_float64_is_refused(exported_build: Exported, zoo: Zoo, name: str) -> None:
    """With WebGPU, onnxruntime-web cannot load a graph that computes in float64."""
    result = zoo("export", exported_build(name), "--onnx", "--profile", "web")
    result.failed(2, "the model computes in float64", "export another profile")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny"])
def test_nodes_on_webgpu(exported_build: Exported, onnxruntime_web: Path, name: str) -> None:
    """Only integers are computed on the CPU; the plain export computes attention there."""
    stored = ModelDirectory.open(exported_build(name))
    found = {}
    with open_browser("web-webgpu") as browser:
        for options in (Options(), Options(profile="web")):
            (graph,) = make_graphs(stored, options).values()
            found[options.profile] = browser.placement(with_files(graph, stored.path))
    on_cpu = {profile: set(placed["CPUExecutionProvider"]) for profile, placed in found.items()}
    assert COMPUTE & on_cpu["portable"] == {"Attention"}
    assert on_cpu["web"] <= POSITIONS | SIZES
    assert {"MatMul", "Softmax"} <= set(found["web"]["WebGpuExecutionProvider"])


@pytest.mark.slow
def test_verified_and_published(exported_build: Exported, onnxruntime_web: Path, zoo: Zoo, tmp_path: Path) -> None:
    folder = exported_build("vit-tiny", noise=True)
    assert zoo("export", folder, "--onnx", "--profile", "web").status == 0
    for runtime in ("web-wasm", "web-webgpu"):
        assert zoo("verify", folder, "--variant", "web", "--runtime", runtime).status == 0
    assert zoo("publish", folder, tmp_path / "page", "--layout", "web", "--variant", "web").status == 0
    manifest = json.loads((tmp_path / "page" / "model.json").read_text())
    assert [runtime["name"] for runtime in manifest["runtimes"]] == ["web-webgpu", "web-wasm"]
    assert all(runtime["evidence"]["doubt"] is None for runtime in manifest["runtimes"])
