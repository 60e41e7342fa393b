"""What commands share: results on stdout, as text or as versioned JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import click

from zoo.errors import UsageError

__all__ = ["COUNT", "SIZE", "bytes_text", "columns", "count_text", "emit_json", "json_option"]

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


_COMMANDS = re.compile("[\x7f-\x9f]")
"""Control characters that JSON may hold as they are, and a terminal obeys."""


def emit_json(command: str, data: dict[str, Any], *, version: int = 1) -> None:
    """Print a result whose ``schema`` names the command and the version of its form."""
    text = json.dumps({"schema": f"zoo.{command}/{version}", **data}, indent=2, ensure_ascii=False)
    click.echo(_COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def columns(rows: Iterable[Sequence[object]], *, right: Sequence[int] = ()) -> None:
    """Print rows in aligned columns, the last one unpadded; columns in ``right`` are flush right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        aligned = [
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(aligned).rstrip())


def count_text(count: float) -> str:
    """124439808 -> 124.4M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(int(count))


def bytes_text(count: float) -> str:
    """497759232 -> 497.8 MB."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{int(count)} B"


class _Count(click.ParamType[int]):
    """A number with an optional K, M, B or T: 124M."""

    name = "count"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(value[-1:].upper(), 1)
        try:
            count = int(float(value[:-1] if scale > 1 else value) * scale)
        except (ValueError, OverflowError):
            count = -1
        if count < self.least:
            option = f"--{str(param.name).replace('_', '-')}" if param else None
            raise UsageError(f"{value!r} is not a count", option, "write 124M or 1.5B")
        return count


COUNT, SIZE = _Count(0), _Count(1)
