"""Batches whose inputs or results are elsewhere: in memory, and on a server that only some processes reach."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import full
from tests.runtime.batch.conftest import files, manifest
from zoo.errors import ArtifactError, StorageError
from zoo_runtime.batch import folders
from zoo_runtime.batch.folders import open_folder
from zoo_runtime.batch.input_files import fetched, find_shards

fsspec = pytest.importorskip("fsspec")

Exported = Callable[..., Path]
Zoo = Callable[..., Any]


@pytest.fixture
def bert(exported_model: Exported) -> Path:
    return exported_model("bert-tiny")


@pytest.fixture
def memory() -> Iterator[Any]:
    """Return the file system of fsspec in this process's memory."""
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("part", [1, 256])
def test_objects_are_read_and_written(
    bert: Path, zoo: Zoo, corpus: Any, here: Any, memory: Any, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """The manifest is in parts, each a whole object; a resumed run adds parts."""
    here()
    monkeypatch.setattr(folders, "_PART", part)
    source = corpus(3)
    memory.put(f"{source}/", "bucket/in/", recursive=True)
    base = ("run", bert, "--input", "memory://bucket/in/*.jsonl", "--output", "memory://bucket/out", "--engine", "here")
    ran = zoo(*base)
    assert (ran.status, ran.err) == (0, "memory://bucket/out: 9 results of 3 files\n")
    assert zoo("run", bert, "--input", source, "--output", "out", "--engine", "here").status == 0
    found = {path.rpartition("/")[2]: memory.cat_file(path) for path in memory.ls("bucket/out", detail=False)}
    parts = sorted(name for name in found if name.startswith("_zoo.manifest."))
    assert {name: data for name, data in found.items() if name not in parts} == files(Path("out"))
    lines = [json.loads(line) for name in parts for line in found[name].splitlines()]
    assert len(parts) == (4 if part == 1 else 1)
    assert [line["sha256"] for line in lines[1:]] == [line["sha256"] for line in manifest(Path("out"))]
    memory.rm_file("bucket/out/s1.jsonl")
    memory.pipe_file("bucket/in/s2.jsonl", b'{"id": 1, "text": "new"}\n')
    again = zoo(*base, "--resume")
    assert again.err.endswith("7 results of 3 files, 1 of them from an earlier run\n"), again.err
    assert memory.cat_file("bucket/out/s1.jsonl") == files(Path("out"))["s1.jsonl"]
    assert zoo(*base, "--resume").err.endswith("7 results of 3 files, 3 of them from an earlier run\n")
    zoo(*base).failed(2, "already has files: --output memory://bucket/out")
    zoo(*base[:4], "--output", "memory://bucket/in", "--engine", "here").failed(2, "among the inputs")
    zoo("run", bert, "--input", "memory://bucket/none", "--output", "x").failed(3, "no files")


def test_worker_processes_reach_a_server(bert: Path, zoo: Zoo, corpus: Any, shelf: Path) -> None:
    """Where files can be renamed, one appears by a rename, and no temporary file remains."""
    source = corpus(3)
    with (source / "s1.jsonl").open("a") as file:
        file.write('{"id": 1}\n')
    (shelf / "in").symlink_to(source)
    ran = zoo("run", bert, "--input", f"shelf://{shelf}/in", "--output", f"shelf://{shelf}/out", "--workers", 2)
    assert ran.status == 3, ran.err
    assert f"has no 'text': shelf://{shelf}/in/s1.jsonl, row 4" in ran.err
    assert (
        zoo("run", bert, "--input", f"file://{source}", "--output", "file://" + str(Path("out").resolve())).status == 3
    )
    found = {path.name: path.read_bytes() for path in (shelf / "out").iterdir()}
    assert {name: data for name, data in found.items() if not name.startswith("_")} == files(Path("out"))
    assert sorted(found) == ["_zoo.manifest.000000", "s0.jsonl", "s1.jsonl", "s2.jsonl"]


def test_failures_of_a_server_are_one_line(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe_file("bucket/in/s.jsonl", b"{}\n")
    (shard,) = find_shards("memory://bucket/in", "memory://bucket/out")
    assert (shard.source, shard.size, shard.target) == ("memory:///bucket/in/s.jsonl", 3, "s.jsonl")
    monkeypatch.setattr(type(memory), "get_file", lambda *_, **__: full())
    with (
        pytest.raises(ArtifactError, match=r"cannot read \(.*No space.*\): memory:///bucket/in/s.jsonl"),
        fetched(shard.source),
    ):
        pass
    monkeypatch.setattr(type(memory), "put_file", lambda *_, **__: full())
    folder = open_folder("memory://bucket/out")
    message = r"cannot write \(.*No space.*\): memory://bucket/out/s.jsonl"
    with pytest.raises(StorageError, match=message), folder.writing("s.jsonl") as path:
        path.write_text("x")
    assert folder.sizes() == {}
