"""numpy dtypes by name, bfloat16 included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zoo.contract import TensorSpec

if TYPE_CHECKING:
    BFLOAT16: np.dtype[Any]

__all__ = ["BFLOAT16", "dtype_of", "epsilon", "is_bfloat16", "numpy_dtype"]

_BFLOAT16 = "bfloat16"


def __getattr__(name: str) -> Any:
    """Import ml_dtypes when its dtype is first used: few models are in bfloat16."""
    if name == "BFLOAT16":
        import ml_dtypes

        return globals().setdefault(name, np.dtype(ml_dtypes.bfloat16))
    raise AttributeError(f"module 'zoo.probe.dtypes' has no attribute {name!r}")


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is ``BFLOAT16``, without importing ml_dtypes."""
    return dtype.kind == "V" and dtype.name == _BFLOAT16


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of that name, including ``bfloat16``, which numpy knows only after ml_dtypes is imported."""
    if name == _BFLOAT16:
        from zoo.probe.dtypes import BFLOAT16

        return BFLOAT16
    return np.dtype(name)


def dtype_of(tensor: TensorSpec, real: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a declared tensor, given that of the model."""
    if tensor.dtype == "float":
        return real
    declared = np.dtype(tensor.dtype)
    return real if tensor.is_float and real.itemsize > declared.itemsize else declared


def epsilon(dtype: str | np.dtype[Any]) -> float:
    """Return the distance from 1 to the next larger number of a floating-point dtype."""
    import ml_dtypes

    facts: Any = ml_dtypes.finfo  # untyped
    return float(facts(numpy_dtype(dtype) if isinstance(dtype, str) else dtype).eps)
