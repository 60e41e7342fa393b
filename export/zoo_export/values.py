"""Arrays as ONNX Runtime's values, and back, bfloat16 among them.

numpy has no bfloat16 of its own. That of ``ml_dtypes`` is taken, which ONNX Runtime's functions on arrays do not know:
here such arrays pass as their bits. Arrays of all other dtypes pass as they always did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort

__all__ = ["BFLOAT16", "epsilon", "numpy_dtype", "run_session", "to_array", "to_value"]

Array = np.ndarray[Any, Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_BITS = np.uint16
_ONNX_BFLOAT16 = 16
"""``TensorProto.BFLOAT16``."""
_TYPE = "tensor(bfloat16)"


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of that name; ``bfloat16`` too, which numpy does not know by its name unless somebody imports it."""
    return BFLOAT16 if name == BFLOAT16.name else np.dtype(name)


def epsilon(dtype: str | np.dtype[Any]) -> float:
    """The step from 1 to the next number of a real dtype."""
    facts: Any = ml_dtypes.finfo  # it has no type hints
    return float(facts(numpy_dtype(dtype) if isinstance(dtype, str) else dtype).eps)


def to_value(array: Array, device: str = "cpu") -> ort.OrtValue:
    """An array as a value on ``cpu`` or ``cuda``.

    On the CPU it shares the memory of the array, which must be contiguous.
    """
    if array.dtype != BFLOAT16:
        return ort.OrtValue.ortvalue_from_numpy(array, device, 0)
    bits = array.view(_BITS)
    if device == "cpu":
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)
    value = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, _ONNX_BFLOAT16, device, 0)
    value.update_inplace(bits)
    return value


def to_array(value: ort.OrtValue) -> Array:
    """A value from any device as an array. One in bfloat16 is always a copy."""
    if value.data_type() != _TYPE:
        return value.numpy()
    array = np.empty(value.shape(), BFLOAT16)
    to_value(array).update_inplace(value)
    return array


def run_session(session: ort.InferenceSession, names: Sequence[str], arrays: Mapping[str, Array]) -> list[Array]:
    """The outputs of these names, for inputs by name."""
    if all(item.type != _TYPE for item in (*session.get_inputs(), *session.get_outputs())):
        outputs: list[Array] = session.run(names, arrays)
        return outputs
    values = {name: to_value(np.asarray(array, order="C")) for name, array in arrays.items()}
    return [to_array(value) for value in session.run_with_ort_values(names, values)]
