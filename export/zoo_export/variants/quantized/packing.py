"""Quantised weights: conversion of matrices to integers and scales, and the safetensors file for them.

A matrix ``NAME`` of N rows and K columns, as torch stores a Linear or an Embedding, has one of two layouts, given as
JSON in the file's metadata under the name of the matrix.

``{"bits": b, "block": s}``, blocks of s numbers along a row:
    ``NAME``              uint8 (N, K / s, s x b / 8); of two numbers in one byte, the first is in the lower half
    ``NAME.scales``       float32 (N, K / s)
    ``NAME.zero_points``  uint8 (N, ceil(K / s x b / 8)), packed in the same way; if absent, all are 2^(b - 1)

``{"bits": 8, "block": null}``, one scale per row, transposed for ONNX Runtime's integer products:
    ``NAME``              int8 (K, N)
    ``NAME.scales``       float32 (N)

A weight is (number - zero point) x scale; the second layout has no zero points. A stack of matrices is stored as one
matrix with all their rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open

from zoo.arrays import Array
from zoo.artifact.weights import parse_json, read_header
from zoo.errors import ArtifactError
from zoo_export.variants.reduced.tensors import NUMPY, write_tensors
from zoo_runtime.onnx_runtime.ort import ort_native

__all__ = [
    "SCALES",
    "ZERO_POINTS",
    "Packing",
    "packings",
    "read_dequantized",
    "write_packed",
]

SCALES, ZERO_POINTS = ".scales", ".zero_points"
_NATIVE = {4: ort_native.quantize_matmul_4bits, 8: ort_native.quantize_matmul_8bits}
"""ONNX Runtime's functions that pack weights for MatMulNBits."""
_CLIPPED = tuple(np.float32(part / 20) for part in range(20, 11, -1))
"""Parts of a block's range that 4 bits may be spread over. Numbers beyond them are clipped."""
_TOP = 15
"""Largest 4-bit number."""
_DAMPING = 0.01
"""Part of the mean moment that is added to the diagonal, as in the paper's experiments."""
_SMALL = 128
"""Rows of a triangular matrix that is inverted as any other."""
_AT_ONCE = 1 << 20
"""Numbers to quantise at a time, which bounds the memory of temporary arrays."""
_LARGEST, _LARGEST_SUM = 127, 128
"""Largest magnitudes of an 8-bit weight, and of the sum of two neighbours: 128 x 255 fits into 16 bits."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The storage layout of a matrix."""

    rows: int
    columns: int
    bits: int
    block: int | None
    """Numbers per scale; None for one scale per row, with the matrix transposed."""
    zero_points: bool = False

    def parts(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the safetensors dtype and the shape of each stored tensor, by suffix."""
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

    def pack(self, weight: Array, moments: Array | None = None) -> dict[str, Array]:
        """Pack a matrix; return the stored tensors by suffix.

        Args:
            weight: the matrix, (N, K).
            moments: second moments of the inputs that it multiplies, (K, K): 4-bit numbers with zero points are then
                chosen for the closest products instead of the closest weights.
        """
        if self.block is None:
            return _pack_rows(weight)
        if self.bits == 4 and self.zero_points:
            return self._pack_closest(weight, moments)
        arrays = {suffix: np.zeros(shape, NUMPY[dtype]) for suffix, (dtype, shape) in self.parts().items()}
        points = arrays.get(ZERO_POINTS, np.zeros(0, np.uint8))
        if not self.zero_points:  # the function writes them anyway
            points = np.zeros((self.rows, -(-(self.columns // self.block) * self.bits // 8)), np.uint8)
        columns = np.ascontiguousarray(weight.T)
        _NATIVE[self.bits](
            arrays[""], columns, arrays[SCALES], points, self.block, self.rows, self.columns, not self.zero_points
        )
        return arrays

    def _pack_closest(self, weight: Array, moments: Array | None) -> dict[str, Array]:
        """Pack with scales and zero points chosen by :func:`_closest`."""
        assert self.block is not None
        factor = None if moments is None else _compensation(moments)
        step = max(1, _AT_ONCE // self.columns)
        found = []
        for start in range(0, self.rows, step):
            rows = np.ascontiguousarray(weight[start : start + step], np.float32)
            found.append(_by_block(rows, self.block) if factor is None else _by_column(rows, self.block, factor))
        numbers, scales, points = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return {
            "": _join(numbers).reshape(self.parts()[""][1]),
            SCALES: scales,
            ZERO_POINTS: _join(np.pad(points, ((0, 0), (0, points.shape[1] % 2)))),
        }

    def unpack(self, parts: Mapping[str, Array]) -> Array:
        """Unpack stored tensors to a float32 matrix."""
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
    """Quantise symmetrically with one scale per row, so that no two neighbouring products exceed 16 bits.

    Without VNNI, x86 adds the products of two neighbours, 8-bit activations times 8-bit weights, in 16 bits that
    saturate (ONNX Runtime's documentation of quantisation: "When to use reduce-range"). Half the range for all weights
    would prevent this at the cost of a bit. Limiting the sums of neighbours costs half as much.
    """
    columns = np.pad(weight.T, ((0, weight.shape[1] % 2), (0, 0))).astype(np.float64)
    sums = np.abs(columns[::2] + columns[1::2])
    scales = np.maximum(
        np.abs(weight).max(axis=1, initial=0) / _LARGEST, sums.max(axis=0, initial=0) / _LARGEST_SUM
    ).astype(np.float32)
    scales[scales < np.finfo(np.float32).tiny] = 1.0
    numbers = np.round(columns / scales).clip(-_LARGEST, _LARGEST).astype(np.int16)
    sums = numbers[::2] + numbers[1::2]
    numbers[::2] -= np.sign(sums) * (np.abs(sums) > _LARGEST_SUM)  # both were rounded up
    return {"": np.ascontiguousarray(numbers[: weight.shape[1]].astype(np.int8)), SCALES: scales}


def _by_block(weight: Array, block: int) -> tuple[Array, Array, Array]:
    """Quantise a matrix block by block; return 4-bit numbers, scales and zero points, each with N rows."""
    numbers, scales, points = _closest(weight.reshape(-1, block))
    return numbers.reshape(weight.shape), scales.reshape(len(weight), -1), points.reshape(len(weight), -1)


def _compensation(moments: Array) -> Array | None:
    """Return the upper Cholesky factor of the inverse of damped moments, or None if all inputs were 0.

    Where the moments are U U^T with an upper triangular U, as their Cholesky factor is if rows and columns are taken
    backwards, it is the inverse of U. That takes a third of the time of an inverse of the moments and its factor.
    """
    moments = moments.astype(np.float64)
    mean = float(np.mean(np.diag(moments)))
    if not mean > 0:
        return None
    moments[np.diag_indices_from(moments)] += _DAMPING * mean
    return _inverse(np.linalg.cholesky(moments[::-1, ::-1])[::-1, ::-1])


def _inverse(upper: Array) -> Array:
    """Return the inverse of an upper triangular matrix, from the inverses of its two blocks on the diagonal."""
    if len(upper) <= _SMALL:
        return np.triu(np.linalg.inv(upper))
    half = len(upper) // 2
    inverse = np.zeros_like(upper)
    first = inverse[:half, :half] = _inverse(upper[:half, :half])
    second = inverse[half:, half:] = _inverse(upper[half:, half:])
    inverse[:half, half:] = -first @ (upper[:half, half:] @ second)
    return inverse


def _by_column(weight: Array, block: int, factor: Array) -> tuple[Array, Array, Array]:
    """Quantise a matrix column by column, corrected for the errors of earlier columns (GPTQ, algorithm 1).

    Args:
        weight: the matrix, (N, K).
        block: numbers per scale.
        factor: see :func:`_compensation`, (K, K).

    Returns:
        As :func:`_by_block`.
    """
    rows, columns = weight.shape
    numbers = np.empty((columns, rows), np.uint8)
    errors = np.empty((columns, rows))  # transposed, so that a column is contiguous
    scales = np.empty((rows, columns // block), np.float32)
    points = np.empty((rows, columns // block), np.uint8)
    for start in range(0, columns, block):
        stop, place = start + block, start // block
        left = weight[:, start:stop].T - factor[:start, start:stop].T @ errors[:start]
        _, scales[:, [place]], points[:, [place]] = _closest(np.ascontiguousarray(left.T, np.float32))
        scale, point = scales[:, place].astype(np.float64), points[:, place].astype(np.float64)
        for column in range(start, stop):
            exact = left[column - start] - factor[start:column, column] @ errors[start:column]
            number = (np.round(exact / scale) + point).clip(0, _TOP)
            errors[column] = (exact - (number - point) * scale) / factor[column, column]
            numbers[column] = number
    return np.ascontiguousarray(numbers.T), scales, points


def _closest(blocks: Array) -> tuple[Array, Array, Array]:
    """Quantise rows to 4 bits, each with the scale and zero point of the least squared error among candidates.

    A candidate spreads the numbers over a part of the row's range. Its scale is then replaced by the least-squares fit
    to its rounded weights, and the weights are rounded again; neither step can increase the error. The first candidate
    starts from the whole range, so the result is at least as close as rounding to nearest.

    Returns:
        Numbers (uint8), scales (float32) and zero points (uint8), the latter two with one column.
    """
    low, high = (bound(blocks, axis=1, keepdims=True, initial=0) for bound in (np.min, np.max))
    least = np.full_like(low, np.inf)
    scales, points = np.ones_like(low), np.zeros_like(low)
    for part in _CLIPPED:
        scale = (high - low) * (part / np.float32(_TOP))
        scale = np.where(scale >= np.finfo(np.float32).tiny, scale, np.float32(1))
        point = np.round(-low * part / scale)
        rounded = np.round(blocks / scale).clip(-point, _TOP - point)
        squares = (rounded * rounded).sum(1, keepdims=True)
        fitted = np.divide((rounded * blocks).sum(1, keepdims=True), squares, out=scale.copy(), where=squares > 0)
        scale = np.where(fitted >= np.finfo(np.float32).tiny, fitted, scale)
        rounded = np.round(blocks / scale).clip(-point, _TOP - point)
        error = np.square(rounded * scale - blocks).sum(1, keepdims=True)
        better = error < least
        least, scales, points = (
            np.where(better, new, old) for new, old in ((error, least), (scale, scales), (point, points))
        )
    numbers = (np.round(blocks / scales) + points).clip(0, _TOP)
    return numbers.astype(np.uint8), scales, points.astype(np.uint8)


def _join(numbers: Array) -> Array:
    """Pack pairs of 4-bit numbers along the last axis into bytes."""
    packed: Array = numbers[..., ::2] | numbers[..., 1::2] << 4
    return packed


def _spread(packed: Array, bits: int) -> Array:
    """Unpack rows of bytes to one number per element."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def write_packed(path: Path, plan: Mapping[str, Packing], weights: Iterable[tuple[str, Array, Array | None]]) -> None:
    """Pack and write the matrices of ``plan``, one of ``weights``, with its moments, at a time."""
    layout = {name + suffix: part for name, packing in plan.items() for suffix, part in packing.parts().items()}
    metadata = {name: json.dumps({"bits": p.bits, "block": p.block}) for name, p in plan.items()}

    def parts() -> Iterator[tuple[str, Array]]:
        for name, weight, moments in weights:
            for suffix, part in plan[name].pack(weight, moments).items():
                yield name + suffix, part

    write_tensors(path, layout, {"format": "zoo.packed", **metadata}, parts())


def packings(path: Path) -> dict[str, Packing]:
    """Return the packing of each matrix in a file of packed weights.

    Raises:
        ArtifactError: the tensors do not match the file's metadata.
    """
    layout = read_header(path)
    with safe_open(path, framework="numpy") as reader:
        metadata = dict(reader.metadata() or {})
    if metadata.pop("format", None) != "zoo.packed":
        raise ArtifactError("not a file of quantised weights", path)
    plan: dict[str, Packing] = {}
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
        plan[name] = packing
    if layout:
        raise ArtifactError(f"{min(layout)} does not belong to any matrix", path)
    return plan


def read_dequantized(path: Path) -> Iterator[tuple[str, Array]]:
    """Yield each matrix of a file of packed weights, dequantised to float32."""
    plan = packings(path)
    with safe_open(path, framework="numpy") as reader:
        for name, packing in plan.items():
            yield name, packing.unpack({suffix: reader.get_tensor(name + suffix) for suffix in packing.parts()})
