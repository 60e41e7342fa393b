"""Results as CSV: what is read back is what JSON lines have. And ``zoo run --quiet``."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.errors import UsageError
from zoo_runtime.files.results import Results
from zoo_runtime.files.row_file import RowFile

Zoo = Callable[..., Any]
SUFFIXES = {".csv": ",", ".tsv": "\t"}
SCORE = ("--task", "score")
NEXT = ("--task", "next-token", "--top-k", "2")


@pytest.fixture
def gpt(exported_model: Callable[..., Path]) -> Path:
    return exported_model("gpt-tiny")


def read(path: str | Path) -> list[dict[str, str]]:
    path = Path(path)
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter=SUFFIXES[path.suffix], strict=True))


def written(path: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    with Results(Path(path), force=True).writing() as results:
        for number, row in enumerate(rows):
            results.write(number, row)
    return read(path)


TEXTS = st.text(st.sampled_from("a,;\"'\t\r\n é語😀\u2028\x85"), max_size=6)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = TEXTS | NUMBERS | st.booleans() | st.none() | st.lists(TEXTS, max_size=2)


@pytest.mark.parametrize("suffix", SUFFIXES)
@given(st.lists(st.dictionaries(st.sampled_from(["one", "two, three", "four\r"]), VALUES), min_size=1, max_size=4))
def test_values_are_read_back(suffix: str, rows: list[dict[str, Any]]) -> None:
    """Texts as they are, other values as JSON; a column that a row lacks is empty."""
    found = written(f"rows{suffix}", rows)
    names = dict.fromkeys(name for row in rows for name in row)
    assert all(list(row) == ["id", *names] or set(row) == {"id", *names} for row in found)
    for number, (row, texts) in enumerate(zip(rows, found, strict=True)):
        assert texts["id"] == str(number)
        for name in names:
            value = row.get(name)
            if value is None or isinstance(value, str):
                assert texts[name] == (value or "")
            else:
                again = json.loads(texts[name])
                assert (type(again), again) == (type(value), value)


@given(TEXTS)
def test_line_ends_in_rows_of_tables(text: str) -> None:
    """A carriage return alone is quoted, too: a reader would take it for the end of a row."""
    with RowFile(Path("rows.csv"), force=True).writing() as rows:
        rows.add({"first": text, "second": "x"})
    assert read("rows.csv") == [{"first": text, "second": "x"}]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_results_of_a_run(gpt: Path, zoo: Zoo, suffix: str) -> None:
    rows = [{"id": "a, b", "text": 'say "x"', "label": "é\n"}, {"id": "a, b", "text": "xy", "more": [1, {"a": None}]}]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for task in (SCORE, NEXT):
        assert zoo("run", gpt, "--input", "in.jsonl", *task, "-o", "out.jsonl", "--force").status == 0
        assert zoo("run", gpt, "--input", "in.jsonl", *task, "-o", f"out{suffix}", "--force").status == 0
        expected = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
        for texts, row in zip(read(f"out{suffix}"), expected, strict=True):
            assert {name: text for name, text in texts.items() if name not in row} in ({}, {"label": ""}, {"more": ""})
            for name, value in row.items():
                assert texts[name] == value if isinstance(value, str) else json.loads(texts[name]) == value


def test_files_without_rows_have_columns(gpt: Path, zoo: Zoo) -> None:
    Path("in.jsonl").write_text('{"text": ""}\n')
    assert zoo("run", gpt, "--input", "in.jsonl", *SCORE, "-o", "out.csv").status == 3
    header, *rows = Path("out.csv").read_text().splitlines()
    assert rows == []
    assert {"id", "perplexity"} <= set(header.split(","))


def test_a_failed_run_writes_nothing(tmp_path: Path) -> None:
    Path("out.csv").write_text("mine")
    with pytest.raises(RuntimeError), Results(Path("out.csv"), force=True).writing() as results:
        results.write(1, {"a": 1})
        raise RuntimeError
    assert Path("out.csv").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]
    with pytest.raises(UsageError, match=r"cannot continue a csv file: out.csv: write .jsonl"):
        Results(Path("out.csv"), resume=True)
    with pytest.raises(UsageError, match="already exists"):
        Results(Path("out.csv"))
    with pytest.raises(UsageError, match=r"unknown file type: out.txt: name it \*.jsonl, \*.ndjson, \*.csv"):
        Results(Path("out.txt"))


def test_quiet(gpt: Path, zoo: Zoo) -> None:
    """Notes are left out. Answers, warnings and errors are what was asked for."""
    Path("in.csv").write_text("text,perplexity\nab,1\ncd,2\n")
    run = ("run", gpt, "--input", "in.csv", *SCORE)
    assert zoo(*run, "-o", "out.csv").err.startswith("note: column 'perplexity'")
    for flag in ("-q", "--quiet"):
        quiet = zoo(*run, "-o", "out.csv", "--force", flag)
        assert (quiet.status, quiet.out, quiet.err) == (0, "", "")
    loud = zoo(*run)
    assert zoo(*run, "-q") == loud
    assert loud.out.count("\n") == 2
    failed = zoo("run", gpt, "good", "", *SCORE, "-q")
    assert failed.status == 3
    assert [line.partition(":")[0] for line in failed.err.splitlines()] == ["warning", "error"]
    batch = ("run", gpt, "--input", "*.csv", *SCORE, "-q", "-o")
    Path("out.csv").unlink()
    Path("in.csv").write_text("text\nab\n")
    assert zoo(*batch, "folder").err == ""
    zoo(*batch, "results.csv").failed(2, "the results of a batch are files in a folder")
