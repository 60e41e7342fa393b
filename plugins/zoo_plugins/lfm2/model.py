"""LFM2 (Liquid AI 2025): a decoder in which most layers have a gated short convolution, and some have attention.

Attention has grouped queries, norms on queries and keys, and rotary positions.

B batch, T tokens of this call, E hidden size.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from zoo.nn import (
    GatedFeedForward,
    LayerCache,
    LayerStates,
    MultiHeadAttention,
    RotaryPositions,
    Rotation,
    ShortConvolution,
    initialize,
)
from zoo_plugins.lfm2.config import Lfm2Config
from zoo_plugins.qwen3_next.decoder import HybridDecoder


class AttentionBlock(nn.Module):
    """Attention, then gated feed-forward, each normalised before and added."""

    def __init__(self, c: Lfm2Config) -> None:
        super().__init__()
        norm = partial(nn.RMSNorm, eps=c.norm_eps)
        self.norm_1 = norm(c.hidden_size)
        self.attention = MultiHeadAttention(
            c.hidden_size,
            c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            bias=False,
            qk_norm=norm,
        )
        self.norm_2 = norm(c.hidden_size)
        self.mlp = GatedFeedForward(c.hidden_size, c.intermediate_size)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        x = x + self.attention(self.norm_1(x), rotation=rotation, mask=mask, cache=cache)
        return x + self.mlp(self.norm_2(x))


class ConvolutionBlock(nn.Module):
    """A gated short convolution, then gated feed-forward, each normalised before and added."""

    def __init__(self, c: Lfm2Config) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.convolution = ShortConvolution(c.hidden_size, kernel_size=c.kernel_size, bias=c.convolution_bias)
        self.norm_2 = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.mlp = GatedFeedForward(c.hidden_size, c.intermediate_size)

    def forward(self, x: Tensor, tokens: Tensor | None, states: LayerStates | None) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        x = x + self.convolution(self.norm_1(x), tokens, states)
        return x + self.mlp(self.norm_2(x))


class Lfm2(HybridDecoder):
    """Token embeddings, blocks of two kinds, a final norm and the language-model head."""

    state_block = ConvolutionBlock

    def __init__(self, c: Lfm2Config) -> None:
        super().__init__()
        self.config = c
        self.token_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.positions = RotaryPositions(c.key_size, c.rope_theta)
        self.blocks = nn.ModuleList(
            ConvolutionBlock(c) if c.has_convolution(layer) else AttentionBlock(c) for layer in range(c.num_layers)
        )
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.head = self.build_head(c)
        initialize(self, "normal", std=0.02)
