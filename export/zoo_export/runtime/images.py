"""The tasks of models that look at images."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.errors import ArtifactError, UsageError
from zoo_export.runtime.runner import Answer, Runner, finite, require_outputs
from zoo_export.runtime.tasks import show_classes, softmax

__all__ = ["ImageClassification"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Pixels:
    """An image as an array."""

    number: int
    values: Array
    """(channels, height, width)"""


class ImageClassification(Runner[Pixels]):
    """``probabilities`` of the classes, from files or arrays.

    A file, or its bytes, is resized to the model's size (bilinear), and becomes grey or RGB by the number of channels.
    An array, (height, width) or (height, width, channels), has that size already; integers are of 0 to 255, real
    numbers of 0 to 1. Then the configuration's ``image_mean`` is taken away and the rest divided by its ``image_std``,
    both 0.5 where it has none (Dosovitskiy et al. 2021).
    """

    def __init__(self, session: Any, chosen: Any) -> None:
        super().__init__(session, chosen)
        self.graph = session.graphs[0]
        self.input = self.graph.input_tensors()[0]
        if len(self.input.dims) != 4 or len(self.graph.input_tensors()) > 1:
            raise UsageError("the model's graph does not take images alone", session.path)
        size = session.option("image_size")
        sizes = {dim: 1 if dim == "batch" else size for dim in self.input.dims if isinstance(dim, str)}
        if None in sizes.values():
            raise UsageError("the model does not say how large its images are", session.path, "image_size is missing")
        require_outputs(self.graph, ("logits",), session.path)
        _, self.channels, self.height, self.width = self.input.shape(sizes)
        mean, std = (session.option(name) for name in ("image_mean", "image_std"))
        self.mean, self.std = (
            np.broadcast_to(np.float32(0.5 if value is None else value), self.channels)[:, None, None]
            for value in (mean, std)
        )

    def read(self, value: Any, number: int) -> Pixels:
        where = f"input {number}"
        array = value if isinstance(value, np.ndarray) else self._load(value, where)
        if array.ndim == 2:
            array = array[..., None]
        wanted = (self.height, self.width, self.channels)
        if array.shape != wanted:
            raise ArtifactError(f"has shape {array.shape}, the model takes {wanted}", where, "resize it")
        scale = np.float32(1 if np.issubdtype(array.dtype, np.floating) else 1 / 255)
        values = (array.transpose(2, 0, 1).astype(np.float32) * scale - self.mean) / self.std
        if not np.isfinite(values).all():
            raise ArtifactError("has pixels that are no finite numbers", where)
        return Pixels(number, values)

    def _load(self, value: Any, where: str) -> Array:
        try:
            from PIL import Image
        except ImportError as error:
            raise UsageError("image files need Pillow", None, "pip install attention-zoo[images]") from error
        if not isinstance(value, str | bytes | os.PathLike):
            raise ArtifactError(f"neither a file nor an array, but {type(value).__name__}", where)
        mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(self.channels)
        if mode is None:
            raise UsageError(f"no image file has {self.channels} channels", self.session.path, "give arrays")
        try:
            with Image.open(io.BytesIO(value) if isinstance(value, bytes) else value) as image:
                sized = image.convert(mode).resize((self.width, self.height), Image.Resampling.BILINEAR)
        except Exception as error:  # the library raises a dozen classes, SyntaxError among them
            raise ArtifactError(f"cannot be read as an image ({error})", where) from error
        return np.asarray(sized)

    def answer(self, items: Sequence[Pixels]) -> Sequence[Any]:
        batch = np.stack([item.values for item in items])
        logits = self.session.execute(self.graph, {self.input.name: batch})["logits"]
        return finite(items, logits, [{"probabilities": row} for row in softmax(logits)])

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        return map(show_classes, answers)
