"""Tasks for image models."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.errors import ArtifactError, UsageError
from zoo_runtime.runner import Answer, Context, Runner, finite, label, require_outputs
from zoo_runtime.tasks.text import classify, problem_type, show_classes

__all__ = ["ImageClassification", "ImageFeatures", "ImageRunner", "Pixels"]

Array = np.ndarray[Any, Any]

_ROUNDING = 1e-6
"""Added before rounding down: the size before cropping is a quotient of two floats."""
SHOWN = 5
"""Number of classes in human-readable output."""


@dataclass(frozen=True)
class Pixels:
    """A preprocessed image."""

    number: int
    values: Array
    """(channels, height, width)"""


class ImageRunner(Runner[Pixels]):
    """Base class for tasks on images: files, their bytes, Pillow images, or arrays.

    A file, its bytes or a Pillow image is rotated by its EXIF orientation, converted to grey, RGB or RGBA according to
    the model's number of channels, resized and cropped. Palettes are expanded, 16-bit values reduced to 8 bits, and
    only the first frame is used. ``image_resample`` of the configuration names the filter, bilinear by default, and
    ``image_crop`` the fraction of each side that is kept, 1 by default. An array, (height, width) or (height, width,
    channels), must already have the model's size, with integers in [0, 255] or floats in [0, 1].

    Pixels are then normalised with the configuration's ``image_mean`` and ``image_std``, 0.5 by default (Dosovitskiy et
    al. 2021).
    """

    needs: tuple[str, ...] = ()
    """Outputs of the graph that the task requires."""

    def __init__(self, session: Context, chosen: Any) -> None:
        super().__init__(session, chosen)
        self.graph = session.graphs[0]
        self.input = self.graph.input_tensors()[0]
        if len(self.input.dims) != 4 or len(self.graph.input_tensors()) > 1:
            raise UsageError("the model's graph does not have a single image input", session.path)
        size = session.option("image_size")
        sizes = {dim: 1 if dim == "batch" else size for dim in self.input.dims if isinstance(dim, str)}
        if None in sizes.values():
            raise UsageError("the model has no image_size", session.path, "set it when building the model")
        require_outputs(self.graph, self.needs, session.path)
        _, self.channels, self.height, self.width = self.input.shape(sizes)
        self.resample = str(session.option("image_resample") or "bilinear").upper()
        crop = session.option("image_crop") or 1.0
        self.resized = int(self.width / crop + _ROUNDING), int(self.height / crop + _ROUNDING)
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
            raise ArtifactError(f"expected shape {wanted}, got {array.shape}", where, "resize it")
        scale = np.float32(1 / _full_scale(array, where))
        values = (array.transpose(2, 0, 1).astype(np.float32) * scale - self.mean) / self.std
        return Pixels(number, values)

    def _load(self, value: Any, where: str) -> Array:
        try:
            from PIL import Image, ImageOps
        except ImportError as error:
            raise UsageError("image files need Pillow", None, "pip install attention-zoo[images]") from error
        if not isinstance(value, str | bytes | os.PathLike | Image.Image):
            raise ArtifactError(f"expected an image file or an array, got {type(value).__name__}", where)
        mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(self.channels)
        if mode is None:
            raise UsageError(f"image files cannot have {self.channels} channels", self.session.path, "give arrays")
        try:
            with (
                contextlib.nullcontext(value)
                if isinstance(value, Image.Image)
                else Image.open(io.BytesIO(value) if isinstance(value, bytes) else value)
            ) as image:
                upright = ImageOps.exif_transpose(_eight_bits(image))
                sized = upright.convert(mode).resize(self.resized, Image.Resampling[self.resample])
                left, top = (self.resized[0] - self.width) // 2, (self.resized[1] - self.height) // 2
                sized = sized.crop((left, top, left + self.width, top + self.height))
        except Exception as error:  # Pillow raises many classes, including SyntaxError
            raise ArtifactError(f"cannot be read as an image ({error})", where) from error
        return np.asarray(sized)

    def samples(self) -> Sequence[Any]:
        """Return random arrays of the model's size and, if Pillow is installed, images of other sizes."""
        random = np.random.default_rng(0)
        shape = (self.height, self.width, self.channels)
        arrays = [random.integers(256, size=shape, dtype=np.uint8), random.random(shape)]
        modes = {1: "L", 3: "RGB", 4: "RGBA"}
        if self.channels not in modes or importlib.util.find_spec("PIL") is None:
            return arrays
        from PIL import Image

        sizes = ((2 * self.width + 1, self.height + 3), (self.width // 2 + 1, 3 * self.height - 1))
        return [
            *arrays,
            *(Image.frombytes(modes[self.channels], size, random.bytes(math.prod(size) * self.channels))
              for size in sizes),
        ]  # fmt: skip

    def feed(self, items: Sequence[Pixels]) -> dict[str, Array]:
        """Build the graph's input for a batch."""
        return {self.input.name: np.stack([item.values for item in items])}

    def compute(self, items: Sequence[Pixels]) -> dict[str, Array]:
        """Run the graph on a batch and return its outputs."""
        outputs: dict[str, Array] = self.session.execute(self.graph, self.feed(items))
        return outputs


def _full_scale(array: Array, where: str) -> int:
    """Return the value of white in an array: 255 for integers, 1 for floats."""
    kinds = {"u": ("integers", 255), "i": ("integers", 255), "f": ("floats", 1)}
    if array.dtype.kind not in kinds:
        raise ArtifactError(f"pixels must be numbers, got {array.dtype}", where)
    if not np.isfinite(array).all():
        raise ArtifactError("pixels contain NaN or infinity", where)
    name, top = kinds[array.dtype.kind]
    least, most = array.min(), array.max()
    if least < 0 or most > top:
        raise ArtifactError(
            f"pixels from {least:g} to {most:g}, but {name} must lie in [0, {top}]", where, "scale them"
        )
    return top


def _eight_bits(image: Any) -> Any:
    """Convert a 16-bit Pillow image to 8 bits, since Pillow's own conversion clips values above 255."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG"):  # older versions
        return Image.fromarray((np.asarray(image) / 257 + 0.5).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"the range of mode {image.mode} is not defined: give an array")
    return image


class ImageClassification(ImageRunner):
    """The classes of an image: see :func:`zoo_runtime.tasks.text.classify`."""

    needs = ("logits",)

    def __init__(self, session: Context, chosen: Any) -> None:
        super().__init__(session, chosen)
        self.problem = problem_type(session, self.graph)

    def answer(self, items: Sequence[Pixels]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        results = classify(logits, self.problem, self.session.option("labels"))
        return finite(items, logits, results)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            yield show_classes(answer, self.session.option("labels"), most=SHOWN)


class ImageFeatures(ImageRunner):
    """``last_hidden_state``, (tokens, hidden) for each image, and ``pooler_output`` if the model has a pooler."""

    needs = ("last_hidden_state",)

    def answer(self, items: Sequence[Pixels]) -> Sequence[Any]:
        outputs = self.compute(items)
        kept = [name for name in outputs if name in ("last_hidden_state", "pooler_output")]
        results = [{name: outputs[name][row] for name in kept} for row in range(len(items))]
        return finite(items, outputs["last_hidden_state"], results)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            states = answer.result["last_hidden_state"]
            yield f"{label(answer)}: {len(states)} tokens x {len(states[0])}"
