"""Evaluation in float64 of the code that a model runs in another dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zoo.probe.widened import CONVERSIONS, KeptWide, asks_for_float32

__all__ = ["ClaimedDtype"]

_METHODS = {Tensor.float: torch.float32, Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}
_SIZES = {Tensor.element_size, Tensor.itemsize.__get__}  # type: ignore[attr-defined]  # a descriptor


class ClaimedDtype(KeptWide):
    """Lets tensors in float64 claim that they are in another dtype, and computes in float64 all the same.

    A model that branches on a dtype, or looks up a number by it, takes the branch of the claimed dtype, without its
    rounding errors.

    Args:
        dtype: the dtype that is claimed.
        widen: whether what the code makes in, or converts to, the claimed dtype is in float64. Code that asks for
            float32 may mean the dtype of its activations, or float32 in every case, as for angles of positions.
    """

    def __init__(self, dtype: torch.dtype, *, widen: bool) -> None:
        super().__init__()
        self._dtype, self._widen = dtype, widen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if function in _SIZES:
                return self._claimed(first).itemsize
            if function is Tensor.type and len(args) == 1 and not kwargs:
                return torch.empty(0, dtype=self._claimed(first)).type()
        to_float32 = function in CONVERSIONS and asks_for_float32(function, args, kwargs)
        if self._widen:
            if _METHODS.get(function) == self._dtype:
                function = Tensor.double
            args, kwargs = pytree.tree_map_only(torch.dtype, self._widened, (args, kwargs))
        result = super().__torch_function__(function, types, args, kwargs)
        if result is torch.float64:  # an attribute, or the dtype of the result of an operation
            return self._claimed(first)
        if to_float32 and result is not first and result.dtype == torch.float64:
            result.claimed_dtype = torch.float32
        return result

    def _claimed(self, x: Any) -> torch.dtype:
        """Return the dtype that a tensor claims: float32 if it was converted to that from a narrower one."""
        return getattr(x, "claimed_dtype", self._dtype)

    def _widened(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype == self._dtype else dtype
