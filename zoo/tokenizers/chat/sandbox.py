"""The process that renders chat templates, in Jinja's sandbox and with the language that transformers gives to them.

A template comes with a checkpoint and may be hostile. The sandbox keeps it from files and from the internals of Python,
but limits neither time nor memory: ``'a' * 10**10`` is one operation. A process has limits that hold whatever the
template does. Counting its operations in this process instead takes more code, and has to foresee each operation
that is slow in C, such as ``strip`` with a long argument. The package minijinja counts them, but its language differs:
of 212 published templates, 10 fail or give another prompt where Jinja2 renders, and 12 render where Jinja2 fails.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from zoo import system

__all__ = ["serve"]

_MEMORY = 2**29
"""Bytes that the process may allocate after its start: prompts and their parts are copied several times."""
_LONGEST = 10**7
"""Maximum number of characters of a prompt."""
_LONGEST_ERROR = 1000
"""Number of characters kept of an error, which a template can make of any length."""


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


Render = Callable[[str, Mapping[str, Any] | None], str]
"""Returns the text of a template with its variables; without variables, compiles the template and returns no text."""


def serve(render: Render | None = None) -> None:
    """Answer requests, one JSON object a line, until stdin ends.

    A request has the ``source`` of a template, the ``seconds`` of processor time that it may take, and ``values``, the
    template's variables, or None to compile it only. An answer has the ``text``, or the ``error`` and whether it
    ``is_limit``. A request that takes longer ends the process.

    Args:
        render: renders a template; by default, :func:`_render`.
    """
    system.limit_memory(_MEMORY)
    answers = sys.stdout  # the pipe to the process that asks
    for line in sys.stdin.buffer:
        request = json.loads(line)
        system.limit_processor_time(request["seconds"])
        answers.write(json.dumps(_answer(render or _render, request["source"], request["values"])) + "\n")
        answers.flush()


def _answer(render: Render, source: str, values: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        text = render(source, values)
    except TemplateSyntaxError as error:
        return _refused(f"{error.message} in line {error.lineno}")
    except RecursionError:
        return _refused("nested too deeply")
    except MemoryError:
        _compile.cache_clear()  # a compiled template holds its constants
        return _refused(f"it takes more than {_MEMORY >> 20} MiB of memory", is_limit=True)
    except Exception as error:  # a template can raise any exception
        return _refused(str(error)[:_LONGEST_ERROR] or type(error).__name__)
    if len(text) > _LONGEST:
        return _refused(f"the prompt is longer than {_LONGEST:,} characters", is_limit=True)
    return {"text": text}


def _refused(error: str, is_limit: bool = False) -> dict[str, Any]:
    return {"error": error, "is_limit": is_limit}


def _render(source: str, values: Mapping[str, Any] | None) -> str:
    template = _compile(source)
    return "" if values is None else template.render(values)


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise, "strftime_now": _format_now, "namespace": _Namespace, "dict": _dict,
    }  # fmt: skip
    return environment.from_string(source)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _format_now(form: str) -> str:
    return datetime.now().strftime(form)


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
