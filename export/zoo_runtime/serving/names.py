"""Names of the profile ``serving``, see :mod:`zoo_export.graph.serving`."""

from __future__ import annotations

from zoo.artifact.weights import parse_json
from zoo.errors import ArtifactError

__all__ = ["CAPACITY", "NEW_LENGTHS", "PAST_LENGTHS", "SIZES_KEY", "read_sizes"]

CAPACITY = "capacity"
"""The number of slots of a row's caches."""
PAST_LENGTHS = "past_lengths"
"""Graph input, int64 (B,): the number of tokens that a row's caches hold."""
NEW_LENGTHS = "new_lengths"
"""Graph input, int64 (B,): the number of tokens that a call adds to a row."""
SIZES_KEY = "zoo.serving"
"""Graph metadata: the sizes of dimensions, by name, as JSON."""


def read_sizes(text: str) -> dict[str, int]:
    """Parse the sizes of dimensions, by name, in the metadata of a graph.

    Raises :class:`ArtifactError` unless they are positive whole numbers.
    """
    try:
        sizes = parse_json(text.encode())
    except (ValueError, RecursionError):
        sizes = None
    if not isinstance(sizes, dict) or not all(type(size) is int and size > 0 for size in sizes.values()):
        raise ArtifactError(f"the metadata of the ONNX graph has the sizes {text!r:.40}")
    return sizes
