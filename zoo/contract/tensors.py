"""Inputs and outputs of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from zoo.contract.dims import Dim, canonical, dim_size

__all__ = ["AttentionInputs", "TensorSpec", "attentions", "block_ids", "floats", "mask", "token_ids"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One input or output tensor of a graph."""

    name: str
    dims: tuple[Dim, ...]
    dtype: Literal["float", "float32", "int64", "int32", "int8", "bool"] = "float"
    """``float`` follows the model's own dtype. ``float32`` is at least that: a model in half precision reads float32,
    and the float64 model float64."""
    upper: int | None = None
    """Integers lie in ``[0, upper)``: a vocabulary size, a number of token types."""
    is_mask: bool = False
    """Whether this is a padding mask: 1 marks a token, 0 padding."""
    padding: Literal["both", "left", "right"] = "both"
    """For a mask: the side of a row on which padding leaves the results for the tokens unchanged."""
    is_blocks: bool = False
    """Whether these are the numbers of blocks of tokens: see :func:`block_ids`."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a malformed dimension."""
        object.__setattr__(self, "dims", tuple(map(canonical, self.dims)))

    @property
    def is_float(self) -> bool:
        """Whether the tensor has floating-point numbers."""
        return self.dtype in ("float", "float32")

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the concrete shape, given the size of each named dimension."""
        return tuple(dim_size(dim, sizes) for dim in self.dims)


def token_ids(name: str, upper: int, *, length: Dim = "sequence", rows: str = "batch") -> TensorSpec:
    """Declare integers in ``[0, upper)`` of shape (``rows``, ``length``)."""
    return TensorSpec(name=name, dims=(rows, length), dtype="int64", upper=upper)


def block_ids(name: str, upper: int = 2) -> TensorSpec:
    """Declare the number of each token's block, integers in ``[0, upper)`` of shape (batch, sequence), for a decoder.

    Tokens of a block, such as those of an image, see each other, later ones included. Tokens with the number 0 are in
    no block, and see earlier tokens alone. All tokens of a block are in one call, side by side. A layer with a window
    may limit how far they see.

    >>> block_ids("block_ids").shape({"batch": 2, "sequence": 7})
    (2, 7)
    """
    return TensorSpec(name=name, dims=("batch", "sequence"), dtype="int64", upper=upper, is_blocks=True)


def mask(
    name: str,
    *,
    length: str = "sequence",
    padding: Literal["both", "left", "right"] = "both",
    rows: str = "batch",
) -> TensorSpec:
    """Declare a padding mask of shape (``rows``, ``length``): 1 for a token, 0 for padding, on the side ``padding``.

    >>> mask("attention_mask").shape({"batch": 2, "sequence": 7})
    (2, 7)
    """
    return TensorSpec(name=name, dims=(rows, length), dtype="int64", upper=2, is_mask=True, padding=padding)


def floats(name: str, *dims: Dim) -> TensorSpec:
    """Declare a tensor of the model's dtype with the given dimensions."""
    return TensorSpec(name=name, dims=dims)


def attentions(
    num_layers: int,
    num_heads: int,
    *,
    queries: Dim = "sequence",
    keys: Dim = "sequence",
    name: str = "attentions",
    rows: str = "batch",
) -> tuple[TensorSpec, ...]:
    """Declare the attention weights of every layer: ``NAME.N``, (rows, heads, queries, keys).

    >>> attentions(12, 8)[3].name, attentions(12, 8)[3].dims
    ('attentions.3', ('batch', 8, 'sequence', 'sequence'))
    """
    return tuple(floats(f"{name}.{layer}", rows, num_heads, queries, keys) for layer in range(num_layers))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionInputs:
    """Outputs of a graph and constants from which the attention weights of one layer can be computed.

    The weights are softmax(scores) over the keys that a query sees, with scores = cap(scale query key^T) + bias.
    """

    weights: TensorSpec
    """(batch, heads, queries, keys)"""
    head_size: int
    num_kv_heads: int
    scale: float
    softcap: float | None = None
    """Limit of the scaled products, :func:`zoo.nn.soft_cap`; None for none."""
    bias_heads: int | None = None
    """The heads of ``NAME.bias``: all, or 1 if they share it; None if nothing is added."""
    seen_heads: int | None = None
    """The heads of ``NAME.seen``; None if every query sees all keys."""

    @property
    def query(self) -> TensorSpec:
        """``NAME.query``, (batch, heads, queries, head size), after norms and rotation."""
        rows, heads, queries, _ = self.weights.dims
        return floats(f"{self.weights.name}.query", rows, heads, queries, self.head_size)

    @property
    def key(self) -> TensorSpec:
        """``NAME.key``, (batch, key-value heads, keys, head size), after norms and rotation."""
        rows, _, _, keys = self.weights.dims
        return floats(f"{self.weights.name}.key", rows, self.num_kv_heads, keys, self.head_size)

    @property
    def bias(self) -> TensorSpec | None:
        """``NAME.bias``, (batch, bias heads, queries, keys), 0 where a key is hidden."""
        return self._like_weights("bias", self.bias_heads)

    @property
    def seen(self) -> TensorSpec | None:
        """``NAME.seen``, (batch, seen heads, queries, keys), 1 for a key that the query sees and 0 for a hidden one."""
        return self._like_weights("seen", self.seen_heads)

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the outputs, in the order of the exported signature."""
        return tuple(tensor for tensor in (self.query, self.key, self.bias, self.seen) if tensor is not None)

    def _like_weights(self, name: str, heads: int | None) -> TensorSpec | None:
        rows, _, queries, keys = self.weights.dims
        return None if heads is None else floats(f"{self.weights.name}.{name}", rows, heads, queries, keys)
