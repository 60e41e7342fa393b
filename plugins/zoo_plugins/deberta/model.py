"""DeBERTa: a post-norm encoder whose attention tells contents from relative positions (He et al. 2021 and 2023).

DeBERTa-v2 groups distances in buckets. DeBERTaV3 (He et al. 2023) is the same model, trained to detect replaced tokens.

B batch, T tokens, W embedding size, E hidden size, V vocabulary, C classes, N rows of the table of distances.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.nn import (
    ACTIVATIONS,
    DisentangledAttention,
    DistanceTable,
    EmbeddingHead,
    FeedForward,
    build_mask,
    initialize,
    positions_of,
    tied_linear,
    truncate_positions,
)
from zoo_plugins.deberta.config import DeBERTaConfig


class DeBERTaBlock(nn.Module):
    """Disentangled attention and feed-forward, each a post-norm residual sub-layer."""

    def __init__(self, c: DeBERTaConfig) -> None:
        super().__init__()
        self.attention = DisentangledAttention(
            c.hidden_size, c.num_heads, terms=c.position_terms, shared=c.share_projections, dropout=c.dropout
        )
        self.norm_1 = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.mlp = FeedForward(c.hidden_size, c.intermediate_size or 0, activation=c.activation)
        self.norm_2 = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, mask: Tensor | None, distances: tuple[Tensor, Tensor] | None) -> Tensor:
        """(B, T, E) -> (B, T, E). ``distances`` are the embeddings, (N, E), and the row of each pair, (T, T)."""
        x = self.norm_1(x + self.dropout(self.attention(x, mask=mask, distances=distances)))
        return self.norm_2(x + self.dropout(self.mlp(x)))


class Embeddings(nn.Module):
    """Sum of token, position and type embeddings, projected to the encoder's width and normalised."""

    def __init__(self, c: DeBERTaConfig) -> None:
        super().__init__()
        width = c.embedding_size or 0
        self.token = nn.Embedding(c.vocab_size, width)
        self.position = nn.Embedding(c.position_rows, width) if c.position_rows else None
        self.position_tensors = ("position.weight",) if c.position_rows else ()
        self.token_type = nn.Embedding(c.type_vocab_size, width) if c.type_vocab_size else None
        self.projection = nn.Linear(width, c.hidden_size, bias=False) if width != c.hidden_size else None
        self.norm = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """(B, T) and (B, T) -> (B, T, E)."""
        x, length = self.token(input_ids), input_ids.shape[1]  # (B, T, W)
        if self.position is not None:
            x = x + self.position(positions_of(length, length, device=input_ids.device))
        if self.token_type is not None:
            x = x + self.token_type(torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        return self.dropout(self.norm(x if self.projection is None else self.projection(x)))


class MaskedLanguageModelHead(nn.Module):
    """Dense, activation, norm, and a projection to the vocabulary."""

    def __init__(self, c: DeBERTaConfig, token_embedding: nn.Embedding) -> None:
        super().__init__()
        width = c.embedding_size or 0
        self.dense = nn.Linear(c.hidden_size, width)
        self.activation = ACTIVATIONS[c.activation]
        self.norm = nn.LayerNorm(width, eps=c.norm_eps)
        self.decoder = tied_linear(token_embedding, bias=True) if c.tie_embeddings else nn.Linear(width, c.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, V)."""
        return self.decoder(self.norm(self.activation(self.dense(x))))


def build_distances(c: DeBERTaConfig) -> DistanceTable | None:
    """Build the embeddings of distances, if attention has terms of positions."""
    if not c.position_terms:
        return None
    norm_eps = c.norm_eps if c.distance_norm else None
    return DistanceTable(c.hidden_size, max_distance=c.max_distance, num_buckets=c.distance_buckets, norm_eps=norm_eps)


class DeBERTa(nn.Module):
    """The encoder with the head of the configured task."""

    def __init__(self, c: DeBERTaConfig) -> None:
        super().__init__()
        self.config = c
        self.embeddings = Embeddings(c)
        self.distances = build_distances(c)
        self.blocks = nn.ModuleList(DeBERTaBlock(c) for _ in range(c.num_layers))
        if c.task == "sentence-embedding":
            self.embedding_head = EmbeddingHead(c, c.hidden_size)
        if c.task == "fill-mask":
            self.masked_lm = MaskedLanguageModelHead(c, self.embeddings.token)
        if c.task == "text-classification":
            self.pooler = nn.Linear(c.hidden_size, c.hidden_size)
            self.pooler_activation = ACTIVATIONS[c.pooler_activation]
        if c.task in ("text-classification", "token-classification"):
            self.classifier = nn.Linear(c.hidden_size, c.num_classes)
        if c.task == "question-answering":
            self.span = nn.Linear(c.hidden_size, 2)
        self.dropout = nn.Dropout(c.dropout)
        initialize(self, "normal", std=0.02)

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Return the last states, (B, T, E), of tokens (B, T)."""
        length = input_ids.shape[1]
        x = self.embeddings(input_ids, token_type_ids)
        mask, distances = build_mask(length, length, padding=attention_mask), None
        if self.distances is not None:
            embeddings, rows = self.distances(length)
            distances = self.dropout(embeddings), rows
        for block in self.blocks:
            x = block(x, mask, distances)
        return x

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the outputs of the configured task, by name.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 1 for a token and 0 for padding.
            token_type_ids: (B, T), the segment of each token; all 0 by default.
        """
        x = self.encode(input_ids, attention_mask, token_type_ids)
        match self.config.task:
            case "sentence-embedding":
                return {"sentence_embedding": self.embedding_head(x, attention_mask), "last_hidden_state": x}
            case "fill-mask":
                return {"logits": self.masked_lm(x)}
            case "text-classification":
                pooled = self.pooler_activation(self.pooler(self.dropout(x[:, 0])))  # (B, E)
                return {"logits": self.classifier(self.dropout(pooled))}
            case "token-classification":
                return {"logits": self.classifier(self.dropout(x))}
            case "question-answering":
                start, end = self.span(x).unbind(-1)  # (B, T) each
                return {"start_logits": start, "end_logits": end}
        return {"last_hidden_state": x}

    def adapt_tensor(self, name: str, tensor: Tensor, old: DeBERTaConfig) -> Tensor | None:
        """Truncate the embedding of absolute positions to a smaller ``max_seq_len``."""
        if name != "embeddings.position.weight":
            return None
        return truncate_positions(tensor, self.config.position_rows)
