"""Branches on sizes in a model's code.

The tracer follows one side of an ``if`` on the size of a tensor and leaves out the other. torch records such decisions
as guards. Most of them are torch's own, about the layout of tensors, and do not change results; the others are those of
the model's code. A graph is right at a size only if each decision is the same there as at the traced sizes. The same is
true of sizes that the code converts to Python numbers.

Other uses of a size leave no guard: as text, as a key, or in code that raises an error only while it is traced, which
the model catches. They are recorded where they happen, and refused. Where the model asks torch whether it is traced,
the answer is no, as in the calls of its users, so that the graph contains the branch that these take.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import packages_distributions
from pathlib import Path
from types import FrameType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import sympy
import torch
from sympy.printing.str import StrPrinter
from torch._dynamo import external_utils
from torch._dynamo.exc import UserError, UserErrorType
from torch.fx import _symbolic_trace
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from zoo.contract import Dim, Graph, Size, dim_names, dim_size
from zoo.errors import ParityError
from zoo_export.trace import experts, recurrent
from zoo_export.trace.declared_sizes import Traced, declared_dims, declared_values, words_of

__all__ = ["Branches"]


_TORCH = f"{Path(torch.__file__).parent}/"
_SYMBOLIC = (torch.__file__, f"{_TORCH}fx/experimental/", __file__)
"""Files of torch that implement symbolic sizes, and so stand between a decision and the code that asks for it."""
_MODES = (__file__, experts.__file__, recurrent.__file__)
"""Files whose modes stand between the model and every torch function."""
_STANDARD = f"{sysconfig.get_path('stdlib')}/"
_INSTALLED = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib"))
_OURS = {"zoo", "zoo_export", "zoo_runtime"}
_ONLY_INT = {*dir(int)} - {*dir(torch.SymInt), "__float__", "__getnewargs__", "from_bytes"}
"""Attributes of numbers that symbolic sizes lack, unless Python has an alternative to them."""

_QUESTIONS = (
    torch.compiler.is_compiling,
    torch.compiler.is_exporting,
    external_utils.is_compiling,
    torch._utils.is_compiling,
    _symbolic_trace.is_fx_tracing,
)
"""Functions of torch that return True only while a model is traced. ``torch.jit.is_tracing``,
``torch.onnx.is_in_onnx_export`` and ``torch.compiler.is_dynamo_compiling`` return False in a trace, too."""

_NUMBER_REMEDY = "keep the size, with //, %, ** 0.5, math.floor, math.ceil or torch.arange, or declare it"
_TORCH_REMEDY = "; if torch does it, as in max_pool1d, call another function, such as max_pool2d"
_TEXT_REMEDY = "compare the size itself, or leave the text out of forward"
_KEY_REMEDY = "compare sizes with =="
_ERROR_REMEDY = "do not catch errors of torch in forward"


@dataclass(frozen=True)
class _Branch:
    """A decision on sizes in the model's code, or a conversion of a size to a number."""

    condition: sympy.Basic
    outcome: float
    place: str

    def __str__(self) -> str:
        if isinstance(self.outcome, bool):
            return "branches on a size that is declared free"
        return "turns a size that is declared free into a number"

    @property
    def remedy(self) -> str:
        return "select with torch.where, or declare the size" if isinstance(self.outcome, bool) else _NUMBER_REMEDY


class Branches:
    """Decisions on sizes, and other uses of them, by the code of a model while it was traced.

    Args:
        distribution: name of the distribution that the model belongs to. Other libraries may format sizes and catch
            errors of tracing, as einops does.
    """

    def __init__(self, distribution: str) -> None:
        self._distribution = distribution
        self._branches: list[_Branch] = []
        self._numbers: list[tuple[float, str, bool]] = []
        """Sizes that became numbers, the model's lines that did it, and whether a function of torch did it for them."""
        self._refused: list[ParityError] = []
        self._environment: ShapeEnv | None = None
        self._watched: Mapping[sympy.Symbol, Dim] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the uses of sizes in this context."""
        evaluate = ShapeEnv.evaluate_expr

        def evaluated(environment: ShapeEnv, condition: sympy.Basic, *arguments: Any, **options: Any) -> sympy.Basic:
            try:
                outcome = evaluate(environment, condition, *arguments, **options)
            except Exception as error:
                if _place_of_decision() is not None:
                    self._refuse_error(error)
                raise
            self._environment = environment
            self._decide(condition, outcome)
            return outcome

        def unhashable(_: torch.SymInt) -> int:
            self._refuse("looks up a size in a set, a dictionary or a cache", _KEY_REMEDY)
            raise TypeError(f"a size cannot be looked up in a set, a dictionary or a cache: {_KEY_REMEDY}")

        def text(convert: Callable[..., str]) -> Callable[..., str]:
            def converted(*arguments: Any) -> str:
                self._refuse("turns a size into text, which no graph contains", _TEXT_REMEDY)
                return convert(*arguments)

            return converted

        def missing(name: str) -> property:
            def get(_: torch.SymInt) -> Any:
                self._refuse(f"uses int.{name}, which traced sizes lack", _NUMBER_REMEDY)
                raise (TypeError if name.startswith("__") else AttributeError)(f"traced sizes have no {name}")

            return property(get)

        def answer(function: Callable[[], bool]) -> Callable[[], bool]:
            @torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
            def answered() -> bool:
                return function() if self._place(()) is None else False

            return answered

        answers = {function: answer(function) for function in _QUESTIONS}
        replacements: Sequence[tuple[type | ModuleType, str, object]] = (
            *((module, name, answers[function]) for module, name, function in _names_of(answers)),
            (ShapeEnv, "evaluate_expr", evaluated),
            (SymNode, "str", text(SymNode.str)),
            (SymNode, "_graph_repr", text(SymNode._graph_repr)),
            (torch.SymInt, "__format__", text(object.__format__)),
            (torch.SymFloat, "__format__", text(object.__format__)),
            (torch.SymInt, "__hash__", unhashable),
            *((torch.SymInt, name, missing(name)) for name in _ONLY_INT),
        )
        with ExitStack() as stack:
            for owner, name, value in replacements:
                stack.enter_context(_replaced(owner, name, value))
            stack.enter_context(_Calls(self))
            yield

    def _decide(self, condition: sympy.Basic, outcome: sympy.Basic) -> None:
        if not isinstance(outcome, sympy.Number):
            result: float = bool(outcome)
        else:
            result = int(outcome) if outcome.is_integer else float(outcome)
            if condition.is_Symbol and (place := self._place((_TORCH,))) is not None:
                self._numbers.append((result, place, _place_of_decision() is None))
        if (place := _place_of_decision()) is not None:
            self._branches.append(_Branch(condition, result, place))

    def _refuse(self, action: str, remedy: str, between: tuple[str, ...] = _SYMBOLIC) -> None:
        """Record a use of a size that no graph can contain, unless torch, zoo or a library asked for it."""
        place = self._place(between)
        if place is not None:
            self._refused.append(ParityError(f"the model {action}", place, remedy))

    def _refuse_error(self, error: Exception) -> None:
        line = str(error).strip().partition("\n")[0]
        self._refuse(f"catches an error of tracing ({type(error).__name__}: {line})", _ERROR_REMEDY, (_TORCH,))

    def _place(self, between: tuple[str, ...]) -> str | None:
        """Describe the line of the model's code that is at work; None if it is code of torch, zoo or a library.

        Args:
            between: paths of files to pass over, beside the standard library and generated code.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_between(frame, (*_MODES, *between)):
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename.startswith(_TORCH):
            return None
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in _OURS or self._distribution not in self._owners.get(package, [self._distribution]):
            return None
        return _line(frame)

    @cached_property
    def _owners(self) -> Mapping[str, Sequence[str]]:
        """The names of the distributions of each package."""
        return packages_distributions()

    def explain(self, error: Exception) -> None:
        """Raise a :class:`ParityError` if an error of the tracer is due to a size that became a number."""
        violated = isinstance(error, UserError) and error.error_type is UserErrorType.CONSTRAINT_VIOLATION
        if violated and self._numbers:
            number, place, by_torch = self._numbers[0]
            problem = f"the model turns a size that is declared free into the number {number}"
            raise ParityError(problem, place, f"{_NUMBER_REMEDY}{_TORCH_REMEDY if by_torch else ''}") from error

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
        for refused in self._refused:
            raise refused
        self._check_watched()
        for branch, condition in self._conditions():
            for sizes, value in declared_values(condition, dims, graph, allowed):
                if value != branch.outcome:
                    text = _Text().doprint(condition.xreplace({symbol: _name(dim) for symbol, dim in dims.items()}))
                    raise ParityError(
                        f"the model {branch}: {text} is assumed to be {str(branch.outcome).lower()}, which is wrong "
                        f"for {words_of({**fixed, **sizes})}",
                        branch.place,
                        branch.remedy,
                    )

    def watch(self, inputs: Traced) -> None:
        """Let :meth:`check` refuse that one of these sizes is taken for a number, as by ``int(length)``.

        The tracer raises an error of its own for that: see :meth:`explain`. A run on fake tensors does not.
        """
        self._watched = declared_dims(inputs)

    def _check_watched(self) -> None:
        for symbol, dim in self._watched.items():
            number = symbol if self._environment is None else self._environment.replace(symbol)
            if number.is_Integer:
                atoms = (branch for branch, condition in self._conditions() if condition.is_Atom)
                place = next((branch.place for branch in atoms if branch.condition.free_symbols), None)
                raise ParityError(
                    f"the model turns {dim}, which is declared free, into {number}", place, _NUMBER_REMEDY
                )

    def small_sizes(self, inputs: Traced, graph: Graph, allowed: Mapping[str, Size]) -> Iterator[Mapping[str, int]]:
        """Yield the sizes of 0 and 1 at which decisions are others, by name. The arguments are those of :meth:`check`.

        Only a trace that does not assume that sizes are at least 2 records such decisions.
        """
        dims = declared_dims(inputs)
        for branch, condition in self._conditions():
            symbols = [symbol for symbol in condition.free_symbols if symbol in dims]
            for sizes, value in declared_values(condition, dims, graph, allowed, smallest=0):
                small = (dims[symbol] for symbol in symbols if dim_size(dims[symbol], sizes) < 2)
                names = {name for dim in small for name in dim_names(dim)}
                if names and value != branch.outcome:
                    yield {name: sizes[name] for name in sorted(names)}

    def _conditions(self) -> Iterator[tuple[_Branch, sympy.Basic]]:
        """Yield each decision with its condition in terms of the sizes of inputs."""
        for branch in dict.fromkeys(self._branches):
            assert self._environment is not None
            yield branch, self._environment.replace(branch.condition)


class _Text(StrPrinter):  # type: ignore[misc]  # sympy has no annotations
    """Prints conditions, with equations as ``a = b``."""

    def _print_Equality(self, equation: sympy.Eq) -> str:  # noqa: N802  (as sympy names it)
        return f"{self._print(equation.lhs)} = {self._print(equation.rhs)}"

    def _print_Unequality(self, equation: sympy.Ne) -> str:  # noqa: N802
        return f"{self._print(equation.lhs)} != {self._print(equation.rhs)}"


def _name(dim: Dim) -> sympy.Symbol:
    """Return a symbol with the name of a dimension, in brackets if it is a sum or a quotient."""
    return sympy.Symbol(str(dim) if str(dim).isidentifier() else f"({dim})")


class _Calls(TorchFunctionMode):
    """Records the torch functions that raise errors or turn tensors into text."""

    def __init__(self, branches: Branches) -> None:
        self._branches = branches

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.__repr__, torch.Tensor.__format__):
            self._branches._refuse("turns a tensor into text, which no graph contains", _TEXT_REMEDY, (_TORCH,))
        try:
            return function(*args, **(kwargs or {}))
        except Exception as error:
            self._branches._refuse_error(error)
            raise


def _names_of(functions: Collection[Callable[[], bool]]) -> list[tuple[ModuleType, str, Callable[[], bool]]]:
    """Return the modules that have some functions, and their names there."""
    return [
        (module, name, value)
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if type(value) is FunctionType and value in functions
    ]


@contextmanager
def _replaced(owner: type | ModuleType, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a class or a module temporarily."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:  # inherited
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _place_of_decision() -> str | None:
    """Describe the line of the model's code that asked for a decision; None if torch itself asked.

    Python asks for the truth of a condition by a method of ``torch.SymBool``, and torch's own code by other ways, too.
    """
    frame, asked = sys._getframe(2), False
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SYMBOLIC):
        asked = frame.f_code.co_filename == torch.__file__
        frame = frame.f_back
    while frame.f_back is not None and _is_between(frame, ()):
        frame = frame.f_back
    return _line(frame) if asked and not frame.f_code.co_filename.startswith(_TORCH) else None


def _is_between(frame: FrameType, files: tuple[str, ...]) -> bool:
    """Check that a frame is code of the given files, of the standard library, or generated."""
    file = frame.f_code.co_filename
    return file.startswith((*files, "<")) or (file.startswith(_STANDARD) and not file.startswith(_INSTALLED))


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, in {frame.f_code.co_name}"
