"""A causal decoder of the shared blocks.  B batch, T tokens of this call, E hidden size, V vocabulary."""

from torch import Tensor, nn

from zoo.nn import (
    Cache,
    FeedForward,
    LayerCache,
    MultiHeadAttention,
    SinusoidalPositions,
    build_mask,
    positions_of,
    tied_linear,
)
from zoo_api1.config import Api1Config


class Block(nn.Module):
    def __init__(self, c: Api1Config) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(c.hidden_size), nn.LayerNorm(c.hidden_size)
        self.attention = MultiHeadAttention(c.hidden_size, c.num_heads, num_kv_heads=c.num_kv_heads)
        self.mlp = FeedForward(c.hidden_size, 4 * c.hidden_size, activation=c.activation)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, mask: Tensor | None, cache: LayerCache | None) -> Tensor:  # (B, T, E)
        x = x + self.dropout(self.attention(self.norm_1(x), mask=mask, cache=cache))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class Api1(nn.Module):
    def __init__(self, c: Api1Config) -> None:
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.positions = SinusoidalPositions(c.hidden_size)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.hidden_size)
        self.head = tied_linear(self.embedding)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: Cache | None = None
    ) -> Tensor:  # (B, T, V), or (B, T, E) for features
        length = input_ids.shape[1]
        total = length + (past_key_values.length if past_key_values is not None else 0)
        mask = build_mask(length, total, padding=attention_mask, causal=True, device=input_ids.device)
        positions = positions_of(length, total, padding=attention_mask, device=input_ids.device)
        x = self.embedding(input_ids)
        x = x + self.positions(positions, x.dtype)
        for layer, block in enumerate(self.blocks):
            x = block(x, mask, past_key_values[layer] if past_key_values is not None else None)
        x = self.norm(x)
        return x if self.config.task == "feature-extraction" else self.head(x)
