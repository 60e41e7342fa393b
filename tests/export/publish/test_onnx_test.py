"""Exports in the form of the ONNX project's tests, run by its own runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.backend.test.runner import Runner
from onnx.reference import ReferenceEvaluator

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
Run = Callable[[dict[str, Any]], Any]


def open_with_onnxruntime(path: Path) -> Run:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, feeds)


def open_with_onnx(path: Path) -> Run:
    evaluator = ReferenceEvaluator(str(path))
    return lambda feeds: evaluator.run(None, feeds)


def run_tests(folder: Path, tolerance: float, open_model: Callable[[Path], Run]) -> int:
    """Run the data sets of a folder by the comparison of the onnx package's runner. Returns their number."""
    runner = Runner.__new__(Runner)  # it makes all tests of the standard when it is created
    run, model = open_model(folder / "model.onnx"), onnx.load(folder / "model.onnx")
    sets = sorted(folder.glob("test_data_set_*"))
    for data in sets:
        inputs, outputs = list[Any](), list[Any]()
        for number, item in enumerate(model.graph.input):
            runner._load_proto(data / f"input_{number}.pb", inputs, item.type)
        for number, item in enumerate(model.graph.output):
            runner._load_proto(data / f"output_{number}.pb", outputs, item.type)
        assert len([*data.iterdir()]) == len(inputs) + len(outputs)
        names = [item.name for item in model.graph.input]
        found = run(dict(zip(names, inputs, strict=True)))
        runner.assert_similar_outputs(outputs, found, rtol=0.0, atol=tolerance, model_dir=str(folder))
    return len(sets)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "folders"),
    [("gpt-tiny", ["."]), ("transformer-tiny", ["encoder", "decoder"]), ("vit-tiny", ["."]), ("bert-tiny", ["."])],
)
def test_runner_of_onnx_passes(exported_model: Exported, zoo: Zoo, name: str, folders: list[str]) -> None:
    result = zoo("publish", exported_model(name), "out", "--layout", "onnx-test", "--json")
    assert result.status == 0, result.err
    written = {str(path.relative_to("out")) for path in Path("out").rglob("*") if path.is_file()}
    assert written == {*result.json["files"], ".zoo-files.json"}
    tolerance = result.json["tolerance"]
    for open_model in (open_with_onnxruntime, open_with_onnx):
        sets = sum(run_tests(Path("out", folder), tolerance, open_model) for folder in folders)
        assert sets == result.json["sets"] >= 2


def test_past_is_an_input_like_all_others(exported_model: Exported, zoo: Zoo) -> None:
    assert zoo("publish", exported_model("gpt-tiny"), "out", "--layout", "onnx-test").status == 0
    model = onnx.load("out/model.onnx", load_external_data=False)
    assert not any(tensor.external_data for tensor in model.graph.initializer)
    pasts = set()
    for folder in Path("out").glob("test_data_set_*"):
        for number, item in enumerate(model.graph.input):
            tensor = onnx.load_tensor(str(folder / f"input_{number}.pb"))
            assert tensor.name == item.name
            if item.name == "past_key_values.0.key":
                pasts.add(tensor.dims[2])
    assert 0 in pasts
    assert max(pasts) > 0


def test_altered_output_fails(exported_model: Exported, zoo: Zoo) -> None:
    result = zoo("publish", exported_model("vit-tiny"), "out", "--layout", "onnx-test", "--json")
    path = Path("out/test_data_set_0/output_0.pb")
    tensor = onnx.load_tensor(str(path))
    values = onnx.numpy_helper.to_array(tensor) + np.float32(3 * result.json["tolerance"])
    path.write_bytes(onnx.numpy_helper.from_array(values, tensor.name).SerializeToString())
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run_tests(Path("out"), result.json["tolerance"], open_with_onnxruntime)


def test_export_without_a_recorded_comparison_is_refused(exported_build: Exported, zoo: Zoo) -> None:
    folder = exported_build("vit-tiny")
    assert zoo("export", folder, "--onnx", "--graph-only").status == 0
    zoo("publish", folder, "out", "--layout", "onnx-test").failed(3, "the export has no recorded comparison")
    assert not Path("out").exists()
