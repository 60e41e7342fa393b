"""The sizes of the profile ``serving``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zoo.artifact import PREFILL
from zoo.contract import Size, sizes_of, standard_fields
from zoo.errors import UsageError, argument, nearest
from zoo.probe.grid import longest_length
from zoo.registry import ModelSpec
from zoo_runtime.serving.names import CAPACITY

__all__ = ["ServingSizes", "serving_sizes"]

_ROWS = 8
"""Default rows."""
_LONGEST = 1024
"""Largest default capacity."""
_CHUNK = 64
"""Largest default length of a chunk."""
_CHUNKS = 8
"""Chunks in a small capacity."""


@dataclass(frozen=True)
class ServingSizes:
    """The sizes of dimensions of one graph of the profile ``serving``, by name."""

    export: Mapping[str, int]
    """Sizes of the export, listed in the metadata of every graph: see :func:`serving_sizes`."""
    own: Mapping[str, int]
    """Sizes of this graph that differ from them."""


def serving_sizes(spec: ModelSpec, fixed: Mapping[str, int]) -> dict[str, int]:
    """Return the size of each dimension, by name: those given, and defaults of the others.

    - ``batch``: the number of rows, 8.
    - ``capacity``: the number of tokens that a row has room for, past and new: the model's positions, at most 1024.
    - ``sequence``: the number of new tokens of a row that the graph ``prefill`` reads at a time: an eighth of the
      capacity, at most 64. The other graph reads one.
    - Other lengths, such as that of a source: the capacity.

    Raises:
        UsageError: the model has no past, or a size is not possible.
    """
    if not any(graph.pasts for graph in spec.graphs):
        problem = f"{spec.plugin}: {spec.architecture.name} has no past to keep between calls"
        raise UsageError(problem, argument("profile", "serving"), "export another profile")
    if any(graph.name == PREFILL for graph in spec.graphs):
        raise UsageError(f"{spec.plugin} declares a graph named {PREFILL}", argument("profile", "serving"), "rename it")
    pasts = {graph.past_length for graph in spec.graphs}
    free = {name for graph in spec.graphs for name in graph.dim_names()} - pasts
    dimensions = {"batch", "sequence", CAPACITY, *free}
    for name in fixed:
        if name not in dimensions:
            raise UsageError(f"{spec.name} has no free dimension {name!r}", argument("fix"), nearest(name, dimensions))
    longest = longest_length(spec.config, spec.graphs)
    capacity = fixed.get(CAPACITY, min(longest, _LONGEST))
    sizes = dict.fromkeys(sorted(free), capacity) | {"batch": _ROWS, CAPACITY: capacity}
    sizes |= {"sequence": max(1, min(_CHUNK, capacity // _CHUNKS)), **fixed}
    declared = sizes_of(spec.graphs)
    for name, size in sizes.items():
        if name in ("batch", "sequence"):
            continue
        if name in declared and name not in fixed:
            sizes[name] = declared[name].nearest(size)
        elif not declared.get(name, Size()).allows(size):
            raise UsageError(f"{name} must be {declared[name]}", argument("fix", f"{name}={size}"))
        positions = standard_fields(spec.config).max_seq_len
        if positions is not None and size > positions:
            raise UsageError(f"the model has {positions} positions", argument("fix", f"{name}={size}"))
    if sizes["sequence"] >= capacity:
        problem = f"sequence {sizes['sequence']} must be below the capacity {capacity}"
        raise UsageError(problem, argument("fix"), "fix sequence at less, or capacity at more")
    return sizes
