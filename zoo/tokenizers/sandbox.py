"""Jinja's sandbox with the language of chat templates, and limits on what a template may take.

A template cannot run for long, because loops, calls and filters count as steps, more of them for longer texts. No value
is longer than :data:`MAX_LENGTH`: sizes are checked before values are made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, cast

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from zoo.tokenizers.sizes import FILTERS, MAX_LENGTH, METHODS, formatted, measure

__all__ = ["compile_template", "render"]

_MAX_STEPS = 10**7
"""Number of steps of a template."""
_LOOP = 5
"""Number of steps of an item of a loop."""
_CALL = 50
"""Number of steps of a call or a filter."""
_READ = 50
"""Number of characters that are read or made in a step."""
_MAX_BITS = 10**4
"""Size of an integer."""
_MAX_WIDTH = 64
"""Length of an indent and of a separator in JSON."""
_STEPS, _COUNTED, _JOINED, _MEASURED = "zoo:steps", "zoo:counted", "zoo:joined", "zoo:measured"
"""A variable that counts steps, and filters. No template can name them."""
_LAZY = {"default", "d", "first", "last", "length", "count"}
"""Filters that take the same time for values of every size."""
_COMPARING = (
    "in", "eq", "equalto", "==", "ne", "!=",
    "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">=",
)  # fmt: skip
"""Tests that compare values."""


class _Steps:
    """The steps that a template has taken."""

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken = 0

    def take(self, steps: int) -> None:
        self.taken += steps
        if self.taken > _MAX_STEPS:
            raise SecurityError(f"it takes more than {_MAX_STEPS} steps")

    def use(self, size: int) -> None:
        """Count an operation that reads or makes a value of a size."""
        if size > MAX_LENGTH:
            raise SecurityError(f"a result is longer than {MAX_LENGTH}")
        self.take(_CALL + max(size, 0) // _READ)


def _steps(context: Context) -> _Steps:
    steps: _Steps = context.parent[_STEPS]
    return steps


class _Generation(Extension):
    """``{% generation %}``, which marks the assistant's text for training, has no effect on a prompt."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """A namespace without the names that Python reserves."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a template cannot set {name}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:  # without the values, of which one may be long
        return "<Namespace>"


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which operations and calls are counted, and their results have a limited size."""

    intercepted_binops = frozenset(("+", "-", "*", "**", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            one, other = left.bit_length(), right.bit_length()
            if {"*": one + other, "**": one * min(right, _MAX_BITS)}.get(operator, 0) > _MAX_BITS:
                raise SecurityError(f"a number has more than {_MAX_BITS} bits")
        elif type(left) is type(right) is str and operator == "+":
            _steps(context).use(len(left) + len(right))
        elif not isinstance(left, float) and not isinstance(right, float):
            _steps(context).use(_size_of(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function, a macro or a method. Jinja adds keywords that begin with ``_``."""
        method = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, int | float | bytes) or (isinstance(owner, str) and name in ("encode", "translate")):
            raise SecurityError(f"a template cannot call {name}")
        size = sum(map(measure, args)) + sum(measure(kwargs[key]) for key in kwargs if key[0] != "_")
        if isinstance(owner, str):
            args = _listed(args) if name == "join" else args
            given = {key: value for key, value in kwargs.items() if key[0] != "_"}
            size += len(owner) + (METHODS[name](owner, *args, **given) if name in METHODS else 0)
        steps = _steps(__context)
        steps.use(size)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str | list | tuple | dict):
            steps.use(measure(result))
        return result


def _listed(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(list(value) if isinstance(value, Iterator) else value for value in values)


def _size_of(operator: str, left: Any, right: Any) -> int:
    """Return the size of the result of an operator between values that are not both numbers."""
    if operator == "%":
        return formatted(left, "%", right) if isinstance(left, str) else 0
    if operator in "+-":
        return measure(left) + measure(right)
    repeated, times = (left, right) if isinstance(right, int) else (right, left)
    return measure(repeated) * times if isinstance(times, int) else 0


class _Counted(NodeTransformer):
    """Has loops, concatenations, comparisons, slices and new containers counted by filters."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        text = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
        node.iter = _filtered(node.iter, _COUNTED, nodes.Const(_LOOP + text // 10))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load", lineno=node.lineno), _JOINED)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for part in node.ops:
            if not _is_constant(part.expr):
                part.expr = _filtered(part.expr, _MEASURED)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, _MEASURED) if isinstance(node.arg, nodes.Slice) else node

    def _made(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return node if _is_constant(node) else _filtered(node, _MEASURED)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._made(node) if node.ctx == "load" else node

    visit_List = visit_Dict = _made  # noqa: N815


def _filtered(node: nodes.Node, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, list(arguments), [], None, None, lineno=node.lineno)


def _is_constant(node: nodes.Node) -> bool:
    made = isinstance(node, nodes.List | nodes.Tuple | nodes.Dict | nodes.Pair)
    return isinstance(node, nodes.Const) or (made and all(map(_is_constant, node.iter_child_nodes())))


def compile_template(source: str, *, now: Callable[[str], str]) -> Template:
    """Compile a chat template, to be rendered by :func:`render`.

    Args:
        source: the program.
        now: the template's function ``strftime_now``, which formats the current time.
    """
    made = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_written)
    made.filters["tojson"] = _to_json
    filters: dict[str, Any] = made.filters
    tests: dict[str, Any] = made.tests
    filters |= {name: _bounded(name, filters[name]) for name in filters.keys() - _LAZY}
    tests |= {name: _bounded(name, tests[name]) for name in _COMPARING}
    made.filters |= {_COUNTED: _counted, _JOINED: _joined, _MEASURED: _measured}
    made.globals |= {"raise_exception": _raise, "strftime_now": now, "namespace": _Namespace, "dict": _dict}
    del made.globals["lipsum"]  # writes any amount of text
    return made.from_string(_Counted().visit(made.parse(source)))


def render(template: Template, values: dict[str, Any]) -> str:
    """Render a template. Raises :class:`jinja2.exceptions.SecurityError` if it takes too many steps."""
    return template.render({**values, _STEPS: _Steps()})


@pass_context
def _written(context: Context, value: Any) -> Any:
    """Count a value that is written: ten characters are one step."""
    _steps(context).take(1 + (len(value) if type(value) is str else measure(value)) // 10)
    return value


@pass_context
def _counted(context: Context, items: Any, weight: int) -> Iterator[Any]:
    """Yield the items of a loop, each of which counts as ``weight`` steps."""
    steps = _steps(context)
    for item in items:
        steps.take(weight)
        yield item


@pass_context
def _joined(context: Context, items: tuple[Any, ...]) -> str:
    _steps(context).use(measure(items))
    return "".join(map(str, items))


@pass_context
def _measured(context: Context, value: Any) -> Any:
    """Count a value that is compared, a slice, or a new list or dictionary."""
    _steps(context).take(1 + measure(value) // _READ)
    return value


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or a test that counts steps and checks the size of its result."""
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @pass_context
    def call(context: Context, *values: Any, **named: Any) -> Any:
        values = _listed(values) if name == "join" else values
        size = sum(map(measure, values)) + sum(map(measure, named.values()))
        size += FILTERS[name](*values, **named) if name in FILTERS else 0
        steps = _steps(context)
        steps.use(size)
        given = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        result = function(*([given[passed]] if passed else []), *values, **named)
        if isinstance(result, str | list | tuple | dict):
            steps.use(measure(result))
        return result

    return call


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _dict(*args: Any, **values: Any) -> dict[Any, Any]:
    """Return a dictionary; the class itself has methods that a template does not need."""
    return dict(*args, **values)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Format JSON without Jinja's escapes for HTML."""
    widths = [len(indent) if isinstance(indent, str) else indent or 0, *map(len, separators or ())]
    if max(widths) > _MAX_WIDTH:
        raise SecurityError(f"an indent or a separator is longer than {_MAX_WIDTH}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    parts, length = [], 0
    for part in encoder.iterencode(value):
        parts.append(part)
        length += len(part)
        if length > MAX_LENGTH:
            raise SecurityError(f"a result is longer than {MAX_LENGTH}")
    return "".join(parts)
