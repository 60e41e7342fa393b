"""The tasks of models that look at images."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.errors import ArtifactError, UsageError
from zoo_export.runtime.runner import Answer, Runner, finite, label, require_outputs
from zoo_export.runtime.tasks import softmax

__all__ = ["ImageClassification", "ImageFeatures"]

Array = np.ndarray[Any, Any]

SHOWN = 5
"""Classes that are shown to people, the likeliest first."""


@dataclass(frozen=True)
class Pixels:
    """An image as an array."""

    number: int
    values: Array
    """(channels, height, width)"""


class ImageRunner(Runner[Pixels]):
    """Inputs are image files, images of Pillow, or arrays.

    A file, its bytes or an image is turned as its camera was held, becomes grey or RGB by the number of channels, and
    is resized to the model's size (bilinear). Grey becomes three equal channels, the colours of a palette are looked
    up, transparency is left out, 16 bits become 8, and of several frames the first counts. An array, (height, width) or
    (height, width, channels), has the model's size already; integers are of 0 to 255, real numbers of 0 to 1. Then the
    configuration's ``image_mean`` is taken away and the rest divided by its ``image_std``, both 0.5 where it has none
    (Dosovitskiy et al. 2021).
    """

    needs: tuple[str, ...] = ()
    """Outputs of the graph without which the task cannot be done."""

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
        require_outputs(self.graph, self.needs, session.path)
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
        scale = np.float32(1 / _full_scale(array, where))
        values = (array.transpose(2, 0, 1).astype(np.float32) * scale - self.mean) / self.std
        return Pixels(number, values)

    def _load(self, value: Any, where: str) -> Array:
        try:
            from PIL import Image, ImageOps
        except ImportError as error:
            raise UsageError("image files need Pillow", None, "pip install attention-zoo[images]") from error
        if not isinstance(value, str | bytes | os.PathLike | Image.Image):
            raise ArtifactError(f"neither a file nor an array, but {type(value).__name__}", where)
        mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(self.channels)
        if mode is None:
            raise UsageError(f"no image file has {self.channels} channels", self.session.path, "give arrays")
        try:
            with (
                contextlib.nullcontext(value)
                if isinstance(value, Image.Image)
                else Image.open(io.BytesIO(value) if isinstance(value, bytes) else value)
            ) as image:
                upright = ImageOps.exif_transpose(_eight_bits(image))
                sized = upright.convert(mode).resize((self.width, self.height), Image.Resampling.BILINEAR)
        except Exception as error:  # the library raises a dozen classes, SyntaxError among them
            raise ArtifactError(f"cannot be read as an image ({error})", where) from error
        return np.asarray(sized)

    def compute(self, items: Sequence[Pixels]) -> dict[str, Array]:
        """The outputs of the graph for a batch."""
        batch = np.stack([item.values for item in items])
        outputs: dict[str, Array] = self.session.execute(self.graph, {self.input.name: batch})
        return outputs


def _full_scale(array: Array, where: str) -> int:
    """What white is in an array: 255 among integers, 1 among real numbers."""
    kinds = {"u": ("integers", 255), "i": ("integers", 255), "f": ("real numbers", 1)}
    if array.dtype.kind not in kinds:
        raise ArtifactError(f"has pixels that are no numbers, but {array.dtype}", where)
    if not np.isfinite(array).all():
        raise ArtifactError("has pixels that are no finite numbers", where)
    name, top = kinds[array.dtype.kind]
    least, most = array.min(), array.max()
    if least < 0 or most > top:
        raise ArtifactError(f"has pixels from {least:g} to {most:g}, {name} go from 0 to {top}", where, "scale them")
    return top


def _eight_bits(image: Any) -> Any:
    """An image of Pillow that can be converted to any mode: from 16 bits that would cut off all above 255."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG"):  # as older versions read those
        return Image.fromarray((np.asarray(image) / 257 + 0.5).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"nothing says which number is white in mode {image.mode}: give an array")
    return image


class ImageClassification(ImageRunner):
    """``probabilities`` of the classes, and the ``label`` of the likeliest where the model names its classes."""

    needs = ("logits",)

    def answer(self, items: Sequence[Pixels]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        names = self.session.option("labels")
        results = [
            {**({"label": names[int(chances.argmax())]} if names else {}), "probabilities": chances}
            for chances in softmax(logits)
        ]
        return finite(items, logits, results)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        names = self.session.option("labels") or ()
        for answer in answers:
            chances = np.asarray(answer.result["probabilities"])
            best = np.argsort(-chances, kind="stable")[:SHOWN].tolist()
            shown = (f"{names[place] if names else place}: {chances[place]:.4f}" for place in best)
            yield f"{label(answer)}: " + "  ".join(shown)


class ImageFeatures(ImageRunner):
    """``last_hidden_state``, (tokens, hidden) for each image, and ``pooler_output`` where the model has a pooler."""

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
