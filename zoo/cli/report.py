"""Results of commands on stdout, as text or as versioned JSON."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from zoo.artifact.provenance import fold_names
from zoo.cli.options import is_quiet
from zoo.cli.output import echo, is_terminal
from zoo.terminal import one_line, printable_json

__all__ = ["bytes_text", "columns", "count_text", "emit_json", "say", "say_head"]


_CELL = 1000
"""Maximum number of characters of a value in a table."""
_NARROW = 12
"""Width to which a column may be shortened."""
_GAP = "  "


def say(text: object, *, verdicts: Collection[str] = ()) -> None:
    """Print a line of the result, unless the command was given ``--quiet``."""
    if not is_quiet():
        echo(text, verdicts=verdicts)


def say_head(new: Sequence[str], dropped: Sequence[str]) -> None:
    """Print the tensors that another head added to a model and removed from it."""
    for what, names in (("new", new), ("dropped", dropped)):
        if names:
            say(f"{what}: {', '.join(fold_names(names))}")


def emit_json(command: str, data: dict[str, Any], *, version: int = 1) -> None:
    """Print a result as JSON. Its ``schema`` names the command and the schema's version."""
    text = json.dumps({"schema": f"zoo.{command}/{version}", **data}, indent=2, ensure_ascii=False)
    echo(printable_json(text))


def columns(
    rows: Iterable[Sequence[object]],
    *,
    right: Sequence[int] = (),
    middle: Sequence[int] = (),
    verdicts: Collection[str] = (),
) -> None:
    """Print rows in columns.

    On a terminal, the widest columns are shortened until the rows fit its width. Elsewhere, rows are whole.

    Args:
        rows: the rows, all with as many cells.
        right: the columns that are aligned on the right, and not shortened.
        middle: the columns that are shortened in the middle, where names may begin alike.
        verdicts: cells that have colours: see :func:`zoo.cli.output.echo`.
    """
    cells = [[one_line(cell, _CELL) for cell in row] for row in rows]
    fits = is_terminal(sys.stdout)
    width_of = _width if fits else len
    widths = [max(map(width_of, column)) for column in zip(*cells, strict=True)]
    if fits:
        widths = _fitting(widths, right, shutil.get_terminal_size().columns)
        cuts = [(width, place in middle) for place, width in enumerate(widths)]
        cells = [[_shortened(cell, *cut) for cell, cut in zip(row, cuts, strict=True)] for row in cells]
    for row in cells:
        padded = [(cell, " " * (width - width_of(cell))) for cell, width in zip(row, widths, strict=True)]
        aligned = [pad + cell if place in right else cell + pad for place, (cell, pad) in enumerate(padded)]
        echo(_GAP.join(aligned).rstrip(), verdicts=[cell for cell in row if cell in verdicts])


def _fitting(widths: Sequence[int], right: Sequence[int], limit: int) -> list[int]:
    """Return widths of which the largest are reduced until all fit into a line, if that can be done."""
    result = list(widths)
    excess = sum(result) + len(_GAP) * (len(result) - 1) - limit
    places = [place for place, width in enumerate(result) if place not in right and width > _NARROW]
    while excess > 0 and places:
        widest = max(places, key=lambda place: result[place])
        if result[widest] <= _NARROW:
            break
        below = max((result[place] for place in places if result[place] < result[widest]), default=_NARROW)
        cut = min(excess, result[widest] - max(below, _NARROW))
        result[widest] -= max(cut, 1)
        excess -= max(cut, 1)
    return result


def _width(text: str) -> int:
    """Return the number of columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _shortened(text: str, width: int, middle: bool) -> str:
    """Return text that ends with an ellipsis, or has one in its ``middle``, if it is wider than ``width``."""
    if _width(text) <= width:
        return text
    from rich.cells import set_cell_size

    mark = "\N{HORIZONTAL ELLIPSIS}" if "utf" in (sys.stdout.encoding or "").lower() else "..."
    left = width - len(mark)
    last = left * 2 // 3 if middle else 0  # long names differ at the end more often than at the beginning
    end = set_cell_size(text[::-1], last).rstrip()[::-1]
    return set_cell_size(text, left - last).rstrip() + mark + end


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
