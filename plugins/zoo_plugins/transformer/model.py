"""The encoder-decoder Transformer (Vaswani et al. 2017).

It also covers BART (Lewis et al. 2020), mBART (Liu et al. 2020), M2M100 (Fan et al. 2021), Marian (Junczys-Dowmunt et
al. 2018), PEGASUS (Zhang et al. 2020) and Blenderbot (Roller et al. 2021).

B batch, S source tokens, T target tokens of this call, E hidden size, V vocabulary,
C classes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from zoo.nn import (
    Cache,
    FeedForward,
    LayerCache,
    MultiHeadAttention,
    Residual,
    SinusoidalPositions,
    TensorToTensorPositions,
    build_mask,
    build_norm,
    initialize,
    normalize,
    pool,
    positions_of,
    tied_linear,
    truncate_positions,
)
from zoo_plugins.t5.model import end_tokens
from zoo_plugins.transformer.config import Stack, TransformerConfig


def attention(c: TransformerConfig, stack: Stack) -> MultiHeadAttention:
    """The attention of section 3.2.2 at the sizes of the encoder or of the decoder."""
    return MultiHeadAttention(
        c.hidden_size,
        stack.num_heads,
        head_dim=stack.head_dim,
        value_head_dim=stack.value_head_dim,
        bias=c.attention_bias,
        output_bias=c.attention_output_bias,
        dropout=c.dropout,
    )


def feed_forward(c: TransformerConfig, stack: Stack) -> FeedForward:
    """The network of section 3.3 at the sizes of the encoder or of the decoder."""
    return FeedForward(
        c.hidden_size, stack.intermediate_size, activation=c.activation, bias=c.mlp_bias, dropout=c.dropout
    )


def norm(c: TransformerConfig, present: bool | None) -> nn.Module:
    """An optional norm before the first block or after the last."""
    return build_norm(c.hidden_size, eps=c.norm_eps, kind=c.norm, bias=c.norm_bias) if present else nn.Identity()


def residual(c: TransformerConfig) -> Residual:
    """Dropout, addition and norm around a sub-layer (section 5.4)."""
    return Residual(
        c.hidden_size,
        eps=c.norm_eps,
        norm_first=c.norm_first,
        dropout=c.dropout,
        norm=c.norm,
        norm_bias=c.norm_bias,
    )


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward (figure 1, left)."""

    def __init__(self, c: TransformerConfig) -> None:
        super().__init__()
        self.attention, self.mlp = attention(c, c.encoder), feed_forward(c, c.encoder)
        self.residual_1, self.residual_2 = residual(c), residual(c)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, S, E) -> (B, S, E)."""
        x = self.residual_1(x, lambda y: self.attention(y, mask=mask))
        return self.residual_2(x, self.mlp)


class DecoderBlock(nn.Module):
    """Masked self-attention, cross-attention, then feed-forward (figure 1, right)."""

    def __init__(self, c: TransformerConfig) -> None:
        super().__init__()
        self.attention, self.cross = attention(c, c.decoder), attention(c, c.decoder)
        self.mlp = feed_forward(c, c.decoder)
        self.residual_1, self.residual_2, self.residual_3 = residual(c), residual(c), residual(c)

    def forward(
        self,
        x: Tensor,
        memory: tuple[Tensor, Tensor],
        mask: Tensor | None,
        memory_mask: Tensor | None,
        cache: LayerCache | None,
    ) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        x = self.residual_1(x, lambda y: self.attention(y, mask=mask, cache=cache))
        x = self.residual_2(x, lambda y: self.cross(y, memory=memory, mask=memory_mask))
        return self.residual_3(x, self.mlp)


def positions(c: TransformerConfig) -> nn.Embedding | SinusoidalPositions | TensorToTensorPositions:
    """The positions that are added to the embeddings (section 3.5)."""
    match c.positions:
        case "learned":
            return nn.Embedding(c.position_rows, c.hidden_size)
        case "sinusoidal-tensor2tensor":
            return TensorToTensorPositions(c.hidden_size)
    return SinusoidalPositions(c.hidden_size, interleaved=c.positions == "sinusoidal")


class Embedding(nn.Module):
    """Token embedding times sqrt(E), plus positions (sections 3.4 and 3.5), and an optional norm."""

    def __init__(self, c: TransformerConfig, stack: Stack) -> None:
        super().__init__()
        self.token = nn.Embedding(stack.vocab_size, c.hidden_size)
        self.position = positions(c)
        self.position_tensors = ("position.weight",) if c.positions == "learned" else ()
        self.offset = c.position_offset
        self.scale = math.sqrt(c.hidden_size) if c.scale_embeddings else None
        self.norm = norm(c, c.embedding_norm)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """(B, T) and (B, T) -> (B, T, E)."""
        x = self.token(ids)
        if self.scale is not None:
            x = x * self.scale
        if self.offset:
            positions = positions + self.offset
        learned = isinstance(self.position, nn.Embedding)
        x = x + (self.position(positions) if learned else self.position(positions, x.dtype))
        return self.dropout(self.norm(x))


class Transformer(nn.Module):
    """Encoder, decoder and the projection to the vocabulary."""

    def __init__(self, c: TransformerConfig) -> None:
        super().__init__()
        self.config = c
        if not c.reads_vectors:
            self.encoder_embedding = Embedding(c, c.encoder)
            if c.has_decoder:
                self.decoder_embedding = Embedding(c, c.decoder)
        self.encoder = nn.ModuleList(EncoderBlock(c) for _ in range(c.encoder.num_layers))
        self.encoder_norm = norm(c, c.final_norm)
        if c.has_decoder:
            self.decoder = nn.ModuleList(DecoderBlock(c) for _ in range(c.decoder.num_layers))
            self.decoder_norm = norm(c, c.final_norm)
            if c.share_embeddings and not c.reads_vectors:
                self.decoder_embedding.token.weight = self.encoder_embedding.token.weight
        if c.task == "text-classification":
            self.pooler = nn.Linear(c.hidden_size, c.hidden_size)
            self.classifier = nn.Linear(c.hidden_size, c.num_classes)
        elif c.task == "text2text-generation" and c.tie_embeddings:
            self.head = tied_linear(self.decoder_embedding.token, bias=c.head_bias)
        elif c.task == "text2text-generation":
            self.head = nn.Linear(c.hidden_size, c.decoder.vocab_size, bias=c.head_bias)
        self.dropout = nn.Dropout(c.dropout)
        initialize(self, c.initializer)

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor | Cache]:
        """Encode the source.

        Args:
            input_ids: (B, S).
            attention_mask: (B, S), 1 for a token and 0 for padding.

        Returns:
            ``last_hidden_state`` (B, S, E), and ``cross_key_values``, its keys and values for each decoder block; or,
            without a decoder, ``sentence_embedding`` (B, E).
        """
        length = input_ids.shape[1]
        positions = positions_of(length, length, padding=attention_mask, device=input_ids.device)
        x = self.run_encoder(self.encoder_embedding(input_ids, positions), attention_mask)
        if not self.config.has_decoder:
            vector = pool(x, attention_mask, self.config.pooling)
            return {
                "sentence_embedding": normalize(vector) if self.config.normalize else vector,
                "last_hidden_state": x,
            }
        return {"last_hidden_state": x, "cross_key_values": self.project(x)}

    def run_encoder(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the last states of the encoder for vectors, (B, S, E) -> (B, S, E)."""
        mask = build_mask(x.shape[1], x.shape[1], padding=attention_mask)
        for block in self.encoder:
            x = block(x, mask)
        return self.encoder_norm(x)

    def project(self, x: Tensor) -> Cache:
        """Return the keys and values of the encoder's states (B, S, E) for each decoder block."""
        return Cache(block.cross.keys_values(x) for block in self.decoder if isinstance(block, DecoderBlock))

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
        return self.head(
            self.read(decoder_input_ids, cross_key_values, decoder_attention_mask, attention_mask, past_key_values)
        )

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
        padding, device = decoder_attention_mask, decoder_input_ids.device
        x = self.decoder_embedding(decoder_input_ids, positions_of(length, total, padding=padding, device=device))
        return self.run_decoder(x, cross_key_values, padding, attention_mask, past_key_values)

    def run_decoder(
        self,
        x: Tensor,
        cross_key_values: Cache,
        decoder_attention_mask: Tensor | None,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """Return the last states of the decoder for vectors, (B, T, E) -> (B, T, E); see :meth:`decode`."""
        length = x.shape[1]
        total = length + (past_key_values.length if past_key_values is not None else 0)
        mask = build_mask(length, total, padding=decoder_attention_mask, causal=True, device=x.device)
        memory_mask = build_mask(length, cross_key_values.length, padding=attention_mask)
        for layer, (block, memory) in enumerate(zip(self.decoder, cross_key_values.pairs(), strict=True)):
            x = block(x, memory, mask, memory_mask, past_key_values[layer] if past_key_values is not None else None)
        return self.decoder_norm(x)

    def transform(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the last states for vectors: of the decoder, (B, T, E), or of an encoder alone, (B, S, E).

        Args:
            inputs_embeds: the source, (B, S, E), with positions already added.
            attention_mask: (B, S), 1 for a vector and 0 for padding.
            decoder_inputs_embeds: the target, (B, T, E), of which no output depends on a later vector.
            decoder_attention_mask: (B, T).
        """
        x = self.run_encoder(inputs_embeds, attention_mask)
        if decoder_inputs_embeds is None or not self.config.has_decoder:
            return x
        return self.run_decoder(decoder_inputs_embeds, self.project(x), decoder_attention_mask, attention_mask)

    def classify(self, input_ids: Tensor, cross_key_values: Cache, attention_mask: Tensor | None) -> Tensor:
        """Return the logits (B, C) of the state at the last end token, of a text that is its own target, shifted.

        Without an end token, the last token that is not padding is read. The arguments are those of :meth:`decode`.
        """
        c = self.config
        start = torch.full_like(input_ids[:, :1], c.decoder_start_token_id or 0)
        x = self.read(torch.cat((start, input_ids[:, :-1]), 1), cross_key_values, None, attention_mask, None)
        vector = pool(x, end_tokens(input_ids, attention_mask, c.eos_token_id), "last")
        return self.classifier(self.dropout(torch.tanh(self.pooler(self.dropout(vector)))))

    def forward(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Return the logits (B, T, V) for a source (B, S) and target prefixes (B, T), as in training.

        For other tasks, return the logits of classes (B, C), or the sentence embeddings and states.
        """
        encoded: dict[str, Any] = self.encode(input_ids, attention_mask)
        if self.config.task == "text-classification":
            return self.classify(input_ids, encoded["cross_key_values"], attention_mask)
        if decoder_input_ids is None or not self.config.has_decoder:
            return encoded
        return self.decode(decoder_input_ids, encoded["cross_key_values"], decoder_attention_mask, attention_mask)

    def adapt_tensor(self, name: str, tensor: Tensor, old: TransformerConfig) -> Tensor | None:
        """Truncate learned positions to a smaller ``max_seq_len``, with the same offset."""
        c = self.config
        if not name.endswith("_embedding.position.weight") or c.position_offset != old.position_offset:
            return None
        return truncate_positions(tensor, c.position_rows)
