"""Store queries, keys and biases on the attention page, in a number format that fits.

H heads, K key-value heads, T queries, S keys, D head size.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from zoo.arrays import Array
from zoo.figures.attention import AttentionMap, AttentionVectors

__all__ = ["FORMATS", "Format", "pack_numbers", "store_vectors"]

Kind = Literal["float32", "int16", "int8"]


@dataclass(frozen=True)
class Format:
    """How numbers are stored."""

    vectors: Kind
    """Queries and keys."""
    bias: Kind
    """Biases. Those of relative positions repeat, so that float32 compresses well."""


FORMATS = (Format("int16", "float32"), Format("int16", "int16"), Format("int8", "int16"))
"""From the finest on."""
_LARGEST = {"int16": 32767, "int8": 127}


def pack_numbers(values: Array, kind: Kind | Literal["bits"]) -> tuple[bytes, Array]:
    """Return numbers (N, rows, columns) as bytes, and in float64 as the page reads them.

    Integers are relative to the largest absolute value of their row: the scales of all rows, in float32, come first.
    """
    if kind == "bits":
        return values.astype(np.uint8).tobytes(), values.astype(np.float64)
    if kind == "float32":
        exact = values.astype("<f4")
        return exact.tobytes(), exact.astype(np.float64)
    largest = _LARGEST[kind]
    scales = (np.abs(values).max(-1, keepdims=True, initial=0) / largest).astype("<f4")
    steps = np.divide(values, scales, out=np.zeros(values.shape), where=scales > 0, dtype=np.float64)
    integers = np.rint(steps).clip(-largest, largest).astype("<i2" if kind == "int16" else "i1")
    return scales.tobytes() + integers.tobytes(), integers * scales.astype(np.float64)


def store_vectors(
    maps: Sequence[AttentionMap], form: Format, add_block: Callable[[str], int]
) -> list[dict[str, Any] | None]:
    """Store what the weights of each map are computed from; return the facts about it, None for a map without.

    ``add_block`` is called with base64, and returns the number of the block. A map whose numbers are those of an
    earlier one, as biases of relative positions are, has the same block.
    """
    blocks: dict[bytes, int] = {}

    def stored(values: Array, kind: Kind | Literal["bits"]) -> tuple[dict[str, Any], Array]:
        data, read = pack_numbers(values, kind)
        if data not in blocks:
            blocks[data] = add_block(base64.b64encode(zlib.compress(data, 6)).decode())
        error = float(np.abs(read - values).max(initial=0))
        return {"block": blocks[data], "kind": kind, "heads": len(values), "error": error}, read

    def facts(item: AttentionMap, vectors: AttentionVectors) -> dict[str, Any]:
        queries, read_queries = stored(vectors.queries, form.vectors)
        keys, read_keys = stored(vectors.keys, form.vectors)
        bias, read_bias = (None, None) if vectors.bias is None else stored(vectors.bias, form.bias)
        seen = None if vectors.seen is None else stored(vectors.seen, "bits")[0]
        read = replace(vectors, queries=read_queries, keys=read_keys, bias=read_bias)
        return {
            "size": vectors.queries.shape[-1],
            "scale": vectors.scale,
            "softcap": vectors.softcap,
            "key_heads": list(vectors.key_heads),
            "queries": queries,
            "keys": keys,
            "bias": bias,
            "seen": seen,
            "error": max(part["error"] for part in (queries, keys, bias) if part is not None),
            "weight_error": float(np.abs(read.weights() - item.weights).max(initial=0)),
        }

    return [None if item.vectors is None else facts(item, item.vectors) for item in maps]
