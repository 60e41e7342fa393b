"""Norms that torch lacks, and norms by name. E hidden size, B batch, C channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.config import Norm

__all__ = ["AnnotatedLayerNorm", "FrozenBatchNorm", "OffsetLayerNorm", "OffsetRMSNorm", "build_norm"]


def build_norm(hidden_size: int, *, eps: float, kind: Norm = "layer", bias: bool = True) -> nn.Module:
    """Build a norm over the last axis: ``torch.nn.LayerNorm`` (Ba et al. 2016) or :class:`AnnotatedLayerNorm`.

    ``eps`` is added to the variance by the first and to the standard deviation by the second. Without ``bias``, only a
    weight is learnt. Both have the same parameters.
    """
    if kind == "annotated":
        return AnnotatedLayerNorm(hidden_size, eps=eps, bias=bias)
    return nn.LayerNorm(hidden_size, eps=eps, bias=bias)


class AnnotatedLayerNorm(nn.Module):
    """a (x - mean) / (std + eps) + b, the norm of *The Annotated Transformer* (Rush 2018).

    It differs from ``torch.nn.LayerNorm`` in the standard deviation, which is the unbiased one, with E - 1 in its
    denominator, and in epsilon, which lies outside the root. Computed in float32 for narrower dtypes.

    Args:
        hidden_size: E, at least 2.
        eps: added to the standard deviation; 1e-6 in the original.
        bias: whether there is a b.

    Raises:
        ValueError: E is 1, for which the unbiased standard deviation is undefined.
    """

    def __init__(self, hidden_size: int, *, eps: float = 1e-6, bias: bool = True) -> None:
        super().__init__()
        if hidden_size < 2:
            raise ValueError(f"the unbiased standard deviation needs at least 2 numbers, got hidden_size {hidden_size}")
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) -> (..., E)."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = wide - wide.mean(-1, keepdim=True)
        y = self.weight.to(wide.dtype) * (centred / (wide.std(-1, keepdim=True) + self.eps))
        return (y if self.bias is None else y + self.bias.to(wide.dtype)).to(x.dtype)


class OffsetRMSNorm(nn.Module):
    """x / RMS(x) * (1 + w), the norm of Gemma, whose weights start at 0 (Gemma Team 2024, Gemma 2, section 2).

    Computed in float32 for narrower dtypes, in which 1 + w would lose most bits of a small w.

    Args:
        hidden_size: E.
        eps: added to the mean square.
    """

    def __init__(self, hidden_size: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) -> (..., E)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = 1.0 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), weight.shape, weight, self.eps).to(x.dtype)


class OffsetLayerNorm(nn.Module):
    """(x - mean) / std * (1 + w) + b, the norm of Nemotron, whose weights start at 0 (Parmar et al. 2024, section 2).

    Computed in float32 for narrower dtypes, as :class:`OffsetRMSNorm`.

    Args:
        hidden_size: E.
        eps: added to the variance.
        bias: whether there is a b.
    """

    def __init__(self, hidden_size: int, *, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) -> (..., E)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = 1.0 + self.weight.to(wide)
        bias = None if self.bias is None else self.bias.to(wide)
        return F.layer_norm(x.to(wide), weight.shape, weight, bias, self.eps).to(x.dtype)


class FrozenBatchNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * w + b of each channel, with constants that training does not change.

    Detectors keep the batch norms of a pretrained backbone in this way, because their batches are small (Carion et al.
    2020, section 4). The four constants are buffers, named as in ``torch.nn.BatchNorm2d``.

    Args:
        channels: C.
        eps: added to the variance.
    """

    def __init__(self, channels: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight: Tensor
        self.bias: Tensor
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, ...) -> (B, C, ...)."""
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
