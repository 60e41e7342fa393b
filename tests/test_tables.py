"""Tables in files: parquet files whose footer does not fit their columns are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zoo.errors import ArtifactError
from zoo.training.data.rows import read_rows as training_rows
from zoo_runtime.rows import count_rows, read_rows
from zoo_runtime.vectors import search_vectors

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = 1000
WRITTEN, CHANGED = b"\xd0\x0f", b"\xce\x0f"
"""1000 and 999 in the footer: zigzag numbers of seven bits per byte, the lowest first."""


def write(columns: dict[str, Any], number: int) -> str:
    """Write a parquet file, and change one of the numbers in its footer that are 1000."""
    pq.write_table(pa.table(columns), "rows.parquet", write_statistics=False)
    data = Path("rows.parquet").read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    place = [match.start() for match in re.finditer(re.escape(WRITTEN), data) if match.start() > start][number]
    Path("rows.parquet").write_bytes(data[:place] + CHANGED + data[place + len(CHANGED) :])
    return "rows.parquet"


@pytest.mark.parametrize("number", [0, 1, -1], ids=["rows of the file", "values of the column", "rows of the group"])
@pytest.mark.parametrize(
    "read",
    [
        lambda path: list(read_rows(path, "text")),
        lambda path: list(training_rows(Path(path), {"text": "text"}, {})),
        count_rows,
    ],
    ids=["inputs", "data", "count"],
)
def test_footer_of_fewer_rows(
    read: Callable[[str], object], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write({"text": [f"row {row}" for row in range(ROWS)]}, number)
    with pytest.raises(ArtifactError, match=r"rows.*rows\.parquet"):
        read(path)


def test_footer_of_fewer_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of a column of lists exceed those of its rows."""
    monkeypatch.chdir(tmp_path)
    path = write({"embedding": pa.array([[1.0, 2.0]] * ROWS, pa.list_(pa.float32(), 2))}, -1)
    with pytest.raises(ArtifactError, match=r"rows.*rows\.parquet"):
        search_vectors(path, np.ones(2))


def replace_footer(before: bytes, after: bytes) -> None:
    """Change the first occurrence of some bytes in the footer of ``rows.parquet``."""
    data = Path("rows.parquet").read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    assert before in data[start:-8]
    footer = data[start:-8].replace(before, after, 1)
    Path("rows.parquet").write_bytes(data[:start] + footer + len(footer).to_bytes(4, "little") + data[-4:])


@pytest.mark.parametrize("group", [0, 1])
def test_histogram_of_another_size(group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow aborts the process when it is asked for the metadata of such a column."""
    monkeypatch.chdir(tmp_path)
    lists = [[1.0, 2.0]] * 2 + [[1.0, 2.0]] * 3
    pq.write_table(pa.table({"text": ["a"] * 5, "embedding": lists}), "rows.parquet", row_group_size=3 - group)
    numbers = 4 if group else 6  # of the first row group, each as a zigzag number
    replace_footer(bytes([0x46, 0, 0, 0, 2 * numbers]), bytes([0x36, 0, 0, 2 * numbers]))
    for read in (
        lambda: search_vectors("rows.parquet", np.ones(2)),
        lambda: list(read_rows("rows.parquet", "text")),
        lambda: list(training_rows(Path("rows.parquet"), {"text": "text"}, {})),
    ):
        with pytest.raises(ArtifactError, match=r"histogram size mismatch.*rows\.parquet"):
            read()


def test_column_whose_path_is_not_unicode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of columns are those of the schema."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"lists": [[1.0, 2.0], [0.0, 1.0]]}), "rows.parquet", store_schema=False)
    data = Path("rows.parquet").read_bytes()
    before, _, after = data.rpartition(b"lists")  # in the metadata of the column
    Path("rows.parquet").write_bytes(before + b"list\xff" + after)
    assert [match.row for match in search_vectors("rows.parquet", np.array([0.0, 1.0]), column="lists")] == [2, 1]


def test_footer_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lists: list[list[float] | None] = [[], None, [1.0, 2.0], [3.0]]
    columns = {"text": ["a", "b", "c", "d"], "more": [{"x": [1]}] * 4, "null": [None] * 4, "lists": lists}
    for options in ({}, {"row_group_size": 3}, {"data_page_version": "2.0", "use_dictionary": False}):
        pq.write_table(pa.table(columns), "rows.parquet", **options)
        assert [row.input for row in read_rows("rows.parquet", "text", keep=True)] == ["a", "b", "c", "d"]
        assert len(list(training_rows(Path("rows.parquet"), {"text": "text"}, {}))) == 4
        assert count_rows("rows.parquet") == 4
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), "rows.parquet")
    assert list(read_rows("rows.parquet", "text")) == []


def test_long_names_of_columns_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"%s": 1}' % ("y" * 100_000))
    (row,) = read_rows(str(path), "text")
    assert len(str(row.error).replace(str(path), "")) < 200
