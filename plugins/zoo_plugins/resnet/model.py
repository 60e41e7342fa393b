"""ResNet: a convolutional network with residual connections (He et al. 2016).

Each block adds the result of two or three convolutions to its input. The first block of a stage halves height and
width, and a 1 x 1 convolution gives its input the same shape. After each convolution, each channel is normalised over
the batch (Ioffe and Szegedy 2015). The running statistics of these norms are buffers, which inference uses.

B batch, C channels, S image size, E channels of a stage, M size of its map, L classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from zoo import Activation
from zoo.nn import ACTIVATIONS, initialize
from zoo_plugins.resnet.config import ResNetConfig

__all__ = ["ResNet"]

Norm = Callable[[int], nn.Module]
"""Builds the norm of a number of channels."""


class Convolution(nn.Module):
    """A convolution without bias and a norm, which keep height and width, or halve them and round up."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, *, dilation: int = 1, norm: Norm
    ) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(
            inputs, outputs, kernel, stride=stride, padding=dilation * (kernel // 2), dilation=dilation, bias=False
        )
        self.norm = norm(outputs)
        nn.init.kaiming_normal_(self.convolution.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, M, M) -> (B, outputs, M / stride, M / stride)."""
        return self.norm(self.convolution(x))


class ResNetBlock(nn.Module):
    """Two convolutions (figure 2), or three in a bottleneck (figure 5), and the shortcut around them."""

    def __init__(
        self, c: ResNetConfig, inputs: int, outputs: int, stride: int = 1, *, dilation: int = 1, norm: Norm
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[c.activation]
        has_shortcut = inputs != outputs or stride != 1
        self.shortcut = Convolution(inputs, outputs, 1, stride, norm=norm) if has_shortcut else nn.Identity()
        if c.block == "basic":
            layers = [Convolution(inputs, outputs, 3, stride, norm=norm), Convolution(outputs, outputs, 3, norm=norm)]
        else:
            inner = outputs // 4
            first, second = (stride, 1) if c.downsample_in_bottleneck else (1, stride)
            layers = [
                Convolution(inputs, inner, 1, first, norm=norm),
                Convolution(inner, inner, 3, second, dilation=dilation, norm=norm),
                Convolution(inner, outputs, 1, norm=norm),
            ]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, M, M) -> (B, outputs, M / stride, M / stride)."""
        y = x
        for layer in self.layers[:-1]:
            y = F.relu(layer(y))
        return self.activation(self.layers[-1](y) + self.shortcut(x))


class Stem(nn.Module):
    """The first convolution, and a maximum over 3 x 3 positions; each halves height and width."""

    def __init__(self, channels: int, outputs: int, activation: Activation, norm: Norm) -> None:
        super().__init__()
        self.layer = Convolution(channels, outputs, 7, 2, norm=norm)
        self.activation = ACTIVATIONS[activation]
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, C, S, S) -> (B, E, S / 4, S / 4)."""
        return self.pool(self.activation(self.layer(pixel_values)))


class ResNet(nn.Module):
    """The stages, with a classifier of the mean over positions as configured.

    ``norm`` builds the norm after a convolution, given the number of channels.
    """

    def __init__(self, c: ResNetConfig, *, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.config = c
        self.stem = Stem(c.num_channels, c.stem_size, c.activation, norm)
        self.stages = nn.ModuleList()
        width = c.stem_size
        for stage, (size, layers) in enumerate(zip(c.hidden_sizes, c.num_stage_layers, strict=True)):
            blocks = [ResNetBlock(c, width, size, c.stride(stage), norm=norm)]
            blocks += [ResNetBlock(c, size, size, dilation=c.dilation(stage), norm=norm) for _ in range(layers - 1)]
            self.stages.append(nn.Sequential(*blocks))
            width = size
        if c.task == "image-classification":
            self.head = nn.Linear(width, c.num_classes)
        initialize(self, "truncated_normal")

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Return the output of the configured task, by name.

        Args:
            pixel_values: (B, C, S, S), normalised.
        """
        x = self.features(pixel_values)
        if self.config.task == "image-classification":
            return {"logits": self.head(x.mean((2, 3)))}  # (B, E, M, M) -> (B, L)
        return {"last_hidden_state": x}

    def features(self, pixel_values: Tensor) -> Tensor:
        """Return the map of the last stage, (B, C, S, S) -> (B, E, M, M). Images may also be oblong."""
        x = self.stem(pixel_values)
        for stage in self.stages:
            x = stage(x)
        return x
