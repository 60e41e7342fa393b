"""Branches on sizes in a model's code.

The tracer follows one side of an ``if`` on the size of a tensor and leaves out the other. torch records such decisions
as guards. Most of them are torch's own, about the layout of tensors, and do not change results; the others are those of
the model's code. A graph is right at a size only if each decision is the same there as at the traced sizes. The same is
true of sizes that the code converts to Python numbers.

Other uses of a size leave no guard, and are refused: see :mod:`zoo_export.trace.size_uses`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType

import sympy
from sympy.printing.str import StrPrinter
from torch._dynamo.exc import UserError, UserErrorType

from zoo.contract import Dim, Graph, Size
from zoo.errors import ParityError
from zoo_export.trace.deciding import Decision
from zoo_export.trace.declared_sizes import Traced, declared_dims, declared_values, words_of
from zoo_export.trace.size_uses import NUMBER_REMEDY, Branch, SizeUses

__all__ = ["Branches"]


class Branches:
    """Checks of the decisions on sizes, and of other uses of them, by the code of a model while it was traced.

    Args:
        distribution: name of the distribution that the model belongs to. Other libraries may format sizes and catch
            errors of tracing, as einops does.
    """

    def __init__(self, distribution: str) -> None:
        self._uses = SizeUses(distribution)
        self._watched: Mapping[sympy.Symbol, Dim] = {}

    def recording(self) -> AbstractContextManager[None]:
        """Record the uses of sizes in this context."""
        return self._uses.recording()

    def explain(self, error: Exception, *, last: bool) -> None:
        """Raise a :class:`ParityError` if an error of the tracer is due to a size that the model fixes.

        Unless it is the ``last`` attempt, equations that torch asks for are left out: they may be due to the attempt.
        """
        violated = isinstance(error, UserError) and error.error_type is UserErrorType.CONSTRAINT_VIOLATION
        reasons = [reason for reason, of_torch in self._uses.fixed if last or not of_torch]
        if violated and reasons:
            raise reasons[0] from error

    def check(
        self,
        inputs: Traced,
        graph: Graph,
        allowed: Mapping[str, Size],
        fixed: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Check that every decision is the same at all declared sizes of 2 or more.

        Sizes of 0 and 1 are left to the comparison, because the tracer never assumes them.

        Args:
            inputs: the traced inputs, each with its symbolic shape.
            graph: the declared graph.
            allowed: the sizes that each named dimension may have. With a past, those of ``sequence`` limit the total.
            fixed: sizes that were not free in the trace, by name.

        Raises:
            ParityError: a decision or a number depends on a size that is declared free, or a size was used in a way
                that no graph contains.
        """
        dims = declared_dims(inputs)
        for refused in self._uses.refused:
            raise refused
        self._check_watched()
        for branch, decision in self._decisions(dims, graph, allowed):
            sizes, settled = decision.turns(2)
            if sizes is None and settled:
                continue
            condition = decision.condition
            values = declared_values(condition, dims, graph, allowed)
            # small sizes are easier to read and to try than those that the search happens to find
            sizes = next((small for small, value in values if value != branch.outcome), sizes)
            text = _Text().doprint(condition.xreplace({symbol: _name(dim) for symbol, dim in dims.items()}))
            where = "cannot be shown for all declared sizes"
            if sizes is not None:
                where = f"is wrong for {words_of({**fixed, **sizes})}"
            outcome = str(branch.outcome).lower()
            problem = f"the model {branch}: {text} is assumed to be {outcome}, which {where}"
            raise ParityError(problem, branch.place, branch.remedy)

    def _decisions(
        self, dims: Mapping[sympy.Symbol, Dim], graph: Graph, allowed: Mapping[str, Size]
    ) -> Iterator[tuple[Branch, Decision]]:
        """Yield the decisions on sizes alone. torch makes others only where it can prove the outcome."""
        for branch, condition in self._uses.conditions():
            if condition.free_symbols <= dims.keys():
                yield branch, Decision(condition, branch.outcome, dims, graph, allowed)

    def watch(self, inputs: Traced) -> None:
        """Let :meth:`check` refuse that one of these sizes is taken for a number, as by ``int(length)``.

        The tracer raises an error of its own for that: see :meth:`explain`. A run on fake tensors does not.
        """
        self._watched = declared_dims(inputs)

    def _check_watched(self) -> None:
        for symbol, dim in self._watched.items():
            number = symbol if self._uses.environment is None else self._uses.environment.replace(symbol)
            if number.is_Integer:
                atoms = (branch for branch, condition in self._uses.conditions() if condition.is_Atom)
                place = next((branch.place for branch in atoms if branch.condition.free_symbols), None)
                raise ParityError(f"the model turns {dim}, which is declared free, into {number}", place, NUMBER_REMEDY)

    def small_sizes(self, inputs: Traced, graph: Graph, allowed: Mapping[str, Size]) -> Iterator[Mapping[str, int]]:
        """Yield the sizes of 0 and 1 at which decisions may be others, by name. Arguments as of :meth:`check`.

        Only a trace that does not assume that sizes are at least 2 records such decisions.
        """
        for _, decision in self._decisions(declared_dims(inputs), graph, allowed):
            yield from decision.turns_at_small_sizes()


class _Text(StrPrinter):  # type: ignore[misc]  # sympy has no annotations
    """Prints conditions, with equations as ``a = b``."""

    def _print_Equality(self, equation: sympy.Eq) -> str:  # noqa: N802  (as sympy names it)
        return f"{self._print(equation.lhs)} = {self._print(equation.rhs)}"

    def _print_Unequality(self, equation: sympy.Ne) -> str:  # noqa: N802
        return f"{self._print(equation.lhs)} != {self._print(equation.rhs)}"


def _name(dim: Dim) -> sympy.Symbol:
    """Return a symbol with the name of a dimension, in brackets if it is a sum or a quotient."""
    return sympy.Symbol(str(dim) if str(dim).isidentifier() else f"({dim})")
