"""Uses of sizes by a model's code, recorded where they happen while it is traced.

Decisions on sizes leave guards. Other uses do not: as text, as a key, or in code that raises an error only while it is
traced, which the model catches. Where the model asks torch whether it is traced, the answer is no, as in the calls of
its users, so that the graph contains the branch that these take.
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
from types import FrameType, FunctionType, ModuleType
from typing import Any

import sympy
import torch
from torch._dynamo import external_utils
from torch._dynamo.variables.torch import tracing_state_functions
from torch.fx import _symbolic_trace
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from zoo.errors import ParityError
from zoo_export.trace import experts, recurrent, sinks

__all__ = ["NUMBER_REMEDY", "Branch", "SizeUses"]

_TORCH = f"{Path(torch.__file__).parent}/"
_SYMBOLIC = (torch.__file__, f"{_TORCH}fx/experimental/", __file__)
"""Files of torch that implement symbolic sizes, and so stand between a decision and the code that asks for it."""
_COUNT = "promote"
"""Function of torch that turns a condition into the number 0 or 1, for arithmetic."""
_MODES = (__file__, experts.__file__, recurrent.__file__, sinks.__file__)
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

NUMBER_REMEDY = "keep the size, with //, %, ** 0.5, math.floor, math.ceil or torch.arange, or declare it"
_TORCH_REMEDY = "; if torch does it, as in max_pool1d, call another function, such as max_pool2d"
_FIT_REMEDY = "let the tensors of this line fit any size, or declare it"
_BRANCH_REMEDY = "select with torch.where, or declare the size"
_TEXT_REMEDY = "compare the size itself, or leave the text out of forward"
_KEY_REMEDY = "compare sizes with =="
_ERROR_REMEDY = "do not catch errors of torch in forward"


@dataclass(frozen=True)
class Branch:
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
        return _BRANCH_REMEDY if isinstance(self.outcome, bool) else NUMBER_REMEDY


class SizeUses:
    """Decisions on sizes, and other uses of them, by the code of a model while it was traced.

    Args:
        distribution: name of the distribution that the model belongs to. Other libraries may format sizes and catch
            errors of tracing, as einops does.
    """

    def __init__(self, distribution: str) -> None:
        self._distribution = distribution
        self.branches: list[Branch] = []
        self.fixed: list[tuple[ParityError, bool]] = []
        """Errors about sizes of which the tracer assumes that they are always those of the trace, and whether an
        equation that torch asked for is the cause."""
        self._fixed_symbols: set[sympy.Symbol] = set()
        self.refused: list[ParityError] = []
        """Errors about uses that no graph can contain."""
        self.environment: ShapeEnv | None = None
        """The environment of torch that made the last decision."""

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
            self.environment = environment
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
                self._refuse(f"uses int.{name}, which traced sizes lack", NUMBER_REMEDY)
                raise (TypeError if name.startswith("__") else AttributeError)(f"traced sizes have no {name}")

            return property(get)

        def answer(function: Callable[[], bool]) -> Callable[[], bool]:
            @torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
            def answered() -> bool:
                return function() if self._place(()) is None else False

            return answered

        tracing_state_functions()  # the compiler looks them up once in a process, and must not find the answers
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
            stack.callback(_restore, {value: function for function, value in answers.items()})
            stack.enter_context(_Calls(self))
            yield

    def _decide(self, condition: sympy.Basic, outcome: sympy.Basic) -> None:
        if not isinstance(outcome, sympy.Number):
            result: float = bool(outcome)
        else:
            result = int(outcome) if outcome.is_integer else float(outcome)
        if (number := self._fixed_number(condition, outcome)) is not None:
            equation, by_torch = isinstance(condition, sympy.Eq), _place_of_decision() is None
            if (place := self._place((_TORCH,))) is not None:
                error = _fixed_error(number, place, equation=equation, by_torch=by_torch)
                self.fixed.append((error, equation and by_torch))
        if (place := _place_of_decision()) is not None:
            self.branches.append(Branch(condition, result, place))

    def _fixed_number(self, condition: sympy.Basic, outcome: sympy.Basic) -> int | None:
        """Return the number for which the tracer takes a size from this decision on; None if it does not."""
        if not (isinstance(outcome, sympy.Number) or (isinstance(condition, sympy.Eq) and bool(outcome))):
            return None
        for symbol in condition.free_symbols - self._fixed_symbols:
            number = None if self.environment is None else self.environment.replace(symbol)
            if number is not None and number.is_Integer:
                self._fixed_symbols.add(symbol)
                return int(number)
        return None

    def _refuse(self, action: str, remedy: str, between: tuple[str, ...] = _SYMBOLIC) -> None:
        """Record a use of a size that no graph can contain, unless torch, zoo or a library asked for it."""
        place = self._place(between)
        if place is not None:
            self.refused.append(ParityError(f"the model {action}", place, remedy))

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

    def conditions(self) -> Iterator[tuple[Branch, sympy.Basic]]:
        """Yield each decision with its condition in terms of the sizes of inputs."""
        for branch in dict.fromkeys(self.branches):
            assert self.environment is not None
            yield branch, self.environment.replace(branch.condition)


class _Calls(TorchFunctionMode):
    """Records the torch functions that raise errors or turn tensors into text."""

    def __init__(self, uses: SizeUses) -> None:
        self._uses = uses

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.__repr__, torch.Tensor.__format__):
            self._uses._refuse("turns a tensor into text, which no graph contains", _TEXT_REMEDY, (_TORCH,))
        try:
            return function(*args, **(kwargs or {}))
        except Exception as error:
            self._uses._refuse_error(error)
            raise


def _names_of(functions: Collection[Callable[[], bool]]) -> list[tuple[ModuleType, str, Callable[[], bool]]]:
    """Return the modules that have some functions, and their names there."""
    return [
        (module, name, value)
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if type(value) is FunctionType and value in functions
    ]


def _restore(functions: Mapping[Callable[[], bool], Callable[[], bool]]) -> None:
    """Replace functions, given those to put in their place, in all modules: also in those imported during a trace."""
    for module, name, value in _names_of(functions):
        setattr(module, name, functions[value])


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
    Sums and products of conditions ask for it where they make numbers of them.
    """
    frame, asked, counts = sys._getframe(2), False, False
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SYMBOLIC):
        counts = counts or frame.f_code.co_name == _COUNT
        asked = counts or frame.f_code.co_filename == torch.__file__
        frame = frame.f_back
    while frame.f_back is not None and _is_between(frame, ()):
        frame = frame.f_back
    return _line(frame) if asked and not frame.f_code.co_filename.startswith(_TORCH) else None


def _fixed_error(number: int, place: str, *, equation: bool, by_torch: bool) -> ParityError:
    """Return the error about a size that a line of the model's code fixes, itself or by a function of torch."""
    if equation:
        remedy = _FIT_REMEDY if by_torch else _BRANCH_REMEDY
        return ParityError(f"the model assumes that a size that is declared free is {number}", place, remedy)
    problem = f"the model turns a size that is declared free into the number {number}"
    return ParityError(problem, place, f"{NUMBER_REMEDY}{_TORCH_REMEDY if by_torch else ''}")


def _is_between(frame: FrameType, files: tuple[str, ...]) -> bool:
    """Check that a frame is code of the given files, of the standard library, or generated."""
    file = frame.f_code.co_filename
    return file.startswith((*files, "<")) or (file.startswith(_STANDARD) and not file.startswith(_INSTALLED))


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, in {frame.f_code.co_name}"
