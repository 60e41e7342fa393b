"""Attention sinks: learned scores that take part in the softmax of attention and add no value.

B batch, T queries, S keys, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

__all__ = ["add_sink", "attend_to_sink"]


def attend_to_sink(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sink: Tensor, scale: float | None = None
) -> Tensor:
    """Scaled dot-product attention in which each head may attend to nothing (OpenAI 2025, gpt-oss, section 2.2).

    With the scores s_j of the keys that a query sees, and the score z of its head's sink, the weights are
    e^s_j / (e^z + sum_k e^s_k), which add up to less than 1: the rest is the weight of the sink. Xiao et al. 2023,
    Efficient Streaming Language Models with Attention Sinks, explain why heads need one; z = 0 is their equation 2.

    The result is that of a further key whose value is zero, which is how it is computed here. Exporters replace this
    function by one operator, since such a key would have to be joined with the keys of the cache in every call.

    Args:
        query: (B, H, T, D).
        key: (B, K, S, D); H is a multiple of K.
        value: (B, K, S, D').
        mask: (B or 1, 1 or H, T, S), boolean, True where a query may see a key, or real, added to the scaled scores. A
            query that sees no key gives 0.
        sink: (H,).
        scale: factor of the scores of keys; 1 / sqrt(D) by default.

    Returns:
        (B, H, T, D').

    >>> query, key, value = torch.randn(3, 1, 2, 5, 8)
    >>> plain = F.scaled_dot_product_attention(query, key, value)
    >>> torch.allclose(attend_to_sink(query, key, value, None, torch.full((2,), -100.0)), plain, atol=1e-6)
    True
    """
    tensors = (query, key, value, sink)
    if has_torch_function(tensors):
        result: Tensor = handle_torch_function(attend_to_sink, tensors, query, key, value, mask, sink, scale)
        return result
    grouped = query.shape[1] != key.shape[1]
    key, value, bias = add_sink(query, key, value, mask, sink)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=grouped)


def add_sink(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sink: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values with those of the sink before them, which are zero, and the bias on the scores.

    The arguments are those of :func:`attend_to_sink`. Keys and values become (B, K, 1 + S, D), and the bias
    (B, H, T, 1 + S).
    """
    batch, heads, length, _ = query.shape
    if mask is None:
        mask = query.new_zeros(())
    elif mask.dtype == torch.bool:
        mask = query.new_zeros(()).masked_fill(~mask, -math.inf)
    scores = sink.to(query.dtype).view(1, -1, 1, 1).expand(batch, -1, length, -1)  # (B, H, T, 1)
    bias = torch.cat((scores, mask.expand(batch, heads, length, key.shape[2])), dim=-1)  # (B, H, T, 1 + S)
    return F.pad(key, (0, 0, 1, 0)), F.pad(value, (0, 0, 1, 0)), bias
