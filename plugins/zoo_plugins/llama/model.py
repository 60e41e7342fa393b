"""Llama: the causal decoder of Touvron et al. 2023 (section 2.2); also Mistral and Qwen.

Mistral (Jiang et al. 2023) adds grouped-query attention and a sliding window, Qwen 2 biases on queries, keys and
values, and Qwen 3 norms on queries and keys.

B batch, T tokens of this call, S tokens including those before, E hidden size, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from zoo.nn import (
    Cache,
    GatedFeedForward,
    LayerCache,
    MultiHeadAttention,
    RotaryPositions,
    Rotation,
    build_mask,
    init_normal,
    interpolate_frequencies,
    llama3_rope_scaling,
    positions_of,
)
from zoo_plugins.gpt.heads import add_head, answer
from zoo_plugins.llama.config import LlamaConfig


class LlamaBlock(nn.Module):
    """Attention, then gated feed-forward, each normalised before and added after."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.attention = MultiHeadAttention(
            c.hidden_size,
            c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            bias=c.attention_bias,
            output_bias=c.attention_output_bias,
            qk_norm=c.norm_eps if c.qk_norm else None,
            dropout=c.dropout,
        )
        self.norm_2 = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.mlp = GatedFeedForward(c.hidden_size, c.intermediate_size, activation=c.activation, bias=c.mlp_bias)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        x = x + self.attention(self.norm_1(x), rotation=rotation, mask=mask, cache=cache)
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    """Token embeddings, blocks with rotary positions, a final norm and the head."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.config = c
        self.token_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.positions = RotaryPositions(c.key_size, c.rope_theta, scale=_frequency_scale(c))
        self.blocks = nn.ModuleList(LlamaBlock(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        add_head(self, c, self.token_embedding, tied=c.tie_embeddings)
        init_normal(self, std=0.02)

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
        length = input_ids.shape[1]
        total = length + (past_key_values.length if past_key_values is not None else 0)
        x = self.token_embedding(input_ids)  # (B, T, E)
        positions = positions_of(length, total, padding=attention_mask, device=input_ids.device)
        rotation = self.positions(positions, x.dtype)  # a pair of (B or 1, 1, T, D)
        windows = [self.config.window(layer) for layer in range(len(self.blocks))]
        masks = {
            window: build_mask(
                length, total, padding=attention_mask, causal=True, window=window, device=input_ids.device
            )
            for window in dict.fromkeys(windows)
        }
        for layer, (block, window) in enumerate(zip(self.blocks, windows, strict=True)):
            x = block(x, rotation, masks[window], past_key_values[layer] if past_key_values is not None else None)
        return answer(self, self.config, self.norm(x), input_ids, attention_mask, self.config.pad_token_id)


def _frequency_scale(c: LlamaConfig) -> Callable[[Tensor], Tensor] | None:
    """Return the scaling of rotary frequencies that the configuration selects, or None."""
    if c.rope_scaling == "linear":
        return partial(interpolate_frequencies, factor=c.rope_factor)
    if c.rope_scaling == "llama3":
        return partial(
            llama3_rope_scaling,
            factor=c.rope_factor,
            low=c.rope_low_freq_factor,
            high=c.rope_high_freq_factor,
            original_length=c.rope_original_length or c.max_seq_len,
        )
    return None
