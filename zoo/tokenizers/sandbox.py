"""Jinja's sandbox with the language of chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["environment"]


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


def environment(*, now: Callable[[str], str]) -> ImmutableSandboxedEnvironment:
    """Return an environment for chat templates.

    Args:
        now: the template's function ``strftime_now``, which formats the current time.
    """
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise, "strftime_now": now, "namespace": _Namespace, "dict": _dict}
    return made


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
