"""BERT: a post-norm bidirectional Transformer encoder and its heads (Devlin et al. 2019).

B batch, T tokens, E hidden size, V vocabulary, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.nn import (
    FeedForward,
    MultiHeadAttention,
    build_mask,
    init_truncated_normal,
    normalize,
    pool,
    positions_of,
    tied_linear,
)
from zoo.nn.feed_forward import ACTIVATIONS
from zoo_plugins.bert.config import BERTConfig


class BERTBlock(nn.Module):
    """Attention, then feed-forward, each added and normalised after."""

    def __init__(self, c: BERTConfig) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(c.hidden_size, c.num_heads, dropout=c.dropout)
        self.norm_1 = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.mlp = FeedForward(c.hidden_size, c.intermediate_size or 0, activation=c.activation)
        self.norm_2 = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        x = self.norm_1(x + self.dropout(self.attention(x, mask=mask)))
        return self.norm_2(x + self.dropout(self.mlp(x)))


class Embeddings(nn.Module):
    """The sum of token, position and type embeddings, normalised."""

    def __init__(self, c: BERTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(c.vocab_size, c.hidden_size)
        self.position = nn.Embedding(c.max_seq_len, c.hidden_size)
        self.token_type = nn.Embedding(c.type_vocab_size, c.hidden_size)
        self.norm = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """(B, T) and (B, T) -> (B, T, E)."""
        length = input_ids.shape[1]
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        positions = positions_of(length, length, device=input_ids.device)
        return self.dropout(self.norm(self.token(input_ids) + self.position(positions) + self.token_type(types)))


class MaskedLanguageModelHead(nn.Module):
    """Dense, activation, norm, and a projection to the vocabulary (section 3.1, task 1)."""

    def __init__(self, c: BERTConfig, token_embedding: nn.Embedding) -> None:
        super().__init__()
        self.dense = nn.Linear(c.hidden_size, c.hidden_size)
        self.activation = ACTIVATIONS[c.activation]
        self.norm = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.decoder = (
            tied_linear(token_embedding, bias=True) if c.tie_embeddings else nn.Linear(c.hidden_size, c.vocab_size)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, V)."""
        return self.decoder(self.norm(self.activation(self.dense(x))))


class BERT(nn.Module):
    """The encoder and the head that the task asks for."""

    def __init__(self, c: BERTConfig) -> None:
        super().__init__()
        self.config = c
        self.embeddings = Embeddings(c)
        self.blocks = nn.ModuleList(BERTBlock(c) for _ in range(c.num_layers))
        self.pooler = nn.Linear(c.hidden_size, c.hidden_size) if c.pooler else None
        if c.task in ("fill-mask", "pretraining"):
            self.masked_lm = MaskedLanguageModelHead(c, self.embeddings.token)
        if c.task == "pretraining":
            self.next_sentence = nn.Linear(c.hidden_size, 2)
        if c.task == "text-classification":
            self.classifier = nn.Linear(c.hidden_size, c.num_classes)
        self.dropout = nn.Dropout(c.dropout)
        init_truncated_normal(self, std=0.02)

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Hidden states of the last block, (B, T, E)."""
        length = input_ids.shape[1]
        mask = build_mask(length, length, padding=attention_mask)
        x = self.embeddings(input_ids, token_type_ids)
        for block in self.blocks:
            x = block(x, mask)
        return x

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The outputs of the configured task, by name.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 1 for a token and 0 for padding.
            token_type_ids: (B, T), the segment of each token; all 0 by default.
        """
        c = self.config
        x = self.encode(input_ids, attention_mask, token_type_ids)
        pooled = torch.tanh(self.pooler(x[:, 0])) if self.pooler is not None else None  # (B, E)
        if c.task == "fill-mask":
            return {"logits": self.masked_lm(x)}
        if c.task == "pretraining":
            return {"logits": self.masked_lm(x), "next_sentence_logits": self.next_sentence(pooled)}
        if c.task == "text-classification":
            return {"logits": self.classifier(self.dropout(pooled))}
        if c.task == "sentence-embedding":
            vector = pool(x, attention_mask, c.pooling)
            return {
                "sentence_embedding": normalize(vector) if c.normalize else vector,
                "last_hidden_state": x,
            }
        return {"last_hidden_state": x} | ({"pooler_output": pooled} if pooled is not None else {})
