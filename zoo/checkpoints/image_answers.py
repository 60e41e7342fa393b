"""Comparison of how images are prepared with the original's image processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from zoo.arrays import Array
from zoo.checkpoints.images import PROCESSOR, ProcessedImages, first_difference, process_images
from zoo.checkpoints.layout import Layout
from zoo.checkpoints.original import Unavailable
from zoo.checkpoints.source import Checkpoint
from zoo.contract import TensorSpec, row_sizes, standard_fields
from zoo.detection import find_objects, truncation_error
from zoo.errors import ParityError, UsageError
from zoo.images import ImageReader
from zoo.interpolation import interpolate, likeliest_classes
from zoo.registry import ModelSpec

__all__ = ["ImageComparison"]

_REMEDY = "images are not prepared as by the original; nothing was written"
_ANSWERS = "the model does not answer as the original; nothing was written"
_CLOSE = 1e-5
"""Maximum difference of scores and, as a fraction of the largest, of boxes and depths."""

Outputs = Mapping[str, Array]
Run = Callable[[Any], Outputs]


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
        if self.layout.process_images is None and not self.checkpoint.image_processor:
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

    def compare_answers(self, run: Run, ask: Callable[[Any], Any], names: Sequence[str]) -> int:
        """Return the number of images whose objects, segments or depths are those of the original.

        Args:
            run: returns the outputs of zoo's model for an image, in float64 and without the dimension of rows.
            ask: returns what the pipeline of transformers answers to an image, in float64.
            names: of the classes.

        Raises :class:`ParityError` for a difference.
        """
        equal = {
            "object-detection": self._equal_objects,
            "semantic-segmentation": self._equal_segments,
            "depth-estimation": self._equal_depths,
        }[self.spec.task]
        for image in self.processed.images:
            if not equal(run(image), ask(image), (image.height, image.width), names):
                problem = f"the answer to an image of {image.width} x {image.height} pixels is not that of the original"
                raise ParityError(problem, self.checkpoint.where, _ANSWERS)
        return len(self.processed.images)

    def _equal_objects(self, outputs: Outputs, rows: Any, size: tuple[int, int], names: Sequence[str]) -> bool:
        config = standard_fields(self.spec.config)
        rule = str(config.problem_type), config.max_detections or 0
        ours = find_objects(outputs["logits"], outputs["pred_boxes"], *rule, size).above(0.0)
        if [names[number] for number in ours.classes] != [row["label"] for row in rows]:
            return False
        theirs = np.array([[row["score"], *row["box"].values()] for row in rows]).reshape(-1, 5)
        errors = truncation_error(ours.boxes, theirs[:, 1:])
        return _close(ours.scores, theirs[:, 0]) and errors.max(initial=0.0) <= _CLOSE * max(size)

    def _equal_segments(self, outputs: Outputs, rows: Any, size: tuple[int, int], names: Sequence[str]) -> bool:
        ours = likeliest_classes(outputs["logits"], size)
        numbers = np.unique(ours)
        return [names[number] for number in numbers] == [row["label"] for row in rows] and all(
            np.array_equal(ours == number, np.asarray(row["mask"]) > 0)
            for number, row in zip(numbers, rows, strict=True)
        )

    def _equal_depths(self, outputs: Outputs, answer: Any, size: tuple[int, int], _: Sequence[str]) -> bool:
        method: Any = standard_fields(self.spec.config).depth_resample
        return _close(interpolate(outputs["predicted_depth"], size, method), answer["predicted_depth"].numpy())

    def inputs(self, image: Any) -> dict[str, Tensor]:
        """Return the input of the model for one image."""
        return {self.image.name: torch.from_numpy(self._reader.normalize(self._reader.read(image)))[None]}


def _close(values: Array, expected: Array) -> bool:
    """Whether numbers are equal up to rounding, relative to the largest."""
    limit = _CLOSE * max(1.0, np.abs(expected).max(initial=0.0))
    return values.shape == expected.shape and bool((np.abs(values - expected) <= limit).all())
