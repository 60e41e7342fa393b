"""The shared blocks. Shape letters: B batch, T queries, S keys, H heads, K key-value heads, D head size, E hidden."""

from zoo.nn.additive import AdditiveAttention
from zoo.nn.attention import MultiHeadAttention, attention_weights, scaled_dot_product_attention, soft_cap
from zoo.nn.cache import Cache, LayerCache, LayerStates
from zoo.nn.chunked import LocalAttention, LSHAttention
from zoo.nn.convolution import CausalConvolution, ShortConvolution
from zoo.nn.delta_rule import GatedDeltaNet, delta_rule, invert_unit_triangular
from zoo.nn.disentangled import DisentangledAttention, DistanceTable, PositionTerm, distance_rows
from zoo.nn.encoder_attention import EncoderAttention
from zoo.nn.experts import (
    Experts,
    GroupedRouter,
    MixtureOfExperts,
    Route,
    TopKRouter,
    load_balancing_loss,
    mix_experts,
    recorded_routes,
)
from zoo.nn.feed_forward import ACTIVATIONS, FeedForward, GatedFeedForward
from zoo.nn.graphs import GraphModule, call_graph
from zoo.nn.image_features import insert_features, number_features
from zoo.nn.init import initialize, tied_linear
from zoo.nn.latent_attention import LatentAttention
from zoo.nn.linformer import LinformerAttention
from zoo.nn.log_mel import LogMel
from zoo.nn.longformer import LongformerAttention
from zoo.nn.loss import label_smoothing_loss
from zoo.nn.masks import build_mask, positions_of
from zoo.nn.norms import AnnotatedLayerNorm, FrozenBatchNorm, OffsetLayerNorm, OffsetRMSNorm, build_norm
from zoo.nn.performer import PerformerAttention, orthogonal_features
from zoo.nn.pooling import EmbeddingHead, normalize, pool
from zoo.nn.positions import (
    RotaryPositions,
    Rotation,
    SinusoidalPositions,
    TensorToTensorPositions,
    apply_rotary,
    interpolate_frequencies,
    llama3_rope_scaling,
    resize_grid,
    sinusoids,
    stretched_frequencies,
    truncate_positions,
    yarn_frequencies,
)
from zoo.nn.product_key_memory import ProductKeyMemory
from zoo.nn.recording import (
    AttentionScores,
    Recorded,
    cropped_attentions,
    is_recording,
    mix_values,
    record_attention,
    recorded_attentions,
    recorded_scores,
    unrecorded_attentions,
)
from zoo.nn.recurrent import RecurrentState, run_packed, run_padded, scan_steps
from zoo.nn.relative import LinearBiases, RelativePositionBias, relative_buckets
from zoo.nn.residual import LayerScale, Residual
from zoo.nn.reversible import ReversibleBlock, run_reversible
from zoo.nn.sink import add_sink, attend_to_sink
from zoo.nn.span_attention import AdaptiveSpan, SpanAttention, distances_of
from zoo.nn.state_space import GatedRMSNorm, StateSpaceMixer, segment_sums, state_space
from zoo.nn.window_attention import ContinuousOffsetBias, OffsetBias, PatchMerging, WindowAttention

__all__ = [
    "ACTIVATIONS",
    "AdaptiveSpan",
    "AdditiveAttention",
    "AnnotatedLayerNorm",
    "AttentionScores",
    "Cache",
    "CausalConvolution",
    "ContinuousOffsetBias",
    "DisentangledAttention",
    "DistanceTable",
    "EmbeddingHead",
    "EncoderAttention",
    "Experts",
    "FeedForward",
    "FrozenBatchNorm",
    "GatedDeltaNet",
    "GatedFeedForward",
    "GatedRMSNorm",
    "GraphModule",
    "GroupedRouter",
    "LSHAttention",
    "LatentAttention",
    "LayerCache",
    "LayerScale",
    "LayerStates",
    "LinearBiases",
    "LinformerAttention",
    "LocalAttention",
    "LogMel",
    "LongformerAttention",
    "MixtureOfExperts",
    "MultiHeadAttention",
    "OffsetBias",
    "OffsetLayerNorm",
    "OffsetRMSNorm",
    "PatchMerging",
    "PerformerAttention",
    "PositionTerm",
    "ProductKeyMemory",
    "Recorded",
    "RecurrentState",
    "RelativePositionBias",
    "Residual",
    "ReversibleBlock",
    "RotaryPositions",
    "Rotation",
    "Route",
    "ShortConvolution",
    "SinusoidalPositions",
    "SpanAttention",
    "StateSpaceMixer",
    "TensorToTensorPositions",
    "TopKRouter",
    "WindowAttention",
    "add_sink",
    "apply_rotary",
    "attend_to_sink",
    "attention_weights",
    "build_mask",
    "build_norm",
    "call_graph",
    "cropped_attentions",
    "delta_rule",
    "distance_rows",
    "distances_of",
    "initialize",
    "insert_features",
    "interpolate_frequencies",
    "invert_unit_triangular",
    "is_recording",
    "label_smoothing_loss",
    "llama3_rope_scaling",
    "load_balancing_loss",
    "mix_experts",
    "mix_values",
    "normalize",
    "number_features",
    "orthogonal_features",
    "pool",
    "positions_of",
    "record_attention",
    "recorded_attentions",
    "recorded_routes",
    "recorded_scores",
    "relative_buckets",
    "resize_grid",
    "run_packed",
    "run_padded",
    "run_reversible",
    "scaled_dot_product_attention",
    "scan_steps",
    "segment_sums",
    "sinusoids",
    "soft_cap",
    "state_space",
    "stretched_frequencies",
    "tied_linear",
    "truncate_positions",
    "unrecorded_attentions",
    "yarn_frequencies",
]
