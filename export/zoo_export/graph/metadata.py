"""Metadata of graphs: the keys, and what is written under them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import onnx

from zoo.errors import ArtifactError
from zoo_export.graph.file import parse

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = [
    "BLOCK_KEY",
    "EXACT_KEY",
    "FLAT_KEY",
    "HEADER_KEY",
    "MODULE_KEY",
    "TOKENIZER_KEY",
    "WEIGHTS_KEY",
    "annotate",
    "contract",
    "metadata",
    "without_functions",
]

WEIGHTS_KEY = "zoo.weights_sha256"
"""Graph metadata: digest of the weights that it was verified with."""
TOKENIZER_KEY = "zoo.tokenizer_sha256"
"""Graph metadata: digest of the tokenizer file."""
HEADER_KEY = "zoo.weights_header_sha256"
"""Graph metadata: digest of the names, dtypes, shapes and locations of all stored tensors."""
MODULE_KEY = "zoo.module"
"""Node metadata: path of the module that the node was traced from; inside a function, relative to the block."""
EXACT_KEY = "zoo.exact"
"""Metadata of a float16 or bfloat16 constant: the unrounded number in the model's code."""
FLAT_KEY = "zoo.without_functions"
"""Graph metadata: why repeated modules did not become functions, if functions were requested."""
BLOCK_KEY = "zoo.block"
"""Metadata of a function call: path of the module that it replaces."""


def metadata(graph: bytes) -> Mapping[str, str]:
    """Return the metadata of a serialised graph; empty if it cannot be parsed."""
    try:
        return {entry.key: entry.value for entry in parse(graph).metadata_props}
    except ArtifactError:
        return {}


def annotate(model: onnx.ModelProto, entries: Mapping[str, str]) -> None:
    """Add entries to a graph's metadata, replacing those with the same keys, and sort all by key."""
    before = {entry.key: entry.value for entry in model.metadata_props}
    del model.metadata_props[:]
    for key, value in sorted({**before, **entries}.items()):
        model.metadata_props.add(key=key, value=value)


def without_functions(graph: bytes) -> dict[str, str]:
    """Return why repeated modules of a graph did not become functions, where that was requested."""
    reason = metadata(graph).get(FLAT_KEY)
    return {"without_functions": reason} if reason else {}


def contract(model: ir.Model) -> str:
    """Return the names, dimensions and dtypes of a graph's inputs and outputs, as JSON for its metadata."""
    sides = {"inputs": model.graph.inputs, "outputs": model.graph.outputs}
    return json.dumps(
        {
            side: [
                {
                    "name": value.name,
                    "dims": [dim if isinstance(dim, int) else str(dim) for dim in value.shape or ()],
                    "dtype": value.dtype.numpy().name if value.dtype else None,
                }
                for value in values
            ]
            for side, values in sides.items()
        }
    )
