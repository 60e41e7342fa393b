"""Objects in images: from the outputs of a detector to scores, classes and boxes. Torch-free.

Q queries, C classes, N objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zoo.arrays import Array

__all__ = ["Objects", "find_objects", "truncation_error"]


@dataclass(frozen=True, eq=False)
class Objects:
    """The objects in an image."""

    scores: Array
    """(N,), in float64."""
    classes: Array
    """(N,), the number of each one's class."""
    boxes: Array
    """(N, 4), the left, upper, right and lower edge of each in pixels of the original image."""

    def above(self, threshold: float) -> Objects:
        """Return the objects whose score exceeds a threshold."""
        kept = self.scores > threshold
        return Objects(self.scores[kept], self.classes[kept], self.boxes[kept])

    def equal(self, other: Objects, limit: float) -> bool:
        """Return whether these are the same objects, in order, up to this error of scores and, relatively, of boxes."""
        if self.classes.tolist() != other.classes.tolist():
            return False
        scale = np.abs(other.boxes).max(initial=1.0)
        return all(
            bool((np.abs(mine - its) <= limit * size).all())
            for mine, its, size in ((self.scores, other.scores, 1.0), (self.boxes, other.boxes, scale))
        )

    def named(self, names: tuple[str, ...]) -> Iterator[dict[str, object]]:
        """Yield each object as transformers' pipeline does: with edges truncated to whole pixels."""
        edges = ("xmin", "ymin", "xmax", "ymax")
        for score, number, box in zip(self.scores.tolist(), self.classes, self.boxes.astype(int).tolist(), strict=True):
            yield {"score": score, "label": names[number], "box": dict(zip(edges, box, strict=True))}


def find_objects(logits: Array, boxes: Array, problem: str, most: int, size: tuple[int, int]) -> Objects:
    """Return the objects that a detector's outputs for one image say, as the image processors of transformers do.

    Args:
        logits: (Q, C) for several labels, (Q, C + 1) for a single one, whose last class is that of no object.
        boxes: (Q, 4), the centre, width and height of each, as fractions of the image's.
        problem: ``single_label_classification``: each query is an object of its likeliest class, by a softmax.
            ``multi_label_classification``: each pair of query and class is one, whose score is the sigmoid of its
            logit, and the highest come first.
        most: number of objects.
        size: height and width of the original image.
    """
    height, width = size
    x, y, w, h = boxes.T
    edges = np.stack((x - 0.5 * w, y - 0.5 * h, x + 0.5 * w, y + 0.5 * h), -1)
    edges = edges * np.array((width, height, width, height), boxes.dtype)  # in the dtype of the outputs, as theirs
    values = logits.astype(np.float64)
    if problem == "single_label_classification":
        weights = np.exp(values - values.max(-1, keepdims=True))
        chances = (weights / weights.sum(-1, keepdims=True))[:, :-1]
        return Objects(chances.max(-1)[:most], chances.argmax(-1)[:most], edges[:most])
    order = np.argsort(-values, None, kind="stable")[:most]
    queries, classes = np.divmod(order, values.shape[1])
    return Objects(np.exp(-np.logaddexp(0.0, -values[queries, classes])), classes, edges[queries])


def truncation_error(numbers: Array, whole: Array) -> Array:
    """Return how far each number is from those that truncation turns into the given whole number.

    >>> truncation_error(np.array([2.5, -0.5, 3.25]), np.array([2, 0, 2])).tolist()
    [0.0, 0.0, 0.25]
    """
    low = np.where(whole > 0, whole, whole - 1)
    high = np.where(whole < 0, whole, whole + 1)
    result: Array = np.abs(numbers - np.clip(numbers, low, high))
    return result
