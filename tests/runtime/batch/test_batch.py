"""Batches with the local engine: the bytes of single runs, whatever the number of workers, and whatever is killed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import full, nth_call
from tests.exported import vouch
from tests.runtime.batch.conftest import files, kill_some, manifest, start
from zoo import system
from zoo.errors import ArtifactError
from zoo_runtime.batch import local
from zoo_runtime.batch.folders import open_folder
from zoo_runtime.batch.manifest import Manifest
from zoo_runtime.batch.plan import Plan
from zoo_runtime.batch.shards import _open

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
Corpus = Callable[..., Path]
Here = Callable[..., None]


@pytest.fixture
def bert(exported_model: Exported) -> Path:
    return exported_model("bert-tiny")


def single_runs(zoo: Zoo, model: Path, source: Path, names: dict[str, str]) -> dict[str, bytes]:
    """Run each file by itself; ``names`` are those of the inputs and of their results."""
    found = {}
    for name, target in names.items():
        ran = zoo("run", model, "--input", source / name, "-o", f"alone-{target}")
        assert ran.status == 0, ran.err
        found[target] = Path(f"alone-{target}").read_bytes()
    return found


@pytest.mark.parametrize("workers", [1, 3])
def test_results_are_those_of_single_runs(bert: Path, zoo: Zoo, corpus: Corpus, workers: int) -> None:
    source = corpus(2)
    (source / "lines.txt").write_text("one\ntwo\n")
    (source / "_SUCCESS").touch()
    pq.write_table(pa.table({"id": ["a", "b"], "text": ["time", "flies"]}), source / "p.parquet")
    ran = zoo("run", bert, "--input", source, "--output", "out", "--workers", workers)
    assert (ran.status, ran.err) == (0, "out: 10 results of 4 files\n")
    names = {"s0.jsonl": "s0.jsonl", "s1.jsonl": "s1.jsonl", "lines.txt": "lines.jsonl", "p.parquet": "p.parquet"}
    assert files(Path("out")) == single_runs(zoo, bert, source, names)
    lines = {line["results"]: line for line in manifest(Path("out"))}
    assert lines.keys() == set(names.values())
    for name, data in files(Path("out")).items():
        assert (lines[name]["sha256"], lines[name]["bytes"]) == (hashlib.sha256(data).hexdigest(), len(data))
    assert (lines["lines.jsonl"]["input"], lines["lines.jsonl"]["rows"]) == ("lines.txt", 2)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("task", ["sentence-embedding", "feature-extraction"])
@pytest.mark.parametrize("key", ["key", None])
def test_results_without_rows_have_the_columns_of_others(
    bert: Path, zoo: Zoo, here: Here, tmp_path: Path, task: str, key: str | None
) -> None:
    """They are a part of the data set that the folder is."""
    here()
    source = tmp_path / "in"
    source.mkdir()
    schema = pa.schema({"key": pa.string(), "text": pa.string(), "year": pa.int16()})
    for name, rows in (
        ("full", [("a", "time", 1), ("b", "flies", 2)]), ("empty", []), ("failed", [("c", None, 3), ("d", "", 4)]),
    ):  # fmt: skip
        columns = [dict(zip(schema.names, row, strict=True)) for row in rows]
        pq.write_table(pa.Table.from_pylist(columns, schema=schema), source / f"{name}.parquet")
    options = ("--task", task, *(("--id-column", key) if key else ()), "--no-special")
    ran = zoo("run", bert, "--input", source, "--output", "out", "--engine", "here", *options)
    assert ran.status == 3
    full, empty, failed = (pq.read_table(f"out/{name}.parquet") for name in ("full", "empty", "failed"))
    assert (full.num_rows, empty.num_rows, failed.num_rows) == (2, 0, 0)
    assert "embedding" in full.schema.names or task == "feature-extraction"
    assert full.schema.equals(empty.schema, check_metadata=True), empty.schema
    assert full.schema.equals(failed.schema, check_metadata=True), failed.schema
    assert zoo("run", bert, "--input", source / "failed.parquet", "-o", "alone.parquet", *options).status == 3
    assert Path("alone.parquet").read_bytes() == Path("out/failed.parquet").read_bytes()


@pytest.mark.slow
def test_options_apply_to_every_file(exported_model: Exported, zoo: Zoo, corpus: Corpus, here: Here) -> None:
    here()
    options = ("--max-new-tokens", 2, "--option", "top_k=5", "--temperature", 0.8, "--seed", 3, "--stop", "q")
    source, gpt = corpus(2, 2), exported_model("gpt-tiny")
    ran = zoo("run", gpt, "--input", f"{source}/*1.jsonl", "--output", "out", *options, "--engine", "here")
    assert ran.status == 0, ran.err
    assert zoo("run", gpt, "--input", source / "s1.jsonl", "-o", "alone.jsonl", *options).status == 0
    assert files(Path("out")) == {"s1.jsonl": Path("alone.jsonl").read_bytes()}


def test_bad_rows_are_reported_each_time(bert: Path, zoo: Zoo, corpus: Corpus, here: Here) -> None:
    here()
    source = corpus(2)
    with (source / "s1.jsonl").open("a") as file:
        file.write('{"id": 1}\n{"id": 2, "text": ""}\n{"id": 3, "text": 4}\n')
    ran = zoo("run", bert, "--input", source, "--output", "out", "--engine", "here")
    warnings = [line for line in ran.err.splitlines() if line.startswith("warning: ")]
    assert ran.status == 3
    assert ran.err.endswith(f"error: 3 of 9 inputs failed: {bert}: see the warnings above\n")
    alone = zoo("run", bert, "--input", source / "s1.jsonl", "-o", "alone.jsonl")
    expected = [line.removeprefix("warning: ") for line in alone.err.splitlines() if line.startswith("warning: ")]
    assert len(expected) == 3
    found = [line.removeprefix("warning: ").removeprefix("in/s1.jsonl: ") for line in warnings]
    assert found == [line.replace(f"{source}/", "in/") for line in expected]
    assert files(Path("out"))["s1.jsonl"] == Path("alone.jsonl").read_bytes()
    again = zoo("run", bert, "--input", source, "--output", "out", "--engine", "here", "--resume")
    assert again.status == 3
    assert "s1.jsonl: 3 of 6 inputs failed in an earlier run" in again.err


def test_file_with_a_column_of_results(bert: Path, zoo: Zoo, corpus: Corpus, here: Here) -> None:
    """The column of the input gets another name, and a warning says so."""
    here()
    source = corpus(1)
    pq.write_table(pa.table({"text": ["x"], "embedding": ["y"]}), source / "clash.parquet")
    ran = zoo("run", bert, "--input", source, "--output", "out", "--engine", "here", "--task", "sentence-embedding")
    assert ran.status == 0
    assert "warning: in/clash.parquet: column 'embedding' of the input is named 'input_embedding'" in ran.err
    (row,) = pq.read_table("out/clash.parquet").to_pylist()
    assert row["input_embedding"] == "y"
    assert len(row["embedding"]) > 1


def test_damaged_file_does_not_stop_the_others(bert: Path, zoo: Zoo, corpus: Corpus, here: Here) -> None:
    here()
    source = corpus(2)
    (source / "bad.parquet").write_bytes(b"PAR1")
    ran = zoo("run", bert, "--input", source, "--output", "out", "--engine", "here")
    assert ran.status == 3
    assert "warning: not a parquet file" in ran.err
    assert "error: 1 of 3 files failed" in ran.err
    assert sorted(files(Path("out"))) == ["s0.jsonl", "s1.jsonl"]


@pytest.mark.parametrize("option", ["--column", "--id-column", "--pair-column"])
def test_file_without_a_column_does_not_stop_the_others(
    bert: Path, zoo: Zoo, here: Here, tmp_path: Path, option: str
) -> None:
    """In every format, also in one whose rows have columns of their own."""
    here()
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.csv").write_text("text\nx\n")
    (source / "b.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    pq.write_table(pa.table({"text": ["x"]}), source / "c.parquet")
    (source / "d.jsonl").write_text('{"text": "x"}\n{"text": "y", "key": "1"}\n')
    ran = zoo("run", bert, "--input", source, "--output", "out", "--engine", "here", option, "key")
    assert ran.status == 3
    warnings = [line for line in ran.err.splitlines() if line.startswith("warning: ")]
    assert [": ".join(line.split(": ")[1:3]) for line in warnings][:4] == [
        "no column 'key': in/a.csv",
        "every row has no 'key': in/b.jsonl",
        "no column 'key': in/c.parquet",
        "has no 'key': in/d.jsonl, row 1",
    ]
    assert ran.err.splitlines()[-1].startswith("error: 3 of 4 files failed")
    assert sorted(files(Path("out"))) == ["d.jsonl"]


def test_resume_opens_no_finished_file(bert: Path, zoo: Zoo, corpus: Corpus, here: Here, monkeypatch) -> None:
    """A file that changed, and one whose results are missing, are run again; other files are not even opened."""
    here()
    source = corpus(4)
    assert zoo("run", bert, "--input", source, "--output", "out", "--engine", "here").status == 0
    before, stat = files(Path("out")), (source / "s0.jsonl").stat()
    (source / "s0.jsonl").write_bytes(b"\0" * stat.st_size)  # a reader would fail
    os.utime(source / "s0.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (source / "s1.jsonl").write_text('{"id": 1, "text": "new"}\n')
    Path("out/s2.jsonl").unlink()
    ran = zoo("run", bert, "--input", source, "--output", "out", "--engine", "here", "--resume")
    assert ran.status == 0, ran.err
    assert [line.rpartition("/")[2] for line in ran.err.splitlines() if "run again" in line] == ["s1.jsonl", "s2.jsonl"]
    assert ran.err.endswith("out: 10 results of 4 files, 2 of them from an earlier run\n")
    after = files(Path("out"))
    assert {name for name in before if before[name] != after[name]} == {"s1.jsonl"}
    assert [line["results"] for line in manifest(Path("out"))][4:] == ["s1.jsonl", "s2.jsonl"]


def test_results_whose_input_is_gone_are_reported(bert: Path, zoo: Zoo, corpus: Corpus, here: Here) -> None:
    here()
    source = corpus(4)
    base = ("run", bert, "--input", source, "--output", "out", "--engine", "here")
    assert zoo(*base).status == 0
    (source / "s1.jsonl").unlink()
    (source / "s3.jsonl").unlink()
    ran = zoo(*base, "--resume")
    what = "results of an earlier run whose inputs are not among these: out/s1.jsonl and 1 more"
    assert (ran.status, ran.err.splitlines()[0]) == (0, f"warning: {what}")
    assert ran.err.endswith("out: 6 results of 2 files, 2 of them from an earlier run\n")
    Path("out/s1.jsonl").unlink()
    Path("out/s3.jsonl").unlink()
    assert "earlier run whose" not in zoo(*base, "--resume").err


def test_only_files_of_killed_workers_are_removed(bert: Path, zoo: Zoo, corpus: Corpus, here: Here) -> None:
    here()
    base = ("run", bert, "--input", corpus(2), "--output", "out", "--engine", "here")
    assert zoo(*base).status == 0
    left = [f".zoo-shard-{'0a' * 8}.jsonl", f".zoo-shard-{'0b' * 8}.parquet"]
    foreign = [".my.zoo-shard-notes", ".zoo-shard-notes.txt", "zoo-shard-0a0a0a0a0a0a0a0a.jsonl"]
    for name in (*left, *foreign):
        Path("out", name).write_text("kept?")
    assert zoo(*base, "--resume").status == 0
    assert [name for name in (*left, *foreign) if Path("out", name).exists()] == foreign


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--memory", "mapped"), "other options (session: memory=fast, now memory=mapped)"),
        (("--batch-size", "2"), "other options (batch_size: None, now 2)"),
        (("--threads", "2"), "other options (session: threads=1, now threads=2)"),
        (("--task", "sentence-embedding"), "other options (task: None, now sentence-embedding)"),
    ],
)
def test_other_options_do_not_resume(
    bert: Path,
    zoo: Zoo,
    corpus: Corpus,
    here: Here,
    snapshot: Any,
    change: tuple[str, str],
    message: str,
) -> None:
    here()
    base = ("run", bert, "--input", corpus(1), "--output", "out", "--engine", "here")
    assert zoo(*base).status == 0
    before = snapshot()
    zoo(*base, *change, "--resume").failed(2, message, "repeat the options")
    assert snapshot() == before


def test_other_model_does_not_resume(exported_copy: Exported, zoo: Zoo, corpus: Corpus, here: Here, seal: Any) -> None:
    """Not even one with new evidence for the same graph."""
    here()
    copy = exported_copy("bert-tiny")
    base = ("run", copy, "--input", corpus(1), "--output", "out", "--engine", "here")
    assert zoo(*base).status == 0
    evidence = json.loads((copy / "parity.json").read_text())
    (copy / "parity.json").write_text(json.dumps(evidence | {"note": "compared again"}))
    vouch(copy)
    seal(copy)
    zoo(*base, "--resume").failed(2, "another model")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("option", ["--draft", "--option"])
def test_other_model_that_drafts_does_not_resume(
    exported_model: Exported, zoo: Zoo, corpus: Corpus, here: Here, option: str
) -> None:
    here()
    first, second = exported_model("gpt-tiny"), exported_model("gpt-tiny", seed=1)
    base = ("run", first, "--input", corpus(2, 1), "--output", "out", "--engine", "here", "--max-new-tokens", 2)
    given = ("--draft", "D") if option == "--draft" else ("--option", "draft=D")
    ran = zoo(*base, *given)
    ran.failed(3, "no such directory", "/D")
    assert "warning" not in ran.err
    assert not Path("out").exists()
    Path("D").symlink_to(first)
    assert zoo(*base, *given).status == 0
    assert zoo(*base, *given, "--resume").status == 0
    Path("D").unlink()
    Path("D").symlink_to(second)
    zoo(*base, *given, "--resume").failed(2, "another model, export or evidence, or of a change in", "/D: --output")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--input", "in/*.csv"), 3, "no files: --input in/*.csv"),
        (("--input", "none/"), 3, "no files: --input none/"),
        (("--input", "in", "--output", "in"), 2, "into the folder of inputs"),
        (("--input", "in", "--output", "in/out"), 2, "into the folder of inputs"),
        (("--input", "in/*.jsonl", "--output", "in"), 2, "among the inputs"),
        (("--input", "*/s0.jsonl"), 2, "would both become s0.jsonl"),
        (("--input", "other"), 3, "not a file of inputs (x.md)"),
        (("--input", "nested"), 3, "not a regular file (deeper)"),
        (("--input", "pipes"), 3, "not a regular file (p.txt): --input pipes"),
        (("--input", "pipes/*.txt"), 3, "not a regular file (p.txt)"),
        (("--input", "pipes/p.txt", "--engine", "local"), 3, "not a regular file (p.txt)"),
        (("--input", "linked"), 3, "cannot read linked/s.jsonl (No such file or directory): --input linked"),
        (("--input", "in", "--output", "file"), 2, "is not a folder"),
        (("--input", "in", "--output", "file/out"), 6, "cannot write (Not a directory)"),
        (("--input", "in", "--output", "full"), 2, "already has files: --output"),
        (("--input", "in", "--output", "full", "--resume"), 3, "not those of a batch"),
        (("--input", "in", "--output", "out.jsonl"), 2, "files in a folder"),
        (("--input", "in", "--force"), 2, "not for a batch: --force"),
        (("--input", "in", "--json"), 2, "not for a batch: --json"),
        (("--input", "in", "text"), 2, "not for a batch: TEXT"),
        (("--input", "in", "--engine", "dask"), 2, "no plugin provides the engine 'dask'"),
        (("--workers", "2"), 2, "a batch needs files and a folder"),
        (("--input", "in", "--column", "body", "--engine", "here"), 3, "2 of 2 files failed"),
        (("--input", "in", "--option", "nonsense=1", "--engine", "here"), 2, "nonsense"),
        (("--input", "nope://x/*.jsonl"), 2, "fsspec cannot open it"),
    ],
)
def test_invalid_batches_write_nothing(
    bert: Path,
    zoo: Zoo,
    corpus: Corpus,
    here: Here,
    snapshot: Any,
    arguments: Any,
    status: int,
    message: str,
) -> None:
    here()
    corpus(2)
    corpus(1, folder="second")
    Path("file").touch()
    for folder, name in (("other", "x.md"), ("nested/deeper", "s.jsonl"), ("full", "s0.jsonl")):
        Path(folder).mkdir(parents=True)
        (Path(folder) / name).write_text("{}\n")
    Path("pipes").mkdir()
    os.mkfifo("pipes/p.txt")
    Path("linked").mkdir()
    Path("linked/s.jsonl").symlink_to("nothing")
    before = snapshot()
    output = () if "--output" in arguments or arguments[0] == "--workers" else ("--output", "out")
    ran = zoo("run", bert, *arguments, *output)
    assert ran.status == status, ran.err
    assert message in ran.err
    assert ran.err.splitlines()[-1].startswith("error: ")
    if "--engine" not in arguments:
        assert snapshot() == before


def test_run_that_could_not_write_to_its_manifest_continues(bert: Path, zoo: Zoo, corpus: Corpus) -> None:
    source = corpus(1)
    Path("out").mkdir()
    Path("out/_zoo.manifest").touch()
    assert zoo("run", bert, "--input", source, "--output", "out", "--resume").status == 0
    assert list(files(Path("out"))) == ["s0.jsonl"]


def test_two_runs_do_not_share_a_folder(bert: Path, zoo: Zoo, corpus: Corpus) -> None:
    source = corpus(1)
    Path("out").mkdir()
    release = system.try_lock(Path("out"))
    assert release is not None
    zoo("run", bert, "--input", source, "--output", "out").failed(6, "another run is writing to it")
    release()


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def run(plan, shards, workers):\n    return []", "did not run"),
        ("def run(plan, shards, workers):\n    return [run_shard(plan, shards[0])]", "did not run"),
        ("def run(plan, shards, workers):\n    return [run_shard(plan, shards[0])] * 2", "or twice"),
        (
            "def run(plan, shards, workers):\n    return [Done(target='s0.jsonl', sha256='0' * 64)]",
            "did not write results",
        ),
        ("def run(plan, shards, workers):\n    return [Done(target=['s0.jsonl'])]", "which it was not to run"),
        ("def run(plan, shards, workers):\n    return [Done(target='other')]", "which it was not to run"),
        ("def run(plan, shards, workers):\n    return [1]", "returned int"),
        ("def run(plan, shards, workers):\n    raise OSError('no cluster')", "no cluster"),
        ("def run(plan, shards, workers):\n    yield run_shard(plan, shards[0])\n    1 / 0", "division by zero"),
    ],
)
def test_engine_that_lies_is_a_plugin_error(
    bert: Path, zoo: Zoo, corpus: Corpus, here: Here, code: str, message: str
) -> None:
    """Results that it has written before are kept."""
    here(f"from zoo_runtime.batch import Done, run_shard\n\n\n{code}\n")
    base = ("run", bert, "--input", corpus(2), "--output", "out")
    zoo(*base, "--engine", "here").failed(5, "zoo-here", message)
    assert len(manifest(Path("out"))) == ("run_shard" in code)
    assert set(files(Path("out"))) == {line["results"] for line in manifest(Path("out"))}


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rows=999", "the results have 3 rows, not 999"),
        ("rows=-3", "rows is -3"),
        ("rows=True", "rows is True"),
        ("rows='3'", "rows is '3'"),
        ("failed=5", "5 of 3 inputs failed"),
        ("failed=1", "the results have 3 rows, not 2"),
        ("size=9", "bytes, not 9"),
        ("size=None", "size is None"),
        ("sha256='0' * 64", "not 0000000"),
        ("sha256='0'", "64 hexadecimal digits"),
        ("sha256=None", "64 hexadecimal digits"),
        ("warnings='abc'", "warnings is 'abc'"),
        ("warnings=[1]", "warnings is [1]"),
        ("warnings=None", "warnings is None"),
        ("failure='oops'", "failure is 'oops'"),
        ("failure=Failure(kind='ZooError', text=3)", "which must be a zoo_runtime.batch.Failure of texts"),
    ],
)
def test_outcome_that_is_not_true_is_a_plugin_error(
    bert: Path, zoo: Zoo, corpus: Corpus, here: Here, change: str, message: str
) -> None:
    here(
        "from dataclasses import replace\nfrom zoo_runtime.batch import Failure, run_shard\n\n\n"
        f"def run(plan, shards, workers):\n    return [replace(run_shard(plan, shards[0]), {change})]\n"
    )
    ran = zoo("run", bert, "--input", corpus(2), "--output", "out", "--engine", "here")
    ran.failed(5, "zoo-here", "a false outcome of s0.jsonl (", message, "s0.jsonl")
    assert manifest(Path("out")) == []


@pytest.mark.parametrize("name", ["s0.jsonl", "p.parquet"])
def test_results_that_an_engine_changed_are_a_plugin_error(
    bert: Path, zoo: Zoo, corpus: Corpus, here: Here, name: str
) -> None:
    """With the true size and digest."""
    here("""\
import hashlib
from dataclasses import replace
from pathlib import Path

from zoo_runtime.batch import run_shard


def run(plan, shards, workers):
    for shard in shards:
        done = run_shard(plan, shard)
        path = Path(plan.output, done.target)
        data = b"".join(path.read_bytes().splitlines(True)[:-1])
        path.write_bytes(data)
        yield replace(done, size=len(data), sha256=hashlib.sha256(data).hexdigest())
""")
    source = corpus(1)
    pq.write_table(pa.table({"text": ["x", "y"]}), source / "p.parquet")
    ran = zoo("run", bert, "--input", source / name, "--output", "out", "--engine", "here")
    ran.failed(5, "zoo-here", {"s0.jsonl": "2 rows, not 3", "p.parquet": "not a parquet file"}[name])


def test_failure_names_its_file(bert: Path, zoo: Zoo, corpus: Corpus, here: Here) -> None:
    here("""\
from zoo_runtime.batch import Done, Failure


def run(plan, shards, workers):
    return [Done(target=shard.target, failure=Failure(kind="ZooError", text="lost it")) for shard in shards]
""")
    ran = zoo("run", bert, "--input", corpus(1), "--output", "out", "--engine", "here")
    assert ran.err.startswith("warning: in/s0.jsonl: lost it\n")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failure_to_commit_leaves_no_temporary_file(
    bert: Path, zoo: Zoo, corpus: Corpus, here: Here, call: str
) -> None:
    here()
    base = ("run", bert, "--input", corpus(2), "--output", "out", "--engine", "here")
    assert zoo(*base[:-4], "--output", "other", "--engine", "here").status == 0  # fills the cache, which replaces files
    # The first calls write the manifest, and the first shard.
    with nth_call(call, {"fsync": 8, "replace": 2}[call], full):
        zoo(*base).failed(6, "cannot write (No space left on device)")
    assert set(files(Path("out"))) == {line["results"] for line in manifest(Path("out"))}
    assert len(files(Path("out"))) < 2
    assert zoo(*base, "--resume").status == 0
    assert len(files(Path("out"))) == 2


@pytest.mark.parametrize(
    "head",
    ['{"options": null}', '{"options": "0"}', "[]", '{"options": ' + "[" * 100_000],
    ids=["no options", "text", "list", "deep"],
)
def test_damaged_head_of_the_manifest_is_refused(tmp_path: Path, head: str) -> None:
    plan = Plan(directory="model", model="0", output="out", session={}, versions={})
    written = head.replace("{", '{"schema": 1, "model": "0", ', 1)
    (tmp_path / "_zoo.manifest").write_text(f"{written}\n")
    folder = open_folder(str(tmp_path))
    with folder.locked(), pytest.raises(ArtifactError, match="the manifest is damaged in line 1"):
        Manifest(folder, plan, "out", resume=True)


def test_torn_line_of_the_manifest_is_run_again(bert: Path, zoo: Zoo, corpus: Corpus, here: Here) -> None:
    here()
    base = ("run", bert, "--input", corpus(2), "--output", "out", "--engine", "here")
    assert zoo(*base).status == 0
    path = Path("out/_zoo.manifest")
    before = path.read_bytes()
    path.write_bytes(before[:-9])
    assert zoo(*base, "--resume").err == "out: 6 results of 2 files, 1 of them from an earlier run\n"
    assert path.read_bytes() == before
    path.write_bytes(before.replace(b'"bytes"', b'"bites"'))
    zoo(*base, "--resume").failed(3, "the manifest is damaged in line 2")
    path.write_bytes(before + b"[" * 100_000 + b"\n")
    zoo(*base, "--resume").failed(3, "the manifest is damaged in line 4")
    path.write_bytes(before)
    Path("out/s0.jsonl").write_text("edited")
    zoo(*base, "--resume").failed(3, "out/s0.jsonl: remove it", "was changed")


def test_model_that_changes_during_a_run_is_refused(
    exported_copy: Exported, zoo: Zoo, corpus: Corpus, here: Any
) -> None:
    """As on a machine with another model directory of the same name."""
    here("import dataclasses\nfrom zoo_runtime.batch import run_shard\n\n\ndef run(plan, shards, workers):\n"
         "    yield run_shard(dataclasses.replace(plan, model='0' * 64), shards[0])\n")  # fmt: skip
    ran = zoo("run", exported_copy("bert-tiny"), "--input", corpus(1), "--output", "out", "--engine", "here")
    ran.failed(2, "the model changed")


def test_error_of_a_worker_ends_the_run(bert: Path, zoo: Zoo, corpus: Corpus) -> None:
    base = ("run", bert, "--input", corpus(2), "--output", "out", "--workers", 2)
    before = {*psutil.Process().children()}  # of other tests in this process
    zoo(*base, "--option", "nonsense=1").failed(2, "nonsense")
    assert {*psutil.Process().children()} <= before


def test_shard_that_kills_its_workers_fails(bert: Path, zoo: Zoo, corpus: Corpus, install: Any, monkeypatch) -> None:
    """The others are run."""
    monkeypatch.setattr(local, "ATTEMPTS", 2)
    head = "import zoo\n\nZOO_API = 1\n\n\n@zoo.hookimpl\ndef zoo_tasks():\n"
    task = 'zoo.Task(name="deadly", run="{module}_task:Deadly", serves=("feature-extraction",))'
    code = """\
import os
from zoo_runtime.tasks.encoders import Features


class Deadly(Features):
    def answer(self, items):
        if any(len(item.ids) > 20 for item in items):
            os.kill(os.getpid(), 9)
        return super().answer(items)
"""
    folder = install("zoo-deadly", f"{head}    return [{task}]\n", files={"{module}_task.py": code})
    monkeypatch.setenv("PYTHONPATH", str(folder))
    source = corpus(2)
    (source / "deadly.jsonl").write_text(json.dumps({"text": "x" * 25}) + "\n")
    ran = zoo("run", bert, "--input", source, "--output", "out", "--task", "deadly", "--workers", 1)
    assert ran.status == 3
    assert "2 workers died (signal 9)" in ran.err
    assert sorted(files(Path("out"))) == ["s0.jsonl", "s1.jsonl"]


def workers(run: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(run.pid).children()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kills by signal")
@pytest.mark.parametrize(("shards", "rows", "kills"), [(8, 1000, 2), (60, 1000, 20)])
def test_killed_workers_and_a_killed_run_lose_nothing(
    bert: Path, zoo: Zoo, corpus: Corpus, shards: int, rows: int, kills: int
) -> None:
    source = corpus(shards, rows)
    run = start(bert, source, "--workers", "2")
    assert kill_some(run, workers, kills, seed=shards, done=1) == kills
    kept = len(manifest(Path("out")))
    assert kept < shards
    ran = zoo("run", bert, "--input", source, "--output", "out", "--workers", 2, "--resume")
    assert ran.status == 0, ran.err
    assert f"{kept} of them from an earlier run" in ran.err or not kept
    assert len(manifest(Path("out"))) == shards
    names = {f"s{number}.jsonl": f"s{number}.jsonl" for number in range(0, shards, max(1, shards // 4))}
    expected, found = single_runs(zoo, bert, source, names), files(Path("out"))
    assert {name: found[name] for name in expected} == expected
    assert len(found) == shards
    digests = {line["results"]: line["sha256"] for line in manifest(Path("out"))}
    assert digests == {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}


@pytest.fixture(autouse=True)
def opened_anew() -> Any:
    yield
    _open.cache_clear()
