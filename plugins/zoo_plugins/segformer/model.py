"""SegFormer: a hierarchical Transformer of images, with a decoder of dense layers (Xie et al. 2021).

Patches overlap. Keys and values are those of a smaller map. A 3 x 3 convolution in the feed-forward networks tells
positions apart, so that there are no embeddings of positions. The decoder reads the maps of all stages.

B batch, C channels, S image size, E width of a stage, M size of its map, R reduction, I intermediate size, D width of
the decoder, L classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn import ACTIVATIONS, MultiHeadAttention, initialize
from zoo_plugins.segformer.config import SegFormerConfig

INIT_STD = 0.02


class Patches(nn.Module):
    """A convolution with patches that overlap, and a norm of each position (section 3.1)."""

    def __init__(self, inputs: int, outputs: int, patch: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, patch, stride=stride, padding=patch // 2)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, M, M) -> (B, M / stride, M / stride, outputs)."""
        return self.norm(self.convolution(x).permute(0, 2, 3, 1))


class Reduction(nn.Module):
    """R x R positions become one, with a norm (equation 2)."""

    def __init__(self, size: int, reduction: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(size, size, reduction, stride=reduction)
        self.norm = nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, M, M, E) -> (B, M / R, M / R, E), rounded down."""
        return self.norm(self.convolution(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


class MixFeedForward(nn.Module):
    """W_2 f(C * (W_1 x + b_1)) + b_2 with a 3 x 3 convolution C of each channel (equation 3)."""

    def __init__(self, c: SegFormerConfig, stage: int) -> None:
        super().__init__()
        size, inner = c.hidden_sizes[stage], c.intermediate_size(stage)
        self.up = nn.Linear(size, inner)
        self.convolution = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.activation = ACTIVATIONS[c.activation]
        self.dropout = nn.Dropout(c.dropout)
        self.down = nn.Linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, M, M, E) -> (B, M, M, E)."""
        x = self.convolution(self.up(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)  # (B, M, M, I)
        return self.down(self.dropout(self.activation(x)))


class SegFormerBlock(nn.Module):
    """Attention to a smaller map and a feed-forward network, each a pre-norm residual sub-layer."""

    def __init__(self, c: SegFormerConfig, stage: int) -> None:
        super().__init__()
        size, reduction = c.hidden_sizes[stage], c.reductions[stage]
        self.norm_1 = nn.LayerNorm(size)
        self.reduction = Reduction(size, reduction) if reduction > 1 else nn.Identity()
        self.attention = MultiHeadAttention(size, c.num_heads[stage], dropout=c.dropout)
        self.norm_2 = nn.LayerNorm(size)
        self.mlp = MixFeedForward(c, stage)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, M, M, E) -> (B, M, M, E)."""
        y = self.norm_1(x)
        memory = self.attention.keys_values(self.reduction(y).flatten(1, 2))
        mixed = self.attention(y.flatten(1, 2), memory=memory)  # (B, M M, E)
        x = x + self.dropout(mixed.unflatten(1, x.shape[1:3]))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class Stage(nn.Module):
    """Patches of the previous map, blocks and a norm."""

    def __init__(self, c: SegFormerConfig, stage: int) -> None:
        super().__init__()
        inputs, size = (c.num_channels, *c.hidden_sizes)[stage], c.hidden_sizes[stage]
        self.patches = Patches(inputs, size, c.patch_sizes[stage], c.strides[stage])
        self.blocks = nn.ModuleList(SegFormerBlock(c, stage) for _ in range(c.num_stage_layers[stage]))
        self.norm = nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, E of the previous stage, M, M) -> (B, E, M / stride, M / stride)."""
        x = self.patches(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).permute(0, 3, 1, 2)


class Decoder(nn.Module):
    """Dense layers of the maps of all stages, and of these together, position by position (equation 4)."""

    def __init__(self, c: SegFormerConfig) -> None:
        super().__init__()
        width = c.decoder_hidden_size
        self.projections = nn.ModuleList(nn.Linear(size, width) for size in c.hidden_sizes)
        self.fuse = nn.Conv2d(len(c.hidden_sizes) * width, width, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(c.head_dropout)
        self.classifier = nn.Conv2d(width, c.num_classes, 1)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """(B, E, M, M) of each stage -> (B, L, M, M) of the first."""
        size = maps[0].shape[2:]
        resized = []
        for projection, x in zip(self.projections, maps, strict=True):
            x = projection(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # (B, D, M, M)
            resized.append(F.interpolate(x, size, mode="bilinear", align_corners=False))
        x = F.relu(self.norm(self.fuse(torch.cat(resized[::-1], dim=1))))
        return self.classifier(self.dropout(x))


class SegFormer(nn.Module):
    """The stages, with a classifier of the mean over positions, or the decoder, as configured."""

    def __init__(self, c: SegFormerConfig) -> None:
        super().__init__()
        self.config = c
        self.stages = nn.ModuleList(Stage(c, stage) for stage in range(len(c.hidden_sizes)))
        if c.task == "image-classification":
            self.head = nn.Linear(c.hidden_sizes[-1], c.num_classes)
        if c.task == "semantic-segmentation":
            self.decoder = Decoder(c)
        initialize(self, "truncated_normal", std=INIT_STD)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                fan_out = math.prod(part.kernel_size) * part.out_channels // part.groups
                nn.init.normal_(part.weight, std=math.sqrt(2 / fan_out))
                if part.bias is not None:
                    nn.init.zeros_(part.bias)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Return the output of the configured task, by name.

        Args:
            pixel_values: (B, C, S, S), normalised.
        """
        x, maps = pixel_values, []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        if self.config.task == "semantic-segmentation":
            return {"logits": self.decoder(maps)}  # (B, L, M, M)
        if self.config.task == "image-classification":
            return {"logits": self.head(x.mean((2, 3)))}  # (B, E, M, M) -> (B, L)
        return {"last_hidden_state": x}
