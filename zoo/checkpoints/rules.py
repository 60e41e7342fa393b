"""Rules that pair tensors of zoo with those of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Rule", "TensorPlace", "paired_rows"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One or several tensors of zoo, and the tensor of the checkpoint that holds them.

    A name may be a prefix that ends at a dot: ``Rule("blocks.*.norm_1", "h.*.ln_1")`` matches weight and bias. ``*``
    stands for a number, the same on both sides.
    """

    ours: str | tuple[str, ...]
    """Several tensors, such as query, key and value, are concatenated along the first axis in the checkpoint."""
    theirs: str
    """In the full name of a tensor, ``#`` stands for the number of a part: the checkpoint holds one tensor for each
    index of the first axis of ours, as of the weights of experts (``zoo.checkpoints.stacks``)."""
    transposed: bool = False
    """Whether matrices in the checkpoint are (inputs, outputs)."""
    leading_axes: int = 0
    """Number of additional leading axes of size 1 in the checkpoint."""
    interleaved: int = 1
    """Number of parts, such as heads, into which each of several tensors is divided along the first axis; the first
    parts of all precede the second parts of all in the checkpoint."""
    row_order: tuple[int, ...] = ()
    """The number of the checkpoint's row for each row of zoo's tensors, joined; empty if the order is the same."""

    def to_ours(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Convert a tensor of the checkpoint to zoo's tensors, whose first axes have these sizes."""
        for _ in range(self.leading_axes):
            tensor = tensor.squeeze(0)
        if self.transposed and tensor.ndim == 2:
            tensor = tensor.T
        return self.split(tensor, sizes)

    def split(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Split the rows of a tensor of the checkpoint into those of zoo's tensors, of these numbers."""
        if self.row_order:
            tensor = tensor[torch.tensor(self.row_order)]
        if len(sizes) == 1:
            return [tensor]
        if self.interleaved == 1:
            return list(tensor.split(list(sizes)))
        parts = tensor.unflatten(0, (self.interleaved, -1)).split([size // self.interleaved for size in sizes], 1)
        return [part.flatten(0, 1) for part in parts]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Invert :meth:`split`."""
        if len(tensors) == 1:
            tensor = tensors[0]
        elif self.interleaved == 1:
            tensor = torch.cat(list(tensors))
        else:
            tensor = torch.cat([part.unflatten(0, (self.interleaved, -1)) for part in tensors], 1).flatten(0, 1)
        return tensor[torch.tensor(self.row_order).argsort()] if self.row_order else tensor

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of the checkpoint's tensor, given those of zoo's."""
        shape = shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return (1,) * self.leading_axes + (shape[::-1] if self.transposed and len(shape) == 2 else shape)

    def to_theirs(self, tensors: Sequence[Tensor]) -> Tensor:
        """Invert :meth:`to_ours`."""
        tensor = self.join(tensors)
        if self.transposed and tensor.ndim == 2:
            tensor = tensor.T
        for _ in range(self.leading_axes):
            tensor = tensor.unsqueeze(0)
        return tensor


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of one of zoo's tensors in a checkpoint."""

    name: str
    """The name of the checkpoint's tensor."""
    group: tuple[str, ...]
    """All of zoo's tensors that it holds."""
    rule: Rule


def paired_rows(num_heads: int, head_dim: int, rotary_dim: int) -> tuple[int, ...]:
    """Return the ``row_order`` of queries or keys whose rotated pairs are the elements 2 i and 2 i + 1 of a head.

    In zoo they are i and i + ``rotary_dim`` / 2, as in Llama. A dot product does not depend on their order.
    """
    head = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, head_dim)]
    return tuple(start + element for start in range(0, num_heads * head_dim, head_dim) for element in head)
