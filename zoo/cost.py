"""Exact parameter counts and forward FLOPs of the shared blocks, in closed form and without torch.

Each function mirrors the block of the same name in :mod:`zoo.nn`. A FLOP is one multiplication or one addition, so
a matrix product with m weights is 2 m FLOPs per token (Kaplan et al. 2020, section 2.1). Norms, activations and
softmax are not counted. Tests compare the counts with the real modules and with torch's own FLOP counter.

Costs add, and multiply by a layer count:

>>> hidden_size, context = 768, 1024
>>> block = 2 * layer_norm(hidden_size) + feed_forward(hidden_size, 4 * hidden_size)
>>> block += attention(hidden_size, num_heads=12, head_dim=64, context=context)
>>> tokens, positions = embedding(50257, hidden_size), embedding(context, hidden_size)
>>> (tokens + positions + 12 * block + layer_norm(hidden_size)).parameters
124439808
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "Cost",
    "attention",
    "convolution",
    "delta_rule",
    "disentangled_attention",
    "embedding",
    "feed_forward",
    "gated_feed_forward",
    "head",
    "latent_attention",
    "layer_norm",
    "linear",
    "mixture_of_experts",
    "product_key_memory",
    "recurrent",
    "rms_norm",
    "short_convolution",
    "span_attention",
    "state_space",
    "tied_linear",
    "window_attention",
]


@dataclass(frozen=True, slots=True)
class Cost:
    """Parameters, and forward FLOPs per token at full context length. Costs add, and multiply by a layer count."""

    parameters: int = 0
    flops: int = 0
    unused: int = 0
    """Parameters that a token does not use: those of the experts that it does not choose."""

    @property
    def active(self) -> int:
        """Parameters that a token uses."""
        return self.parameters - self.unused

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.parameters + other.parameters, self.flops + other.flops, self.unused + other.unused)

    def __mul__(self, count: int) -> Cost:
        return Cost(self.parameters * count, self.flops * count, self.unused * count)

    __rmul__ = __mul__


def linear(inputs: int, outputs: int, *, bias: bool = True) -> Cost:
    """A dense layer applied to every token."""
    return Cost(inputs * outputs + (outputs if bias else 0), 2 * inputs * outputs)


def tied_linear(inputs: int, outputs: int) -> Cost:
    """A dense layer that shares the weights of another module."""
    return Cost(0, 2 * inputs * outputs)


def convolution(inputs: int, outputs: int, kernel_size: int, *, bias: bool = True, groups: int = 1) -> Cost:
    """A convolution over the tokens: a dense layer on windows of ``kernel_size`` tokens.

    With ``groups``, each output reads the inputs of its group alone; with as many as inputs, it is a depthwise one.
    """
    weights = kernel_size * inputs * outputs // groups
    return Cost(weights + (outputs if bias else 0), 2 * weights)


def head(inputs: int, outputs: int, *, tied: bool, bias: bool = False) -> Cost:
    """The projection to the vocabulary, by default without a bias; ``tied`` shares the weights of the embedding."""
    return tied_linear(inputs, outputs) if tied else linear(inputs, outputs, bias=bias)


def embedding(rows: int, hidden_size: int) -> Cost:
    """A look-up table, without FLOPs."""
    return Cost(rows * hidden_size)


def layer_norm(hidden_size: int, *, bias: bool = True) -> Cost:
    """A norm with a weight and, by default, a bias."""
    return Cost((2 if bias else 1) * hidden_size)


def rms_norm(hidden_size: int) -> Cost:
    """A norm with a weight only."""
    return Cost(hidden_size)


def feed_forward(hidden_size: int, intermediate_size: int, *, bias: bool = True) -> Cost:
    """Two dense layers."""
    return linear(hidden_size, intermediate_size, bias=bias) + linear(intermediate_size, hidden_size, bias=bias)


def gated_feed_forward(hidden_size: int, intermediate_size: int, *, bias: bool = False) -> Cost:
    """Three dense layers; the product of two of them is not counted."""
    return linear(hidden_size, intermediate_size, bias=bias) + feed_forward(hidden_size, intermediate_size, bias=bias)


def mixture_of_experts(
    hidden_size: int, intermediate_size: int, *, num_experts: int, top_k: int, bias: bool = False
) -> Cost:
    """A router, and ``num_experts`` gated feed-forward networks, of which each token uses ``top_k``."""
    expert = gated_feed_forward(hidden_size, intermediate_size, bias=bias)
    unused = (num_experts - top_k) * Cost(expert.parameters, unused=expert.parameters)
    return linear(hidden_size, num_experts, bias=bias) + top_k * expert + unused


def state_space(
    hidden_size: int,
    width: int,
    *,
    head_dim: int,
    state_size: int,
    num_groups: int = 1,
    kernel_size: int = 4,
    bias: bool = False,
    convolution_bias: bool = True,
) -> Cost:
    """:class:`zoo.nn.StateSpaceMixer`. Its FLOPs are those of the dense layers, and of the recurrence step by step."""
    heads, channels = width // head_dim, width + 2 * num_groups * state_size
    return (
        linear(hidden_size, width + channels + heads, bias=bias)
        + convolution(channels, channels, kernel_size, groups=channels, bias=convolution_bias)
        + Cost(3 * heads, 5 * width * state_size)
        + rms_norm(width)
        + linear(width, hidden_size, bias=bias)
    )


def short_convolution(hidden_size: int, *, kernel_size: int = 3, bias: bool = False) -> Cost:
    """:class:`zoo.nn.ShortConvolution`. The products with the gates are not counted."""
    depthwise = convolution(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias)
    return 4 * linear(hidden_size, hidden_size, bias=bias) + depthwise


def delta_rule(
    hidden_size: int,
    num_heads: int,
    *,
    head_dim: int,
    num_key_heads: int,
    key_head_dim: int,
    kernel_size: int = 4,
) -> Cost:
    """:class:`zoo.nn.GatedDeltaNet`. Its FLOPs are those of the dense layers, and of the recurrence step by step."""
    keys, values = num_key_heads * key_head_dim, num_heads * head_dim
    channels = 2 * keys + values
    return (
        linear(hidden_size, channels + values + 2 * num_heads, bias=False)
        + convolution(channels, channels, kernel_size, groups=channels, bias=False)
        + Cost(2 * num_heads, 7 * values * key_head_dim)
        + rms_norm(head_dim)
        + linear(values, hidden_size, bias=False)
    )


def recurrent(inputs: int, hidden_size: int, *, gates: int) -> Cost:
    """One step of one direction of a recurrent layer with biases; a GRU has 3 gates, an LSTM 4."""
    return linear(inputs, gates * hidden_size) + linear(hidden_size, gates * hidden_size)


def attention(
    hidden_size: int,
    num_heads: int,
    *,
    head_dim: int,
    context: int,
    num_kv_heads: int | None = None,
    value_head_dim: int | None = None,
    output_size: int | None = None,
    bias: bool | Sequence[bool] = True,
    output_bias: bool | None = None,
    qk_norm: bool = False,
    output_gate: bool = False,
    joint_qk_norm: bool = False,
    sink: bool = False,
) -> Cost:
    """Four projections, optional norms and gate, and the products of one query with ``context`` keys and values.

    A sink is a parameter for each head, and is computed as one more key.
    """
    query_bias, key_bias, value_bias = (bias,) * 3 if isinstance(bias, bool) else bias
    num_kv_heads = num_kv_heads or num_heads
    value_head_dim = value_head_dim or head_dim
    scores = Cost(num_heads if sink else 0, 2 * (context + sink) * num_heads * (head_dim + value_head_dim))
    norms = (num_heads + num_kv_heads if joint_qk_norm else 2) * rms_norm(head_dim)
    return (
        linear(hidden_size, num_heads * head_dim, bias=query_bias)
        + linear(hidden_size, num_kv_heads * head_dim, bias=key_bias)
        + linear(hidden_size, num_kv_heads * value_head_dim, bias=value_bias)
        + linear(
            num_heads * value_head_dim,
            output_size or hidden_size,
            bias=query_bias if output_bias is None else output_bias,
        )
        + (linear(hidden_size, num_heads * value_head_dim, bias=query_bias) if output_gate else Cost())
        + (norms if qk_norm else Cost())
        + scores
    )


def latent_attention(
    hidden_size: int,
    num_heads: int,
    *,
    latent_size: int,
    head_dim: int,
    rotary_dim: int,
    value_head_dim: int,
    context: int,
    query_latent_size: int | None = None,
    bias: bool = False,
) -> Cost:
    """:class:`zoo.nn.LatentAttention` without a cache: keys and values of each token are computed once."""
    queries = num_heads * (head_dim + rotary_dim)
    query = linear(query_latent_size or hidden_size, queries, bias=False)
    if query_latent_size is not None:
        query += linear(hidden_size, query_latent_size, bias=bias) + rms_norm(query_latent_size)
    return (
        query
        + linear(hidden_size, latent_size + rotary_dim, bias=bias)
        + rms_norm(latent_size)
        + linear(latent_size, num_heads * (head_dim + value_head_dim), bias=False)
        + linear(num_heads * value_head_dim, hidden_size, bias=bias)
        + Cost(0, 2 * context * num_heads * (head_dim + rotary_dim + value_head_dim))
    )


def span_attention(
    hidden_size: int, num_heads: int, *, context: int, adaptive: bool = False, num_memories: int = 0
) -> Cost:
    """Attention without biases, with the products of one query and ``context`` distances, and persistent vectors."""
    head_dim = hidden_size // num_heads
    return (
        attention(hidden_size, num_heads, head_dim=head_dim, context=context + num_memories, bias=False)
        + Cost(0, 2 * context * hidden_size)
        + Cost(2 * num_memories * hidden_size)
        + Cost(num_heads if adaptive else 0)
    )


def window_attention(
    hidden_size: int,
    num_heads: int,
    *,
    window: int,
    bias: bool | Sequence[bool] = True,
    cosine: bool = False,
    continuous: bool = False,
    position_size: int = 512,
) -> Cost:
    """Attention to the positions of a window, with a table of biases of offsets, or ``continuous`` ones.

    These are computed once per batch by a network of ``position_size`` hidden numbers, which FLOPs leave out.
    """
    context, table = window**2, num_heads * (2 * window - 1) ** 2
    if continuous:
        table = (linear(2, position_size) + linear(position_size, num_heads, bias=False)).parameters
    plain = attention(
        hidden_size, num_heads, head_dim=hidden_size // num_heads, context=context, bias=bias, output_bias=True
    )
    return plain + Cost(table + (num_heads if cosine else 0))


def disentangled_attention(
    hidden_size: int, num_heads: int, *, context: int, rows: int, num_terms: int = 2, shared: bool = False
) -> Cost:
    """Attention with biases, and the products of queries or keys with ``rows`` distances for each term of positions.

    A projection of distances, which adds parameters unless it is ``shared``, runs once per batch: FLOPs leave it out.
    """
    projection = Cost(0 if shared else linear(hidden_size, hidden_size).parameters)
    products = Cost(0, 2 * rows * hidden_size)
    plain = attention(hidden_size, num_heads, head_dim=hidden_size // num_heads, context=context)
    return plain + num_terms * (projection + products)


def product_key_memory(hidden_size: int, *, num_keys: int, top_k: int, num_heads: int, query_size: int) -> Cost:
    """A normalised query, its products with two sets of half-keys, and a weighted sum of ``top_k`` values per head."""
    width = num_heads * query_size
    return (
        linear(hidden_size, width)
        + layer_norm(width)
        + Cost(width * num_keys, 2 * width * num_keys)
        + Cost(num_keys**2 * hidden_size, 2 * num_heads * top_k * hidden_size)
    )
