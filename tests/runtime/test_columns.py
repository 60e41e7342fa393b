"""Results of ``zoo run`` keep the columns of their input's row: ids, labels and all others."""

from __future__ import annotations

import csv
import datetime
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.errors import StorageError
from zoo.tables import join_columns
from zoo_runtime.files.results import Results

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
Row = dict[str, Any]
SCORE = ("--task", "score")
ROWS: list[Row] = [
    {"key": f"k{number}", "text": text, "label": label, "perplexity": "theirs"}
    for number, (text, label) in enumerate([("time flies", "good"), ("an arrow", "bad"), ("fruit", "good")])
]


@pytest.fixture
def gpt(exported_model: Exported) -> Path:
    return exported_model("gpt-tiny")


def write(name: str, rows: Sequence[Row]) -> str:
    path = Path(name)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows)))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def read(name: str) -> list[Row]:
    if name.endswith(".parquet"):
        return list(pq.read_table(name).to_pylist())
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


@pytest.mark.parametrize("given_as", ["in.jsonl", "in.json", "in.csv", "in.parquet"])
@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet"])
def test_columns_of_tables(gpt: Path, zoo: Zoo, given_as: str, output: str) -> None:
    """Those of the result keep their names, and results stay as they are without columns."""
    done = zoo("run", gpt, "--input", write(given_as, ROWS), *SCORE, "-o", output)
    assert done.status == 0
    assert done.err == (
        "note: column 'perplexity' of the input is named 'input_perplexity': results have a column of its name\n"
    )
    found = read(output)
    assert [row["id"] for row in found] == [1, 2, 3]
    assert [(row["key"], row["text"], row["label"], row["input_perplexity"]) for row in found] == [
        tuple(row.values()) for row in ROWS
    ]
    assert list(found[0])[:5] == ["id", "key", "text", "label", "input_perplexity"]
    alone = zoo("run", gpt, *(row["text"] for row in ROWS), *SCORE, "--json").json["results"]
    for row, expected in zip(found, alone, strict=True):
        assert math.isclose(row["perplexity"], expected["perplexity"], rel_tol=1e-5)
        assert {"id", "key", "label", "input_perplexity", *expected} == set(row)


def test_ids(gpt: Path, zoo: Zoo) -> None:
    """The column of ids stays beside ``id``; another column ``id`` gets the prefix, in every row."""
    rows = [{"id": n, "key": key, "text": "xy"} for n, key in ((1, "1"), (2, "b"))]
    for output in ("keys.jsonl", "keys.parquet"):
        zoo("run", gpt, "--input", write("in.jsonl", rows), "--id-column", "key", *SCORE, "-o", output)
        assert [(row["id"], row["input_id"], row["key"]) for row in read(output)] == [("1", 1, "1"), ("b", 2, "b")]
    for output in ("ids.jsonl", "ids.parquet"):
        zoo("run", gpt, "--input", "in.jsonl", *SCORE, "-o", output)
        assert [(row["id"], row["key"]) for row in read(output)] == [(1, "1"), (2, "b")]
        assert "input_id" not in read(output)[0]


REPEATED: list[Row] = [{"id": id, "text": "xy"} for id in ("a", "a", "", "", None, 2.5, "b")]


@pytest.mark.parametrize("given_as", ["in.jsonl", "in.csv", "in.parquet"])
@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet", "--json"])
def test_ids_that_repeat(gpt: Path, zoo: Zoo, given_as: str, output: str) -> None:
    """A column that is called id stays as it is. Only --id-column says that ids are unique."""
    rows = (
        REPEATED
        if given_as == "in.jsonl" and output != "out.parquet"
        else [row for row in REPEATED if row["id"] != 2.5]
    )
    given = write(given_as, rows)
    expected = [(row["id"] or "" if given_as == "in.csv" else row["id"]) for row in rows]
    done = zoo("run", gpt, "--input", given, *SCORE, *(["-o", output] if output != "--json" else [output]))
    assert done.status == 0, done.err
    assert [row["id"] for row in (done.json["results"] if output == "--json" else read(output))] == expected
    unique = zoo("run", gpt, "--input", given, "--id-column", "id", *SCORE, "-o", "unique.jsonl")
    assert unique.status == 3
    assert "row 2" in unique.err
    assert "duplicate id 'a'" in unique.err
    assert [row["id"] for row in read("unique.jsonl")] == list(
        dict.fromkeys(id for id in expected if isinstance(id, str))
    )


def test_only_unique_ids_can_be_resumed(gpt: Path, zoo: Zoo) -> None:
    """The rows with results are found by their ids. The results so far are kept."""
    rows = [{"id": id, "text": "xy"} for id in ("a", "b", "a", None)]
    run = ("run", gpt, *SCORE, "-o", "out.jsonl", "--input")
    assert zoo(*run, write("few.jsonl", rows[:2])).status == 0
    before = Path("out.jsonl").read_text()
    done = zoo(*run, write("more.jsonl", rows[:3]), "--resume")
    assert done.err.splitlines()[-1] == (
        "error: --resume finds rows by their ids, which must be unique (duplicate id 'a'): more.jsonl, row 3: "
        "start again with --force, and --id-column with a column of unique ids"
    )
    assert done.status == 2
    assert Path("out.jsonl").read_text() == before
    assert "(id must be a string or an integer, got NoneType)" in zoo(
        *run, write("none.jsonl", rows[1:2] + rows[3:]), "--resume"
    ).failed(2)
    assert zoo(*run, write("all.jsonl", rows), "--force").status == 0
    assert "(got 'a'): out.jsonl, line 3: " in zoo(*run, "all.jsonl", "--resume").failed(2)
    assert zoo(*run, write("unique.jsonl", [{"id": id, "text": "xy"} for id in "abc"]), "--force").status == 0
    assert zoo(*run, write("longer.jsonl", [{"id": id, "text": "xy"} for id in "abcd"]), "--resume").status == 0
    assert [row["id"] for row in read("out.jsonl")] == list("abcd")


def test_ids_beside_another_column(gpt: Path, zoo: Zoo) -> None:
    """--json names columns as files do."""
    write("in.jsonl", [{"id": 7, "key": "k", "text": "xy"}])
    (row,) = zoo("run", gpt, "--input", "in.jsonl", "--id-column", "key", *SCORE, "--json").json["results"]
    assert (row["id"], row["input_id"], row["key"]) == ("k", 7, "k")


def test_ids_of_bytes(gpt: Path, zoo: Zoo) -> None:
    pq.write_table(pa.table({"text": ["ab"], "id": [b"\xff"]}), "in.parquet")
    done = zoo("run", gpt, "--input", "in.parquet", *SCORE, "-o", "out.jsonl")
    assert done.err.startswith("note: column 'id' of the input holds bytes, and is left out")
    assert read("out.jsonl")[0]["id"] is None
    assert zoo("run", gpt, "--input", "in.parquet", *SCORE, "-o", "out.parquet").status == 0
    assert read("out.parquet")[0]["id"] == b"\xff"


def test_numbers_that_json_lacks_are_null(gpt: Path, zoo: Zoo) -> None:
    numbers = [math.nan, math.inf, 1.5]
    lists = [[number] for number in numbers]
    pq.write_table(pa.table({"text": ["ab"] * 3, "number": numbers, "list": lists}), "in.parquet")
    for output in ("out.jsonl", "out.parquet"):
        assert zoo("run", gpt, "--input", "in.parquet", *SCORE, "-o", output).status == 0
    assert "NaN" not in Path("out.jsonl").read_text()
    assert [(row["number"], row["list"]) for row in read("out.jsonl")] == [(None, [None]), (None, [None]), (1.5, [1.5])]
    assert [row["number"] for row in read("out.parquet")][1:] == numbers[1:]
    assert math.isnan(read("out.parquet")[0]["number"])


def test_types_of_parquet_are_kept(gpt: Path, zoo: Zoo) -> None:
    """Also in a file without rows. JSON lines have no bytes; dates are texts there."""
    moment = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    image = {"bytes": b"\xff\x00", "path": "a.png"}
    table = pa.table(
        {
            "text": ["ab", "cd"],
            "id": pa.array([7, 9], pa.int16()),
            "time": pa.array([moment, None], pa.timestamp("ms", "UTC")),
            "image": [image, None],
            "perplexity": pa.array([1, None], pa.int8()),
        }
    )
    pq.write_table(table, "in.parquet")
    assert zoo("run", gpt, "--input", "in.parquet", *SCORE, "-o", "out.parquet").status == 0
    found = pq.read_table("out.parquet")
    kept = ["text", "id", "time", "image"]
    assert found.select(kept).equals(table.select(kept))
    assert found["input_perplexity"].equals(table["perplexity"])
    assert found.schema.field("perplexity").type == pa.float64()
    pq.write_table(table.slice(0, 0), "empty.parquet")
    Path("in").mkdir()
    Path("empty.parquet").rename("in/empty.parquet")
    assert zoo("run", gpt, "--input", "in", *SCORE, "-o", "answers", "--workers", "1").status == 0
    assert pq.read_schema("answers/empty.parquet").equals(found.schema)
    done = zoo("run", gpt, "--input", "in.parquet", *SCORE, "-o", "out.jsonl")
    assert "note: column 'image' of the input holds bytes, and is left out: write .parquet to keep it\n" in done.err
    first, second = read("out.jsonl")
    assert first["time"].startswith("2020-01-01 00:00:00") and second["time"] is None
    assert "image" not in first


def test_json(gpt: Path, zoo: Zoo) -> None:
    """A failed row has its columns, too, so that one can find it."""
    rows = [*ROWS, {"key": "last", "text": "", "label": "bad", "perplexity": 0}]
    found = zoo("run", gpt, "--input", write("in.jsonl", rows), *SCORE, "--json").json["results"]
    assert [(row["id"], row["key"], row["label"]) for row in found] == [
        (number, row["key"], row["label"]) for number, row in enumerate(rows, 1)
    ]
    assert [row["text"] for row in found] == [row["text"] for row in rows]
    assert "error" in found[3] and found[0]["input_perplexity"] == "theirs"
    (alone,) = zoo("run", gpt, "xy", *SCORE, "--json").json["results"]
    assert "id" not in alone


def test_lines_of_text_have_no_columns(gpt: Path, zoo: Zoo) -> None:
    Path("in.txt").write_text("time flies\n")
    for options in ((), ("--option", "top_k=2")):
        task = ("--task", "next-token")
        assert zoo("run", gpt, "--input", "in.txt", *task, *options, "-o", "out.jsonl", "--force").status == 0
        assert "text" not in read("out.jsonl")[0]


def test_a_batch_writes_the_same(gpt: Path, zoo: Zoo) -> None:
    Path("in").mkdir()
    for name in ("in/a.jsonl", "in/b.csv", "in/c.parquet"):
        write(name, ROWS)
        zoo("run", gpt, "--input", name, *SCORE, "-o", f"{Path(name).stem}{'.parquet' * ('parq' in name) or '.jsonl'}",
            "--threads", "1")  # fmt: skip
    done = zoo("run", gpt, "--input", "in", *SCORE, "-o", "out", "--workers", "1")
    assert done.status == 0
    assert "warning: in/a.jsonl: column 'perplexity' of the input is named 'input_perplexity'" in done.err
    for name in ("a.jsonl", "b.jsonl", "c.parquet"):
        assert Path("out", name).read_bytes() == Path(name).read_bytes()


NAMES = st.sampled_from(["id", "a", "input_a", "input_input_a", "b", "input_b"])


@given(st.dictionaries(NAMES, st.integers(0, 9)), st.dictionaries(NAMES, st.integers(10, 19)))
def test_no_value_is_lost(columns: dict[str, int], result: dict[str, int]) -> None:
    """Names are unique, those of the result stay, and a column is only renamed if the result has its name."""
    joined = join_columns(columns, result)
    assert len(joined) == len(columns) + len(result)
    assert {name: joined[name] for name in result} == result
    assert list(joined.values()) == [*columns.values(), *result.values()]
    assert all(joined[name] == value for name, value in columns.items() if name not in result)


def test_unsigned_integers_are_kept(gpt: Path, zoo: Zoo) -> None:
    """From JSON those that int64 cannot hold, from parquet all."""
    large = [2**64 - 1, 2**63, 1]
    rows = [{**row, "when": when, "id": when} for row, when in zip(ROWS, large, strict=True)]
    assert zoo("run", gpt, "--input", write("in.jsonl", rows), *SCORE, "-o", "a.parquet").status == 0
    table = pa.table(
        {"text": ["ab", "cd"], "when": pa.array([1, 2], pa.uint64()), "x": pa.array([2**63] * 2, pa.uint64())}
    )
    pq.write_table(table, "in.parquet")
    assert zoo("run", gpt, "--input", "in.parquet", *SCORE, "-o", "b.parquet").status == 0
    for name, columns in {"a": ("id", "when"), "b": ("when", "x")}.items():
        found = pq.read_table(f"{name}.parquet")
        assert {found.schema.field(column).type for column in columns} == {pa.uint64()}
    assert [row["when"] for row in read("a.parquet")] == [row["id"] for row in read("a.parquet")] == large


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([1, 2**64, 3], "the integer 18446744073709551616 in column 'when'"),
        ([1, -(2**63) - 1, 3], "the integer -9223372036854775809 in column 'when'"),
        ([-1, 2**63, 3], "the integer 9223372036854775808 in column 'when'"),
        ([[], [[2**63]], [[-1]]], "the integer 9223372036854775808 in column 'when'"),
        ([1, "a", 2], "column 'when' (Could not convert 'a' with type str: tried to convert to int64)"),
        ([{}, {}, {}], "these rows (Cannot write struct type 'when'"),
    ],
)
def test_columns_that_parquet_cannot_hold(
    values: list[Any], problem: str, gpt: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused before an answer is computed, and JSON lines hold them."""
    rows = [{**row, "when": value} for row, value in zip(ROWS, values, strict=True)]
    given = ("run", gpt, "--input", write("in.jsonl", rows), *SCORE, "-o")
    with monkeypatch.context() as patch:
        patch.setattr("zoo_runtime.Session.answer", lambda *_: pytest.fail("computed"))
        zoo(*given, "out.parquet").failed(6, f"error: parquet cannot hold {problem}", "out.parquet: write .jsonl")
    assert not Path("out.parquet").exists()
    assert zoo(*given, "out.jsonl").status == 0
    assert [row["when"] for row in read("out.jsonl")] == values


def test_integers_of_later_rows(tmp_path: Path) -> None:
    """The types of columns are those of the first rows written."""
    results = Results(tmp_path / "late.parquet", keep=True)
    with pytest.raises(StorageError, match=r"the integer 9223372036854775808 in column 'n': .*late"), results.writing():
        for number in range(1025):
            results.write(number, {}, {"n": 2**63 if number == 1024 else -1})


def test_inputs_of_a_wrong_type_fail_alone(gpt: Path, zoo: Zoo) -> None:
    rows = [*ROWS, {**ROWS[0], "text": 2**64}]
    said = zoo("run", gpt, "--input", write("in.jsonl", rows), *SCORE, "-o", "out.parquet")
    assert said.status == 3, said.err
    assert len(read("out.parquet")) == 3
