"""Weights in fp8 with a scale for each block, as DeepSeek-V3 publishes them (DeepSeek-AI 2024, section 3.3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from zoo.checkpoints.source import SourceTensor
from zoo.errors import ArtifactError

__all__ = ["FP8_BLOCK", "widen_fp8", "widen_fp8_tensors"]

FP8_BLOCK = 128
"""Rows and columns of a block; the last ones of a matrix may have fewer."""
_SCALES = "_scale_inv"


def widen_fp8(weights: Tensor, scales: Tensor) -> Tensor:
    """Return weights times the scales of their blocks, computed in float32 as in transformers.

    Args:
        weights: (N, M), of dtype float8_e4m3fn.
        scales: (ceil(N / 128), ceil(M / 128)).

    Returns:
        (N, M) in float32.

    >>> widen_fp8(torch.ones(1, 130).to(torch.float8_e4m3fn), torch.tensor([[2.0, 3.0]]))[0, 126:]
    tensor([2., 2., 3., 3.])
    """
    wide = weights.float()
    for row, bands in zip(wide.split(FP8_BLOCK), scales.float(), strict=True):
        for block, scale in zip(row.split(FP8_BLOCK, dim=1), bands, strict=True):
            block *= scale
    return wide


def widen_fp8_tensors(tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """Return the tensors of a checkpoint with widened weights in place of those in fp8 and their scales.

    Scales whose shapes or dtypes do not fit stay as they are, and are then unexpected.

    Raises:
        ArtifactError: some tensors in fp8 have scales, and another has none.
    """
    made = dict(tensors)
    narrow = {name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}
    for name, weights in narrow.items():
        scales = tensors.get(f"{name}{_SCALES}")
        if scales is None:
            if any(f"{other}{_SCALES}" in tensors for other in narrow):
                raise ArtifactError(f"{name} is in fp8, but {name}{_SCALES} is missing")
            continue
        if scales.dtype != torch.float32:
            continue
        if scales.shape == tuple(-(-size // FP8_BLOCK) for size in weights.shape) and len(weights.shape) == 2:
            del made[f"{name}{_SCALES}"]
            made[name] = SourceTensor(weights.shape, torch.float32, partial(_read, weights, scales))
    return made


def _read(weights: SourceTensor, scales: SourceTensor) -> Tensor:
    return widen_fp8(weights.read(), scales.read())
