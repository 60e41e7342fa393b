"""Comparison of how images are prepared, and of what is answered to them, with the original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from zoo.arrays import Array
from zoo.checkpoints.answers.pipelines import REMEDY, Answers, ask_exactly
from zoo.checkpoints.images import PROCESSOR, ProcessedImages, first_difference, process_images
from zoo.checkpoints.layout import Layout
from zoo.checkpoints.original import Unavailable, call
from zoo.checkpoints.source import Checkpoint
from zoo.contract import TensorSpec, row_sizes, standard_fields
from zoo.detection import find_objects, truncation_error
from zoo.errors import ParityError, UsageError
from zoo.images import ImageReader
from zoo.interpolation import interpolate, likeliest_classes
from zoo.registry import ModelSpec

__all__ = ["DENSE", "ImageComparison"]

_REMEDY = "images are not prepared as by the original; nothing was written"
_CLOSE = 1e-5
"""Maximum difference of scores and, as a fraction of the largest, of boxes and depths."""

DENSE: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "object-detection": ("images to objects", "ObjectDetectionPipeline", {"threshold": 0.0}),
    "semantic-segmentation": ("images to segments", "ImageSegmentationPipeline", {"subtask": "semantic"}),
    "depth-estimation": ("images to depths", "DepthEstimationPipeline", {}),
}
"""For tasks with answers per object or pixel: the kind of comparison, the pipeline and its options."""
Outputs = Mapping[str, Array]


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
        return None if self.reader.mode is not None else f"image files cannot have {self.reader.channels} channels"

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
    def reader(self) -> ImageReader:
        """The image reader of the model."""
        _, *shape = self.image.shape({"height": 0, "width": 0, **row_sizes(self.spec.graphs, 1)})
        return ImageReader.of(lambda name: getattr(self.spec.config, name, None), *shape)

    def compare_pixels(self) -> int:
        """Return the number of images compared. Raises :class:`ParityError` for a difference."""
        number = first_difference(self.processed, self.reader)
        if number is not None:
            width, height = self.processed.images[number].size
            problem = f"an image of {width} x {height} pixels becomes other pixels than by the original"
            raise ParityError(problem, self.checkpoint.where, _REMEDY)
        return len(self.processed.images)

    def compare_classes(self, model: nn.Module, theirs: nn.Module, answers: Answers) -> int:
        """Return the number of images whose classes are those of the original's pipeline.

        Args:
            model: zoo's model, in float64.
            theirs: the original, in float64.
            answers: the classes.

        Raises :class:`ParityError` for a difference.
        """
        import transformers

        kind: Any = transformers.ImageClassificationPipeline
        pipeline = kind(model=theirs, image_processor=self.processed.processor, device="cpu")
        images = {f"image {number}": image for number, image in enumerate(self.processed.images)}
        return answers.compare(images, lambda image: self._outputs(model, image)["logits"][0], theirs, pipeline)

    def compare_dense(self, model: nn.Module, theirs: nn.Module, answers: Answers) -> int:
        """Return the number of images whose objects, segments or depths are those of the original's pipeline.

        Arguments and errors as of :meth:`compare_classes`.
        """
        import transformers

        task = self.spec.task
        _, kind, options = DENSE[task]
        pipeline = getattr(transformers, kind)(model=theirs, image_processor=self.processed.processor, device="cpu")
        names = [] if task == "depth-estimation" else answers.class_names
        equal = {
            "object-detection": self._equal_objects,
            "semantic-segmentation": self._equal_segments,
            "depth-estimation": self._equal_depths,
        }[task]
        for image in self.processed.images:
            outputs = {name: value[0].numpy() for name, value in self._outputs(model, image).items()}
            answer = ask_exactly(theirs, pipeline, image, **options)
            if not equal(outputs, answer, (image.height, image.width), names):
                problem = f"the answer to an image of {image.width} x {image.height} pixels is not that of the original"
                raise ParityError(problem, self.checkpoint.where, REMEDY)
        return len(self.processed.images)

    def _equal_objects(self, outputs: Outputs, rows: Any, size: tuple[int, int], names: Sequence[str]) -> bool:
        config = standard_fields(self.spec.config)
        rule = str(config.problem_type), config.max_detections or 0
        ours = find_objects(outputs["logits"], outputs["pred_boxes"], *rule, size).above(0.0)
        if [names[number] for number in ours.classes] != [str(row["label"]) for row in rows]:
            return False
        theirs = np.array([[row["score"], *row["box"].values()] for row in rows]).reshape(-1, 5)
        errors = truncation_error(ours.boxes, theirs[:, 1:])
        return _close(ours.scores, theirs[:, 0]) and errors.max(initial=0.0) <= _CLOSE * max(size)

    def _equal_segments(self, outputs: Outputs, rows: Any, size: tuple[int, int], names: Sequence[str]) -> bool:
        ours = likeliest_classes(outputs["logits"], size)
        numbers = np.unique(ours)
        return [names[number] for number in numbers] == [str(row["label"]) for row in rows] and all(
            np.array_equal(ours == number, np.asarray(row["mask"]) > 0)
            for number, row in zip(numbers, rows, strict=True)
        )

    def _equal_depths(self, outputs: Outputs, answer: Any, size: tuple[int, int], _: Sequence[str]) -> bool:
        method: Any = standard_fields(self.spec.config).depth_resample
        return _close(interpolate(outputs["predicted_depth"], size, method), answer["predicted_depth"].numpy())

    def _outputs(self, model: nn.Module, image: Any) -> dict[str, Tensor]:
        """Return the outputs of zoo's model in float64 for one image."""
        with torch.no_grad():
            return call(self.spec.config, model, self.feeds(image), torch.float64)

    def feeds(self, image: Any) -> dict[str, Tensor]:
        """Return one image of Pillow as an input of zoo's model, by its name."""
        return {self.image.name: torch.from_numpy(self.reader.normalize(self.reader.read(image)))[None]}


def _close(values: Array, expected: Array) -> bool:
    """Whether numbers are equal up to rounding, relative to the largest."""
    limit = _CLOSE * max(1.0, np.abs(expected).max(initial=0.0))
    return values.shape == expected.shape and bool((np.abs(values - expected) <= limit).all())
