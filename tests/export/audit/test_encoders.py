"""Audits of encoders: honest graphs, faults, and what cannot be asked."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.export.audit.graphs import bake, change_weight, foreign, halve, ignore_mask, overflow, rename, swap, write
from tests.exported import Builder
from zoo.errors import UsageError
from zoo_export.audit.audit import audit
from zoo_export.audit.report import AuditReport

SMALL = ("max_seq_len=8", "num_layers=1")


@pytest.fixture(scope="module")
def model(exported_build: Builder) -> Path:
    return exported_build("bert-tiny", *SMALL, "task=question-answering", noise=True)


@pytest.fixture(scope="module")
def graph(model: Path) -> onnx.ModelProto:
    return foreign(model)


def answer(report: AuditReport, question: str) -> str:
    return next(item.verdict for item in report.questions if item.name == question)


def test_an_honest_graph_is_right(model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    report = audit([write(graph, tmp_path / "model.onnx")], model)
    assert report.passed
    assert {answer(report, name) for name in ("several rows", "one token", "padding on the right")} == {"right"}
    assert {*report.outputs} == {"start_logits", "end_logits"}
    assert report.covered() is not None
    assert report.graphs[0]["producer"] == "another tool 1.0"


def test_a_wrong_weight_is_found_in_its_module(model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    name = next(item.name for item in graph.graph.initializer if "mlp" in item.name and len(item.dims) > 1)
    report = audit([write(graph, tmp_path / "model.onnx", partial(change_weight, name=name))], model)
    assert {fault.output for fault in report.faults} == {"start_logits", "end_logits"}
    assert report.module is not None
    assert report.module.startswith(name.rpartition(".")[0])


def test_a_mask_that_no_node_reads_is_wrong(model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    report = audit([write(graph, tmp_path / "model.onnx", ignore_mask(keep=True))], model)
    assert [answer(report, name) for name in ("rows without padding", "padding on the right")] == ["right", "wrong"]
    assert report.faults[0].shared == ("padding on the right",)
    assert "no node of model.onnx reads its input attention_mask" in report.notes


def test_a_missing_mask_is_a_limit(model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    report = audit([write(graph, tmp_path / "model.onnx", ignore_mask(keep=False))], model)
    assert report.passed
    assert "no attention_mask in model.onnx" in report.limits
    assert answer(report, "padding on the right") == "not asked"


@pytest.mark.parametrize(("axis", "size", "question"), [(0, 1, "several rows"), (1, 7, "one token")])
def test_a_declared_size_is_a_limit(
    axis: int, size: int, question: str, model: Path, graph: onnx.ModelProto, tmp_path: Path
) -> None:
    report = audit([write(graph, tmp_path / "model.onnx", bake(axis, size, declared=True))], model)
    assert report.passed
    assert answer(report, question) == "not asked"
    assert any(f"of {size} baked in, in input_ids" in limit for limit in report.limits)


@pytest.mark.parametrize(("axis", "size", "question"), [(0, 1, "several rows"), (1, 7, "one token")])
def test_a_size_that_is_baked_in_but_not_declared_is_wrong(
    axis: int, size: int, question: str, model: Path, graph: onnx.ModelProto, tmp_path: Path
) -> None:
    report = audit([write(graph, tmp_path / "model.onnx", bake(axis, size, declared=False))], model)
    assert answer(report, question) == "wrong"
    assert "fails at" in report.faults[-1].failure


def test_swapped_outputs_are_wrong_until_they_are_mapped(model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    path = write(graph, tmp_path / "model.onnx", swap("start_logits", "end_logits"))
    report = audit([path], model)
    assert not report.passed
    assert any(note.startswith("start_logits equals end_logits of the model") for note in report.notes)
    assert audit([path], model, names={"start_logits": "end_logits", "end_logits": "start_logits"}).passed


def test_graphs_in_half_precision_are_judged_by_divergence(model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    honest = audit([write(graph, tmp_path / "half.onnx", halve)], model)
    assert honest.passed
    assert honest.rule.startswith("float16: mean KL")
    report = audit([write(graph, tmp_path / "model.onnx", halve, overflow("start_logits"))], model)
    assert [fault.output for fault in report.faults] == ["start_logits"]
    assert "is not finite" in report.faults[0].failure


def test_unknown_names_are_refused_until_they_are_mapped(model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    path = write(graph, tmp_path / "model.onnx", rename({"input_ids": "x", "start_logits": "y"}))
    with pytest.raises(UsageError, match=r"the input 'x' is none that is known.*--map x=OURS.*input_ids"):
        audit([path], model)
    report = audit([path], model, names={"x": "input_ids", "y": "start_logits"})
    assert report.passed
    with pytest.raises(UsageError, match=r"the model has no input or output 'input_id'.*did you mean 'input_ids'"):
        audit([path], model, names={"x": "input_id"})
    with pytest.raises(UsageError, match="no graph has an input or output 'z'"):
        audit([path], model, names={"z": "input_ids"})


def test_outputs_that_a_graph_lacks_are_limits(model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    def drop(proto: onnx.ModelProto) -> None:
        del proto.graph.output[1]

    report = audit([write(graph, tmp_path / "model.onnx", drop)], model)
    assert report.passed
    assert "no output end_logits" in report.limits


def negate_position(proto: onnx.ModelProto) -> None:
    table = next(item for item in proto.graph.initializer if "position" in item.name and len(item.dims) == 2)
    values = numpy_helper.to_array(table).copy()
    values[-2] *= -1
    table.CopyFrom(numpy_helper.from_array(values, table.name))


def add_dequantized_zeros(proto: onnx.ModelProto) -> None:
    """Add a constant of 8 bits to an output, which changes nothing."""
    graph, name = proto.graph, proto.graph.output[0].name
    for node in graph.node:
        node.output[:] = [f"{name}_before" if output == name else output for output in node.output]
    zeros, scale = np.zeros(1, np.int8), np.float32(1)
    graph.initializer.extend([numpy_helper.from_array(zeros, "zeros"), numpy_helper.from_array(scale, "scale")])
    graph.node.append(helper.make_node("DequantizeLinear", ["zeros", "scale"], ["dequantized"]))
    graph.node.append(helper.make_node("Add", [f"{name}_before", "dequantized"], [name]))


def test_a_constant_in_8_bits_does_not_choose_the_rule(model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    """The rule of quantised graphs is one of means, which a wrong position hardly changes."""
    report = audit([write(graph, tmp_path / "model.onnx", negate_position, add_dequantized_zeros)], model)
    assert not report.passed
    assert report.graphs[0]["precision"] == "float32"


def test_nodes_in_any_order(model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    """ONNX Runtime sorts them."""

    def reverse(proto: onnx.ModelProto) -> None:
        nodes = [*proto.graph.node][::-1]
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)

    report = audit([write(graph, tmp_path / "model.onnx", reverse)], model)
    assert report.passed
    assert any(limit.startswith("conditions in the graphs were not looked for") for limit in report.limits)


def test_outcomes_that_no_input_shows_are_a_limit(model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    """The graph is wrong where a row has one token five times."""

    def add_unlikely(proto: onnx.ModelProto) -> None:
        graph, name = proto.graph, proto.graph.output[0].name
        for node in graph.node:
            node.output[:] = [f"{name}_before" if output == name else output for output in node.output]
        constants = {"token": np.int64(53), "zero": np.float32(0), "one": np.float32(1), "enough": np.float32(4),
                     "axis": np.array([1])}  # fmt: skip
        graph.initializer.extend(numpy_helper.from_array(value, key) for key, value in constants.items())
        graph.node.extend([
            helper.make_node("Equal", ["input_ids", "token"], ["equal"]),
            helper.make_node("Cast", ["equal"], ["ones"], to=onnx.TensorProto.FLOAT),
            helper.make_node("ReduceSum", ["ones", "axis"], ["count"], keepdims=1),
            helper.make_node("Greater", ["count", "enough"], ["many"]),
            helper.make_node("Where", ["many", "one", "zero"], ["bump"]),
            helper.make_node("Add", [f"{name}_before", "bump"], [name]),
        ])  # fmt: skip

    report = audit([write(graph, tmp_path / "model.onnx", add_unlikely)], model)
    assert not report.passed or any("outcomes of conditions that no input shows" in text for text in report.limits)


def test_the_report_says_which_inputs_were_compared(model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    report = audit([write(graph, tmp_path / "model.onnx")], model)
    count, whole = report.ids["input_ids"]
    assert count <= whole
    assert f"{count:,} of the {whole:,} ids of input_ids" in report.asked()
    assert "up to 8 tokens" in report.asked()
