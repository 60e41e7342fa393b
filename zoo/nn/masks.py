"""Masks and positions, built once per forward pass and shared by all layers."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

__all__ = ["build_mask", "positions_of"]


def build_mask(
    query_length: int,
    key_length: int,
    *,
    padding: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    distance: int | None = None,
    device: torch.device | None = None,
) -> Tensor | None:
    """Build a boolean attention mask, (B or 1, 1, T, S), True where a query may see a key; None if nothing is masked.

    Args:
        query_length: T.
        key_length: S; the queries are the last T of the S positions.
        padding: (B, S), non-zero for a token, zero for padding.
        causal: whether to hide later keys from each query.
        window: with ``causal``, the largest number of keys that a query sees: its own and those just before it.
        distance: the largest distance of a key from its query, on either side.
        device: where to build the mask when there is no ``padding``.

    Raises:
        ValueError: ``padding`` is not of length S.

    The mask has its full (T, S) extent even where a broadcast would do, because ONNX Attention-23 requires it.

    >>> build_mask(2, 4, causal=True)  # two new tokens after two cached ones
    tensor([[[[ True,  True,  True, False],
              [ True,  True,  True,  True]]]])
    >>> build_mask(3, 3, distance=1)
    tensor([[[[ True,  True, False],
              [ True,  True,  True],
              [False,  True,  True]]]])
    >>> build_mask(1, 3, padding=torch.tensor([[0, 1, 1]]))
    tensor([[[[False,  True,  True]]]])
    """
    _check_length(padding, key_length)
    mask = None
    if causal or distance is not None:
        device = padding.device if padding is not None else device
        key_positions = torch.arange(key_length, device=device)
        query_positions = torch.arange(key_length - query_length, key_length, device=device)
        seen = []  # (T, S) each
        if causal:
            seen.append(key_positions <= query_positions.unsqueeze(1))
            if window is not None:
                seen.append(key_positions > query_positions.unsqueeze(1) - window)
        if distance is not None:
            seen.append((key_positions - query_positions.unsqueeze(1)).abs() <= distance)
        mask = reduce(torch.logical_and, seen).unsqueeze(0).unsqueeze(0)  # (1, 1, T, S)
    if padding is not None:
        tokens = padding.bool().unsqueeze(1).unsqueeze(1)  # (B, 1, 1, S)
        mask = tokens.expand(-1, -1, query_length, -1) if mask is None else mask & tokens
    return mask


def positions_of(
    query_length: int, key_length: int, *, padding: Tensor | None = None, device: torch.device | None = None
) -> Tensor:
    """Return the positions of the last T of S tokens: (B or 1, T). Padding on either side is not counted.

    Raises ``ValueError`` unless ``padding`` is of length S.

    >>> positions_of(2, 4)
    tensor([[2, 3]])
    >>> positions_of(4, 4, padding=torch.tensor([[0, 0, 1, 1]]))
    tensor([[0, 0, 0, 1]])
    """
    _check_length(padding, key_length)
    if padding is None:
        return torch.arange(key_length - query_length, key_length, device=device).unsqueeze(0)
    return (padding.cumsum(-1) - 1).clamp(min=0)[:, key_length - query_length :]


def _check_length(padding: Tensor | None, key_length: int) -> None:
    """Reject a mask of another length, which could broadcast. Skipped while tracing, where it would add a guard."""
    if padding is not None and not torch.compiler.is_compiling() and padding.shape[1] != key_length:
        lengths = f"the padding mask has length {padding.shape[1]}, but there are {key_length} past and new tokens"
        raise ValueError(f"{lengths}: give a mask that covers all of them")
