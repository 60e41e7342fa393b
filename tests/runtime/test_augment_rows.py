"""Augmentation of training data: rows with their labels, and variants by a prompt."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zoo.errors import ArtifactError, UsageError
from zoo_runtime import load_session
from zoo_runtime.running.session import Session
from zoo_runtime.tasks.augment.prompted import PromptOptions

arrow = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
ROWS = [
    {"text": "time flies", "label": "good", "source": 1},
    {"text": 'an, "arrow"', "label": "bad", "source": 2},
    {"text": "fruit", "label": "good", "source": 3},
]
MASKED = ("--task", "augment", "--option", "num_variants=2", "--option", "whole_words=false")


@pytest.fixture
def masked(exported_model: Exported) -> Path:
    return exported_model("bert-tiny", "task=fill-mask", "mask_token_id=259", noise=True, gain=12.0)


@pytest.fixture
def writer(exported_model: Exported) -> Path:
    return exported_model("gpt-tiny", seed=1, gain=12.0)


@pytest.fixture
def session(writer: Path) -> Iterator[Session]:
    with load_session(writer) as session:
        yield session


def write(path: str) -> str:
    """Write the rows in the format of a suffix."""
    if path.endswith(".parquet"):
        pq.write_table(arrow.Table.from_pylist(ROWS), path)
    elif path.endswith(".csv"):
        with Path(path).open("w", newline="") as file:
            table = csv.DictWriter(file, list(ROWS[0]))
            table.writeheader()
            table.writerows(ROWS)
    else:
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def read(path: str) -> list[dict[str, Any]]:
    if path.endswith(".parquet"):
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file)) if path.endswith(".csv") else [json.loads(line) for line in file]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("given", ["in.jsonl", "in.csv", "in.parquet"])
@pytest.mark.parametrize("made", ["out.jsonl", "out.csv", "out.parquet"])
def test_rows_and_their_variants_keep_all_columns(masked: Path, zoo: Zoo, given: str, made: str) -> None:
    """Each row is followed by its variants, as the same model gives them, with the same label."""
    result = zoo("run", masked, "--input", write(given), *MASKED, "--training-data", made)
    assert (result.status, result.out) == (0, "")
    assert f"{made}: 9 rows of 3 inputs" in result.err
    with load_session(masked) as session:
        texts = [row["text"] for row in ROWS]
        found = session.run(texts, task="augment", num_variants=2, whole_words=False)
    as_text = given.endswith(".csv") or made.endswith(".csv")
    expected = [
        {**row, "text": text, "source": str(row["source"]) if as_text else row["source"]}
        for row, answer in zip(ROWS, found, strict=True)
        for text in (row["text"], *(variant["text"] for variant in answer["variants"]))
    ]
    assert read(made) == expected


def test_written_rows_are_training_data(masked: Path, zoo: Zoo) -> None:
    zoo("run", masked, "--input", write("in.jsonl"), *MASKED, "--training-data", "more.jsonl")
    arguments = ("--task", "text-classification", "--tokenizer", "bytes", "--max-steps", 2, "-o", "judge")
    assert zoo("train", "bert-tiny", "--data", "more.jsonl", *arguments).status == 0
    assert json.loads(Path("judge/config.json").read_text())["config"]["labels"] == ["bad", "good"]


def test_inputs_that_fail_keep_their_row(masked: Path, zoo: Zoo) -> None:
    """A row that the model cannot read is written without variants; the command fails."""
    rows = [{"text": "x" * 200, "label": "long"}, {"text": "time", "label": "short"}]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = zoo("run", masked, "--input", "in.jsonl", *MASKED, "--training-data", "out.jsonl")
    assert (result.status, result.out) == (3, "")
    assert "error: 1 of 2 inputs failed" in result.err
    assert [row["label"] for row in read("out.jsonl")] == ["long", "short", "short", "short"]
    assert read("out.jsonl")[0] == rows[0]


REFUSED: dict[str, tuple[tuple[str, ...], int, str]] = {
    "another output": (("-o", "x.jsonl"), 2, "gives the only output: --training-data"),
    "JSON": (("--json",), 2, "gives the only output: --training-data"),
    "another format": (("--training-data", "x.txt"), 2, "unknown file type: x.txt"),
    "no text": (("--ids", "5,6"), 2, "inputs without a text cannot be written as rows"),
}


@pytest.mark.parametrize(("arguments", "status", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(masked: Path, zoo: Zoo, arguments: tuple[str, ...], status: int, message: str) -> None:
    """Nothing is written."""
    text = () if "--ids" in arguments else ("time",)
    zoo("run", masked, *text, *MASKED, "--training-data", "out.jsonl", *arguments).failed(status, message)
    assert not Path("out.jsonl").exists()


def test_tasks_without_variants_are_refused(masked: Path, zoo: Zoo) -> None:
    run = ("run", masked, "time <mask>", "--training-data", "out.jsonl")
    zoo(*run).failed(2, "the task fill-mask makes no variants: --training-data: --task augment")


def test_existing_files_and_lists_in_tables_are_refused(masked: Path, zoo: Zoo) -> None:
    Path("out.csv").write_text("kept")
    run = ("run", masked, *MASKED, "--input", write("in.jsonl"), "--training-data", "out.csv")
    zoo(*run).failed(2, "exists: out.csv")
    Path("in.jsonl").write_text(json.dumps({"text": "time", "label": ["a", "b"]}) + "\n")
    zoo(*run, "--force").failed(2, "column 'label' holds lists")
    assert Path("out.csv").read_text() == "kept"
    zoo("run", masked, *MASKED, "--input", "in.jsonl", "--training-data", "in.jsonl").failed(2, "are the same file")


@pytest.mark.slow
def test_prompts_hold_the_columns(session: Session) -> None:
    """A variant is the continuation of the prompt; the first of several differ by their random numbers."""
    options = {"max_new_tokens": 5, "seed": 3}
    row = {"text": "time", "label": "good"}
    answer = session.run(
        [row], task="augment", prompt="{label} {{{text}}}:", num_variants=1, temperature=0.0, **options
    )
    (plain,) = session.run(["good {time}:"], **options)
    (variant,) = answer[0]["variants"]
    assert variant == {
        "text": plain["generated"].strip(), "ids": plain["generated_ids"], "finish_reason": plain["finish_reason"]
    }  # fmt: skip
    several = session.run([row], task="augment", prompt="{label}: {text}", num_variants=6, **options)[0]["variants"]
    assert len({tuple(variant["ids"]) for variant in several}) == 6


@pytest.mark.slow
def test_variants_do_not_depend_on_the_batch(session: Session) -> None:
    rows = [{"text": text, "label": label} for text, label in (("time flies", 1), ("an arrow", 0), ("x", 1))]
    options = {"task": "augment", "prompt": "{label}: {text}\n{label}:", "num_variants": 2, "max_new_tokens": 4}
    together = session.run(rows, batch_size=3, **options)
    assert together == session.run(rows, batch_size=1, **options)


def test_variants_follow_the_distribution_of_the_model(session: Session) -> None:
    """The first tokens of 400 variants have the model's probabilities, at temperature 2, within four deviations."""
    (answer,) = session.run(["time"], task="augment", num_variants=400, max_new_tokens=1, temperature=2.0, top_k=3)
    found = [variant["ids"][0] for variant in answer["variants"]]
    (wanted,) = session.run(["time"], task="next-token", top_k=3)
    roots = {entry["token"]: entry["probability"] ** 0.5 for entry in wanted["next"]}
    assert set(found) == roots.keys()
    for token, root in roots.items():
        assert found.count(token) / 400 == pytest.approx(root / sum(roots.values()), abs=0.1)


def test_prompted_rows_are_written(writer: Path, zoo: Zoo) -> None:
    prompt = ("--task", "augment", "--option", "prompt={label}: {text}", "--max-new-tokens", 4)
    run = ("run", writer, *prompt, "--option", "num_variants=3")
    assert zoo(*run, "--input", write("in.parquet"), "--training-data", "out.parquet").status == 0
    found = read("out.parquet")
    assert {row["source"]: row["label"] for row in found} == {1: "good", 2: "bad", 3: "good"}
    assert 3 < len(found) <= 12
    assert pq.read_schema("out.parquet").field("source").type == pq.read_schema("in.parquet").field("source").type
    assert zoo(*run, "--input", "in.parquet").out.startswith("'time flies': '")
    zoo(*run, "a text alone").failed(3, "has no 'label' for the prompt: input 1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "{text.__class__}"}, "has the placeholder {text.__class__}: write the name of a column"),
        ({"prompt": "{}"}, "has the placeholder {}: write the name of a column"),
        ({"prompt": "{text"}, "is malformed"),
        ({"temperature": 0.0}, "num_variants is 4, but at temperature 0 all variants are the same"),
        ({"num_variants": 0}, "num_variants must be positive"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        PromptOptions.from_dict(options)
    assert message in str(caught.value)


def test_a_missing_column_fails_one_input(session: Session) -> None:
    rows = [{"text": "a", "label": None}, {"text": "b", "label": "good"}]
    answers = list(session.map(rows, task="augment", prompt="{label} {text}", max_new_tokens=2))
    assert isinstance(answers[0].error, ArtifactError)
    assert len(answers[1].result["variants"]) == 4


def test_columns_that_parquet_cannot_hold(writer: Path, zoo: Zoo) -> None:
    rows = [{"text": "time flies", "source": 2**63}, {"text": "an arrow", "source": 1}]
    run = ("run", writer, "--task", "augment", "--max-new-tokens", 2, "--input", "in.jsonl", "--training-data")
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert zoo(*run, "out.parquet").status == 0
    assert {row["source"] for row in read("out.parquet")} == {2**63, 1}
    Path("in.jsonl").write_text("".join(json.dumps(row | {"source": [row["source"]]}) + "\n" for row in rows))
    zoo(*run, "b.parquet").failed(6, "parquet cannot hold the integer 9223372036854775808 in column 'source'")
