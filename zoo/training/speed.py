"""The speed of training as a share of the machine's peak. Importing this module imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from zoo.training.criterion import Batch

__all__ = ["batch_elements", "count_flops", "peak_flops"]

Result = TypeVar("Result")

_SIZES = {"cpu": 1024, "cuda": 8192}
_REPEATS = 3


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a large square matrix product, the best of a few."""
    size = _SIZES.get(device.type, 1024)
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    seconds = min(_seconds(lambda: matrix @ matrix, device) for _ in range(1 + _REPEATS))
    return 2 * size**3 / seconds


def _seconds(compute: Callable[[], Tensor], device: torch.device) -> float:
    wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    compute()
    wait()
    return time.perf_counter() - started


def count_flops(compute: Callable[[], Result]) -> tuple[Result, int]:
    """Return the result of a computation, and the floating-point operations of its matrix products and convolutions.

    Attention is computed without fused kernels, which torch does not count on every device, and with gradients, since
    the counter fails where a module gets a parameter without them.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        result = compute()
    return result, counter.get_total_flops()


def batch_elements(batch: Batch) -> int:
    """Return the number of elements of a batch, padding included."""
    return sum(tensor.numel() for tensor in batch.values())
