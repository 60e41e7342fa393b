"""Attention over a span with persistent memory, computed in scalar loops from the papers' equations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["Array", "layer_norm", "share", "span_attention"]

Array = np.ndarray[Any, Any]


def share(distance: int, z: float, ramp: int) -> float:
    """Compute m_z(x) of Sukhbaatar et al. 2019a, section 2.2."""
    return min(max((ramp + z - distance) / ramp, 0.0), 1.0)


def span_attention(
    x: Array, weights: Mapping[str, Array], positions: Array, padding: list[int], heads: int, ramp: int | None
) -> Array:
    """Compute one row (T, E), per head, query and key; ``weights`` are named as in the module."""
    length, width = x.shape
    size, span = width // heads, len(positions)
    query, key, value = (x @ weights[f"{name}.weight"].T for name in ("query", "key", "value"))
    places = [sum(padding[:t]) for t in range(length)]
    joined = np.zeros_like(x)
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        for t in range(length):
            terms = []
            for s in range(t + 1):
                distance = places[t] - places[s]
                if not padding[s] or distance >= span:
                    continue
                scale = 1.0
                if ramp is not None:
                    z = min(max(float(weights["adaptive.length"][h]), 0.0), span)
                    scale = share(distance, z, ramp)
                score = query[t, part] @ (key[s, part] + positions[distance]) / math.sqrt(size)
                terms.append((scale * math.exp(score), value[s, part]))
            for n in range(weights["memory_key"].shape[1] if "memory_key" in weights else 0):
                score = query[t, part] @ weights["memory_key"][h, n] / math.sqrt(size)
                terms.append((math.exp(score), weights["memory_value"][h, n]))
            total = sum(term for term, _ in terms)
            if total:
                joined[t, part] = sum(term / total * v for term, v in terms)
    return joined @ weights["output.weight"].T


def layer_norm(x: Array, weights: Mapping[str, Array], name: str, eps: float) -> Array:
    """LayerNorm over the last dimension."""
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return scaled * weights[f"{name}.norm.weight"] + weights[f"{name}.norm.bias"]
