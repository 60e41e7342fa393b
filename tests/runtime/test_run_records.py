"""The record beside a file of results: a run that is resumed must not mix models, options or versions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.test_run import interrupted_at
from zoo_runtime.running.text_runner import TextRunner

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
TEXTS = [f"row {n}" for n in range(6)]
OUT, RECORD = Path("out.jsonl"), Path(".out.jsonl.run.json")
LESS, MORE = ("--task", "next-token", "--top-k", 2), ("--task", "next-token", "--top-k", 3)


@pytest.fixture
def gpt(exported_model: Exported) -> Path:
    return exported_model("gpt-tiny")


def begin(zoo: Zoo, model: Path, *options: object) -> bytes:
    """Interrupt a run that wrote some rows, and return them."""
    with interrupted_at(2):
        assert zoo("run", model, *TEXTS, "--batch-size", 2, "--output", OUT, *options).status == 130
    assert 0 < OUT.read_bytes().count(b"\n") < len(TEXTS)
    return OUT.read_bytes()


def test_other_options_are_not_resumed(gpt: Path, zoo: Zoo) -> None:
    begun = begin(zoo, gpt, *LESS)
    run = ("run", gpt, *TEXTS, "--batch-size", 2, "--output", OUT, "--resume")
    zoo(*run, *MORE).failed(
        2,
        "its results are of other options (options: top_k=2, now top_k=3): out.jsonl: "
        "repeat its model and options, or start again with --force",
    )
    zoo(*run, *LESS, "--threads", 1).failed(2, "its results are of other options (session: ")
    assert OUT.read_bytes() == begun
    assert zoo(*run, *LESS).status == 0
    assert OUT.read_bytes().startswith(begun)
    assert OUT.read_bytes().count(b"\n") == len(TEXTS)


def test_another_model_is_not_resumed(gpt: Path, exported_model: Exported, zoo: Zoo) -> None:
    """Nor one at the same path, nor after the run is complete, when it would only add rows."""
    shutil.copytree(gpt, "model")
    run = ("run", "model", "--output", OUT, *LESS)
    assert zoo(*run, *TEXTS[:3]).status == 0
    done = OUT.read_bytes()
    shutil.rmtree("model")
    shutil.copytree(exported_model("llama-tiny"), "model")
    zoo(*run, *TEXTS, "--resume").failed(2, "its results are of another model, export or evidence: out.jsonl")
    assert OUT.read_bytes() == done
    shutil.rmtree("model")
    shutil.copytree(gpt, "model")
    assert zoo(*run, *TEXTS, "--resume").status == 0
    assert OUT.read_bytes().startswith(done)


def test_results_without_a_record_are_not_resumed(gpt: Path, zoo: Zoo) -> None:
    begun = begin(zoo, gpt, *LESS)
    RECORD.unlink()
    run = ("run", gpt, *TEXTS, "--batch-size", 2, "--output", OUT, *LESS)
    zoo(*run, "--resume").failed(
        3, "the record of what its results are of is missing: .out.jsonl.run.json: out.jsonl: start again with --force"
    )
    assert OUT.read_bytes() == begun
    assert zoo(*run, "--force").status == 0
    assert RECORD.exists()


def test_record_belongs_to_the_file_that_a_link_names(gpt: Path, zoo: Zoo) -> None:
    """A link that leads to the results of other options is not taken for those that it led to before."""
    done = []
    for name, options in (("first.jsonl", LESS), ("second.jsonl", MORE)):
        assert zoo("run", gpt, *TEXTS[:3], "--output", name, *options).status == 0
        done.append(Path(name).read_bytes())
    OUT.symlink_to("first.jsonl")
    run = ("run", gpt, *TEXTS, "--output", OUT, *LESS, "--resume")
    assert zoo(*run).status == 0
    assert Path("first.jsonl").read_bytes().startswith(done[0])
    assert not RECORD.exists()
    OUT.unlink()
    OUT.symlink_to("second.jsonl")
    zoo(*run).failed(2, "its results are of other options (options: top_k=3, now top_k=2): out.jsonl")
    assert Path("second.jsonl").read_bytes() == done[1]


def test_replaced_results_are_missed(gpt: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose file another one has replaced does not report success."""
    original = TextRunner.compute
    Path("other.jsonl").write_text('{"id": 1}\n')

    def compute(self: TextRunner, items: Any) -> Any:
        if Path("other.jsonl").exists():
            Path("other.jsonl").replace(OUT)
        return original(self, items)

    monkeypatch.setattr(TextRunner, "compute", compute)
    zoo("run", gpt, *TEXTS, "--output", OUT, *LESS).failed(6, "another command has replaced this file", "out.jsonl")
    assert OUT.read_text() == '{"id": 1}\n'


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"model": 1, "options": 2}', '{"model": "x", "options": null}'])
def test_damaged_record(gpt: Path, zoo: Zoo, text: str) -> None:
    begun = begin(zoo, gpt, *LESS)
    RECORD.write_text(text)
    run = ("run", gpt, *TEXTS, "--batch-size", 2, "--output", OUT, *LESS, "--resume")
    zoo(*run).failed(3, "the record of a run is damaged (", ".out.jsonl.run.json: start again with --force")
    assert OUT.read_bytes() == begun


@pytest.mark.parametrize("source", ["line", "argument", "ids"])
def test_changed_inputs_are_not_resumed(gpt: Path, zoo: Zoo, source: str) -> None:
    """Lines, arguments and token ids have no columns, but are compared in the rows that have results."""

    def given(texts: list[str]) -> list[object]:
        match source:
            case "argument":
                return list(texts)
            case "ids":
                return [part for text in texts for part in ("--ids", ",".join(str(ord(letter)) for letter in text))]
        Path("in.txt").write_text("\n".join(texts))
        return ["--input", "in.txt"]

    run = ("run", gpt, "--output", OUT, *LESS)
    assert zoo(*run, *given(TEXTS[:3])).status == 0
    done, record = OUT.read_bytes(), RECORD.read_bytes()
    result = zoo(*run, *given(["row 0", "row 9", *TEXTS[2:]]), "--resume")
    result.failed(2, "is of another input", "resume with the same input, or start again with --force")
    assert (OUT.read_bytes(), RECORD.read_bytes()) == (done, record)
    assert zoo(*run, *given(TEXTS), "--resume").status == 0
    assert OUT.read_bytes().startswith(done)
    assert RECORD.read_bytes().count(b"\n") == 1 + len(TEXTS)
    assert zoo(*run, *given(TEXTS), "--resume").status == 0
    zoo(*run, *given([*TEXTS[:5], "row 7"]), "--resume").failed(2, "is of another input")


def test_inputs_that_failed_may_change(gpt: Path, zoo: Zoo) -> None:
    run = ("run", gpt, "--input", "in.txt", "--output", OUT, *LESS)
    Path("in.txt").write_bytes(b"row 0\n\xff\nrow 2\n")
    assert zoo(*run).status == 3
    Path("in.txt").write_bytes(b"row 0\nrow 1\nrow 2\n")
    assert zoo(*run, "--resume").status == 0
    assert sorted(json.loads(line)["id"] for line in OUT.read_text().splitlines()) == [1, 2, 3]
    assert zoo(*run, "--resume").status == 0


@pytest.mark.parametrize("end", [0, 3, -1])
def test_record_without_a_result_s_input(gpt: Path, zoo: Zoo, end: int) -> None:
    """Results that the record does not know, and its incomplete last line, are not taken for those of any input."""
    run = ("run", gpt, *TEXTS, "--output", OUT, *LESS)
    assert zoo(*run).status == 0
    first, *lines = RECORD.read_bytes().splitlines(keepends=True)
    RECORD.write_bytes(first + b"".join(lines)[: end if end < 0 else len(b"".join(lines[:end]))])
    zoo(*run, "--resume").failed(2, f"the input of the result with the id {end % 6 + 1} is not recorded: out.jsonl")


def test_replaced_results_have_the_record_of_the_later_run(gpt: Path, zoo: Zoo) -> None:
    """An interrupted replacement keeps the results and their record."""
    run = ("run", gpt, *TEXTS, "--batch-size", 2, "--output", OUT)
    assert zoo(*run, *LESS).status == 0
    done, record = OUT.read_bytes(), RECORD.read_bytes()
    with interrupted_at(2):
        assert zoo(*run, *MORE, "--force").status == 130
    assert (OUT.read_bytes(), RECORD.read_bytes()) == (done, record)
    assert zoo(*run, *MORE, "--force").status == 0
    assert json.loads(RECORD.read_bytes().splitlines()[0])["options"]["options"] == {"top_k": 3}
    assert RECORD.read_bytes().count(b"\n") == 1 + len(TEXTS)
    assert zoo(*run, *MORE, "--resume").status == 0
    zoo(*run, *LESS, "--resume").failed(2, "its results are of other options")


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_files_with_the_name_of_the_record_are_kept(gpt: Path, zoo: Zoo, kind: str) -> None:
    """Neither a new run nor a replacement of results removes what is not the record of a run."""
    Path("notes").write_text("mine")
    match kind:
        case "file":
            RECORD.write_text("mine")
        case "link":
            RECORD.symlink_to("notes")
        case _:
            RECORD.mkdir()
    run = ("run", gpt, *TEXTS, "--output", OUT, *LESS)
    zoo(*run).failed(2, ".out.jsonl.run.json")
    assert not OUT.exists()
    assert RECORD.is_symlink() == (kind == "link")
    assert RECORD.is_dir() or RECORD.read_text() == "mine"
    if kind != "file":
        OUT.write_text("old")
        zoo(*run, "--force").failed(2, "exists and is not a file: ", "/.out.jsonl.run.json: choose another place")
        assert OUT.read_text() == "old"
        assert RECORD.is_symlink() == (kind == "link")


def test_nothing_is_left_of_a_run_without_results(gpt: Path, zoo: Zoo) -> None:
    with interrupted_at(1):
        assert zoo("run", gpt, "x", "--output", OUT, *LESS).status == 130
    assert not OUT.exists()
    assert not RECORD.exists()
