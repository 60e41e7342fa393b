"""Evaluation in float64 of the code that a model runs in another dtype."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from zoo.probe.widened import KeptWide

__all__ = ["Asked", "AskedDtypes", "ClaimedDtype"]

Asked = tuple[Any, bool]
"""A function that was given a dtype, and whether that was float64."""
_ITEM_SIZE = Tensor.itemsize.__get__  # type: ignore[attr-defined]  # descriptors
_BYTES = Tensor.nbytes.__get__  # type: ignore[attr-defined]


class AskedDtypes(KeptWide):
    """Records each call of a model in float64 that is given a dtype: its own or another one.

    Args:
        asked: the list to which the calls are added.
    """

    def __init__(self, asked: list[Asked]) -> None:
        super().__init__()
        self._asked = asked

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if dtypes := _dtypes(args, kwargs or {}):
            self._asked.append((function, torch.float64 in dtypes))
        return super().__torch_function__(function, types, args, kwargs)


class ClaimedDtype(KeptWide):
    """Lets tensors in float64 claim that they are in another dtype, and computes in float64 all the same.

    A model that branches on a dtype, or looks up a number by it, takes the branch of the claimed dtype, without its
    rounding errors. What is converted from the claimed dtype claims the new one.

    Args:
        dtype: the dtype that is claimed.
        asked: the calls that the model makes as it is. Where it asks for float64, which is its dtype, the dtype of the
            same call here is that of its tensors; where it asks for float32 in every dtype, as for angles of positions,
            the call stays as it is. Only code that claims float32 needs this.
    """

    def __init__(self, dtype: torch.dtype, asked: Iterator[Asked]) -> None:
        super().__init__()
        self._dtype, self._asked = dtype, asked

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if function in (Tensor.element_size, _ITEM_SIZE):
                return self._claim(first).itemsize
            if function == _BYTES:
                return first.numel() * self._claim(first).itemsize
            if function is Tensor.type and len(args) == 1 and not kwargs:
                return torch.empty(0, dtype=self._claim(first)).type()
        given = _dtypes(args, kwargs)
        is_single = self._dtype == torch.float32
        asks_own = given and (next(self._asked, None) == (function, True) or not is_single)
        if asks_own and not (is_single and function is torch.promote_types):  # a dtype, compared with claimed ones
            args, kwargs = map(self._widened, args), {name: self._widened(item) for name, item in kwargs.items()}
            args = tuple(args)
        result = super().__torch_function__(function, types, args, kwargs)
        if isinstance(result, torch.dtype) and isinstance(first, Tensor):  # an attribute, or that of a result
            names = {torch.float64: self._promoted(args), torch.complex128: torch.complex64}
            return names.get(result, result)
        asked = next(iter(given), {Tensor.float: torch.float32, Tensor.double: torch.float64}.get(function))
        return self._claiming(result, args, kwargs, asked)

    def _claiming(self, result: Any, args: Any, kwargs: Any, asked: torch.dtype | None) -> Any:
        """Return a result whose tensors claim the dtype that they would have."""
        if isinstance(result, tuple | list):
            return (
                type(result)(self._claiming(item, args, kwargs, asked) for item in result)
                if _is_plain(result)
                else result
            )
        if not isinstance(result, Tensor) or result.dtype != torch.float64:
            return result
        dtype = asked or self._promoted((*args, *kwargs.values()))
        if dtype == self._claim(result):
            return result
        if any(result is item for item in args):  # a conversion that changes nothing
            result = result.view_as(result)
        result.claimed_dtype = dtype
        return result

    def _promoted(self, args: Any) -> torch.dtype:
        """Return the dtype of a result of tensors, by what they claim."""
        tensors = [item for item in _flat(args) if isinstance(item, Tensor) and item.is_floating_point()]
        dtypes = {self._claim(item) for item in [item for item in tensors if item.ndim] or tensors}
        return reduce(torch.promote_types, dtypes) if dtypes else self._dtype

    def _claim(self, x: Tensor) -> torch.dtype:
        return x.dtype if x.dtype != torch.float64 else getattr(x, "claimed_dtype", self._dtype)

    def _widened(self, item: Any) -> Any:
        return torch.float64 if item is self._dtype else item


def _dtypes(args: Any, kwargs: dict[str, Any]) -> list[torch.dtype]:
    """Return the floating-point dtypes among the arguments of a call."""
    given = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.dtype)]
    return [item for item in given if item.is_floating_point]


def _flat(args: Any) -> Iterator[Any]:
    for item in args:
        yield from item if isinstance(item, tuple | list) else (item,)


def _is_plain(result: Any) -> bool:
    return type(result) in (tuple, list)
