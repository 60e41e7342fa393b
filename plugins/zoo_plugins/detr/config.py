"""Configuration, graph and cost of DETR."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Literal

from zoo import (
    Activation,
    ClassifierConfig,
    Cost,
    Graph,
    ImagePreparation,
    Size,
    TensorSpec,
    attentions,
    cost,
    floats,
)
from zoo_plugins.resnet.config import ResNetConfig

__all__ = ["BACKBONE_FIELDS", "DETRConfig"]

BACKBONE_FIELDS = (
    "hidden_sizes", "num_stage_layers", "stem_size", "block", "activation", "downsample_in_first_stage",
    "downsample_in_bottleneck", "dilated",
)  # fmt: skip
"""Fields of :class:`ResNetConfig` that those of the backbone, with the prefix ``backbone_``, state."""
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of the channels of ImageNet's images."""
_ROWS = 50
"""Rows and columns that have learned positions."""


@dataclass(frozen=True, kw_only=True)
class DETRConfig(ClassifierConfig, ImagePreparation):
    """Configuration of DETR. The defaults are DETR with a ResNet-50 (Carion et al. 2020, table 1)."""

    task: Literal["object-detection"] = "object-detection"
    """Boxes of objects in an image, and their classes."""
    num_queries: int = 100
    """Object queries: each finds one object or none."""
    max_detections: int | None = None
    """Objects that are found in an image, those of the first queries; ``num_queries`` by default."""
    num_classes: int = 91
    """Number of classes, without that of no object."""
    hidden_size: int = 256
    """Width of the Transformer, the paper's d."""
    num_layers: int = 6
    """Encoder blocks."""
    num_decoder_layers: int | None = None
    """Decoder blocks; ``num_layers`` by default."""
    num_heads: int = 8
    """Heads of each attention."""
    num_decoder_heads: int | None = None
    """Heads of each attention in the decoder; ``num_heads`` by default."""
    intermediate_size: int = 2048
    """Hidden width of the feed-forward networks."""
    decoder_intermediate_size: int | None = None
    """Hidden width of those of the decoder; ``intermediate_size`` by default."""
    activation: Activation = "relu"
    """Activation of the feed-forward networks."""
    norm_first: bool = False
    """Whether to normalise before each sub-layer instead of after it, and after the last encoder block, as in Table
    Transformer. The decoder always ends with a norm."""
    norm_each_layer: bool = False
    """Whether the last norm of the decoder is also applied after each of its blocks, as transformers does with
    ``auxiliary_loss``."""
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    """Whether the positions of a map are sinusoids of row and column, as parts of all rows and columns, or learned
    vectors of up to 50 rows and columns."""
    dropout: float = 0.1
    """Dropout on the map, attention weights and sub-layers, during training."""
    backbone_hidden_sizes: tuple[int, ...] = ResNetConfig.hidden_sizes
    """Channels of each stage of the backbone, a ResNet."""
    backbone_num_stage_layers: tuple[int, ...] = ResNetConfig.num_stage_layers
    """Number of blocks of each stage."""
    backbone_stem_size: int = 64
    """Channels of the first convolution."""
    backbone_block: Literal["basic", "bottleneck"] = "bottleneck"
    """Kind of blocks: see ``block`` of ResNet."""
    backbone_activation: Activation = "relu"
    """Activation after the first convolution and after the sum of each block."""
    backbone_downsample_in_first_stage: bool = False
    """Whether the first stage also halves height and width."""
    backbone_downsample_in_bottleneck: bool = False
    """Whether the first convolution of a bottleneck halves height and width, and not the second."""
    backbone_dilated: bool = False
    """Whether the last stage keeps height and width, and its convolutions are dilated instead (DC5)."""
    backbone_library: Literal["timm", "transformers"] | None = None
    """Library whose ResNet a published checkpoint names, and after which its tensors are named; by default timm, if it
    has one of these sizes. The model is the same."""
    image_size: int | tuple[int, ...] = (800, 1333)
    """Shortest and longest edge of images, in pixels, with ``image_resize`` edges; otherwise height and width, one
    number for squares."""
    image_resize: Literal["edges", "stretch"] = "edges"
    """Whether images keep their proportions, so that the shorter side has the first of the two sizes if the longer side
    then does not exceed the second, or are stretched."""

    def __post_init__(self) -> None:
        for name, source in (
            ("num_decoder_layers", "num_layers"),
            ("num_decoder_heads", "num_heads"),
            ("decoder_intermediate_size", "intermediate_size"),
            ("max_detections", "num_queries"),
        ):
            self.default(name, getattr(self, source))
        if self.num_channels == len(_MEAN):
            self.default("image_mean", _MEAN)
            self.default("image_std", _STD)
        self.require_positive(
            "num_queries", "max_detections", "hidden_size", "num_layers", "num_decoder_layers", "num_heads",
            "num_decoder_heads", "intermediate_size", "decoder_intermediate_size",
        )  # fmt: skip
        self.require_probability("dropout")
        self.require_divisible("hidden_size", "num_heads")
        self.require_divisible("hidden_size", "num_decoder_heads")
        if self.hidden_size % (4 if self.positions == "sinusoidal" else 2):
            raise ValueError(
                f"positions {self.positions!r} of rows and columns cannot share {self.hidden_size} numbers"
            )
        if (self.max_detections or 0) > self.num_queries:
            raise ValueError(f"max_detections {self.max_detections} exceeds num_queries {self.num_queries}")
        self.check_images()
        if self.image_crop != 1:
            raise ValueError(f"images are not cropped, but image_crop is {self.image_crop}")
        self.check_classes(head=False)
        self.default("problem_type", "single_label_classification")  # also of one class, beside that of no object
        if self.problem_type != "single_label_classification":
            raise ValueError(f"a query has a single class, but problem_type is {self.problem_type!r}")
        longest = _ROWS * self.backbone.total_stride
        if self.positions == "learned" and max(self.sides) > longest:
            raise ValueError(f"learned positions are for sides of {longest} pixels, got image_size {self.image_size}")
        self.default("backbone_library", "transformers" if self.timm_backbone is None else "timm")

    @property
    def backbone(self) -> ResNetConfig:
        """The configuration of the backbone alone."""
        fields = {name: getattr(self, f"backbone_{name}") for name in BACKBONE_FIELDS}
        return ResNetConfig(task="image-feature-extraction", num_channels=self.num_channels, **fields)

    @property
    def timm_backbone(self) -> str | None:
        """The name of timm's ResNet with the sizes of the backbone; None if there is none."""
        sizes = self.backbone_block, self.backbone_hidden_sizes, self.backbone_num_stage_layers
        plain = self.backbone_activation == "relu" and self.backbone_stem_size == 64
        plain &= not (self.backbone_downsample_in_first_stage or self.backbone_downsample_in_bottleneck)
        return next((name for name, known in TIMM_BACKBONES.items() if known == sizes), None) if plain else None

    @property
    def num_positions(self) -> int:
        """Rows, and columns, that have learned positions."""
        return _ROWS if self.positions == "learned" else 0

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph. It declares attention weights if all images have one size: the dimensions of graphs are
        sums and quotients of others, but no products."""
        sides: tuple[str | int, str | int] = ("height", "width") if self.has_many_sizes else self.sides
        size = Size(min=1, max=max(self.sides))
        return (
            Graph(
                inputs=(floats("pixel_values", "batch", self.num_channels, *sides),),
                outputs=(
                    floats("logits", "batch", self.num_queries, self.num_classes + 1),
                    floats("pred_boxes", "batch", self.num_queries, 4),
                ),
                attentions=() if self.has_many_sizes else self._attentions(),
                sizes={"height": size, "width": size} if self.has_many_sizes else {},
            ),
        )

    def _attentions(self) -> tuple[TensorSpec, ...]:
        """Declare the attention weights of the encoder, and those of each decoder block in turn."""
        stride, queries = self.backbone.total_stride, self.num_queries
        height, width = (-(-side // stride) for side in self.sides)
        layers, heads = self.num_decoder_layers or 0, self.num_decoder_heads or 0
        of_queries = attentions(layers, heads, queries=queries, keys=queries, name="decoder_attentions")
        crossing = attentions(layers, heads, queries=queries, keys=height * width, name="cross_attentions")
        return (
            *attentions(self.num_layers, self.num_heads, queries=height * width, keys=height * width),
            *chain.from_iterable(zip(of_queries, crossing, strict=True)),
        )

    def cost(self) -> Cost:
        """Return the parameters, without FLOPs, which :class:`zoo.Cost` has per token. Frozen norms have none."""
        hidden = self.hidden_size
        attention = 4 * cost.linear(hidden, hidden)
        norm = cost.layer_norm(hidden)
        encoder = attention + cost.feed_forward(hidden, self.intermediate_size) + 2 * norm
        decoder = 2 * attention + cost.feed_forward(hidden, self.decoder_intermediate_size or 0) + 3 * norm
        total = (
            cost.linear(self.backbone_hidden_sizes[-1], hidden)
            + cost.embedding(self.num_queries, hidden)
            + cost.embedding(2 * self.num_positions, hidden // 2)
            + self.num_layers * encoder
            + (self.num_decoder_layers or 0) * decoder
            + (2 if self.norm_first else 1) * norm
            + cost.linear(hidden, self.num_classes + 1)
            + 2 * cost.linear(hidden, hidden)
            + cost.linear(hidden, 4)
        )
        return Cost(self.backbone.num_weights + total.parameters)


_BASIC, _WIDE = (64, 128, 256, 512), (256, 512, 1024, 2048)
TIMM_BACKBONES = {
    "resnet18": ("basic", _BASIC, (2, 2, 2, 2)),
    "resnet34": ("basic", _BASIC, (3, 4, 6, 3)),
    "resnet26": ("bottleneck", _WIDE, (2, 2, 2, 2)),
    "resnet50": ("bottleneck", _WIDE, (3, 4, 6, 3)),
    "resnet101": ("bottleneck", _WIDE, (3, 4, 23, 3)),
    "resnet152": ("bottleneck", _WIDE, (3, 8, 36, 3)),
}
"""The ResNets of timm by name: kind of blocks, channels and number of blocks of each stage."""
