"""BERT: a post-norm bidirectional Transformer encoder and its heads (Devlin et al. 2019), with its variants.

RoBERTa (Liu et al. 2019) skips padding in positions. DistilBERT (Sanh et al. 2019) has no segment types. ALBERT (Lan et
al. 2020) has narrower embeddings and shares one block's weights among all layers. ELECTRA (Clark et al. 2020) detects
replaced tokens. MPNet (Song et al. 2020) adds a bias by distance to the scores of all blocks. RoFormer (Su et al. 2021)
rotates queries and keys by their positions, as does Nomic BERT (Nussbaum et al. 2024), which has gated feed-forward
networks. Linformer, Performer and Longformer attend in linear time.

B batch, T tokens, W embedding size, E hidden size, V vocabulary, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.nn import (
    ACTIVATIONS,
    EmbeddingHead,
    FeedForward,
    GatedFeedForward,
    LinformerAttention,
    LongformerAttention,
    MultiHeadAttention,
    PerformerAttention,
    RelativePositionBias,
    RotaryPositions,
    Rotation,
    SinusoidalPositions,
    build_mask,
    build_norm,
    initialize,
    pool,
    positions_of,
    tied_linear,
    truncate_positions,
)
from zoo_plugins.bert.config import BERTConfig


def build_attention(c: BERTConfig) -> nn.Module:
    """Build the attention of a block, a module that maps (B, T, E) and a mask to (B, T, E)."""
    sizes = (c.hidden_size, c.num_heads)
    match c.attention:
        case "linformer":
            return LinformerAttention(*sizes, c.max_seq_len, c.attention_rank or 0, dropout=c.dropout)
        case "performer":
            return PerformerAttention(*sizes, c.attention_rank or 0)
        case "longformer":
            window = c.attention_window or 0
            return LongformerAttention(*sizes, window, global_tokens=c.global_tokens, dropout=c.dropout)
    return MultiHeadAttention(*sizes, bias=c.attention_bias, dropout=c.dropout)


def build_feed_forward(c: BERTConfig) -> nn.Module:
    """Build the feed-forward network of a block, a module that maps (B, T, E) to (B, T, E)."""
    kind = GatedFeedForward if c.gated else FeedForward
    return kind(c.hidden_size, c.intermediate_size or 0, activation=c.activation, bias=c.mlp_bias)


def build_rotary(c: BERTConfig) -> nn.Module:
    """Build the rotary positions, a module that maps positions (1, T) and a dtype to a rotation."""
    head_dim = c.hidden_size // c.num_heads
    return TabulatedRotation(head_dim) if c.rope_table else RotaryPositions(head_dim, c.rope_theta)


class TabulatedRotation(nn.Module):
    """Rotations by the sinusoids of Vaswani et al. 2017, rounded to float32, as in published weights of RoFormer."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.table = SinusoidalPositions(head_dim, interleaved=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """(B or 1, T) -> cosines and sines (B or 1, 1, T, D) in ``dtype``."""
        sine, cosine = self.table(positions, dtype).unsqueeze(1).chunk(2, dim=-1)  # (1, 1, T, D / 2) each
        return torch.cat((cosine, cosine), dim=-1), torch.cat((sine, sine), dim=-1)


class BERTBlock(nn.Module):
    """Attention and feed-forward, each a post-norm residual sub-layer."""

    def __init__(self, c: BERTConfig) -> None:
        super().__init__()
        self.attention = build_attention(c)
        self.norm_1 = build_norm(c.hidden_size, eps=c.norm_eps, kind=c.norm)
        self.mlp = build_feed_forward(c)
        self.norm_2 = build_norm(c.hidden_size, eps=c.norm_eps, kind=c.norm)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, mask: Tensor | None, **positions: Tensor | Rotation) -> Tensor:
        """(B, T, E) -> (B, T, E). ``mask`` comes from :func:`build_mask` for full attention, else it is (B, T).

        ``positions`` are the ``bias`` or ``rotation`` of full attention, if the model has one.
        """
        x = self.norm_1(x + self.dropout(self.attention(x, mask=mask, **positions)))
        return self.norm_2(x + self.dropout(self.mlp(x)))


class Embeddings(nn.Module):
    """Sum of token, position and type embeddings, normalised and projected to the encoder's width."""

    def __init__(self, c: BERTConfig) -> None:
        super().__init__()
        width = c.embedding_size or 0
        self.token = nn.Embedding(c.vocab_size, width)
        self.position = nn.Embedding(c.position_rows, width) if c.position_rows else None
        self.position_tensors = ("position.weight",) if c.position_rows else ()
        self.token_type = nn.Embedding(c.type_vocab_size, width) if c.type_vocab_size else None
        self.norm = build_norm(width, eps=c.norm_eps, kind=c.norm)
        self.dropout = nn.Dropout(c.dropout)
        self.projection = nn.Linear(width, c.hidden_size) if c.project_embeddings else None
        self.skipped_token = c.pad_token_id if c.skip_padding else None

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """(B, T) and (B, T) -> (B, T, E)."""
        x = self.token(input_ids)  # (B, T, W)
        if self.position is not None:
            x = x + self.position(self.positions(input_ids))
        if self.token_type is not None:
            x = x + self.token_type(torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        x = self.dropout(self.norm(x))
        return x if self.projection is None else self.projection(x)

    def positions(self, input_ids: Tensor) -> Tensor:
        """Return the rows of the position embedding, (B or 1, T), for tokens (B, T)."""
        if self.skipped_token is None:
            length = input_ids.shape[1]
            return positions_of(length, length, device=input_ids.device)
        counted = (input_ids != self.skipped_token).long()
        return counted.cumsum(-1) * counted + self.skipped_token


class MaskedLanguageModelHead(nn.Module):
    """Dense, activation, norm, and a projection to the vocabulary (section 3.1, task 1)."""

    def __init__(self, c: BERTConfig, token_embedding: nn.Embedding) -> None:
        super().__init__()
        width = c.embedding_size or 0
        self.dense = nn.Linear(c.hidden_size, width)
        self.activation = ACTIVATIONS[c.head_activation or c.activation]
        self.norm = build_norm(width, eps=c.norm_eps, kind=c.norm)
        self.decoder = tied_linear(token_embedding, bias=True) if c.tie_embeddings else nn.Linear(width, c.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, V)."""
        return self.decoder(self.norm(self.activation(self.dense(x))))


class ReplacedTokenHead(nn.Module):
    """Dense, activation, and one logit per token (Clark et al. 2020), positive for a replaced token."""

    def __init__(self, c: BERTConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(c.hidden_size, c.hidden_size)
        self.activation = ACTIVATIONS[c.activation]
        self.output = nn.Linear(c.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T)."""
        return self.output(self.activation(self.dense(x))).squeeze(-1)


class BERT(nn.Module):
    """The encoder with the head of the configured task."""

    def __init__(self, c: BERTConfig) -> None:
        super().__init__()
        self.config = c
        self.embeddings = Embeddings(c)
        self.blocks = nn.ModuleList(BERTBlock(c) for _ in range(1 if c.share_layers else c.num_layers))
        buckets = c.relative_buckets
        self.relative = RelativePositionBias(c.num_heads, num_buckets=buckets) if buckets else None
        self.rotary = build_rotary(c) if c.positions == "rotary" else None
        self.pooler = nn.Linear(c.hidden_size, c.hidden_size) if c.pooler else None
        self.pooler_activation = torch.tanh if c.pooler_activation == "tanh" else ACTIVATIONS[c.pooler_activation]
        if c.task == "sentence-embedding":
            self.embedding_head = EmbeddingHead(c, c.feature_size)
        if c.task in ("fill-mask", "pretraining"):
            self.masked_lm = MaskedLanguageModelHead(c, self.embeddings.token)
        if c.task == "pretraining":
            self.next_sentence = nn.Linear(c.hidden_size, 2)
        if c.task in ("text-classification", "token-classification"):
            self.classifier = nn.Linear(c.hidden_size, c.num_classes)
        if c.task == "question-answering":
            self.span = nn.Linear(c.hidden_size, 2)
        if c.task == "replaced-token-detection":
            self.replaced = ReplacedTokenHead(c)
        self.dropout = nn.Dropout(c.dropout)
        initialize(self, c.initializer, std=0.02)

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> list[Tensor]:
        """Return hidden states, (B, T, E) each: those of the embeddings and all blocks if ``feature_layers`` is set,
        otherwise only those of the last block."""
        length = input_ids.shape[1]
        full = self.config.attention == "full"
        mask = build_mask(length, length, padding=attention_mask) if full else attention_mask
        x = self.embeddings(input_ids, token_type_ids)
        positions: dict[str, Tensor | Rotation] = {}
        if self.relative is not None:
            positions["bias"] = self.relative(length, length)
        if self.rotary is not None:
            positions["rotation"] = self.rotary(positions_of(length, length, device=x.device), x.dtype)
        states = [x]
        for layer in range(self.config.num_layers):
            x = self.blocks[layer % len(self.blocks)](x, mask, **positions)
            states = [*states, x] if self.config.feature_layers else [x]
        return states

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the outputs of the configured task, by name.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 1 for a token and 0 for padding.
            token_type_ids: (B, T), the segment of each token; all 0 by default.
        """
        c = self.config
        states = self.encode(input_ids, attention_mask, token_type_ids)
        x = states[-1]
        pooled = None if self.pooler is None else self.pooler_activation(self.pooler(x[:, 0]))  # (B, E)
        match c.task:
            case "sentence-embedding":
                merged = self.merge(states) if c.feature_layers else x
                return {"sentence_embedding": self.embedding_head(merged, attention_mask), "last_hidden_state": x}
            case "fill-mask":
                return {"logits": self.masked_lm(x)}
            case "pretraining":
                return {"logits": self.masked_lm(x), "next_sentence_logits": self.next_sentence(pooled)}
            case "text-classification":
                vector = pool(x, attention_mask, c.pooling) if pooled is None else pooled
                return {"logits": self.classifier(self.dropout(vector))}
            case "token-classification":
                return {"logits": self.classifier(self.dropout(x))}
            case "question-answering":
                start, end = self.span(x).unbind(-1)  # (B, T) each
                return {"start_logits": start, "end_logits": end}
            case "replaced-token-detection":
                return {"logits": self.replaced(x)}
        outputs = {"last_hidden_state": x}
        if c.feature_layers:  # Devlin et al. 2019, section 5.3
            outputs["features"] = self.merge(states)
        return outputs if pooled is None else outputs | {"pooler_output": pooled}

    def merge(self, states: list[Tensor]) -> Tensor:
        """Merge the states of ``feature_layers``, (B, T, E) each, to (B, T, E), or (B, T, n E) if concatenated."""
        layers = [states[layer] for layer in self.config.feature_layers]
        match self.config.feature_merge:
            case "sum":
                return torch.stack(layers).sum(0)
            case "mean":
                return torch.stack(layers).mean(0)
        return torch.cat(layers, dim=-1)

    def adapt_tensor(self, name: str, tensor: Tensor, old: BERTConfig) -> Tensor | None:
        """Truncate the position embedding to a smaller ``max_seq_len``; the number of padding rows must not change."""
        first, before = (c.position_rows - c.max_seq_len for c in (self.config, old))
        if name != "embeddings.position.weight" or first != before:
            return None
        return truncate_positions(tensor, self.config.position_rows)
