"""Conversion between numpy arrays and ONNX Runtime values, including bfloat16.

numpy has no bfloat16, and ONNX Runtime's array functions do not support that of ``ml_dtypes``, so bfloat16 arrays are
passed as their bit patterns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.probe.dtypes import is_bfloat16, numpy_dtype
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.stopping import running

__all__ = ["element_type", "run_lean", "run_session", "to_array", "to_value"]


_BITS = np.uint16
_ONNX_BFLOAT16 = 16
"""``TensorProto.BFLOAT16``."""
_TYPE = "tensor(bfloat16)"


def element_type(dtype: np.dtype[Any]) -> Any:
    """Return the type of a tensor's elements, as bindings to memory take it."""
    return _ONNX_BFLOAT16 if is_bfloat16(dtype) else dtype.type


def to_value(array: Array, device: str = "cpu") -> ort.OrtValue:
    """Convert an array to a value on ``cpu`` or ``cuda``.

    On the CPU the value shares the array's memory, which must be contiguous.
    """
    if not is_bfloat16(array.dtype):
        return ort.OrtValue.ortvalue_from_numpy(array, device, 0)
    bits = array.view(_BITS)
    if device == "cpu":
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)
    value = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, _ONNX_BFLOAT16, device, 0)
    value.update_inplace(bits)
    return value


def to_array(value: ort.OrtValue) -> Array:
    """Convert a value on any device to an array. A bfloat16 array is always a copy."""
    if value.data_type() != _TYPE:
        return value.numpy()
    array = np.empty(value.shape(), numpy_dtype("bfloat16"))
    to_value(array).update_inplace(value)
    return array


def run_session(session: ort.InferenceSession, names: Sequence[str], arrays: Mapping[str, Array]) -> list[Array]:
    """Run a session on arrays by input name; return the outputs ``names``."""
    if all(item.type != _TYPE for item in (*session.get_inputs(), *session.get_outputs())):
        with running() as options:
            outputs: list[Array] = session.run(names, arrays, options)
        return outputs
    values = {name: to_value(np.asarray(array, order="C")) for name, array in arrays.items()}
    with running() as options:
        return [to_array(value) for value in session.run_with_ort_values(names, values, options)]


def run_lean(
    session: ort.InferenceSession, names: Sequence[str], arrays: Mapping[str, Array], buffers: Mapping[str, Array]
) -> dict[str, Array]:
    """Run a session on the CPU like :func:`run_session`, and return the memory that it pools, if any, to the system.

    Args:
        session: the session.
        names: the outputs.
        arrays: the inputs by name.
        buffers: arrays that the outputs of these names are written to; the others lie in the pool.
    """
    binding = session.io_binding()
    values = {name: to_value(np.asarray(array, order="C")) for name, array in arrays.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in names:
        if name in buffers:
            binding.bind_ortvalue_output(name, to_value(buffers[name]))
        else:
            binding.bind_output(name)
    options = ort.RunOptions()
    if session.get_session_options().enable_cpu_mem_arena:
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    with running(options):
        session.run_with_iobinding(binding, options)
    return {
        name: buffers[name] if name in buffers else to_array(value)
        for name, value in zip(names, binding.get_outputs(), strict=True)
    }
