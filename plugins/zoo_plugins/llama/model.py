"""Llama: the causal decoder of Touvron et al. 2023 (section 2.2), and those that differ from it in settings.

Mistral (Jiang et al. 2023) adds grouped-query attention and a sliding window, Qwen 2 biases on queries, keys and
values, and Qwen 3 norms on queries and keys. Gemma (Gemma Team 2024) scales the embeddings and adds 1 to the weights of
norms; Gemma 2 normalises before and after each sub-layer and limits scores and logits; Gemma 3 has frequencies of their
own in layers with a window. Phi-3 may rotate a part of each head, and SmolLM3 does not rotate in every layer. OLMo 2
(OLMo Team 2025) normalises only the outputs of sub-layers; Granite (Granite Team 2024) multiplies embeddings, outputs
and logits by constants.

B batch, H heads, T tokens of this call, S tokens including those before, E hidden size, R rotated elements of a head,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.nn import (
    Cache,
    GatedFeedForward,
    LayerCache,
    MultiHeadAttention,
    OffsetRMSNorm,
    RotaryPositions,
    Rotation,
    build_mask,
    initialize,
    interpolate_frequencies,
    llama3_rope_scaling,
    positions_of,
    soft_cap,
    stretched_frequencies,
    yarn_frequencies,
)
from zoo_plugins.gpt.heads import add_head, answer
from zoo_plugins.llama.config import LlamaConfig


class LlamaBlock(nn.Module):
    """Attention, then gated feed-forward, each normalised before, after or both, and added."""

    def __init__(self, c: LlamaConfig, layer: int) -> None:
        super().__init__()
        norm = self.norm_of(c)
        self.norm_1 = norm(c.hidden_size) if c.pre_norms else nn.Identity()
        self.attention = MultiHeadAttention(
            c.hidden_size,
            c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            bias=c.attention_bias,
            output_bias=c.attention_output_bias,
            scale=c.attention_scale,
            softcap=c.attention_softcap,
            qk_norm=norm if c.qk_norm else None,
            joint_qk_norm=c.joint_qk_norm,
            dropout=c.dropout,
            sink=c.attention_sinks,
        )
        self.norm_2 = norm(c.hidden_size) if c.pre_norms else nn.Identity()
        self.mlp = self.build_mlp(c, layer)
        self.post_norm_1 = norm(c.hidden_size) if c.post_norms else nn.Identity()
        self.post_norm_2 = norm(c.hidden_size) if c.post_norms else nn.Identity()
        self.residual_multiplier = c.residual_multiplier

    @staticmethod
    def norm_of(c: Any) -> Callable[[int], nn.Module]:
        """Return the constructor of the configured norm, given a width."""
        return partial(OffsetRMSNorm if c.norm_offset else nn.RMSNorm, eps=c.norm_eps)

    def build_mlp(self, c: Any, layer: int) -> nn.Module:
        """Return the feed-forward network of a layer."""
        return GatedFeedForward(c.hidden_size, c.intermediate_size, activation=c.activation, bias=c.mlp_bias)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        mask: Tensor | None,
        cache: LayerCache | None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """(B, T, E) -> (B, T, E). ``bias`` is added to the scores of attention."""
        attended = self.attention(self.norm_1(x), rotation=rotation, mask=mask, bias=bias, cache=cache)
        x = x + scaled(self.post_norm_1(attended), self.residual_multiplier)
        return x + scaled(self.post_norm_2(self.mlp(self.norm_2(x))), self.residual_multiplier)


class Llama(nn.Module):
    """Token embeddings, blocks with rotary positions, a final norm and the head."""

    block = LlamaBlock
    head: nn.Module
    """The language-model head, of models that predict tokens."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.config = c
        self.token_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.positions = RotaryPositions(c.turned_size, c.rope_theta, **rotary_options(c))
        if c.local_rope_theta is not None:
            self.local_positions = RotaryPositions(c.turned_size, c.local_rope_theta)
        self.blocks = nn.ModuleList(self.block(c, layer) for layer in range(c.num_layers))
        self.norm = self.block.norm_of(c)(c.hidden_size)
        add_head(self, c, self.token_embedding, tied=c.tie_embeddings, bias=c.head_bias)
        initialize(self, "normal", std=0.02)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Return the output of the configured task, or several by name: see :func:`zoo_plugins.gpt.heads.answer`.

        Args:
            input_ids: (B, T).
            attention_mask: (B, S), 1 for a token and 0 for padding, the past included.
            past_key_values: keys and values of earlier calls; extended in place.
        """
        x = self.read(self.embed(input_ids), attention_mask, past_key_values)
        if self.config.predicts_tokens:
            return self.next_tokens(x)
        return answer(self, self.config, x, input_ids, attention_mask, self.config.pad_token_id)

    def read(self, x: Tensor, attention_mask: Tensor | None, past_key_values: Cache | None) -> Tensor:
        """Return the states after the last norm, (B, T, E); arguments as of :meth:`forward`.

        Args:
            x: embeddings, (B, T, E).
            attention_mask: (B, S).
            past_key_values: extended in place.
        """
        length = x.shape[1]
        total = length + (past_key_values.length if past_key_values is not None else 0)
        positions = positions_of(length, total, padding=attention_mask, device=x.device)
        windows = [self.config.window(layer) for layer in range(len(self.blocks))]
        rotations = self._rotations(windows, positions, x.dtype)
        masks = {}
        for window in dict.fromkeys(windows):
            mask = build_mask(length, total, padding=attention_mask, causal=True, window=window, device=x.device)
            first = past_key_values[windows.index(window)] if past_key_values is not None else None
            masks[window] = mask if first is None else first.seen(mask, length)
        bias = self.score_bias(total, x)
        for layer, (block, window) in enumerate(zip(self.blocks, windows, strict=True)):
            cache = past_key_values[layer] if past_key_values is not None else None
            x = block(x, rotations[window] if self.config.rotates(layer) else None, masks[window], cache, bias)
        return self.norm(x)

    def next_tokens(self, x: Tensor) -> Tensor:
        """Return the logits of the next tokens, (B, T, E) -> (B, T, V)."""
        logits = scaled(self.head(x), self.config.logit_multiplier)
        return logits if self.config.logit_softcap is None else soft_cap(logits, self.config.logit_softcap)

    def embed(self, input_ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, E)."""
        x = self.token_embedding(input_ids)
        if self.config.scale_embeddings:  # by a factor in the model's dtype, as in the training of published weights
            x = x * torch.tensor(self.config.hidden_size**0.5, dtype=torch.float32, device=x.device).to(x.dtype)
        return scaled(x, self.config.embedding_multiplier)

    def score_bias(self, total: int, x: Tensor) -> Tensor | None:
        """Return what is added to the scores of keys at ``total`` positions, (1, H, 1, S) in the dtype of ``x``."""
        return None

    def _rotations(
        self, windows: Sequence[int | None], positions: Tensor, dtype: torch.dtype
    ) -> Mapping[int | None, Rotation]:
        """Return the rotation of each window's layers, a pair of (B or 1, 1, T, R)."""
        if self.config.local_rope_theta is None:
            return dict.fromkeys(windows, self.positions(positions, dtype))
        kinds = {window: self.positions if window is None else self.local_positions for window in windows}
        by_kind = {kind: kind(positions, dtype) for kind in dict.fromkeys(kinds.values())}
        return {window: by_kind[kind] for window, kind in kinds.items()}


def scaled(x: Tensor, factor: float) -> Tensor:
    """Multiply a tensor by a factor, unless it is 1."""
    return x if factor == 1 else x * factor


def rotary_options(c: Any) -> dict[str, Any]:
    """Return the options of :class:`RotaryPositions` for the configured scaling, which has the fields of Llama's."""
    factor, length = c.rope_factor, c.rope_original_length or c.max_seq_len
    options: dict[str, Any] = {"magnitude": c.rope_attention_factor}
    match c.rope_scaling:
        case "linear":
            options["scale"] = partial(interpolate_frequencies, factor=factor)
        case "llama3":
            low, high = c.rope_low_freq_factor, c.rope_high_freq_factor
            options["scale"] = partial(llama3_rope_scaling, factor=factor, low=low, high=high, original_length=length)
        case "yarn":
            options["from_periods"] = partial(
                yarn_frequencies,
                theta=c.rope_theta,
                factor=factor,
                original_length=length,
                fast=c.rope_beta_fast,
                slow=c.rope_beta_slow,
                truncate=c.rope_truncate,
            )
        case "longrope":
            options["from_periods"] = partial(stretched_frequencies, factors=c.rope_short_factors)
    return options
