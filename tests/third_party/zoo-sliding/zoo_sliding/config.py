"""Configuration of the sliding-window decoder."""

from dataclasses import dataclass
from typing import Literal

import zoo


@dataclass(frozen=True, kw_only=True)
class SlidingConfig(zoo.Config):
    """Configuration of the decoder. The defaults are small enough for a test."""

    task: Literal["text-generation"] = "text-generation"
    """Next-token prediction."""
    vocab_size: int = 260
    """Size of the vocabulary."""
    max_seq_len: int = 96
    """Longest text."""
    hidden_size: int = 48
    """Width of the residual stream."""
    num_layers: int = 2
    """Number of blocks."""
    num_heads: int = 6
    """Query heads."""
    num_kv_heads: int = 2
    """Key-value heads."""
    window: int = 16
    """Number of tokens that a query sees, its own included."""

    def __post_init__(self) -> None:
        self.require_positive("vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "window")
        self.require_divisible("hidden_size", "num_heads")
        self.require_divisible("num_heads", "num_kv_heads")

    def graphs(self) -> tuple[zoo.Graph, ...]:
        past = zoo.KeyValues(
            name="past_key_values",
            num_layers=self.num_layers,
            num_heads=self.num_kv_heads,
            head_dim=self.hidden_size // self.num_heads,
        )
        return (
            zoo.Graph(
                inputs=(
                    zoo.token_ids("input_ids", self.vocab_size),
                    zoo.mask("attention_mask", length="past_sequence + sequence"),
                ),
                outputs=(zoo.floats("logits", "batch", "sequence", self.vocab_size),),
                past=past,
            ),
        )
