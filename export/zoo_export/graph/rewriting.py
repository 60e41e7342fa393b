"""Helpers for rewriting graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes
from onnxscript.optimizer import fold_constants_ir

__all__ = ["MisfitError", "Tape", "replace", "replace_value", "simplify"]

_SMALL = 1024
"""Maximum number of elements of constants to fold."""


class MisfitError(Exception):
    """The graph does not match the pattern of a rewrite."""


def replace(node: ir.Node, value: ir.Value) -> None:
    """Replace the uses of a node's only output by ``value``, and remove the node."""
    replace_value(node.outputs[0], value)
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Replace all uses of ``old`` by ``new``. If ``old`` is a graph output, ``new`` takes its name."""
    if old.is_graph_output():
        graph = old.graph
        assert graph is not None
        name, old.name = old.name, None
        new.name, new.type, new.shape = name, old.type, old.shape
        graph.outputs[:] = [new if item is old else item for item in graph.outputs]
    old.replace_all_uses_with(new)


def simplify(model: ir.Model) -> ir.Model:
    """Fold constants that do not depend on weights, and remove unused and duplicate nodes and inferred types.

    The model is changed in place.
    """
    weights = {value: value.const_value for value in model.graph.initializers.values()}
    for value in weights:  # not to be read, let alone folded
        value.const_value = None
    fold_constants_ir(model, input_size_limit=_SMALL, output_size_limit=_SMALL)
    for value, tensor in weights.items():
        value.const_value = tensor
    ir.passes.Sequential(
        passes.IdentityEliminationPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.RemoveUnusedNodesPass(),
    )(model)
    declared = {*model.graph.inputs, *model.graph.outputs}
    for node in model.graph.all_nodes():
        for value in node.outputs:
            value.metadata_props.clear()
            if value not in declared:
                value.shape = None
                value.type = None
    for graph in model.graphs():
        _separate_outputs(graph)
    for function in model.functions.values():
        for graph in function.subgraphs():
            _separate_outputs(graph)
    return model


def _separate_outputs(graph: ir.Graph) -> None:
    """Give every output a value of its own: ONNX Runtime mixes up outputs of a loop's body that share one."""
    for position, value in enumerate(graph.outputs):
        if value in graph.outputs[:position]:
            copy = ir.node("Identity", [value])
            copy.outputs[0].name = f"{value.name}.{position}"  # unique in the model, as required of inner graphs
            graph.append(copy)
            graph.outputs[position] = copy.outputs[0]


class Tape:
    """Inserts nodes before or after a given node, in the order of the calls."""

    def __init__(self, place: ir.Node | None, *, after: bool) -> None:
        assert place is not None
        assert place.graph is not None
        self.graph = place.graph
        self.place = place
        self.after = after

    def op(self, operator: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Add a node and return its output."""
        return self.add(ir.node(operator, inputs, attributes=attributes))

    def like(self, node: ir.Node, inputs: Sequence[ir.Value]) -> ir.Value:
        """Add a copy of a node with other inputs, and return its output."""
        return self.add(
            ir.Node(
                node.domain, node.op_type, inputs, node.attributes.values(), metadata_props=dict(node.metadata_props)
            )
        )

    def add(self, node: ir.Node) -> ir.Value:
        """Insert a node and return its output."""
        if self.after:
            self.graph.insert_after(self.place, node)
            self.place = node
        else:
            self.graph.insert_before(self.place, node)
        return node.outputs[0]

    def integers(self, *values: int) -> ir.Value:
        """Add a constant integer vector."""
        return self.constant(np.array(values, np.int64))

    def constant(self, value: np.ndarray[Any, Any]) -> ir.Value:
        """Add a constant."""
        return self.op("Constant", value=ir.tensor(value))
