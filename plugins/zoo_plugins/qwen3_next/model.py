"""Qwen3-Next (Qwen Team 2025) and the text decoder of Qwen3.5: layers of linear attention, some of full attention.

Linear attention is Gated DeltaNet (Yang et al. 2024). Full attention has norms on queries and keys, rotates a part of
each head, and multiplies its heads by a gate before the output projection. Qwen3-Next has experts in place of
feed-forward networks, one of them for all tokens.

B batch, T tokens of this call, E hidden size.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from zoo.nn import (
    GatedDeltaNet,
    GatedFeedForward,
    LayerCache,
    LayerStates,
    MixtureOfExperts,
    MultiHeadAttention,
    OffsetRMSNorm,
    RotaryPositions,
    Rotation,
    initialize,
)
from zoo_plugins.qwen3_next.config import Qwen3NextConfig, Qwen3NextMoeConfig
from zoo_plugins.qwen3_next.decoder import HybridDecoder


def _mlp(c: Qwen3NextConfig, layer: int) -> nn.Module:
    """Build the experts or the feed-forward network of a layer."""
    if not (isinstance(c, Qwen3NextMoeConfig) and c.has_experts(layer)):
        return GatedFeedForward(c.hidden_size, c.intermediate_size, activation=c.activation)
    return MixtureOfExperts(
        c.hidden_size,
        c.expert_intermediate_size,
        num_experts=c.num_experts,
        top_k=c.experts_per_token,
        renormalize=c.normalize_routing,
        activation=c.activation,
        shared_intermediate_size=c.shared_intermediate_size,
    )


class FullBlock(nn.Module):
    """Gated full attention, then feed-forward or experts, each normalised before and added."""

    def __init__(self, c: Qwen3NextConfig, layer: int) -> None:
        super().__init__()
        self.norm_1 = OffsetRMSNorm(c.hidden_size, eps=c.norm_eps)
        self.attention = MultiHeadAttention(
            c.hidden_size,
            c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            bias=c.attention_bias,
            qk_norm=partial(OffsetRMSNorm, eps=c.norm_eps),
            dropout=c.dropout,
            output_gate=True,
        )
        self.norm_2 = OffsetRMSNorm(c.hidden_size, eps=c.norm_eps)
        self.mlp = _mlp(c, layer)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        x = x + self.attention(self.norm_1(x), rotation=rotation, mask=mask, cache=cache)
        return x + self.mlp(self.norm_2(x))


class LinearBlock(nn.Module):
    """Linear attention, then feed-forward or experts, each normalised before and added."""

    def __init__(self, c: Qwen3NextConfig, layer: int) -> None:
        super().__init__()
        self.norm_1 = OffsetRMSNorm(c.hidden_size, eps=c.norm_eps)
        self.attention = GatedDeltaNet(
            c.hidden_size,
            c.linear_num_heads,
            head_dim=c.linear_head_dim,
            num_key_heads=c.linear_num_key_heads,
            key_head_dim=c.linear_key_head_dim,
            kernel_size=c.kernel_size,
            activation=c.activation,
            eps=c.norm_eps,
            chunk_size=max(1, min(16, c.max_seq_len // 8)),
        )
        self.norm_2 = OffsetRMSNorm(c.hidden_size, eps=c.norm_eps)
        self.mlp = _mlp(c, layer)

    def forward(self, x: Tensor, tokens: Tensor | None, states: LayerStates | None) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        x = x + self.attention(self.norm_1(x), tokens, states)
        return x + self.mlp(self.norm_2(x))


class Qwen3Next(HybridDecoder):
    """Token embeddings, blocks of two kinds, a final norm and the language-model head."""

    state_block = LinearBlock

    def __init__(self, c: Qwen3NextConfig) -> None:
        super().__init__()
        self.config = c
        self.token_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.positions = RotaryPositions(c.turned_size, c.rope_theta)
        self.blocks = nn.ModuleList(
            LinearBlock(c, layer) if c.is_linear(layer) else FullBlock(c, layer) for layer in range(c.num_layers)
        )
        self.norm = OffsetRMSNorm(c.hidden_size, eps=c.norm_eps)
        self.head = self.build_head(c)
        initialize(self, "normal", std=0.02)
