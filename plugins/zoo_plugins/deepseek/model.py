"""DeepSeek-V2 (DeepSeek-AI 2024): a decoder of multi-head latent attention and many small experts.

DeepSeek-V3 (DeepSeek-AI 2024, section 2.1) scores its experts by sigmoids, and corrects the choice, not the weights, to
balance the load. Its module that predicts further tokens is for training, and not part of this model.

B batch, T tokens of this call, S tokens including those before, E hidden size, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from zoo.nn import (
    Cache,
    Experts,
    GatedFeedForward,
    GroupedRouter,
    LatentAttention,
    LayerCache,
    RotaryPositions,
    Rotation,
    build_mask,
    initialize,
    positions_of,
)
from zoo_plugins.deepseek.config import DeepseekConfig
from zoo_plugins.gpt.heads import add_head, answer
from zoo_plugins.llama.model import rotary_options


class DeepseekExperts(nn.Module):
    """The experts that the router chooses for a token, plus those that all tokens share (V2, equation 20)."""

    def __init__(self, c: DeepseekConfig) -> None:
        super().__init__()
        self.router = GroupedRouter(
            c.hidden_size,
            c.num_experts,
            top_k=c.experts_per_token,
            num_groups=c.num_groups,
            top_groups=c.groups_per_token,
            scores=c.router_scores,
            renormalize=c.normalize_routing,
            factor=c.routing_factor,
        )
        self.experts = Experts(c.hidden_size, c.expert_intermediate_size, c.num_experts, activation=c.activation)
        shared = c.num_shared_experts * c.expert_intermediate_size
        self.shared = GatedFeedForward(c.hidden_size, shared, activation=c.activation, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        tokens = x.flatten(0, 1)  # (B T, E)
        return self.experts(tokens, *self.router(tokens)).view(x.shape) + self.shared(x)


class DeepseekBlock(nn.Module):
    """Latent attention, then experts or a feed-forward network, each normalised before and added."""

    def __init__(self, c: DeepseekConfig, layer: int) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.attention = LatentAttention(
            c.hidden_size,
            c.num_heads,
            latent_size=c.latent_size,
            query_latent_size=c.query_latent_size,
            head_dim=c.head_dim,
            rotary_dim=c.rotary_dim,
            value_head_dim=c.value_head_dim,
            bias=c.attention_bias,
            scale=c.attention_scale,
            interleaved=c.rope_interleaved,
            dropout=c.dropout,
        )
        self.norm_2 = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.mlp = (
            DeepseekExperts(c)
            if c.has_experts(layer)
            else GatedFeedForward(c.hidden_size, c.intermediate_size, activation=c.activation, bias=c.mlp_bias)
        )

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        x = x + self.attention(self.norm_1(x), rotation=rotation, mask=mask, cache=cache)
        return x + self.mlp(self.norm_2(x))


class Deepseek(nn.Module):
    """Token embeddings, blocks with latent attention, a final norm and the head."""

    def __init__(self, c: DeepseekConfig) -> None:
        super().__init__()
        self.config = c
        self.token_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.positions = RotaryPositions(c.rotary_dim, c.rope_theta, **rotary_options(c))
        self.blocks = nn.ModuleList(DeepseekBlock(c, layer) for layer in range(c.num_layers))
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        add_head(self, c, self.token_embedding, tied=c.tie_embeddings)
        initialize(self, "normal", std=0.02)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Return the output of the configured task, or several by name: see :func:`zoo_plugins.gpt.heads.answer`.

        Args:
            input_ids: (B, T).
            attention_mask: (B, S), 1 for a token and 0 for padding, the past included.
            past_key_values: latent vectors and rotated keys of earlier calls, see :class:`zoo.nn.LatentAttention`;
                extended in place.
        """
        length = input_ids.shape[1]
        total = length + (past_key_values.length if past_key_values is not None else 0)
        x = self.token_embedding(input_ids)  # (B, T, E)
        positions = positions_of(length, total, padding=attention_mask, device=x.device)
        rotation = self.positions(positions, x.dtype)
        mask = build_mask(length, total, padding=attention_mask, causal=True, device=x.device)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, mask, past_key_values[layer] if past_key_values is not None else None)
        return answer(self, self.config, self.norm(x), input_ids, attention_mask, self.config.pad_token_id)
