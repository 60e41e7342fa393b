"""Graphs that become parts of another one, with their initialisers and functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from zoo.contract import Graph

__all__ = ["GraphParts"]


class GraphParts:
    """Copies of exported graphs, from which nodes are taken, and what these nodes need.

    Args:
        models: the graphs by name. They are not modified.
    """

    def __init__(self, models: Mapping[str, ir.Model]) -> None:
        self.models = {name: model.clone() for name, model in models.items()}
        self.initializers: dict[str, ir.Value] = {}
        """The initialisers of nodes that were taken, each stored tensor once."""
        self.functions: dict[ir.OperatorIdentifier, ir.Function] = {}
        self.opsets: dict[str, int] = {}

    def take(self, graph: Graph, values: Mapping[str, ir.Value]) -> tuple[list[ir.Node], dict[str, ir.Value]]:
        """Extract a graph's nodes, with ``values`` in place of its inputs, and its outputs by declared name."""
        part = self.models[graph.name]
        inputs = dict(zip(list(part.graph.inputs), (values[t.name] for t in graph.input_tensors()), strict=True))
        results = list(part.graph.outputs)
        part.graph.outputs.clear()
        for value in list(part.graph.initializers.values()):
            self._keep(value, graph.name)
        part.graph.initializers.clear()
        for value, replacement in inputs.items():
            value.replace_all_uses_with(replacement)
        self._keep_functions(part, graph.name)
        nodes = list(part.graph)
        part.graph.remove(nodes)
        for value in _values(nodes):  # avoid name clashes with other graphs and the loop
            _rename(value, f"{graph.name}/{value.name}")
        self.opsets |= part.graph.opset_imports
        names = (tensor.name for tensor in graph.output_tensors())
        return nodes, {name: inputs.get(value, value) for name, value in zip(names, results, strict=True)}

    def _keep(self, value: ir.Value, owner: str) -> None:
        """Add an initialiser, unless there already is one for the same stored tensor."""
        stored = value.const_value is None or isinstance(value.const_value, ir.ExternalTensor)
        other = self.initializers.get(str(value.name))
        if stored and other is not None and _place(other) == _place(value):
            value.replace_all_uses_with(other)
            return
        if not stored or other is not None:  # a constant, whose name may clash
            _rename(value, f"{owner}/{value.name}")
        self.initializers[str(value.name)] = value

    def _keep_functions(self, part: ir.Model, owner: str) -> None:
        for key, function in part.functions.items():
            other = self.functions.get(key)
            if other is not None and _function_bytes(other) != _function_bytes(function):
                name = f"{function.name}_{owner}"
                bodies: list[ir.Graph | ir.Function] = [part.graph, *part.functions.values()]
                for body in bodies:
                    for node in ir.traversal.RecursiveGraphIterator(body):
                        if node.op_identifier() == key:
                            node.op_type = name
                function.name = name
                key = function.identifier()
            self.functions[key] = function
            self.opsets[function.domain] = part.graph.opset_imports[function.domain]


def _rename(value: ir.Value, name: str) -> None:
    """Rename a value without renaming its tensor, which is shared with the graph that it was cloned from."""
    tensor, value.const_value = value.const_value, None
    value.name = name
    if isinstance(tensor, ir.ExternalTensor):
        value.const_value = ir.ExternalTensor(
            tensor.location, tensor.offset, tensor.length, tensor.dtype,
            shape=tensor.shape, name=name, base_dir=tensor.base_dir,
        )  # fmt: skip
    elif value.is_initializer() and tensor is not None:
        value.const_value = ir.tensor(tensor.numpy(), dtype=tensor.dtype, name=name)


def _place(value: ir.Value) -> tuple[Any, ...]:
    """Return the location of an initialiser's data, or its name if the graph is not linked."""
    tensor = value.const_value
    if isinstance(tensor, ir.ExternalTensor):
        return str(tensor.location), tensor.offset, tensor.length
    return (value.name,)


def _function_bytes(function: ir.Function) -> bytes:
    data: bytes = ir.to_proto(function).SerializeToString(deterministic=True)
    return data


def _values(nodes: Sequence[ir.Node]) -> list[ir.Value]:
    """Return all values that nodes or their subgraphs define."""
    values: list[ir.Value] = []
    for node in nodes:
        values += node.outputs
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                inner = [attribute.as_graph()]
            else:
                inner = list(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else []
            for graph in inner:
                values += [*graph.inputs, *graph.initializers.values(), *_values(list(graph))]
    return values
