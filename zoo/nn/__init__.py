"""The shared blocks. Shape letters: B batch, T queries, S keys, H heads, K key-value heads, D head size, E hidden."""

from zoo.nn.attention import MultiHeadAttention, attention_weights, scaled_dot_product_attention
from zoo.nn.cache import Cache, LayerCache
from zoo.nn.feed_forward import FeedForward, GatedFeedForward
from zoo.nn.graphs import GraphModule, call_graph
from zoo.nn.init import init_normal, init_truncated_normal, init_xavier, tied_linear
from zoo.nn.linear_attention import LinearAttention
from zoo.nn.linformer import LinformerAttention
from zoo.nn.longformer import LongformerAttention
from zoo.nn.masks import build_mask, positions_of
from zoo.nn.performer import PerformerAttention, orthogonal_features
from zoo.nn.pooling import normalize, pool
from zoo.nn.positions import (
    RotaryPositions,
    SinusoidalPositions,
    interpolate_frequencies,
    interpolate_low_frequencies,
    rotate,
    sinusoids,
)
from zoo.nn.relative import RelativePositionBias, relative_buckets
from zoo.nn.residual import Residual

__all__ = [
    "Cache",
    "FeedForward",
    "GatedFeedForward",
    "GraphModule",
    "LayerCache",
    "LinearAttention",
    "LinformerAttention",
    "LongformerAttention",
    "MultiHeadAttention",
    "PerformerAttention",
    "RelativePositionBias",
    "Residual",
    "RotaryPositions",
    "SinusoidalPositions",
    "attention_weights",
    "build_mask",
    "call_graph",
    "init_normal",
    "init_truncated_normal",
    "init_xavier",
    "interpolate_frequencies",
    "interpolate_low_frequencies",
    "normalize",
    "orthogonal_features",
    "pool",
    "positions_of",
    "relative_buckets",
    "rotate",
    "scaled_dot_product_attention",
    "sinusoids",
    "tied_linear",
]
