"""Attention weights on request: what computes them says so here, and nothing does it unless somebody asks.

B batch, T queries, S keys, H heads, D' size of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor

__all__ = [
    "cropped_attentions",
    "is_recording",
    "mix_values",
    "record_attention",
    "recorded_attentions",
    "unrecorded_attentions",
]

_RECORD: ContextVar[list[Tensor] | None] = ContextVar("record", default=None)


@contextmanager
def recorded_attentions() -> Iterator[list[Tensor]]:
    """Collect the attention weights that are computed in this block, (B, H, T, S) each, in their order.

    Attention then takes the way that has weights, which is the same function and costs their memory. What
    ``torch.compile`` made is as it was compiled: call the module itself.

    >>> from zoo.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(64, num_heads=4)
    >>> with recorded_attentions() as weights:
    ...     _ = attention(torch.randn(3, 7, 64))
    >>> [tuple(item.shape) for item in weights]
    [(3, 4, 7, 7)]
    """
    with _recording_to([]) as weights:
        yield weights


def is_recording() -> bool:
    """Whether somebody collects attention weights."""
    return _record() is not None


def record_attention(weights: Callable[[], Tensor]) -> None:
    """Where weights are collected, collect what this function returns, (B, H, T, S); else it is not called."""
    record = _record()
    if record is not None:
        with unrecorded_attentions():
            record.append(weights())


def mix_values(mix: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """``mix(*values)``, for attention that computes no weights of single keys: chunks, features, hashes.

    Args:
        mix: values, (B, H, S, D') each, to outputs (B, H, T, D'). It must be linear in them, as all attention is: what
            it makes of the identity are then its weights. What is recorded within is left out.
        values: (B, H, S, D') each, of which keys have one or the other.
    """
    if not is_recording():
        return mix(*values)
    batch, heads, length, _ = values[0].shape
    identity = torch.eye(length, dtype=values[0].dtype, device=values[0].device).expand(batch, heads, -1, -1)
    record_attention(lambda: mix(*(identity for _ in values)))
    with unrecorded_attentions():
        return mix(*values)


@contextmanager
def unrecorded_attentions() -> Iterator[None]:
    """Collect nothing of what is computed in this block, by the way that has weights all the same."""
    with nullcontext() if _record() is None else _recording_to([]):
        yield


@contextmanager
def cropped_attentions(length: int) -> Iterator[None]:
    """Cut what is recorded in this block to the first ``length`` queries and keys, without a model's own padding."""
    record = _record()
    if record is None:
        yield
        return
    with _recording_to([]) as padded:
        yield
    record += [weights[:, :, :length, :length] for weights in padded]


def _record() -> list[Tensor] | None:
    """Where weights go now. What a compiler traces does not tell, and would have to be traced again for each answer."""
    return None if torch.compiler.is_dynamo_compiling() else _RECORD.get()


@contextmanager
def _recording_to(record: list[Tensor]) -> Iterator[list[Tensor]]:
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)
