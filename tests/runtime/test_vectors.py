"""Files of vectors: written with the columns of their input, and searched exactly."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zoo.errors import ArtifactError, UsageError
from zoo_runtime import load_session
from zoo_runtime.files.vector_search import search_vectors

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
EMBED = ("--task", "sentence-embedding")
TEXTS = ["time flies", "x", "an arrow", "é", "fruit flies like a banana"]
RANDOM = np.random.default_rng(0)


@pytest.fixture
def bert(exported_model: Exported) -> Path:
    return exported_model("bert-tiny")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def embedded(bert: Path, texts: list[str]) -> np.ndarray[Any, Any]:
    with load_session(bert) as session:
        return np.stack([row["embedding"] for row in session.run(texts, task="sentence-embedding")])


def test_vectors_keep_the_columns_of_parquet(bert: Path, zoo: Zoo) -> None:
    """Also their types, where the first rows are null, and a vector is float32 of a fixed size."""
    moment = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    source = pa.table(
        {
            "body": pa.array(TEXTS),
            "id": pa.array(range(5), pa.int16()),
            "note": pa.array([None] * 5, pa.string()),
            "time": pa.array([moment] * 5, pa.timestamp("ms", "UTC")),
            "tags": pa.array([["a"], [], None, ["b"], ["c"]], pa.list_(pa.string())),
        }
    )
    pq.write_table(source, "in.parquet")
    assert zoo("run", bert, "--input", "in.parquet", "--column", "body", *EMBED, "-o", "out.parquet").status == 0
    found = pq.read_table("out.parquet")
    size = load_session(bert).config.hidden_size  # type: ignore[attr-defined]
    assert found.schema.field("embedding").type == pa.list_(pa.float32(), size)
    assert found.select(source.column_names).equals(source)
    np.testing.assert_allclose(np.stack(found["embedding"].to_numpy()), embedded(bert, TEXTS), rtol=0, atol=1e-5)


def test_vectors_keep_the_columns_of_other_inputs(bert: Path, zoo: Zoo) -> None:
    rows = [{"text": text, "key": f"k{n}", "meta": {"n": n}} for n, text in enumerate(TEXTS)]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    zoo("run", bert, "--input", "in.jsonl", "--id-column", "key", *EMBED, "-o", "lines.parquet")
    assert pq.read_table("lines.parquet").select(["text", "key", "meta"]).to_pylist() == rows
    zoo("run", bert, *EMBED, "-o", "stdin.parquet", stdin="\n".join(TEXTS).encode())
    zoo("run", bert, *TEXTS, *EMBED, "-o", "texts.parquet")
    for name in ("stdin", "texts"):
        found = pq.read_table(f"{name}.parquet")
        assert (found["text"].to_pylist(), found["id"].to_pylist()) == (TEXTS, [1, 2, 3, 4, 5])


@pytest.mark.parametrize("column", ["tokens", "embedding", "id"])
def test_columns_that_clash_get_a_prefix(bert: Path, zoo: Zoo, column: str) -> None:
    Path("in.jsonl").write_text(json.dumps({"text": "x", column: "theirs", "key": "k"}) + "\n")
    done = zoo("run", bert, "--input", "in.jsonl", "--id-column", "key", *EMBED, "-o", "out.parquet")
    assert done.status == 0
    assert f"note: column {column!r} of the input is named 'input_{column}'" in done.err
    (row,) = pq.read_table("out.parquet").to_pylist()
    assert (row["id"], row["key"], row[f"input_{column}"], row["tokens"]) == ("k", "k", "theirs", 1)
    assert len(row["embedding"]) > 1


def test_search(bert: Path, zoo: Zoo) -> None:
    zoo("run", bert, *TEXTS, *EMBED, "-o", "vectors.parquet")
    found = zoo("search", "vectors.parquet", "an arrow", "--model", bert, "--top-k", 3, "--json").json
    vectors = embedded(bert, TEXTS).astype(np.float64)
    cosines = vectors @ vectors[2] / np.linalg.norm(vectors, axis=1) / np.linalg.norm(vectors[2])
    best = np.argsort(-cosines)[:3]
    assert [row["columns"]["text"] for row in found["results"]] == [TEXTS[place] for place in best]
    np.testing.assert_allclose([row["score"] for row in found["results"]], cosines[best], atol=1e-6)
    shown = zoo("search", "vectors.parquet", "an arrow", "--model", bert, "--top-k", 1)
    assert shown.out == "1.0000 an arrow\n"


def test_columns_shown(bert: Path, zoo: Zoo) -> None:
    """In their order, whole in a pipe; an unknown one is refused before the model is loaded."""
    rows = [
        {"code": f"X{n}", "text": text, "note": None if n else "n" * 150, "tags": ["a", str(n)]}
        for n, text in enumerate(TEXTS)
    ]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    zoo("run", bert, "--input", "in.jsonl", "--id-column", "code", *EMBED, "-o", "vectors.parquet")
    search = ("search", "vectors.parquet", TEXTS[0], "--model", bert, "--top-k", 5)
    plain = zoo(*search)
    found = zoo(*search, "--show", "code, note", "--show", "tags")
    assert found.status == 0, found.err
    header, *lines = [line.split(maxsplit=3) for line in found.out.splitlines()]
    assert header == ["SCORE", "code", "note", "tags"]
    for line, (score, *text) in zip(lines, (line.split() for line in plain.out.splitlines()), strict=True):
        row = next(row for row in rows if row["text"] == " ".join(text))
        assert line == [score, row["code"], row["note"] or "-", json.dumps(row["tags"])]
    results = zoo(*search, "--show", "code", "--json").json["results"]
    assert [row["columns"] for row in results] == [{"code": line[1]} for line in lines]
    nowhere = ("search", "vectors.parquet", "x", "--model", "nowhere", "--show")
    zoo(*nowhere, "codes").failed(2, "no column 'codes': --show: did you mean 'code'?")
    zoo(*nowhere, "embedding").failed(2, "no column 'embedding': --show")


def test_vectors_of_other_weights_are_refused(bert: Path, exported_model: Exported, zoo: Zoo) -> None:
    """Their cosines would mean nothing. Files of other programs do not say what made them."""
    zoo("run", bert, *TEXTS, *EMBED, "-o", "vectors.parquet")
    other = exported_model("bert-tiny", noise=True)
    search = ("search", "vectors.parquet", "x", "--model", other)
    zoo(*search).failed(2, "made by another model or other weights", "vectors.parquet")
    table = pq.read_table("vectors.parquet")
    pq.write_table(table.replace_schema_metadata(None), "vectors.parquet")
    assert zoo(*search).status == 0


@pytest.mark.parametrize("type", [pa.float32(), pa.float16(), pa.float64()])
@pytest.mark.parametrize("kind", ["fixed", "list", "large"])
@pytest.mark.parametrize("group", [7, 10_000])
def test_search_equals_the_definition(type: Any, kind: str, group: int) -> None:
    """Also for ties and zeros, across groups and batches, with the columns of the right rows."""
    count, size = 9000 if group > 7 else 100, 6
    vectors = RANDOM.normal(size=(count, size)).astype(type.to_pandas_dtype())
    vectors[[3, 50]] = 0
    vectors[[20, 90]] = vectors[60] * 2
    query = vectors[60].astype(np.float64)
    numbers = pa.array(vectors.reshape(-1), type)
    if kind == "fixed":
        lists = pa.FixedSizeListArray.from_arrays(numbers, size)
    else:
        made, offsets = (pa.ListArray, pa.int32()) if kind == "list" else (pa.LargeListArray, pa.int64())
        lists = made.from_arrays(pa.array(range(0, count * size + 1, size), offsets), numbers)
    pq.write_table(pa.table({"v": lists, "n": list(range(count))}), "v.parquet", row_group_size=group)
    found = search_vectors("v.parquet", query, top_k=40, column="v")
    precise = vectors.astype(np.float64)
    wanted = precise @ query / np.maximum(np.linalg.norm(precise, axis=1), 1e-300) / np.linalg.norm(query)
    np.testing.assert_allclose([match.score for match in found], np.sort(wanted)[::-1][:40], rtol=0, atol=1e-12)
    assert [match.columns["n"] for match in found] == [match.row - 1 for match in found]
    assert {match.row for match in found[:3]} == {21, 61, 91}
    np.testing.assert_allclose([match.score for match in found], wanted[[m.row - 1 for m in found]], rtol=0, atol=1e-12)
    whole = search_vectors("v.parquet", query, top_k=2 * count, column="v")
    assert len(whole) == count
    assert [match.row for match in whole if match.score == 0.0][:2] == [4, 51]


def test_search_of_nothing() -> None:
    pq.write_table(pa.table({"embedding": pa.array([], pa.list_(pa.float32(), 2))}), "v.parquet")
    assert search_vectors("v.parquet", np.ones(2)) == []


@pytest.mark.parametrize(
    ("values", "error", "what"),
    [
        ([[1.0, 2.0], [1.0]], UsageError, "row 2 has a vector of 1 numbers, the query has 2"),
        ([[1.0, 2.0], None], ArtifactError, "row 2 has no vector"),
        ([[1.0, 2.0], [1.0, None]], ArtifactError, "row 2 has a vector that is not finite"),
        ([[float("inf"), 2.0]], ArtifactError, "row 1 has a vector that is not finite"),
        ([["a", "b"]], UsageError, "column 'embedding' has no vectors, but list"),
        ([1.0], UsageError, "column 'embedding' has no vectors, but double"),
    ],
)
def test_bad_vectors(values: list[Any], error: type[Exception], what: str) -> None:
    pq.write_table(pa.table({"embedding": values}), "v.parquet")
    with pytest.raises(error, match=what):
        search_vectors("v.parquet", np.ones(2))


def test_column_with_fewer_rows_than_the_vectors() -> None:
    """pyarrow believes what the metadata says of a column."""
    rows = 77
    columns = {"id": list(range(rows)), "embedding": [[float(row), 1.0] for row in range(rows)]}
    pq.write_table(pa.table(columns), "v.parquet")
    data = Path("v.parquet").read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    number = bytes([2 * rows % 128 + 128, 2 * rows // 128])  # in Thrift's compact encoding
    before, after = data[:footer], data[footer:].split(number, 2)  # rows of the file, and values of its first column
    Path("v.parquet").write_bytes(before + after[0] + number + after[1] + bytes([128, 0]) + after[2])
    assert pq.ParquetFile("v.parquet").metadata.row_group(0).column(0).num_values == 0
    with pytest.raises(ArtifactError, match="a row group has 77 rows, but 0 values of id"):
        search_vectors("v.parquet", np.array([1.0, 0.0]))


def test_errors_of_search(bert: Path, exported_model: Exported, zoo: Zoo) -> None:
    pq.write_table(pa.table({"embedding": [[1.0, 2.0]]}), "v.parquet")
    Path("bad.parquet").write_text("no")
    zoo("search", "absent.parquet", "x", "--model", bert).failed(3, "no such file: absent.parquet")
    zoo("search", "bad.parquet", "x", "--model", bert).failed(3, "not a parquet file", "bad.parquet")
    zoo("search", "v.parquet", "x", "--model", bert).failed(2, "row 1 has a vector of 2 numbers, the query has 64")
    zoo("search", "v.parquet", "x", "--model", bert, "--column", "w").failed(2, "no column 'w': v.parquet")
    zoo("search", "v.parquet", "", "--model", bert).failed(3, "empty input")
    zoo("search", "v.parquet", "x", "--model", "nowhere").failed(3, "no such directory")
    zoo("search", "v.parquet", "x", "--model", exported_model("gpt-tiny")).failed(2, "sentence-embedding")
