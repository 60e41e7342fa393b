"""Configuration, graphs and cost of Llama and its relatives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Cost, Graph, cost, shortest_period
from zoo_plugins.gpt.tasks import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Configuration of Llama, Mistral, Qwen, Gemma, OLMo, Granite, GLM and their kin. The defaults are Llama 2 7B."""

    vocab_size: int = 32000
    """Vocabulary size."""
    max_seq_len: int = 4096
    """Maximum context length."""
    hidden_size: int = 4096
    """Width of the residual stream."""
    num_layers: int = 32
    """Number of blocks."""
    num_heads: int = 32
    """Query heads per block."""
    num_kv_heads: int | None = None
    """Key-value heads per block; ``num_heads`` by default, fewer for grouped-query attention."""
    head_dim: int | None = None
    """Width of one head; ``hidden_size`` / ``num_heads`` by default."""
    intermediate_size: int = 11008
    """Hidden width of the feed-forward network."""
    activation: Activation = "silu"
    """Activation of the gate in the feed-forward network."""
    norm_eps: float = 1e-5
    """Epsilon of the RMS norms."""
    norm_offset: bool = False
    """Whether 1 is added to the weights of the norms, which then start at 0 (Gemma)."""
    pre_norms: bool = True
    """Whether the input of each sub-layer is normalised; OLMo 2 has norms of its output alone."""
    post_norms: bool = False
    """Whether the output of each sub-layer is normalised too, before it is added (Gemma 2)."""
    scale_embeddings: bool = False
    """Whether token embeddings are multiplied by the square root of ``hidden_size`` (Gemma)."""
    embedding_multiplier: float = 1.0
    """Factor of the token embeddings (Granite)."""
    residual_multiplier: float = 1.0
    """Factor of the output of each sub-layer, before it is added (Granite)."""
    logit_multiplier: float = 1.0
    """Factor of the logits of text-generation (Granite, Cohere)."""
    rotary_dim: int | None = None
    """Number of leading elements of each head that are rotated; ``head_dim`` by default."""
    rope_layers: tuple[bool, ...] = (True,)
    """Whether each layer rotates queries and keys. The pattern repeats over the layers (SmolLM3)."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    local_rope_theta: float | None = None
    """Base of the rotary frequencies in layers with a window, which are then not scaled (Gemma 3); by default these
    have the frequencies of the other layers."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn", "dynamic", "longrope"] = "none"
    """Scaling of rotary frequencies: none, all by ``1 / rope_factor`` ("linear"), low ones only ("llama3" and "yarn"),
    or each by ``rope_short_factors`` ("longrope"). "dynamic" scales only in texts longer than ``rope_original_length``,
    and "longrope" has other factors there. Keys in the cache would have to change, so such texts are not supported."""
    rope_factor: float = 1.0
    """Context extension factor relative to the original training length."""
    rope_low_freq_factor: float = 1.0
    """For "llama3": frequencies with fewer turns than this within ``rope_original_length`` are scaled."""
    rope_high_freq_factor: float = 4.0
    """For "llama3": frequencies with more turns than this are unchanged; those in between are interpolated."""
    rope_original_length: int | None = None
    """Context length of the original training; ``max_seq_len`` by default."""
    rope_attention_factor: float | None = None
    """Factor of rotated queries and keys; by default that of the paper for "yarn" and "longrope", and 1 for others."""
    rope_beta_fast: float = 32.0
    """For "yarn": frequencies with more turns than this within ``rope_original_length`` are unchanged."""
    rope_beta_slow: float = 1.0
    """For "yarn": frequencies with fewer turns than this are scaled; those in between are interpolated."""
    rope_truncate: bool = True
    """For "yarn": whether the interpolation begins and ends at whole numbers of frequencies."""
    rope_short_factors: tuple[float, ...] = ()
    """For "longrope": divisors of the frequencies, one for each."""
    rope_long_factors: tuple[float, ...] = ()
    """For "longrope": divisors in texts longer than ``rope_original_length``, which only other libraries use."""
    attention_bias: bool = False
    """Whether the query, key and value projections have biases."""
    attention_output_bias: bool = False
    """Whether the output projection of attention has a bias."""
    mlp_bias: bool = False
    """Whether the feed-forward network has biases."""
    qk_norm: bool = False
    """Whether queries and keys are normalised (RMS norm) before the rotation."""
    joint_qk_norm: bool = False
    """Whether these norms are over all heads together, rather than over each (OLMoE)."""
    attention_scale: float | None = None
    """Factor of the attention scores; 1 / sqrt(``head_dim``) by default."""
    attention_softcap: float | None = None
    """Limit c of the scaled scores s, as c tanh(s / c); none by default (Gemma 2)."""
    attention_sinks: bool = False
    """Whether each head has a learned score of a key without a value, so that it may attend to nothing (gpt-oss)."""
    logit_softcap: float | None = None
    """Limit of the logits of text-generation, like that of scores (Gemma 2)."""
    sliding_windows: tuple[int, ...] = (0,)
    """Sliding-window size of each layer, in keys, the query's own included; 0 for no window. The pattern repeats over
    the layers."""
    dropout: float = 0.0
    """Dropout on attention weights, during training."""
    tie_embeddings: bool = False
    """Whether the head shares the token embedding."""
    head_bias: bool = False
    """Whether the head of text-generation has a bias (Phi)."""
    bos_token_id: int | None = None
    """Token that begins a text."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Tokens that end a text."""
    pad_token_id: int | None = None
    """Token that pads shorter texts; the mask excludes it."""

    def __post_init__(self) -> None:
        self.check_classes(head=self.task == "text-classification")
        self.check_embedding()
        self.default("num_kv_heads", self.num_heads)
        self.default("rope_original_length", self.max_seq_len)
        self.require_positive(
            "vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "intermediate_size", "norm_eps", "rope_theta", "rope_factor", "rope_low_freq_factor",
            "rope_original_length", "rope_beta_fast", "rope_beta_slow", "local_rope_theta", "attention_scale",
            "attention_softcap", "logit_softcap", "embedding_multiplier", "residual_multiplier", "logit_multiplier",
        )  # fmt: skip
        self.require_probability("dropout")
        if self.joint_qk_norm and not self.qk_norm:
            raise ValueError("joint_qk_norm needs qk_norm")
        if self.head_bias and self.tie_embeddings:
            raise ValueError("a head that shares the token embedding has no bias: head_bias or tie_embeddings")
        if not self.pre_norms and not self.post_norms:
            raise ValueError("pre_norms False needs post_norms")
        self.require_divisible("num_heads", "num_kv_heads")
        if self.head_dim is None:
            self.require_divisible("hidden_size", "num_heads")
            self.default("head_dim", self.hidden_size // self.num_heads)
        self.default("rotary_dim", self.head_dim)
        if self.turned_size % 2 or not 0 < self.turned_size <= self.key_size:
            if self.rotary_dim == self.head_dim:
                raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
            raise ValueError(f"rotary_dim must be even and at most head_dim {self.head_dim}, got {self.rotary_dim}")
        self._check_scaling()
        if self.rope_high_freq_factor <= self.rope_low_freq_factor:
            raise ValueError(
                f"rope_high_freq_factor {self.rope_high_freq_factor} must exceed "
                f"rope_low_freq_factor {self.rope_low_freq_factor}"
            )
        if not self.sliding_windows or min(self.sliding_windows) < 0:
            raise ValueError(f"sliding_windows must be one or more non-negative numbers, got {self.sliding_windows}")
        if not self.rope_layers:
            raise ValueError("rope_layers must be one or more booleans, got ()")
        for name in ("sliding_windows", "rope_layers"):
            pattern = getattr(self, name)
            layers = [pattern[layer % len(pattern)] for layer in range(self.num_layers)]
            object.__setattr__(self, name, shortest_period(layers))

    def _check_scaling(self) -> None:
        """Check how rotary frequencies are scaled, and set ``rope_attention_factor``."""
        original, factor = self.rope_original_length or 0, self.rope_factor
        if self.rope_scaling in ("dynamic", "longrope") and self.max_seq_len > original:
            raise ValueError(
                f"max_seq_len {self.max_seq_len} exceeds rope_original_length {original}, beyond which the frequencies "
                f"of {self.rope_scaling!r} depend on the length of the text"
            )
        if self.rope_scaling == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_theta must exceed 1 for 'yarn', got {self.rope_theta}")
        for name in ("rope_short_factors", "rope_long_factors") if self.rope_scaling == "longrope" else ():
            factors = getattr(self, name)
            if len(factors) != self.turned_size // 2 or min(factors, default=0) <= 0:
                raise ValueError(f"{name} must be {self.turned_size // 2} positive numbers, got {factors}")
        default = 1.0
        if self.rope_scaling == "yarn" and factor > 1:  # Peng et al. 2023, equation 22
            default = 0.1 * math.log(factor) + 1
        if self.rope_scaling == "longrope" and factor > 1 and original > 1:  # Ding et al. 2024, section 3.3
            default = math.sqrt(1 + math.log(factor) / math.log(original))
        self.default("rope_attention_factor", default)
        self.require_positive("rope_attention_factor")

    @property
    def key_size(self) -> int:
        """``head_dim``, set by ``__post_init__``."""
        return self.head_dim or 0

    @property
    def turned_size(self) -> int:
        """``rotary_dim``, set by ``__post_init__``."""
        return self.rotary_dim or 0

    def rotates(self, layer: int) -> bool:
        """Whether this layer rotates queries and keys."""
        return self.rope_layers[layer % len(self.rope_layers)]

    def window(self, layer: int) -> int | None:
        """Return the maximum number of keys per query in this layer; None for no limit."""
        return self.sliding_windows[layer % len(self.sliding_windows)] or None

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph, for prefill and decoding or for a text as a whole."""
        graph = self.decoder_graph(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            head_dim=self.key_size,
            max_seq_len=self.max_seq_len,
            sliding_windows=self.sliding_windows,
            sinks=self.attention_sinks,
        )
        return (graph,)

    @property
    def norms_per_block(self) -> int:
        """Number of norms over the residual stream in a block."""
        return 2 * (self.pre_norms + self.post_norms)

    def norm_cost(self, width: int) -> Cost:
        """Return the cost of a norm over so many numbers."""
        return cost.rms_norm(width)

    def feed_forward_cost(self, layer: int) -> Cost:
        """Return the cost of one layer's feed-forward network."""
        return cost.gated_feed_forward(self.hidden_size, self.intermediate_size, bias=self.mlp_bias)

    def cost(self) -> Cost:
        """Return the closed-form cost, of one call. Windows save no work in it: scores are computed before masking."""
        block = self.norms_per_block * self.norm_cost(self.hidden_size) + cost.attention(
            self.hidden_size,
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.key_size,
            context=self.max_seq_len,
            bias=self.attention_bias,
            output_bias=self.attention_output_bias,
            qk_norm=self.qk_norm,
            joint_qk_norm=self.joint_qk_norm,
            sink=self.attention_sinks,
        )
        return (
            cost.embedding(self.vocab_size, self.hidden_size)
            + self.num_layers * block
            + sum(map(self.feed_forward_cost, range(self.num_layers)), start=Cost())
            + self.norm_cost(self.hidden_size)
            + self.head_cost(self.hidden_size, self.vocab_size, tied=self.tie_embeddings, bias=self.head_bias)
        )
