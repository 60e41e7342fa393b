"""What zoo keeps in an ONNX file beside the graph, and where the graph points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from zoo.weights import StoredTensor

__all__ = ["BLOCK_KEY", "EVIDENCE_KEY", "MODULE_KEY", "inline", "metadata", "pointers", "referenced_tensors"]

EVIDENCE_KEY = "zoo.evidence_sha256"
"""In a graph's metadata: the digest of the parity.json that vouches for it."""
MODULE_KEY = "zoo.module"
"""In a node's metadata: the path of the module it was traced from; inside a function, the path within the block."""
BLOCK_KEY = "zoo.block"
"""In the metadata of a node that calls a function: the path of the module it stands for."""


def metadata(graph: bytes) -> Mapping[str, str]:
    """The metadata of a serialised graph; empty for what is not one."""
    try:
        return {entry.key: entry.value for entry in onnx.load_model_from_string(graph).metadata_props}
    except Exception:  # protobuf's errors have no common public base
        return {}


def pointers(graph: bytes) -> dict[str, tuple[str, int]]:
    """File and offset of every initialiser that some node reads and whose value lies in another file."""
    model = ir.from_proto(onnx.load_model_from_string(graph))
    return {
        name: (str(value.const_value.location), value.const_value.offset or 0)
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor) and value.uses()
    }


def referenced_tensors(graphs: Iterable[bytes], layout: Mapping[str, StoredTensor]) -> set[str]:
    """The stored tensors that some graph reads."""
    places = {place for graph in graphs for place in pointers(graph).values()}
    return {name for name, tensor in layout.items() if (tensor.file, tensor.offset) in places}


def inline(model: ir.Model) -> None:
    """Put each function's nodes in place of its calls. Nodes keep the paths of their modules."""
    InlinePass()(model)
    for node in model.graph.all_nodes():
        path = (node.metadata_props.pop(BLOCK_KEY, ""), node.metadata_props.pop(MODULE_KEY, ""))
        if any(path):
            node.metadata_props[MODULE_KEY] = ".".join(filter(None, path))
