"""ONNX files as other tools write them, and faults planted in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from zoo_export.export import export_graphs_only
from zoo_export.graph.inline import inline

__all__ = [
    "Edit",
    "bake",
    "begin",
    "change_weight",
    "foreign",
    "halve",
    "ignore_mask",
    "merge",
    "overflow",
    "rename",
    "shift_positions",
    "spoil_presents",
    "swap",
    "write",
]

Edit = Callable[[onnx.ModelProto], None]


def foreign(folder: Path) -> onnx.ModelProto:
    """Export a model without a comparison, and return its graph in one piece, as another tool would write it."""
    export_graphs_only(folder)
    model = ir.load(folder / "model.onnx")
    inline(model)
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy().copy(), name=value.name)
    proto = ir.to_proto(model)
    proto.producer_name, proto.producer_version = "another tool", "1.0"
    return proto


def write(model: onnx.ModelProto, path: Path, *edits: Edit) -> Path:
    """Write a copy of a graph with edits."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for edit in edits:
        edit(changed)
    onnx.save(changed, path)
    return path


def rename(names: Mapping[str, str]) -> Edit:
    """Rename inputs and outputs."""

    def edit(model: onnx.ModelProto) -> None:
        for value in (*model.graph.input, *model.graph.output):
            value.name = names.get(value.name, value.name)
        for node in model.graph.node:
            for places in (node.input, node.output):
                places[:] = [names.get(name, name) for name in places]

    return edit


def swap(one: str, other: str) -> Edit:
    """Return each of two outputs under the name of the other."""

    def edit(model: onnx.ModelProto) -> None:
        names = {one: other, other: one}
        for node in model.graph.node:
            node.output[:] = [names.get(name, name) for name in node.output]
            node.input[:] = [names.get(name, name) for name in node.input]

    return edit


def ignore_mask(*, keep: bool) -> Edit:
    """Attend to padding, too, and keep or drop the input ``attention_mask``."""

    def edit(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            node.input[:] = ["all_ones" if name == "attention_mask" else name for name in node.input]
        value = helper.make_tensor("value", TensorProto.INT64, [1], [1])
        model.graph.node.insert(0, helper.make_node("Shape", ["input_ids"], ["shape_of_ids"]))
        model.graph.node.insert(1, helper.make_node("ConstantOfShape", ["shape_of_ids"], ["all_ones"], value=value))
        if not keep:
            del model.graph.input[[item.name for item in model.graph.input].index("attention_mask")]

    return edit


def bake(axis: int, size: int, *, declared: bool) -> Edit:
    """Accept one size of the token ids alone, along an axis, and declare it or not."""

    def edit(model: onnx.ModelProto) -> None:
        if declared:
            for value in model.graph.input:
                if value.name != "input_ids" and axis:
                    continue
                dims = value.type.tensor_type.shape.dim
                if len(dims) > axis and not dims[axis].HasField("dim_value"):
                    dims[axis].dim_value = size
            return
        for node in model.graph.node:
            node.input[:] = ["reshaped" if name == "input_ids" else name for name in node.input]
        shape = numpy_helper.from_array(np.array([size if place == axis else 0 for place in range(2)]), "baked")
        model.graph.initializer.append(shape)
        model.graph.node.insert(0, helper.make_node("Reshape", ["input_ids", "baked"], ["reshaped"]))

    return edit


def change_weight(model: onnx.ModelProto, name: str) -> None:
    """Add 0.5 to one number of a weight."""
    tensor = next(item for item in model.graph.initializer if item.name == name)
    values = numpy_helper.to_array(tensor).copy()
    values.flat[3] += 0.5
    tensor.CopyFrom(numpy_helper.from_array(values, name))


def halve(model: onnx.ModelProto) -> None:
    """Store matrices in float16."""
    for tensor in list(model.graph.initializer):
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) > 1:
            values = numpy_helper.to_array(tensor).astype(np.float16)
            name = tensor.name
            tensor.CopyFrom(numpy_helper.from_array(values, f"{name}.half"))
            model.graph.node.insert(0, helper.make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT))


def overflow(output: str) -> Edit:
    """Compute an output in float16, at ten million times its size."""

    def edit(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            node.output[:] = [f"{output}.before" if name == output else name for name in node.output]
        model.graph.initializer.append(numpy_helper.from_array(np.array(1e7, np.float32), "large"))
        model.graph.node.extend(
            [
                helper.make_node("Mul", [f"{output}.before", "large"], [f"{output}.large"]),
                helper.make_node("Cast", [f"{output}.large"], [f"{output}.half"], to=TensorProto.FLOAT16),
                helper.make_node("Cast", [f"{output}.half"], [f"{output}.wide"], to=TensorProto.FLOAT),
                helper.make_node("Div", [f"{output}.wide", "large"], [output]),
            ]
        )

    return edit


def begin(model: onnx.ModelProto) -> None:
    """Make the graph of a decoder without a past: its caches begin empty."""
    nodes = [helper.make_node("Shape", ["input_ids"], ["rows"], start=0, end=1)]
    for value in [item for item in model.graph.input if item.name.startswith("past")]:
        sizes = [0 if dim.HasField("dim_param") else dim.dim_value for dim in value.type.tensor_type.shape.dim][1:]
        rest = f"{value.name}.sizes"
        model.graph.initializer.append(numpy_helper.from_array(np.array(sizes), rest))
        nodes.append(helper.make_node("Concat", ["rows", rest], [f"{value.name}.shape"], axis=0))
        nodes.append(helper.make_node("ConstantOfShape", [f"{value.name}.shape"], [value.name]))
        model.graph.input.remove(value)
    for number, node in enumerate(nodes):
        model.graph.node.insert(number, node)


def merge(model: onnx.ModelProto) -> None:
    """Add the input by which a merged decoder chooses its branch."""
    model.graph.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))


def _has_past(model: onnx.ModelProto) -> None:
    """Compute ``has_past``: 1 in a call with a past, else 0."""
    past = next(item.name for item in model.graph.input if item.name.startswith("past"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
    model.graph.node.insert(0, helper.make_node("Shape", [past], ["past_length"], start=2, end=3))
    model.graph.node.insert(1, helper.make_node("Min", ["past_length", "one"], ["has_past"]))


def shift_positions(model: onnx.ModelProto) -> None:
    """Count positions from 1 in calls with a past."""
    place, node = next(
        (place, node)
        for place, node in enumerate(model.graph.node)
        if node.op_type == "Gather" and "position" in node.input[0]
    )
    added = helper.make_node("Sub", [node.input[1], "has_past"], ["shifted"])
    clipped = helper.make_node("Abs", ["shifted"], ["positive"])
    node.input[1] = "positive"
    model.graph.node.insert(place, added)
    model.graph.node.insert(place + 1, clipped)
    _has_past(model)


def spoil_presents(model: onnx.ModelProto) -> None:
    """Double the keys that a call with a past returns. The logits of that call are right."""
    names = [item.name for item in model.graph.output if item.name.endswith(".key")]
    for node in model.graph.node:
        for places in (node.input, node.output):
            places[:] = [f"{name}.right" if name in names else name for name in places]
    _has_past(model)
    model.graph.node.append(helper.make_node("Cast", ["has_past"], ["more"], to=TensorProto.FLOAT))
    for name in names:
        model.graph.node.append(helper.make_node("Mul", [f"{name}.right", "more"], [f"{name}.again"]))
        model.graph.node.append(helper.make_node("Add", [f"{name}.right", f"{name}.again"], [name]))
