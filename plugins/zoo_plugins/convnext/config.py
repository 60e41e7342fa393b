"""Configuration, graph and cost of ConvNeXt and ConvNeXt V2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Cost, Graph, cost, floats
from zoo_plugins.resnet.config import StagesConfig


@dataclass(frozen=True, kw_only=True)
class ConvNeXtConfig(StagesConfig):
    """Configuration of ConvNeXt and ConvNeXt V2. The defaults are ConvNeXt-T."""

    task: Literal["image-classification", "image-feature-extraction"] = "image-classification"
    """Whether the model outputs class logits, or the map of the last stage."""
    hidden_sizes: tuple[int, ...] = (96, 192, 384, 768)
    """Channels of each stage."""
    num_stage_layers: tuple[int, ...] = (3, 3, 9, 3)
    """Number of blocks of each stage."""
    patch_size: int = 4
    """Height and width of a patch, in pixels. A right or bottom margin smaller than a patch is ignored."""
    activation: Activation = "gelu"
    """Activation of the feed-forward networks."""
    layer_scale: float | None = None
    """Initial value of learned factors, one for each channel, of the outputs of blocks (Touvron et al. 2021b, equation
    3); no factors by default. ConvNeXt has 1e-6."""
    response_norm: bool = False
    """Whether the feed-forward networks normalise the responses of their channels, as in ConvNeXt V2 (Woo et al. 2023,
    equations 1 to 3)."""
    norm_eps: float = 1e-12
    """Added to the variance in the norm before the classifier. In the others it is 1e-6."""

    def __post_init__(self) -> None:
        self.require_positive("patch_size", "layer_scale", "norm_eps")
        self.check_stages()
        if self.map_size < 1:
            least = self.patch_size * 2 ** (len(self.hidden_sizes) - 1)
            raise ValueError(f"image_size {self.image_size} is smaller than {least}, one position of the last stage")

    @property
    def map_size(self) -> int:
        """Height and width of the map of the last stage: each division rounds down."""
        return self.image_size // self.patch_size // 2 ** (len(self.hidden_sizes) - 1)

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph; its outputs depend on the task."""
        return self.image_graphs(self.map_size, floats("pooler_output", "batch", self.hidden_sizes[-1]))

    def cost(self) -> Cost:
        """Return the parameters, without FLOPs, which :class:`zoo.Cost` has per token."""
        width = self.hidden_sizes[0]
        total = cost.linear(self.num_channels * self.patch_size**2, width) + cost.layer_norm(width)
        for stage, (size, layers) in enumerate(zip(self.hidden_sizes, self.num_stage_layers, strict=True)):
            if stage > 0:
                total += cost.layer_norm(width) + cost.linear(4 * width, size)
            total += layers * (
                cost.linear(49, size)
                + cost.layer_norm(size)
                + cost.feed_forward(size, 4 * size)
                + Cost((0 if self.layer_scale is None else size) + (8 * size if self.response_norm else 0))
            )
            width = size
        return Cost((total + cost.layer_norm(width) + self.head_cost()).parameters)
