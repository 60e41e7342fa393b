"""T5: a pre-norm encoder-decoder with relative positions (Raffel et al. 2020; version 1.1: Shazeer 2020).

B batch, S source tokens, T target tokens of this call, E hidden size, H heads, V vocabulary,
C classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.nn import (
    Cache,
    EmbeddingHead,
    FeedForward,
    GatedFeedForward,
    LayerCache,
    MultiHeadAttention,
    RelativePositionBias,
    build_mask,
    pool,
    tied_linear,
)
from zoo_plugins.t5.config import T5Config


def norm(c: T5Config) -> nn.RMSNorm:
    """The RMS norm used throughout: a scale without a shift."""
    return nn.RMSNorm(c.hidden_size, eps=c.norm_eps)


def attention(c: T5Config) -> MultiHeadAttention:
    """Attention without biases and with unscaled scores; the initialisation accounts for the scale."""
    return MultiHeadAttention(c.hidden_size, c.num_heads, head_dim=c.head_dim, bias=False, scale=1.0, dropout=c.dropout)


def feed_forward(c: T5Config) -> FeedForward | GatedFeedForward:
    """The feed-forward network, gated since version 1.1."""
    kind = GatedFeedForward if c.gated else FeedForward
    return kind(c.hidden_size, c.intermediate_size, activation=c.activation, bias=False, dropout=c.dropout)


def relative_positions(c: T5Config, *, causal: bool) -> RelativePositionBias:
    """The relative position bias shared by all blocks of a stack."""
    return RelativePositionBias(
        c.num_heads, num_buckets=c.relative_buckets, max_distance=c.relative_max_distance, causal=causal
    )


_LARGEST = 61440.0
"""15/16 of 2^16: just below the largest float16, and exact in every dtype."""


def bounded(x: Tensor) -> Tensor:
    """Clamp float16 activations, of which a few overflow in trained models. The norms make the clamping harmless."""
    return x.clamp(-_LARGEST, _LARGEST) if x.dtype == torch.float16 else x


class EncoderBlock(nn.Module):
    """Self-attention and feed-forward, each a pre-norm residual sub-layer."""

    def __init__(self, c: T5Config) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = norm(c), norm(c)
        self.attention, self.mlp = attention(c), feed_forward(c)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        """(B, S, E) -> (B, S, E). ``bias`` is (1, H, S, S)."""
        x = bounded(x + self.dropout(self.attention(self.norm_1(x), mask=mask, bias=bias)))
        return bounded(x + self.dropout(self.mlp(self.norm_2(x))))


class DecoderBlock(nn.Module):
    """Causal self-attention, cross-attention and feed-forward, each a pre-norm residual sub-layer."""

    def __init__(self, c: T5Config) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3 = norm(c), norm(c), norm(c)
        self.attention, self.cross, self.mlp = attention(c), attention(c), feed_forward(c)
        self.dropout = nn.Dropout(c.dropout)

    def forward(
        self,
        x: Tensor,
        memory: tuple[Tensor, Tensor],
        bias: Tensor,
        mask: Tensor | None,
        memory_mask: Tensor | None,
        cache: LayerCache | None,
    ) -> Tensor:
        """(B, T, E) -> (B, T, E). ``bias`` is (1, H, T, past + T); cross-attention has none."""
        x = bounded(x + self.dropout(self.attention(self.norm_1(x), mask=mask, bias=bias, cache=cache)))
        x = bounded(x + self.dropout(self.cross(self.norm_2(x), memory=memory, mask=memory_mask)))
        return bounded(x + self.dropout(self.mlp(self.norm_3(x))))


def end_tokens(input_ids: Tensor, attention_mask: Tensor | None, end: int | tuple[int, ...] | None) -> Tensor:
    """Mark the end tokens of each row (B, T), or every token that is not padding if a row has none."""
    tokens = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    for number in (end,) if isinstance(end, int) else (end or ())[:1]:
        ends = tokens * (input_ids == number)
        tokens = torch.where(ends.any(1, keepdim=True), ends, tokens)
    return tokens


class T5(nn.Module):
    """Encoder, decoder and the projection to the vocabulary; for feature extraction, only the encoder."""

    def __init__(self, c: T5Config) -> None:
        super().__init__()
        self.config = c
        self.token_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.dropout = nn.Dropout(c.dropout)
        self.encoder_positions = relative_positions(c, causal=False)
        self.encoder = nn.ModuleList(EncoderBlock(c) for _ in range(c.num_layers))
        self.encoder_norm = norm(c)
        if c.has_decoder:
            self.decoder_positions = relative_positions(c, causal=True)
            self.decoder = nn.ModuleList(DecoderBlock(c) for _ in range(c.num_decoder_layers or c.num_layers))
            self.decoder_norm = norm(c)
        if c.task == "text2text-generation":
            self.head = (
                tied_linear(self.token_embedding)
                if c.tie_embeddings
                else nn.Linear(c.hidden_size, c.vocab_size, bias=False)
            )
        if c.task == "text-classification":
            self.pooler = nn.Linear(c.hidden_size, c.hidden_size)
            self.classifier = nn.Linear(c.hidden_size, c.num_classes)
        if c.task == "sentence-embedding":
            self.embedding_head = EmbeddingHead(c, c.hidden_size)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw weights of n inputs from N(0, 1/n), embeddings from N(0, 1); queries include the scale of the scores."""
        for part in self.modules():
            if isinstance(part, nn.Linear) and part.weight is not self.token_embedding.weight:
                nn.init.normal_(part.weight, std=part.in_features**-0.5)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
            elif isinstance(part, RelativePositionBias):
                nn.init.normal_(part.table.weight, std=self.config.hidden_size**-0.5)
        for part in self.modules():
            if isinstance(part, MultiHeadAttention):
                nn.init.normal_(part.query.weight, std=(self.config.hidden_size * self.config.head_dim) ** -0.5)
        nn.init.normal_(self.token_embedding.weight)

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor | Cache]:
        """Encode the source.

        Args:
            input_ids: (B, S).
            attention_mask: (B, S), 1 for a token and 0 for padding.

        Returns:
            ``last_hidden_state`` (B, S, E); ``cross_key_values``, its keys and values for each decoder block, if there
            are any; and ``sentence_embedding`` (B, E) for that task.
        """
        length = input_ids.shape[1]
        mask = build_mask(length, length, padding=attention_mask)
        bias = self.encoder_positions(length, length)
        x = self.dropout(self.token_embedding(input_ids))
        for block in self.encoder:
            x = block(x, bias, mask)
        x = self.dropout(self.encoder_norm(x))
        if self.config.task == "sentence-embedding":
            return {"sentence_embedding": self.embedding_head(x, attention_mask), "last_hidden_state": x}
        if not self.config.has_decoder:
            return {"last_hidden_state": x}
        cross = Cache(block.cross.keys_values(x) for block in self.decoder if isinstance(block, DecoderBlock))
        return {"last_hidden_state": x, "cross_key_values": cross}

    def decode(
        self,
        decoder_input_ids: Tensor,
        cross_key_values: Cache,
        decoder_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """Return the logits of the next target token.

        Args:
            decoder_input_ids: (B, T).
            cross_key_values: from :meth:`encode`.
            decoder_attention_mask: (B, past + T), 1 for a token and 0 for padding.
            attention_mask: (B, S), of the source.
            past_key_values: keys and values of earlier calls; extended in place.

        Returns:
            (B, T, V).
        """
        x = self.read(decoder_input_ids, cross_key_values, decoder_attention_mask, attention_mask, past_key_values)
        return self.head(x * self.config.hidden_size**-0.5 if self.config.scale_head else x)

    def read(
        self,
        decoder_input_ids: Tensor,
        cross_key_values: Cache,
        decoder_attention_mask: Tensor | None,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
    ) -> Tensor:
        """Return the last states of the decoder, (B, T, E); the arguments are those of :meth:`decode`."""
        length = decoder_input_ids.shape[1]
        total = length + (past_key_values.length if past_key_values is not None else 0)
        device = decoder_input_ids.device
        mask = build_mask(length, total, padding=decoder_attention_mask, causal=True, device=device)
        memory_mask = build_mask(length, cross_key_values.length, padding=attention_mask)
        bias = self.decoder_positions(length, total)
        x = self.dropout(self.token_embedding(decoder_input_ids))
        for layer, (block, memory) in enumerate(zip(self.decoder, cross_key_values.pairs(), strict=True)):
            cache = past_key_values[layer] if past_key_values is not None else None
            x = block(x, memory, bias, mask, memory_mask, cache)
        return self.dropout(self.decoder_norm(x))

    def classify(self, input_ids: Tensor, cross_key_values: Cache, attention_mask: Tensor | None) -> Tensor:
        """Return the logits (B, C) of the state at the last end token, of a text that is its own target, shifted.

        Without an end token, the last token that is not padding is read. The arguments are those of :meth:`decode`.
        """
        c = self.config
        start = torch.full_like(input_ids[:, :1], c.decoder_start_token_id)
        x = self.read(torch.cat((start, input_ids[:, :-1]), 1), cross_key_values, None, attention_mask, None)
        tokens = end_tokens(input_ids, attention_mask, c.eos_token_id)
        return self.classifier(self.dropout(torch.tanh(self.pooler(self.dropout(pool(x, tokens, "last"))))))

    def forward(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Return the logits (B, T, V) for a source (B, S) and target prefixes (B, T), as in training.

        For other tasks, return the logits of classes (B, C), the sentence embeddings and states, or the states of the
        encoder (B, S, E), which are also returned without a target.
        """
        encoded: dict[str, Any] = self.encode(input_ids, attention_mask)
        if self.config.task == "text-classification":
            return self.classify(input_ids, encoded["cross_key_values"], attention_mask)
        if self.config.task == "sentence-embedding":
            return encoded
        if decoder_input_ids is None:
            return encoded["last_hidden_state"]
        return self.decode(decoder_input_ids, encoded["cross_key_values"], decoder_attention_mask, attention_mask)
