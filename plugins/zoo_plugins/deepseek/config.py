"""Configuration, graph and cost of DeepSeek-V2 and V3."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Cost, Graph, cost
from zoo_plugins.gpt.tasks import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """Configuration of DeepSeek-V2, V3 and R1. The defaults are DeepSeek-V2-Lite."""

    vocab_size: int = 102400
    """Vocabulary size."""
    max_seq_len: int = 163840
    """Maximum context length."""
    hidden_size: int = 2048
    """Width of the residual stream."""
    num_layers: int = 27
    """Number of blocks."""
    num_heads: int = 16
    """Heads of attention."""
    latent_size: int = 512
    """Width of the vector from which a token's keys and values are projected."""
    query_latent_size: int | None = None
    """Width of the vector from which queries are projected; by default they are projected from the input."""
    head_dim: int = 128
    """Width of the part of a query or key that is not rotated."""
    rotary_dim: int = 64
    """Width of the rotated part of a query, and of a key, where all heads share it."""
    value_head_dim: int = 128
    """Width of a value."""
    intermediate_size: int = 10944
    """Hidden width of the feed-forward networks without experts."""
    activation: Activation = "silu"
    """Activation of the gates in feed-forward networks and experts."""
    dense_layers: int = 1
    """Number of first layers that have one feed-forward network rather than experts."""
    num_experts: int = 64
    """Number of experts in a layer, the shared ones not counted."""
    experts_per_token: int = 6
    """Number of experts that each token uses, beside the shared ones."""
    expert_intermediate_size: int = 1408
    """Hidden width of an expert."""
    num_shared_experts: int = 2
    """Number of experts that all tokens use. They are computed as one feed-forward network."""
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of experts: their softmax over all experts (V2), or the sigmoid of each, to which a stored correction is
    added to choose experts (V3)."""
    num_groups: int = 1
    """Number of groups of equal size into which the experts are divided."""
    groups_per_token: int = 1
    """Number of groups whose experts a token may use."""
    normalize_routing: bool = False
    """Whether the scores of a token's experts are divided by their sum."""
    routing_factor: float = 1.0
    """Factor of the weights of a token's experts."""
    norm_eps: float = 1e-6
    """Epsilon of the RMS norms over the residual stream. That of the norms over latent vectors is 1e-6."""
    rope_interleaved: bool = True
    """Whether rotated pairs are neighbours; otherwise, element i is paired with i + ``rotary_dim`` / 2."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: Literal["none", "linear", "yarn"] = "none"
    """Scaling of rotary frequencies: none, all by ``1 / rope_factor`` ("linear"), or low ones only ("yarn")."""
    rope_factor: float = 1.0
    """Context extension factor relative to the original training length."""
    rope_original_length: int | None = None
    """Context length of the original training; ``max_seq_len`` by default."""
    rope_beta_fast: float = 32.0
    """For "yarn": frequencies with more turns than this within ``rope_original_length`` are unchanged."""
    rope_beta_slow: float = 1.0
    """For "yarn": frequencies with fewer turns than this are scaled; those in between are interpolated."""
    rope_truncate: bool = True
    """For "yarn": whether the interpolation begins and ends at whole numbers of frequencies."""
    rope_mscale: float = 0.0
    """For "yarn": m in the magnitude 0.1 m ln(``rope_factor``) + 1 of rotated queries and keys, which is divided by
    that of ``rope_mscale_all_dim``. If either is 0, m is 1 and nothing is divided."""
    rope_mscale_all_dim: float = 0.0
    """For "yarn": m in 0.1 m ln(``rope_factor``) + 1, whose square multiplies all attention scores; 0 for no factor."""
    rope_attention_factor: float | None = None
    """Factor of rotated queries and keys; by default that of ``rope_mscale`` for "yarn", and 1 for others."""
    attention_bias: bool = False
    """Whether the projections to latent vectors and the output projection of attention have biases."""
    mlp_bias: bool = False
    """Whether feed-forward networks have biases, that of the shared experts included; other experts have none."""
    dropout: float = 0.0
    """Dropout on attention weights, during training."""
    tie_embeddings: bool = False
    """Whether the head shares the token embedding."""
    bos_token_id: int | None = None
    """Token that begins a text."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Tokens that end a text."""
    pad_token_id: int | None = None
    """Token that pads shorter texts; the mask excludes it."""

    def __post_init__(self) -> None:
        self.check_classes(head=self.task == "text-classification")
        self.check_embedding()
        self.default("rope_original_length", self.max_seq_len)
        self.require_positive(
            "vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "latent_size", "query_latent_size",
            "head_dim", "rotary_dim", "value_head_dim", "intermediate_size", "num_experts", "experts_per_token",
            "expert_intermediate_size", "num_shared_experts", "num_groups", "groups_per_token", "routing_factor",
            "norm_eps", "rope_theta", "rope_factor", "rope_original_length", "rope_beta_fast", "rope_beta_slow",
        )  # fmt: skip
        self.require_probability("dropout")
        if self.rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even, got {self.rotary_dim}")
        if not 0 <= self.dense_layers <= self.num_layers:
            raise ValueError(f"dense_layers must be from 0 to num_layers {self.num_layers}, got {self.dense_layers}")
        self._check_groups()
        if self.rope_scaling == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_theta must exceed 1 for 'yarn', got {self.rope_theta}")
        if min(self.rope_mscale, self.rope_mscale_all_dim) < 0:
            raise ValueError(
                f"rope_mscale and rope_mscale_all_dim must not be negative, got {self.rope_mscale} and "
                f"{self.rope_mscale_all_dim}"
            )
        factor = 1.0
        if self.rope_scaling == "yarn":
            factor = self._magnitude(1.0)
            if self.rope_mscale and self.rope_mscale_all_dim:
                factor = self._magnitude(self.rope_mscale) / self._magnitude(self.rope_mscale_all_dim)
        self.default("rope_attention_factor", factor)
        self.require_positive("rope_attention_factor")

    def _check_groups(self) -> None:
        """Check that the experts fit into their groups."""
        self.require_divisible("num_experts", "num_groups")
        if self.groups_per_token > self.num_groups:
            raise ValueError(f"groups_per_token {self.groups_per_token} is above num_groups {self.num_groups}")
        size = self.num_experts // self.num_groups
        if self.experts_per_token > self.groups_per_token * size:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is above the {self.groups_per_token * size} experts of "
                f"groups_per_token {self.groups_per_token}"
            )
        if self.router_scores == "sigmoid" and size < 2:
            raise ValueError(
                f"a group needs two experts or more for 'sigmoid', got num_experts {self.num_experts} in num_groups "
                f"{self.num_groups}"
            )

    def _magnitude(self, mscale: float) -> float:
        """Return the factor of queries and keys for longer texts (Peng et al. 2023, equation 22), with DeepSeek's m."""
        return 0.1 * mscale * math.log(self.rope_factor) + 1 if self.rope_factor > 1 else 1.0

    @property
    def attention_scale(self) -> float:
        """Factor of the attention scores."""
        scaled = self._magnitude(self.rope_mscale_all_dim) if self.rope_scaling == "yarn" else 1.0
        return float((self.head_dim + self.rotary_dim) ** -0.5 * scaled * scaled)

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has experts."""
        return layer >= self.dense_layers

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph, whose past has the latent vectors as keys and the rotated parts of keys as values."""
        graph = self.decoder_graph(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self.latent_size,
            value_head_dim=self.rotary_dim,
            max_seq_len=self.max_seq_len,
            sliding_windows=(0,),
        )
        return (graph,)

    def feed_forward_cost(self, layer: int) -> Cost:
        """Return the cost of one layer's experts or feed-forward network."""
        if not self.has_experts(layer):
            return cost.gated_feed_forward(self.hidden_size, self.intermediate_size, bias=self.mlp_bias)
        shared = self.num_shared_experts * self.expert_intermediate_size
        return cost.mixture_of_experts(
            self.hidden_size,
            self.expert_intermediate_size,
            num_experts=self.num_experts,
            top_k=self.experts_per_token,
        ) + cost.gated_feed_forward(self.hidden_size, shared, bias=self.mlp_bias)

    def cost(self) -> Cost:
        """Return the closed-form cost of one call without a past."""
        attention = cost.latent_attention(
            self.hidden_size,
            self.num_heads,
            latent_size=self.latent_size,
            query_latent_size=self.query_latent_size,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            value_head_dim=self.value_head_dim,
            context=self.max_seq_len,
            bias=self.attention_bias,
        )
        return (
            cost.embedding(self.vocab_size, self.hidden_size)
            + self.num_layers * (attention + 2 * cost.rms_norm(self.hidden_size))
            + sum(map(self.feed_forward_cost, range(self.num_layers)), start=Cost())
            + cost.rms_norm(self.hidden_size)
            + self.head_cost(self.hidden_size, self.vocab_size, tied=self.tie_embeddings)
        )
