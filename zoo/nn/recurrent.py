"""Recurrent layers over padded batches, and loops over steps.

B batch, T steps, I input size, E hidden size, L layers times directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import handle_torch_function, has_torch_function

__all__ = ["RecurrentState", "run_packed", "run_padded", "scan_steps"]

RecurrentState = Tensor | tuple[Tensor, Tensor]
"""The last states: (L, B, E) for ``nn.GRU``; a pair of hidden and cell states, (L, B, E) each, for ``nn.LSTM``."""
S = TypeVar("S", bound=Tensor | tuple[Tensor, ...])


def run_padded(layer: nn.RNNBase, x: Tensor, padding: Tensor | None) -> tuple[Tensor, RecurrentState]:
    """Run a layer over each row's tokens, skipping padding.

    Padding may be anywhere. The forward direction starts at a row's first token and the backward direction at its last
    one; last states are those after the last token read.

    Args:
        layer: an ``nn.GRU`` or ``nn.LSTM`` with ``batch_first``.
        x: (B, T, I).
        padding: (B, T), non-zero for a token, zero for padding; None if there is no padding.

    Returns:
        The outputs of all steps, (B, T, directions x E), 0 at padding; and the last states, 0 for rows without tokens.
    """
    if padding is None:
        steps, last = layer(x)
        return steps, last
    tokens = padding.bool()
    counts = tokens.sum(1)  # (B,)
    before = tokens.cumsum(1) - 1
    behind = counts.unsqueeze(1) + (~tokens).cumsum(1) - 1
    slots = torch.where(tokens, before, behind)  # (B, T), the new place of each step: tokens first, then padding
    places = torch.arange(x.shape[1], device=x.device).expand_as(slots)
    places = torch.zeros_like(slots).scatter(1, slots, places)  # the inverse permutation
    rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    steps, last = run_packed(layer, x[rows, places], counts.clamp(min=1))
    steps = steps[rows, slots].masked_fill(~tokens.unsqueeze(-1), 0.0)
    empty = (counts == 0).view(1, -1, 1)
    if isinstance(last, tuple):
        return steps, (last[0].masked_fill(empty, 0.0), last[1].masked_fill(empty, 0.0))
    return steps, last.masked_fill(empty, 0.0)


def run_packed(layer: nn.RNNBase, x: Tensor, lengths: Tensor) -> tuple[Tensor, RecurrentState]:
    """Run a layer over the first ``lengths`` steps of each row, as a packed sequence.

    Packed sequences cannot be traced: exporters replace this function by an operator that takes lengths.

    Args:
        layer: an ``nn.GRU`` or ``nn.LSTM`` with ``batch_first``.
        x: (B, T, I).
        lengths: (B,), from 1 to T.

    Returns:
        The outputs of all steps, (B, T, directions x E), 0 from ``lengths`` on; and the last states.
    """
    if has_torch_function((x, lengths)):
        result: tuple[Tensor, RecurrentState] = handle_torch_function(run_packed, (x, lengths), layer, x, lengths)
        return result
    if x.is_meta:  # packing needs the values of the lengths; on meta tensors only shapes matter
        every, last = layer(x)
        return every, last
    packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    steps, last = layer(packed)
    return pad_packed_sequence(steps, batch_first=True, total_length=x.shape[1])[0], last


def scan_steps(step: Callable[[S, Tensor], tuple[S, Tensor]], state: S, x: Tensor) -> tuple[S, Tensor]:
    """Call ``step`` with the state and x[:, t] for each t; return the last state and the stacked results, (B, T, ...).

    A Python loop, except during export, where a ``scan`` operator keeps the graph independent of T.
    """
    if torch.compiler.is_exporting():

        def copying(before: S, part: Tensor) -> tuple[S, Tensor]:
            after, result = step(before, part)
            return _copy(after), _copy(result)

        # Along axis 0: for others, torch < 2.13 traces the results with wrong shapes.
        last, steps = scan(copying, _copy(state), x.movedim(1, 0))
        return last, steps.movedim(0, 1)
    results = []
    for part in x.unbind(1):
        state, result = step(state, part)
        results.append(result)
    return state, torch.stack(results, 1)


def _copy(value: Any) -> Any:
    """Copy a tensor or a tuple of tensors: ``scan`` accepts neither views nor two states of different strides."""
    if isinstance(value, tuple):
        return tuple(map(_copy, value))
    return value.clone(memory_format=torch.contiguous_format)
