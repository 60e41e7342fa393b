"""The fields of models of timm."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from zoo import ClassifierConfig, Cost, Graph, ImageConfig, floats

__all__ = ["TimmFields"]


_DEEPEST, _WIDEST = 4096, 2**16
"""Maximum of arguments that count layers, and of others: a file must not ask for a model that takes hours to build."""


@dataclass(frozen=True, kw_only=True)
class TimmFields(ClassifierConfig, ImageConfig):
    """The name of a model of timm, its arguments, and what follows from them.

    The defaults are those of ``test_resnet``.
    """

    head_fields: ClassVar[tuple[str, ...]] = (
        *ClassifierConfig.head_fields, "output_sizes", "num_parameters", "flops_per_image",
    )  # fmt: skip
    task: Literal["image-classification", "image-feature-extraction"] = "image-classification"
    """Task: with the head of the model, or without it."""
    model_name: str = "test_resnet"
    """The name of the model in timm, without the tag of its weights."""
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of the model besides the number of classes and channels, such as ``img_size``."""
    image_size: int = 160
    """Height and width of the images, in pixels."""
    image_resample: Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"] = "bicubic"
    """Filter with which images are resized."""
    image_resize: Literal["stretch", "shortest_edge"] = "shortest_edge"
    """Whether images are stretched to a square, or keep their proportions and lose what is outside the central one."""
    image_margin: Literal["down", "even"] = "even"
    """How half of a margin with an odd number of pixels is rounded."""
    output_sizes: dict[str, Any] = field(default_factory=dict, hash=False)
    """The features of an image, each with its sizes after the batch."""
    num_parameters: int = 372_882
    """Number of parameters."""
    flops_per_image: int = 204_902_784
    """Forward FLOPs of an image."""

    def __post_init__(self) -> None:
        self.check_classes(head=self.task == "image-classification")
        self.check_images()
        self.require_positive("num_parameters")
        for key, number in _numbers(self.arguments):
            if number > (_DEEPEST if re.search("depth|layers|blocks", key) else _WIDEST):
                raise ValueError(f"arguments.{key} {number} is too large")

    def graphs(self) -> tuple[Graph, ...]:
        """Declare the graph from an image to logits, or to features."""
        outputs = [floats(name, "batch", *sizes) for name, sizes in self.output_sizes.items()]
        if self.task == "image-classification":
            outputs = [floats("logits", "batch", self.num_classes)]
        pixels = floats("pixel_values", "batch", self.num_channels, self.image_size, self.image_size)
        return (Graph(inputs=(pixels,), outputs=tuple(outputs)),)

    def cost(self) -> Cost:
        """Return what was counted when the model was inspected."""
        return Cost(self.num_parameters, self.flops_per_image)


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in arguments, each with its keys."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _numbers(item, f"{key}.{name}".strip("."))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item, key)
    elif isinstance(value, int | float):
        yield key, value
