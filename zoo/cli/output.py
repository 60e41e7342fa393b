"""Printing: everything that commands print, except progress bars, passes through :func:`echo`.

On a terminal, verdicts and the kinds of messages have colours, unless ``NO_COLOR`` is set or ``TERM`` is ``dumb``.
``FORCE_COLOR`` asks for colours elsewhere too.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TextIO

import click

from zoo.terminal import one_line, printable

__all__ = ["VERDICTS", "above_bar", "echo", "has_colour", "is_terminal", "message", "painted"]

VERDICTS: Mapping[str, str] = {
    "NOT VERIFIED": "red",
    "not verified": "red",
    "verified": "green",
    "passed": "green",
    "expected failure": "yellow",
    "failed": "red",
    "skipped": "yellow",
    "diverges": "red",
    "<- begins here": "red",
    "loads": "green",
    "right": "green",
    "wrong": "red",
}
"""Verdicts in results, and their colours."""
_writers: list[Callable[[str], None]] = []
"""Print a line on stderr above a progress bar, while there is one."""
_KINDS = {"error": "red", "warning": "yellow", "note": "cyan"}


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal that understands control sequences."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def has_colour(stream: TextIO | None) -> bool:
    """Return whether text on a stream has colours: see https://no-color.org and https://force-color.org."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or is_terminal(stream)


def painted(text: str, words: Collection[str]) -> str:
    """Return text with the colours of the verdicts among ``words``, each where it occurs first."""
    found = [word for word in VERDICTS if word in words]
    if not found:
        return text
    pattern = "|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in found)
    return re.sub(pattern, lambda match: click.style(match[0], fg=VERDICTS[match[0]]), text, count=1)


def echo(text: object = "", *, err: bool = False, nl: bool = True, verdicts: Collection[str] = ()) -> None:
    """Print text on stdout, or on stderr, escaping control characters other than newlines and tabs.

    Args:
        text: what to print.
        err: print on stderr.
        nl: end the line.
        verdicts: words of ``VERDICTS`` that have their colours, where the stream has colours.
    """
    coloured = bool(verdicts) and has_colour(sys.stderr if err else sys.stdout)
    line = printable(str(text), "\n\t")
    _write(painted(line, verdicts) if coloured else line, err, nl, coloured)


def message(kind: Literal["error", "warning", "note"], text: object) -> None:
    """Print a message of one line on stderr."""
    line = one_line(f"{kind}: {text}")
    coloured = has_colour(sys.stderr)
    if coloured:
        line = click.style(f"{kind}:", fg=_KINDS[kind], bold=True) + line[len(kind) + 1 :]
    _write(line, True, True, coloured)


@contextmanager
def above_bar(write: Callable[[str], None]) -> Iterator[None]:
    """Pass what is printed on stderr to a function meanwhile, which keeps it apart from a progress bar."""
    _writers.append(write)
    try:
        yield
    finally:
        _writers.remove(write)


def _write(text: str, err: bool, nl: bool, coloured: bool) -> None:
    if err and nl and _writers:
        _writers[-1](text)
    else:
        click.echo(text, err=err, nl=nl, color=coloured or None)
