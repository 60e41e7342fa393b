"""Arithmetic of intervals: what operators on integers and booleans can return.

A number is bounded by a linear form in the sizes of free dimensions, such as ``past_sequence + sequence + [0, 15]``.
So it is known that the past is shorter than the past and the new tokens, although both sizes are free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

__all__ = ["ANY", "RULES", "Intervals", "Number"]


@dataclass(frozen=True)
class Number:
    """A number in ``[low, high]`` plus the sum of ``factor * size`` over free sizes."""

    low: float
    high: float
    factors: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, value: float) -> Number:
        """Return a known number."""
        return cls(value, value)

    @property
    def constant(self) -> float | None:
        """The number, if it is known."""
        return self.low if self.low == self.high and not self.factors else None

    def plus(self, other: Number) -> Number:
        """Add a number."""
        names = self.factors.keys() | other.factors.keys()
        sums = {name: self.factors.get(name, 0) + other.factors.get(name, 0) for name in names}
        factors = {name: factor for name, factor in sums.items() if factor}
        return Number(self.low + other.low, self.high + other.high, factors)

    def times(self, factor: float) -> Number:
        """Multiply by a constant."""
        if not factor:
            return Number.of(0)
        low, high = sorted((self.low * factor, self.high * factor))
        return Number(low, high, {name: factor * other for name, other in self.factors.items()})

    def rounded(self) -> Number:
        """Return bounds of the number rounded to an integer in any direction."""
        low, high = _floor(self.low), -_floor(-self.high)
        return self if (low, high) == (self.low, self.high) else Number(low, high, self.factors)


ANY = Number(-math.inf, math.inf)


class Intervals:
    """Operators on numbers.

    Args:
        sizes: the smallest and the largest value of each free size.
    """

    def __init__(self, sizes: Mapping[str, tuple[float, float]]) -> None:
        self.sizes = dict(sizes)

    def ends(self, number: Number) -> tuple[float, float]:
        """Return the smallest and the largest value of a number."""
        low, high = number.low, number.high
        for name, factor in number.factors.items():
            ends = sorted(factor * size for size in self.sizes[name])
            low, high = low + ends[0], high + ends[1]
        return low, high

    def join(self, numbers: Sequence[Number]) -> Number:
        """Return bounds of several numbers."""
        if all(number == numbers[0] for number in numbers):
            return numbers[0]
        lows, highs = zip(*map(self.ends, numbers), strict=True)
        return Number(min(lows), max(highs))

    def named(self, name: str, number: Number) -> Number:
        """Treat a number as a free size of its own, so that it cancels out in differences."""
        if number.factors or number.constant is not None:
            return number
        self.sizes[name] = number.low, number.high
        return Number(0, 0, {name: 1})

    def _difference(self, first: Number, second: Number) -> tuple[float, float]:
        return self.ends(first.plus(second.times(-1)))

    def _multiply(self, first: Number, second: Number) -> Number:
        for number, other in ((first, second), (second, first)):
            if other.constant is not None:
                return number.times(other.constant)
        (low, high), (lower, higher) = self.ends(first), self.ends(second)
        if min(low, lower) < 0:
            return ANY
        return Number(low * lower, high * higher if min(high, higher) else 0)

    def _divide(self, value: Number, divisor: Number) -> Number:
        by, (low, high) = divisor.constant, self.ends(value)
        if by is None or by <= 0:
            return ANY
        if low >= 0 and all(factor % by == 0 for factor in value.factors.values()):
            factors = {name: factor // by for name, factor in value.factors.items()}
            return Number(_floor(value.low / by), _floor(value.high / by), factors)
        return Number(_truncate(low / by), _truncate(high / by))

    def _remainder(self, value: Number, divisor: Number) -> Number:
        by, (low, high) = divisor.constant, self.ends(value)
        if by is None or by <= 0:
            return ANY
        if value.low == value.high and not any(part % by for part in (value.low, *value.factors.values())):
            return Number.of(0)
        return Number(0, min(by, high)) if low >= 0 else Number(-by, by)

    def _absolute(self, value: Number) -> Number:
        low, high = self.ends(value)
        if low >= 0:
            return value
        return value.times(-1) if high <= 0 else Number(0, max(-low, high))

    def _smallest(self, *numbers: Number) -> Number:
        return reduce(self._smaller, numbers)

    def _largest(self, *numbers: Number) -> Number:
        return reduce(self._larger, numbers)

    def _smaller(self, first: Number, second: Number) -> Number:
        low, high = self._difference(first, second)
        if high <= 0 or low >= 0:
            return first if high <= 0 else second
        ends = self.ends(first), self.ends(second)
        return Number(min(low for low, _ in ends), min(high for _, high in ends))

    def _larger(self, first: Number, second: Number) -> Number:
        return self._smaller(first.times(-1), second.times(-1)).times(-1)

    def _clip(self, value: Number, low: Number, high: Number = ANY) -> Number:
        raised = value if low == ANY else self._larger(value, low)
        return raised if high == ANY else self._smaller(raised, high)

    def _less(self, first: Number, second: Number) -> Number:
        low, high = self._difference(first, second)
        return Number(high < 0, low < 0)

    def _less_or_equal(self, first: Number, second: Number) -> Number:
        low, high = self._difference(first, second)
        return Number(high <= 0, low <= 0)

    def _equal(self, first: Number, second: Number) -> Number:
        low, high = self._difference(first, second)
        return Number(low == high == 0, low <= 0 <= high)

    def truth(self, value: Number) -> Number:
        """Return whether a number is not 0."""
        low, high = self.ends(value)
        return Number(low > 0 or high < 0, low < 0 or high > 0)

    def _not(self, value: Number) -> Number:
        low, high = self.ends(value)
        return Number(high <= 0, low <= 0)

    def _and(self, first: Number, second: Number) -> Number:
        (low, high), (lower, higher) = self.ends(first), self.ends(second)
        return Number(min(low, lower) > 0, min(high, higher) > 0)

    def _or(self, first: Number, second: Number) -> Number:
        (low, high), (lower, higher) = self.ends(first), self.ends(second)
        return Number(max(low, lower) > 0, max(high, higher) > 0)

    def _where(self, chosen: Number, first: Number, second: Number) -> Number:
        low, high = self.ends(chosen)
        if low > 0 or high <= 0:
            return first if low > 0 else second
        return self.join([first, second])

    def _range(self, start: Number, limit: Number, step: Number) -> Number:
        first, last = self.ends(start)[0], self.ends(limit)[1] - 1
        return Number(first, max(first, last)) if step.constant == 1 else ANY

    def _running_sum(self, value: Number, axis: Number) -> Number:
        return Number(0, math.inf) if self.ends(value)[0] >= 0 else ANY


def _floor(number: float) -> float:
    return number if math.isinf(number) else math.floor(number)


def _truncate(number: float) -> float:
    return number if math.isinf(number) else math.trunc(number)


RULES: Mapping[str, Callable[..., Number]] = {
    "Abs": Intervals._absolute,
    "Add": lambda self, first, second: first.plus(second),
    "And": Intervals._and,
    "Cast": lambda self, value: value,
    "Clip": Intervals._clip,
    "CumSum": Intervals._running_sum,
    "Div": Intervals._divide,
    "Equal": Intervals._equal,
    "Greater": lambda self, first, second: self._less(second, first),
    "GreaterOrEqual": lambda self, first, second: self._less_or_equal(second, first),
    "Identity": lambda self, value: value,
    "Less": Intervals._less,
    "LessOrEqual": Intervals._less_or_equal,
    "Max": Intervals._largest,
    "Min": Intervals._smallest,
    "Mod": Intervals._remainder,
    "Mul": Intervals._multiply,
    "Neg": lambda self, value: value.times(-1),
    "Not": Intervals._not,
    "Or": Intervals._or,
    "Range": Intervals._range,
    "Sub": lambda self, first, second: first.plus(second.times(-1)),
    "Where": Intervals._where,
}
"""The bounds of each operator's output, as a function of those of its inputs."""
