"""Answers to questions: against transformers' pipeline, and against its function for spans where it has no pipeline."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.pipelines.document_question_answering import select_starts_ends

import zoo as library
from tests.conftest import ROOT
from tests.exported import sign_export
from zoo.checkpoints import import_checkpoint
from zoo.errors import ArtifactError, UsageError
from zoo.tokenizers.long_texts.windows import windows
from zoo_runtime import Pair, Session, load_session
from zoo_runtime.tasks.spans import best_spans

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
SPEC = importlib.util.spec_from_file_location("golden", ROOT / "tests" / "goldens" / "question_answering.py")
assert SPEC is not None
assert SPEC.loader is not None
golden: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(golden)
ROWS = [json.loads(line) for line in golden.GOLDEN.read_text("utf-8").splitlines()]
QUESTION, CONTEXT = golden.PAIRS[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Import and export the model of the golden answers."""
    folder = tmp_path_factory.mktemp("questions")
    golden.model().save_pretrained(folder / "hub")
    golden.wordpieces().save_pretrained(folder / "hub")
    import_checkpoint(folder / "hub", folder / "ours")
    sign_export(folder / "ours")
    return folder / "ours"


@pytest.fixture
def session(folder: Path) -> Iterator[Session]:
    with load_session(folder) as session:
        yield session


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("options", golden.OPTIONS, ids=str)
def test_answers_equal_the_pipeline(session: Session, options: dict[str, Any]) -> None:
    rows = [row for row in ROWS if row["options"] == options]
    assert len(rows) == len(golden.PAIRS)
    for row, result in zip(rows, session.run([Pair(*row["pair"]) for row in rows], **options), strict=True):
        found = result["answers"]
        wanted = [
            answer for answer in row["answers"] if answer["score"] > 0
        ]  # the pipeline fills up with impossible ones
        spans = [(answer["answer"], answer["start"], answer["end"]) for answer in wanted]
        assert [(answer["text"], answer["start"], answer["end"]) for answer in found] == spans
        np.testing.assert_allclose([a["score"] for a in found], [a["score"] for a in wanted], rtol=1e-5)


def test_golden_answers_have_windows_and_no_answers() -> None:
    """Otherwise they would not compare these."""
    assert any(not answer["answer"] for row in ROWS for answer in row["answers"])
    assert any(answer["start"] > len(CONTEXT) // 2 for row in ROWS for answer in row["answers"])


@given(data=st.data(), tokens=st.integers(3, 30), count=st.integers(1, 40), longest=st.integers(1, 33))
@settings(max_examples=100, deadline=None)
def test_spans_equal_those_of_transformers(data: st.DataObject, tokens: int, count: int, longest: int) -> None:
    """Transformers multiplies float64 softmaxes with masks; both give the likeliest spans and no answer's score."""
    first = data.draw(st.integers(1, tokens - 1))
    last = data.draw(st.integers(first, tokens - 1))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    start, end = random.normal(size=(2, 1, tokens)) * 3
    mask = np.array([[0 if place == 0 or first <= place <= last else 1 for place in range(tokens)]])
    starts, ends, scores, none = select_starts_ends(
        start, end, mask, np.ones((1, tokens), int), top_k=count, handle_impossible_answer=True, max_answer_len=longest
    )
    wanted = {(int(s), int(e)): score for s, e, score in zip(starts, ends, scores, strict=True) if score > 0}
    spans, found_none = best_spans(start[0], end[0], range(first, last + 1), count=count, longest=longest)
    assert found_none == pytest.approx(none)
    found = {(span.first, span.last): span.score for span in spans}
    assert found == pytest.approx(wanted)
    assert [span.score for span in spans] == sorted(found.values(), reverse=True)


@given(length=st.integers(1, 50), room=st.integers(2, 20), data=st.data())
def test_windows_are_those_of_the_tokenizer(length: int, room: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(0, room - 1))
    tokenizer = golden.wordpieces()
    encoded = tokenizer(
        "x", " ".join("a" * length), truncation="only_second", max_length=room + 4, stride=stride,
        return_overflowing_tokens=True,
    )  # fmt: skip
    wanted = [len(ids) - 4 for ids in encoded["input_ids"]]
    found = windows(length, room, stride)
    assert [len(part) for part in found] == wanted
    assert {place for part in found for place in part} == set(range(length))


def test_batches_equal_single_answers(session: Session) -> None:
    pairs = [Pair(*pair) for pair in golden.PAIRS]
    wanted = [session.run(pair, top_k=3) for pair in pairs]
    for size in (1, 3, 32):
        for one, other in zip(session.run(pairs, top_k=3, batch_size=size), wanted, strict=True):
            assert [a["text"] for a in one["answers"]] == [a["text"] for a in other["answers"]]
            scores = [[a["score"] for a in result["answers"]] for result in (one, other)]
            np.testing.assert_allclose(*scores, rtol=1e-5)


def test_command_prints_answers(folder: Path, zoo: Zoo) -> None:
    run = ("run", folder, "--pair", QUESTION, CONTEXT, "--top-k", 2, "--option", "stride=4")
    rows = zoo(*run, "--json").json["results"][0]["answers"]
    assert all(CONTEXT[row["start"] : row["end"]] == row["text"] for row in rows)
    lines = zoo(*run).out.splitlines()
    assert lines == [f"{QUESTION!r}: {r['text']!r} {r['score']:.4f} at {r['start']}:{r['end']}" for r in rows]


def test_bad_questions_are_refused(session: Session) -> None:
    for value in ("only a question", [5, 6], Pair([5], [6])):
        with pytest.raises(ArtifactError, match="expected a question and a context, both texts: input 1: give --pair"):
            session.run(value)
    with pytest.raises(ArtifactError, match="the context has no tokens: input 1"):
        session.run(Pair("who?", " "))
    with pytest.raises(ArtifactError, match="the question has no tokens: input 1"):
        session.run(Pair(" ", "me"))
    with pytest.raises(ArtifactError, match="windows of 40 tokens leave 0 for the context"):
        session.run(Pair("a" * 50, CONTEXT))
    with pytest.raises(ArtifactError, match=r"leave \d+ for the context, with a stride of 39"):
        session.run(Pair(QUESTION, CONTEXT), stride=39)
    with pytest.raises(UsageError, match="max_seq_len 41 exceeds the model's 40 positions"):
        session.run(Pair(QUESTION, CONTEXT), max_seq_len=41)
    for name in ("top_k", "max_answer_len", "max_seq_len", "stride"):
        with pytest.raises(UsageError, match=name):
            session.run(Pair(QUESTION, CONTEXT), **{name: 0})


@pytest.mark.slow
def test_tokenizers_without_words_give_spans_of_tokens(exported_model: Exported) -> None:
    """To the byte tokenizer a whole text is one word."""
    with load_session(exported_model("bert-tiny", "task=question-answering", noise=True, gain=2.0)) as session:
        (answer,) = session.run(Pair("who?", "the cat sat"), max_answer_len=2)["answers"]
    assert len(answer["text"]) <= 2


@pytest.mark.slow
def test_broken_models_are_reported(tmp_path: Path, zoo: Zoo) -> None:
    model = library.create_model("bert-tiny", task="question-answering", num_layers=1, max_seq_len=32)
    with torch.no_grad():
        next(parameter for parameter in model.parameters() if parameter.ndim > 1).fill_(torch.nan)
    library.save(model, tmp_path / "bert", tokenizer="bytes")
    assert zoo("export", tmp_path / "bert", "--onnx", "--graph-only").status == 0
    failed = zoo("run", tmp_path / "bert", "--pair", "who?", "me", "--unverified")
    failed.failed(3, "output contains NaN or infinity: input 1")
