"""Classification of images (Dosovitskiy et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from zoo.arrays import Array
from zoo.classes import ClassifierConfig
from zoo.errors import ArtifactError
from zoo.images import ImageReader, white_of
from zoo.training.criterion import Batch, Criterion, Loss, Row
from zoo.training.data.examples import Example
from zoo.training.objectives.classification import class_loss, label_array, label_tensor, require_classes
from zoo.training.options import ImageClassificationOptions

__all__ = ["ImageClassification", "image_of"]

_RATIO = 4 / 3
"""Largest ratio of the sides of a crop."""


class ImageClassification(Criterion):
    """Classes of images. The columns are ``image`` and ``label``.

    An image is a file, the bytes of one (also as ``{"bytes": ...}``, as in the parquet files of the datasets library),
    or an array of the model's size as nested lists, with integers from 0 to 255 or floats from 0 to 1. It is read as by
    ``zoo run``. Random crops and mirrored images are made of an image that already has the model's size.
    """

    config: ClassifierConfig
    settings: ImageClassificationOptions
    has_length = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        require_classes(self.config)
        tensor = self.config.graphs()[0].input_tensors()[0]
        self._input = tensor.name
        _, *shape = tensor.shape({"batch": 1})
        if len(shape) != 3:
            raise ValueError(f"the model reads {tensor.name!r} with {len(shape) + 1} dimensions, not images")
        self._reader = ImageReader.of(lambda name: getattr(self.config, name, None), *shape)

    def encode(self, row: Row) -> Example:
        labels = label_array(self.config, row["label"])
        try:
            pixels = self._reader.read(image_of(row["image"]))
        except ArtifactError as error:
            raise ValueError(f"image {error}") from error
        kind = np.float32 if pixels.dtype.kind == "f" else np.uint8
        return {"pixels": pixels.astype(kind).ravel(), "labels": labels}

    def augment(self, example: Example, generator: np.random.Generator) -> Example:
        """Return an example that is cropped (Szegedy et al. 2015, section 6) and mirrored at random."""
        pixels, shape = example["pixels"], (self._reader.height, self._reader.width, self._reader.channels)
        image = pixels.reshape(shape)
        if self.settings.min_crop < 1:
            image = _random_crop(image, self.settings.min_crop, generator)
        if self.settings.random_flip and generator.random() < 0.5:
            image = image[:, ::-1]
        return {**example, "pixels": np.ascontiguousarray(image).ravel()}

    def collate(self, examples: Sequence[Example], generators: Sequence[np.random.Generator]) -> Batch:
        shape = (self._reader.height, self._reader.width, self._reader.channels)
        images = [self._reader.normalize(example["pixels"].reshape(shape)) for example in examples]
        return {self._input: torch.from_numpy(np.stack(images)), "labels": label_tensor(examples)}

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return class_loss(self.config, self.outputs(model, batch)["logits"], batch["labels"])


def image_of(value: Any) -> Any:
    """Return what :class:`ImageReader` reads of a value of a column."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if not isinstance(value, list | tuple):
        return value
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError("image must be a rectangular array") from error


def _random_crop(image: Array, least: float, random: np.random.Generator) -> Array:
    """Return a random part of an image (H, W, C), resized to the image's size by bilinear interpolation.

    The area of the part is uniform from ``least`` to 1, as a fraction. The logarithm of the ratio of its sides is
    uniform up to that of 4 / 3; a side that would be longer than the image's is cut to it.
    """
    area, ratio = random.uniform(least, 1), math.exp(random.uniform(-1, 1) * math.log(_RATIO))
    sides = [math.sqrt(area / ratio), math.sqrt(area * ratio)]
    height, width = (max(1, round(min(1, side) * size)) for side, size in zip(sides, image.shape, strict=False))
    top, left = (int(random.integers(most + 1)) for most in (image.shape[0] - height, image.shape[1] - width))
    part = torch.from_numpy(image[top : top + height, left : left + width].astype(np.float32)).permute(2, 0, 1)
    sized = F.interpolate(part[None], image.shape[:2], mode="bilinear", antialias=True)[0].permute(1, 2, 0).numpy()
    return (np.rint(sized) if image.dtype == np.uint8 else sized).clip(0, white_of(image)).astype(image.dtype)
