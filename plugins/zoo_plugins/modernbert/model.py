"""ModernBERT: a pre-norm bidirectional encoder with rotary positions and windows in most layers (Warner et al. 2024).

Every third layer sees all tokens; the others see a window around each (section 2.1.2), and have their own rotary
frequencies. Feed-forward networks are gated, and most layers have no biases (section 2.1.1).

B batch, T tokens, E hidden size, D head size, V vocabulary, C classes.
"""

from __future__ import annotations

from torch import Tensor, nn

from zoo.nn import (
    ACTIVATIONS,
    EmbeddingHead,
    GatedFeedForward,
    MultiHeadAttention,
    RotaryPositions,
    Rotation,
    build_mask,
    initialize,
    pool,
    positions_of,
    tied_linear,
)
from zoo_plugins.modernbert.config import ModernBERTConfig


def _norm(c: ModernBERTConfig) -> nn.LayerNorm:
    return nn.LayerNorm(c.hidden_size, eps=c.norm_eps, bias=c.norm_bias)


class ModernBERTBlock(nn.Module):
    """Attention and feed-forward, each a pre-norm residual sub-layer. The first block's input is normalised already."""

    def __init__(self, c: ModernBERTConfig, *, first: bool) -> None:
        super().__init__()
        self.norm_1 = nn.Identity() if first else _norm(c)
        self.attention = MultiHeadAttention(c.hidden_size, c.num_heads, bias=c.attention_bias, dropout=c.dropout)
        self.norm_2 = _norm(c)
        self.mlp = GatedFeedForward(
            c.hidden_size, c.intermediate_size, activation=c.activation, bias=c.mlp_bias, dropout=c.dropout
        )
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        x = x + self.dropout(self.attention(self.norm_1(x), rotation=rotation, mask=mask))
        return x + self.mlp(self.norm_2(x))


class PredictionHead(nn.Module):
    """Dense, activation and norm, before the output layer of every task."""

    def __init__(self, c: ModernBERTConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(c.hidden_size, c.hidden_size, bias=c.head_bias)
        self.activation = ACTIVATIONS[c.head_activation or c.activation]
        self.norm = _norm(c)

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) -> (..., E)."""
        return self.norm(self.activation(self.dense(x)))


class ModernBERT(nn.Module):
    """The encoder with the head of the configured task."""

    def __init__(self, c: ModernBERTConfig) -> None:
        super().__init__()
        self.config = c
        self.token_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.embedding_norm = _norm(c)
        self.dropout = nn.Dropout(c.dropout)
        self.positions = RotaryPositions(c.head_dim, c.rope_theta)
        self.local_positions = RotaryPositions(c.head_dim, c.local_rope_theta)
        self.blocks = nn.ModuleList(ModernBERTBlock(c, first=layer == 0) for layer in range(c.num_layers))
        self.norm = _norm(c)
        if c.task == "sentence-embedding":
            self.embedding_head = EmbeddingHead(c, c.hidden_size)
        if c.has_head:
            self.head = PredictionHead(c)
        if c.task == "fill-mask":
            self.decoder = (
                tied_linear(self.token_embedding, bias=c.decoder_bias)
                if c.tie_embeddings
                else nn.Linear(c.hidden_size, c.vocab_size, bias=c.decoder_bias)
            )
        if c.task in ("text-classification", "token-classification"):
            self.classifier = nn.Linear(c.hidden_size, c.num_classes)
        if c.task == "question-answering":
            self.span = nn.Linear(c.hidden_size, 2)
        initialize(self, "truncated_normal", std=0.02)

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the last states, (B, T, E), of tokens (B, T)."""
        length, device = input_ids.shape[1], input_ids.device
        x = self.dropout(self.embedding_norm(self.token_embedding(input_ids)))
        places = positions_of(length, length, device=device)
        seen = {}  # the mask and the rotation of each kind of layer
        for window in {self.config.window(layer): None for layer in range(len(self.blocks))}:
            distance = None if window is None else window // 2
            mask = build_mask(length, length, padding=attention_mask, distance=distance, device=device)
            turn = self.positions if window is None else self.local_positions
            seen[window] = (turn(places, x.dtype), mask)
        for layer, block in enumerate(self.blocks):
            x = block(x, *seen[self.config.window(layer)])
        return self.norm(x)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return the outputs of the configured task, by name.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 1 for a token and 0 for padding.
        """
        c = self.config
        x = self.encode(input_ids, attention_mask)
        match c.task:
            case "sentence-embedding":
                return {"sentence_embedding": self.embedding_head(x, attention_mask), "last_hidden_state": x}
            case "fill-mask":
                return {"logits": self.decoder(self.head(x))}
            case "text-classification":
                return {"logits": self.classifier(self.dropout(self.head(pool(x, attention_mask, c.pooling))))}
            case "token-classification":
                return {"logits": self.classifier(self.dropout(self.head(x)))}
            case "question-answering":
                start, end = self.span(self.dropout(self.head(x))).unbind(-1)  # (B, T) each
                return {"start_logits": start, "end_logits": end}
        return {"last_hidden_state": x}
