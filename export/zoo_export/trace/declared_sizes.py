"""Symbolic expressions of a trace at the sizes that a model declares."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch

from zoo.contract import Dim, Graph, Size, TensorSpec, dim_names, dim_size
from zoo.errors import ParityError
from zoo_export.trace.deciding import value_at

__all__ = ["Traced", "check_outputs", "declared_dims", "declared_values", "words_of"]


Traced = Sequence[tuple[TensorSpec, Sequence[Any]]]
"""Tensors with their symbolic shapes."""

_SMALL = range(18)
"""Sizes at which every branch is evaluated, beside those that its own constants suggest."""


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
    dims = declared_dims(inputs)
    seen: set[tuple[Dim, sympy.Basic]] = set()
    for tensor, shape in outputs:
        if len(shape) != len(tensor.dims):
            raise ParityError(f"{tensor.name} has {len(shape)} dimensions, but declares {len(tensor.dims)}", graph.name)
        for dim, size in zip(tensor.dims, shape, strict=True):
            expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
            if (dim, expression) in seen or not allowed.keys() >= {*dim_names(dim)}:
                continue  # a name that no input has is reported by the comparison
            seen.add((dim, expression))
            for sizes, value in declared_values(expression, dims, graph, allowed, dim):
                if value != dim_size(dim, sizes):
                    problem = f"{tensor.name} declares the size {dim}, but has the size {value} for {words_of(sizes)}"
                    raise ParityError(problem, f"graph {graph.name}")


def declared_dims(inputs: Traced) -> dict[sympy.Symbol, Dim]:
    """Return the declared dimension of each symbol that is a size of an input."""
    dims: dict[sympy.Symbol, Dim] = {}
    for tensor, shape in inputs:
        for dim, size in zip(tensor.dims, shape, strict=True):
            expression = size.node.expr if isinstance(size, torch.SymInt) else None
            if isinstance(expression, sympy.Symbol):
                dims.setdefault(expression, dim)
    return dims


def declared_values(
    expression: sympy.Basic,
    dims: Mapping[sympy.Symbol, Dim],
    graph: Graph,
    allowed: Mapping[str, Size],
    dim: Dim = 1,
) -> Iterator[tuple[Mapping[str, int], Any]]:
    """Yield declared sizes, and the value of an expression there; nothing if it depends on more than sizes.

    The sizes are those of the names in the expression and in ``dim``. The dimensions of inputs that they determine are
    at least 2. The value is None where it is undefined, as a division by 0.
    """
    symbols = sorted((item for item in expression.free_symbols if item in dims), key=str)
    used = {name for item in (dim, *(dims[symbol] for symbol in symbols)) for name in dim_names(item)}
    names = [name for name in graph.dim_names() if name in used]
    if len(symbols) == len(expression.free_symbols):
        for sizes in _sizes(names, graph, allowed, _constants(expression)):
            if min((dim_size(dims[symbol], sizes) for symbol in symbols), default=2) >= 2:
                yield sizes, value_at(expression, dims, sizes)


def words_of(sizes: Mapping[str, int]) -> str:
    """Return sizes as words for a message."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items()) or "every input"


def _sizes(
    names: Sequence[str], graph: Graph, allowed: Mapping[str, Size], constants: set[int]
) -> Iterator[Mapping[str, int]]:
    """Yield sizes of the named dimensions, small ones first."""
    past = graph.past_length
    values = [[0] * (name == past) + _near(allowed[name], constants) for name in names]
    longest = allowed["sequence"].max if past else None
    for combination in sorted(itertools.product(*values), key=lambda sizes: (math.prod(sizes), sizes)):
        sizes = dict(zip(names, combination, strict=True))
        if past is None or longest is None or sizes.get("sequence", 1) + sizes.get(past, 0) <= longest:
            yield sizes


def _near(size: Size, constants: set[int]) -> list[int]:
    """Return allowed sizes: small ones, and those near the limits, the constants of a condition and their sums."""
    limits = () if size.max is None else (size.max // 2, size.max)
    near = {number + change for number in (*constants, *limits) for change in (-1, 0, 1)}
    sums = {first + second for first, second in itertools.combinations(constants, 2)}
    small = {size.min + step * size.multiple_of for step in _SMALL}
    return sorted({size.nearest(number) for number in near | sums | small})


def _constants(condition: sympy.Basic) -> set[int]:
    return {abs(int(number)) for number in condition.atoms(sympy.Integer)}
