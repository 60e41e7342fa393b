"""Sessions run where they were asked to run, or say in one line why not; and they leave torch alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from zoo_export.session import loading_problem, open_session, placement

from zoo.errors import ArtifactError, UsageError

RUN_WITHOUT_TORCH = """
import sys
import zoo
with zoo.load_session(sys.argv[1]) as session:
    result = session.run("time flies", max_new_tokens=2)
assert session.task == "text-generation" and len(result["generated_ids"]) == 2, result
heavy = {"torch", "onnx", "onnx_ir", "onnxscript", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("garbage", [b"", b"garbage", bytes(1000)], ids=["empty", "text", "zeros"])
def test_garbage_is_refused(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(garbage)
    with pytest.raises(ArtifactError, match=r"onnxruntime cannot load the graph .*model\.onnx"):
        open_session(path)
    with pytest.raises(ArtifactError, match="onnxruntime cannot load the graph"):
        open_session(garbage)


def test_a_missing_graph_and_missing_weights_are_refused(exported_copy: Callable[..., Path], tmp_path: Path) -> None:
    folder = exported_copy("bert-tiny")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        open_session(folder / "model.onnx")
    with pytest.raises(ArtifactError, match=r"absent\.onnx"):
        open_session(tmp_path / "absent.onnx")


@pytest.mark.parametrize("optimize", [True, False], ids=["optimised", "as it is"])
def test_placement_names_the_provider_of_every_node(exported_model: Callable[..., Path], optimize: bool) -> None:
    session = open_session(exported_model("bert-tiny") / "model.onnx", placements=True, optimize=optimize)
    placed = placement(session)
    assert set(placed) == {"CPUExecutionProvider"}
    assert placed["CPUExecutionProvider"] > 20
    assert session.get_providers() == ["CPUExecutionProvider"]


def test_bytes_find_their_weights_and_equal_the_file(exported_model: Callable[..., Path]) -> None:
    folder = exported_model("bert-tiny")
    feeds = {
        "input_ids": np.array([[1, 2, 3]]),
        "attention_mask": np.array([[1, 1, 1]]),
        "token_type_ids": np.array([[0, 1, 0]]),
    }
    by_path = open_session(folder / "model.onnx").run(None, feeds)
    by_bytes = open_session((folder / "model.onnx").read_bytes(), weights=folder).run(None, feeds)
    for one, other in zip(by_path, by_bytes, strict=True):
        np.testing.assert_array_equal(one, other)


def test_asking_for_cuda_without_it_is_one_error_and_no_output(capfd: pytest.CaptureFixture[str]) -> None:
    problem = loading_problem("cuda")
    if problem is None:
        pytest.skip("CUDA loads here")
    with pytest.raises(UsageError) as caught:
        open_session(_identity(), provider="cuda")
    message = str(caught.value)
    assert message == problem
    assert message.count("\n") == 0
    assert "CUDAExecutionProvider" in message
    assert "--provider cuda" in message
    assert message.endswith("pip install onnxruntime-gpu[cuda,cudnn]")
    assert capfd.readouterr().out == ""


def test_opening_and_failing_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert loading_problem("cpu") is None
    open_session(_identity())
    with pytest.raises(ArtifactError):
        open_session(b"garbage")
    assert capfd.readouterr() == ("", "")


def test_running_a_model_leaves_torch_out(exported_model: Callable[..., Path], tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN_WITHOUT_TORCH, str(exported_model("gpt-tiny"))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def _identity() -> bytes:
    """A graph of one node."""
    from onnx import parser

    text = '<ir_version: 10, opset_import: ["": 20]> probe (float[1] x) => (float[1] y) { y = Identity(x) }'
    data: bytes = parser.parse_model(text).SerializeToString()
    return data
