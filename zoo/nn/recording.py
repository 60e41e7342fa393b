"""Recording of attention weights. Layers compute and report them only while a caller is recording.

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
    """Collect the attention weights computed in this block, (B, H, T, S) each, in order of computation.

    Inside, attention materialises its weights: the same function, at the memory cost of the weights. A module
    compiled by ``torch.compile`` is not recorded; call the original module.

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
    """Whether attention weights are being recorded."""
    return _record() is not None


def record_attention(weights: Callable[[], Tensor]) -> None:
    """Record the result of ``weights``, (B, H, T, S). Outside a recording it is not called."""
    record = _record()
    if record is not None:
        with unrecorded_attentions():
            record.append(weights())


def mix_values(mix: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """Return ``mix(*values)``, recording its weights; for attention that never computes a full matrix of weights.

    Args:
        mix: maps values, (B, H, S, D') each, to outputs (B, H, T, D'). It must be linear in the values, as attention
            is: applied to the identity matrix, it yields the weights. Recordings inside ``mix`` are discarded.
        values: (B, H, S, D') each. Several are alternative values of the same keys, used by different queries.
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
    """Discard the weights recorded in this block. Attention still materialises them if a recording is active."""
    with nullcontext() if _record() is None else _recording_to([]):
        yield


@contextmanager
def cropped_attentions(length: int) -> Iterator[None]:
    """Crop weights recorded in this block to the first ``length`` queries and keys, dropping a model's own padding."""
    record = _record()
    if record is None:
        yield
        return
    with _recording_to([]) as padded:
        yield
    record += [weights[:, :, :length, :length] for weights in padded]


def _record() -> list[Tensor] | None:
    """Return the active recording. None while dynamo traces, to avoid recompilation."""
    return None if torch.compiler.is_dynamo_compiling() else _RECORD.get()


@contextmanager
def _recording_to(record: list[Tensor]) -> Iterator[list[Tensor]]:
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)
