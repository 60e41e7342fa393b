"""Positions that do not count padding, for decoders that number the columns of a batch.

B batch, T tokens, E width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["count_positions", "given_positions"]


def count_positions(model: nn.Module) -> None:
    """Let tables of positions look up those of :func:`given_positions`, if there are any.

    The tables are those of BART and its kin, which number the columns from the length of the past on, and of M2M-100
    and its kin, which number the tokens other than that of padding. Pegasus-X computes its rows in each call.
    """
    for module in model.modules():
        table: Any = module
        if "past_key_values_length" in (names := signature(table.forward).parameters):
            if isinstance(table, nn.Embedding) or hasattr(table, "weights"):
                table.given_positions = None
                table.register_forward_hook(_look_up)
            elif "inputs_embeds" in names and "position_ids" in names and not list(table.children()):
                table.given_positions = None
                table.register_forward_hook(_compute)


def _look_up(table: Any, _: Any, found: Tensor) -> Tensor:
    """Return the rows of the positions, (B, T, E)."""
    positions = table.given_positions  # (B, T)
    if positions is None:
        return found
    after_padding = hasattr(table, "create_position_ids_from_input_ids")  # as in M2M-100
    first = table.padding_idx + 1 if after_padding else getattr(table, "offset", 0)
    return F.embedding(positions + first, table.weight if isinstance(table, nn.Embedding) else table.weights)


def _compute(table: Any, args: tuple[Any, ...], found: Tensor) -> Tensor:
    """Return the waves of the positions, (B, T, E), which the class computes for those of one row."""
    positions, x = table.given_positions, args[0]  # (B, T), (B, T, E)
    if positions is None:
        return found
    waves: Tensor = table.forward(x.flatten(0, 1)[None], 0, positions.flatten()[:, None])  # (1, B T, E)
    return waves.view(x.shape)


@contextmanager
def given_positions(model: nn.Module, positions: Tensor | None) -> Iterator[None]:
    """Give positions, (B, T), to the tables of a decoder within a block; none if they are None."""
    tables: list[Any] = [module for module in model.modules() if hasattr(module, "given_positions")]
    for table in tables:
        table.given_positions = positions
    try:
        yield
    finally:
        for table in tables:
            table.given_positions = None
