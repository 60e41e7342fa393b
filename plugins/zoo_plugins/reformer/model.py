"""Reformer: a causal Transformer with LSH attention and reversible residuals (Kitaev et al. 2020).

B batch, T tokens, E width of a residual stream, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn import (
    FeedForward,
    LocalAttention,
    LSHAttention,
    ReversibleBlock,
    cropped_attentions,
    initialize,
    positions_of,
    run_reversible,
)
from zoo_plugins.reformer.config import ReformerConfig


class ReformerBlock(ReversibleBlock):
    """Pre-norm attention from the second stream to the first, and feed-forward back."""

    def __init__(self, c: ReformerConfig, layer: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.attention = attention(c, layer)
        self.norm_2 = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.mlp = FeedForward(c.hidden_size, c.intermediate_size or 0, activation=c.activation, dropout=c.dropout)
        self.dropout = nn.Dropout(c.dropout)

    def decide(self, x: Tensor, tokens: Tensor) -> Tensor | None:
        """Return the hash buckets, which rounding errors in a recomputed ``x`` must not change."""
        return self.attention.find_buckets(self.norm_1(x), tokens)

    def attend(self, x: Tensor, tokens: Tensor, decisions: Tensor | None = None) -> Tensor:
        """(B, T, E) and (B, T) -> (B, T, E)."""
        return self.dropout(self.attention(self.norm_1(x), tokens, decisions))

    def feed(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        return self.dropout(self.mlp(self.norm_2(x)))


def attention(c: ReformerConfig, layer: int) -> LocalAttention | LSHAttention:
    """Build the attention of a layer."""
    head_dim = c.head_dim or 0
    if c.kind(layer) == "local":
        return LocalAttention(
            c.hidden_size, c.num_heads, head_dim=head_dim, chunk_length=c.local_chunk_length, dropout=c.dropout
        )
    return LSHAttention(
        c.hidden_size,
        c.num_heads,
        head_dim=head_dim,
        chunk_length=c.lsh_chunk_length,
        num_hashes=c.num_hashes,
        num_buckets=c.num_buckets,
        wrap=c.wrap_rounds,
        dropout=c.dropout,
    )


class AxialPositions(nn.Module):
    """Concatenated embeddings of row p // columns and column p % columns of each position p."""

    def __init__(self, c: ReformerConfig) -> None:
        super().__init__()
        (rows, self.columns), (row_size, column_size) = c.axial_shape, c.axial_sizes
        self.row, self.column = nn.Embedding(rows, row_size), nn.Embedding(self.columns, column_size)

    def forward(self, positions: Tensor) -> Tensor:
        """(B or 1, T) -> (B or 1, T, E)."""
        return torch.cat((self.row(positions // self.columns), self.column(positions % self.columns)), -1)


class Reformer(nn.Module):
    """Embeddings, reversible blocks, a norm over both streams, and the projection to the vocabulary."""

    position_tensors = ("position_embedding.*weight",)  # one table, or two if they are axial

    def __init__(self, c: ReformerConfig) -> None:
        super().__init__()
        self.config = c
        self.token_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.position_embedding = (
            AxialPositions(c) if c.positions == "axial" else nn.Embedding(c.max_seq_len, c.hidden_size)
        )
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(ReformerBlock(c, layer) for layer in range(c.num_layers))
        self.norm = nn.LayerNorm(2 * c.hidden_size, eps=c.norm_eps)
        if c.task == "text-generation":
            self.head = nn.Linear(2 * c.hidden_size, c.vocab_size, bias=False)
        initialize(self, "normal", std=0.02)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits of the next token (B, T, V), or hidden states (B, T, 2 E).

        In training, the backward pass recomputes activations.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 1 for a token and 0 for padding.
        """
        length, multiple = input_ids.shape[1], self.config.multiple
        positions = positions_of(length, length, padding=attention_mask, device=input_ids.device)
        x = self.dropout(self.token_embedding(input_ids)) + self.dropout(self.position_embedding(positions))
        tokens = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        missing = (length + multiple - 1) // multiple * multiple - length  # padding to whole chunks
        x, tokens = F.pad(x, (0, 0, 0, missing)), F.pad(tokens, (0, missing)).bool()
        blocks = [block for block in self.blocks if isinstance(block, ReformerBlock)]
        with cropped_attentions(length):
            first, second = run_reversible(blocks, x, x, tokens, forget=self.training)
        x = self.dropout(self.norm(torch.cat((first, second), -1)[:, :length]))
        return self.head(x) if self.config.task == "text-generation" else x
