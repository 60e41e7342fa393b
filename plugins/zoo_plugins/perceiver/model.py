"""Perceiver IO: latents cross-attend to the input, attend to each other, and are decoded (Jaegle et al. 2021, 2022).

B batch, T tokens, M latents, Q queries, E width of the latents, W width of the input, V vocabulary, C classes.
"""

from __future__ import annotations

from torch import Tensor, nn

from zoo.nn import FeedForward, MultiHeadAttention, build_mask, initialize, positions_of, tied_linear
from zoo_plugins.perceiver.config import PerceiverConfig


class PerceiverBlock(nn.Module):
    """Pre-norm self- or cross-attention, then feed-forward; residuals on both, or on the feed-forward only."""

    def __init__(
        self,
        c: PerceiverConfig,
        width: int,
        intermediate_size: int,
        attention: MultiHeadAttention,
        *,
        memory_size: int | None = None,
        residual: bool = True,
    ) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width, eps=c.norm_eps)
        self.memory_norm = nn.LayerNorm(memory_size, eps=c.norm_eps) if memory_size else None
        self.attention = attention
        self.norm_2 = nn.LayerNorm(width, eps=c.norm_eps)
        self.mlp = FeedForward(width, intermediate_size, activation=c.activation)
        self.residual = residual

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """(B, Q, width), and for cross-attention a memory (B, S, memory_size) -> (B, Q, width)."""
        seen = None
        if memory is not None and self.memory_norm is not None:
            seen = self.attention.keys_values(self.memory_norm(memory))
        attended = self.attention(self.norm_1(x), memory=seen, mask=mask)
        x = x + attended if self.residual else attended
        return x + self.mlp(self.norm_2(x))


def reading_block(c: PerceiverConfig) -> PerceiverBlock:
    """Cross-attention from latents to the input, the only part whose cost depends on its length."""
    attention = MultiHeadAttention(
        c.hidden_size,
        c.cross_num_heads,
        head_dim=c.cross_head_dim,
        value_head_dim=c.cross_value_head_dim,
        memory_size=c.embedding_size,
        dropout=c.dropout,
    )
    inner = c.intermediate_size or 0
    return PerceiverBlock(c, c.hidden_size, inner, attention, memory_size=c.embedding_size, residual=c.cross_residual)


def latent_block(c: PerceiverConfig) -> PerceiverBlock:
    """Self-attention of the latents."""
    attention = MultiHeadAttention(
        c.hidden_size, c.num_heads, head_dim=c.head_dim, value_head_dim=c.value_head_dim, dropout=c.dropout
    )
    return PerceiverBlock(c, c.hidden_size, c.intermediate_size or 0, attention)


def answering_block(c: PerceiverConfig) -> PerceiverBlock:
    """Cross-attention from queries to the latents, without a residual connection for fill-mask."""
    attention = MultiHeadAttention(
        c.query_size,
        c.decoder_num_heads or 0,
        head_dim=c.decoder_head_dim,
        value_head_dim=c.decoder_value_head_dim,
        memory_size=c.hidden_size,
        dropout=c.dropout,
    )
    residual = c.task == "text-classification"
    return PerceiverBlock(c, c.query_size, c.query_size, attention, memory_size=c.hidden_size, residual=residual)


class Perceiver(nn.Module):
    """Embeddings, latents, a reading block, self-attention blocks, and an answering block."""

    def __init__(self, c: PerceiverConfig) -> None:
        super().__init__()
        self.config = c
        self.token_embedding = nn.Embedding(c.vocab_size, c.embedding_size)
        if c.positions == "learned":
            self.position_embedding = nn.Embedding(c.max_seq_len, c.embedding_size)
            self.position_tensors = ("position_embedding.weight",)
        self.latents = nn.Embedding(c.num_latents, c.hidden_size)
        self.reader = reading_block(c)
        self.blocks = nn.ModuleList(latent_block(c) for _ in range(c.num_layers))
        self.queries = nn.Embedding(c.num_queries, c.query_size)
        self.answerer = answering_block(c)
        self.head = (
            tied_linear(self.token_embedding, bias=True)
            if c.task == "fill-mask"
            else nn.Linear(c.hidden_size, c.num_classes)
        )
        initialize(self, "normal", std=0.02)

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Encode the input into latents, (B, M, E).

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 1 for a token and 0 for padding. Padding counts in positions.
        """
        batch, length = input_ids.shape
        x = self.token_embedding(input_ids)  # (B, T, W)
        if self.config.positions == "learned":
            x = x + self.position_embedding(positions_of(length, length, device=input_ids.device))
        mask = build_mask(self.config.num_latents, length, padding=attention_mask)  # (B, 1, M, T)
        latents = self.reader(self.latents.weight.expand(batch, -1, -1), x, mask)
        for _ in range(self.config.num_repeats):
            for block in self.blocks:
                latents = block(latents)
        return latents

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits of the token at each position (B, T, V), or of the text's classes (B, C).

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 1 for a token and 0 for padding.
        """
        latents = self.encode(input_ids, attention_mask)
        batch, length = input_ids.shape
        fills = self.config.task == "fill-mask"
        queries = self.queries.weight[:length] if fills else self.queries.weight  # (Q, width)
        logits = self.head(self.answerer(queries.expand(batch, -1, -1), latents))
        return logits if fills else logits[:, 0]
