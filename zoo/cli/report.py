"""Results of commands on stdout, as text or as versioned JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from zoo.artifact.provenance import fold_names
from zoo.cli.options import is_quiet
from zoo.cli.output import echo
from zoo.terminal import one_line, printable_json

__all__ = ["bytes_text", "columns", "count_text", "emit_json", "say", "say_head"]


_CELL = 1000
"""Maximum number of characters of a value in a table."""


def say(text: object) -> None:
    """Print a line of the result, unless the command was given ``--quiet``."""
    if not is_quiet():
        echo(text)


def say_head(new: Sequence[str], dropped: Sequence[str]) -> None:
    """Print the tensors that another head added to a model and removed from it."""
    for what, names in (("new", new), ("dropped", dropped)):
        if names:
            say(f"{what}: {', '.join(fold_names(names))}")


def emit_json(command: str, data: dict[str, Any], *, version: int = 1) -> None:
    """Print a result as JSON. Its ``schema`` names the command and the schema's version."""
    text = json.dumps({"schema": f"zoo.{command}/{version}", **data}, indent=2, ensure_ascii=False)
    echo(printable_json(text))


def columns(rows: Iterable[Sequence[object]], *, right: Sequence[int] = ()) -> None:
    """Print rows in columns, left-aligned except for the columns in ``right``."""
    cells = [[one_line(cell, _CELL) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        aligned = [
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        echo("  ".join(aligned).rstrip())


def count_text(count: float) -> str:
    """Format a count: 124439808 -> 124.4M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(int(count))


def bytes_text(count: float) -> str:
    """Format a size in bytes: 497759232 -> 497.8 MB."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{int(count)} B"
