"""DETR: an encoder-decoder Transformer that finds the objects in the map of a ResNet (Carion et al. 2020).

The encoder reads the positions of the map. Each position of the decoder is a learned query, which finds an object or
none. Positions and queries are added to the queries and keys of every attention, but not to the values. Table
Transformer (Smock et al. 2022) normalises before each sub-layer.

B batch, C channels, H and W height and width of an image, M and N those of its map, S = M N, Q queries, E hidden size,
L classes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn import FeedForward, FrozenBatchNorm, MultiHeadAttention, Residual, build_mask, initialize, sinusoids
from zoo_plugins.detr.config import DETRConfig
from zoo_plugins.resnet.model import ResNet

_EPS = 1e-6
"""Added to the number of rows or columns, by which they are divided."""


class SinusoidalGrid(nn.Module):
    """Sinusoids of the row, then of the column, of each position in a map, from 1 to the last, as parts of 2 pi."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the positions of a map (B, E, M, N), of which a mask (B, M, N) may exclude some: (B or 1, S, E)."""
        seen = x.new_ones((1, *x.shape[2:]), dtype=torch.float64) if mask is None else mask.double()
        rows, columns = seen.cumsum(1), seen.cumsum(2)  # (B or 1, M, N)
        rows = 2 * math.pi * rows / (rows[:, -1:] + _EPS)
        columns = 2 * math.pi * columns / (columns[:, :, -1:] + _EPS)
        sides = (sinusoids(side, self.hidden_size // 2, x.dtype) for side in (rows, columns))
        return torch.cat(tuple(sides), -1).flatten(1, 2)  # (B or 1, M, N, E) -> (B or 1, S, E)


class LearnedGrid(nn.Module):
    """A learned vector of the column, then one of the row, of each position in a map."""

    position_tensors = ("row.weight", "column.weight")

    def __init__(self, rows: int, hidden_size: int) -> None:
        super().__init__()
        self.row, self.column = (nn.Embedding(rows, hidden_size // 2) for _ in range(2))

    def forward(self, x: Tensor, _: Tensor | None) -> Tensor:
        """Return the positions of a map (B, E, M, N), (1, S, E)."""
        height, width = x.shape[2:]
        rows = self.row(torch.arange(height, device=x.device)).unsqueeze(1).expand(-1, width, -1)  # (M, N, E / 2)
        columns = self.column(torch.arange(width, device=x.device)).unsqueeze(0).expand(height, -1, -1)
        return torch.cat((columns, rows), -1).flatten(0, 1).unsqueeze(0)  # (M, N, E) -> (1, S, E)


def attend(attention: MultiHeadAttention, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend from a sequence to itself, with positions of queries and keys: (B, S, E) -> (B, S, E)."""
    return attention(x + positions, memory=attention.keys_values(x, positions), mask=mask)


def residual(c: DETRConfig) -> Residual:
    """Dropout, addition and norm around a sub-layer."""
    return Residual(c.hidden_size, eps=1e-5, norm_first=c.norm_first, dropout=c.dropout)


class EncoderBlock(nn.Module):
    """Self-attention of positions, then feed-forward (figure 10, left)."""

    def __init__(self, c: DETRConfig) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(c.hidden_size, c.num_heads, dropout=c.dropout)
        self.mlp = FeedForward(c.hidden_size, c.intermediate_size, activation=c.activation, dropout=c.dropout)
        self.residual_1, self.residual_2 = residual(c), residual(c)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """(B, S, E) -> (B, S, E)."""
        x = self.residual_1(x, lambda y: attend(self.attention, y, positions, mask))
        return self.residual_2(x, self.mlp)


class DecoderBlock(nn.Module):
    """Self-attention of queries, cross-attention to positions, then feed-forward (figure 10, right)."""

    def __init__(self, c: DETRConfig) -> None:
        super().__init__()
        heads, width = c.num_decoder_heads or 0, c.decoder_intermediate_size or 0
        self.attention, self.cross = (MultiHeadAttention(c.hidden_size, heads, dropout=c.dropout) for _ in range(2))
        self.mlp = FeedForward(c.hidden_size, width, activation=c.activation, dropout=c.dropout)
        self.residual_1, self.residual_2, self.residual_3 = residual(c), residual(c), residual(c)

    def forward(self, x: Tensor, queries: Tensor, memory: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """(B, Q, E) and the last states of the encoder, (B, S, E) -> (B, Q, E)."""
        seen = self.cross.keys_values(memory, positions)
        x = self.residual_1(x, lambda y: attend(self.attention, y, queries))
        x = self.residual_2(x, lambda y: self.cross(y + queries, memory=seen, mask=mask))
        return self.residual_3(x, self.mlp)


class DETR(nn.Module):
    """Backbone, Transformer, and the heads for classes and boxes."""

    def __init__(self, c: DETRConfig) -> None:
        super().__init__()
        self.config = c
        hidden = c.hidden_size
        self.backbone = ResNet(c.backbone, norm=FrozenBatchNorm)
        self.projection = nn.Conv2d(c.backbone_hidden_sizes[-1], hidden, 1)
        self.positions = SinusoidalGrid(hidden) if c.positions == "sinusoidal" else LearnedGrid(c.num_positions, hidden)
        self.queries = nn.Embedding(c.num_queries, hidden)
        self.encoder = nn.ModuleList(EncoderBlock(c) for _ in range(c.num_layers))
        self.encoder_norm = nn.LayerNorm(hidden) if c.norm_first else nn.Identity()
        self.decoder = nn.ModuleList(DecoderBlock(c) for _ in range(c.num_decoder_layers or 0))
        self.decoder_norm = nn.LayerNorm(hidden)
        self.classifier = nn.Linear(hidden, c.num_classes + 1)
        self.boxes = nn.Sequential(
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 4)
        )
        self.dropout = nn.Dropout(c.dropout)
        initialize(self, "xavier_uniform")
        first: Any = self.decoder[0]  # reads zeros, so that one of its weights has no gradient
        unused = first.residual_1.norm if c.norm_first else first.attention.value
        unused.weight.requires_grad_(False)

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Find objects.

        Args:
            pixel_values: (B, C, H, W), normalised.
            pixel_mask: (B, H, W), 1 for a pixel and 0 for padding on the right or below it, for images of several
                sizes; graphs have none.

        Returns:
            ``logits`` (B, Q, L + 1), of which the last is that of no object, and ``pred_boxes`` (B, Q, 4): the centre,
            width and height of each box, as parts of the image's.
        """
        x = self.projection(self.backbone.features(pixel_values))  # (B, E, M, N)
        mask = None if pixel_mask is None else F.interpolate(pixel_mask[:, None].float(), x.shape[2:])[:, 0].bool()
        positions = self.positions(x, mask)
        x = self.dropout(x.flatten(2).transpose(1, 2))  # (B, S, E)
        padding = None if mask is None else mask.flatten(1)
        seen = build_mask(x.shape[1], x.shape[1], padding=padding)
        for block in self.encoder:
            x = block(x, positions, seen)
        x = self.encoder_norm(x)
        queries = self.queries.weight.expand(x.shape[0], -1, -1)  # (B, Q, E)
        seen = build_mask(queries.shape[1], x.shape[1], padding=padding)
        y = torch.zeros_like(queries)
        for block in self.decoder:
            y = block(y, queries, x, positions, seen)
            y = self.decoder_norm(y) if self.config.norm_each_layer else y
        y = self.decoder_norm(y)
        return {"logits": self.classifier(y), "pred_boxes": self.boxes(y).sigmoid()}
