"""The choice of the weights that are quantised, and of how."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import onnx_ir as ir

from zoo.artifact import ModelDirectory
from zoo.errors import UsageError
from zoo_export.variants.quantized.packing import Packing

__all__ = ["SCHEMES", "Scheme", "plan_packing"]

_OTHER_BITS = 8
"""Bits of weights that no Linear reads."""
_STACK = 3
"""Number of dimensions of a stack of matrices."""
_SMALLEST_BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Quantisation scheme of a precision."""

    bits: int
    block: int
    """Numbers per scale; fewer if the row length is not a multiple of it."""
    zero_points: bool
    dynamic: bool
    """Whether to quantise activations dynamically, as a whole, in graphs without a past."""


SCHEMES: Mapping[str, Scheme] = {
    "int8": Scheme(bits=8, block=128, zero_points=False, dynamic=True),
    "int4": Scheme(bits=4, block=32, zero_points=True, dynamic=False),
}


def plan_packing(
    stored: ModelDirectory, graphs: Mapping[str, ir.Model], scheme: Scheme
) -> tuple[dict[str, Packing], dict[str, str]]:
    """Choose the weights to quantise; return them, and the reasons for those that stay float32."""
    has_past = {graph.name: bool(graph.pasts) for graph in stored.spec.graphs}
    in_loops = {node for model in graphs.values() for inner in model.graph.subgraphs() for node in inner}
    plan: dict[str, Packing] = {}
    reasons: dict[str, str] = {}
    for name, place in stored.layout.items():
        uses = {
            use: has_past[graph]
            for graph, model in graphs.items()
            if name in model.graph.initializers
            for use in model.graph.initializers[name].uses()
        }
        if len(place.shape) < 2 or place.dtype != "F32" or not uses:
            continue
        # Errors of products would grow with every step; a matrix that is looked up is that of an expert.
        if any(node in in_loops and node.op_type != "Gather" for node, _ in uses):
            packing: Packing | str = "read in a loop"
        elif any(_is_bias(node) for node, _ in uses):
            packing = "added to a product"
        elif any(_is_compared(node) for node, _ in uses):
            packing = "its products choose, as those of a router"
        else:
            packing = _packing(place.shape, uses, scheme)
        if isinstance(packing, Packing):
            plan[name] = packing
        else:
            reasons[name] = packing
    if not plan:
        problem = "the model has no weights to quantise"
        examples = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3])
        raise UsageError(f"{problem} ({examples})" if reasons else problem, stored.path, "use float16")
    return plan, reasons


def _packing(shape: tuple[int, ...], uses: Mapping[Any, bool], scheme: Scheme) -> Packing | str:
    """Choose how to store a weight that these nodes read, each in a graph with or without a past.

    Returns the reason if it cannot be quantised.
    """
    kinds = set()
    for node, position in uses:
        kind = _reader(node, position, len(shape))
        if kind is None:
            return f"read by {node.op_type}"
        kinds.add(kind)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if scheme.dynamic and not any(uses.values()) and kinds == {"product"}:
        return Packing(rows, columns, 8, None)
    block = next((size for size in _blocks(scheme.block) if columns % size == 0), None)
    if block is None:
        return f"row length {columns} is not a multiple of {_SMALLEST_BLOCK}"
    if "product" in kinds:
        # ONNX Runtime's CUDA kernel of lookups misreads packed zero points that do not fill the last byte of a row.
        fills = "lookup" not in kinds or columns // block * scheme.bits % 8 == 0
        return Packing(rows, columns, scheme.bits, block, scheme.zero_points and fills)
    return Packing(rows, columns, _OTHER_BITS, block, "stack" in kinds)


def _is_compared(node: ir.Node) -> bool:
    """Return whether the largest results of a node are chosen."""
    readers = [reader for reader, _ in node.outputs[0].uses()]
    return any(reader.op_type == "TopK" or (reader.op_type == "Reshape" and _is_compared(reader)) for reader in readers)


def _is_bias(node: ir.Node) -> bool:
    """Return whether a node looks up a row that is added to a product, as the bias of an expert."""
    uses = tuple(node.outputs[0].uses())
    return node.op_type == "Gather" and bool(uses) and all(use.op_type == "Gemm" and place == 2 for use, place in uses)


def _blocks(largest: int) -> Iterator[int]:
    while largest >= _SMALLEST_BLOCK:
        yield largest
        largest //= 2


def _reader(node: ir.Node, position: int, rank: int) -> Literal["product", "lookup", "stack"] | None:
    """Classify a node's use of a weight; None if it does not support a quantised one."""
    numbers = {name: attribute.value for name, attribute in node.attributes.items()}
    if node.op_type == "Gemm" and position == 1:
        plain = numbers.get("alpha", 1) == 1 and numbers.get("beta", 1) == 1 and not numbers.get("transA", 0)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        adds = bias is None or (bias.is_initializer() and bias.shape is not None and len(bias.shape) == 1)
        return "product" if plain and adds and numbers.get("transB", 0) else None
    if node.op_type == "Gather" and position == 0 and not numbers.get("axis", 0) and rank <= _STACK:
        return "lookup"
    return "stack" if node.op_type in ("MatMul", "Einsum", "Transpose") and rank == _STACK else None
