"""Printing: everything that commands print, except progress bars, passes through :func:`echo`."""

from __future__ import annotations

from typing import Literal

import click

from zoo.terminal import one_line, printable

__all__ = ["echo", "message"]


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text on stdout, or on stderr, escaping control characters other than newlines and tabs."""
    click.echo(printable(str(text), "\n\t"), err=err, nl=nl)


def message(kind: Literal["error", "warning", "note"], text: object) -> None:
    """Print a message of one line on stderr."""
    echo(one_line(f"{kind}: {text}"), err=True)
