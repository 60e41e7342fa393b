"""Configurations of convolutional networks in stages; configuration, graph and cost of ResNet."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from zoo import Activation, ClassifierConfig, Cost, Graph, ImageConfig, TensorSpec, cost, floats

__all__ = ["ResNetConfig", "StagesConfig"]


@dataclass(frozen=True, kw_only=True)
class StagesConfig(ClassifierConfig, ImageConfig):
    """Base class of configurations of networks in stages, each with a smaller map of more channels than the previous.

    Subclasses declare ``task``; models of all tasks but image-feature-extraction have classes. ``__post_init__`` of a
    subclass calls :meth:`check_stages`, and ``graphs`` may call :meth:`image_graphs`.
    """

    hidden_sizes: tuple[int, ...] = ()
    """Channels of each stage."""
    num_stage_layers: tuple[int, ...] = ()
    """Number of blocks of each stage."""
    num_classes: int = 1000
    """Number of classes."""

    def check_stages(self) -> None:
        """Raise ``ValueError`` if the fields contradict each other."""
        self.check_images()
        self.check_classes(head=self.task != "image-feature-extraction")
        if len(self.hidden_sizes) != len(self.num_stage_layers):
            counts = f"{len(self.hidden_sizes)} stages, but num_stage_layers {len(self.num_stage_layers)}"
            raise ValueError(f"hidden_sizes has {counts}")
        for name in ("hidden_sizes", "num_stage_layers"):
            if min(getattr(self, name), default=0) < 1:
                raise ValueError(f"{name} must be one or more positive numbers, got {list(getattr(self, name))}")

    def image_graphs(self, map_size: int, *features: TensorSpec) -> tuple[Graph, ...]:
        """Declare one graph of images.

        Args:
            map_size: height and width of the map of the last stage.
            features: the outputs of feature extraction beside this map.
        """
        pixels = floats("pixel_values", "batch", self.num_channels, self.image_size, self.image_size)
        if self.task == "image-classification":
            return (Graph(inputs=(pixels,), outputs=(floats("logits", "batch", self.num_classes),)),)
        states = floats("last_hidden_state", "batch", self.hidden_sizes[-1], map_size, map_size)
        return (Graph(inputs=(pixels,), outputs=(states, *features)),)

    def head_cost(self) -> Cost:
        """Return the cost of the classifier, if there is one."""
        classifies = self.task == "image-classification"
        return cost.linear(self.hidden_sizes[-1], self.num_classes) if classifies else Cost()


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(StagesConfig):
    """Configuration of ResNet. The defaults are ResNet-50 with its stride in the 3 x 3 convolutions."""

    task: Literal["image-classification", "image-feature-extraction"] = "image-classification"
    """Whether the model outputs class logits, or the map of the last stage."""
    hidden_sizes: tuple[int, ...] = (256, 512, 1024, 2048)
    """Channels of each stage."""
    num_stage_layers: tuple[int, ...] = (3, 4, 6, 3)
    """Number of blocks of each stage."""
    stem_size: int = 64
    """Channels of the first convolution."""
    block: Literal["basic", "bottleneck"] = "bottleneck"
    """Whether a block has two 3 x 3 convolutions, or a 3 x 3 convolution of a quarter of the channels between two 1 x 1
    convolutions."""
    activation: Activation = "relu"
    """Activation after the first convolution and after the sum of each block. Within blocks it is always ``relu``."""
    downsample_in_first_stage: bool = False
    """Whether the first stage also halves height and width."""
    downsample_in_bottleneck: bool = False
    """Whether the first convolution of a bottleneck halves height and width, as in the paper, and not the second."""
    dilated: bool = False
    """Whether the last stage keeps height and width. The 3 x 3 convolutions of its bottlenecks, but for the first, then
    read every second position."""

    def __post_init__(self) -> None:
        self.require_positive("stem_size")
        self.check_stages()
        if self.dilated and self.block != "bottleneck":
            raise ValueError(f"dilated is for block 'bottleneck', but block is {self.block!r}")
        if self.block == "bottleneck" and min(self.hidden_sizes) < 4:
            raise ValueError(f"block 'bottleneck' needs hidden_sizes of at least 4, got {list(self.hidden_sizes)}")

    def stride(self, stage: int) -> int:
        """Return by how much a stage divides height and width."""
        if self.dilation(stage) > 1:
            return 1
        return 2 if stage > 0 or self.downsample_in_first_stage else 1

    def dilation(self, stage: int) -> int:
        """Return the distance of the positions that the 3 x 3 convolutions of a stage read, but for the first."""
        return 2 if self.dilated and stage == len(self.hidden_sizes) - 1 else 1

    @property
    def total_stride(self) -> int:
        """By how much all stages together divide height and width."""
        return 4 * math.prod(map(self.stride, range(len(self.hidden_sizes))))

    @property
    def map_size(self) -> int:
        """Height and width of the map of the last stage: each halving rounds up."""
        return -(-self.image_size // self.total_stride)

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph; its output depends on the task."""
        return self.image_graphs(self.map_size)

    def cost(self) -> Cost:
        """Return the parameters, without FLOPs, which :class:`zoo.Cost` has per token."""
        norms = sum(2 * outputs for _, outputs, _ in self.convolutions())
        return Cost(self.num_weights + norms + self.head_cost().parameters)

    @property
    def num_weights(self) -> int:
        """Weights of all convolutions, which have no biases."""
        return sum(inputs * outputs * kernel**2 for inputs, outputs, kernel in self.convolutions())

    def convolutions(self) -> Iterator[tuple[int, int, int]]:
        """Yield the input channels, output channels and kernel size of each convolution. A norm follows each."""
        yield self.num_channels, self.stem_size, 7
        width = self.stem_size
        for stage, (size, layers) in enumerate(zip(self.hidden_sizes, self.num_stage_layers, strict=True)):
            if width != size or self.stride(stage) != 1:
                yield width, size, 1
            for layer in range(layers):
                yield from self._block(size if layer else width, size)
            width = size

    def _block(self, inputs: int, outputs: int) -> Iterator[tuple[int, int, int]]:
        """Yield the convolutions of a block without its shortcut."""
        if self.block == "basic":
            yield from ((inputs, outputs, 3), (outputs, outputs, 3))
        else:
            inner = outputs // 4
            yield from ((inputs, inner, 1), (inner, inner, 3), (inner, outputs, 1))
