"""Initialisation and weight tying. Models initialise themselves in their constructors with torch's seeded generator."""

from __future__ import annotations

from torch import nn

__all__ = ["init_normal", "init_truncated_normal", "init_xavier", "tied_linear"]


def tied_linear(embedding: nn.Embedding, *, bias: bool = False) -> nn.Linear:
    """Return a dense layer E -> V that shares the embedding's weight (Press and Wolf 2017)."""
    rows, hidden_size = embedding.weight.shape
    layer = nn.Linear(hidden_size, rows, bias=bias, device="meta")
    layer.weight = embedding.weight
    if bias:
        layer.bias = nn.Parameter(embedding.weight.new_zeros(rows))
    return layer


def init_normal(module: nn.Module, std: float) -> None:
    """Initialise weights of dense layers and embeddings from N(0, std^2), and biases to 0."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        _zero_bias(part)


def init_truncated_normal(module: nn.Module, std: float) -> None:
    """Like :func:`init_normal`, truncated at two standard deviations."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(part.weight, std=std, a=-2 * std, b=2 * std)
        _zero_bias(part)


def init_xavier(module: nn.Module) -> None:
    """Initialise dense layers as Glorot and Bengio 2010, embeddings from N(0, 1/E), and biases to 0."""
    embeddings = {part.weight for part in module.modules() if isinstance(part, nn.Embedding)}
    for part in module.modules():
        if isinstance(part, nn.Linear) and part.weight not in embeddings:
            nn.init.xavier_uniform_(part.weight)
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=part.embedding_dim**-0.5)
        _zero_bias(part)


def _zero_bias(part: nn.Module) -> None:
    if isinstance(part, nn.Linear) and part.bias is not None:
        nn.init.zeros_(part.bias)
