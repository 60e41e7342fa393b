"""What zoo keeps in an ONNX file beside the graph, and where the graph points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx

from zoo.weights import StoredTensor

__all__ = ["EVIDENCE_KEY", "MODULE_KEY", "metadata", "referenced_tensors"]

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


def referenced_tensors(graphs: Iterable[bytes], layout: Mapping[str, StoredTensor]) -> set[str]:
    """The stored tensors that some graph points to."""
    names = {(tensor.file, tensor.offset): name for name, tensor in layout.items()}
    used = set()
    for graph in graphs:
        for initializer in onnx.load_model_from_string(graph).graph.initializer:
            place = {entry.key: entry.value for entry in initializer.external_data}
            if place:
                used.add(names[place["location"], int(place["offset"])])
    return used
