"""Quantised weights: how a matrix becomes whole numbers and scales, and the safetensors file that holds them.

A matrix ``NAME`` of N rows and K columns, as torch stores a Linear or an Embedding, is kept in one of two layouts. The
file's metadata says which, under the matrix's name, as JSON.

``{"bits": b, "block": s}``, in blocks of s numbers along a row:
    ``NAME``              uint8 (N, K / s, s x b / 8); of two numbers in one byte the first has the lower half
    ``NAME.scales``       float32 (N, K / s)
    ``NAME.zero_points``  uint8 (N, ceil(K / s x b / 8)), packed in the same way; where there are none, 2^(b - 1)

``{"bits": 8, "block": null}``, by rows, transposed as the runtime's integer products read it:
    ``NAME``              int8 (K, N)
    ``NAME.scales``       float32 (N)

A weight is (number - zero point) x scale; the second layout has no zero points.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnxruntime.capi import _pybind_state as ort_native
from safetensors import safe_open

from zoo.errors import ArtifactError
from zoo.weights import StoredTensor, parse_json, read_header
from zoo_export.values import BFLOAT16

__all__ = [
    "Packing",
    "packings",
    "read_dequantized",
    "read_tensor",
    "write_packed",
    "write_tensors",
]

Array = np.ndarray[Any, Any]

SCALES, ZERO_POINTS = ".scales", ".zero_points"
_NATIVE = {4: ort_native.quantize_matmul_4bits, 8: ort_native.quantize_matmul_8bits}
"""The functions by which ONNX Runtime's own quantiser packs weights for MatMulNBits."""
_NUMPY: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": BFLOAT16, "I64": np.int64, "I32": np.int32,
    "U8": np.uint8, "I8": np.int8, "BOOL": np.bool_,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Packing:
    """How one matrix is stored."""

    rows: int
    columns: int
    bits: int
    block: int | None
    """Numbers that share a scale; None when a whole row does, and the matrix is transposed."""
    zero_points: bool = False

    def parts(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Suffix of each stored tensor to its dtype, as safetensors calls it, and its shape."""
        if self.block is None:
            return {"": ("I8", (self.columns, self.rows)), SCALES: ("F32", (self.rows,))}
        blocks = self.columns // self.block
        parts = {
            "": ("U8", (self.rows, blocks, self.block * self.bits // 8)),
            SCALES: ("F32", (self.rows, blocks)),
        }
        if self.zero_points:
            parts[ZERO_POINTS] = ("U8", (self.rows, -(-blocks * self.bits // 8)))
        return parts

    def pack(self, weight: Array) -> dict[str, Array]:
        """The stored tensors of a matrix, by suffix."""
        if self.block is None:
            return _pack_rows(weight)
        made = {suffix: np.zeros(shape, _NUMPY[dtype]) for suffix, (dtype, shape) in self.parts().items()}
        points = made.get(ZERO_POINTS, np.zeros(0, np.uint8))
        if not self.zero_points:  # the function writes them all the same
            points = np.zeros((self.rows, -(-(self.columns // self.block) * self.bits // 8)), np.uint8)
        columns = np.ascontiguousarray(weight.T)
        _NATIVE[self.bits](
            made[""], columns, made[SCALES], points, self.block, self.rows, self.columns, not self.zero_points
        )
        return made

    def unpack(self, parts: Mapping[str, Array]) -> Array:
        """The matrix that stored tensors stand for, float32."""
        if self.block is None:
            return np.ascontiguousarray((parts[""] * parts[SCALES]).T)
        blocks = self.columns // self.block
        numbers = _spread(parts[""].reshape(self.rows, -1), self.bits).reshape(self.rows, blocks, self.block)
        if self.zero_points:
            points = _spread(parts[ZERO_POINTS], self.bits)[:, :blocks, None].astype(np.float32)
        else:
            points = np.full(1, 2 ** (self.bits - 1), np.float32)
        weights = (numbers.astype(np.float32) - points) * parts[SCALES].reshape(self.rows, blocks, 1)
        return weights.reshape(self.rows, self.columns)


def _pack_rows(weight: Array) -> dict[str, Array]:
    """Symmetric, one scale a row: onnxruntime.quantization's int8 weights per channel, all channels at once."""
    highest = np.abs(weight).max(axis=1, initial=0).astype(np.float64)
    scales = (2 * highest / 254).astype(np.float32)
    scales[scales < np.finfo(np.float32).tiny] = 1.0
    numbers = np.clip(np.round(weight / scales[:, None]), -127, 127).astype(np.int8)
    return {"": np.ascontiguousarray(numbers.T), SCALES: scales}


def _spread(packed: Array, bits: int) -> Array:
    """One number an element, from rows of bytes."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def write_packed(path: Path, plan: Mapping[str, Packing], weights: Iterable[tuple[str, Array]]) -> None:
    """Write the packed matrices of ``plan``, taking one of ``weights`` at a time."""
    layout = {name + suffix: part for name, packing in plan.items() for suffix, part in packing.parts().items()}
    metadata = {name: json.dumps({"bits": p.bits, "block": p.block}) for name, p in plan.items()}

    def parts() -> Iterator[tuple[str, Array]]:
        for name, weight in weights:
            for suffix, part in plan[name].pack(weight).items():
                yield name + suffix, part

    write_tensors(path, layout, {"format": "zoo.packed", **metadata}, parts())


def write_tensors(
    path: Path,
    layout: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str],
    tensors: Iterable[tuple[str, Array]],
) -> None:
    """Write a safetensors file of a known layout, in whatever order its tensors arrive.

    The library's own writer wants them all in memory at once. Wide numbers come first, so that all are aligned.
    """
    offsets: dict[str, int] = {}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in sorted(layout.items(), key=lambda item: -np.dtype(_NUMPY[item[1][0]]).itemsize):
        offsets[name], end = end, end + math.prod(shape) * np.dtype(_NUMPY[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    missing = set(layout)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for name, tensor in tensors:
            dtype, shape = layout[name]
            if tensor.dtype != _NUMPY[dtype] or tensor.shape != shape:
                raise ValueError(f"{name} is {tensor.dtype} {tensor.shape}, planned as {dtype} {shape}")
            missing.remove(name)
            file.seek(8 + len(text) + offsets[name])
            file.write(np.ascontiguousarray(tensor).view(np.uint8).data)
    if missing:
        raise ValueError(f"{len(missing)} planned tensors did not arrive, such as {min(missing)}")


def packings(path: Path) -> dict[str, Packing]:
    """How each matrix of a file of packed weights is stored.

    Raises :class:`ArtifactError` for a file whose tensors are not what its metadata says.
    """
    layout = read_header(path)
    with safe_open(path, framework="numpy") as reader:
        metadata = dict(reader.metadata() or {})
    if metadata.pop("format", None) != "zoo.packed":
        raise ArtifactError("does not hold quantised weights", path)
    found: dict[str, Packing] = {}
    for name, text in metadata.items():
        try:
            entry = parse_json(text.encode())
            bits, block = entry["bits"], entry["block"]
            shape, zero_points = layout[name].shape, name + ZERO_POINTS in layout
            if block is None:
                packing = Packing(shape[1], shape[0], bits, None)
            else:
                packing = Packing(shape[0], shape[1] * block, bits, block, zero_points)
            for suffix, part in packing.parts().items():
                stored = layout.pop(name + suffix)
                if (stored.dtype, stored.shape) != part:
                    raise ValueError(f"{name}{suffix} is {stored.dtype} {stored.shape}")
        except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            raise ArtifactError(f"bad packing of {name} ({error})", path) from error
        found[name] = packing
    if layout:
        raise ArtifactError(f"{min(layout)} belongs to no matrix", path)
    return found


def read_dequantized(path: Path) -> Iterator[tuple[str, Array]]:
    """Each matrix of a file of packed weights, as the float32 numbers that it stands for."""
    plan = packings(path)
    with safe_open(path, framework="numpy") as reader:
        for name, packing in plan.items():
            yield name, packing.unpack({suffix: reader.get_tensor(name + suffix) for suffix in packing.parts()})


def read_tensor(directory: Path, name: str, place: StoredTensor) -> Array:
    """One tensor of a model's weights, which the system may forget again when it is not used."""
    with safe_open(directory / place.file, framework="numpy") as reader:
        tensor: Array = reader.get_tensor(name)
    return tensor
