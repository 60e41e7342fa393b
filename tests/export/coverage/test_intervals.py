"""Bounds of operators, at numbers within the bounds of their inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo_export.coverage.intervals import RULES, Intervals, Number

SIZES = {"batch": (1.0, math.inf), "sequence": (1.0, 9.0), "past": (0.0, 8.0)}
VALUES: dict[str, Callable[..., Any]] = {
    "Abs": abs,
    "Add": lambda first, second: first + second,
    "And": lambda first, second: bool(first) and bool(second),
    "Cast": lambda value: value,
    "Clip": lambda value, low, high: min(max(value, low), high),
    "Div": lambda value, divisor: math.trunc(value / divisor),
    "Equal": lambda first, second: first == second,
    "Greater": lambda first, second: first > second,
    "GreaterOrEqual": lambda first, second: first >= second,
    "Identity": lambda value: value,
    "Less": lambda first, second: first < second,
    "LessOrEqual": lambda first, second: first <= second,
    "Max": max,
    "Min": min,
    "Mul": lambda first, second: first * second,
    "Neg": lambda value: -value,
    "Not": lambda value: not value,
    "Or": lambda first, second: bool(first) or bool(second),
    "Sub": lambda first, second: first - second,
    "Where": lambda chosen, first, second: first if chosen else second,
}
"""The operators on single numbers, by name."""
BOOLEANS = {"And": 2, "Not": 1, "Or": 2, "Where": 1}
"""How many first inputs are booleans."""


def value_of(number: Number, sizes: dict[str, int], rest: float) -> float:
    """Return the number at these sizes, ``rest`` of the way from the lowest to the highest."""
    return number.low + round(rest * (number.high - number.low)) + sum(
        factor * sizes[name] for name, factor in number.factors.items()
    )  # fmt: skip


numbers = st.builds(
    lambda low, width, factors: Number(low, low + width, {name: f for name, f in factors.items() if f}),
    st.integers(-20, 20),
    st.integers(0, 9),
    st.dictionaries(st.sampled_from(sorted(SIZES)), st.integers(-4, 8), max_size=2),
)
booleans = st.sampled_from([Number(0, 0), Number(1, 1), Number(0, 1)])
sizes = st.fixed_dictionaries({"batch": st.integers(1, 50), "sequence": st.integers(1, 9), "past": st.integers(0, 8)})


@pytest.mark.parametrize("operator", sorted(VALUES))
@settings(max_examples=40)
@given(data=st.data(), at=sizes)
def test_results_lie_within_their_bounds(operator: str, data: st.DataObject, at: dict[str, int]) -> None:
    """For any sizes, and any numbers within the bounds of the inputs."""
    count = 3 if operator in ("Clip", "Where") else 1 if operator in ("Abs", "Cast", "Identity", "Neg", "Not") else 2
    inputs = [data.draw(booleans if place < BOOLEANS.get(operator, 0) else numbers) for place in range(count)]
    if operator == "Div":
        inputs[1] = Number.of(data.draw(st.integers(1, 8)))
    given_values = [value_of(number, at, data.draw(st.sampled_from([0.0, 0.5, 1.0]))) for number in inputs]
    intervals = Intervals(SIZES)
    found = RULES[operator](intervals, *inputs)
    value = float(VALUES[operator](*given_values))
    rest = value - sum(factor * at[name] for name, factor in found.factors.items())
    assert found.low <= rest <= found.high
    low, high = intervals.ends(found)
    assert low <= value <= high


@given(numbers, st.integers(1, 8), sizes, st.floats(0, 1))
def test_remainders(number: Number, divisor: int, at: dict[str, int], rest: float) -> None:
    """Of both signs: a remainder has that of the divisor or, with fmod, of the number."""
    value = value_of(number, at, rest)
    intervals = Intervals(SIZES)
    low, high = intervals.ends(RULES["Mod"](intervals, number, Number.of(divisor)))
    assert low <= np.mod(value, divisor) <= high
    assert low <= np.fmod(value, divisor) <= high
