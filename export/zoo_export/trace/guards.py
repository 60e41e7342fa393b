"""Branches on sizes in a model's code.

The tracer follows one side of an ``if`` on the size of a tensor and leaves out the other. torch records such decisions
as guards. Most of them are torch's own, about the layout of tensors, and do not change results; the others are those of
the model's code. A graph is right at a size only if each decision is the same there as at the traced sizes.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from zoo.contract import Graph, TensorSpec, dim_size
from zoo.errors import ParityError

__all__ = ["Branches"]

_TORCH = str(Path(torch.__file__).parent)
_SYMBOLIC = (torch.__file__, f"{_TORCH}/fx/experimental/", __file__)
"""Files of torch that implement symbolic sizes, and so stand between a decision and the code that asks for it."""
_SMALL = range(18)
"""Sizes at which every branch is evaluated, beside those that its own constants suggest."""


@dataclass(frozen=True)
class _Branch:
    """A decision on sizes in the model's code."""

    condition: sympy.Basic
    outcome: bool
    place: str


class Branches:
    """Decisions on sizes that the code of a model made while it was traced."""

    def __init__(self) -> None:
        self._branches: list[_Branch] = []
        self._environment: ShapeEnv | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the decisions made in this context."""
        original = ShapeEnv.evaluate_expr

        def evaluate(environment: ShapeEnv, condition: sympy.Basic, *arguments: Any, **options: Any) -> sympy.Basic:
            outcome = original(environment, condition, *arguments, **options)
            if isinstance(condition, sympy.logic.boolalg.Boolean) and (place := _place_of_decision()) is not None:
                self._branches.append(_Branch(condition, bool(outcome), place))
                self._environment = environment
            return outcome

        ShapeEnv.evaluate_expr = evaluate  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            ShapeEnv.evaluate_expr = original  # type: ignore[method-assign]

    def check(self, inputs: Sequence[tuple[TensorSpec, Sequence[Any]]], graph: Graph, longest: int) -> None:
        """Check that every decision is the same at all declared sizes of 2 or more.

        Sizes of 0 and 1 are left to the comparison, because the tracer never assumes them.

        Args:
            inputs: the traced inputs, each with its symbolic shape.
            graph: the declared graph.
            longest: the largest total length of a row.

        Raises:
            ParityError: a decision depends on a size that is declared free.
        """
        dims: dict[sympy.Symbol, Any] = {}
        for tensor, shape in inputs:
            for dim, size in zip(tensor.dims, shape, strict=True):
                expression = size.node.expr if isinstance(size, torch.SymInt) else None
                if isinstance(expression, sympy.Symbol):
                    dims.setdefault(expression, dim)
        for branch in dict.fromkeys(self._branches):
            assert self._environment is not None
            condition = self._environment.replace(branch.condition)
            symbols = sorted((item for item in condition.free_symbols if item in dims), key=str)
            used = {part.strip() for symbol in symbols for part in str(dims[symbol]).split("+")}
            names = [name for name in graph.dim_names() if name in used]
            for sizes in _sizes(names, graph, longest, _constants(condition)):
                values = {symbol: dim_size(dims[symbol], sizes) for symbol in symbols}
                if min(values.values(), default=2) < 2 or len(values) < len(condition.free_symbols):
                    continue
                if bool(sympy_interp(PythonReferenceAnalysis, values, condition)) != branch.outcome:
                    text = condition.xreplace({symbol: sympy.Symbol(f"({dims[symbol]})") for symbol in symbols})
                    where = ", ".join(f"{name} {size}" for name, size in sizes.items())
                    raise ParityError(
                        f"the model branches on a size that is declared free: {text} is assumed to be "
                        f"{str(branch.outcome).lower()}, which is wrong for {where}",
                        branch.place,
                        "select with torch.where, or declare the size",
                    )


def _place_of_decision() -> str | None:
    """Describe the line of the model's code that asked for a decision; None if torch itself asked.

    Python asks for the truth of a condition by a method of ``torch.SymBool``, and torch's own code by other ways, too.
    """
    frame, asked = sys._getframe(2), False
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SYMBOLIC):
        asked = frame.f_code.co_filename == torch.__file__
        frame = frame.f_back
    if not asked or frame.f_code.co_filename.startswith((_TORCH, "<")):
        return None
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, in {frame.f_code.co_name}"


def _constants(condition: sympy.Basic) -> set[int]:
    return {abs(int(number)) for number in condition.atoms(sympy.Integer)}


def _sizes(names: Sequence[str], graph: Graph, longest: int, constants: set[int]) -> Iterator[Mapping[str, int]]:
    """Yield sizes of the named dimensions, small ones first."""
    near = {size + change for size in (*constants, longest, longest // 2) for change in (-1, 0, 1)}
    sums = {first + second for first, second in itertools.combinations(constants, 2)}
    values = sorted(size for size in {*_SMALL, *near, *sums} if 0 <= size <= longest)
    past = graph.past.length if graph.past else None
    for chosen in sorted(itertools.product(values, repeat=len(names)), key=lambda sizes: (math.prod(sizes), sizes)):
        sizes = dict(zip(names, chosen, strict=True))
        if sizes.get("sequence", 1) + (sizes.get(past, 0) if past else 0) <= longest:
            yield sizes
