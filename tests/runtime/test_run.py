"""``zoo run``: rows in, rows out. Bad inputs are reported and skipped, and existing output is not lost."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import full, nth_call
from zoo.errors import ArtifactError, StorageError, UsageError
from zoo_runtime import load_session
from zoo_runtime.files.results import Results
from zoo_runtime.files.rows import read_rows
from zoo_runtime.running.text_runner import TextRunner

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
POSITIONS = 32
EMBED = ("--task", "sentence-embedding")
TEXTS = ["time flies", "x", "an arrow", "é", "fruit flies like a banana"]


@pytest.fixture
def bert(exported_model: Exported) -> Path:
    return exported_model("bert-tiny")


@pytest.fixture
def gpt(exported_model: Exported) -> Path:
    return exported_model("gpt-tiny")


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the numbers of the inputs that a graph is run on."""
    numbers: list[int] = []
    original = TextRunner.compute

    def compute(self: TextRunner, items: Sequence[Any]) -> Any:
        numbers.extend(item.number for item in items)
        return original(self, items)

    monkeypatch.setattr(TextRunner, "compute", compute)
    return numbers


@contextlib.contextmanager
def interrupted_at(number: int) -> Iterator[None]:
    """Raise KeyboardInterrupt before the given batch."""
    batches: list[int] = []
    original = TextRunner.compute

    def compute(self: TextRunner, items: Sequence[Any]) -> Any:
        batches.append(1)
        if len(batches) == number:
            raise KeyboardInterrupt
        return original(self, items)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextRunner, "compute", compute)
        yield


def alone(folder: Path, texts: Sequence[str]) -> list[np.ndarray[Any, Any]]:
    """Compute the embedding of each text singly."""
    with load_session(folder) as session:
        return [session.run(text, task="sentence-embedding")["embedding"] for text in texts]


def lines(path: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def write_lines(path: str, rows: Sequence[object]) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def same_embeddings(rows: Sequence[dict[str, Any]], wanted: Sequence[Any]) -> None:
    np.testing.assert_allclose([row["embedding"] for row in rows], np.stack(wanted), rtol=0, atol=1e-6)


# Sources of inputs, and outputs.


def text_file() -> tuple[list[str], bytes]:
    Path("in.txt").write_text("\n".join(TEXTS), encoding="utf-8-sig")  # with a byte order mark
    return ["--input", "in.txt"], b""


def json_file() -> tuple[list[str], bytes]:
    write_lines("in.ndjson", [{"name": f"row {n}", "body": text} for n, text in enumerate(TEXTS)])
    return ["--input", "in.ndjson", "--column", "body", "--id-column", "name"], b""


def json_file_with_ids() -> tuple[list[str], bytes]:
    return ["--input", write_lines("in.jsonl", [{"id": f"row {n}", "text": t} for n, t in enumerate(TEXTS)])], b""


def parquet_file() -> tuple[list[str], bytes]:
    pq.write_table(pa.table({"body": TEXTS, "id": [f"row {n}" for n in range(5)], "other": [1.0] * 5}), "in.parquet")
    return ["--input", "in.parquet", "--column", "body"], b""


def parquet_file_without_ids() -> tuple[list[str], bytes]:
    pq.write_table(pa.table({"text": TEXTS}), "in.parquet")
    return ["--input", "in.parquet"], b""


NAMES, NUMBERS = [f"row {n}" for n in range(5)], [1, 2, 3, 4, 5]
SOURCES: dict[str, tuple[Callable[[], tuple[list[str], bytes]], list[Any]]] = {
    "arguments": (lambda: (TEXTS, b""), NUMBERS),
    "stdin": (lambda: ([], "\r\n".join(TEXTS).encode()), NUMBERS),
    "stdin by name": (lambda: (["--input", "-"], "\n".join(TEXTS).encode()), NUMBERS),
    "text": (text_file, NUMBERS),
    "json lines": (json_file, NAMES),
    "json lines with ids": (json_file_with_ids, NAMES),
    "parquet": (parquet_file, NAMES),
    "parquet without ids": (parquet_file_without_ids, NUMBERS),
}


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(("source", "ids"), SOURCES.values(), ids=SOURCES)
def test_every_source_gives_the_same_rows_in_order(bert: Path, zoo: Zoo, source: Any, ids: list[Any]) -> None:
    """To JSON lines and to parquet, also in small batches."""
    arguments, stdin = source()
    wanted = alone(bert, TEXTS)
    for output in ("out.jsonl", "out.parquet"):
        result = zoo("run", bert, *arguments, *EMBED, "--output", output, "--batch-size", 2, stdin=stdin)
        assert (result.status, result.out, result.err) == (0, "", "")
        rows = lines(output) if output == "out.jsonl" else pq.read_table(output).to_pylist()
        assert [row["id"] for row in rows] == ids
        assert [row["tokens"] for row in rows] == [len(text.encode()) for text in TEXTS]
        same_embeddings(rows, wanted)


def test_pipe_is_read_like_a_file(bert: Path, zoo: Zoo) -> None:
    """As with ``<(command)`` in a shell."""
    reader, writer = os.pipe()
    os.write(writer, b"one\ntwo\n")
    os.close(writer)
    try:
        assert zoo("run", bert, "--input", f"/dev/fd/{reader}", *EMBED, "--output", "out.jsonl").status == 0
    finally:
        os.close(reader)
    assert [row["id"] for row in lines("out.jsonl")] == [1, 2]


def test_token_ids_in_a_file(bert: Path, zoo: Zoo) -> None:
    write_lines("in.jsonl", [{"text": list(text.encode())} for text in TEXTS])
    assert zoo("run", bert, "--input", "in.jsonl", *EMBED, "--output", "out.jsonl").status == 0
    same_embeddings(lines("out.jsonl"), alone(bert, TEXTS))
    pq.write_table(pa.table({"text": [list(text.encode()) for text in TEXTS]}), "in.parquet")
    assert zoo("run", bert, "--input", "in.parquet", *EMBED, "--output", "out.parquet").status == 0
    same_embeddings(pq.read_table("out.parquet").to_pylist(), alone(bert, TEXTS))


def test_rows_of_parquet_with_other_columns() -> None:
    """No value is dropped without a word: the columns are those of all rows that are written first."""
    results = Results(Path("out.parquet"))
    with results.writing():
        results.write(1, {"ids": []})
        results.write(2, {"ids": [3], "score": 0.5})
    first, second = pq.read_table("out.parquet").to_pylist()
    assert first == {"id": 1, "ids": [], "score": None}
    assert second == {"id": 2, "ids": [3], "score": 0.5}
    results = Results(Path("late.parquet"))
    with pytest.raises(StorageError, match=r"cannot hold these results .*score.*write \.jsonl"), results.writing():
        for number in range(1025):
            results.write(number, {"ids": []} if number < 1024 else {"ids": [], "score": 0.5})


def test_many_rows_of_parquet(bert: Path, zoo: Zoo) -> None:
    """More than are read or written at a time."""
    pq.write_table(pa.table({"text": [f"row {n}" for n in range(2500)]}), "in.parquet")
    assert zoo("run", bert, "--input", "in.parquet", *EMBED, "--output", "out.parquet").status == 0
    rows = pq.read_table("out.parquet").to_pylist()
    assert [row["id"] for row in rows] == list(range(1, 2501))
    same_embeddings([rows[0], rows[2000]], alone(bert, ["row 0", "row 2000"]))


class Terminal(io.TextIOWrapper):
    """A terminal as stdin."""

    def isatty(self) -> bool:
        return True


def test_missing_input_is_reported(bert: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("empty.jsonl").write_text("\n\n")
    for arguments in ((), ("--input", "-"), ("--input", "empty.jsonl")):
        zoo("run", bert, *arguments).failed(2, "no inputs", "--input FILE")
    monkeypatch.setattr("io.TextIOWrapper", Terminal)
    zoo("run", bert, stdin=b"typed").failed(2, "no inputs")


@pytest.mark.parametrize(
    ("arguments", "message"), [("", "no inputs: give a text"), ("--input -", "stdin is closed: --input -")]
)
def test_closed_stdin_is_reported(bert: Path, arguments: str, message: str) -> None:
    command = f"exec {sys.executable} -c 'from zoo.cli import run; run()' run {bert} {arguments} <&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1


# Bad rows.

BAD_LINES = [
    (b'{"text": "good"}', None),
    (b"{", "not JSON"),
    (b'{"text": null}', "expected a text or token ids"),
    (b'{"text": 7}', "expected a text or token ids, got int"),
    (b'{"text": ""}', "empty input"),
    (b'{"text": []}', "empty input"),
    (b'{"text": "%s"}' % (b"y" * (POSITIONS + 1)), f"{POSITIONS + 1} tokens exceed"),
    (b'{"text": "%s"}' % (b"y" * POSITIONS), None),
    (b'{"text": "\\ud800"}', "is not valid Unicode"),
    (b'{"text": "\xff"}', "not JSON"),
    (b'{"txt": "x"}', "has no 'text'"),
    (b"[1, 2]", "not a JSON object"),
    (b'{"text": "x", "text": "y"}', "not JSON (the key 'text' occurs twice)"),
    (b'{"text": "x", "meta": {"a": 1, "a": 2}}', "not JSON (the key 'a' occurs twice)"),
    (b'{"text": "x"} {"text": "y"}', "not JSON (Extra data"),
    (b'{"text": [1, 260]}', "outside the vocabulary of 260"),
    (b'{"text": [-1]}', "outside the vocabulary of 260"),
    (b'{"text": [true]}', "expected a text or token ids"),
    (b'{"text": [1.0]}', "expected a text or token ids"),
    (b"[" * 100_000, "not JSON"),
    (b'{"text": "last", "id": "\xc3\xa9"}', None),
]


@pytest.mark.parametrize("output", ["out.jsonl", "stdout"])
def test_bad_lines_of_json_are_skipped(bert: Path, zoo: Zoo, output: str) -> None:
    Path("in.jsonl").write_bytes(b"".join(line + b"\n" for line, _ in BAD_LINES))
    target = ["--output", output] if output != "stdout" else []
    result = zoo("run", bert, "--input", "in.jsonl", *EMBED, *target)
    *warnings, error = result.err.splitlines()
    bad = [(number, what) for number, (_, what) in enumerate(BAD_LINES, 1) if what is not None]
    assert result.status == 3
    assert len(warnings) == len(bad)
    for line, (number, what) in zip(warnings, bad, strict=True):
        assert line.startswith("warning: ")
        assert re.search(rf"\b(row|input) {number}\b", line), line
        assert what in line
    assert error == f"error: {len(bad)} of {len(BAD_LINES)} inputs failed: {bert}: see the warnings above"
    if output == "stdout":
        assert [line.split(":")[0] for line in result.out.splitlines()] == ["'good'", repr("y" * POSITIONS), "'last'"]
    else:
        assert [row["id"] for row in lines(output)] == [1, 8, "é"]
        same_embeddings(lines(output), alone(bert, ["good", "y" * POSITIONS, "last"]))


def test_bad_lines_of_text_are_skipped(bert: Path, zoo: Zoo) -> None:
    result = zoo("run", bert, *EMBED, "--output", "out.jsonl", stdin=b"good\n\n\xff\n" + b"y" * 33 + b"\nfine")
    assert result.status == 3
    empty, broken, long, error = result.err.splitlines()
    assert empty == "warning: empty input: input 2: give at least one token"
    assert broken.startswith("warning: not UTF-8 (invalid start byte at byte 0): stdin, row 3")
    assert "33 tokens exceed" in long
    assert "input 4" in long
    assert error.startswith("error: 3 of 5 inputs failed")
    assert [row["id"] for row in lines("out.jsonl")] == [1, 5]


def test_bad_rows_of_parquet_are_skipped(bert: Path, zoo: Zoo) -> None:
    pq.write_table(pa.table({"text": ["good", None, "", "x", "y", "z"], "key": [7, 8, 9, 7, None, 10]}), "in.parquet")
    result = zoo("run", bert, "--input", "in.parquet", "--id-column", "key", *EMBED, "--output", "out.jsonl")
    assert result.status == 3
    assert [re.search(r"(row|input) (\d)", line)[2] for line in result.err.splitlines()[:-1]] == ["2", "3", "4", "5"]  # type: ignore[index]
    assert [row["id"] for row in lines("out.jsonl")] == [7, 10]


def test_bad_arguments_are_skipped(bert: Path, zoo: Zoo) -> None:
    """A byte that is not UTF-8 arrives as a lone surrogate, which cannot be encoded."""
    result = zoo("run", bert, "good", "\udcff", "", "--ids", "300", *EMBED, "--json")
    assert result.status == 3
    *warnings, error = result.err.splitlines()
    assert [line.split(" ")[0] for line in [*warnings, error]] == ["warning:"] * 3 + ["error:"]
    found = result.json["results"]
    assert [item["text"] for item in found] == ["good", "\\udcff", "", None]
    assert ["error" in item for item in found] == [False, True, True, True]
    message = "error: is not valid Unicode: input 1: correct the text, or set a UTF-8 locale\n"
    zoo("run", bert, "\udcff").failed(3, message)
    zoo("run", bert, "\udcff", *EMBED, "--output", "out.jsonl").failed(3, message)


def test_ids_that_are_not_utf8_are_returned(bert: Path, zoo: Zoo) -> None:
    Path("in.jsonl").write_text('{"id": "\\ud800", "text": "x"}\n')
    for options in ((), ("--resume",)):
        result = zoo("run", bert, "--input", "in.jsonl", *EMBED, "--output", "out.jsonl", *options)
        assert (result.status, result.err) == (0, "")
    (row,) = lines("out.jsonl")
    assert row["id"] == "\ud800"


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda data: b"garbage",
    "empty": lambda data: b"",
    "cut": lambda data: data[:-20],
    "zeros among the pages": lambda data: data[:4] + bytes(len(data) // 2) + data[4 + len(data) // 2 :],
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_damaged_parquet_file_is_rejected(bert: Path, zoo: Zoo, damage: Callable[[bytes], bytes]) -> None:
    table = pa.table({"text": [f"row {n} {n * n}" for n in range(3000)]})
    pq.write_table(table, "in.parquet", compression="none", use_dictionary=False)
    Path("in.parquet").write_bytes(damage(Path("in.parquet").read_bytes()))
    zoo("run", bert, "--input", "in.parquet").failed(3, "in.parquet")


# Errors before the run.

REFUSED = {
    "an unknown task": (("x", "--task", "fill-masks"), "did you mean 'fill-mask'?"),
    "a task of other models": (("x", "--task", "text-generation"), "is not for models of the task feature-extraction"),
    "an unknown setting": (("x", *EMBED, "--option", "poolin=cls"), "did you mean 'pooling'?"),
    "a setting of a wrong type": (("x", *EMBED, "--option", "normalize=7"), "normalize must be bool"),
    "a setting without a value": (("x", *EMBED, "--option", "pooling"), "is not KEY=VALUE"),
    "an option of generation": (("x", "--max-new-tokens", "3"), "unknown key 'max_new_tokens'"),
    "inputs twice": (("x", "--input", "in.jsonl"), "inputs given both as texts and as a file"),
    "a missing column": (("--input", "in.parquet", "--column", "txt"), "no column 'txt': in.parquet: did you mean"),
    "a missing column of ids": (("--input", "in.parquet", "--id-column", "key"), "no column 'key'"),
    "streaming no text": (("x", "--stream"), "only a single generated text"),
    "an unknown variant": (("x", "--variant", "int9"), "did you mean 'int8' or 'int4'?"),
    "a variant and a precision": (("x", "--variant", "cpu", "--dtype", "int8"), "give only one of them"),
    "unsupported precision": (("x", "--dtype", "fp8"), "'fp8' is not one of"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("output", [False, True], ids=["stdout", "file"])
def test_invalid_command_writes_nothing(
    bert: Path, zoo: Zoo, snapshot: Any, computed: list[int], arguments: Any, message: str, output: bool
) -> None:
    write_lines("in.jsonl", [{"text": "x"}])
    pq.write_table(pa.table({"text": ["x"]}), "in.parquet")
    Path("out.jsonl").write_text('{"id": 1, "tokens": 7}\n')
    before = snapshot()
    target = ("--output", "out.jsonl", "--force") if output and "--stream" not in arguments else ()
    zoo("run", bert, *arguments, *target).failed(2, message)
    assert snapshot() == before
    assert computed == []


OUTPUTS = {
    "an unknown suffix": (("--output", "out.txt"), "out.txt: name it *.jsonl, *.ndjson, *.csv, *.tsv, *.parquet"),
    "a directory": (("--output", "folder.jsonl"), "is a directory"),
    "one that exists": (("--output", "out.jsonl"), "already exists: out.jsonl: continue it with --resume"),
    "parquet that exists": (("--output", "out.parquet"), "already exists"),
    "resume without output": (("--resume",), "nothing to continue or replace"),
    "force without output": (("--force",), "nothing to continue or replace"),
    "resume and force": (("--output", "out.jsonl", "--resume", "--force"), "choose one of them"),
    "resume of parquet": (("--output", "out.parquet", "--resume"), "cannot continue a parquet file"),
    "json too": (("--output", "new.jsonl", "--json"), "leave out --json"),
    "the input": (("--input", "out.jsonl", "--output", "out.jsonl", "--force"), "are the same file"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), OUTPUTS.values(), ids=OUTPUTS)
def test_invalid_output_is_rejected(
    bert: Path, zoo: Zoo, snapshot: Any, computed: list[int], arguments: Any, message: str
) -> None:
    for name in ("out.jsonl", "out.parquet"):
        Path(name).write_text('{"id": 1, "text": "precious"}\n')
    Path("folder.jsonl").mkdir()
    before = snapshot()
    texts = () if "--input" in arguments else ("x",)
    zoo("run", bert, *texts, *arguments).failed(2, message)
    assert snapshot() == before
    assert computed == []


@pytest.mark.slow
def test_missing_tokenizer_leaves_no_output(exported_model: Exported, zoo: Zoo, bert: Path) -> None:
    folder = exported_model("bert-tiny", "num_layers=1", tokenizer=False)
    zoo("run", folder, "x", "y", "--output", "out.jsonl").failed(2, "the model has no tokenizer")
    Path("bad.json").write_text("{}")
    for name, what in (("bad.json", "not a tokenizer.json"), ("absent.json", "no such tokenizer")):
        zoo("run", bert, "x", "y", "--tokenizer", name, "--output", "out.jsonl").failed(3, what)
    assert not Path("out.jsonl").exists()


def test_parquet_without_pyarrow_is_reported(
    bert: Path, zoo: Zoo, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reported before anything is computed."""
    parquet_file()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    zoo("run", bert, "x", "--output", "out.parquet").failed(2, "parquet needs pyarrow: pip install attention-zoo[parq")
    zoo("run", bert, "--input", "in.parquet").failed(2, "parquet needs pyarrow")
    assert computed == []


def test_unwritable_output_is_reported(bert: Path, zoo: Zoo, computed: list[int]) -> None:
    Path("file").touch()
    zoo("run", bert, "x", "--output", "file/out.jsonl").failed(6, "cannot write", "file/out.jsonl")
    assert computed == []


# Resuming, replacing, failing.


def test_interrupted_run_is_resumed(bert: Path, zoo: Zoo, computed: list[int]) -> None:
    """Complete rows are not computed again, incomplete ones are; the result equals that of one run."""
    texts = [f"row {n:2}" for n in range(20)]
    write_lines("in.jsonl", [{"id": f"#{n}", "text": text} for n, text in enumerate(texts)])
    run = ("run", bert, "--input", "in.jsonl", *EMBED, "--batch-size", 4, "--output", "out.jsonl")
    with interrupted_at(3):
        result = zoo(*run)
    assert (result.status, result.out, result.err.split()) == (130, "", ["interrupted"])
    begun = Path("out.jsonl").read_bytes()
    assert [row["id"] for row in lines("out.jsonl")] == [f"#{n}" for n in range(8)]
    Path("out.jsonl").write_bytes(begun + b'{"id": "#8", "tok')
    computed.clear()
    result = zoo(*run, "--resume")
    assert (result.status, result.out, result.err) == (0, "", "")
    assert sorted(computed) == list(range(9, 21))
    assert Path("out.jsonl").read_bytes().startswith(begun)
    assert [row["id"] for row in lines("out.jsonl")] == [f"#{n}" for n in range(20)]
    same_embeddings(lines("out.jsonl"), alone(bert, texts))
    done = Path("out.jsonl").read_bytes()
    computed.clear()
    assert zoo(*run, "--resume").status == 0
    assert (computed, Path("out.jsonl").read_bytes()) == ([], done)


def test_resume_starts_a_new_file(bert: Path, zoo: Zoo) -> None:
    assert zoo("run", bert, *TEXTS, *EMBED, "--output", "out.jsonl", "--resume").status == 0
    assert [row["id"] for row in lines("out.jsonl")] == NUMBERS


def test_bad_row_is_reported_each_time(bert: Path, zoo: Zoo) -> None:
    """Even if its number is the id of another, completed row."""
    Path("in.jsonl").write_text('{"id": 2, "text": "x"}\nnot json\n')
    for options in ((), ("--resume",)):
        result = zoo("run", bert, "--input", "in.jsonl", *EMBED, "--output", "out.jsonl", *options)
        assert result.status == 3
        assert "row 2" in result.err
    assert [row["id"] for row in lines("out.jsonl")] == [2]


@pytest.mark.parametrize(
    ("earlier", "now", "column"),
    [
        ([{"text": "a"}, {"text": "b"}], [{"text": "new"}, {"text": "a"}, {"text": "b"}], "text"),
        ([{"text": "a", "n": [1, 0.5]}], [{"text": "a", "n": [1, 0.25]}, {"text": "b", "n": 2}], "n"),
        ([{"text": "a", "tokens": "mine"}], [{"text": "a", "tokens": "other"}], "tokens"),
        ([{"text": "a"}], [{"text": "a", "new": True}], "new"),
    ],
)
def test_changed_inputs_are_not_resumed(bert: Path, zoo: Zoo, earlier: list[Any], now: list[Any], column: str) -> None:
    """Otherwise rows would get the results of others, as their ids are their numbers."""
    run = ("run", bert, "--input", "in.jsonl", *EMBED, "--output", "out.jsonl")
    write_lines("in.jsonl", earlier)
    assert zoo(*run).status == 0
    done = Path("out.jsonl").read_bytes()
    assert zoo(*run, "--resume").status == 0
    write_lines("in.jsonl", now)
    zoo(*run, "--resume").failed(
        2, f"the result with the id 1 is of another input: column '{column}' differs: out.jsonl", "same input"
    )
    assert Path("out.jsonl").read_bytes() == done


@pytest.mark.parametrize("text", ["a single line of notes", '{"text": 1}', '{"id"'])
def test_only_the_beginning_of_a_result_is_removed(bert: Path, zoo: Zoo, text: str) -> None:
    Path("out.jsonl").write_text(text)
    result = zoo("run", bert, "x", *EMBED, "--output", "out.jsonl", "--resume")
    if '{"id": '.startswith(text[:7]):
        assert [row["id"] for row in lines("out.jsonl")] == [1]
    else:
        result.failed(3, "not a result of zoo run: out.jsonl")
        assert Path("out.jsonl").read_text() == text


@pytest.mark.parametrize("line", [b"text", b"[1]", b'{"tokens": 1}', b"\xff"])
def test_other_files_are_not_resumed(bert: Path, zoo: Zoo, snapshot: Any, line: bytes) -> None:
    Path("out.jsonl").write_bytes(line + b"\n")
    before = snapshot()
    zoo("run", bert, "x", "--output", "out.jsonl", "--resume").failed(
        3, "not a result of zoo run: out.jsonl, line 1: resume a file that zoo run wrote"
    )
    assert snapshot() == before


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_force_replaces_existing_output(bert: Path, zoo: Zoo, name: str) -> None:
    Path(name).write_text("old")
    assert zoo("run", bert, "x", *EMBED, "--output", name, "--force").status == 0
    assert Path(name).read_text(errors="replace") != "old"
    record = [f".{name}.run.json"] if name == "out.jsonl" else []
    assert sorted(path.name for path in Path().iterdir()) == [*record, name]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
@pytest.mark.parametrize("target", ["in.txt", "absent"])
def test_links_are_not_replaced(bert: Path, zoo: Zoo, name: str, target: str) -> None:
    """With force, and without; the file that a link names may be the input."""
    Path("in.txt").write_text("precious\n")
    Path(name).symlink_to(target)
    arguments = ["run", bert, "--input", "in.txt" if target == "absent" else "-", *EMBED, "--output", name]
    zoo(*arguments, "--force").failed(2, f"exists and is not a file: {name}: choose another place")
    zoo(*arguments).failed(2, f"already exists: {name}")
    assert Path("in.txt").read_text() == "precious\n"
    assert Path(name).is_symlink()
    assert not Path("absent").exists()


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
@pytest.mark.parametrize("link", [".{}.{}", "{}"])
def test_planted_links_are_not_followed(name: str, link: str) -> None:
    """Under a name that can be guessed, or under that of the output, after it was found to be free."""
    Path("precious").write_text("precious")
    results = Results(Path(name))
    Path(link.format(name, os.getpid())).symlink_to("precious")
    with contextlib.suppress(StorageError, UsageError), results.writing():
        results.write(1, {"score": 0.5})
    assert Path("precious").read_text() == "precious"
    assert Path(name).is_symlink() == (link == "{}")


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_file_of_a_killed_run_is_removed(name: str) -> None:
    """By the next run with the same output, but not while its process lives."""
    Path(name).write_text("old")
    held = Results(Path(name), force=True)
    with held.writing():
        if (process := os.fork()) == 0:
            with Results(Path(name), force=True).writing() as results:
                results.write(1, {"score": 0.5})
                os._exit(9)
        os.waitpid(process, 0)
        assert len(list(Path().iterdir())) == 3
        with Results(Path(name), force=True).writing() as results:
            results.write(2, {"score": 0.5})
        assert len(list(Path().iterdir())) == 2
        held.write(3, {"score": 0.5})
    assert [path.name for path in Path().iterdir()] == [name]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
@pytest.mark.parametrize("call", ["fsync", "replace", "Path.open"])
def test_failed_replacement_keeps_the_old_file(bert: Path, zoo: Zoo, snapshot: Any, name: str, call: str) -> None:
    Path(name).write_text("precious")
    before = snapshot()
    with nth_call(call, 1, full) as calls:
        result = zoo("run", bert, "x", *EMBED, "--output", name, "--force")
    assert calls
    result.failed(6, f"cannot write (No space left on device): {name}: free some space")
    assert snapshot() == before


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_interrupted_replacement_keeps_the_old_file(bert: Path, zoo: Zoo, snapshot: Any, name: str) -> None:
    Path(name).write_text("precious")
    before = snapshot()
    with interrupted_at(2):
        result = zoo("run", bert, *TEXTS, *EMBED, "--batch-size", 1, "--output", name, "--force")
    assert result.status == 130
    assert snapshot() == before


def test_new_parquet_appears_when_it_is_complete(bert: Path, zoo: Zoo) -> None:
    with interrupted_at(2):
        result = zoo("run", bert, *TEXTS, *EMBED, "--batch-size", 1, "--output", "out.parquet")
    assert result.status == 130
    assert list(Path().iterdir()) == []


class NoRoom:
    """A file on a disk with ``room`` free bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.room < 0:
            self.file.write(bytes(data)[: self.room])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self.file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> NoRoom:
        return self

    def __exit__(self, *raised: object) -> None:
        self.file.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_full_disk_keeps_complete_rows(bert: Path, zoo: Zoo) -> None:
    """Complete rows of JSON lines are kept and can be resumed; there is no parquet file."""
    run = ("run", bert, *TEXTS, *EMBED, "--output")
    original = Path.open

    def small(self: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = original(self, mode, *arguments, **options)
        return NoRoom(file, 3000) if {"w", "x", "+"} & set(mode) else file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", small)
        zoo(*run, "out.parquet").failed(6, "No space left on device", "out.parquet")
        gc.collect()
        assert list(Path().iterdir()) == []
        zoo(*run, "out.jsonl").failed(6, "No space left on device", "out.jsonl")
    torn = Path("out.jsonl").read_bytes()
    assert 1 <= torn.count(b"\n") < len(TEXTS)
    assert not torn.endswith(b"\n")
    assert zoo(*run, "out.jsonl", "--resume").status == 0
    assert [row["id"] for row in lines("out.jsonl")] == NUMBERS
    same_embeddings(lines("out.jsonl"), alone(bert, TEXTS))


def test_rows_are_read_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("a\nb\n")
    rows = read_rows(str(path), "text")
    assert next(rows).input == "a"
    with pytest.raises(ArtifactError, match="no such file"):
        read_rows(str(tmp_path / "absent.txt"), "text")


@pytest.mark.parametrize("name", ["in.csv", "in.jsonl"])
def test_limit_of_texts_applies_to_rows(bert: Path, zoo: Zoo, name: str) -> None:
    """In every format; the csv module has a limit of its own, which fails the file."""
    texts = ["x", "y" * 200_000, "z" * 4_000_001]
    if name == "in.csv":
        Path(name).write_text("\n".join(["text", *texts]) + "\n")
    else:
        Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ran = zoo("run", bert, "--input", name, "-o", "out.jsonl", "--truncate")
    assert ran.status == 3
    assert "a text of 4,000,001 characters: at most 4,000,000 are allowed" in ran.err
    assert [row["id"] for row in lines("out.jsonl")] == [1, 2]


def test_two_commands_with_one_output() -> None:
    """The second one to begin to write ends, and leaves the file of the first one."""
    first, second = Results(Path("out.jsonl")), Results(Path("out.jsonl"))
    with first.writing() as results:
        results.write(1, {"text": "mine"})
        with pytest.raises(UsageError, match=r"another command has created this file meanwhile: out\.jsonl"):
            second.writing().__enter__()
    assert Path("out.jsonl").read_text() == '{"id": 1, "text": "mine"}\n'
