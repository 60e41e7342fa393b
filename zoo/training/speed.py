"""The speed of training as a share of the machine's peak. Importing this module imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from zoo.training.criterion import Batch

__all__ = ["batch_elements", "count_flops", "peak_flops"]

Result = TypeVar("Result")

_SIZES = {"cpu": 1024, "cuda": 8192}
_REPEATS = 3


@cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a large square matrix product, the best of a few.

    It is measured once per process.
    """
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

    Attention is computed without fused kernels, which torch does not count on every device.
    """
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _Counter() as counter:
        result = compute()
    return result, counter.total


class _Counter(TorchDispatchMode):
    """Adds up the operations that torch has formulas for. FlopCounterMode does, too, but it needs gradients."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def batch_elements(batch: Batch) -> int:
    """Return the number of elements of a batch, padding included."""
    return sum(tensor.numel() for tensor in batch.values())
