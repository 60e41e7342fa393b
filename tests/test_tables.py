"""Tables in files: all formats and readers agree, and files that contradict themselves are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zoo.errors import ArtifactError
from zoo.training.data.rows import RowError
from zoo.training.data.rows import read_rows as training_rows
from zoo_runtime.files.rows import count_rows, read_rows
from zoo_runtime.files.vector_search import search_vectors

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


# The same rows in each format, read by training and by inference.

WRITERS: dict[str, Callable[[pd.DataFrame, Path], Any]] = {
    ".jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True, force_ascii=False),
    ".ndjson": lambda frame, path: frame.to_json(path, orient="records", lines=True),
    ".json": lambda frame, path: frame.to_json(path, orient="records", indent=2),
    ".csv": lambda frame, path: frame.to_csv(path, index=False),
    ".tsv": lambda frame, path: frame.to_csv(path, index=False, sep="\t"),
    ".parquet": lambda frame, path: frame.to_parquet(path),
}
"""How pandas writes a table; records of JSON have no comment."""
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=8)
NAMES = st.lists(st.sampled_from(["Text", "TEXT", "label", "a b", "é", "n.m"]), unique=True, max_size=4)


def both(path: Path, columns: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows as training reads them, and as ``zoo run`` does."""
    trained: list[Any] = list(training_rows(path, {name: name for name in columns}, {}))
    given = list(read_rows(str(path), columns[0], keep=True))
    assert not [row for row in trained if isinstance(row, RowError)] + [row.error for row in given if row.error]
    assert [row.input for row in given] == [row.columns[columns[0]] for row in given]
    assert count_rows(str(path)) == len(given)
    return [dict(row) for row in trained], [row.columns for row in given]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=NAMES, rows=st.integers(1, 5), data=st.data())
def test_rows_do_not_depend_on_the_format_or_the_reader(
    names: list[str], rows: int, data: st.DataObject, tmp_path: Path
) -> None:
    """Names that differ in case are different columns."""
    columns = ["text", *names]
    table = [{name: data.draw(TEXT) for name in columns} for _ in range(rows)]
    frame = pd.DataFrame(table)
    for suffix, write in WRITERS.items():
        path = tmp_path / f"rows{suffix}"
        write(frame, path)
        trained, given = both(path, columns)
        assert trained == given == table, suffix


def twice(path: Path, rows: Sequence[Mapping[str, str]], name: str) -> None:
    """Write rows with a column, or a key, that occurs twice. Its values differ."""
    columns = [*rows[0], name]
    table = [[*row.values(), "other"] for row in rows]
    objects = [
        "{"
        + ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in zip(columns, row, strict=True))
        + "}"
        for row in table
    ]
    match path.suffix:
        case ".jsonl" | ".ndjson":
            path.write_text("\n".join(objects))
        case ".json":
            path.write_text(f"[{', '.join(objects)}]")
        case ".parquet":
            pq.write_table(pa.table([pa.array(values) for values in zip(*table, strict=True)], names=columns), path)
        case _:
            pd.DataFrame(table, columns=columns).to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=NAMES, rows=st.integers(1, 3), data=st.data())
def test_a_column_that_occurs_twice_is_refused(
    names: list[str], rows: int, data: st.DataObject, tmp_path: Path
) -> None:
    """By each reader, whether or not it needs the column."""
    columns = ["text", *names]
    name = data.draw(st.sampled_from(columns))
    table = [dict.fromkeys(columns, "a") for _ in range(rows)]
    for suffix in WRITERS:
        path = tmp_path / f"rows{suffix}"
        twice(path, table, name)
        what = f"{name!r} occurs twice"
        if suffix in (".jsonl", ".ndjson", ".json"):  # each row may have other keys
            trained: list[Any] = list(training_rows(path, {"text": "text"}, {}))
            assert all(isinstance(row, RowError) and what in row.what for row in trained)
            given = list(read_rows(str(path), "text"))
            assert all(what in str(row.error) for row in given)
            assert len(trained) == len(given) == rows
            continue
        with pytest.raises(ArtifactError, match=re.escape(f"the column {what}: {path}")):
            list(training_rows(path, {"text": "text"}, {}))
        with pytest.raises(ArtifactError, match=re.escape(f"the column {what}: {path}")):
            list(read_rows(str(path), "text"))


def test_vectors_with_a_column_twice_are_not_searched(tmp_path: Path) -> None:
    vectors = pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float32()))
    pq.write_table(
        pa.table([vectors, vectors, pa.array(["a"] * 3)], names=["embedding", "embedding", "text"]),
        tmp_path / "v.parquet",
    )
    with pytest.raises(ArtifactError, match="the column 'embedding' occurs twice"):
        search_vectors(tmp_path / "v.parquet", np.ones(2))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_field_that_occurs_twice_inside_a_column_is_refused(depth: int, tmp_path: Path) -> None:
    """As it is in JSON. pyarrow would keep one, or fail where the rows become Python objects."""
    values: Any = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["y", "y"])
    column = pa.ListArray.from_arrays(pa.array([0, 1]), values) if depth else values
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["a"], "x": column}), path)
    for read in (lambda: list(read_rows(str(path), "text")), lambda: list(training_rows(path, {"text": "text"}, {}))):
        with pytest.raises(ArtifactError, match="the column 'y' occurs twice"):
            read()


def test_a_saved_data_set_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a"], "label": ["b"]}).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    table = pa.table([pa.array(["a"]), pa.array(["c"]), pa.array(["b"])], names=["text", "text", "label"])
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ArtifactError, match=r"text.*saved"):
        list(training_rows(tmp_path / "saved", {"text": "text"}, {}))


@pytest.mark.parametrize(
    ("content", "what"),
    {
        "object": ('{"text": "a"}', "not a JSON array"),
        "lines": ('{"text": "a"}\n{"text": "b"}\n', "not a JSON array"),
        "nothing": ("", "not a JSON array"),
        "open": ('[{"text": "a"}', "not JSON (no ',' or ']' at char 14)"),
        "comma": ('[{"text": "a"},]', "not JSON (Expecting value"),
        "more": ('[{"text": "a"}] []', "not JSON (Extra data"),
        "not UTF-8": (b'[{"text": "\xff"}]', "not JSON ("),
        "deep": ("[" * 100_000, "not JSON ("),
    }.values(),
)  # fmt: skip
def test_json_that_is_no_array_of_rows_is_refused(content: str | bytes, what: str, tmp_path: Path) -> None:
    """With what to do, by both readers."""
    path = tmp_path / "rows.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for read in (lambda: list(training_rows(path, {"text": "text"}, {})), lambda: list(read_rows(str(path), "text"))):
        with pytest.raises(ArtifactError, match=re.escape(what)) as caught:
            read()
        assert str(caught.value).endswith("write an array of objects, or name JSON lines *.jsonl")


def test_rows_of_json_are_numbered_alike(tmp_path: Path) -> None:
    """Blank lines count, as an editor counts them; an array counts its items."""
    lines, array = tmp_path / "rows.jsonl", tmp_path / "rows.json"
    lines.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n7\n{"label": 1}\n')
    array.write_text('\n[ {"text": "a"} , 7,\n{"label": 1}]\n')
    for path, numbers in ((lines, [3, 4]), (array, [2, 3])):
        trained = [row for row in training_rows(path, {"text": "text"}, {}) if isinstance(row, RowError)]
        assert [str(row) for row in trained] == [
            f"{path}, row {numbers[0]}: not a JSON object", f"{path}, row {numbers[1]}: has no 'text'"
        ]  # fmt: skip
        given = [row for row in read_rows(str(path), "text") if row.error]
        assert [row.number for row in given] == numbers
