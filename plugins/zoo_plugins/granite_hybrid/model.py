"""Granite 4 without experts (IBM 2025): a decoder of Mamba-2's state-space layers, some layers with attention.

As in Granite (Granite Team 2024), embeddings, scores, what sub-layers add, and logits are multiplied by constants.
Attention has no positions, or rotary ones.

B batch, T tokens of this call, E hidden size, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from zoo.nn import (
    GatedFeedForward,
    LayerCache,
    LayerStates,
    MultiHeadAttention,
    RotaryPositions,
    Rotation,
    StateSpaceMixer,
    initialize,
)
from zoo_plugins.granite_hybrid.config import GraniteHybridConfig
from zoo_plugins.llama.model import scaled
from zoo_plugins.qwen3_next.decoder import HybridDecoder


class AttentionBlock(nn.Module):
    """Attention, then gated feed-forward, each normalised before, multiplied and added."""

    def __init__(self, c: GraniteHybridConfig) -> None:
        super().__init__()
        self.residual_multiplier = c.residual_multiplier
        self.norm_1 = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.attention = MultiHeadAttention(
            c.hidden_size,
            c.num_heads,
            num_kv_heads=c.num_kv_heads,
            bias=c.attention_bias,
            scale=c.attention_scale,
            dropout=c.dropout,
        )
        self.norm_2 = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.mlp = GatedFeedForward(c.hidden_size, c.intermediate_size, activation=c.activation)

    def forward(self, x: Tensor, rotation: Rotation | None, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        attended = self.attention(self.norm_1(x), rotation=rotation, mask=mask, cache=cache)
        x = x + scaled(attended, self.residual_multiplier)
        return x + scaled(self.mlp(self.norm_2(x)), self.residual_multiplier)


class StateBlock(nn.Module):
    """A state-space layer, then gated feed-forward, each normalised before, multiplied and added."""

    def __init__(self, c: GraniteHybridConfig) -> None:
        super().__init__()
        self.residual_multiplier = c.residual_multiplier
        self.norm_1 = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.mixer = StateSpaceMixer(
            c.hidden_size,
            c.state_width,
            head_dim=c.state_head_dim,
            state_size=c.state_size,
            num_groups=c.num_groups,
            kernel_size=c.kernel_size,
            activation=c.activation,
            bias=c.projection_bias,
            convolution_bias=c.convolution_bias,
            steps=(c.min_step, c.max_step),
            eps=c.norm_eps,
            chunk_size=max(1, min(32, c.max_seq_len // 8)),
        )
        self.norm_2 = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.mlp = GatedFeedForward(c.hidden_size, c.intermediate_size, activation=c.activation)

    def forward(self, x: Tensor, tokens: Tensor | None, states: LayerStates | None) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        x = x + scaled(self.mixer(self.norm_1(x), tokens, states), self.residual_multiplier)
        return x + scaled(self.mlp(self.norm_2(x)), self.residual_multiplier)


class GraniteHybrid(HybridDecoder):
    """Token embeddings, blocks of two kinds, a final norm and the language-model head."""

    state_block = StateBlock

    def __init__(self, c: GraniteHybridConfig) -> None:
        super().__init__()
        self.config = c
        self.token_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.positions = RotaryPositions(c.head_dim, c.rope_theta) if c.rotary else None
        self.blocks = nn.ModuleList(
            StateBlock(c) if c.has_states(layer) else AttentionBlock(c) for layer in range(c.num_layers)
        )
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.head = self.build_head(c)
        initialize(self, "normal", std=0.02)

    def embed(self, input_ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, E)."""
        return scaled(self.token_embedding(input_ids), self.config.embedding_multiplier)

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, V)."""
        return scaled(self.head(x), self.config.logit_multiplier)
