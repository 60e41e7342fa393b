"""The memory of beam search, estimated before it starts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from zoo import system
from zoo.contract import Graph
from zoo.errors import UsageError, argument
from zoo.probe.dtypes import dtype_of

__all__ = ["beam_bytes", "past_bytes", "require_beam_memory"]

_COPIES = 5
"""Arrays of a float64 or an int64 for each extension of a beam by a token: scores, totals, their order."""


def past_bytes(graph: Graph, dtype: np.dtype[Any], tokens: int) -> int:
    """Return the memory of the past of one text of a number of tokens, in a model of a dtype."""
    sizes = {"batch": 1, str(graph.past_length): tokens}
    return sum(math.prod(tensor.shape(sizes)) * dtype_of(tensor, dtype).itemsize for tensor in graph.past_tensors())


def beam_bytes(graph: Graph, dtype: np.dtype[Any], tokens: int, vocabulary: int) -> int:
    """Return the memory of one beam with a past of a number of tokens: twice the past, which moves, and candidates."""
    # A step writes the new past while the old one is still read, and beams are then copied to new places.
    return 2 * past_bytes(graph, dtype, tokens) + vocabulary * (dtype.itemsize + 8 * _COPIES)


def require_beam_memory(rows: int, beams: int, size: int) -> None:
    """Raise :class:`UsageError` if the beams of a batch, each of a number of bytes, do not fit in the free memory."""
    needed = rows * beams * size
    free = system.free_memory()
    if needed > free:
        problem = f"{beams} beams of {rows} texts need about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        raise UsageError(problem, argument("num_beams"), "lower it, or the batch size")
