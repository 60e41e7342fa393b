"""Configuration of MyArch, with the inputs and outputs of its graph."""

from dataclasses import dataclass

import zoo


@dataclass(frozen=True, kw_only=True)
class MyArchConfig(zoo.Config):
    """The configuration, small by default. Presets and ``--set KEY=VALUE`` can change its fields."""

    task = "text-generation"
    """The task of the models. Make it a field if the architecture supports several tasks."""
    vocab_size: int = 260
    """Number of tokens; the byte tokenizer has 260."""
    max_seq_len: int = 128
    """Number of learned position embeddings."""
    hidden_size: int = 64
    """Size of the residual stream."""
    num_layers: int = 4
    """Number of blocks."""
    num_heads: int = 4
    """Number of heads per block, for queries and for keys and values."""
    head_dim: int = 16
    """Size of one head."""

    def __post_init__(self) -> None:
        self.require_positive("vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "head_dim")

    def graphs(self) -> tuple[zoo.Graph, ...]:
        """Declare one graph from token ids, mask and past to logits, for the prompt and for each later token."""
        graph = zoo.causal_graph(
            vocab_size=self.vocab_size, num_layers=self.num_layers, num_kv_heads=self.num_heads, head_dim=self.head_dim
        )
        return (graph,)
