"""``zoo audit``: status, JSON, page, and files that are not what they claim to be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tests.conftest import Result
from tests.export.audit.graphs import Edit, foreign, ignore_mask, rename, write
from tests.exported import Builder

Zoo = Callable[..., Result]
SMALL = ("max_seq_len=8", "num_layers=1")


@pytest.fixture(scope="module")
def model(exported_build: Builder) -> Path:
    return exported_build("bert-tiny", *SMALL, noise=True)


@pytest.fixture(scope="module")
def graph(model: Path) -> onnx.ModelProto:
    return foreign(model)


def test_a_right_graph(zoo: Zoo, model: Path, graph: onnx.ModelProto) -> None:
    write(graph, Path("theirs.onnx"), rename({"last_hidden_state": "token_embeddings"}))
    result = zoo("audit", "theirs.onnx", "--against", model, "--json", "-o", "found", "--figure", "page.html")
    assert result.status == 0, result.err
    facts = json.loads(result.out)
    assert (facts["schema"], facts["verdict"], facts["wrong"]) == ("zoo.audit/1", "right", [])
    assert facts["graphs"][0]["outputs"]["token_embeddings"] == "last_hidden_state"
    assert json.loads(Path("found/audit.json").read_text()) == facts
    page = Path("found/audit.html").read_text()
    assert page == Path("page.html").read_text()
    assert facts["summary"] in page
    assert not re.search("<script|src=|href=|url\\(", page)


def test_a_wrong_graph(zoo: Zoo, model: Path, graph: onnx.ModelProto) -> None:
    write(graph, Path("theirs.onnx"), ignore_mask(keep=True))
    result = zoo("audit", "theirs.onnx", "--against", model, "-o", "found")
    assert result.status == 4
    assert re.search("padding on the right +wrong", result.out)
    assert "no node of theirs.onnx reads its input attention_mask" in result.out
    assert result.err.startswith("error: last_hidden_state is off by ")
    assert result.err.count("\n") == 1
    assert json.loads(Path("found/audit.json").read_text())["verdict"] == "wrong"
    again = zoo("audit", "theirs.onnx", "--against", model, "-o", "found")
    assert (again.status, "already exists: found" in again.err) == (2, True)


def test_names_on_a_page_are_text(zoo: Zoo, model: Path, graph: onnx.ModelProto) -> None:
    write(graph, Path("theirs.onnx"), rename({"pooler_output": "<script>alert(1)</script>"}))
    assert zoo("audit", "theirs.onnx", "--against", model, "--figure", "page.html").status == 0
    assert "<script" not in Path("page.html").read_text()


def _outside(model: onnx.ModelProto) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")


def _missing(model: onnx.ModelProto) -> None:
    _outside(model)
    model.graph.initializer[0].external_data[0].value = "weights.bin"


def _unknown_operator(model: onnx.ModelProto) -> None:
    model.graph.node[0].domain = "evil"
    model.opset_import.append(helper.make_opsetid("evil", 1))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_outside, "lie outside the folder of the graph, at '../secret'"),
        (_missing, "the file of weights 'weights.bin' is missing"),
        (_unknown_operator, "onnxruntime cannot load the graph"),
    ],
)
def test_graphs_that_cannot_be_loaded(edit: Edit, message: str, zoo: Zoo, model: Path, graph: onnx.ModelProto) -> None:
    write(graph, Path("theirs.onnx"), edit)
    result = zoo("audit", "theirs.onnx", "--against", model)
    assert result.status == 3
    assert message in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"no protobuf at all", b"\x08\x07"])
def test_files_that_are_no_graphs(content: bytes, zoo: Zoo, model: Path) -> None:
    Path("theirs.onnx").write_bytes(content)
    result = zoo("audit", "theirs.onnx", "--against", model)
    assert (result.status, result.err.count("\n")) == (3, 1)
    assert "not an ONNX graph: theirs.onnx" in result.err


def test_usage(zoo: Zoo, model: Path) -> None:
    for arguments, message in (
        (("no.onnx", "--against", model), "cannot be read (No such file or directory): no.onnx"),
        (("no.onnx", "--against", model, "--map", "x"), "'x' is not THEIRS=OURS"),
        (("no.onnx", "--against", model, "--figure", "page.svg"), "use the suffix .html"),
        (("no.onnx", "--against", model, "--force"), "--force applies to --output and --figure only"),
        (("no.onnx",), "Missing option '--against'"),
    ):
        result = zoo("audit", *arguments)
        assert result.status in (2, 3)
        assert message in result.err


def test_options_of_an_import_are_for_checkpoints(zoo: Zoo, model: Path, graph: onnx.ModelProto) -> None:
    write(graph, Path("theirs.onnx"))
    for option in (("--task", "fill-mask"), ("--via", "transformers"), ("--set", "num_layers=1")):
        result = zoo("audit", "theirs.onnx", "--against", model, *option)
        assert (result.status, "is a model directory, not a checkpoint" in result.err) == (2, True)
