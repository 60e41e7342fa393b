"""Inputs of two texts: next-sentence prediction, and classes of pairs, against the same model called directly."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertTokenizer

import zoo as library
from zoo.errors import ArtifactError, UsageError
from zoo_runtime import Pair, load_session
from zoo_runtime.running.session import Session

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
POSITIONS = 32
NEXT = ("--task", "next-sentence")
PAIRS = [("time flies", "an arrow"), ("x", "y"), ("é", "fruit flies like"), ("an arrow", "time flies")]
PRETRAINED = ("task=pretraining", "mask_token_id=259")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "time", "flies", "an", "arrow", "##s", "!"]


@pytest.fixture
def model(exported_model: Exported) -> Path:
    return exported_model("bert-tiny", *PRETRAINED, noise=True, gain=2.0)


@pytest.fixture
def classifier(exported_model: Exported) -> Path:
    return exported_model("bert-tiny", "task=text-classification", "num_classes=3", noise=True, gain=2.0)


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n")
    return path


def direct(folder: Path, ids: Sequence[int], types: Sequence[int], name: str) -> torch.Tensor:
    """Compute the model's probabilities in torch for one input without padding."""
    with torch.inference_mode():
        outputs = library.load(folder)(torch.tensor([ids]), token_type_ids=torch.tensor([types]))
    return outputs[name][0].double().softmax(-1)


def segments(first: Sequence[Any], second: Sequence[Any]) -> list[int]:
    return [0] * len(first) + [1] * len(second)


def follows(folder: Path, first: str, second: str) -> float:
    one, other = first.encode(), second.encode()
    return float(direct(folder, [*one, *other], segments(one, other), "next_sentence_logits")[0])


@pytest.fixture
def wanted(model: Path) -> list[float]:
    chances = [follows(model, *pair) for pair in PAIRS]
    assert np.ptp(chances) > 1e-2, "the pairs must have different probabilities"
    return chances


def written(rows: Sequence[dict[str, Any]]) -> str:
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "in.jsonl"


# Results.


@pytest.mark.slow
def test_batch_of_pairs_equals_single_pairs(model: Path, wanted: list[float]) -> None:
    """Different lengths, in order; a single pair is one input, and lists within a list are pairs."""
    with load_session(model) as session:
        results = session.run(PAIRS, task="next-sentence")
        np.testing.assert_allclose([result["follows"] for result in results], wanted, rtol=0, atol=1e-5)
        assert [result["tokens"] for result in results] == [len("".join(pair).encode()) for pair in PAIRS]
        alone = session.run(Pair(*PAIRS[0]), task="next-sentence")
        assert alone["follows"] == pytest.approx(wanted[0], abs=1e-5)
        (by_ids,) = session.run([[list(text.encode()) for text in PAIRS[0]]], task="next-sentence")
        assert by_ids == pytest.approx(alone)


@pytest.mark.slow
def test_order_of_two_texts_matters(wanted: list[float]) -> None:
    """Otherwise segments and positions would be lost."""
    assert abs(wanted[0] - wanted[3]) > 1e-4


@pytest.mark.slow
def test_segments_reach_the_model(model: Path, wanted: list[float]) -> None:
    ids = [byte for text in PAIRS[0] for byte in text.encode()]
    assert abs(float(direct(model, ids, [0] * len(ids), "next_sentence_logits")[0]) - wanted[0]) > 1e-4


@pytest.mark.slow
@given(numbers=st.lists(st.sampled_from(range(len(PAIRS))), min_size=1, max_size=7), batch=st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_pair_does_not_depend_on_its_batch(pretrained_session: Session, numbers: list[int], batch: int) -> None:
    alone = [pretrained_session.run(Pair(*pair), task="next-sentence")["follows"] for pair in PAIRS]
    found = pretrained_session.run([PAIRS[number] for number in numbers], task="next-sentence", batch_size=batch)
    np.testing.assert_allclose(
        [result["follows"] for result in found], [alone[number] for number in numbers], rtol=0, atol=1e-5
    )


@pytest.fixture(scope="module")
def pretrained_session(exported_model: Exported) -> Any:
    with load_session(exported_model("bert-tiny", *PRETRAINED, noise=True, gain=2.0)) as session:
        yield session


def test_pairs_are_encoded_like_bert(model: Path, vocabulary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """[CLS] first [SEP] second [SEP] with segment 1 for the second, as in transformers; padding has segment 0."""
    execute, fed = Session.execute, []
    monkeypatch.setattr(Session, "execute", lambda self, graph, feeds: fed.append(feeds) or execute(self, graph, feeds))
    with load_session(model, tokenizer=vocabulary) as session:
        session.run([("Time flies!", "an arrow"), ("arrows", "time")], task="next-sentence")
    (feeds,) = fed
    theirs = BertTokenizer(str(vocabulary))
    rows = theirs(["Time flies!", "arrows"], ["an arrow", "time"], padding=True)
    assert rows["input_ids"][0] == [2, 5, 6, 10, 3, 7, 8, 3]
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert feeds[name].tolist() == rows[name], name


@pytest.mark.slow
def test_classes_of_pairs_and_of_texts(classifier: Path) -> None:
    """In one batch."""
    with load_session(classifier) as session:
        inputs: list[Any] = [PAIRS[0], "time flies", PAIRS[2]]
        results = session.run(inputs, task="text-classification")
    texts = [PAIRS[0], ("time flies", ""), PAIRS[2]]
    for (first, second), result in zip(texts, results, strict=True):
        one, other = first.encode(), second.encode()
        chances = direct(classifier, [*one, *other], segments(one, other), "logits")
        np.testing.assert_allclose(result["probabilities"], chances, rtol=0, atol=1e-5)
    assert np.ptp([result["probabilities"][0] for result in results]) > 1e-3


def test_model_with_one_segment_gets_segment_zero(classifier: Path, redeclared: Callable[..., Path]) -> None:
    """As in RoBERTa, although the tokenizer has two segments."""
    with load_session(redeclared(classifier, type_vocab_size=1)) as session:
        found = session.run(Pair(*PAIRS[0]))["probabilities"]
        np.testing.assert_array_equal(found, session.run("".join(PAIRS[0]))["probabilities"])


@pytest.mark.slow
def test_model_without_segments_accepts_pairs(exported_model: Exported) -> None:
    folder = exported_model("bert-tiny", "task=text-classification", "num_layers=1", "type_vocab_size=0", noise=True)
    with load_session(folder) as session:
        found = session.run(Pair(*PAIRS[0]))["probabilities"]
        np.testing.assert_array_equal(found, session.run("".join(PAIRS[0]))["probabilities"])


# Sources of pairs.


def by_arguments() -> list[str]:
    return [word for pair in PAIRS for word in ("--pair", *pair)]


def by_ids() -> list[str]:
    sides = [[",".join(map(str, text.encode())) for text in pair] for pair in PAIRS]
    return [word for pair in sides for word in ("--ids", "/".join(pair))]


def by_columns() -> list[str]:
    return ["--input", written([{"a": a, "b": b} for a, b in PAIRS]), "--column", "a", "--pair-column", "b"]


def by_lists() -> list[str]:
    return ["--input", written([{"text": pair} for pair in PAIRS])]


def by_lists_of_ids() -> list[str]:
    return ["--input", written([{"text": [list(text.encode()) for text in pair]} for pair in PAIRS])]


def parquet_table(*columns: str) -> list[str]:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    values: dict[str, Any] = dict(zip(("a", "b"), map(list, zip(*PAIRS, strict=True)), strict=True))
    values["text"] = [list(pair) for pair in PAIRS]
    pq.write_table(pa.table({name: values[name] for name in columns}), "in.parquet")
    return ["--input", "in.parquet"]


def by_columns_of_parquet() -> list[str]:
    return [*parquet_table("a", "b"), "--column", "a", "--pair-column", "b"]


def by_lists_of_parquet() -> list[str]:
    return parquet_table("text")


SOURCES = [by_arguments, by_ids, by_columns, by_lists, by_lists_of_ids, by_columns_of_parquet, by_lists_of_parquet]


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same_rows(model: Path, zoo: Zoo, wanted: list[float], source: Any) -> None:
    result = zoo("run", model, *source(), *NEXT, "--output", "out.jsonl", "--batch-size", 2)
    assert (result.status, result.err) == (0, "")
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [1, 2, 3, 4]
    np.testing.assert_allclose([row["follows"] for row in rows], wanted, rtol=0, atol=1e-5)


def test_run_of_pairs_is_resumed(model: Path, zoo: Zoo, wanted: list[float]) -> None:
    run = ("run", model, *by_columns(), *NEXT, "--output", "out.jsonl")
    assert zoo(*run).status == 0
    lines = Path("out.jsonl").read_text().splitlines(keepends=True)
    Path("out.jsonl").write_text("".join(lines[:2]) + lines[2][:9])
    assert zoo(*run, "--resume").status == 0
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [1, 2, 3, 4]
    np.testing.assert_allclose([row["follows"] for row in rows], wanted, rtol=0, atol=1e-5)


def test_output_as_text_and_json(model: Path, zoo: Zoo, wanted: list[float]) -> None:
    shown = zoo("run", model, "--pair", *PAIRS[0], "--ids", "120/121", *NEXT)
    assert shown.out == f"'time flies', 'an arrow': follows {wanted[0]:.4f}\ninput 2: follows {wanted[1]:.4f}\n"
    found = zoo("run", model, "--pair", *PAIRS[0], "--ids", "120/121", *NEXT, "--json").json
    assert found["task"] == "next-sentence"
    assert [result["text"] for result in found["results"]] == [list(PAIRS[0]), None]
    assert [result["follows"] for result in found["results"]] == pytest.approx(wanted[:2], abs=1e-5)


# Rejected inputs.

REFUSED: dict[str, tuple[tuple[str, ...], int, str]] = {
    "no second text": (("x",), 3, "no second text: input 1: give a pair"),
    "an empty second text": (("--pair", "x", ""), 3, "the second text has no tokens: input 1"),
    "an empty first text": (("--pair", "", "x"), 3, "the first text has no tokens: input 1"),
    "no second ids": (("--ids", "1,2/"), 3, "the second text has no tokens: input 1"),
    "three lists of ids": (("--ids", "1/2/3"), 2, "'1/2/3' is not a list of token ids"),
    "too long together": (("--pair", "y" * 16, "z" * 17), 3, "33 tokens exceed the model's 32 positions: input 1"),
    "an unknown id": (("--ids", "1/260"), 3, "outside the vocabulary of 260"),
    "half a pair": (("--pair", "x"), 2, "'--pair' requires 2 arguments"),
    "a column without a file": (("--pair", "x", "y", "--pair-column", "b"), 2, "no input file with columns"),
    "a column of text": (("--input", "in.txt", "--pair-column", "b"), 2, "plain text has no columns"),
    "a missing column": (("--input", "in.jsonl", "--pair-column", "c"), 3, "1 of 1 inputs failed"),
}


@pytest.mark.parametrize(("arguments", "status", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_pairs(model: Path, zoo: Zoo, arguments: tuple[str, ...], status: int, message: str) -> None:
    Path("in.txt").write_text("x\n")
    written([{"text": "x", "b": "y"}])
    result = zoo("run", model, *NEXT, *arguments)
    assert (result.status, result.out) == (status, "")
    assert message in result.err


def test_bad_rows_are_skipped(model: Path, zoo: Zoo) -> None:
    rows = [{"text": "x", "b": "y"}, {"text": "x", "b": None}, {"text": None, "b": "y"}, {"text": "x", "b": 7},
            {"text": "x", "b": [1]}, {"text": ["x"], "b": "y"}, {"text": "x"}, {"text": "x", "b": "y"}]  # fmt: skip
    result = zoo("run", model, "--input", written(rows), "--pair-column", "b", *NEXT, "--output", "out.jsonl")
    assert result.status == 3
    mixed = "give both, or one --column whose values are single inputs and lists of two"
    reasons = [f"'b' is null: in.jsonl, row 2: {mixed}", f"'text' is null: in.jsonl, row 3: {mixed}",
               *["expected a text or token ids"] * 3, f"has no 'b': in.jsonl, row 7: {mixed}"]  # fmt: skip
    *warnings, _ = result.err.splitlines()
    for line, reason in zip(warnings, reasons, strict=True):
        assert reason in line
    assert [json.loads(line)["id"] for line in Path("out.jsonl").read_text().splitlines()] == [1, 8]


def test_task_on_single_texts_rejects_pairs(model: Path, zoo: Zoo) -> None:
    zoo("run", model, "--pair", "x", "<mask>").failed(3, "the task does not accept pairs: input 1")
    with load_session(model) as session, pytest.raises(ArtifactError, match="the task does not accept pairs"):
        session.run([["x", "<mask>"]])


def test_model_with_one_segment_rejects_next_sentence(model: Path, redeclared: Callable[..., Path]) -> None:
    message = "next-sentence needs two segments, the model has 1"
    with load_session(redeclared(model, type_vocab_size=1)) as session, pytest.raises(UsageError, match=message):
        session.run(Pair("x", "y"), task="next-sentence")


def test_other_models_reject_next_sentence(classifier: Path, zoo: Zoo) -> None:
    failed = zoo("run", classifier, "--pair", "x", "y", *NEXT)
    failed.failed(2, "task 'next-sentence' is not for models of the task text-classification")
