"""Configuration and cost of GPT-NeoX and its relatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Cost, cost
from zoo_plugins.llama.config import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class NeoXConfig(LlamaConfig):
    """Configuration of GPT-NeoX and its relatives: that of Llama, and more. The defaults are the sizes
    of GPT-NeoX-20B; its ``rotary_dim`` is 24."""

    vocab_size: int = 50432
    """Vocabulary size."""
    max_seq_len: int = 2048
    """Maximum context length."""
    hidden_size: int = 6144
    """Width of the residual stream."""
    num_layers: int = 44
    """Number of blocks."""
    num_heads: int = 64
    """Query heads per block."""
    intermediate_size: int = 24576
    """Hidden width of the feed-forward network."""
    activation: Activation = "gelu"
    """Activation of the feed-forward network."""
    attention_bias: bool = True
    """Whether the query, key and value projections have biases."""
    attention_output_bias: bool = True
    """Whether the output projection of attention has a bias."""
    mlp_bias: bool = True
    """Whether the feed-forward network has biases."""
    norm: Literal["layer", "rms"] = "layer"
    """Kind of norm: LayerNorm, or RMS norm as in Llama."""
    norm_bias: bool = True
    """Whether layer norms have biases."""
    gated: bool = False
    """Whether the feed-forward network is gated, as in Llama (StableLM, Cohere)."""
    parallel: bool = True
    """Whether attention and the feed-forward network read the same residual stream, and are added together."""
    shared_norm: bool = False
    """Whether they also share the norm of their input (GPT-J, Phi, Falcon); needs ``parallel``."""
    positions: Literal["rotary", "alibi"] = "rotary"
    """Rotated queries and keys, or biases of scores by distance (BLOOM, MPT): see :class:`zoo.nn.LinearBiases`."""
    embedding_norm: bool = False
    """Whether token embeddings are normalised (BLOOM)."""
    residual_dropout: float = 0.0
    """Dropout on token embeddings and on the output of each sub-layer, during training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_probability("residual_dropout")
        for name in ("post_norms", "scale_embeddings"):
            if getattr(self, name):
                raise ValueError(f"{name} True is not supported")
        for name in ("embedding_multiplier", "residual_multiplier"):
            if getattr(self, name) != 1:
                raise ValueError(f"{name} {getattr(self, name)} is not supported, only 1.0")
        if self.shared_norm and not self.parallel:
            raise ValueError("shared_norm True needs parallel")

    def rotates(self, layer: int) -> bool:
        """Whether this layer rotates queries and keys."""
        return self.positions == "rotary" and super().rotates(layer)

    @property
    def norms_per_block(self) -> int:
        """Number of norms over the residual stream in a block."""
        return 1 if self.shared_norm else 2

    def norm_cost(self, width: int) -> Cost:
        """Return the cost of a norm over so many numbers."""
        return cost.layer_norm(width, bias=self.norm_bias) if self.norm == "layer" else cost.rms_norm(width)

    def feed_forward_cost(self, layer: int) -> Cost:
        """Return the cost of one layer's feed-forward network."""
        if self.gated:
            return super().feed_forward_cost(layer)
        return cost.feed_forward(self.hidden_size, self.intermediate_size, bias=self.mlp_bias)

    def cost(self) -> Cost:
        """Return the closed-form cost, of one call; see :meth:`LlamaConfig.cost`."""
        norms = self.norm_cost(self.hidden_size) if self.embedding_norm else Cost()
        if self.qk_norm and self.norm == "layer" and self.norm_bias:
            heads = self.num_heads + (self.num_kv_heads or 0) if self.joint_qk_norm else 2
            norms += self.num_layers * Cost(heads * self.key_size)
        return super().cost() + norms
