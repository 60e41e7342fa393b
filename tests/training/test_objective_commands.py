"""``zoo train`` with each objective, from files to a model directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zoo as library
from tests.conftest import Result

Zoo = Callable[..., Result]
SMALL = ("--set", "hidden_size=16", "--set", "num_layers=1", "--set", "num_heads=2", "--set", "max_seq_len=32")
FAST = (*SMALL, "--tokenizer", "bytes", "--set", "batch_size=4", "--max-steps", "3")


def write(rows: list[dict[str, Any]]) -> str:
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return "rows.jsonl"


def test_masked_lm_reads_whole_texts(zoo: Zoo) -> None:
    """Plain text becomes examples of the longest length, none of it truncated."""
    Path("corpus.txt").write_text("a line of text\n" * 100)
    said = zoo("train", "bert-tiny", "--task", "fill-mask", "--data", "corpus.txt", "-o", "m", *FAST)
    assert said.status == 0, said.err
    assert "truncated" not in said.err
    record = json.loads(Path("m/training.json").read_text())
    assert record["objective"] == "masked-lm"
    facts = {"rows": 1, "bad": 0, "truncated": 0, "tokens": 1500, "encoded": 0, "unknown": 0, "ambiguous": 0,
             "noted": {}}  # fmt: skip
    assert record["rows"] == facts
    assert record["options"] == {"rate": 0.15, "whole_word": False}


def test_options_are_settings(zoo: Zoo) -> None:
    Path("corpus.txt").write_text("a line of text\n" * 9)
    arguments = ("train", "bert-tiny", "--task", "fill-mask", "--data", "corpus.txt", "-o", "m", *FAST)
    assert "rate must be more than 0" in zoo(*arguments, "--set", "rate=0").failed(2)
    assert "divides texts into words" in zoo(*arguments, "--set", "whole_word=true").failed(2)
    assert "mask_token_id is not set" in zoo(*arguments, "--set", "mask_token_id=none").failed(2)


def test_classes_of_tokens_come_from_the_data(zoo: Zoo) -> None:
    data = write([{"words": ["Ann", "ate"], "tags": ["PER", "O"]}, {"words": ["Bonn"], "tags": ["LOC"]}] * 4)
    said = zoo("train", "bert-tiny", "--task", "token-classification", "--data", data, "--text-column", "words",
               "--label-column", "tags", "-o", "m", *FAST)  # fmt: skip
    assert said.status == 0, said.err
    config = library.load("m").config
    assert config.labels == ("LOC", "O", "PER")
    assert config.problem_type == "single_label_classification"


def test_several_classes_of_a_text_come_from_the_data(zoo: Zoo) -> None:
    data = write([{"text": "good and fast", "label": ["good", "fast"]}, {"text": "good", "label": ["good"]}] * 4)
    said = zoo("train", "bert-tiny", "--task", "text-classification", "--data", data, "-o", "m", *FAST)
    assert said.status == 0, said.err
    config = library.load("m").config
    assert config.labels == ("fast", "good")
    assert config.problem_type == "multi_label_classification"


def test_rows_with_other_columns_are_reported(zoo: Zoo) -> None:
    data = write([{"text": "a", "label": "x"}, {"text": "a", "pair": "b", "label": "y"}])
    said = zoo("train", "bert-tiny", "--task", "text-classification", "--data", data, "-o", "m", *FAST)
    assert "1 of 2 rows cannot be used: rows.jsonl, row 2: has other columns" in said.failed(3)


def test_whole_steps_are_required(zoo: Zoo) -> None:
    data = write([{"text": "a", "pair": "b"}] * 8)
    arguments = ("train", "bert-tiny", "--task", "sentence-embedding", "--data", data, "-o", "m", *FAST)
    said = zoo(*arguments, "--set", "micro_batch_size=2")
    assert "a step cannot be divided: micro_batch_size 2 of batch_size 4" in said.failed(2)
    assert not Path("m").exists()
    assert zoo(*arguments, "--set", "micro_batch_size=2", "--set", "loss=triplet").failed(3).count("has no 'negative'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("fill-mask", {"text": "some text"}),
        ("pretraining", {"text": "some text", "pair": "and more", "label": 0}),
        ("replaced-token-detection", {"text": "some text"}),
        ("question-answering", {"text": "what", "pair": "some text", "label": {"start": 0, "text": "some"}}),
        ("sentence-embedding", {"text": "some text", "pair": "and more"}),
    ],
)
def test_exports_have_the_loss_of_the_module(zoo: Zoo, task: str, row: dict[str, Any]) -> None:
    rows = [{**row, "text": row["text"] + " x" * number} for number in range(6)]
    if task == "pretraining":
        rows[0]["label"] = 1
    data = write(rows)
    assert zoo("train", "bert-tiny", "--task", task, "--data", data, "-o", "m", *FAST).status == 0
    assert zoo("export", "m", "--onnx").status == 0
    scores = zoo("evaluate", "m", "--data", data, "--json").json["scores"]
    assert [item["variant"] for item in scores] == ["torch", "onnx"]
    assert scores[1]["loss"] == pytest.approx(scores[0]["loss"], rel=1e-4)
    assert scores[1]["targets"] == scores[0]["targets"]
    assert scores[1].keys() == scores[0].keys()


def test_options_of_data_take_several_files(zoo: Zoo) -> None:
    """Files that the shell has expanded from a pattern may stand before or after the model. A directory is no file."""
    for name in ("a.txt", "b.txt", "c.txt"):
        Path(name).write_text("a line of text\n" * 20)
    data = ("--data", "a.txt", "b.txt", "--validation", "c.txt")
    for arguments in (("bert-tiny", *data), (*data, "bert-tiny")):
        said = zoo("train", *arguments, "--task", "fill-mask", *FAST, "-o", "m", "--force")
        assert said.status == 0, said.err
        assert json.loads(Path("m/training.json").read_text())["rows"]["rows"] == 2
    scores = zoo("evaluate", "--data", "a.txt", "b.txt", "m", "--variant", "torch", "--json").json["scores"]
    assert len(scores) == 1
    zoo("evaluate", "m", "a.txt", "--data", "b.txt").failed(2, "unexpected extra argument")
