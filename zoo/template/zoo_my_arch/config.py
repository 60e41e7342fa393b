"""Configuration of MyArch, and what its graph takes and gives."""

from dataclasses import dataclass

import zoo


@dataclass(frozen=True, kw_only=True)
class MyArchConfig(zoo.Config):
    """Small by default. A field is whatever a preset, or ``--set KEY=VALUE``, may change."""

    task = "text-generation"
    """What its models are for. Where there are several tasks, it is a field."""
    vocab_size: int = 260
    """Tokens known: those of the byte tokenizer."""
    max_seq_len: int = 128
    """Positions with a learned embedding."""
    hidden_size: int = 64
    """Width of the residual stream."""
    num_layers: int = 4
    """Blocks."""
    num_heads: int = 4
    """Heads a block, of queries and of keys and values."""
    head_dim: int = 16
    """Width of one head."""

    def __post_init__(self) -> None:
        self.require_positive("vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "head_dim")

    def graphs(self) -> tuple[zoo.Graph, ...]:
        """One graph, for a prompt and for each token after it: ids, a mask and a past to logits."""
        graph = zoo.causal_graph(
            vocab_size=self.vocab_size, num_layers=self.num_layers, num_kv_heads=self.num_heads, head_dim=self.head_dim
        )
        return (graph,)
