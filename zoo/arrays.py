"""The type of the numpy arrays that the packages exchange."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

__all__ = ["Array"]

Array: TypeAlias = np.ndarray[Any, Any]
"""An array of any shape and dtype: the declaration of a graph has both."""
