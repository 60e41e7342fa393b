"""Graphs without functions."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from zoo_export.graph.metadata import BLOCK_KEY, MODULE_KEY

__all__ = ["inline"]


def inline(model: ir.Model) -> ir.Model:
    """Inline all functions, in place. Nodes keep the full paths of their modules."""
    InlinePass()(model)
    for node in model.graph.all_nodes():
        path = (node.metadata_props.pop(BLOCK_KEY, ""), node.metadata_props.pop(MODULE_KEY, ""))
        if any(path):
            node.metadata_props[MODULE_KEY] = ".".join(filter(None, path))
    return model
