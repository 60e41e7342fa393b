"""Jinja's sandbox with the language of chat templates."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["compile_template", "render"]

_MAX_STEPS = 10**7
"""Number of steps of all loops of a template together."""
_MAX_LENGTH = 10**7
"""Length of a repeated text or list, and number of digits of a power."""
_STEPS = "zoo:steps"
"""The variable that counts steps. No template can name it."""


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


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which products and powers have a limited size."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            length = left.bit_length() * right
        else:
            sizes = (len(item) if isinstance(item, str | list | tuple) else item for item in (left, right))
            one, other = (size if isinstance(size, int) else 0 for size in sizes)
            length = 0 if isinstance(left, int) and isinstance(right, int) else one * other
        if length > _MAX_LENGTH:
            raise SecurityError(f"a result is longer than {_MAX_LENGTH}")
        return super().call_binop(context, operator, left, right)


def compile_template(source: str, *, now: Callable[[str], str]) -> Template:
    """Compile a chat template, to be rendered by :func:`render`.

    Args:
        source: the program.
        now: the template's function ``strftime_now``, which formats the current time.
    """
    made = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters |= {"tojson": _to_json, _STEPS: _counted}
    made.globals |= {"raise_exception": _raise, "strftime_now": now, "namespace": _Namespace, "dict": _dict}
    program = made.parse(source)
    for loop in program.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, _STEPS, [], [], None, None)
    return made.from_string(program)


def render(template: Template, values: dict[str, Any]) -> str:
    """Render a template. Raises :class:`jinja2.exceptions.SecurityError` if its loops take too many steps."""
    return template.render({**values, _STEPS: itertools.count(1)})


@pass_context
def _counted(context: Context, items: Any) -> Iterator[Any]:
    """Yield the items of a loop, until all loops together have taken too many steps."""
    steps = context.resolve(_STEPS)
    for item in items:
        if next(steps) > _MAX_STEPS:
            raise SecurityError(f"its loops take more than {_MAX_STEPS} steps")
        yield item


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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
