"""Swin: a Transformer of images with attention in windows (Liu et al. 2021), and Swin V2 (Liu et al. 2022).

The image is cut into patches, as in ViT. Positions attend to those of their window, and every other block shifts the
windows by half of their size. Between stages, 2 x 2 positions become one of twice the width.

B batch, C channels, S image size, E width of a stage, M size of its map, L classes.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn import ContinuousOffsetBias, FeedForward, OffsetBias, PatchMerging, WindowAttention, initialize
from zoo_plugins.swin.config import SwinConfig

INIT_STD = 0.02


class SwinBlock(nn.Module):
    """Attention in windows and a feed-forward network, each with a norm before or after it and a residual connection
    (equation 3)."""

    def __init__(self, c: SwinConfig, stage: int, shift: int) -> None:
        super().__init__()
        size, heads, window = c.hidden_sizes[stage], c.num_heads[stage], c.window(stage)
        if c.positions == "table":
            positions: nn.Module = OffsetBias(heads, window, std=INIT_STD)
        else:
            positions = ContinuousOffsetBias(heads, window, pretrained_window=c.pretrained_window(stage))
        self.norm_first = c.norm_first
        self.norm_1 = nn.LayerNorm(size, eps=c.norm_eps)
        self.attention = WindowAttention(
            size, heads, window, shift=shift, positions=positions, bias=c.attention_bias, cosine=c.cosine,
            dropout=c.dropout,
        )  # fmt: skip
        self.norm_2 = nn.LayerNorm(size, eps=c.norm_eps)
        self.mlp = FeedForward(size, int(c.mlp_ratio * size), activation=c.activation)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, M, M, E) -> (B, M, M, E)."""
        if self.norm_first:
            x = x + self.dropout(self.attention(self.norm_1(x)))
            return x + self.dropout(self.mlp(self.norm_2(x)))
        x = x + self.norm_1(self.dropout(self.attention(x)))
        return x + self.norm_2(self.dropout(self.mlp(x)))


class Stage(nn.Module):
    """Blocks, and in all stages but the last the merging of patches."""

    def __init__(self, c: SwinConfig, stage: int) -> None:
        super().__init__()
        size, layers = c.hidden_sizes[stage], c.num_stage_layers[stage]
        self.blocks = nn.ModuleList(SwinBlock(c, stage, c.shift(stage, block)) for block in range(layers))
        self.merging: nn.Module = nn.Identity()
        if stage < len(c.hidden_sizes) - 1:
            self.merging = PatchMerging(size, c.hidden_sizes[stage + 1], norm_first=c.norm_first)

    def forward(self, x: Tensor) -> Tensor:
        """(B, M, M, E) -> (B, M / 2, M / 2, E of the next stage), or of the same shape in the last stage."""
        for block in self.blocks:
            x = block(x)
        return self.merging(x)


class Swin(nn.Module):
    """The stages, and the mean over normalised positions, which the classifier reads."""

    def __init__(self, c: SwinConfig) -> None:
        super().__init__()
        self.config = c
        self.patch = nn.Conv2d(c.num_channels, c.hidden_sizes[0], c.patch_size, stride=c.patch_size)
        self.patch_norm = nn.LayerNorm(c.hidden_sizes[0])
        self.dropout = nn.Dropout(c.dropout)
        self.stages = nn.ModuleList(Stage(c, stage) for stage in range(len(c.hidden_sizes)))
        self.norm = nn.LayerNorm(c.hidden_sizes[-1], eps=c.norm_eps)
        if c.task == "image-classification":
            self.head = nn.Linear(c.hidden_sizes[-1], c.num_classes)
        initialize(self, "truncated_normal", std=INIT_STD)
        nn.init.trunc_normal_(self.patch.weight, std=INIT_STD, a=-2 * INIT_STD, b=2 * INIT_STD)
        if self.patch.bias is not None:
            nn.init.zeros_(self.patch.bias)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Return the outputs of the configured task, by name.

        Args:
            pixel_values: (B, C, S, S), normalised.
        """
        if missing := -pixel_values.shape[-1] % self.config.patch_size:
            pixel_values = F.pad(pixel_values, (0, missing, 0, missing))
        x = self.dropout(self.patch_norm(self.patch(pixel_values).permute(0, 2, 3, 1)))  # (B, M, M, E)
        for stage in self.stages:
            x = stage(x)
        x = self.norm(x).flatten(1, 2)  # (B, M M, E)
        pooled = x.mean(1)  # (B, E)
        if self.config.task == "image-classification":
            return {"logits": self.head(pooled)}  # (B, L)
        return {"last_hidden_state": x, "pooler_output": pooled}
