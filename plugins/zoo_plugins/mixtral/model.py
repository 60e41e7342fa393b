"""Mixtral: Llama with a mixture of experts in place of the feed-forward network (Jiang et al. 2024, section 2).

OLMoE (Muennighoff et al. 2024) has many small experts, weights that do not add up to 1, and norms over all heads of
queries and keys; Qwen3-MoE (Qwen Team 2025) has norms over each head, and may have layers without experts. gpt-oss
(OpenAI 2025) has biases, limits in its experts, windows in every other layer, and heads that may attend to nothing.
"""

from __future__ import annotations

from torch import nn

from zoo.nn import MixtureOfExperts
from zoo_plugins.llama.model import Llama, LlamaBlock
from zoo_plugins.mixtral.config import MixtralConfig


class MixtralBlock(LlamaBlock):
    """Attention, then experts, each normalised before and added."""

    def build_mlp(self, c: MixtralConfig, layer: int) -> nn.Module:
        """Return the experts, or the feed-forward network of a layer without any."""
        if not c.has_experts(layer):
            return super().build_mlp(c, layer)
        return MixtureOfExperts(
            c.hidden_size,
            c.expert_size,
            num_experts=c.num_experts,
            top_k=c.experts_per_token,
            renormalize=c.normalize_routing,
            activation=c.activation,
            bias=c.mlp_bias,
            limit=c.expert_limit,
        )


class Mixtral(Llama):
    """Token embeddings, blocks with rotary positions and experts, a final norm and the head."""

    block = MixtralBlock
