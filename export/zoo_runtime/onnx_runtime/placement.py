"""Assignment of graph nodes to execution providers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.providers import PROVIDERS

__all__ = ["PlacedNode", "left_on_cpu", "placed_nodes", "placement", "unexpected_cpu_nodes"]

_COMPUTES_SIZES = {
    "Add", "Cast", "Concat", "Div", "Equal", "Gather", "Max", "Min", "Mod", "Mul", "Neg", "Range", "Reshape", "Shape",
    "Size", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where",
}  # fmt: skip
"""Operators commonly used to compute sizes and positions."""


class PlacedNode(NamedTuple):
    """A node of a session's graph, with the provider that runs it."""

    provider: str
    operator: str
    name: str


def placed_nodes(session: ort.InferenceSession) -> list[PlacedNode]:
    """List the nodes with their providers. The session must have been opened with ``placements``."""
    return [
        PlacedNode(part.ep_name, node.op_type, node.name)
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]


def placement(session: ort.InferenceSession) -> Mapping[str, int]:
    """Count the nodes of each provider. The session must have been opened with ``placements``."""
    return dict(Counter(node.provider for node in placed_nodes(session)))


def unexpected_cpu_nodes(
    session: ort.InferenceSession, on_sizes: Mapping[str, bool] = MappingProxyType({})
) -> list[PlacedNode]:
    """Return the nodes that a CUDA session runs on the CPU, shape arithmetic excepted.

    Args:
        session: opened with ``placements``.
        on_sizes: by node name, whether a node does shape arithmetic. For nodes not listed, the operator decides.
    """
    return left_on_cpu(placed_nodes(session), on_sizes)


def left_on_cpu(nodes: Iterable[PlacedNode], on_sizes: Mapping[str, bool]) -> list[PlacedNode]:
    """Return the nodes placed on the CPU, shape arithmetic excepted (see :func:`unexpected_cpu_nodes`)."""
    return [
        node
        for node in nodes
        if node.provider == PROVIDERS["cpu"][0] and not on_sizes.get(node.name, node.operator in _COMPUTES_SIZES)
    ]
