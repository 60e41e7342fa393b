"""A decoder with sliding-window attention (Beltagy et al. 2020, section 3.1).

B batch, T tokens of this call, S tokens including those before, E hidden size, V vocabulary.
"""

import torch
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
from zoo_sliding.config import SlidingConfig


class Block(nn.Module):
    def __init__(self, c: SlidingConfig) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(c.hidden_size), nn.RMSNorm(c.hidden_size)
        self.attention = MultiHeadAttention(c.hidden_size, c.num_heads, num_kv_heads=c.num_kv_heads, bias=False)
        self.mlp = FeedForward(c.hidden_size, 3 * c.hidden_size, activation="silu", bias=False)

    def forward(self, x: Tensor, mask: Tensor | None, cache: LayerCache | None) -> Tensor:  # (B, T, E)
        x = x + self.attention(self.norm_1(x), mask=mask, cache=cache)
        return x + self.mlp(self.norm_2(x))


class Sliding(nn.Module):
    def __init__(self, c: SlidingConfig) -> None:
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.positions = SinusoidalPositions(c.hidden_size)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.hidden_size)
        self.head = tied_linear(self.embedding)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: Cache | None = None
    ) -> Tensor:  # (B, T, V)
        length = input_ids.shape[1]
        total = length + (past_key_values.length if past_key_values is not None else 0)
        device = input_ids.device
        queries = torch.arange(total - length, total, device=device).unsqueeze(1)
        near = torch.arange(total, device=device) > queries - self.config.window  # (T, S)
        mask = near & build_mask(length, total, padding=attention_mask, causal=True, device=device)
        x = self.embedding(input_ids)
        x = x + self.positions(positions_of(length, total, padding=attention_mask, device=device), x.dtype)
        for layer, block in enumerate(self.blocks):
            x = block(x, mask, past_key_values[layer] if past_key_values is not None else None)
        return self.head(self.norm(x))
