"""Creation of the nodes of a graph that is built from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import onnx_ir as ir

__all__ = ["Nodes"]


class Nodes:
    """Creates nodes in order, with names that are unique in the whole model.

    Args:
        prefix: the first part of the names.
        numbers: the numbers in the names, shared with those of subgraphs.
    """

    def __init__(self, prefix: str, numbers: count[int] | None = None) -> None:
        self.nodes: list[ir.Node] = []
        """The nodes created so far."""
        self._prefix = prefix
        self._numbers = count() if numbers is None else numbers

    def __call__(self, operator: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Create a node and return its first output."""
        return self.several(operator, inputs, 1, **attributes)[0]

    def several(
        self, operator: str, inputs: Sequence[ir.Value | None], outputs: int, **attributes: Any
    ) -> Sequence[ir.Value]:
        """Create a node and return all its outputs."""
        number = next(self._numbers)
        name = f"{self._prefix}/{operator}_{number}"
        node = ir.node(operator, inputs, attributes, num_outputs=outputs, name=name)
        for index, value in enumerate(node.outputs):
            value.name = f"{name}.{index}" if outputs > 1 else name
        self.nodes.append(node)
        return node.outputs

    def constant(self, value: object, dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        """Create a constant tensor."""
        return self("Constant", value=ir.tensor(np.array(value, dtype.numpy())))

    def inner(self) -> Nodes:
        """Create nodes for a subgraph."""
        return Nodes(self._prefix, self._numbers)
