"""Initialisation and weight tying. Models initialise themselves in their constructors with torch's seeded generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn

from zoo.config import Initializer
from zoo.nn.experts import Experts

__all__ = ["initialize", "tied_linear"]


def tied_linear(embedding: nn.Embedding, *, bias: bool = False) -> nn.Linear:
    """Return a dense layer E -> V that shares the embedding's weight (Press and Wolf 2017)."""
    rows, hidden_size = embedding.weight.shape
    layer = nn.Linear(hidden_size, rows, bias=bias, device="meta")
    layer.weight = embedding.weight
    if bias:
        layer.bias = nn.Parameter(embedding.weight.new_zeros(rows))
    return layer


# Without an activation, the gain of He's initialisers is 1, which makes them LeCun's.
_SCALED: Mapping[Initializer, Callable[[Tensor], Tensor]] = {
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "lecun_uniform": partial(nn.init.kaiming_uniform_, nonlinearity="linear"),
    "lecun_normal": partial(nn.init.kaiming_normal_, nonlinearity="linear"),
}
"""Initialisers that depend on the numbers of inputs and outputs of a dense layer."""


def initialize(module: nn.Module, name: Initializer, *, std: float = 0.02) -> None:
    """Initialise the weights of dense layers, experts and embeddings, and set biases to 0; leave others alone.

    With n inputs and m outputs of a dense layer, its weights are drawn from

    - ``normal``: N(0, std^2).
    - ``truncated_normal``: the same, truncated at two standard deviations.
    - ``xavier_uniform``: U(-a, a), a = sqrt(6 / (n + m)) (Glorot and Bengio 2010, equation 16).
    - ``xavier_normal``: N(0, 2 / (n + m)), of the same variance.
    - ``lecun_normal``: N(0, 1 / n) (LeCun et al. 1998, Efficient BackProp, section 4.6).
    - ``lecun_uniform``: U(-a, a), a = sqrt(3 / n), of the same variance.

    The first two treat embeddings like dense layers. The others draw embeddings of width E, and dense layers tied to
    them, from N(0, 1 / E), and do not use ``std``.
    """
    scaled = name in _SCALED
    plain: dict[Initializer, Callable[[Tensor], Tensor]] = {
        "normal": partial(nn.init.normal_, std=std),
        "truncated_normal": partial(nn.init.trunc_normal_, std=std, a=-2 * std, b=2 * std),
    }
    draw = {**plain, **_SCALED}[name]
    embeddings = {part.weight for part in module.modules() if isinstance(part, nn.Embedding)}
    for part in module.modules():
        if isinstance(part, nn.Embedding) and scaled:
            nn.init.normal_(part.weight, std=part.embedding_dim**-0.5)
        elif isinstance(part, nn.Linear | nn.Embedding) and not (scaled and part.weight in embeddings):
            draw(part.weight)
        elif isinstance(part, Experts):
            for stack in part.matrices:
                for matrix in stack.detach():
                    draw(matrix)
            for bias in part.biases:
                nn.init.zeros_(bias)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
