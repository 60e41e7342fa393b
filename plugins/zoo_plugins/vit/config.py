"""Configuration, graphs and cost of ViT, DeiT and DINOv2 to 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from zoo import Activation, ClassifierConfig, Cost, Graph, ImageConfig, attentions, cost, floats


@dataclass(frozen=True, kw_only=True)
class ViTConfig(ClassifierConfig, ImageConfig):
    """Configuration of ViT, DeiT and DINOv2 to 3. The defaults are ViT-B/16."""

    head_fields: ClassVar[tuple[str, ...]] = (*ClassifierConfig.head_fields, "pooler", "distillation_head")

    task: Literal["image-classification", "image-feature-extraction"] = "image-classification"
    """Whether the model outputs class logits or hidden states."""
    patch_size: int = 16
    """Height and width of a patch, in pixels. A right or bottom margin smaller than a patch is ignored."""
    hidden_size: int = 768
    """Width of the encoder."""
    num_layers: int = 12
    """Number of blocks."""
    num_heads: int = 12
    """Heads per block."""
    intermediate_size: int | None = None
    """Hidden width of the feed-forward network; 4 x ``hidden_size`` by default."""
    activation: Activation = "gelu"
    """Activation of the feed-forward network."""
    gated: bool = False
    """Whether the feed-forward network is gated (Shazeer 2020, equation 6), with ``activation`` on the gate."""
    layer_scale: float | None = None
    """Initial value of learned factors, one for each channel, of the outputs of sub-layers (Touvron et al. 2021b,
    equation 3); no factors by default."""
    norm_eps: float = 1e-6
    """Added to the variance in LayerNorm."""
    attention_bias: bool | tuple[bool, ...] = True
    """Whether the query, key and value projections have biases: one value, or three in this order. The output
    projection always has one."""
    positions: Literal["learned", "rotary"] = "learned"
    """Whether each position has a learned vector, or queries and keys of patches are rotated by angles that follow from
    row and column, as in DINOv3 (Simeoni et al. 2025, section 3.2)."""
    rope_theta: float = 100.0
    """Base of the frequencies of rotary positions."""
    num_registers: int = 0
    """Number of learned tokens without positions after the class token (Darcet et al. 2024)."""
    dropout: float = 0.0
    """Dropout on embeddings, attention weights and residuals, during training."""
    distilled: bool = False
    """Whether a distillation token follows the class token (Touvron et al. 2021)."""
    distillation_head: bool | None = None
    """Whether a second classifier reads the distillation token, and the logits are the mean of both classifiers'. By
    default true if there is such a token and the task is classification."""
    num_classes: int = 1000
    """Number of classes."""
    classify_patches: bool = False
    """Whether the classifier also reads the mean of the patches, after the class token (Oquab et al. 2023)."""
    pooler: bool = False
    """Whether the feature extractor has a tanh pooler on the class token."""

    def __post_init__(self) -> None:
        self.default("intermediate_size", 4 * self.hidden_size)
        self.default("distillation_head", self.distilled and self.task == "image-classification")
        self.require_positive(
            "patch_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "norm_eps", "layer_scale",
            "rope_theta",
        )  # fmt: skip
        self.require_biases("attention_bias")
        self.check_images()
        self.require_probability("dropout")
        self.require_divisible("hidden_size", "num_heads")
        if self.patch_size > self.image_size:
            raise ValueError(f"patch_size {self.patch_size} is larger than image_size {self.image_size}")
        if self.num_registers < 0:
            raise ValueError(f"num_registers must be 0 or more, got {self.num_registers}")
        if self.positions == "rotary" and self.hidden_size // self.num_heads % 4:
            size = f"a head of {self.hidden_size // self.num_heads} elements, not a multiple of 4"
            raise ValueError(f"positions 'rotary' cannot rotate {size}")
        self.check_classes(head=self.task == "image-classification")
        for name in ("classify_patches", "num_registers"):
            if getattr(self, name) and self.distilled:
                raise ValueError(f"{name} is for models without a distillation token, but distilled is True")
        if self.distillation_head and not self.distilled:
            raise ValueError("distillation_head needs a distillation token, but distilled is False")
        for name, task in (("pooler", "image-feature-extraction"), ("distillation_head", "image-classification")):
            if getattr(self, name) and self.task != task:
                raise ValueError(f"{name} is for the task {task!r}, but the task is {self.task!r}")

    def with_task(self, task: str, values: Mapping[str, Any] | None = None, where: object = None) -> Self:
        """Return this configuration for a task; see :meth:`zoo.Config.with_task`.

        Another task gets neither a pooler nor a second classifier.
        """
        changes = dict(values or {})
        if task != self.task:
            changes = {"pooler": False, "distillation_head": False} | changes
        return super().with_task(task, changes, where)

    @property
    def reads_patches(self) -> bool:
        """Whether there is a classifier that reads the mean of the patches."""
        return self.classify_patches and self.task == "image-classification"

    @property
    def num_rows(self) -> int:
        """Patches per row and per column."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """Patches per image."""
        return self.num_rows**2

    @property
    def num_special_tokens(self) -> int:
        """Class token, registers and, if ``distilled``, distillation token."""
        return (2 if self.distilled else 1) + self.num_registers

    @property
    def num_tokens(self) -> int:
        """Tokens per image: special tokens, then patches."""
        return self.num_special_tokens + self.num_patches

    @property
    def num_positions(self) -> int:
        """Learned positions: those of all tokens except registers."""
        return self.num_tokens - self.num_registers if self.positions == "learned" else 0

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph; its outputs depend on the task."""
        pixels = floats("pixel_values", "batch", self.num_channels, self.image_size, self.image_size)
        if self.task == "image-classification":
            outputs = [floats("logits", "batch", self.num_classes)]
        else:
            outputs = [floats("last_hidden_state", "batch", self.num_tokens, self.hidden_size)]
            outputs += [floats("pooler_output", "batch", self.hidden_size)] if self.pooler else []
        weights = attentions(self.num_layers, self.num_heads, queries=self.num_tokens, keys=self.num_tokens)
        return (Graph(inputs=(pixels,), outputs=tuple(outputs), attentions=weights),)

    def cost(self) -> Cost:
        """Return the closed-form cost; FLOPs are per patch, excluding parts that run once per image, such as heads."""
        hidden = self.hidden_size
        block = (
            2 * cost.layer_norm(hidden)
            + cost.attention(
                hidden, self.num_heads, head_dim=hidden // self.num_heads, context=self.num_tokens,
                bias=self.attention_bias, output_bias=True,
            )
            + self._feed_forward_cost()
            + Cost(0 if self.layer_scale is None else 2 * hidden)
        )  # fmt: skip
        heads = [self.num_classes] * (2 if self.distillation_head else 1)
        if self.task == "image-feature-extraction":
            heads = [hidden] if self.pooler else []
        return (
            cost.linear(self.num_channels * self.patch_size**2, hidden)
            + cost.embedding(self.num_special_tokens + self.num_positions, hidden)
            + self.num_layers * block
            + cost.layer_norm(hidden)
            + Cost(sum(cost.linear(hidden, size).parameters for size in heads))
            + Cost(hidden * self.num_classes if self.reads_patches else 0)
        )

    def _feed_forward_cost(self) -> Cost:
        if self.gated:
            return cost.gated_feed_forward(self.hidden_size, self.intermediate_size or 0, bias=True)
        return cost.feed_forward(self.hidden_size, self.intermediate_size or 0)
