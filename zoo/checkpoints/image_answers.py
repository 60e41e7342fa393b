"""Comparison of how images are prepared with the original's image processor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor

from zoo.checkpoints.images import PROCESSOR, ProcessedImages, first_difference, process_images
from zoo.checkpoints.layout import Layout
from zoo.checkpoints.original import Unavailable
from zoo.checkpoints.source import Checkpoint
from zoo.contract import TensorSpec, row_sizes, standard_fields
from zoo.errors import ParityError, UsageError
from zoo.images import ImageReader
from zoo.registry import ModelSpec

__all__ = ["ImageComparison"]

_REMEDY = "images are not prepared as by the original; nothing was written"


@dataclass(frozen=True)
class ImageComparison:
    """A comparison of the images that zoo prepares with those of the original."""

    spec: ModelSpec
    checkpoint: Checkpoint
    layout: Layout
    image: TensorSpec
    """The input that is an image, (rows, channels, height, width)."""

    @classmethod
    def of(cls, spec: ModelSpec, checkpoint: Checkpoint, layout: Layout) -> Self | None:
        """Return the comparison for a model, None if it reads no images."""
        for tensor in (tensor for graph in spec.graphs for tensor in graph.input_tensors()):
            if tensor.name == "pixel_values" and len(tensor.dims) == 4:
                return cls(spec, checkpoint, layout, tensor)
        return None

    @property
    def obstacle(self) -> str | None:
        """Why there is no comparison whatever is installed; None if there is one."""
        if self.layout.process_images is None and not (self.checkpoint.path / PROCESSOR).exists():
            return f"the checkpoint has no {PROCESSOR}"
        return None if self._reader.mode is not None else f"image files cannot have {self._reader.channels} channels"

    @cached_property
    def processed(self) -> ProcessedImages:
        """What the original makes of a few images. Raises :class:`Unavailable` or ``ImportError``."""
        if self.layout.process_images is not None:
            return self.layout.process_images(self.checkpoint)
        try:
            return process_images(self.checkpoint.path)
        except UsageError as error:
            raise Unavailable(str(error)) from error

    @cached_property
    def _reader(self) -> ImageReader:
        _, *shape = self.image.shape(row_sizes(self.spec.graphs, 1))
        return ImageReader.of(partial(getattr, standard_fields(self.spec.config)), *shape)

    def compare_pixels(self) -> int:
        """Return the number of images compared. Raises :class:`ParityError` for a difference."""
        number = first_difference(self.processed, self._reader)
        if number is not None:
            width, height = self.processed.images[number].size
            problem = f"an image of {width} x {height} pixels becomes other pixels than by the original"
            raise ParityError(problem, self.checkpoint.where, _REMEDY)
        return len(self.processed.images)

    def inputs(self, image: Any) -> dict[str, Tensor]:
        """Return the input of the model for one image."""
        return {self.image.name: torch.from_numpy(self._reader.normalize(self._reader.read(image)))[None]}
