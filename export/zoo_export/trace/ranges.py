"""Ranges of symbolic expressions over many boxes of sizes at once.

A box contains the points ``base + stride * t`` with a whole number ``0 <= t <= width`` for each size. An integer
expression is enclosed by a polynomial in these ``t``, whose coefficients are exact, and the limits of what is added to
it (a Taylor model: Makino and Berz 2003). So ``length // 2 * 2 <= length`` is decided without a look at each length,
where the two sides as mere intervals would overlap. Numbers of floating point are enclosed by intervals, rounded
outwards.

n boxes, k sizes.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import sympy
from numpy.typing import NDArray
from torch.utils._sympy.interp import sympy_interp

from zoo.contract import Dim

__all__ = ["Boxes", "Range", "Truth", "dim_range", "range_of"]

_Floats: TypeAlias = NDArray[np.float64]
_Ints: TypeAlias = NDArray[np.int64]
_Bools: TypeAlias = NDArray[np.bool_]
_Terms: TypeAlias = dict[tuple[int, ...], _Ints]

_OVERFLOW = 2.0**61
"""Magnitude from which coefficients become intervals."""
_EXACT = 2.0**53
"""Magnitude below which float64 represents every integer."""
_POWER = 16
"""Largest exponent of a polynomial."""


@dataclass(frozen=True)
class Boxes:
    """Boxes of sizes, arrays of shape (n, k)."""

    base: _Ints
    stride: _Ints
    width: _Ints

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, chosen: Any) -> Boxes:
        return Boxes(self.base[chosen], self.stride[chosen], self.width[chosen])

    @staticmethod
    def joined(parts: Sequence[Boxes]) -> Boxes:
        """Return the boxes of several in one."""
        base, stride, width = ([getattr(part, name) for part in parts] for name in ("base", "stride", "width"))
        return Boxes(np.concatenate(base), np.concatenate(stride), np.concatenate(width))

    @cached_property
    def largest(self) -> _Ints:
        """The largest sizes, (n, k)."""
        return self.base + self.stride * self.width

    def size(self, index: int) -> Range:
        """Return a size in each box."""
        unit = tuple(int(number == index) for number in range(self.base.shape[1]))
        terms = {(0,) * len(unit): self.base[:, index], unit: self.stride[:, index]}
        return Range(self, terms, self.zeros, self.zeros)

    @cached_property
    def zeros(self) -> _Floats:
        return np.zeros(len(self))

    @cached_property
    def undefined(self) -> _Bools:
        """Where a divisor may be 0. Divisions set it."""
        return np.zeros(len(self), bool)

    def whole(self, number: int) -> Range:
        """Return an integer as a range."""
        if abs(number) >= _OVERFLOW:
            return self.interval(np.full(len(self), float(number)), np.full(len(self), float(number)), whole=True)
        terms = {(0,) * self.base.shape[1]: np.full(len(self), number, np.int64)}
        return Range(self, terms, self.zeros, self.zeros, constant=number)

    def interval(self, low: _Floats, high: _Floats, *, whole: bool) -> Range:
        """Return the range between two limits, those of integers if ``whole``."""
        low = np.where(np.isnan(low), -np.inf, low)
        high = np.where(np.isnan(high), np.inf, high)
        return Range(self, {}, *_outward(low, high, whole), whole=whole)

    def unknown(self, *, whole: bool = False) -> Range:
        """Return the range of all numbers."""
        infinite = np.full(len(self), np.inf)
        return Range(self, {}, -infinite, infinite, whole=whole)

    def most(self, exponents: tuple[int, ...]) -> _Floats:
        """Return the largest value of a product of powers of the ``t``."""
        factors = [self.width[:, index].astype(float) ** power for index, power in enumerate(exponents) if power]
        return _up(math.prod(factors)) if any(exponents) else np.ones(len(self))


@dataclass(frozen=True)
class Range:
    """The values of a number in each box: ``(polynomial + [low, high]) / divisor``."""

    boxes: Boxes
    terms: _Terms
    """Coefficients, (n), by the exponents of the ``t``; none for numbers of floating point."""
    low: _Floats
    high: _Floats
    divisor: int = 1
    whole: bool = True
    """Whether it is an integer everywhere."""
    constant: int | None = None
    """Its value, if it is a literal."""
    choices: tuple[Callable[[Iterable[Truth]], Truth], Callable[[Iterable[Truth]], Truth], Sequence[Range]] | None = (
        None
    )
    """For a maximum or a minimum: two functions and its parts; None for other numbers.

    The functions join the outcomes of ``part >= x``, and of ``part <= x``, for all parts into that of the whole.
    """

    @cached_property
    def bounds(self) -> tuple[_Floats, _Floats]:
        """The limits of the value."""
        low, high = self.low, self.high
        for exponents, numbers in self.terms.items():
            part = numbers * self.boxes.most(exponents)
            if any(exponents):
                low, high = _outward(low + np.minimum(part, 0), high + np.maximum(part, 0), self.whole)
            else:
                low, high = _outward(low + part, high + part, self.whole)
        if self.divisor == 1:
            return low, high
        return _outward(low / self.divisor, high / self.divisor, self.whole)

    @property
    def is_point(self) -> _Bools:
        low, high = self.bounds
        return (low == high) & (abs(low) < _EXACT)

    @property
    def is_polynomial(self) -> _Bools:
        return (self.low == 0) & (self.high == 0)

    def settled(self) -> Range:
        """Return the same range, without a polynomial where it is one integer."""
        point, low = self.is_point, self.bounds[0]
        value = np.where(point, low * self.divisor, 0.0)
        point &= abs(value) < _EXACT
        terms = {exponents: np.where(point, 0, numbers) for exponents, numbers in self.terms.items()}
        zero = (0,) * self.boxes.base.shape[1]
        terms[zero] = terms.get(zero, 0) + np.where(point, value, 0).astype(np.int64)
        return Range(
            self.boxes, terms, np.where(point, 0, self.low), np.where(point, 0, self.high), self.divisor, self.whole
        )

    def __add__(self, other: Range | int) -> Range:
        other = self._with(other)
        if not (self.whole and other.whole):
            (low, high), (other_low, other_high) = self.bounds, other.bounds
            return self.boxes.interval(low + other_low, high + other_high, whole=False)
        divisor = math.lcm(self.divisor, other.divisor)
        if divisor > _OVERFLOW:
            return self.boxes.unknown(whole=True)
        first, second = self._times(divisor // self.divisor), other._times(divisor // other.divisor)
        terms = dict(first.terms)
        for exponents, numbers in second.terms.items():
            terms[exponents] = terms[exponents] + numbers if exponents in terms else numbers
        low, high = _outward(first.low + second.low, first.high + second.high, True)
        return Range(self.boxes, terms, low, high, divisor)._bounded()

    def __mul__(self, other: Range | int) -> Range:
        other = self._with(other)
        if not (self.whole and other.whole):
            return self.boxes.interval(*_product(self.bounds, other.bounds), whole=False)
        if other.constant is not None:
            return self._times(other.constant)
        if self.constant is not None:
            return other._times(self.constant)
        divisor = self.divisor * other.divisor
        highest = [max((key[i] for key in (*self.terms, *other.terms)), default=0) for i in self._sizes]
        if divisor > _OVERFLOW or max(highest, default=0) * 2 > _POWER:
            return self.boxes.interval(*_product(self.bounds, other.bounds), whole=True)
        first, second = self._fitting(other), other._fitting(self)
        terms: _Terms = {}
        for (left, numbers), (right, others) in itertools.product(first.terms.items(), second.terms.items()):
            exponents = tuple(a + b for a, b in zip(left, right, strict=True))
            part = numbers * others
            terms[exponents] = terms[exponents] + part if exponents in terms else part
        low, high = first.boxes.zeros, first.boxes.zeros
        for left_limits, right_limits in (
            (first._polynomial, (second.low, second.high)),
            (second._polynomial, (first.low, first.high)),
            ((first.low, first.high), (second.low, second.high)),
        ):
            least, most = _product(left_limits, right_limits)
            low, high = _outward(low + least, high + most, True)
        low, high = np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)
        return Range(self.boxes, terms, low, high, divisor)._bounded()

    def __sub__(self, other: Range | int) -> Range:
        return self + self._with(other) * -1

    __radd__ = __add__
    __rmul__ = __mul__

    def __floordiv__(self, other: Range | int) -> Range:
        other = self._with(other)
        divisor = other.constant
        other._divides()
        if not (self.whole and other.whole) or (divisor is not None and divisor <= 0):
            return self.boxes.unknown(whole=True)
        if divisor is None or self.divisor * divisor > _OVERFLOW:
            (low, high), (least, most) = self.bounds, other.bounds
            positive = least > 0
            least, most = np.where(positive, least, 1), np.where(positive, most, 1)
            below = np.minimum(_floor_of(low, least), _floor_of(low, most))
            above = np.maximum(_floor_of(high, least, up=True), _floor_of(high, most, up=True))
            quotient = np.where(positive, below, -np.inf), np.where(positive, above, np.inf)
            return Range(self.boxes, {}, *quotient).settled()
        known, rest = self._remainder(divisor)
        least, most = np.where(known, rest, 0), np.where(known, rest, divisor - 1)
        low, high = _outward(self.low - most * self.divisor, self.high - least * self.divisor, True)
        return Range(self.boxes, self.terms, low, high, self.divisor * divisor).settled()

    def __mod__(self, other: Range | int) -> Range:
        other = self._with(other)
        if not (self.whole and other.whole):
            other._divides()
            return self.boxes.unknown()
        quotient = self // other
        divisor, most = other.constant, other.bounds[1]
        known = self.boxes.zeros.astype(bool)
        rest: Any = 0
        if divisor is not None and divisor > 0:
            known, rest = self._remainder(divisor)
        positive = other.bounds[0] > 0
        low, high = np.where(positive, 0, -np.inf), np.where(positive, most - 1, np.inf)
        low, high = np.where(known, rest, low), np.where(known, rest, high)
        limits = Range(self.boxes, {}, low, high).settled()
        return _chosen(quotient.is_point & ~known, self - other * quotient, limits).settled()

    def power(self, exponent: int) -> Range:
        """Return a power with a natural exponent."""
        result = self.boxes.whole(1)
        for _ in range(exponent):
            result = result * self
        return result

    def monotone(self, function: Callable[[_Floats], _Floats], *, whole: bool) -> Range:
        """Return the values of a function that never falls."""
        low, high = self.bounds
        return self.boxes.interval(function(low), function(high), whole=whole)

    def at_most(self, other: Range, *, strict: bool = False) -> Truth:
        """Return where this is ``<=``, or ``<``, than another."""
        if self.choices is not None:
            _, combine, parts = self.choices
            return combine(part.at_most(other, strict=strict) for part in parts)
        if other.choices is not None:
            combine, _, parts = other.choices
            return combine(self.at_most(part, strict=strict) for part in parts)
        if self.whole and other.whole:
            low, high = (self - other).bounds
            return Truth(low < 0, high >= 0) if strict else Truth(low <= 0, high > 0)
        (low, high), (least, most) = self.bounds, other.bounds
        return Truth(low < most, high >= least) if strict else Truth(low <= most, high > least)

    def equals(self, other: Range) -> Truth:
        """Return where this equals another."""
        if not (self.whole and other.whole):
            (low, high), (least, most) = self.bounds, other.bounds
            return Truth((low <= most) & (high >= least), ~((low == high) & (least == most) & (low == least)))
        difference = self - other
        low, high = difference.bounds
        step, rest = self.boxes.zeros.astype(np.int64), self.boxes.zeros.astype(np.int64)
        for exponents, numbers in difference.terms.items():
            if any(exponents):
                step = np.gcd(step, numbers)
            else:
                rest = rest + numbers
        apart = difference.is_polynomial & (step > 0) & (rest % np.maximum(step, 1) != 0)
        return Truth((low <= 0) & (high >= 0) & ~apart, ~((low == 0) & (high == 0)))

    @property
    def _sizes(self) -> range:
        return range(self.boxes.base.shape[1])

    @property
    def _polynomial(self) -> tuple[_Floats, _Floats]:
        """The limits of the polynomial alone."""
        return Range(self.boxes, self.terms, self.boxes.zeros, self.boxes.zeros).bounds

    def _divides(self) -> None:
        """Note where this may be 0, as it is a divisor."""
        low, high = self.bounds
        self.boxes.undefined[(low <= 0) & (high >= 0)] = True

    def _with(self, other: Range | int) -> Range:
        return self.boxes.whole(other) if isinstance(other, int) else other

    def _remainder(self, divisor: int) -> tuple[_Bools, _Ints]:
        """Return where the remainder of a division is the same in all of a box, and what it is there."""
        known = self.is_polynomial if self.divisor == 1 else np.zeros(len(self.boxes), bool)
        rest = np.zeros(len(self.boxes), np.int64)
        for exponents, numbers in self.terms.items():
            if any(exponents):
                known = known & (numbers % divisor == 0)
            else:
                rest = rest + numbers
        return known, rest % divisor

    def _times(self, factor: int) -> Range:
        if factor == 1:
            return self
        if abs(factor) > _OVERFLOW:
            both = np.full(len(self.boxes), float(factor))
            return self.boxes.interval(*_product(self.bounds, (both, both)), whole=self.whole)
        fitting = self._collapsed(self._magnitude() * abs(factor) > _OVERFLOW)
        terms = {exponents: numbers * factor for exponents, numbers in fitting.terms.items()}
        both = np.full(len(self.boxes), float(factor))
        low, high = _outward(*_product((fitting.low, fitting.high), (both, both)), True)
        constant = None if self.constant is None else self.constant * factor
        return Range(self.boxes, terms, low, high, self.divisor, constant=constant)

    def _magnitude(self) -> _Floats:
        """Return the sum of the absolute values of the coefficients."""
        total: _Floats = sum((abs(numbers.astype(float)) for numbers in self.terms.values()), self.boxes.zeros)
        return total

    def _fitting(self, other: Range) -> Range:
        """Return this without a polynomial where its product with another overflows."""
        return self._collapsed(self._magnitude() * other._magnitude() > _OVERFLOW)

    def _bounded(self) -> Range:
        return self._collapsed(self._magnitude() > _OVERFLOW)

    def _collapsed(self, where: _Bools) -> Range:
        """Return this as an interval in some boxes."""
        if not where.any():
            return self
        low, high = Range(self.boxes, self.terms, self.low, self.high).bounds
        terms = {exponents: np.where(where, 0, numbers) for exponents, numbers in self.terms.items()}
        low, high = np.where(where, low, self.low), np.where(where, high, self.high)
        return Range(self.boxes, terms, low, high, self.divisor)


@dataclass(frozen=True)
class Truth:
    """Whether a condition is somewhere true, and somewhere false, in each box. Both may be said of too many."""

    true: _Bools
    false: _Bools

    def __and__(self, other: Truth) -> Truth:
        return Truth(self.true & other.true, self.false | other.false)

    def __or__(self, other: Truth) -> Truth:
        return ~(~self & ~other)

    def __invert__(self) -> Truth:
        return Truth(self.false, self.true)

    def equals(self, other: Truth) -> Truth:
        """Return where both are true or both are false."""
        return (self & other) | (~self & ~other)


def range_of(expression: sympy.Basic, sizes: Mapping[sympy.Symbol, Range], boxes: Boxes) -> Range | Truth:
    """Return the range of an expression of torch, given those of its symbols; of any value if a function is unknown."""
    try:
        value: Range | Truth = sympy_interp(_Analysis(boxes), dict(sizes), expression)
    except KeyError:  # a function that torch's interpreter does not know
        return boxes.unknown()
    return value


def dim_range(dim: Dim, sizes: Mapping[str, Range], boxes: Boxes) -> Range:
    """Return the range of a declared dimension, given those of the named ones."""
    if isinstance(dim, int):
        return boxes.whole(dim)
    return sizes[dim] if dim in sizes else _node_range(ast.parse(dim.strip(), mode="eval").body, sizes, boxes)


def _node_range(node: ast.AST, sizes: Mapping[str, Range], boxes: Boxes) -> Range:
    match node:
        case ast.Name(id=name):
            return sizes[name]
        case ast.Constant(value=int(number)):
            return boxes.whole(number)
        case ast.BinOp(left=left, op=operator, right=right):
            first, second = _node_range(left, sizes, boxes), _node_range(right, sizes, boxes)
            if isinstance(operator, ast.FloorDiv):
                return first // second
            return first + second if isinstance(operator, ast.Add) else first - second
        case ast.Call(args=[left, right]):
            return _minimum(_node_range(left, sizes, boxes), _node_range(right, sizes, boxes))
    raise AssertionError(f"no dimension: {ast.dump(node)}")


class _Analysis:
    """The operations of torch's symbolic expressions on ranges. Those that are missing return any number."""

    def __init__(self, boxes: Boxes) -> None:
        self._boxes = boxes

    def __getattr__(self, name: str) -> Callable[..., Range]:
        if name == "sym_sum" or name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: self._boxes.unknown(whole=name.endswith("_to_int"))

    def constant(self, value: Any, dtype: Any) -> Range | Truth:
        if dtype.is_floating_point:
            numbers = np.full(len(self._boxes), float(value))
            return Range(self._boxes, {}, numbers, numbers, whole=False)
        if value in (sympy.true, sympy.false):
            truth = np.full(len(self._boxes), bool(value))
            return Truth(truth, ~truth)
        return self._boxes.whole(int(value))

    def and_(self, first: Range | Truth, second: Range | Truth) -> Truth:
        return self._truth(first) & self._truth(second)

    def or_(self, first: Range | Truth, second: Range | Truth) -> Truth:
        return self._truth(first) | self._truth(second)

    def not_(self, value: Range | Truth) -> Truth:
        return ~self._truth(value)

    def eq(self, first: Range | Truth, second: Range | Truth) -> Truth:
        if isinstance(first, Range) and isinstance(second, Range):
            return first.equals(second)
        return self._truth(first).equals(self._truth(second))

    def ne(self, first: Range | Truth, second: Range | Truth) -> Truth:
        return ~self.eq(first, second)

    def lt(self, first: Range, second: Range) -> Truth:
        return first.at_most(second, strict=True)

    def gt(self, first: Range, second: Range) -> Truth:
        return second.at_most(first, strict=True)

    def le(self, first: Range, second: Range) -> Truth:
        return first.at_most(second)

    def ge(self, first: Range, second: Range) -> Truth:
        return second.at_most(first)

    def add(self, first: Range, second: Range) -> Range:
        return first + second

    def mul(self, first: Range, second: Range) -> Range:
        return first * second

    def floordiv(self, first: Range, second: Range) -> Range:
        return first // second

    def mod(self, first: Range, second: Range) -> Range:
        return first % second

    python_mod = mod

    def modular_indexing(self, value: Range, divisor: Range, modulus: Range) -> Range:
        return value // divisor % modulus

    def minimum(self, first: Range, second: Range) -> Range:
        return _minimum(first, second)

    def maximum(self, first: Range, second: Range) -> Range:
        return _maximum(first, second)

    def abs(self, value: Range) -> Range:
        return _maximum(value, value * -1)

    def identity(self, value: Range) -> Range:
        return value

    def where(self, condition: Truth, first: Range | Truth, second: Range | Truth) -> Range | Truth:
        condition = self._truth(condition)
        if isinstance(first, Truth) or isinstance(second, Truth):
            return (condition & self._truth(first)) | (~condition & self._truth(second))
        (low, high), (least, most) = first.bounds, second.bounds
        low = np.minimum(np.where(condition.true, low, np.inf), np.where(condition.false, least, np.inf))
        high = np.maximum(np.where(condition.true, high, -np.inf), np.where(condition.false, most, -np.inf))
        return self._boxes.interval(low, high, whole=first.whole and second.whole)

    def pow_by_natural(self, value: Range, exponent: Range) -> Range:
        power = exponent.constant
        if power is None or not 0 <= power <= _POWER or not value.whole:
            return self._boxes.unknown()
        return value.power(power)

    def pow(self, value: Range, exponent: Range) -> Range:
        (low, high), (least, most) = value.bounds, exponent.bounds
        if not ((low >= 0).all() and (least > 0).all() and (least == most).all()):
            return self._boxes.unknown()
        near = 1e-15  # powers are not rounded correctly
        return self._boxes.interval(low**least * (1 - near), high**most * (1 + near), whole=False)

    def sqrt(self, value: Range) -> Range:
        return self._boxes.unknown() if (value.bounds[0] < 0).any() else value.monotone(np.sqrt, whole=False)

    def to_dtype(self, value: Range, _: Any) -> Range:
        return self._boxes.interval(*value.bounds, whole=False) if value.whole else value

    def truediv(self, first: Range, second: Range) -> Range:
        least, most = second.bounds
        second._divides()
        if not (least > 0).all():
            return self._boxes.unknown()
        return self._boxes.interval(*_product(first.bounds, (_down(1 / most), _up(1 / least))), whole=False)

    int_truediv = truediv

    def trunc_to_int(self, value: Range, _: Any) -> Range:
        return value.monotone(np.trunc, whole=True)

    def floor_to_int(self, value: Range, _: Any) -> Range:
        return value.monotone(np.floor, whole=True)

    def ceil_to_int(self, value: Range, _: Any) -> Range:
        return value.monotone(np.ceil, whole=True)

    def round_to_int(self, value: Range, _: Any) -> Range:
        return value.monotone(np.round, whole=True)

    def trunc(self, value: Range) -> Range:
        return value.monotone(np.trunc, whole=False)

    def _truth(self, value: Range | Truth) -> Truth:
        if isinstance(value, Truth):
            return value
        either = np.ones(len(self._boxes), bool)
        return Truth(either, either)


def _maximum(first: Range, second: Range) -> Range:
    if not (first.whole and second.whole):
        (low, high), (least, most) = first.bounds, second.bounds
        return first.boxes.interval(np.maximum(low, least), np.maximum(high, most), whole=False)
    low, high = (second - first).bounds
    larger = first.boxes.interval(np.maximum(low, 0), np.maximum(high, 0), whole=True)
    result = _chosen(low >= 0, second, first + larger)
    return _with_choices(result, _any, _all, first, second)


def _minimum(first: Range, second: Range) -> Range:
    result = _maximum(first * -1, second * -1) * -1
    return _with_choices(result, _all, _any, first, second)


def _with_choices(result: Range, over: Any, under: Any, first: Range, second: Range) -> Range:
    kept = (result.boxes, result.terms, result.low, result.high, result.divisor, result.whole)
    return Range(*kept, choices=(over, under, (first, second)))


def _any(truths: Iterable[Truth]) -> Truth:
    first, second = truths
    return first | second


def _all(truths: Iterable[Truth]) -> Truth:
    first, second = truths
    return first & second


def _chosen(where: _Bools, first: Range, second: Range) -> Range:
    """Return one integer in some boxes and another in the others."""
    divisor = math.lcm(first.divisor, second.divisor)
    if divisor > _OVERFLOW:
        return first.boxes.unknown(whole=True)
    first, second = first._times(divisor // first.divisor), second._times(divisor // second.divisor)
    keys = dict.fromkeys((*first.terms, *second.terms))
    terms = {key: np.where(where, first.terms.get(key, 0), second.terms.get(key, 0)) for key in keys}
    low, high = np.where(where, first.low, second.low), np.where(where, first.high, second.high)
    return Range(first.boxes, terms, low, high, divisor)


def _product(first: tuple[_Floats, _Floats], second: tuple[_Floats, _Floats]) -> tuple[_Floats, _Floats]:
    """Return the limits of the products of two intervals, without rounding."""
    (low, high), (least, most) = first, second
    products = np.stack([low * least, low * most, high * least, high * most])
    products[np.isnan(products)] = 0  # 0 times an infinite limit, which no number reaches
    return products.min(0), products.max(0)


def _outward(low: _Floats, high: _Floats, whole: bool) -> tuple[_Floats, _Floats]:
    """Return limits rounded so that they hold in spite of one rounding, to integers if ``whole``."""
    low, high = _down(low), _up(high)
    return (np.ceil(low), np.floor(high)) if whole else (low, high)


def _down(numbers: Any) -> _Floats:
    lower: _Floats = np.nextafter(numbers, -np.inf)
    return lower


def _up(numbers: Any) -> _Floats:
    higher: _Floats = np.nextafter(numbers, np.inf)
    return higher


def _floor_of(dividend: _Floats, divisor: _Floats, *, up: bool = False) -> _Floats:
    """Return a limit of the quotients, rounded down; exact for integers that float64 represents."""
    quotient = dividend / divisor
    exact = (abs(dividend) < _EXACT) & (abs(divisor) < _EXACT)
    return np.floor(np.where(exact, quotient, _up(quotient) if up else _down(quotient)))
