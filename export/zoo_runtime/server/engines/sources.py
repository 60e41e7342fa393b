"""A cache for what encoders have computed of inputs that come again, such as one text with several answers."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping

import numpy as np

from zoo.arrays import Array

__all__ = ["SourceCache"]


class SourceCache:
    """Encoded inputs, of which the least recently used make room for new ones.

    An encoder reads one input per call, so what it computes depends on that input alone: answers are the same, to the
    bit, as if each had been encoded anew.

    Args:
        limit: memory for the arrays, in bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        """Bytes of the arrays."""
        self.reused = 0
        """Number of inputs that were not encoded, because an equal one had been."""
        self._encoded: OrderedDict[bytes, Mapping[str, Array]] = OrderedDict()
        """By the digest of the input; the least recently used is first."""

    def encode(self, source: Mapping[str, Array], encoder: Callable[[], Mapping[str, Array]]) -> Mapping[str, Array]:
        """Return what ``encoder`` computes of an input, from the cache if it has read an equal one.

        The arrays are those of the cache, and must not be written to.
        """
        key = _digest(source)
        if (known := self._encoded.get(key)) is not None:
            self._encoded.move_to_end(key)
            self.reused += 1
            return known
        encoded = {name: array.copy() for name, array in encoder().items()}
        if (size := _bytes(encoded)) <= self.limit:
            self._encoded[key] = encoded
            self.used += size
            while self.used > self.limit:
                self.used -= _bytes(self._encoded.popitem(last=False)[1])
        return encoded


def _bytes(arrays: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in arrays.values())


def _digest(arrays: Mapping[str, Array]) -> bytes:
    """Return a digest of arrays with their names, dtypes and shapes."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()
