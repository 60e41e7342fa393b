"""Configuration, graph and cost of SegFormer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from zoo import Activation, ClassifierConfig, Cost, Graph, cost, floats
from zoo_plugins.resnet.config import StagesConfig

_PER_STAGE = ("num_heads", "patch_sizes", "strides", "reductions", "mlp_ratios")


@dataclass(frozen=True, kw_only=True)
class SegFormerConfig(StagesConfig):
    """Configuration of SegFormer. The defaults are SegFormer-B0."""

    head_fields: ClassVar[tuple[str, ...]] = (*ClassifierConfig.head_fields, "decoder_hidden_size", "head_dropout")

    task: Literal["image-classification", "semantic-segmentation", "image-feature-extraction"] = "image-classification"
    """Whether the model outputs logits of the image, of its positions, or the map of the last stage."""
    image_size: int = 512
    """Height and width of the images, in pixels."""
    hidden_sizes: tuple[int, ...] = (32, 64, 160, 256)
    """Width of each stage."""
    num_stage_layers: tuple[int, ...] = (2, 2, 2, 2)
    """Number of blocks of each stage."""
    num_heads: tuple[int, ...] = (1, 2, 5, 8)
    """Heads per block of each stage."""
    patch_sizes: tuple[int, ...] = (7, 3, 3, 3)
    """Height and width of the patches of each stage, which overlap, in positions of the previous map (or pixels)."""
    strides: tuple[int, ...] = (4, 2, 2, 2)
    """Distance of the patches of each stage."""
    reductions: tuple[int, ...] = (8, 4, 2, 1)
    """By how much height and width of the map of keys and values are divided in each stage, rounded down."""
    mlp_ratios: tuple[int, ...] = (4, 4, 4, 4)
    """Hidden width of the feed-forward networks of each stage, in multiples of its width."""
    activation: Activation = "gelu"
    """Activation of the feed-forward networks. That of the decoder is always ``relu``."""
    dropout: float = 0.0
    """Dropout on attention weights and residuals, during training."""
    decoder_hidden_size: int = 256
    """Width of the decoder, for semantic segmentation."""
    head_dropout: float = 0.1
    """Dropout before the classifier of the decoder, during training."""

    def __post_init__(self) -> None:
        self.require_positive("decoder_hidden_size")
        self.require_probability("dropout")
        self.require_probability("head_dropout")
        self.check_stages()
        for name in _PER_STAGE:
            values = getattr(self, name)
            if len(values) != len(self.hidden_sizes):
                raise ValueError(f"{name} has {len(values)} stages, but hidden_sizes {len(self.hidden_sizes)}")
            if min(values) < 1:
                raise ValueError(f"{name} must be positive, got {list(values)}")
        for stage, (size, heads) in enumerate(zip(self.hidden_sizes, self.num_heads, strict=True)):
            if size % heads:
                raise ValueError(f"hidden_sizes: {size} is not divisible by num_heads {heads}")
            if self.map_side(stage) < self.reductions[stage]:
                what = f"the map of stage {stage} has a side of {self.map_side(stage)}"
                raise ValueError(f"image_size {self.image_size}: {what}, less than its reduction")

    def map_side(self, stage: int) -> int:
        """Return height and width of the map of a stage: patches reach half of their size beyond the previous map."""
        side = self.image_size
        for patch, stride in list(zip(self.patch_sizes, self.strides, strict=True))[: stage + 1]:
            side = (side + 2 * (patch // 2) - patch) // stride + 1
        return side

    def intermediate_size(self, stage: int) -> int:
        """Return the hidden width of the feed-forward networks of a stage."""
        return self.hidden_sizes[stage] * self.mlp_ratios[stage]

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph; its output depends on the task."""
        pixels = floats("pixel_values", "batch", self.num_channels, self.image_size, self.image_size)
        if self.task == "image-classification":
            output = floats("logits", "batch", self.num_classes)
        elif self.task == "semantic-segmentation":
            output = floats("logits", "batch", self.num_classes, self.map_side(0), self.map_side(0))
        else:
            side = self.map_side(len(self.hidden_sizes) - 1)
            output = floats("last_hidden_state", "batch", self.hidden_sizes[-1], side, side)
        sizes = []  # heads, queries and keys of each block
        for stage, (layers, heads) in enumerate(zip(self.num_stage_layers, self.num_heads, strict=True)):
            side = self.map_side(stage)
            sizes += [(heads, side**2, (side // self.reductions[stage]) ** 2)] * layers
        weights = [floats(f"attentions.{layer}", "batch", *dims) for layer, dims in enumerate(sizes)]
        return (Graph(inputs=(pixels,), outputs=(output,), attentions=tuple(weights)),)

    def cost(self) -> Cost:
        """Return the parameters, without FLOPs, which :class:`zoo.Cost` has per token."""
        total, width = Cost(), self.num_channels
        for stage, (size, layers) in enumerate(zip(self.hidden_sizes, self.num_stage_layers, strict=True)):
            inner, reduction = self.intermediate_size(stage), self.reductions[stage]
            block = (
                cost.attention(size, self.num_heads[stage], head_dim=size // self.num_heads[stage], context=1)
                + (cost.linear(size * reduction**2, size) + cost.layer_norm(size) if reduction > 1 else Cost())
                + cost.feed_forward(size, inner)
                + cost.convolution(inner, inner, 9, groups=inner)
                + 2 * cost.layer_norm(size)
            )
            total += (
                cost.linear(width * self.patch_sizes[stage] ** 2, size) + 2 * cost.layer_norm(size) + layers * block
            )
            width = size
        return Cost((total + self._decoder_cost() + self.head_cost()).parameters)

    def _decoder_cost(self) -> Cost:
        width = self.decoder_hidden_size
        if self.task != "semantic-segmentation":
            return Cost()
        return (
            sum((cost.linear(size, width) for size in self.hidden_sizes), Cost())
            + cost.linear(len(self.hidden_sizes) * width, width, bias=False)
            + cost.layer_norm(width)
            + cost.linear(width, self.num_classes)
        )
