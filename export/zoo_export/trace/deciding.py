"""Decisions on sizes, examined at all declared sizes.

A condition may turn at a single combination of sizes, far from its constants: ``past * length == 437`` is true for 19
and 23 alone. So the declared sizes are cut into boxes. A box in which the condition has one value, by the ranges of its
expressions, is done; the others are cut further, down to single sizes. This proves or disproves most conditions after
a few cuts. Remainders depend on the remainders of the sizes, so that for conditions with ``%`` the first boxes contain
the sizes with the same remainders. A condition for which there would be too many boxes is not settled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import sympy
import torch
from numpy.typing import NDArray
from torch.utils._sympy.functions import FloorDiv, Mod, ModularIndexing, PythonMod
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from zoo.contract import Dim, Graph, Size, dim_names, dim_size
from zoo_export.trace.ranges import Boxes, Range, Truth, dim_range, range_of

__all__ = ["Decision", "value_at"]

_LARGEST = 2**40
"""Largest size that is examined of a dimension without a declared maximum."""
_AT_ONCE = 4096
"""Boxes that are examined at a time, those cut last first."""
_FEW = 2048
"""Boxes before sizes are sorted by their remainders."""
_MOST = 200_000
"""Boxes after which a decision is not settled."""
_POINTS = 20_000
"""Single combinations of sizes that are evaluated one by one, where ranges do not decide."""
_CLASSES = 16_384
"""Classes of remainders at most."""
_GROUPS = 4096
"""Groups of small sizes at most."""
_SINGLE = 64
"""Small sizes of a name at most, of which each is a group."""


class _UndefinedError(NotImplementedError):
    """A division by 0. Its base class is the one that torch's interpreter raises again without logging it."""


class _Exact(PythonReferenceAnalysis):
    """Python's numbers. torch's own ``trunc_to_int`` returns those of sympy, which other functions refuse."""

    @staticmethod
    def trunc_to_int(number: float, _: torch.dtype) -> int:
        return math.trunc(number)

    @staticmethod
    def floordiv(first: int, second: int) -> int:
        if second == 0:
            raise _UndefinedError
        return first // second

    @staticmethod
    def mod(first: int, second: int) -> int:
        if second == 0:
            raise _UndefinedError
        return first % second

    python_mod = mod

    @staticmethod
    def truediv(first: float, second: float) -> float:
        if second == 0:
            raise _UndefinedError
        return first / second

    int_truediv = truediv

    @staticmethod
    def modular_indexing(number: int, divisor: int, modulus: int) -> int:
        return _Exact.mod(_Exact.floordiv(number, divisor), modulus)


def value_at(expression: sympy.Basic, dims: Mapping[sympy.Symbol, Dim], sizes: Mapping[str, int]) -> Any:
    """Return the value of an expression at given sizes; None where it is undefined or unknown."""
    values = {symbol: dim_size(dims[symbol], sizes) for symbol in expression.free_symbols}
    with suppress(_UndefinedError, KeyError):
        return sympy_interp(_Exact, values, expression)
    return None


@dataclass(frozen=True)
class Decision:
    """A condition on sizes with the outcome that a trace assumes.

    Args:
        condition: the condition, or a number.
        outcome: its value in the trace.
        dims: the declared dimension of each symbol of the condition.
        graph: the declared graph.
        allowed: the sizes that each named dimension may have.
    """

    condition: sympy.Basic
    outcome: float
    dims: Mapping[sympy.Symbol, Dim]
    graph: Graph
    allowed: Mapping[str, Size]

    @cached_property
    def names(self) -> list[str]:
        """The names of the dimensions that the condition depends on."""
        used = {name for dim in self._used for name in dim_names(dim)}
        return [name for name in self.graph.dim_names() if name in used]

    def turns(self, smallest: int) -> tuple[Mapping[str, int] | None, bool]:
        """Return sizes at which the value is not the outcome, or None, and whether the decision is settled.

        The dimensions of inputs are at least ``smallest``.
        """
        if not self.names:
            return ({}, True) if self.differs({}) else (None, True)
        results = self._search([[*parts] for parts in itertools.product(*map(self._limits, self.names))], smallest)
        found = next((sizes for sizes, _ in results if sizes is not None), None)
        return found, found is not None or all(settled for _, settled in results)

    def turns_at_small_sizes(self) -> Iterator[Mapping[str, int]]:
        """Yield the sizes of dimensions below 2 at which the value may not be the outcome, by name."""
        sizes, settled = self.turns(0)
        if settled and sizes is None:
            return
        groups = [[*group] for group in itertools.islice(itertools.product(*map(self._groups, self.names)), _GROUPS)]
        seen: list[Mapping[str, int]] = []
        for group, (found, settled) in zip(groups, self._search(groups, 0), strict=True):
            if found is None and settled:
                continue
            sizes = found or {name: low for name, (low, _) in zip(self.names, group, strict=True)}
            small = {name for dim in self._used if dim_size(dim, sizes) < 2 for name in dim_names(dim)}
            chosen = {name: sizes[name] for name in sorted(small)}
            if chosen and chosen not in seen:
                seen.append(chosen)
                yield chosen

    @cached_property
    def _used(self) -> list[Dim]:
        return [self.dims[symbol] for symbol in sorted(self.condition.free_symbols, key=str)]

    def _limits(self, name: str) -> list[tuple[int, int]]:
        """Return the smallest and the largest size that a name may have, and those of an empty past apart."""
        size = self.allowed[name]
        step = size.multiple_of
        low, high = -(-size.min // step) * step, (_LARGEST if size.max is None else size.max) // step * step
        if name != self.graph.past_length:
            return [(low, high)]
        return [(0, high)] if low == step else [(0, 0), (low, high)]

    def _groups(self, name: str) -> list[tuple[int, int]]:
        """Return the limits of groups of the sizes of a name: each at which a dimension is small, and the others."""
        step = self.allowed[name].multiple_of
        own = [dim for dim in self._used if dim_names(dim) == (name,)]
        groups: list[tuple[int, int]] = []
        for low, high in self._limits(name):
            first = low
            while first <= min(high, low + _SINGLE * step) and (
                first < 2 or any(dim_size(dim, {name: first}) < 2 for dim in own)
            ):
                groups.append((first, first))
                first += step
            groups += [(first, high)] if first <= high else []
        return groups

    def _search(
        self, groups: Sequence[Sequence[tuple[int, int]]], smallest: int
    ) -> list[tuple[Mapping[str, int] | None, bool]]:
        """Return sizes at which the value is not the outcome in each group, and whether there is no doubt."""
        limits = np.array(groups, np.int64).reshape(len(groups), len(self.names), 2)
        stride = np.array([self.allowed[name].multiple_of for name in self.names], np.int64)
        boxes = Boxes(
            limits[..., 0], np.broadcast_to(stride, limits.shape[:2]), (limits[..., 1] - limits[..., 0]) // stride
        )
        search = _Search(self, smallest, boxes)
        with np.errstate(all="ignore"):  # infinite limits
            search.run(_FEW)
            if len(search.boxes) and (factors := self._factors()) is not None:
                search.begin(factors)
            elif len(search.boxes) and (period := self._period()) > 1:
                search.begin([np.arange(period)] * len(self.names), period)
            search.run(_MOST)
        open_groups = {int(group) for group in search.groups} | search.doubtful
        return [(search.found.get(number), number not in open_groups) for number in range(len(groups))]

    def _period(self) -> int:
        """Return a number of which multiples change no remainder if they are added to sizes; 1 without remainders."""
        period = 1
        for item in self.condition.atoms(Mod, PythonMod, ModularIndexing, FloorDiv, sympy.Mod):
            numbers = [int(number) for number in item.args[1:] if number.is_Integer]
            period = math.lcm(period, abs(math.prod(numbers)) or 1)
        return period if period ** len(self.names) <= _CLASSES else 1

    def _factors(self) -> list[NDArray[np.int64]] | None:
        """Return the sizes that are divisors of a number, if a product of sizes must equal it where the value turns."""
        if not isinstance(self.condition, sympy.Eq if self.outcome == 0 else sympy.Ne):
            return None
        difference = self.condition.lhs - self.condition.rhs
        number, product = difference.as_independent(*difference.free_symbols, as_Add=True)
        factor, product = product.as_coeff_Mul()
        powers = product.as_powers_dict()
        names = {symbol: self.dims[symbol] for symbol in powers if symbol in self.dims}
        if len(names) < len(powers) or {*names.values()} != {*self.names}:
            return None
        if number == 0 or not (number / factor).is_Integer or not all(power.is_Integer for power in powers.values()):
            return None
        divisors = np.array(sympy.divisors(abs(int(number / factor))), np.int64)
        return [divisors] * len(self.names)

    def differs(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the value at these sizes is not the outcome."""
        return bool(value_at(self.condition, self.dims, sizes) != self.outcome)

    def examine(self, boxes: Boxes, smallest: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return in which boxes the value is everywhere the outcome, or no sizes are declared, and in which nowhere."""
        named = {name: boxes.size(index) for index, name in enumerate(self.names)}
        sizes = {symbol: dim_range(self.dims[symbol], named, boxes) for symbol in self.condition.free_symbols}
        excluded = np.zeros(len(boxes), bool)
        certain = np.ones(len(boxes), bool)
        for value in sizes.values():
            low, high = value.bounds
            excluded |= high < smallest
            certain &= low >= smallest
        if (total := self._total(named)) is not None:
            value, longest = total
            low, high = value.bounds
            excluded |= low > longest
            certain &= high <= longest
        result = range_of(self.condition, sizes, boxes)
        if isinstance(result, Truth):
            wrong, right = (result.false, result.true) if self.outcome else (result.true, result.false)
            return excluded | ~(wrong | boxes.undefined), certain & ~right
        low, high = result.bounds
        same = (low == self.outcome) & (high == self.outcome) & ~boxes.undefined
        return excluded | same, certain & ((low > self.outcome) | (high < self.outcome))

    def declares(self, sizes: Mapping[str, int], smallest: int) -> bool:
        """Return whether sizes within the limits are declared together, and the dimensions large enough."""
        if min((dim_size(dim, sizes) for dim in self._used), default=smallest) < smallest:
            return False
        past, longest = self.graph.past_length, self._longest
        return longest is None or past not in self.names or sizes.get("sequence", 1) + sizes[past] <= longest

    @property
    def _longest(self) -> int | None:
        return self.allowed["sequence"].max if self.graph.past_length else None

    def _total(self, named: Mapping[str, Range]) -> tuple[Range, int] | None:
        """Return the tokens of a past and a sequence with their largest number, if there is one."""
        past = self.graph.past_length
        if past is None or self._longest is None or past not in named:
            return None
        return named[past] + named.get("sequence", 1), self._longest


class _Search:
    """The search for sizes at which a decision turns, in several groups of boxes."""

    def __init__(self, decision: Decision, smallest: int, boxes: Boxes) -> None:
        self.decision = decision
        self.smallest = smallest
        self._all = boxes
        self.boxes = boxes
        self.groups = np.arange(len(boxes))
        """The group of each box that is left."""
        self.found: dict[int, Mapping[str, int]] = {}
        """Sizes at which the decision turns, by group."""
        self.doubtful: set[int] = set()
        """Groups with sizes that were not evaluated."""
        self._points = 0

    def run(self, most: int) -> None:
        """Examine and cut boxes until none is left, or ``most`` were examined."""
        while len(self.boxes) and most > 0:
            first = max(0, len(self.boxes) - min(_AT_ONCE, most))
            boxes, groups = self.boxes[first:], self.groups[first:]
            self.boxes, self.groups = self.boxes[:first], self.groups[:first]
            most -= len(boxes)
            right, wrong = self.decision.examine(boxes, self.smallest)
            for index in np.flatnonzero(wrong & ~right):
                self._find(groups[index], boxes.base[index])
            left = ~right & ~wrong
            single = left & (boxes.width == 0).all(1)
            for index in np.flatnonzero(single):
                self._evaluate(groups[index], boxes.base[index])
            left &= ~single & ~np.isin(groups, [*self.found])
            parts = _halves(boxes[left])
            kept = ~np.isin(self.groups, [*self.found])
            self.boxes = Boxes.joined([self.boxes[kept], *parts])
            self.groups = np.concatenate([self.groups[kept], groups[left], groups[left]])

    def begin(self, first: Sequence[NDArray[np.int64]], period: int | None = None) -> None:
        """Begin again in the groups that are left, with other boxes, unless there are too many.

        Args:
            first: numbers for each size; with a period, of its steps to the smallest size of a box.
            period: the steps from one size of a box to the next; without it, each box is one combination of sizes.
        """
        groups = np.unique(self.groups)
        if len(groups) * math.prod(map(len, first)) > _MOST:
            return
        old = self._all[groups]
        numbers = np.stack(np.meshgrid(*first, indexing="ij"), -1).reshape(-1, len(first))
        base, stride, width = (values[:, None] for values in (old.base, old.stride, old.width))
        if period is None:
            steps, rest = np.divmod(numbers - base, stride)
            kept = ((rest == 0) & (steps >= 0) & (steps <= width)).all(-1)
            base = np.broadcast_to(numbers, kept.shape + numbers.shape[1:])
            width = np.zeros_like(base)
            stride = np.broadcast_to(stride, base.shape)
        else:
            base, width = base + stride * numbers, (width - numbers) // period
            stride = np.broadcast_to(stride * period, base.shape)
            kept = (width >= 0).all(-1)
        self.boxes, self.groups = Boxes(base[kept], stride[kept], width[kept]), np.repeat(groups, kept.sum(1))

    def _sizes(self, numbers: NDArray[np.int64]) -> Mapping[str, int]:
        return {name: int(number) for name, number in zip(self.decision.names, numbers, strict=True)}

    def _find(self, group: int, numbers: NDArray[np.int64]) -> None:
        self.found.setdefault(int(group), self._sizes(numbers))

    def _evaluate(self, group: int, numbers: NDArray[np.int64]) -> None:
        if group in self.found:
            return
        self._points += 1
        if self._points > _POINTS:
            self.doubtful.add(int(group))
            return
        sizes = self._sizes(numbers)
        if self.decision.declares(sizes, self.smallest) and self.decision.differs(sizes):
            self._find(group, numbers)


def _halves(boxes: Boxes) -> list[Boxes]:
    """Cut each box in two, along the size that varies most; the upper halves first.

    A size that varies by more than a factor is cut between its limits' logarithms.
    """
    rows = np.arange(len(boxes))
    low, high = boxes.base.astype(float), boxes.largest.astype(float)
    ratio = (high + 1) / (low + 1)
    ratio[boxes.width == 0] = 0
    chosen = ratio.argmax(1)
    low, high, ratio = low[rows, chosen], high[rows, chosen], ratio[rows, chosen]
    width, stride = boxes.width[rows, chosen], boxes.stride[rows, chosen]
    middle = np.where(ratio > 4, np.sqrt((low + 1) * (high + 1)) - 1, (low + high) / 2)
    cut = np.clip(((middle - low) / stride).astype(np.int64), 0, width - 1)
    lower, upper = boxes.width.copy(), boxes.width.copy()
    lower[rows, chosen], upper[rows, chosen] = cut, width - cut - 1
    base = boxes.base.copy()
    base[rows, chosen] += (cut + 1) * stride
    return [Boxes(base, boxes.stride, upper), Boxes(boxes.base, boxes.stride, lower)]
