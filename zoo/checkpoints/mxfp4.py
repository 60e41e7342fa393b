"""Weights in MXFP4, which are widened exactly (OCP Microscaling Formats Specification 1.0, section 5).

N blocks of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["widen_mxfp4"]

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor((*_MAGNITUDES, *(-number for number in _MAGNITUDES)), dtype=torch.bfloat16)
"""The numbers of the 16 codes of E2M1."""
_BIAS, _NAN = 127, 255
"""The bias that is subtracted from a scale's byte (E8M0) to get its exponent, and the byte for NaN."""


def widen_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return weights as bfloat16, which holds all of them exactly.

    Args:
        blocks: uint8, (..., N, 16); a byte has two numbers of 4 bits, the first in the lower half.
        scales: uint8, (..., N), the exponent of a power of two for the 32 numbers of a block.

    Returns:
        (..., 32 N). Numbers beyond the range of float32 are infinite, and those of a block without a scale NaN.

    >>> widen_mxfp4(torch.full((1, 16), 0x92, dtype=torch.uint8), torch.tensor([128], dtype=torch.uint8))[:4]
    tensor([ 2., -1.,  2., -1.], dtype=torch.bfloat16)
    """
    codes = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)  # (..., N, 32)
    exponents = scales.unsqueeze(-1).int() - _BIAS
    numbers = torch.ldexp(_NUMBERS[codes.int()], exponents)
    return numbers.masked_fill((scales == _NAN).unsqueeze(-1), torch.nan).flatten(-2)
