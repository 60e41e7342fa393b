"""Configuration, graph and cost of all-attention."""

from __future__ import annotations

from dataclasses import dataclass

from zoo import Cost, Graph, cost
from zoo_plugins.adaptive_span.config import SpanDecoderConfig


@dataclass(frozen=True, kw_only=True)
class AllAttentionConfig(SpanDecoderConfig):
    """A decoder without feed-forward networks. By default the paper's small character model."""

    hidden_size: int = 512
    """Width of the residual stream."""
    num_layers: int = 18
    """Number of blocks."""
    num_heads: int = 8
    """Heads per block."""
    span_ramp: int | None = None
    """Tokens over which attention fades out beyond a learned span (Sukhbaatar et al. 2019a). None: every head has the
    full span."""
    num_memories: int = 1024
    """Persistent vectors per head, visible to every query; 0 for plain attention."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_memories < 0:
            raise ValueError(f"num_memories must not be negative, got {self.num_memories}")

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph for prefill and decoding."""
        return (self.graph(self.num_memories),)

    def cost(self) -> Cost:
        """Return the closed-form cost."""
        return self.decoder_cost(cost.layer_norm(self.hidden_size) + self.attention_cost(self.num_memories))
