"""Inputs of ``zoo run``: from the command line, a file or stdin."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import chain, cycle
from typing import TYPE_CHECKING, Any

from zoo.cli.options import parse_ids
from zoo.cli.progress import is_shown
from zoo.errors import UsageError

if TYPE_CHECKING:
    from zoo_runtime import Answer

__all__ = ["adapted", "count_inputs", "parse_input", "read_inputs"]


def parse_input(text: str) -> Any:
    """Parse ``1,2`` as token ids, and ``1,2/3,4`` as a pair of token id lists."""
    from zoo_runtime import Pair

    parts = text.split("/")
    return Pair(*map(parse_ids, parts)) if len(parts) == 2 else parse_ids(text)


def read_inputs(
    given: Sequence[Any],
    file: str | None,
    column: str,
    id_column: str | None,
    pair_column: str | None,
    *,
    keep: bool = False,
) -> Iterator[Answer]:
    """Return the inputs: those given on the command line, else the rows of a file, else the lines of stdin."""
    from zoo_runtime import Answer
    from zoo_runtime.files.rows import read_rows

    if given and file is not None:
        raise UsageError("inputs given both as texts and as a file", f"--input {file}", "leave out one of them")
    if given and pair_column is not None:
        raise UsageError("no input file with columns", f"--pair-column {pair_column}", "give --pair TEXT TEXT")
    if given:
        return iter(
            [
                Answer(number, value, id=number, columns={"text": value} if keep and isinstance(value, str) else {})
                for number, value in enumerate(given, 1)
            ]
        )
    listens = file is not None or (sys.stdin is not None and not sys.stdin.isatty())
    rows = read_rows(file or "-", column, id_column, pair_column, keep=keep) if listens else iter(())
    first = next(rows, None)
    if first is None:
        raise UsageError("no inputs", file, "give a text, --input FILE, or --ids 1,2,3")
    return chain([first], rows)


def adapted(inputs: Iterator[Answer], adapters: Sequence[str]) -> Iterator[Answer]:
    """Give each input its adapter: all the only one, or each its own."""
    for answer, name in zip(inputs, cycle(adapters), strict=False):
        answer.adapter = name
        yield answer


def count_inputs(given: Sequence[Any], file: str | None) -> int | None:
    """Number of inputs if progress is shown, else None. Also None for a stream."""
    from zoo_runtime.files.rows import count_rows

    if given or not is_shown():
        return len(given) or None
    return count_rows(file) if file is not None else None
