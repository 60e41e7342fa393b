"""Handwritten digits, 8 x 8 pixels: the test set of Alpaydin and Kaynak 1998 (UCI), as scikit-learn contains it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from zoo.training.data.order import permute

__all__ = ["rows"]

_SPLITS = {"train": slice(0, 1297), "validation": slice(1297, 1497), "test": slice(1497, 1797)}
_SEED = 0
"""Determines the order of the 1,797 images before they are split."""
_WHITE = 16


def rows(split: str) -> Iterator[dict[str, Any]]:
    """Yield images as lists of 8 rows of 8 integers from 0 to 255, and labels from ``0`` to ``9``."""
    datasets: Any = importlib.import_module("sklearn.datasets")
    digits = datasets.load_digits()
    count = len(digits.images)
    for index in permute(np.arange(count), count, _SEED)[_SPLITS[split]]:
        pixels = np.rint(digits.images[index] * (255 / _WHITE)).astype(int)
        yield {"image": pixels.tolist(), "label": str(digits.target[index])}
