"""numpy dtypes by name, bfloat16 included."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from zoo.contract import TensorSpec

__all__ = ["BFLOAT16", "dtype_of", "epsilon", "numpy_dtype"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of that name, including ``bfloat16``, which numpy knows only after ml_dtypes is imported."""
    return BFLOAT16 if name == BFLOAT16.name else np.dtype(name)


def dtype_of(tensor: TensorSpec, real: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a declared tensor, given that of the model."""
    if tensor.dtype == "float":
        return real
    declared = np.dtype(tensor.dtype)
    return real if tensor.is_float and real.itemsize > declared.itemsize else declared


def epsilon(dtype: str | np.dtype[Any]) -> float:
    """Return the distance from 1 to the next larger number of a floating-point dtype."""
    facts: Any = ml_dtypes.finfo  # untyped
    return float(facts(numpy_dtype(dtype) if isinstance(dtype, str) else dtype).eps)
