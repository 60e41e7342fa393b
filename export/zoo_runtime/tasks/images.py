"""Tasks for image models."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.classes import MANY_SIZES
from zoo.contract import Graph, dim_size
from zoo.errors import ArtifactError, UsageError
from zoo.images import ImageReader
from zoo.plots import Distribution
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer, label
from zoo_runtime.running.runner import Runner, finite, require_outputs
from zoo_runtime.running.text_runner import chosen_adapters
from zoo_runtime.tasks.classification import (
    ClassificationOptions,
    classify,
    distribution_of,
    problem_type,
    rank_classes,
    show_classes,
)

__all__ = ["ImageClassification", "ImageFeatures", "ImageRunner", "Pixels", "image_input", "sample_images"]


SHOWN = 5
"""Number of classes in human-readable output."""


@dataclass(frozen=True)
class Pixels:
    """A preprocessed image."""

    number: int
    values: Array
    """(channels, height, width)"""
    size: tuple[int, int]
    """Height and width of the original image."""
    adapter: int = 0
    """The number of its adapter, in the variant ``adapters``; set by the session."""


def image_input(session: Context) -> tuple[Graph, ImageReader]:
    """Return the first graph whose only input is an image, and what reads images for it.

    Raises :class:`UsageError` if there is none, or if the configuration does not state the size of images.
    """
    graphs = [graph for graph in session.graphs if [len(item.dims) for item in graph.input_tensors()] == [4]]
    if not graphs:
        raise UsageError("the model has no graph with a single image input", session.path)
    (image,) = graphs[0].input_tensors()
    if session.option("image_resize") in MANY_SIZES:
        return graphs[0], ImageReader.of(session.option, dim_size(image.dims[1], {}), 0, 0)
    size = session.option("image_size")
    sizes = {dim: 1 if dim in graphs[0].rows else size for dim in image.dims if isinstance(dim, str)}
    if None in sizes.values():
        raise UsageError("the model has no image_size", session.path, "set it when building the model")
    return graphs[0], ImageReader.of(session.option, *image.shape(sizes)[1:])


def require_allowed(graph: Graph, array: Array, where: str) -> None:
    """Raise :class:`zoo.ArtifactError` unless an image, (height, width, channels), has sizes that a graph allows."""
    for name, side in zip(("height", "width"), array.shape, strict=False):
        if name in graph.sizes and not graph.sizes[name].allows(side):
            problem = f"an image becomes {array.shape[1]} x {array.shape[0]} pixels, but its {name} must be"
            raise ArtifactError(f"{problem} {graph.sizes[name]}", where, "choose another image")


def sample_images(reader: ImageReader) -> Sequence[Any]:
    """Return random arrays of the size of a model and, if Pillow is installed, images of other sizes."""
    random = np.random.default_rng(0)
    width, height, channels = reader.width, reader.height, reader.channels
    if reader.resize == "area":
        width, height = 3 * reader.multiple, 2 * reader.multiple
    shape = (height, width, channels)
    arrays = [random.integers(256, size=shape, dtype=np.uint8), random.random(shape)]
    if reader.mode is None or importlib.util.find_spec("PIL") is None:
        return arrays
    from PIL import Image

    sizes = ((2 * width + 1, height + 3), (width // 2 + 1, 3 * height - 1))
    return [
        *arrays,
        *(Image.frombytes(reader.mode, size, random.bytes(math.prod(size) * channels)) for size in sizes),
    ]


class ImageRunner(Runner[Pixels]):
    """Base class for tasks on images: files, their bytes, Pillow images, or arrays, read by :class:`ImageReader`.

    The configuration's ``image_resample``, ``image_crop``, ``image_mean`` and ``image_std`` describe how.
    """

    needs: tuple[str, ...] = ()
    """Outputs of the graph that the task requires. The graph is the first whose only input is an image."""

    def __init__(self, session: Context, chosen: Any) -> None:
        super().__init__(session, chosen)
        self.graph, self.images = image_input(session)
        self.input = self.graph.input_tensors()[0]
        require_outputs(self.graph, self.needs, session.path)

    def read(self, value: Any, number: int) -> Pixels:
        array, size = self.images.read_sized(value, f"input {number}")
        require_allowed(self.graph, array, f"input {number}")
        return Pixels(number, self.images.normalize(array), size)

    def samples(self) -> Sequence[Any]:
        return sample_images(self.images)

    def size(self, item: Pixels) -> int:
        height, width = item.values.shape[1:]
        return int(height) << 32 | int(width)

    def fits(self, longest: int, size: int) -> bool:
        return size == longest

    def feed(self, items: Sequence[Pixels]) -> dict[str, Array]:
        """Build the graph's input for a batch."""
        feeds = {self.input.name: np.stack([item.values for item in items])}
        return feeds | chosen_adapters(self.session, items)

    def compute(self, items: Sequence[Pixels]) -> dict[str, Array]:
        """Run the graph on a batch and return its outputs."""
        outputs: dict[str, Array] = self.session.execute(self.graph, self.feed(items))
        return outputs


class ImageClassification(ImageRunner):
    """The classes of an image: see :func:`zoo_runtime.tasks.classification.classify`."""

    options = ClassificationOptions
    needs = ("logits",)

    def __init__(self, session: Context, chosen: ClassificationOptions) -> None:
        super().__init__(session, chosen)
        self.problem = problem_type(session, self.graph, chosen.function_to_apply)

    def answer(self, items: Sequence[Pixels]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        classes = classify(logits, self.problem, self.session.option("labels"))
        results = [rank_classes(scores, self.session, self.problem, self.chosen.top_k) for scores in classes]
        return finite(items, logits, results)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            yield show_classes(answer, self.chosen.top_k or SHOWN)

    def distributions(self, answer: Answer) -> Sequence[Distribution]:
        distribution = distribution_of(answer, exclusive=self.problem == "single_label_classification")
        return [replace(distribution, items=distribution.items[: self.chosen.top_k or SHOWN])]


class ImageFeatures(ImageRunner):
    """``last_hidden_state``, (tokens, hidden) or (channels, height, width) for each image, and ``pooler_output`` if the
    model has a pooler."""

    needs = ("last_hidden_state",)

    def answer(self, items: Sequence[Pixels]) -> Sequence[Any]:
        outputs = self.compute(items)
        names = [name for name in outputs if name in ("last_hidden_state", "pooler_output")]
        results = [{name: outputs[name][row] for name in names} for row in range(len(items))]
        return finite(items, outputs["last_hidden_state"], results)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            states = answer.result["last_hidden_state"]
            kind, *sizes = ("tokens", *states.shape) if states.ndim == 2 else ("channels", *states.shape)
            yield f"{label(answer)}: {sizes[0]} {kind} x {' x '.join(map(str, sizes[1:]))}"
