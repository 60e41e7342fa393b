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
    from zoo_runtime.cli.flags import InputFlags

__all__ = ["count_inputs", "parse_inputs", "read_inputs", "with_adapters"]


def parse_inputs(flags: InputFlags) -> list[Any]:
    """Return the inputs on the command line: texts or chats, pairs, and token ids."""
    from zoo_runtime import Pair

    texts: Sequence[Any] = flags.texts
    if flags.image is not None:
        if not texts or flags.input_file is not None:
            given = f"--image {flags.image}"
            raise UsageError("an image needs a text about it on the command line", given, "give the image and a TEXT")
        texts = [Pair(str(flags.image), text) for text in texts]
    elif flags.chat:
        from zoo_runtime.files.chats import parse_chat

        texts = [*map(parse_chat, texts)]
    return [*texts, *(Pair(*pair) for pair in flags.pairs), *map(_parse_id_list, flags.id_lists)]


def _parse_id_list(text: str) -> Any:
    """Parse ``1,2`` as token ids, and ``1,2/3,4`` as a pair of token id lists."""
    from zoo_runtime import Pair

    parts = text.split("/")
    return Pair(*map(parse_ids, parts)) if len(parts) == 2 else parse_ids(text)


def read_inputs(values: Sequence[Any], flags: InputFlags, *, keep: bool, resume: bool) -> Iterator[Answer]:
    """Return the inputs: those on the command line, else the rows of a file, else the lines of stdin.

    Args:
        values: the inputs on the command line.
        flags: where else inputs are, and their columns.
        keep: keep the columns of each row.
        resume: whether rows with earlier results are left out.
    """
    from zoo_runtime import Answer

    file = flags.input_file
    if values and file is not None:
        raise UsageError("inputs given both as texts and as a file", f"--input {file}", "leave out one of them")
    if values and flags.pair_column is not None:
        raise UsageError("no input file with columns", f"--pair-column {flags.pair_column}", "give --pair TEXT TEXT")
    if values:
        return iter(
            [
                Answer(number, value, id=number, columns={"text": value} if keep and isinstance(value, str) else {})
                for number, value in enumerate(values, 1)
            ]
        )
    from zoo_runtime.files.rows import read_rows

    listens = file is not None or (sys.stdin is not None and not sys.stdin.isatty())
    columns = (flags.main_column, flags.id_column, flags.pair_column)
    rows = read_rows(file or "-", *columns, keep=keep, resume=resume) if listens else iter(())
    first = next(rows, None)
    if first is None:
        raise UsageError("no inputs", file, "give a text, --input FILE, or --ids 1,2,3")
    rows = chain([first], rows)
    if flags.chat:
        from zoo_runtime.files.chats import as_chat

        return map(as_chat, rows)
    return rows


def with_adapters(inputs: Iterator[Answer], adapters: Sequence[str], count: int) -> Iterator[Answer]:
    """Give each input its adapter: all the only one, or each of the ``count`` on the command line its own."""
    if not adapters:
        return inputs
    if len(adapters) not in (1, count):
        raise UsageError(f"{len(adapters)} adapters for {count} inputs", "--adapter", "give one, or one each")
    return _adapted(inputs, adapters)


def _adapted(inputs: Iterator[Answer], adapters: Sequence[str]) -> Iterator[Answer]:
    for answer, name in zip(inputs, cycle(adapters), strict=False):
        answer.adapter = name
        yield answer


def count_inputs(values: Sequence[Any], file: str | None) -> int | None:
    """Number of inputs if progress is shown, else None. Also None for a stream."""
    from zoo_runtime.files.rows import count_rows

    if values or not is_shown():
        return len(values) or None
    return count_rows(file) if file is not None else None
