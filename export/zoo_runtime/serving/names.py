"""Names of the profile ``serving``, see :mod:`zoo_export.graph.serving`."""

from __future__ import annotations

__all__ = ["CAPACITY", "NEW_LENGTHS", "PAST_LENGTHS", "SIZES_KEY"]

CAPACITY = "capacity"
"""The number of slots of a row's caches."""
PAST_LENGTHS = "past_lengths"
"""Graph input, int64 (B,): the number of tokens that a row's caches hold."""
NEW_LENGTHS = "new_lengths"
"""Graph input, int64 (B,): the number of tokens that a call adds to a row."""
SIZES_KEY = "zoo.serving"
"""Graph metadata: the sizes of dimensions, by name, as JSON."""
