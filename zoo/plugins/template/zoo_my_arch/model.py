"""MyArch: a causal Transformer decoder with learned positions (Radford et al. 2018). Change it to your architecture.

B batch, T tokens of this call, S tokens including the past, E hidden size, V vocabulary.
"""

from torch import Tensor, nn
from zoo.nn import Cache, FeedForward, LayerCache, MultiHeadAttention, build_mask, positions_of

from zoo_my_arch.config import MyArchConfig


class Block(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual connection around it."""

    def __init__(self, c: MyArchConfig) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(c.hidden_size), nn.LayerNorm(c.hidden_size)
        self.attention = MultiHeadAttention(c.hidden_size, c.num_heads, head_dim=c.head_dim)
        self.mlp = FeedForward(c.hidden_size, 4 * c.hidden_size)

    def forward(self, x: Tensor, mask: Tensor | None, cache: LayerCache) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        x = x + self.attention(self.norm_1(x), mask=mask, cache=cache)
        return x + self.mlp(self.norm_2(x))


class MyArch(nn.Module):
    """Token and position embeddings, blocks, a final norm and the language-modelling head."""

    def __init__(self, c: MyArchConfig) -> None:
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.positions = nn.Embedding(c.max_seq_len, c.hidden_size)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.hidden_size)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past_key_values: Cache) -> Tensor:
        """Compute the logits of the next token, (B, T, V).

        Args:
            input_ids: (B, T).
            attention_mask: (B, S), 1 for a token and 0 for padding, including the past.
            past_key_values: keys and values of earlier calls, extended in place; ``Cache.empty(num_layers)`` at first.
        """
        length, total = input_ids.shape[1], attention_mask.shape[1]
        mask = build_mask(length, total, padding=attention_mask, causal=True)  # (B, 1, T, S)
        # (B, T, E); padding is not counted in positions
        x = self.embedding(input_ids) + self.positions(positions_of(length, total, padding=attention_mask))
        for block, cache in zip(self.blocks, past_key_values.layers, strict=True):
            x = block(x, mask, cache)
        return self.head(self.norm(x))
