"""Tasks with an answer for each pixel of an image: its class, or its depth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.classes import class_names
from zoo.errors import UsageError
from zoo.interpolation import interpolate, likeliest_classes
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer, label
from zoo_runtime.running.runner import finite
from zoo_runtime.tasks.images import ImageRunner, Pixels

__all__ = ["DepthEstimation", "SemanticSegmentation"]


class SemanticSegmentation(ImageRunner):
    """The class of each pixel of an image at its original size.

    ``segments`` are the classes in the image, each with its ``label``, its number (``class``) and its number of
    ``pixels``. ``map`` has the numbers of the classes row by row, in runs: ``classes`` and ``lengths``.
    """

    needs = ("logits",)
    map_suffix = ".png"

    def __init__(self, session: Context, chosen: Any) -> None:
        super().__init__(session, chosen)
        self.names = class_names(session.option("labels"), session.option("num_classes"), None)

    def answer(self, items: Sequence[Pixels]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        maps = (likeliest_classes(row.astype(np.float64), item.size) for row, item in zip(logits, items, strict=True))
        return finite(items, logits, [self._segments(classes) for classes in maps])

    def _segments(self, classes: Array) -> dict[str, Any]:
        numbers, counts = np.unique(classes, return_counts=True)
        pairs = zip(numbers.tolist(), counts.tolist(), strict=True)
        return {
            "segments": [{"label": self.names[n], "class": n, "pixels": count} for n, count in pairs],
            "map": _runs(classes),
        }

    def write_map(self, result: Mapping[str, Any], target: Path) -> None:
        """Write the number of each pixel's class as a grey PNG of 8 bits, or 16 bits for more than 256 classes."""
        try:
            from PIL import Image
        except ImportError as error:
            raise UsageError("PNG files need Pillow", None, "pip install attention-zoo[images]") from error
        runs, kind = result["map"], np.uint8 if len(self.names) <= 256 else np.uint16
        classes = np.repeat(np.array(runs["classes"], kind), runs["lengths"])
        Image.fromarray(classes.reshape(runs["height"], runs["width"])).save(target, format="PNG")

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            total = answer.result["map"]["height"] * answer.result["map"]["width"]
            parts = sorted(answer.result["segments"], key=lambda part: -part["pixels"])
            shares = (f"{part['label']}: {part['pixels'] / total:.4f}" for part in parts)
            yield f"{label(answer)}: {'  '.join(shares)}"


class DepthEstimation(ImageRunner):
    """``predicted_depth`` of each pixel, (height, width) of the original image."""

    needs = ("predicted_depth",)
    map_suffix = ".npy"

    def __init__(self, session: Context, chosen: Any) -> None:
        super().__init__(session, chosen)
        self.method = session.option("depth_resample")
        if self.method is None:
            raise UsageError("the model has no depth_resample", session.path, "import it with its image processor")

    def answer(self, items: Sequence[Pixels]) -> Sequence[Any]:
        depths = self.compute(items)["predicted_depth"]
        results = [
            {"predicted_depth": interpolate(row.astype(np.float64), item.size, self.method).astype(np.float32)}
            for row, item in zip(depths, items, strict=True)
        ]
        return finite(items, depths, results)

    def write_map(self, result: Mapping[str, Any], target: Path) -> None:
        """Write the depths, (height, width) in float32, as a file of NumPy."""
        np.save(target, result["predicted_depth"])

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            depth = answer.result["predicted_depth"]
            height, width = depth.shape
            yield f"{label(answer)}: {width} x {height} pixels, depths from {depth.min():.4f} to {depth.max():.4f}"


def _runs(classes: Array) -> Mapping[str, Any]:
    """Return a map (height, width) of class numbers as runs of equal ones, row by row."""
    flat = classes.ravel()
    starts = np.flatnonzero(np.diff(flat, prepend=-1))
    lengths = np.diff(starts, append=flat.size)
    height, width = classes.shape
    return {"height": height, "width": width, "classes": flat[starts].tolist(), "lengths": lengths.tolist()}
