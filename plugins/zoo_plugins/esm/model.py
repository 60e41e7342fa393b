"""ESM: a pre-norm bidirectional encoder of proteins (Rives et al. 2021, ESM-1b; Lin et al. 2023, ESM-2).

ESM-2 rotates queries and keys by their positions; ESM-1b has learned positions. In training, masked tokens have no
embedding, as if dropped, and the others are scaled to compensate (Lin et al. 2023, supplement A.1).

B batch, T tokens, E hidden size, V vocabulary, C classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn import (
    EmbeddingHead,
    FeedForward,
    MultiHeadAttention,
    RotaryPositions,
    Rotation,
    build_mask,
    initialize,
    positions_of,
    tied_linear,
    truncate_positions,
)
from zoo_plugins.esm.config import ESMConfig

_MASKED_IN_TRAINING = 0.15 * 0.8
"""Share of masked tokens in training: of 15 % of all, 80 % are masked."""


class ESMBlock(nn.Module):
    """Attention and feed-forward, each a pre-norm residual sub-layer."""

    def __init__(self, c: ESMConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.attention = MultiHeadAttention(c.hidden_size, c.num_heads, dropout=c.dropout)
        self.norm_2 = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.mlp = FeedForward(c.hidden_size, c.intermediate_size or 0, activation="gelu")
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, mask: Tensor | None, rotation: Rotation | None) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        x = x + self.dropout(self.attention(self.norm_1(x), mask=mask, rotation=rotation))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class Embeddings(nn.Module):
    """Token embeddings, scaled by the share of masked tokens, plus learned positions, if any, and their norm."""

    def __init__(self, c: ESMConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(c.vocab_size, c.hidden_size)
        self.position = nn.Embedding(c.position_rows, c.hidden_size) if c.position_rows else None
        self.position_tensors = ("position.weight",) if c.position_rows else ()
        self.norm = nn.LayerNorm(c.hidden_size, eps=c.norm_eps) if c.embedding_norm else None
        self.padding = c.pad_token_id or 0
        self.dropped = c.dropped_token_id

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """(B, T) -> (B, T, E). Padding has the embedding 0."""
        x = self.token(input_ids)
        if self.dropped is not None:
            x = self.drop(x, input_ids == self.dropped, attention_mask)
        if self.position is not None:
            counted = (input_ids != self.padding).long()
            x = x + self.position(counted.cumsum(-1) * counted + self.padding)
        if self.norm is not None:
            x = self.norm(x)
        return x if attention_mask is None else x * attention_mask.unsqueeze(-1).to(x.dtype)

    def drop(self, x: Tensor, is_masked: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Zero the masked tokens of ``x``, (B, T, E), and scale the others.

        The share of masked tokens is computed in float32, as in the published models. Padding does not count, and a
        text of masked tokens alone, of which nothing is left to scale, does not divide by 0.
        """
        is_token = torch.ones_like(is_masked) if attention_mask is None else attention_mask.bool()
        masked = (is_masked & is_token).sum(-1).float() / is_token.sum(-1).clamp(min=1)  # (B,)
        left = (1 - masked).clamp(min=torch.finfo(masked.dtype).eps)[:, None, None]
        x = x.masked_fill(is_masked.unsqueeze(-1), 0.0)
        return (x * (1 - _MASKED_IN_TRAINING) / left).to(x.dtype)


class MaskedLanguageModelHead(nn.Module):
    """Dense, GELU, norm, and a projection to the vocabulary."""

    def __init__(self, c: ESMConfig, token_embedding: nn.Embedding) -> None:
        super().__init__()
        self.dense = nn.Linear(c.hidden_size, c.hidden_size)
        self.norm = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        tied = c.tie_embeddings
        self.decoder = tied_linear(token_embedding, bias=True) if tied else nn.Linear(c.hidden_size, c.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, V)."""
        return self.decoder(self.norm(F.gelu(self.dense(x))))


def build_rotary(c: ESMConfig) -> RotaryPositions:
    """Build the rotary positions of ESM-2."""

    def rounded(frequencies: Tensor) -> Tensor:
        return frequencies.half().float()

    return RotaryPositions(c.head_dim, c.rope_theta, scale=rounded if c.rope_float16 else None)


class ESM(nn.Module):
    """The encoder with the head of the configured task."""

    def __init__(self, c: ESMConfig) -> None:
        super().__init__()
        self.config = c
        self.embeddings = Embeddings(c)
        self.positions = build_rotary(c) if c.positions == "rotary" else None
        self.blocks = nn.ModuleList(ESMBlock(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.pooler = nn.Linear(c.hidden_size, c.hidden_size) if c.pooler else None
        if c.task == "sentence-embedding":
            self.embedding_head = EmbeddingHead(c, c.hidden_size)
        if c.task == "fill-mask":
            self.masked_lm = MaskedLanguageModelHead(c, self.embeddings.token)
        if c.task in ("text-classification", "token-classification"):
            self.classifier = nn.Linear(c.hidden_size, c.num_classes)
        self.dropout = nn.Dropout(c.dropout)
        initialize(self, "normal", std=0.02)

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the last states, (B, T, E), of tokens (B, T)."""
        length = input_ids.shape[1]
        x = self.embeddings(input_ids, attention_mask)
        mask, rotation = build_mask(length, length, padding=attention_mask), None
        if self.positions is not None:
            rotation = self.positions(positions_of(length, length, device=x.device), x.dtype)
        for block in self.blocks:
            x = block(x, mask, rotation)
        return self.norm(x)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return the outputs of the configured task, by name.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 1 for a token and 0 for padding.
        """
        x = self.encode(input_ids, attention_mask)
        pooled = None if self.pooler is None else torch.tanh(self.pooler(x[:, 0]))  # (B, E)
        match self.config.task:
            case "sentence-embedding":
                return {"sentence_embedding": self.embedding_head(x, attention_mask), "last_hidden_state": x}
            case "fill-mask":
                return {"logits": self.masked_lm(x)}
            case "text-classification":
                return {"logits": self.classifier(self.dropout(pooled))}
            case "token-classification":
                return {"logits": self.classifier(self.dropout(x))}
        return {"last_hidden_state": x} if pooled is None else {"last_hidden_state": x, "pooler_output": pooled}

    def adapt_tensor(self, name: str, tensor: Tensor, old: ESMConfig) -> Tensor | None:
        """Truncate the position embedding to a smaller ``max_seq_len``; the padding token must not change."""
        if name != "embeddings.position.weight" or self.config.pad_token_id != old.pad_token_id:
            return None
        return truncate_positions(tensor, self.config.position_rows)
