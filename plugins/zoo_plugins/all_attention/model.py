"""All-attention: a post-norm causal decoder without feed-forward networks (Sukhbaatar et al. 2019b).

Persistent vectors, learned keys and values that belong to no token, replace them.

B batch, T tokens of this call, S tokens including those before, E hidden size, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from zoo.nn import LayerCache, Residual, SpanAttention
from zoo_plugins.adaptive_span.model import AdaptiveSpanDecoder
from zoo_plugins.all_attention.config import AllAttentionConfig


class AllAttentionBlock(nn.Module):
    """Attention as the only post-norm residual sub-layer."""

    def __init__(self, c: AllAttentionConfig) -> None:
        super().__init__()
        self.attention = SpanAttention(
            c.hidden_size,
            c.num_heads,
            span=c.span,
            ramp=c.span_ramp,
            initial_span=c.initial_span,
            num_memories=c.num_memories,
            dropout=c.dropout,
        )
        self.residual = Residual(c.hidden_size, eps=c.norm_eps, norm_first=False, dropout=c.dropout)

    def forward(
        self, x: Tensor, positions: Tensor, distances: Tensor, mask: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        return self.residual(x, lambda x: self.attention(x, positions, distances, mask=mask, cache=cache))


class AllAttention(AdaptiveSpanDecoder):
    """The adaptive-span decoder with attention-only blocks."""

    block = AllAttentionBlock
