"""Formulas: the expected answers of a task, with which the comparison of an export compares the task's own.

A formula (:attr:`zoo.Task.formula`) is a function ``formula(runner, item, result, model)`` that computes the answer to
one input independently of the task's own code:

- ``runner``: the task's :class:`zoo_runtime.Runner`.
- ``item``: the input, as its method ``read`` returned it.
- ``result``: its result.
- ``model``: a function that maps named inputs of the graphs, with a batch of one, to the outputs of all graphs for
  which they suffice, as float64 arrays. The graphs are computed by PyTorch, without a cache.

It returns a mapping of names to :class:`Numbers`, :class:`Choice` or :class:`Same`: parts of the result, each with the
value that it should have. It is evaluated on the model in float64, which gives the expected values, and in the model's
own dtype, whose error bounds that of the task by the rule for outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zoo.arrays import Array

__all__ = ["Choice", "Formula", "Model", "Numbers", "Same"]

Model = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Maps named inputs to float64 outputs."""


@dataclass(frozen=True)
class Numbers:
    """Numbers of a result, such as probabilities. None if it lacks them."""

    found: Any
    expected: Array


@dataclass(frozen=True)
class Choice:
    """Indices that a result has chosen, each that of the highest score. Where scores are nearly equal, any is right."""

    chosen: Any
    """Indices, of the shape of ``scores`` without its last dimension."""
    scores: Array


@dataclass(frozen=True)
class Same:
    """A part of a result that must be equal, such as a text."""

    found: Any
    expected: Any


Formula = Callable[[Any, Any, Mapping[str, Any], Model], Mapping[str, Numbers | Choice | Same]]
"""Computes the expected answer to one input: ``formula(runner, item, result, model)``."""
