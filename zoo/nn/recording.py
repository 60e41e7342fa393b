"""Recording of attention weights. Layers compute and report them only while a caller is recording.

B batch, T queries, S keys, H heads, K key-value heads, D head size, D' size of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = [
    "AttentionScores",
    "cropped_attentions",
    "is_recording",
    "mix_values",
    "record_attention",
    "recorded_attentions",
    "recorded_scores",
    "unrecorded_attentions",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionScores:
    """Attention weights and, for scaled dot-product attention, what they are computed from.

    The weights are softmax(scores) over the keys that a query sees, with scores = cap(scale query key^T) + bias.
    """

    weights: Tensor
    """(B, H, T, S)"""
    query: Tensor | None = None
    """(B, H, T, D), after norms and rotation; None for attention of another kind."""
    key: Tensor | None = None
    """(B, K, S, D), after norms and rotation; H is a multiple of K."""
    bias: Tensor | None = None
    """(B, 1 or H, T, S), 0 where a key is hidden; None if nothing is added."""
    seen: Tensor | None = None
    """(B, 1 or H, T, S), 1 for a key that the query sees and 0 for a hidden one; None if all are seen."""
    scale: float = 1.0
    softcap: float | None = None
    """Limit of the scaled products, :func:`zoo.nn.soft_cap`; None for none."""

    def cropped(self, length: int) -> AttentionScores:
        """Return the scores of the first ``length`` queries and keys."""
        return replace(
            self,
            weights=self.weights[:, :, :length, :length],
            query=None if self.query is None else self.query[:, :, :length],
            key=None if self.key is None else self.key[:, :, :length],
            bias=None if self.bias is None else self.bias[:, :, :length, :length],
            seen=None if self.seen is None else self.seen[:, :, :length, :length],
        )


@dataclass
class _Record:
    """What one block of code records."""

    weights: list[Tensor]
    scores: list[AttentionScores] | None = None
    """As many as weights; None if nobody asks for them."""

    def like(self) -> _Record:
        """Return an empty record of the same kind."""
        return _Record([], None if self.scores is None else [])


_RECORD: ContextVar[_Record | None] = ContextVar("record", default=None)


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
    with _recording_to(_Record([])) as record:
        yield record.weights


@contextmanager
def recorded_scores() -> Iterator[list[AttentionScores]]:
    """Collect the attention weights of :func:`recorded_attentions` with their queries, keys and biases.

    >>> from zoo.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(64, num_heads=4, num_kv_heads=2)
    >>> with recorded_scores() as scores:
    ...     _ = attention(torch.randn(3, 7, 64))
    >>> tuple(scores[0].query.shape), tuple(scores[0].key.shape), scores[0].scale
    ((3, 4, 7, 16), (3, 2, 7, 16), 0.25)
    """
    scores: list[AttentionScores] = []
    with _recording_to(_Record([], scores)):
        yield scores


def is_recording() -> bool:
    """Whether attention weights are being recorded."""
    return _record() is not None


def record_attention(weights: Callable[[], Tensor], scores: Callable[[], AttentionScores] | None = None) -> None:
    """Record the result of ``weights``, (B, H, T, S). Outside a recording it is not called.

    ``scores``, for dot products alone, returns the same weights with what they are computed from. It is called
    inside :func:`recorded_scores` only.
    """
    record = _record()
    if record is None:
        return
    with unrecorded_attentions():
        if record.scores is None:
            record.weights.append(weights())
        else:
            record.scores.append(AttentionScores(weights=weights()) if scores is None else scores())
            record.weights.append(record.scores[-1].weights)


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
    record = _record()
    with nullcontext() if record is None else _recording_to(record.like()):
        yield


@contextmanager
def cropped_attentions(length: int) -> Iterator[None]:
    """Crop weights recorded in this block to the first ``length`` queries and keys, dropping a model's own padding."""
    record = _record()
    if record is None:
        yield
        return
    with _recording_to(record.like()) as padded:
        yield
    record.weights += [weights[:, :, :length, :length] for weights in padded.weights]
    if record.scores is not None:
        record.scores += [scores.cropped(length) for scores in padded.scores or ()]


def _record() -> _Record | None:
    """Return the active recording. None while dynamo traces, to avoid recompilation."""
    return None if torch.compiler.is_dynamo_compiling() else _RECORD.get()


@contextmanager
def _recording_to(record: _Record) -> Iterator[_Record]:
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)
