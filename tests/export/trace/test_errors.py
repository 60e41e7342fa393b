"""Errors of tracing name the line of the model's code, whichever part of torch raises them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.export.trace.test_blocks import WIDTH, traced
from zoo.errors import PluginError
from zoo.nn import scan_steps


def branch_on_data(x: Tensor) -> Tensor:
    if x.mean() > 0:
        return x
    return -x


def number_from_data(x: Tensor) -> Tensor:
    return x[: int(x.sum())]


def unequal_sizes(x: Tensor) -> Tensor:
    return x + torch.zeros(WIDTH + 1)


def branch_in_the_export(x: Tensor) -> Tensor:
    if not x.is_meta and x.mean() > 0:
        return x
    return -x


def branch_in_a_loop(x: Tensor) -> Tensor:
    """torch quotes the line in its message; its traceback ends at the loop."""

    def step(state: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        if not part.is_meta and part.sum() > 0:
            state = state + 1
        return state, state

    return scan_steps(step, x, x.unsqueeze(1))[0]


def operator_missing_in_onnx(x: Tensor) -> Tensor:
    """torch keeps the lines of modules alone for its second step, the translation."""
    return torch.special.i0e(x)


def pieces_of_a_length(x: Tensor) -> Tensor:
    """torch translates their sizes to values that folding cannot read."""
    return torch.cat([part + number for number, part in enumerate(x.chunk(3))])


def size_of_the_trace(x: Tensor) -> Tensor:
    return x * {3: 1.0}[x.shape[1]]


CASES: dict[Callable[[Tensor], Tensor], tuple[str, str]] = {
    branch_on_data: ("needs the values of a tensor", "inner (Inner), test_errors.py:{}, `if x.mean() > 0:`"),
    number_from_data: ("needs the values of a tensor", "inner (Inner), test_errors.py:{}, `return x[: int(x.sum())]`"),
    unequal_sizes: ("5", "inner (Inner), test_errors.py:{}, `return x + torch.zeros(WIDTH + 1)`"),
    branch_in_the_export: ("needs", "inner (Inner), test_errors.py:{}, `if not x.is_meta and x.mean() > 0:`"),
    branch_in_a_loop: ("Data-dependent", "(Inner), test_errors.py:{}, `if not part.is_meta and part.sum() > 0:`"),
    operator_missing_in_onnx: (
        "i0e to ONNX: write it with other functions",  # aten.special_i0e, or prims.bessel_i0e in later versions
        "test_errors.py:{}, `return self.function(self.dense(x))`",
    ),
    pieces_of_a_length: (
        "torch cannot translate it to ONNX: Error during constant folding for node",
        "test_errors.py:{}, `return self.function(self.dense(x))`",
    ),
    size_of_the_trace: ("KeyError: 4", "inner (Inner), test_errors.py:{}, `return x * {{3: 1.0}}[x.shape[1]]`"),
}


TRANSLATED = (operator_missing_in_onnx, pieces_of_a_length)
"""Functions whose trace succeeds and whose translation fails."""


class Inner(nn.Module):
    """A module that calls a function outside of it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.dense(x))


class Outer(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Inner(function)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


@pytest.mark.parametrize(
    "function",
    [pytest.param(f, marks=pytest.mark.slow if f in TRANSLATED else ()) for f in CASES],
)
def test_error_names_the_line(function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    reason, place = CASES[function]
    code = place.partition("`")[2].rstrip("`").format()
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.strip() == code]
    with pytest.raises(PluginError) as caught:
        traced(Outer(function).eval(), monkeypatch)
    message = str(caught.value)
    assert reason in message
    assert message.endswith(place.format(number))
