"""A post-norm causal decoder with product-key memories in place of some feed-forward networks (Lample et al. 2019).

B batch, T tokens of this call, S tokens including those before, E hidden size, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from zoo.nn import (
    Cache,
    FeedForward,
    LayerCache,
    MultiHeadAttention,
    ProductKeyMemory,
    Residual,
    build_mask,
    initialize,
    positions_of,
    tied_linear,
)
from zoo_plugins.product_key_memory.config import ProductKeyMemoryConfig


class ProductKeyMemoryBlock(nn.Module):
    """Attention and feed-forward or memory, each a post-norm residual sub-layer."""

    def __init__(self, c: ProductKeyMemoryConfig, *, has_memory: bool) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(c.hidden_size, c.num_heads, dropout=c.dropout)
        self.attention_residual = Residual(c.hidden_size, eps=c.norm_eps, norm_first=False, dropout=c.dropout)
        self.mlp = (
            ProductKeyMemory(
                c.hidden_size,
                num_keys=c.memory_keys,
                top_k=c.memory_top_k,
                num_heads=c.memory_heads,
                query_size=c.memory_query_size,
            )
            if has_memory
            else FeedForward(c.hidden_size, c.intermediate_size or 0, activation=c.activation)
        )
        self.mlp_residual = Residual(c.hidden_size, eps=c.norm_eps, norm_first=False, dropout=c.dropout)

    def forward(self, x: Tensor, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        x = self.attention_residual(x, lambda x: self.attention(x, mask=mask, cache=cache))
        return self.mlp_residual(x, self.mlp)


class ProductKeyMemoryDecoder(nn.Module):
    """Normalised token and position embeddings, blocks, and the language-model head."""

    position_tensors = ("position_embedding.weight",)

    def __init__(self, c: ProductKeyMemoryConfig) -> None:
        super().__init__()
        self.config = c
        self.token_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.position_embedding = nn.Embedding(c.max_seq_len, c.hidden_size)
        self.embedding_norm = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(
            ProductKeyMemoryBlock(c, has_memory=c.has_memory(layer)) for layer in range(c.num_layers)
        )
        self.head = (
            tied_linear(self.token_embedding)
            if c.tie_embeddings
            else nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        )
        initialize(self, "xavier_uniform")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """Return the logits of the next token. In training, the memory's batch norm makes them depend on later tokens.

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
        positions = positions_of(length, total, padding=attention_mask, device=input_ids.device)
        x = self.token_embedding(input_ids) + self.position_embedding(positions)  # (B, T, E)
        x = self.dropout(self.embedding_norm(x))
        for layer, block in enumerate(self.blocks):
            x = block(x, mask, past_key_values[layer] if past_key_values is not None else None)
        return self.head(x)
