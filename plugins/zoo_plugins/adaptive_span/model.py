"""A post-norm causal decoder whose heads learn their attention spans (Sukhbaatar et al. 2019).

B batch, T tokens of this call, S tokens including those before, E hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.nn import (
    AdaptiveSpan,
    Cache,
    FeedForward,
    LayerCache,
    Residual,
    SpanAttention,
    build_mask,
    distances_of,
    initialize,
    tied_linear,
)
from zoo_plugins.adaptive_span.config import AdaptiveSpanConfig, SpanDecoderConfig


class AdaptiveSpanBlock(nn.Module):
    """Attention and feed-forward, each a post-norm residual sub-layer."""

    def __init__(self, c: AdaptiveSpanConfig) -> None:
        super().__init__()
        self.attention = SpanAttention(
            c.hidden_size,
            c.num_heads,
            span=c.span,
            ramp=c.span_ramp,
            initial_span=c.initial_span,
            dropout=c.dropout,
        )
        self.attention_residual = Residual(c.hidden_size, eps=c.norm_eps, norm_first=False, dropout=c.dropout)
        self.mlp = FeedForward(c.hidden_size, c.intermediate_size or 0, activation=c.activation)
        self.mlp_residual = Residual(c.hidden_size, eps=c.norm_eps, norm_first=False, dropout=c.dropout)

    def forward(
        self, x: Tensor, positions: Tensor, distances: Tensor, mask: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        x = self.attention_residual(x, lambda x: self.attention(x, positions, distances, mask=mask, cache=cache))
        return self.mlp_residual(x, self.mlp)


class AdaptiveSpanDecoder(nn.Module):
    """Token embeddings, blocks with shared distance embeddings, and the language-model head."""

    block: type[nn.Module] = AdaptiveSpanBlock
    """Class of the blocks, with the constructor and call signature of :class:`AdaptiveSpanBlock`."""

    def __init__(self, c: SpanDecoderConfig) -> None:
        super().__init__()
        self.config = c
        self.token_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.distance_embedding = nn.Embedding(c.span, c.head_dim)
        self.blocks = nn.ModuleList(self.block(c) for _ in range(c.num_layers))
        self.head = (
            tied_linear(self.token_embedding)
            if c.tie_embeddings
            else nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        )
        initialize(self, "xavier_uniform")

    def spans(self) -> Tensor:
        """Return the learned span z of every head, clamped, in tokens: (layers, heads)."""
        return torch.stack([span.clamped() for span in self._spans()])

    def training_penalty(self) -> Tensor:
        """Return lambda times the mean span, which is added to the training loss (section 2.2); 0 without spans."""
        return self.config.span_penalty * self.spans().mean() if self._spans() else torch.zeros(())

    def constrain_weights(self) -> None:
        """Clamp every z to [0, span], after each training step."""
        for span in self._spans():
            span.clamp()

    def _spans(self) -> list[AdaptiveSpan]:
        return [module for module in self.modules() if isinstance(module, AdaptiveSpan)]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """Return the logits of the next token.

        Args:
            input_ids: (B, T).
            attention_mask: (B, S), 1 for a token and 0 for padding, the past included.
            past_key_values: keys and values of earlier calls; extended in place.

        Returns:
            (B, T, V).
        """
        length = input_ids.shape[1]
        total = length + (past_key_values.length if past_key_values is not None else 0)
        mask = build_mask(length, total, padding=attention_mask, causal=True, device=input_ids.device)
        distances = distances_of(length, total, padding=attention_mask, device=input_ids.device)  # (B or 1, T, S)
        x = self.token_embedding(input_ids)  # (B, T, E)
        for layer, block in enumerate(self.blocks):
            cache = past_key_values[layer] if past_key_values is not None else None
            x = block(x, self.distance_embedding.weight, distances, mask, cache)
        return self.head(x)
