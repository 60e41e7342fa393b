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

    The tables are those of BART and its kin, which number the columns from the length of the past on.
    """
    tables: list[Any] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    for table in tables:
        if "past_key_values_length" in signature(table.forward).parameters:
            table.given_positions = None
            table.register_forward_hook(_look_up)


def _look_up(module: Any, _: Any, found: Tensor) -> Tensor:
    positions = module.given_positions  # (B, T)
    return found if positions is None else F.embedding(positions + getattr(module, "offset", 0), module.weight)


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
