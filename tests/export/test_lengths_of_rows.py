"""Training, ``zoo evaluate`` and ``zoo run`` truncate the same rows, and say how many."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zoo as library
from tests.conftest import Result
from tests.exported import sign_export
from zoo.artifact import ModelDirectory
from zoo.errors import ZooWarning
from zoo.tokenizers.long_texts.truncation import text_limit
from zoo_runtime import load_session

Zoo = Callable[..., Result]
SIZES = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 24}
LIMIT = 8


def write(name: str, rows: list[dict[str, Any]]) -> Path:
    Path(name).write_text("\n".join(map(json.dumps, rows)))
    return Path(name)


def trained(zoo: Zoo, task: str, rows: list[dict[str, Any]], *options: str) -> Result:
    sizes = [part for key, value in SIZES.items() for part in ("--set", f"{key}={value}")]
    command = (
        "train",
        "bert-tiny",
        "--task",
        task,
        "--data",
        write("rows.jsonl", rows),
        "--tokenizer",
        "bytes",
        "-o",
        "m",
    )
    said = zoo(*command, "--max-steps", "2", "--set", f"max_length={LIMIT}", *sizes, *options)
    assert said.status == 0, said.err
    return said


@pytest.mark.slow
def test_a_trained_model_truncates_as_in_training(zoo: Zoo) -> None:
    rows = [{"text": "tea " * (number + 1), "label": "ab"[number % 2]} for number in range(8)]
    long = sum(len(row["text"]) > LIMIT for row in rows)
    said = trained(zoo, "text-classification", rows)
    line = f"of 8 rows: {long} truncated to {LIMIT} tokens"
    assert f"{line} (--set max_length=N sets another length, up to the model's positions)\n" in said.err
    assert (
        f"{line} (as in training: read whole texts with --no-truncate)\n"
        in zoo("evaluate", "m", "--data", "rows.jsonl").err
    )
    sign_export(Path("m"))
    done = zoo("run", "m", "--input", "rows.jsonl", "-o", "out.jsonl")
    remedy = "read whole texts with --no-truncate (truncate=False)"
    assert (done.status, done.err) == (
        0,
        f"warning: {long} texts truncated to {LIMIT} tokens, as in training: m: {remedy}\n",
    )
    tokens = [json.loads(line)["tokens"] for line in Path("out.jsonl").read_text().splitlines()]
    assert tokens == [min(len(row["text"]), LIMIT) for row in rows]
    whole = zoo("run", "m", rows[-4]["text"], "--no-truncate", "--json")
    assert whole.json["results"][0]["tokens"] == len(rows[-4]["text"]) > LIMIT
    with load_session("m") as session, pytest.warns(ZooWarning, match="1 text truncated to 8 tokens, as in"):
        assert session.run(list(range(5, 5 + LIMIT + 3)))["tokens"] == LIMIT

    failed = zoo("run", "m", "--input", "rows.jsonl", "-o", "whole.jsonl", "--no-truncate")
    assert failed.status == 3
    assert failed.err.count("exceed the model's 24 positions") == 2  # of 28 and 32 tokens

    description = json.loads(Path("m/config.json").read_text())
    assert description["origin"]["training"].pop("max_length") == LIMIT
    stored = ModelDirectory.open("m")
    assert text_limit(stored, None) == LIMIT
    older = replace(stored, description=description)
    assert older.origin.last_training is not None
    assert text_limit(older, None) is None


def test_a_row_with_several_long_texts_counts_once(zoo: Zoo) -> None:
    long = "tea " * 5
    rows = [{"text": long, "pair": long}, {"text": "tea", "pair": long}, {"text": "tea", "pair": "rain"}]
    line = f"of 3 rows: 2 truncated to {LIMIT} tokens"
    assert line in trained(zoo, "sentence-embedding", rows).err
    assert line in zoo("evaluate", "m", "--data", "rows.jsonl", "--variant", "torch", "--metric", "loss").err


@pytest.mark.slow
def test_many_inputs_that_fail_alike_have_few_warnings(zoo: Zoo) -> None:
    rows = [{"text": "x" * (25 + number)} for number in range(9)]
    model = library.create_model("bert-tiny", task="text-classification", num_classes=2, **SIZES)
    library.save(model, "m", tokenizer="bytes")
    sign_export(Path("m"))
    write("rows.jsonl", [*rows, {"text": ""}, {"text": "tea"}])
    failed = zoo("run", "m", "--input", "rows.jsonl", "-o", "out.jsonl")
    lines = failed.err.splitlines()
    assert failed.status == 3
    assert [line for line in lines if "positions" in line] == [
        *(f"warning: {25 + number} tokens exceed the model's 24 positions: input {number + 1}: shorten it, or pass "
          "--truncate" for number in range(3)),
        "warning: 6 more inputs failed likewise: N tokens exceed the model's N positions",
    ]  # fmt: skip
    assert lines[-1] == "error: 10 of 11 inputs failed: m: see the warnings above"

    rows = [
        {"text": text, "label": "01"[number % 2]} for number, text in enumerate(("tea", "x" * 25, "rain", "y" * 30))
    ]
    write("labelled.jsonl", rows)
    command = ("evaluate", "m", "--data", "labelled.jsonl", "--json")
    refused = zoo(*command, "--predictions", "predictions.jsonl")
    assert refused.status == 3
    for number, row in enumerate(map(json.loads, Path("predictions.jsonl").read_text().splitlines())):
        assert (row["text"], row["target"]) == (rows[number]["text"], rows[number]["label"])
        failed = number in (1, 3)
        assert [row[f"prediction_{name}"] is None for name in ("torch", "onnx")] == [failed, failed]
        assert ["24 positions" in (row[f"error_{name}"] or "") for name in ("torch", "onnx")] == [failed, failed]
    assert (
        "error: rows without an answer: 2 of torch, 2 of onnx: 25 tokens exceed the model's 24 positions: row 2: "
        in (refused.err)
    )
    assert [(row["variant"], "f1" in row) for row in refused.json["scores"]] == [("torch", False), ("onnx", False)]
    done = zoo(*command, "--truncate")
    assert done.status == 0
    assert "of 4 rows: 2 truncated to 24 tokens" in done.err
    assert all("f1" in row for row in done.json["scores"])

    for row in done.json["scores"]:  # each can be chosen by the name that is shown
        assert zoo(*command, "--truncate", "--variant", row["variant"]).json["scores"] == [row]
    assert zoo(*command, "--truncate", "--variant", "").json["scores"] == done.json["scores"][1:]


def test_questions_are_read_in_the_windows_of_the_training(zoo: Zoo) -> None:
    text = "met in town and Ada lived in Rome. " * 3
    row = {"text": "who", "pair": text, "label": {"start": text.index("Ada"), "text": "Ada"}}
    said = trained(zoo, "question-answering", [row], "--set", "max_length=16")
    windows = -(-(len(text) - 8) // (16 - len("who") - 8))  # each shares 8 tokens with the next
    line = f"of 1 rows: {windows} windows, {windows - 2} windows without the answer"
    assert line in said.err
    evaluated = zoo("evaluate", "m", "--data", "rows.jsonl", "--json")
    assert line in evaluated.err
    assert evaluated.json["scores"][0]["targets"] == windows


def test_bleu_of_short_texts_is_left_out(zoo: Zoo) -> None:
    model = library.create_model("transformer-tiny", **SIZES)
    library.save(model, "m", tokenizer="bytes")
    write("rows.jsonl", [{"text": "one", "target": "uno"}, {"text": "two", "target": "dos tres"}])
    said = zoo("evaluate", "m", "--data", "rows.jsonl", "--json")
    (found,) = said.json["scores"]
    assert "bleu" not in found
    assert "chrf" in found
    assert "note: bleu is left out: no target has four words" in said.err
