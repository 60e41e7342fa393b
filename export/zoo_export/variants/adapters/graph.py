"""Graphs with low-rank adapters beside their dense layers (Hu et al. 2021), chosen for each row of a batch.

For a product ``y = x W``, with x of shape (B, ..., inputs), the graph computes ``y + (x A') B'``, in which A and B are
gathered from the stacks of all adapters by the input ``adapter_ids`` (B,). The stacks are initialisers that are inputs
as well, so that a runtime may replace them. Everything else is the graph without adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from zoo.arrays import Array
from zoo.artifact import ADAPTERS, ModelDirectory
from zoo.artifact.weights import StoredTensor
from zoo.errors import ArtifactError, UsageError
from zoo_export.graph.file import dump, load, parse
from zoo_export.graph.links import external_tensors, place_of
from zoo_export.graph.metadata import MODULE_KEY, contract
from zoo_export.graph.rewriting import Tape
from zoo_export.trace.make import Options, make_graphs
from zoo_export.variants.adapters.stack import FILE, LORA_A, LORA_B, layers_of
from zoo_runtime.onnx_runtime.adapters import ADAPTER_IDS

__all__ = ["make_adapted", "stacks_of", "without_adapters"]

SUM_KEY = "zoo.adapted"
"""Metadata of the node that adds an adapter's update: the layer."""
BATCH = "batch"


def make_adapted(
    stored: ModelDirectory, places: Mapping[str, StoredTensor], *, cached: bool = True
) -> dict[str, bytes]:
    """Create all declared graphs by name, with adapters.

    Args:
        stored: the model.
        places: the stacks in ``model.adapters.safetensors``, by name.
        cached: whether traces may come from the cache.

    Raises:
        UsageError: a graph does not read the weight of an adapted layer as a dense layer does, or has other rows than
            a batch.
    """
    for graph in stored.spec.graphs:
        if graph.rows != (BATCH,):
            problem = (
                f"graph {graph.name} has the rows {' and '.join(graph.rows)}, so it cannot choose an adapter for each"
            )
            raise UsageError(problem, stored.path, "merge the adapter")
    graphs, used = {}, set()
    for name, data in make_graphs(stored, Options(functions=False, windows=False), cached=cached).items():
        model = load(data)
        used |= _add_adapters(model, places)
        graphs[name] = dump(model)
    unused = [layer for layer in layers_of(places) if layer not in used]
    if unused:
        raise UsageError(f"no graph reads the weight of {unused[0]}, which an adapter changes", stored.path)
    return graphs


@dataclass(frozen=True)
class _Product:
    """A product of activations with the weight of a dense layer."""

    node: ir.Node
    inputs: int
    outputs: int
    is_matrix: bool
    """Whether the activations are a matrix, with all leading dimensions in one."""


class _Rewriter:
    """Adds adapters to one graph."""

    def __init__(self, model: ir.Model) -> None:
        self.graph, self.start = model.graph, Tape(model.graph[0], after=False)
        self.ids = ir.Value(name=ADAPTER_IDS, shape=ir.Shape([BATCH]), type=ir.TensorType(ir.DataType.INT64))
        model.graph.inputs.append(self.ids)
        self.rows = self.start.op("Shape", self.ids)
        self._sizes: dict[int, ir.Value] = {}

    def factor(self, name: str, place: StoredTensor, rank_axis: int) -> ir.Value:
        """Add a stack, and return the transposed factors of the rows' adapters."""
        tensor = ir.ExternalTensor(
            place.file, place.offset, place.length, ir.DataType.FLOAT, shape=ir.Shape(place.shape), name=name
        )
        sizes: list[int | str] = [ADAPTERS, *place.shape[1:]]
        sizes[rank_axis] = f"{name.rpartition('.')[0]}.rank"
        stack = ir.Value(name=name, shape=ir.Shape(sizes), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.inputs.append(stack)
        self.graph.initializers.add(stack)
        return self.start.op("Transpose", self.start.op("Gather", stack, self.ids), perm=[0, 2, 1])

    def add(self, product: _Product, a: ir.Value, b: ir.Value, layer: str) -> None:
        """Add an update to a product, whose result takes over the name.

        Args:
            product: the product with the weight.
            a: (B, inputs, rank).
            b: (B, rank, outputs).
            layer: the dense layer.
        """
        node, tape = product.node, Tape(product.node, after=True)
        source, old = node.inputs[0], node.outputs[0]
        assert source is not None
        total = ir.Value(name=old.name, shape=old.shape, type=old.type)
        old.replace_all_uses_with(total, replace_graph_outputs=True)
        old.name = f"{old.name}.base"
        update = tape.op("MatMul", tape.op("MatMul", tape.op("Reshape", source, self._by_row(product.inputs)), a), b)
        shape = tape.integers(-1, product.outputs) if product.is_matrix else tape.op("Shape", old)
        path = {key: text for key, text in node.metadata_props.items() if key == MODULE_KEY}
        summed = [old, tape.op("Reshape", update, shape)]
        tape.add(ir.node("Add", summed, outputs=[total], metadata_props={**path, SUM_KEY: layer}))

    def _by_row(self, inputs: int) -> ir.Value:
        """Return the shape (B, ..., inputs) of activations in three dimensions."""
        if inputs not in self._sizes:
            self._sizes[inputs] = self.start.op("Concat", self.rows, self.start.integers(-1, inputs), axis=0)
        return self._sizes[inputs]


def _add_adapters(model: ir.Model, places: Mapping[str, StoredTensor]) -> set[str]:
    """Add adapters to the layers whose weights a graph reads. Returns these layers."""
    found = {}
    for layer in layers_of(places):
        weight = model.graph.initializers.get(f"{layer}.weight")
        if weight is not None and (products := list(_products(weight))):
            found[layer] = products
    rewriter = _Rewriter(model) if found else None
    for layer, products in found.items():
        assert rewriter is not None
        a, b = (rewriter.factor(layer + end, places[layer + end], axis) for end, axis in ((LORA_A, 1), (LORA_B, 2)))
        for product in products:
            rewriter.add(product, a, b, layer)
    if found:
        model.metadata_props["zoo.contract"] = contract(model)
    return set(found)


def _products(weight: ir.Value) -> Iterator[_Product]:
    """Yield the products that read the weight (outputs, inputs) of a dense layer.

    Raises :class:`UsageError` for any other use of it.
    """
    assert weight.shape is not None
    outputs, inputs = weight.shape.numpy()
    for node, position in tuple(weight.uses()):
        numbers = {name: attribute.value for name, attribute in node.attributes.items()}
        if node.op_type == "Gemm" and position == 1:
            plain = numbers.get("alpha", 1) == 1 and not numbers.get("transA", 0) and numbers.get("transB", 0)
            if plain:
                yield _Product(node, inputs, outputs, is_matrix=True)
                continue
        if node.op_type == "Transpose" and list(numbers.get("perm", (1, 0))) == [1, 0]:
            reads = list(node.outputs[0].uses())
            if reads and all(read.op_type == "MatMul" and place == 1 for read, place in reads):
                yield from (_Product(read, inputs, outputs, is_matrix=False) for read, _ in reads)
                continue
        raise UsageError(f"{weight.name} is read by {node.op_type}, so it cannot have an adapter beside it")


def without_adapters(data: bytes) -> bytes:
    """Return a graph without its adapters, which is that of the model."""
    model = load(data)
    for node in tuple(model.graph.all_nodes()):
        if SUM_KEY in node.metadata_props:
            old, total = node.inputs[0], node.outputs[0]
            assert old is not None
            name = total.name
            total.replace_all_uses_with(old, replace_graph_outputs=True)
            old.name, total.name = name, f"{name}.adapted"
    passes.RemoveUnusedNodesPass()(model)
    for value in tuple(model.graph.inputs):
        if value.name == ADAPTER_IDS or (value.name or "").endswith((LORA_A, LORA_B)):
            model.graph.inputs.remove(value)
            model.graph.initializers.pop(value.name or "", None)
    return dump(model)


def stacks_of(data: bytes, file: bytes) -> dict[str, Array]:
    """Return the stacks that a graph refers to, by name, read from the content of their file where the graph says.

    Raises :class:`ArtifactError` if one is not in the file.
    """
    stacks = {}
    for tensor in external_tensors(parse(data)):
        location, start, length = place_of(tensor)
        if location == FILE:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            try:
                stacks[tensor.name] = np.frombuffer(file[start : start + length], dtype).reshape(tuple(tensor.dims))
            except ValueError as error:
                raise ArtifactError(f"{tensor.name} is not in the file ({error})", FILE) from error
    return stacks
