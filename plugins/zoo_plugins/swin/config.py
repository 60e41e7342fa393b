"""Configuration, graph and cost of Swin and Swin V2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Cost, Graph, cost, floats
from zoo_plugins.resnet.config import StagesConfig


@dataclass(frozen=True, kw_only=True)
class SwinConfig(StagesConfig):
    """Configuration of Swin and Swin V2. The defaults are Swin-T."""

    task: Literal["image-classification", "image-feature-extraction"] = "image-classification"
    """Whether the model outputs class logits, or the positions of the last stage and their mean."""
    hidden_sizes: tuple[int, ...] = (96, 192, 384, 768)
    """Width of each stage."""
    num_stage_layers: tuple[int, ...] = (2, 2, 6, 2)
    """Number of blocks of each stage."""
    num_heads: tuple[int, ...] = (3, 6, 12, 24)
    """Heads per block of each stage."""
    patch_size: int = 4
    """Height and width of a patch, in pixels. Images are padded with zeros to whole patches."""
    window_size: int = 7
    """Height and width of a window, in positions. A stage whose map is smaller has one window, of its size."""
    mlp_ratio: float = 4.0
    """Hidden width of the feed-forward networks, in multiples of the width of the stage, rounded down."""
    activation: Activation = "gelu"
    """Activation of the feed-forward networks."""
    attention_bias: bool | tuple[bool, ...] = True
    """Whether the query, key and value projections have biases: one value, or three in this order. The output
    projection always has one."""
    norm_first: bool = True
    """Whether norms are before the sub-layers, or after them and before their sum with the residual, as in Swin V2 (Liu
    et al. 2022, section 3.2)."""
    cosine: bool = False
    """Whether scores are scaled cosines, as in Swin V2 (equation 2), or scaled dot products."""
    positions: Literal["table", "continuous"] = "table"
    """Whether the bias of an offset is learned, or computed from the offset by a small network, as in Swin V2 (section
    3.3)."""
    pretrained_windows: tuple[int, ...] = ()
    """For ``continuous`` positions, the window of each stage for which offsets are scaled, 0 for that of the stage, as
    in all stages by default."""
    norm_eps: float = 1e-5
    """Added to the variance in the norms of blocks and before the classifier. In the others it is 1e-5."""
    dropout: float = 0.0
    """Dropout on embeddings, attention weights and residuals, during training."""

    def __post_init__(self) -> None:
        self.require_positive("patch_size", "window_size", "mlp_ratio", "norm_eps")
        self.require_probability("dropout")
        self.require_biases("attention_bias")
        self.check_stages()
        if len(self.num_heads) != len(self.hidden_sizes):
            raise ValueError(f"num_heads has {len(self.num_heads)} stages, but hidden_sizes {len(self.hidden_sizes)}")
        for size, heads in zip(self.hidden_sizes, self.num_heads, strict=True):
            if heads < 1 or size % heads:
                raise ValueError(f"hidden_sizes: {size} is not divisible by num_heads {heads}")
            if int(self.mlp_ratio * size) < 1:
                raise ValueError(f"mlp_ratio {self.mlp_ratio} leaves no feed-forward network of a width of {size}")
        if self.pretrained_windows and self.positions != "continuous":
            raise ValueError(f"pretrained_windows is for positions 'continuous', but positions is {self.positions!r}")
        if len(self.pretrained_windows) not in (0, len(self.hidden_sizes)):
            counts = f"{len(self.pretrained_windows)} stages, but hidden_sizes {len(self.hidden_sizes)}"
            raise ValueError(f"pretrained_windows has {counts}")
        if any(size < 0 or size == 1 for size in self.pretrained_windows):
            raise ValueError(f"pretrained_windows must be 0, or 2 or more, got {list(self.pretrained_windows)}")

    def map_side(self, stage: int) -> int:
        """Return height and width of the map of a stage: each division rounds up."""
        return -(-self.image_size // (self.patch_size * 2**stage))

    def window(self, stage: int) -> int:
        """Return the size of the windows of a stage."""
        return min(self.window_size, self.map_side(stage))

    def shift(self, stage: int, block: int) -> int:
        """Return the shift of the windows of a block: half a window in every other one, if there are several."""
        return self.window_size // 2 if block % 2 and self.map_side(stage) > self.window_size else 0

    def pretrained_window(self, stage: int) -> int | None:
        """Return the window for which offsets are scaled, None for that of the stage."""
        return (self.pretrained_windows[stage] or None) if self.pretrained_windows else None

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph; its outputs depend on the task. The heads of each window count as heads."""
        pixels = floats("pixel_values", "batch", self.num_channels, self.image_size, self.image_size)
        if self.task == "image-classification":
            outputs = [floats("logits", "batch", self.num_classes)]
        else:
            positions, width = self.map_side(len(self.hidden_sizes) - 1) ** 2, self.hidden_sizes[-1]
            outputs = [floats("last_hidden_state", "batch", positions, width), floats("pooler_output", "batch", width)]
        sizes = []  # heads and positions of each block
        for stage, (layers, heads) in enumerate(zip(self.num_stage_layers, self.num_heads, strict=True)):
            windows = (-(-self.map_side(stage) // self.window(stage))) ** 2
            sizes += [(windows * heads, self.window(stage) ** 2)] * layers
        weights = [
            floats(f"attentions.{layer}", "batch", heads, positions, positions)
            for layer, (heads, positions) in enumerate(sizes)
        ]
        return (Graph(inputs=(pixels,), outputs=tuple(outputs), attentions=tuple(weights)),)

    def cost(self) -> Cost:
        """Return the parameters, without FLOPs, which :class:`zoo.Cost` has per token."""
        width = self.hidden_sizes[0]
        total = cost.linear(self.num_channels * self.patch_size**2, width) + cost.layer_norm(width)
        for stage, (size, layers) in enumerate(zip(self.hidden_sizes, self.num_stage_layers, strict=True)):
            if stage > 0:
                total += cost.layer_norm(4 * width if self.norm_first else size)
                total += cost.linear(4 * width, size, bias=False)
            total += layers * (
                cost.window_attention(
                    size, self.num_heads[stage], window=self.window(stage), bias=self.attention_bias,
                    cosine=self.cosine, continuous=self.positions == "continuous",
                )
                + cost.feed_forward(size, int(self.mlp_ratio * size))
                + 2 * cost.layer_norm(size)
            )  # fmt: skip
            width = size
        return Cost((total + cost.layer_norm(width) + self.head_cost()).parameters)
