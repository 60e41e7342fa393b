"""Dimensions of tensors: sizes that are fixed, free, or computed from free ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

__all__ = ["Dim", "Size", "canonical", "dim_names", "dim_size", "is_quotient"]

Dim = str | int
"""A fixed size, or the name of a dimension that is free at run time. A sum or difference, such as
``past_sequence + sequence``, a quotient rounded down, such as ``frames // 4``, ``(frames + 3) // 4`` or
``(samples - 80) // 320``, or a minimum, such as ``min(past_sequence, 31)``, is a dimension of that size."""


def dim_size(dim: Dim, sizes: Mapping[str, int]) -> int:
    """Return the size of ``dim``, given the size of each named dimension, or its own.

    >>> dim_size("frames // 4 + 1", {"frames": 11}), dim_size("frames // 4", {"frames // 4": 2})
    (3, 2)
    """
    if isinstance(dim, int):
        return dim
    return sizes[dim] if dim in sizes else _evaluate(_parse(dim), sizes)


def dim_names(dim: Dim) -> tuple[str, ...]:
    """Return the named dimensions on which the size of ``dim`` depends.

    >>> dim_names("(frames + 3) // 4"), dim_names(64)
    (('frames',), ())
    """
    return () if isinstance(dim, int) else tuple(dict.fromkeys(re.findall(r"[^\W\d]\w*(?!\w*\()", dim)))


def is_quotient(dim: Dim) -> bool:
    """Return whether the size of ``dim`` is, or contains, a quotient."""
    return "//" in str(dim)


@cache
def _parse(dim: str) -> ast.expr:
    """Parse a dimension.

    Raises :class:`ValueError` unless it has names, numbers, sums, differences, quotients and minima only.
    """
    try:
        tree = ast.parse(dim.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        tree = ast.Constant(None)
    if not dim_names(dim) or not all(map(_is_allowed, ast.walk(tree))):
        forms = "a name, or a sum or quotient such as 'past_sequence + sequence' or '(frames + 3) // 4'"
        forms += ", or a minimum such as 'min(frames, 31)'"
        raise ValueError(f"bad dimension {dim!r}: write a number, {forms}")
    return tree


def _is_allowed(node: ast.AST) -> bool:
    match node:
        case ast.BinOp(op=ast.FloorDiv(), right=ast.Constant(value=int(divisor))):
            return divisor > 0
        case ast.Call(func=ast.Name(id="min"), args=[_, _], keywords=[]):
            return True
        case ast.Constant(value=number):
            return type(number) is int
        case _:
            return isinstance(node, ast.Name | ast.Load | ast.Add | ast.Sub | ast.FloorDiv) or (
                isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)
            )


def _evaluate(node: ast.expr, sizes: Mapping[str, int]) -> int:
    match node:
        case ast.Name(id=name):
            return sizes[name]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluate(left, sizes) + _evaluate(right, sizes)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _evaluate(left, sizes) - _evaluate(right, sizes)
        case ast.BinOp(left=left, right=right):
            return _evaluate(left, sizes) // _evaluate(right, sizes)
        case ast.Call(args=arguments):
            return min(_evaluate(argument, sizes) for argument in arguments)
        case _:
            return int(ast.literal_eval(node))


def canonical(dim: Dim) -> Dim:
    """Return a dimension with the usual spaces, so that equal ones are equal strings."""
    return dim if isinstance(dim, int) else ast.unparse(_parse(dim))


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The sizes that a free dimension may have.

    >>> size = Size(min=80, multiple_of=16)
    >>> size.allows(96), size.allows(100), size.nearest(100)
    (True, False, 112)
    >>> print(size)
    at least 80, a multiple of 16
    """

    min: int = 1
    max: int | None = None
    """None if there is no limit."""
    multiple_of: int = 1

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if a number is not a positive integer, or no size is allowed."""
        for name, value in (("min", self.min), ("max", self.max), ("multiple_of", self.multiple_of)):
            if not (type(value) is int and value > 0) and not (name == "max" and value is None):
                raise ValueError(f"{name} of a size must be a positive integer, got {value!r}")
        if self.max is not None and not self.allows(self.nearest(self.min)):
            raise ValueError(f"no size is {self}")

    def __str__(self) -> str:
        limits = f"at least {self.min}" if self.max is None else f"from {self.min} to {self.max}"
        return limits + (f", a multiple of {self.multiple_of}" if self.multiple_of > 1 else "")

    def allows(self, size: int) -> bool:
        """Return whether a dimension may have this size."""
        return size >= self.min and (self.max is None or size <= self.max) and size % self.multiple_of == 0

    def nearest(self, size: int) -> int:
        """Return the smallest allowed size that is not smaller than ``size``, or else the largest allowed one."""
        steps = -(-max(size, self.min) // self.multiple_of)
        if self.max is not None:
            steps = min(steps, self.max // self.multiple_of)
        return steps * self.multiple_of
