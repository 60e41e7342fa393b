"""Whisper (Radford et al. 2022), section 2.2: a Transformer that reads a log-mel spectrogram and writes text.

B batch, S samples, F frames, M mel bins, N positions of the encoder, T tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn import (
    Cache,
    FeedForward,
    LayerCache,
    LogMel,
    MultiHeadAttention,
    TensorToTensorPositions,
    build_mask,
    initialize,
    positions_of,
    tied_linear,
    truncate_positions,
)
from zoo_plugins.whisper.config import ATTENTION_BIASES, WhisperConfig


def norm(c: WhisperConfig) -> nn.LayerNorm:
    """The norm before each sub-layer, and after the last block."""
    return nn.LayerNorm(c.hidden_size, eps=c.norm_eps)


def attention(c: WhisperConfig, heads: int | None) -> MultiHeadAttention:
    """Attention whose keys have no bias."""
    return MultiHeadAttention(c.hidden_size, heads or c.num_heads, bias=ATTENTION_BIASES, dropout=c.dropout)


def feed_forward(c: WhisperConfig, width: int | None) -> FeedForward:
    """A feed-forward network of a hidden width."""
    return FeedForward(c.hidden_size, width or c.hidden_size, activation=c.activation)


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward, each a pre-norm residual sub-layer."""

    def __init__(self, c: WhisperConfig) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = norm(c), norm(c)
        self.attention, self.mlp = attention(c, c.num_heads), feed_forward(c, c.intermediate_size)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class DecoderBlock(nn.Module):
    """Causal self-attention, cross-attention, then feed-forward, each a pre-norm residual sub-layer."""

    def __init__(self, c: WhisperConfig) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3 = norm(c), norm(c), norm(c)
        self.attention, self.cross = attention(c, c.num_decoder_heads), attention(c, c.num_decoder_heads)
        self.mlp = feed_forward(c, c.decoder_intermediate_size)
        self.dropout = nn.Dropout(c.dropout)

    def forward(
        self, x: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        x = x + self.dropout(self.attention(self.norm_1(x), mask=mask, cache=cache))
        x = x + self.dropout(self.cross(self.norm_2(x), memory=memory))
        return x + self.dropout(self.mlp(self.norm_3(x)))


class Whisper(nn.Module):
    """Spectrogram, convolutions, encoder, decoder and the projection to the vocabulary (figure 1)."""

    position_tensors = ("encoder_positions.weight", "decoder_positions.weight")

    def __init__(self, c: WhisperConfig) -> None:
        super().__init__()
        self.config = c
        if c.input == "waveform":
            self.log_mel = LogMel(c.num_mel_bins)
        self.convolution_1 = nn.Conv1d(c.num_mel_bins, c.hidden_size, 3, padding=1)
        self.convolution_2 = nn.Conv1d(c.hidden_size, c.hidden_size, 3, stride=2, padding=1)
        self.encoder_positions = nn.Embedding(c.max_source_positions, c.hidden_size)
        self.encoder = nn.ModuleList(EncoderBlock(c) for _ in range(c.num_layers))
        self.encoder_norm = norm(c)
        self.token_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.decoder_positions = nn.Embedding(c.max_seq_len, c.hidden_size)
        self.decoder = nn.ModuleList(DecoderBlock(c) for _ in range(c.num_decoder_layers or c.num_layers))
        self.decoder_norm = norm(c)
        self.head = (
            tied_linear(self.token_embedding)
            if c.tie_embeddings
            else nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        )
        self.dropout = nn.Dropout(c.dropout)
        initialize(self, "normal")
        self.init_positions()

    def init_positions(self) -> None:
        """Set the positions of the encoder to sinusoids, all sines first, which are not trained."""
        table = self.encoder_positions.weight.requires_grad_(False)
        places = torch.arange(len(table), device=table.device)
        with torch.no_grad():
            table.copy_(TensorToTensorPositions(self.config.hidden_size)(places, table.dtype))

    def encode(self, waveform: Tensor) -> dict[str, Tensor | Cache]:
        """Encode samples (B, S), S a multiple of 320; see :meth:`encode_features`."""
        return self.encode_features(self.log_mel(waveform))

    def encode_features(self, input_features: Tensor) -> dict[str, Tensor | Cache]:
        """Encode a spectrogram.

        Args:
            input_features: (B, M, F), F even.

        Returns:
            ``last_hidden_state`` (B, N, E) with N = F / 2, and ``cross_key_values``, its keys and values for each
            decoder block.
        """
        x = F.gelu(self.convolution_1(input_features))
        x = F.gelu(self.convolution_2(x)).transpose(1, 2)  # (B, E, N) -> (B, N, E)
        x = self.dropout(x + self.encoder_positions(torch.arange(x.shape[1], device=x.device)))
        for block in self.encoder:
            x = block(x)
        x = self.encoder_norm(x)
        cross = Cache(block.cross.keys_values(x) for block in self.decoder if isinstance(block, DecoderBlock))
        return {"last_hidden_state": x, "cross_key_values": cross}

    def decode(
        self,
        decoder_input_ids: Tensor,
        cross_key_values: Cache,
        decoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """Return the logits of the next token.

        Args:
            decoder_input_ids: (B, T).
            cross_key_values: from :meth:`encode`.
            decoder_attention_mask: (B, past + T), 1 for a token and 0 for padding.
            past_key_values: keys and values of earlier calls; extended in place.

        Returns:
            (B, T, V).
        """
        length, device = decoder_input_ids.shape[1], decoder_input_ids.device
        total = length + (past_key_values.length if past_key_values is not None else 0)
        mask = build_mask(length, total, padding=decoder_attention_mask, causal=True, device=device)
        places = positions_of(length, total, padding=decoder_attention_mask, device=device)
        x = self.dropout(self.token_embedding(decoder_input_ids) + self.decoder_positions(places))
        for layer, (block, memory) in enumerate(zip(self.decoder, cross_key_values.pairs(), strict=True)):
            x = block(x, memory, mask, past_key_values[layer] if past_key_values is not None else None)
        return self.head(self.decoder_norm(x))

    def forward(
        self,
        waveform: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        *,
        input_features: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor | Cache]:
        """Return the logits (B, T, V) for sound and prefixes of texts (B, T), as in training.

        The sound is a ``waveform`` (B, S) or ``input_features`` (B, M, F). Without texts, return what
        :meth:`encode_features` does.

        Raises ``ValueError`` unless exactly one of the two is given.
        """
        if waveform is not None and input_features is None:
            input_features = self.log_mel(waveform)
        elif waveform is not None or input_features is None:
            raise ValueError("give either waveform or input_features")
        encoded: dict[str, Any] = self.encode_features(input_features)
        if decoder_input_ids is None:
            return encoded
        return self.decode(decoder_input_ids, encoded["cross_key_values"], decoder_attention_mask)

    def adapt_tensor(self, name: str, tensor: Tensor, old: WhisperConfig) -> Tensor | None:
        """Truncate learned positions to a smaller ``max_seq_len``."""
        return truncate_positions(tensor, self.config.max_seq_len) if name == "decoder_positions.weight" else None
