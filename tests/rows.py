"""Tests of a table's rows."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["each_row"]

Test = Callable[..., None]


def each_row(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Make one test of a function and a table: it calls the function with each row, and reports all rows that fail.

    Has the arguments of ``pytest.mark.parametrize``. For functions of a few milliseconds that leave nothing behind:
    setting up a test of its own for each row would take longer than running it.
    """
    arguments = (names,) if isinstance(names, str) else names
    table = [row if isinstance(names, tuple) else (row,) for row in rows]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            errors = []
            for row in table:
                try:
                    test(**fixtures, **dict(zip(arguments, row, strict=True)))
                except Exception as error:
                    error.add_note(f"in the row {row!r:.500}")
                    errors.append(error)
            if errors:
                raise ExceptionGroup(f"{len(errors)} of {len(table)} rows failed", errors)

        signature = inspect.signature(test)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorate
