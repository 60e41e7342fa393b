"""Formulas of the tasks on images with answers per object or pixel: see :mod:`zoo_runtime.formula`.

Q queries, C classes, N objects; R rows and K columns of an image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.detection import truncation_error
from zoo_runtime.formula import Choice, Model, Numbers, Same

__all__ = ["depths", "objects", "segments"]

Result = Mapping[str, Any]
_SIDE = 24
"""Rows and columns of an image whose pixels are compared."""


def objects(runner: Any, item: Any, result: Result, model: Model) -> dict[str, Numbers]:
    """The scores of the objects by rank, and the score and the box of a query for each.

    Where queries are nearly as likely, either may come first: an object is of the query whose score for its class and
    whose box fit it best.
    """
    outputs = model(runner.feed([item]))
    logits, boxes = outputs["logits"][0], outputs["pred_boxes"][0]
    height, width = item.size
    sides = np.array([width, height, width, height])
    edges = np.stack([boxes[:, axis] + sign * boxes[:, axis + 2] / 2 for sign in (-1, 1) for axis in (0, 1)], 1) * sides
    if runner.problem == "single_label_classification":
        chances = np.exp(logits - np.logaddexp.reduce(logits, -1, keepdims=True))[:, :-1]  # (Q, C)
        ranked = np.sort(chances.max(-1))
    else:
        chances = np.exp(-np.logaddexp(0.0, -logits))
        ranked = np.sort(chances, None)
    found = result["objects"]
    scores = np.array([row["score"] for row in found])
    whole = np.array([[*row["box"].values()] for row in found]).reshape(-1, 4)
    likely = np.stack([_chances(chances, runner.names, row) for row in found])  # (N, Q)
    distances = truncation_error(edges, whole[:, None]) / sides  # (N, Q, 4)
    queries = np.maximum(np.abs(likely - scores[:, None]), distances.max(-1)).argmin(-1)
    near = edges[queries]
    return {
        "score of the rank": Numbers(np.sort(scores)[::-1], ranked[::-1][: len(found)]),
        "score of the query": Numbers(scores, likely[range(len(found)), queries]),
        "box": Numbers((near + truncation_error(near, whole)) / sides, near / sides),
        "count": Numbers([len(found)], np.array([min(runner.most, len(ranked))])),
    }


def segments(runner: Any, item: Any, result: Result, model: Model) -> dict[str, Choice | Same]:
    """The class of some pixels, and the numbers of pixels of each."""
    runs = result["map"]
    found = np.repeat(runs["classes"], runs["lengths"]).reshape(item.size)
    places = _places(item.size)
    scores = _at(model(runner.feed([item]))["logits"][0], item.size, "bilinear")  # (C, R, K)
    expected = {runner.names[number]: int((found == number).sum()) for number in np.unique(found)}
    return {
        "class": Choice(found[np.ix_(*places)], np.moveaxis(scores, 0, -1)),
        "pixels": Same({row["label"]: row["pixels"] for row in result["segments"]}, expected),
    }


def depths(runner: Any, item: Any, result: Result, model: Model) -> dict[str, Numbers]:
    """The depth of some pixels."""
    expected = _at(model(runner.feed([item]))["predicted_depth"][0], item.size, runner.method)
    return {"depth": Numbers(result["predicted_depth"][np.ix_(*_places(item.size))], expected)}


def _places(size: tuple[int, int]) -> tuple[Array, Array]:
    """Return a few rows and columns of an image, the first and last among them."""
    rows, columns = (np.unique(np.linspace(0, side - 1, _SIDE).astype(int)) for side in size)
    return rows, columns


def _at(values: Array, size: tuple[int, int], method: str) -> Array:
    """Return maps (..., h, w), interpolated to an image, at its :func:`_places`: (..., R, K).

    Each is a product with a matrix, whose rows are a kernel around the place in the map.
    """
    matrices = []
    for old, new, places in zip(values.shape[-2:], size, _places(size), strict=True):
        if method == "bilinear_corners":
            centres = places * (old - 1) / max(new - 1, 1)
        else:
            centres = (2 * places + 1) * old / (2 * new) - 0.5
        if method != "bicubic":
            centres = np.clip(centres, 0, old - 1)
        grid = np.arange(-2, old + 2)
        weights = _KERNELS[method != "bicubic"](np.abs(centres[:, None] - grid))
        weights[:, 2] += weights[:, :2].sum(-1)  # edges are repeated
        weights[:, -3] += weights[:, -2:].sum(-1)
        matrices.append(weights[:, 2:-2])
    result: Array = matrices[0] @ values @ matrices[1].T
    return result


def _cubic(x: Array) -> Array:
    """The kernel of Keys 1981 for a = -3/4."""
    result: Array = np.where(
        x < 1, 1.25 * x**3 - 2.25 * x**2 + 1, np.where(x < 2, -0.75 * (x**3 - 5 * x**2 + 8 * x - 4), 0.0)
    )
    return result


def _linear(x: Array) -> Array:
    result: Array = np.maximum(1 - x, 0.0)
    return result


_KERNELS = (_cubic, _linear)


def _chances(chances: Array, names: Sequence[str], row: Result) -> Array:
    """Return the score (Q,) of each query for the class of an object; of classes with one name, the nearest."""
    scores = chances[:, [number for number, name in enumerate(names) if name == row["label"]]]
    result: Array = scores[range(len(scores)), np.abs(scores - row["score"]).argmin(-1)]
    return result
