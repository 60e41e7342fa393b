"""Scaled dot-product and multi-head attention (Vaswani et al. 2017, sections 3.2.1 and 3.2.2).

B batch, T queries, S keys, H heads, K key-value heads, D head size, E hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn.cache import LayerCache
from zoo.nn.positions import Rotation, apply_rotary
from zoo.nn.recording import AttentionScores, is_recording, record_attention, recorded_attentions
from zoo.nn.sink import add_sink, attend_to_sink

__all__ = ["MultiHeadAttention", "attention_weights", "scaled_dot_product_attention", "soft_cap"]


def soft_cap(x: Tensor, limit: float) -> Tensor:
    """Return limit tanh(x / limit), which lies within +-limit (Gemma Team 2024, Gemma 2, section 2)."""
    return torch.tanh(x / limit) * limit


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V (equation 1). Every scaled dot-product attention goes through this function.

    Inside :func:`recorded_attentions` it computes and records the weights; otherwise it calls torch's fused kernel,
    unless there is a ``softcap``, which that kernel lacks.

    Args:
        query: (B, H, T, D).
        key: (B, K, S, D); H is a multiple of K (grouped-query attention, Ainslie et al. 2023).
        value: (B, K, S, D'), where D' may differ from D.
        mask: boolean, (B or 1, 1 or H, T, S), True where a query may see a key. A query that sees no key gives 0.
        bias: real, (B or 1, 1 or H, T, S), added to the scaled scores; -inf hides a key.
        sink: (H,), the score of a key whose value is zero, see :func:`attend_to_sink`. Its weight is recorded before
            those of the keys, (B, H, T, 1 + S). None by default.
        scale: factor of the scores; 1 / sqrt(D) by default.
        softcap: limit of the scaled scores, see :func:`soft_cap`, before ``bias``; none by default.
        dropout: probability of dropping a weight.

    Returns:
        (B, H, T, D').
    """
    if sink is not None:
        if bias is not None:
            mask = bias if mask is None else bias.masked_fill(~mask, -math.inf)
        if not is_recording() and softcap is None and not dropout:
            return attend_to_sink(query, key, value, mask, sink, scale)
        key, value, bias = add_sink(query, key, value, mask, sink)
        mask = None
    grouped = query.shape[1] != key.shape[1]
    if is_recording() or softcap is not None:
        weights = attention_weights(query, key, mask=mask, bias=bias, scale=scale, softcap=softcap)
        record_attention(
            lambda: weights,
            lambda: _scores(weights, query, key, mask=mask, bias=bias, scale=scale, softcap=softcap),
        )
        dropped = F.dropout(weights, dropout) if dropout else weights
        return dropped @ value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, -math.inf)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped
    )


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the weights of :func:`scaled_dot_product_attention`, (B, H, T, S). Fully masked rows are 0."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)  # (B, H, T, S)
    if softcap is not None:
        scores = soft_cap(scores, softcap)
    if bias is not None:
        scores, seen = scores + bias, bias > -math.inf
        mask = seen if mask is None else mask & seen
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = torch.softmax(scores, dim=-1)
    return weights if mask is None else weights.masked_fill(~mask, 0.0)


def _scores(
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> AttentionScores:
    """Return weights with what :func:`attention_weights` computed them from."""
    if bias is not None:
        seen = bias > -math.inf
        mask = seen if mask is None else mask & seen
        bias = torch.where(mask, bias, 0.0)
    rows = weights.shape[0], -1, *weights.shape[2:]
    return AttentionScores(
        weights=weights,
        query=query,
        key=key,
        bias=None if bias is None else bias.expand(rows),
        seen=None if mask is None else mask.to(weights.dtype).expand(rows),
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
    )


class MultiHeadAttention(nn.Module):
    """Concat(head_1, ..., head_H) W^O, with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    Args:
        hidden_size: E, the width of the input.
        num_heads: H.
        num_kv_heads: K; H by default, fewer for grouped-query attention, 1 for multi-query attention.
        output_size: width of the output; E by default. Teaching implementations with separate ``d_in`` and ``d_out``
            are ``MultiHeadAttention(d_in, num_heads, output_size=d_out)``.
        head_dim: D, the paper's d_k; ``output_size`` / H by default.
        value_head_dim: the paper's d_v; D by default.
        memory_size: width of the sequence that keys and values are projected from, in cross-attention; E by default.
        bias: whether the query, key and value projections have biases: one boolean, or one for each of the three.
        output_bias: whether the output projection has a bias; by default, if the query projection has one.
        scale: factor of the scores; 1 / sqrt(D) by default.
        softcap: limit of the scaled scores, see :func:`soft_cap`; none by default.
        qk_norm: epsilon of an RMS norm over each query and key (Dehghani et al. 2023), or a function that builds the
            norm, given its width; none by default.
        joint_qk_norm: whether these norms are over all heads together rather than over each: H D and K D numbers.
        dropout: on the attention weights, in training only.
        output_gate: whether the heads are multiplied by sigmoid(x W^G) before the output projection (Qiu et al. 2025,
            Gated Attention for Large Language Models, section 2.2).
        sink: whether each head has a learned score of a key whose value is zero, see :func:`attend_to_sink`.

    Raises:
        ValueError: when ``output_size`` is not divisible by H and no ``head_dim`` is given, or H is not divisible by K.

    >>> attention = MultiHeadAttention(64, num_heads=4, num_kv_heads=2)
    >>> x = torch.randn(3, 7, 64)
    >>> attention(x).shape
    torch.Size([3, 7, 64])
    >>> output, weights = attention.with_weights(x)
    >>> weights.shape
    torch.Size([3, 4, 7, 7])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        output_size: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        memory_size: int | None = None,
        bias: bool | Sequence[bool] = True,
        output_bias: bool | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        qk_norm: float | Callable[[int], nn.Module] | None = None,
        joint_qk_norm: bool = False,
        dropout: float = 0.0,
        output_gate: bool = False,
        sink: bool = False,
    ) -> None:
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        width = output_size or hidden_size
        if head_dim is None:
            if width % num_heads:
                name = "output_size" if output_size else "hidden_size"
                raise ValueError(f"{name} {width} is not divisible by num_heads {num_heads}")
            head_dim = width // num_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads {num_heads} is not divisible by num_kv_heads {num_kv_heads}")
        value_head_dim = value_head_dim or head_dim
        memory_size = memory_size or hidden_size
        query_bias, key_bias, value_bias = (bias,) * 3 if isinstance(bias, bool) else bias
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.scale = scale
        self.softcap = softcap
        self.dropout = dropout
        self.query = nn.Linear(hidden_size, num_heads * head_dim, bias=query_bias)
        self.key = nn.Linear(memory_size, num_kv_heads * head_dim, bias=key_bias)
        self.value = nn.Linear(memory_size, num_kv_heads * value_head_dim, bias=value_bias)
        self.output = nn.Linear(
            num_heads * value_head_dim, width, bias=query_bias if output_bias is None else output_bias
        )
        if output_gate:
            self.gate = nn.Linear(hidden_size, num_heads * value_head_dim, bias=query_bias)
        self.has_gate = output_gate
        self.sink = nn.Parameter(torch.zeros(num_heads)) if sink else None
        if qk_norm is not None:
            build = qk_norm if callable(qk_norm) else partial(nn.RMSNorm, eps=qk_norm)
            queries, keys = (num_heads, num_kv_heads) if joint_qk_norm else (1, 1)
            self.query_norm, self.key_norm = build(queries * head_dim), build(keys * head_dim)
        self.has_norms = qk_norm is not None
        self.has_joint_norms = self.has_norms and joint_qk_norm

    def forward(
        self,
        x: Tensor,
        *,
        memory: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        rotation: Rotation | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend from ``x`` (B, T, E) to itself, or to ``memory``, the :meth:`keys_values` of another sequence.

        ``bias`` is added to the scores. ``rotation``, from :class:`RotaryPositions`, rotates queries and keys by their
        position. ``cache`` holds the keys and values of the tokens before ``x``, and those of ``x`` are appended to it;
        if it has a window, the columns of ``mask`` and ``bias`` for older tokens than it keeps are ignored.
        A ``memory`` needs no cache: project its keys and values once and pass them to every call. The result is
        (B, T, E), or of width ``output_size``.

        Raises ``ValueError`` when both ``memory`` and ``cache`` are given.
        """
        if memory is not None and cache is not None:
            raise ValueError("memory and cache exclude each other: a memory already holds all its keys and values")
        if cache is not None:
            mask, bias = cache.seen(mask, x.shape[1]), cache.seen(bias, x.shape[1])
        query, key, value = self._query_key_value(x, memory, rotation, cache)
        dropout = self.dropout if self.training else 0.0
        heads = scaled_dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            sink=self.sink,
            scale=self.scale,
            softcap=self.softcap,
            dropout=dropout,
        )
        if self.has_gate:
            heads = heads * self._split(self.gate(x).sigmoid(), self.num_heads)
        return self._merge(heads)

    def with_weights(
        self,
        x: Tensor,
        *,
        memory: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output of :meth:`forward` and its attention weights (B, H, T, S).

        With a sink they are (B, H, T, 1 + S): its weight is the first.
        """
        with recorded_attentions() as weights:
            output = self(x, memory=memory, mask=mask, bias=bias, rotation=rotation)
        return output, weights[0]

    def keys_values(self, memory: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Project ``memory`` (B, S, E or ``memory_size``) to keys and values, (B, K, S, D) each.

        ``positions``, of the shape of ``memory`` or broadcast to it, are added to the input of keys alone (Carion et
        al. 2020, section A.3).
        """
        key = self.key(memory if positions is None else memory + positions)
        key = self._split(self.key_norm(key) if self.has_joint_norms else key, self.num_kv_heads)
        if self.has_norms and not self.has_joint_norms:
            key = self.key_norm(key)
        return key, self._split(self.value(memory), self.num_kv_heads)

    def _query_key_value(
        self,
        x: Tensor,
        memory: tuple[Tensor, Tensor] | None,
        rotation: Rotation | None,
        cache: LayerCache | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query = self.query(x)
        query = self._split(self.query_norm(query) if self.has_joint_norms else query, self.num_heads)
        if self.has_norms and not self.has_joint_norms:
            query = self.query_norm(query)
        key, value = self.keys_values(x) if memory is None else memory
        if rotation is not None:
            query, key = apply_rotary(query, rotation), apply_rotary(key, rotation)
        if cache is not None:
            key, value = cache.extend(key, value)
        return query, key, value

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, T, H D) -> (B, H, T, D)

    def _merge(self, x: Tensor) -> Tensor:
        return self.output(x.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, H D) -> (B, T, output)
