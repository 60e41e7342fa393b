"""Reading and writing of one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from zoo.arrays import Array
from zoo.artifact.weights import StoredTensor
from zoo.probe.dtypes import BFLOAT16

__all__ = ["NUMPY", "read_tensor", "write_tensors"]

NUMPY: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": BFLOAT16, "I64": np.int64, "I32": np.int32,
    "U8": np.uint8, "I8": np.int8, "BOOL": np.bool_,
}  # fmt: skip
"""NumPy's dtype of each dtype of a safetensors file."""


def write_tensors(
    path: Path,
    layout: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str],
    tensors: Iterable[tuple[str, Array]],
) -> None:
    """Write a safetensors file of a known layout, with tensors arriving in any order.

    The library's own writer needs all tensors in memory at once. Wider dtypes come first, so that all are aligned.
    """
    offsets: dict[str, int] = {}
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}  # the library reads it in a random order
    end = 0
    for name, (dtype, shape) in sorted(layout.items(), key=lambda item: -np.dtype(NUMPY[item[1][0]]).itemsize):
        offsets[name], end = end, end + math.prod(shape) * np.dtype(NUMPY[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    missing = set(layout)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for name, tensor in tensors:
            dtype, shape = layout[name]
            if tensor.dtype != NUMPY[dtype] or tensor.shape != shape:
                raise ValueError(f"{name} is {tensor.dtype} {tensor.shape}, expected {dtype} {shape}")
            missing.remove(name)
            file.seek(8 + len(text) + offsets[name])
            file.write(np.ascontiguousarray(tensor).view(np.uint8).data)
    if missing:
        raise ValueError(f"{len(missing)} tensors of the layout are missing, such as {min(missing)}")


def read_tensor(directory: Path, name: str, place: StoredTensor) -> Array:
    """Read one tensor of a model's weights. Opening the file each time lets the system free pages no longer used."""
    with safe_open(directory / place.file, framework="numpy") as reader:
        tensor: Array = reader.get_tensor(name)
    return tensor
