"""Configuration and cost of Mixtral and its relatives."""

from __future__ import annotations

from dataclasses import dataclass

from zoo import Cost, cost, shortest_period
from zoo_plugins.llama.config import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(LlamaConfig):
    """Configuration of Mixtral, OLMoE, Qwen3-MoE and gpt-oss: that of Llama, and experts.

    The defaults are Mixtral 8x7B. ``mlp_bias`` adds biases to the router and to the experts too.
    """

    max_seq_len: int = 32768
    """Maximum context length."""
    num_kv_heads: int | None = 8
    """Key-value heads per block; None for ``num_heads``."""
    intermediate_size: int = 14336
    """Hidden width of the feed-forward networks without experts, and by default of an expert."""
    rope_theta: float = 1000000.0
    """Base of the rotary frequencies."""
    num_experts: int = 8
    """Number of experts in a layer."""
    experts_per_token: int = 2
    """Number of experts that each token uses."""
    expert_intermediate_size: int | None = None
    """Hidden width of an expert; ``intermediate_size`` by default."""
    normalize_routing: bool = True
    """Whether the weights of a token's experts add up to 1; otherwise they are probabilities among all experts."""
    expert_layers: tuple[bool, ...] = (True,)
    """Whether each layer has experts rather than one feed-forward network. The pattern repeats over the layers."""
    expert_limit: float | None = None
    """Limit c of the gates g and the products u in an expert, as f(min(g, c)) (min(max(u, -c), c) + 1); none by default
    (gpt-oss)."""
    router_aux_loss: float = 0.0
    """Weight of the load-balancing loss in training with ``causal-lm``; 0 for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.default("expert_intermediate_size", self.intermediate_size)
        self.require_positive("num_experts", "experts_per_token", "expert_intermediate_size", "expert_limit")
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} is above num_experts {self.num_experts}")
        if self.router_aux_loss < 0:
            raise ValueError(f"router_aux_loss must not be negative, got {self.router_aux_loss}")
        if not self.expert_layers:
            raise ValueError("expert_layers must be one or more booleans, got ()")
        layers = [self.has_experts(layer) for layer in range(self.num_layers)]
        object.__setattr__(self, "expert_layers", shortest_period(layers))

    @property
    def expert_size(self) -> int:
        """``expert_intermediate_size``, set by ``__post_init__``."""
        return self.expert_intermediate_size or 0

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has experts."""
        return self.expert_layers[layer % len(self.expert_layers)]

    def feed_forward_cost(self, layer: int) -> Cost:
        """Return the cost of one layer's experts or feed-forward network."""
        if not self.has_experts(layer):
            return super().feed_forward_cost(layer)
        return cost.mixture_of_experts(
            self.hidden_size,
            self.expert_size,
            num_experts=self.num_experts,
            top_k=self.experts_per_token,
            bias=self.mlp_bias,
        )
