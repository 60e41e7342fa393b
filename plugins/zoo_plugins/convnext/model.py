"""ConvNeXt: a convolutional network that resembles Transformers (Liu et al. 2022), and ConvNeXt V2 (Woo et al. 2023).

The image is cut into patches, as in ViT. A block mixes the positions of each channel by a 7 x 7 convolution, and then
the channels of each position by a feed-forward network. Between stages, a convolution halves height and width.

B batch, C channels, S image size, E channels of a stage, M size of its map, I intermediate size, L classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.nn import ACTIVATIONS, LayerScale, initialize
from zoo_plugins.convnext.config import ConvNeXtConfig

INIT_STD = 0.02
NORM_EPS = 1e-6


class ResponseNorm(nn.Module):
    """Global response normalisation (Woo et al. 2023, equations 1 to 3): channels that respond more suppress others."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(B, M, M, I) -> (B, M, M, I)."""
        response = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)  # (B, 1, 1, I)
        relative = response / (response.mean(-1, keepdim=True) + NORM_EPS)
        return x + self.weight * (x * relative) + self.bias


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of each position of a map."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, E, M, M) -> (B, E, M, M)."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """A convolution of each channel, a norm and a feed-forward network, with a residual connection (figure 4)."""

    def __init__(self, c: ConvNeXtConfig, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=NORM_EPS)
        self.up = nn.Linear(channels, 4 * channels)
        self.activation = ACTIVATIONS[c.activation]
        self.response_norm = ResponseNorm(4 * channels) if c.response_norm else nn.Identity()
        self.down = nn.Linear(4 * channels, channels)
        self.scale = nn.Identity() if c.layer_scale is None else LayerScale(channels, c.layer_scale)

    def forward(self, x: Tensor) -> Tensor:
        """(B, E, M, M) -> (B, E, M, M)."""
        y = self.norm(self.convolution(x).permute(0, 2, 3, 1))  # (B, M, M, E)
        y = self.scale(self.down(self.response_norm(self.activation(self.up(y)))))
        return x + y.permute(0, 3, 1, 2)


class Stage(nn.Module):
    """Blocks, after a norm and a convolution that halves height and width in all stages but the first."""

    def __init__(self, c: ConvNeXtConfig, stage: int) -> None:
        super().__init__()
        size = c.hidden_sizes[stage]
        self.downsampling = nn.ModuleList()
        if stage > 0:
            inputs = c.hidden_sizes[stage - 1]
            self.downsampling.append(ChannelNorm(inputs, eps=NORM_EPS))
            self.downsampling.append(nn.Conv2d(inputs, size, 2, stride=2))
        self.blocks = nn.ModuleList(ConvNeXtBlock(c, size) for _ in range(c.num_stage_layers[stage]))

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, M, M) -> (B, E, M / 2, M / 2), or of the same size in the first stage."""
        for layer in (*self.downsampling, *self.blocks):
            x = layer(x)
        return x


class ConvNeXt(nn.Module):
    """The stages, and the normalised mean over positions, which the classifier reads."""

    def __init__(self, c: ConvNeXtConfig) -> None:
        super().__init__()
        self.config = c
        self.patch = nn.Conv2d(c.num_channels, c.hidden_sizes[0], c.patch_size, stride=c.patch_size)
        self.patch_norm = ChannelNorm(c.hidden_sizes[0], eps=NORM_EPS)
        self.stages = nn.ModuleList(Stage(c, stage) for stage in range(len(c.hidden_sizes)))
        self.norm = nn.LayerNorm(c.hidden_sizes[-1], eps=c.norm_eps)
        if c.task == "image-classification":
            self.head = nn.Linear(c.hidden_sizes[-1], c.num_classes)
        initialize(self, "truncated_normal", std=INIT_STD)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.trunc_normal_(part.weight, std=INIT_STD, a=-2 * INIT_STD, b=2 * INIT_STD)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Return the outputs of the configured task, by name.

        Args:
            pixel_values: (B, C, S, S), normalised.
        """
        x = self.patch_norm(self.patch(pixel_values))  # (B, E, S / patch size, S / patch size)
        for stage in self.stages:
            x = stage(x)
        pooled = self.norm(x.mean((2, 3)))  # (B, E)
        if self.config.task == "image-classification":
            return {"logits": self.head(pooled)}  # (B, L)
        return {"last_hidden_state": x, "pooler_output": pooled}
