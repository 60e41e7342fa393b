"""The dtypes of stored tensors, in torch and in safetensors."""

from __future__ import annotations

import torch

from zoo.artifact.weights import DTYPES, dtype_name
from zoo.contract import TensorSpec
from zoo.errors import UsageError, nearest

__all__ = ["STORED_DTYPES", "declared_dtype", "torch_dtype"]

STORED_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""Safetensors names of torch dtypes."""


def torch_dtype(given: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype for ``float32``, ``float16`` or ``bfloat16``."""
    name = dtype_name(given)
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}", None, nearest(name, DTYPES))
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def declared_dtype(tensor: TensorSpec, real: torch.dtype) -> torch.dtype:
    """Return the dtype of a declared tensor, given that of the model: see :attr:`zoo.TensorSpec.dtype`."""
    if tensor.dtype == "float":
        return real
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return torch.promote_types(dtype, real) if tensor.is_float else dtype
