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

from zoo.contract import Dim, Graph, Size, TensorSpec, dim_names, dim_size
from zoo.errors import ParityError

__all__ = ["Branches", "Traced", "check_outputs"]

Traced = Sequence[tuple[TensorSpec, Sequence[Any]]]
"""Tensors with their symbolic shapes."""

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

    def check(self, inputs: Traced, graph: Graph, allowed: Mapping[str, Size]) -> None:
        """Check that every decision is the same at all declared sizes of 2 or more.

        Sizes of 0 and 1 are left to the comparison, because the tracer never assumes them.

        Args:
            inputs: the traced inputs, each with its symbolic shape.
            graph: the declared graph.
            allowed: the sizes that each named dimension may have. With a past, those of ``sequence`` limit the total.

        Raises:
            ParityError: a decision depends on a size that is declared free.
        """
        dims = _dims(inputs)
        for branch in dict.fromkeys(self._branches):
            assert self._environment is not None
            condition = self._environment.replace(branch.condition)
            for sizes, outcome in _values(condition, dims, graph, allowed):
                if bool(outcome) != branch.outcome:
                    text = condition.xreplace({symbol: sympy.Symbol(f"({dim})") for symbol, dim in dims.items()})
                    raise ParityError(
                        f"the model branches on a size that is declared free: {text} is assumed to be "
                        f"{str(branch.outcome).lower()}, which is wrong for {_words(sizes)}",
                        branch.place,
                        "select with torch.where, or declare the size",
                    )


def check_outputs(inputs: Traced, outputs: Traced, graph: Graph, allowed: Mapping[str, Size]) -> None:
    """Check that the traced outputs have the declared dimensions at all declared sizes of 2 or more.

    Args:
        inputs: the traced inputs, each with its symbolic shape.
        outputs: the same of the outputs.
        graph: the declared graph.
        allowed: the sizes that each named dimension may have.

    Raises:
        ParityError: an output has another size than it declares.
    """
    dims = _dims(inputs)
    seen: set[tuple[Dim, sympy.Basic]] = set()
    for tensor, shape in outputs:
        if len(shape) != len(tensor.dims):
            raise ParityError(f"{tensor.name} has {len(shape)} dimensions, but declares {len(tensor.dims)}", graph.name)
        for dim, size in zip(tensor.dims, shape, strict=True):
            found = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
            if (dim, found) in seen or not allowed.keys() >= {*dim_names(dim)}:
                continue  # a name that no input has is reported by the comparison
            seen.add((dim, found))
            for sizes, value in _values(found, dims, graph, allowed, dim):
                if value != dim_size(dim, sizes):
                    what = f"{tensor.name} declares the size {dim}, but has the size {value} for {_words(sizes)}"
                    raise ParityError(what, f"graph {graph.name}")


def _dims(inputs: Traced) -> dict[sympy.Symbol, Dim]:
    """Return the declared dimension of each symbol that is a size of an input."""
    dims: dict[sympy.Symbol, Dim] = {}
    for tensor, shape in inputs:
        for dim, size in zip(tensor.dims, shape, strict=True):
            expression = size.node.expr if isinstance(size, torch.SymInt) else None
            if isinstance(expression, sympy.Symbol):
                dims.setdefault(expression, dim)
    return dims


def _values(
    expression: sympy.Basic,
    dims: Mapping[sympy.Symbol, Dim],
    graph: Graph,
    allowed: Mapping[str, Size],
    dim: Dim = 1,
) -> Iterator[tuple[Mapping[str, int], Any]]:
    """Yield declared sizes, and the value of an expression there; nothing if it depends on more than sizes.

    The sizes are those of the names in the expression and in ``dim``.
    """
    symbols = sorted((item for item in expression.free_symbols if item in dims), key=str)
    used = {name for item in (dim, *(dims[symbol] for symbol in symbols)) for name in dim_names(item)}
    names = [name for name in graph.dim_names() if name in used]
    if len(symbols) == len(expression.free_symbols):
        for sizes in _sizes(names, graph, allowed, _constants(expression)):
            values = {symbol: dim_size(dims[symbol], sizes) for symbol in symbols}
            if min(values.values(), default=2) >= 2:
                yield sizes, sympy_interp(PythonReferenceAnalysis, values, expression)


def _words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items()) or "every input"


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


def _sizes(
    names: Sequence[str], graph: Graph, allowed: Mapping[str, Size], constants: set[int]
) -> Iterator[Mapping[str, int]]:
    """Yield sizes of the named dimensions, small ones first."""
    past = graph.past.length if graph.past else None
    values = [[0] * (name == past) + _near(allowed[name], constants) for name in names]
    longest = allowed["sequence"].max if past else None
    for chosen in sorted(itertools.product(*values), key=lambda sizes: (math.prod(sizes), sizes)):
        sizes = dict(zip(names, chosen, strict=True))
        if past is None or longest is None or sizes.get("sequence", 1) + sizes.get(past, 0) <= longest:
            yield sizes


def _near(size: Size, constants: set[int]) -> list[int]:
    """Return allowed sizes: small ones, and those near the limits, the constants of a condition and their sums."""
    limits = () if size.max is None else (size.max // 2, size.max)
    near = {number + change for number in (*constants, *limits) for change in (-1, 0, 1)}
    sums = {first + second for first, second in itertools.combinations(constants, 2)}
    small = {size.min + step * size.multiple_of for step in _SMALL}
    return sorted({size.nearest(number) for number in near | sums | small})
