"""Configuration, graph and cost of MLP-Mixer."""

from dataclasses import dataclass
from typing import Literal

import zoo
from zoo import cost


@dataclass(frozen=True, kw_only=True)
class MixerConfig(zoo.Config):
    """Configuration of MLP-Mixer. The defaults are Mixer-B/16."""

    task: Literal["image-classification"] = "image-classification"
    """Logits of the classes."""
    image_size: int = 224
    """Height and width of the images, in pixels."""
    patch_size: int = 16
    """Height and width of a patch."""
    num_channels: int = 3
    """Channels of the images, 3 for RGB."""
    hidden_size: int = 768
    """Width of a patch's vector (the paper's C)."""
    num_layers: int = 12
    """Number of blocks."""
    token_intermediate_size: int | None = None
    """Hidden width of the token-mixing network (D_S); half of ``hidden_size`` by default."""
    intermediate_size: int | None = None
    """Hidden width of the channel-mixing network (D_C); 4 x ``hidden_size`` by default."""
    activation: zoo.Activation = "gelu"
    """Activation of both networks."""
    norm_eps: float = 1e-6
    """Added to the variance in LayerNorm."""
    num_classes: int = 1000
    """Number of classes."""
    labels: tuple[str, ...] = ()
    """Names of the classes, if any."""
    image_mean: tuple[float, ...] | None = None
    """Mean subtracted from each channel, for pixels in [0, 1]; 0.5 by default."""
    image_std: tuple[float, ...] | None = None
    """Standard deviation that each channel is then divided by; 0.5 by default."""

    def __post_init__(self):
        self.default("token_intermediate_size", max(1, self.hidden_size // 2))
        self.default("intermediate_size", 4 * self.hidden_size)
        self.require_positive(
            "image_size", "patch_size", "num_channels", "hidden_size", "num_layers", "token_intermediate_size",
            "intermediate_size", "norm_eps", "num_classes",
        )  # fmt: skip
        self.require_divisible("image_size", "patch_size")
        for name in ("image_mean", "image_std"):
            self.default(name, (0.5,) * self.num_channels)
            values = getattr(self, name)
            if len(values) != self.num_channels:
                raise ValueError(f"{name} {values} has {len(values)} numbers for num_channels {self.num_channels}")
        if min(self.image_std) <= 0:
            raise ValueError(f"image_std must be positive, got {self.image_std}")
        if self.labels and len(self.labels) != self.num_classes:
            raise ValueError(f"there are {len(self.labels)} labels for num_classes {self.num_classes}")

    @property
    def num_patches(self):
        """Patches per image (the paper's S)."""
        return (self.image_size // self.patch_size) ** 2

    def graphs(self):
        """One graph for a fixed image size, because the token-mixing network depends on the number of patches."""
        pixels = zoo.floats("pixel_values", "batch", self.num_channels, self.image_size, self.image_size)
        return (zoo.Graph(inputs=(pixels,), outputs=(zoo.floats("logits", "batch", self.num_classes),)),)

    def cost(self):
        """Return the closed-form cost. FLOPs are per patch, without the head, which runs once per image."""
        hidden = self.hidden_size
        mix_patches = zoo.Cost(  # runs on P numbers for each of E channels; FLOPs divided by P patches
            cost.feed_forward(self.num_patches, self.token_intermediate_size).parameters,
            cost.feed_forward(hidden, self.token_intermediate_size).flops,
        )
        block = 2 * cost.layer_norm(hidden) + mix_patches + cost.feed_forward(hidden, self.intermediate_size)
        return (
            cost.linear(self.num_channels * self.patch_size**2, hidden)
            + self.num_layers * block
            + cost.layer_norm(hidden)
            + zoo.Cost(cost.linear(hidden, self.num_classes).parameters)
        )
