"""Tests of a table's rows report all that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rows import each_row

CALLS: list[tuple[int, int]] = []


@each_row(("a", "b"), [(1, 1), (2, 3), (4, 4), (5, 6)])
def check(tmp_path: Path, a: int, b: int) -> None:
    CALLS.append((a, b))
    assert tmp_path.is_dir()
    assert a == b


def test_all_rows_are_called_and_those_that_fail_reported(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup, match="2 of 4 rows failed") as raised:
        check(tmp_path=tmp_path)
    assert CALLS == [(1, 1), (2, 3), (4, 4), (5, 6)]
    assert [error.__notes__ for error in raised.value.exceptions] == [["in the row (2, 3)"], ["in the row (5, 6)"]]


@each_row("value", [1, 2])
def test_fixtures_are_those_of_pytest(value: int, tmp_path: Path) -> None:
    assert value in (1, 2)
    assert tmp_path.is_dir()
