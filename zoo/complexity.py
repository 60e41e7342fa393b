"""The kinds of layers that map a text to as many vectors, compared as by Vaswani et al. (2017), section 4.

A text has n tokens, each a vector of d channels. FLOPs are those of :mod:`zoo.cost`: they include the projections of
attention and the gates of an LSTM, which table 1 of the paper leaves out.

>>> kinds = {kind.name: kind for kind in layer_kinds(512)}
>>> kinds["self-attention"].operations, kinds["self-attention"].flops(64)
('n^2 d', 142606336)
>>> kinds["convolution"].path(1000)
7
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zoo import cost

__all__ = ["LayerKind", "layer_kinds"]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One kind of layer, as a row of table 1 and in numbers."""

    name: str
    """``self-attention``, ``recurrent`` (an LSTM), ``convolution``, ``separable`` (a convolution of each channel by
    itself, then a dense layer) or ``restricted`` (self-attention to the nearest tokens)."""
    operations: str
    """Operations per text, up to a constant factor, as in table 1."""
    sequential_order: str
    """Operations that must wait for each other, likewise."""
    path_order: str
    """Longest path between two tokens, likewise."""
    flops: Callable[[int], int]
    """The forward FLOPs of one layer of zoo, for a text of n tokens."""
    sequential: Callable[[int], int]
    """The number of steps of one layer that must wait for each other, for n tokens."""
    path: Callable[[int], int]
    """The number of layers, or of a recurrent layer's steps, that the first of n tokens passes to reach the last."""


def layer_kinds(hidden_size: int, *, kernel_size: int = 3, neighbours: int = 128) -> tuple[LayerKind, ...]:
    """Return the kinds of layers.

    Args:
        hidden_size: d.
        kernel_size: k, the number of tokens that a convolution reads for each vector. Layers are dilated: each reads
            tokens k times as far apart as the one before it.
        neighbours: r, the number of tokens that a token attends to in restricted attention, itself included.

    Raises:
        ValueError: a size is not positive, or ``kernel_size`` or ``neighbours`` is 1, where no token reads another.
    """
    if hidden_size < 1:
        raise ValueError(f"hidden_size must be positive, got {hidden_size}")
    for name, size in (("kernel_size", kernel_size), ("neighbours", neighbours)):
        if size < 2:
            raise ValueError(f"{name} must be 2 or more, got {size}")

    def attend(length: int, context: int) -> int:
        return length * cost.attention(hidden_size, 1, head_dim=hidden_size, context=context).flops

    convolution = cost.convolution(hidden_size, hidden_size, kernel_size).flops
    depthwise = cost.convolution(hidden_size, hidden_size, kernel_size, groups=hidden_size).flops
    separable = depthwise + cost.linear(hidden_size, hidden_size).flops
    recurrent = cost.recurrent(hidden_size, hidden_size, gates=4).flops

    def dilated(length: int) -> int:
        layers, reached = 1, kernel_size
        while reached < length:
            layers, reached = layers + 1, reached * kernel_size
        return layers

    return (
        LayerKind("self-attention", "n^2 d", "1", "1", lambda n: attend(n, n), _one, _one),
        LayerKind("recurrent", "n d^2", "n", "n", lambda n: n * recurrent, _each, _each),
        LayerKind("convolution", "k n d^2", "1", "log_k n", lambda n: n * convolution, _one, dilated),
        LayerKind("separable", "k n d + n d^2", "1", "log_k n", lambda n: n * separable, _one, dilated),
        LayerKind(
            "restricted", "r n d", "1", "n / r", lambda n: attend(n, min(n, neighbours)), _one,
            lambda n: max(1, -(-(n - 1) // (neighbours - 1))),
        ),
    )  # fmt: skip


def _one(length: int) -> int:
    return 1


def _each(length: int) -> int:
    return length
