"""Tables in files: JSON lines, JSON, comma- and tab-separated values, and parquet. Their columns have unique names."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from zoo.errors import ArtifactError
from zoo.reading import check_plain, lines, read_bytes

__all__ = [
    "JSON",
    "LINES",
    "PARQUET",
    "TABLES",
    "cell",
    "check_names",
    "has_bytes",
    "is_renamed",
    "join_columns",
    "open_parquet",
    "read_numbered",
    "table_line",
]

LINES = (".jsonl", ".ndjson")
JSON = ".json"
"""An array of objects."""
TABLES = {".csv": ",", ".tsv": "\t"}
"""Suffixes of files, and the separators of their values."""
PARQUET = ".parquet"
_FIELD = 2**31 - 1
"""Largest number of characters of a value in a CSV file: as in JSON lines, limits are those of what reads the rows."""
_BUFFER = 2**16
"""Bytes of a column that are read at a time; otherwise a whole row group is."""
_CRLF = "\r\n"
_SPACE = " \t\n\r"
_PREFIX = "input_"
"""Put before the name of a column of the input that the result has as well."""
Row = dict[str, Any] | str
"""A row by column, or what is wrong with it."""


def check_names(names: Sequence[str], path: object) -> None:
    """Raise :class:`ArtifactError` if two columns have the same name. Names that differ in case are different."""
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ArtifactError(f"the column {twice!r} occurs twice", path, "rename one of them")


def join_columns(columns: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of an input, followed by those of its result, which keep their names.

    >>> join_columns({"text": "a", "label": 1, "input_label": 2}, {"label": "good"})
    {'text': 'a', 'input_input_label': 1, 'input_label': 2, 'label': 'good'}
    """
    taken = {*columns, *result}
    joined = {}
    for name, value in columns.items():
        free = name
        while free in result or (free != name and free in taken):
            free = _PREFIX + free
        taken.add(free)
        joined[free] = value
    return joined | dict(result)


def is_renamed(name: str, column: str) -> bool:
    """Return whether :func:`join_columns` may give a column this name."""
    return name.endswith(column) and not name.removesuffix(column).replace(_PREFIX, "")


def has_bytes(value: Any) -> bool:
    """Return whether a value is bytes, or an object of parquet with bytes, such as an image: texts cannot hold them."""
    if isinstance(value, dict):
        return any(map(has_bytes, value.values()))
    return isinstance(value, bytes)


def table_line(values: Iterable[Any], suffix: str) -> str:
    """Return a line of comma- or tab-separated values, as the suffix of the file says.

    A value with a line break of any kind is quoted: the csv module quotes only those of its own line ends.
    """
    line = io.StringIO(newline="")
    csv.writer(line, delimiter=TABLES[suffix], lineterminator=_CRLF).writerow(values)
    return line.getvalue().removesuffix(_CRLF) + "\n"


def cell(value: Any) -> Any:
    """Return a value of JSON for a table: texts as they are, None as an empty text, all others as JSON."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_numbered(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a file of JSON lines, JSON or CSV, each with its number from 1; in JSON lines that of the line.

    Raises :class:`ArtifactError` if the file cannot be read.
    """
    suffix = path.suffix.lower()
    try:
        if suffix in LINES:
            with path.open("rb") as file:
                yield from _read_lines(file, path)
        else:
            yield from enumerate(_read_array(path) if suffix == JSON else _read_table(path), 1)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise ArtifactError(f"cannot read ({what})", path) from error


def _refuse_constant(name: str) -> None:
    """Raise ``ValueError`` for a name that the json module reads and writes, but other readers refuse."""
    raise ValueError(f"JSON has no {name}: write null for a missing value")


class _Objects:
    """Parses JSON and reports objects with a key that occurs twice.

    Parsing goes on after such an object, so that the rows behind it can be read.
    """

    def __init__(self) -> None:
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_constant=_refuse_constant)
        self._twice: list[str] = []

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            keys = [key for key, _ in pairs]
            self._twice.append(next(key for key in keys if keys.count(key) > 1))
        return members

    def parse(self, text: str, start: int) -> tuple[Row, int]:
        """Return the row at a place, and the place after it. Raises ``ValueError`` or ``RecursionError``."""
        self._twice.clear()
        row, end = self._decoder.raw_decode(text, start)
        if self._twice:
            return f"not JSON (the key {self._twice[0]!r} occurs twice)", end
        return row if isinstance(row, dict) else "not a JSON object", end


def _decoded(data: bytes) -> str:
    return data.decode(json.detect_encoding(data), "surrogatepass")


def _read_lines(file: IO[bytes], path: Path) -> Iterator[tuple[int, Row]]:
    objects = _Objects()
    for number, line in enumerate(lines(file, path), 1):
        if not line.strip():
            continue
        try:
            text = _decoded(line).strip(_SPACE)
            row, end = objects.parse(text, 0)
            if end < len(text):
                row = f"not JSON (Extra data: char {end})"
        except (ValueError, RecursionError) as error:
            row = f"not JSON ({error})"
        yield number, row


def _read_array(path: Path) -> Iterator[Row]:
    """Yield the rows of a JSON array, which is read whole."""
    objects, remedy = _Objects(), "write an array of objects, or name JSON lines *.jsonl"
    try:
        text = _decoded(read_bytes(path))
        place = _after_space(text, 0)
        if text[place : place + 1] != "[":
            raise ArtifactError("not a JSON array", path, remedy)
        place = _after_space(text, place + 1)
        if text[place : place + 1] == "]":
            end = place + 1
        else:
            separator = ","
            while separator == ",":
                row, place = objects.parse(text, _after_space(text, place))
                yield row
                place = _after_space(text, place)
                separator, end = text[place : place + 1], place + 1
                place = end
            if separator != "]":
                raise ValueError(f"no ',' or ']' at char {end - 1}")
        if _after_space(text, end) < len(text):
            raise ValueError(f"Extra data: char {end}")
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"not JSON ({error})", path, remedy) from error


def _after_space(text: str, place: int) -> int:
    while text[place : place + 1] in _SPACE and place < len(text):
        place += 1
    return place


def _read_table(path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file with a header."""
    csv.field_size_limit(_FIELD)
    check_plain(path)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=TABLES[path.suffix.lower()], strict=True)
        header = next(reader, [])
        check_names(header, path)
        for row in reader:
            if len(row) == len(header):
                yield dict(zip(header, row, strict=True))
            elif row:
                yield f"{len(row)} fields, the header has {len(header)}"


def open_parquet(parquet: Any, path: str | Path) -> Any:
    """Open a file as ``ParquetFile``.

    Args:
        parquet: the module ``pyarrow.parquet``.
        path: the file.

    Raises:
        ArtifactError: it cannot be read, its footer contradicts itself, or two columns have the same name.
    """
    try:
        _check_footer(parquet, path)
        file = parquet.ParquetFile(path)
    except ArtifactError:
        raise
    except FileNotFoundError as error:
        raise ArtifactError("no such file", path) from error
    except Exception as error:  # pyarrow raises its own classes
        raise ArtifactError(f"not a parquet file ({error})", path) from error
    try:
        check_names(file.schema_arrow.names, path)
        for column in file.schema_arrow:
            _check_fields(column.type, path)
    except ArtifactError:
        file.close()
        raise
    return file


def _check_fields(kind: Any, path: object) -> None:
    """Raise :class:`ArtifactError` if two fields of an object inside a column have the same name."""
    fields = [kind.field(number) for number in range(kind.num_fields)]
    if hasattr(kind, "get_field_index"):  # an object, not a list or a mapping
        check_names([field.name for field in fields], path)
    for field in fields:
        _check_fields(field.type, path)


def _check_footer(parquet: Any, path: str | Path) -> None:
    """Compare the numbers of rows in the metadata of a parquet file. pyarrow drops what exceeds those of a row group.

    Args:
        parquet: the module ``pyarrow.parquet``.
        path: the file.

    Raises:
        ArtifactError: the row groups have other rows than the file, or than their columns.
        Exception: of pyarrow, if the file cannot be read.
    """
    with parquet.ParquetFile(path, buffer_size=_BUFFER) as file:
        metadata = file.metadata
        for number in range(metadata.num_row_groups):  # where this raises, RowGroupMetaData.column ends the process
            next(file.iter_batches(1, row_groups=[number]), None)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    counted = sum(group.num_rows for group in groups)
    if counted != metadata.num_rows:
        raise ArtifactError(f"the footer says {metadata.num_rows} rows, but its row groups have {counted}", path)
    for group in groups:
        for number in range(group.num_columns):
            values, repeated = group.column(number).num_values, metadata.schema.column(number).max_repetition_level
            if values < group.num_rows or (values > group.num_rows and not repeated):
                name = metadata.schema.column(number).path
                raise ArtifactError(f"a row group has {group.num_rows} rows, but {values} values of {name}", path)
