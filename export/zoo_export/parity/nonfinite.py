"""Inputs that are NaN or infinite: where graphs differ from their model, and whether the model expects them.

Kernels of runtimes differ from PyTorch's at such numbers: a maximum may ignore NaN, for example. Where a model's own
code asks which numbers are finite, as in ``x.nan_to_num(0)``, its graph must treat them in the same way. For other
models, the evidence says whether it does, and the runtime refuses inputs for which it does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zoo.arrays import Array
from zoo.probe.pipeline import Arrays

__all__ = ["Agreed", "Asking", "NonFinite", "masks", "other_kind", "without"]

Results = Mapping[str, Arrays]
Agreed = Mapping[str, Mapping[str, tuple[Array, Array]]]
"""Masks of each output: where PyTorch agrees on the kind of number, and where it agrees on a finite one."""

_NAMES = (
    "fmax", "fmin", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "nan_to_num", "nan_to_num_", "nanmean",
    "nanmedian", "nanquantile", "nansum",
)  # fmt: skip
_QUESTIONS = {getattr(owner, name) for owner in (torch, Tensor) for name in _NAMES if hasattr(owner, name)}
_COMPARISONS = {
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("eq", "ne", "ge", "gt", "le", "lt", "__eq__", "__ne__", "__ge__", "__gt__", "__le__", "__lt__")
    if hasattr(owner, name)
}
_KINDS = ("finite", "NaN", "infinity", "-infinity")


@dataclass(frozen=True)
class NonFinite:
    """The comparison with inputs that are NaN, or infinite."""

    reason: str | None
    """Why the graphs do not treat them as the model does, as far as is known; None if they do."""
    is_expected: bool = False
    """Whether the model's code asks for them, and the graphs differ where its numbers are finite."""

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for parity.json."""
        return {"equal": self.reason is None, **({} if self.reason is None else {"reason": self.reason})}


class Asking(TorchFunctionMode):
    """Counts the numbers that are not finite where code asks for them, by ``isnan``, ``x != x`` or the like."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point() and _asks(function, args):
            self.count += int((~args[0].isfinite()).sum())
        return function(*args, **(kwargs or {}))


def _asks(function: Any, args: tuple[Any, ...]) -> bool:
    if function in _QUESTIONS:
        return True
    if function not in _COMPARISONS or len(args) < 2:
        return False
    return args[1] is args[0] or (isinstance(args[1], float) and not math.isfinite(args[1]))


def masks(exact: Results, others: Mapping[str, Results]) -> Agreed:
    """Return, for each output, where PyTorch agrees on what is finite, and where it agrees on a finite number.

    Args:
        exact: the outputs of each graph in float64.
        others: the same in the model's own dtype, by level.
    """
    agreement: dict[str, dict[str, tuple[Array, Array]]] = {}
    for graph, outputs in exact.items():
        for name, values in outputs.items():
            kinds = _kinds(values)
            agreed = np.ones(kinds.shape, bool)
            for other in others.values():
                agreed &= _kinds(other[graph][name]) == kinds
            agreement.setdefault(graph, {})[name] = agreed, agreed & (kinds == 0)
    return agreement


def other_kind(exact: Results, found: Results, agreed: Agreed, *, finite: bool) -> str | None:
    """Describe the first output that is not finite where the model's is, or is another kind of number elsewhere.

    Args:
        exact: the outputs of each graph, by the reference.
        found: the same by the graphs.
        agreed: the places that count, from :func:`masks`.
        finite: whether to look where the model's numbers are finite, or elsewhere.
    """
    for graph, outputs in exact.items():
        for name, values in outputs.items():
            if found[graph][name].shape != values.shape:
                continue  # the shape is judged elsewhere
            expected, kinds = _kinds(values), _kinds(found[graph][name])
            wrong = agreed[graph][name][0] & (expected != kinds) & ((expected == 0) == finite)
            if wrong.any():
                place = int(np.flatnonzero(wrong)[0])
                is_now, should_be = (_KINDS[item.flat[place]] for item in (kinds, expected))
                share = f"{np.count_nonzero(wrong)} of {wrong.size} numbers"
                return f"{name} of {graph} is {is_now} where the model's is {should_be}, at {share}"
    return None


def without(results: Results, agreed: Agreed) -> dict[str, Arrays]:
    """Return results with 0 where PyTorch does not agree on a finite number."""
    return {
        graph: {
            name: np.where(mask, values, values.dtype.type(0)) if (mask := agreed[graph][name][1]).shape == values.shape
            else values
            for name, values in outputs.items()
        }
        for graph, outputs in results.items()
    }  # fmt: skip


def _kinds(values: Array) -> Array:
    """Return the places in ``_KINDS`` of numbers."""
    wide = values.astype(np.float64, copy=False)
    kinds: Array = np.select([np.isnan(wide), np.isposinf(wide), np.isneginf(wide)], [1, 2, 3], 0)
    return kinds
