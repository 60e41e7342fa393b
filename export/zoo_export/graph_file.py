"""What zoo keeps in an ONNX file beside the graph, and where the graph points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
import onnx_ir as ir

from zoo.weights import StoredTensor

__all__ = ["EVIDENCE_KEY", "MODULE_KEY", "metadata", "pointers", "referenced_tensors"]

EVIDENCE_KEY = "zoo.evidence_sha256"
"""In a graph's metadata: the digest of the parity.json that vouches for it."""
MODULE_KEY = "zoo.module"
"""In a node's metadata: the path of the module it was traced from."""


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
