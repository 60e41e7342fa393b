"""Zero-shot classification and reranking, against transformers' pipeline and its logits on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertForSequenceClassification, pipeline

from tests.runtime.test_pipelines import COMPUTED, PROBLEMS, SIZES, TEXTS, characters, make, opened
from zoo.errors import ArtifactError, UsageError
from zoo_runtime import Pair, Session, load_session

Zoo = Callable[..., Any]
ORDERS = [("contradiction", "neutral", "entailment"), ("Entailment", "neutral", "contradiction"), ("no", "entails")]
QUERY, *PASSAGES = TEXTS
TEMPLATE = "it is {}."


def classifier(names: tuple[str, ...], problem: str | None = None) -> BertForSequenceClassification:
    labels = dict(enumerate(names))
    config = BertConfig(
        **SIZES, id2label=labels, label2id={name: n for n, name in labels.items()}, problem_type=problem
    )
    theirs: Any = make(BertForSequenceClassification, config)
    theirs.classifier.weight.mul_(4)
    theirs.classifier.bias.sub_(torch.from_numpy(scores(theirs, QUERY, PASSAGES)).mean(0))
    return theirs


@pytest.fixture(scope="module", params=ORDERS, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Session]]:
    """The pipeline of transformers and an export of its model."""
    theirs, tokenizer = classifier(request.param), characters()
    with opened(theirs, tokenizer, tmp_path_factory.mktemp("inference")) as session:
        yield pipeline("zero-shot-classification", theirs, tokenizer=tokenizer), session


@pytest.mark.slow
@given(
    text=st.sampled_from(TEXTS),
    labels=st.lists(st.sampled_from(["wind", "a gare", "где", "你", "in"]), min_size=1, max_size=5, unique=True),
    several=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_labels_equal_the_pipeline(case: tuple[Any, Session], text: str, labels: list[str], several: bool) -> None:
    oracle, session = case
    wanted = oracle(text, candidate_labels=labels, hypothesis_template=TEMPLATE, multi_label=several)
    result = session.run(
        text, task="zero-shot-classification", labels=labels, hypothesis_template=TEMPLATE, multi_label=several
    )
    found = {row["label"]: row["probability"] for row in result["classes"]}
    assert found == pytest.approx(dict(zip(wanted["labels"], wanted["scores"], strict=True)), abs=2e-6)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert result["label"] == result["classes"][0]["label"]


@pytest.mark.slow
def test_probabilities_are_varied(case: tuple[Any, Session]) -> None:
    found = case[1].run(TEXTS, task="zero-shot-classification", labels=["wind", "где"])
    assert np.ptp([row["classes"][0]["probability"] for row in found]) > 1e-3


@pytest.mark.slow_after(1)
def test_labels_are_given_on_the_command_line(case: tuple[Any, Session], zoo: Zoo) -> None:
    session, run = case[1], ("--task", "zero-shot-classification", "--option", "labels=wind, in ,gare")
    (row,) = session.run([QUERY], task="zero-shot-classification", labels=["wind", "in", "gare"])
    shown = "  ".join(f"{found['label']}: {found['probability']:.4f}" for found in row["classes"])
    assert zoo("run", session.path, QUERY, *run).out == f"{QUERY!r}: {shown}\n"


@pytest.mark.slow_after(1)
def test_task_of_a_session_is_the_default(case: tuple[Any, Session]) -> None:
    labels, task = ["wind", "in"], "zero-shot-classification"
    with load_session(case[1].path, task=task) as session:
        assert session.task == task
        assert session.run(QUERY, labels=labels) == case[1].run(QUERY, task=task, labels=labels)
        assert len(session.run(QUERY, task="text-classification")["classes"]) > 1
    with pytest.raises(UsageError, match="task 'zero-shot'"):
        load_session(case[1].path, task="zero-shot", variant="")


@pytest.mark.slow_after(1)
def test_bad_labels_are_refused(case: tuple[Any, Session], zoo: Zoo) -> None:
    session = case[1]
    zoo("run", session.path, "a", "--task", "zero-shot-classification").failed(2, "no labels")
    bad = [
        ({"hypothesis_template": "x"}, "has no {} for the label"),
        ({"hypothesis_template": "{} or {}"}, "has braces beside one {} for the label"),
        ({"hypothesis_template": "{{{}}}"}, "has braces beside one {} for the label"),
        ({"labels": ["a", " ", "b"]}, "label 2 of 3 is empty"),
        ({"entailment": "yes"}, "no class 'yes': .*known: "),
    ]
    for options, message in bad:
        with pytest.raises(UsageError, match=message):
            session.run("a", task="zero-shot-classification", **{"labels": ["b"], **options})
    with pytest.raises(ArtifactError, match="expected one text: input 1"):
        session.run([5], task="zero-shot-classification", labels=["b"])


@pytest.mark.slow
def test_class_of_entailment_can_be_named(tmp_path: Path) -> None:
    with opened(classifier(("no", "maybe", "yes")), characters(), tmp_path) as session:
        with pytest.raises(UsageError, match=r"no class begins with 'entail': no, maybe, yes: .*entailment="):
            session.run("a", task="zero-shot-classification", labels=["b"])
        with_last = session.run("a", task="zero-shot-classification", labels=["b"], entailment="yes")
        logits = session.run(Pair("a", "This example is b."), function_to_apply="none")["values"]
    wanted = 1 / (1 + np.exp(logits[0] - logits[2]))
    assert with_last["classes"][0]["probability"] == pytest.approx(wanted, abs=1e-6)


def scores(theirs: BertForSequenceClassification, query: str, passages: list[str]) -> np.ndarray[Any, Any]:
    """Logits (passages, classes) of transformers, one pair at a time."""
    tokenizer = characters()
    with torch.inference_mode():
        return np.concatenate([theirs(**tokenizer(query, text, return_tensors="pt")).logits for text in passages])


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS[1:])
def test_passages_are_ranked_by_the_logit(tmp_path: Path, zoo: Zoo, problem: str) -> None:
    theirs = classifier(("relevant",), problem)
    wanted = scores(theirs, QUERY, PASSAGES)[:, 0]
    wanted = wanted if problem == "regression" else 1 / (1 + np.exp(-wanted))
    order = np.argsort(-wanted)
    assert np.ptp(wanted) > 1e-2
    with opened(theirs, characters(), tmp_path) as session:
        found = session.run(Pair(QUERY, PASSAGES), task="rerank")["passages"]
        best = session.run(Pair(QUERY, PASSAGES), task="rerank", top_k=2, batch_size=1)["passages"]
        pair = session.run(Pair(QUERY, PASSAGES[0]), task="rerank")["passages"]
        with pytest.raises(ArtifactError, match="expected a query and passages: input 1"):
            session.run("only a query", task="rerank")
    assert [row["index"] for row in found] == order.tolist()
    assert [row["text"] for row in found] == [PASSAGES[at] for at in order]
    np.testing.assert_allclose([row["score"] for row in found], wanted[order], **COMPUTED)
    assert [row["index"] for row in best] == order[:2].tolist()
    assert pair[0]["score"] == pytest.approx(wanted[0], abs=2e-6)
    run = ("run", tmp_path / "ours", QUERY, *PASSAGES, "--task", "rerank")
    (row,) = zoo(*run, "--json").json["results"]
    assert row["text"] == [QUERY, *PASSAGES]
    assert [part["index"] for part in row["passages"]] == order.tolist()
    assert zoo(*run).out.splitlines() == [f"{wanted[at]:.4f} {PASSAGES[at]!r}" for at in order]


@pytest.mark.slow
def test_passages_are_read_from_files(tmp_path: Path, zoo: Zoo) -> None:
    theirs = classifier(("relevant",), PROBLEMS[2])
    opened(theirs, characters(), tmp_path).close()
    (tmp_path / "in.jsonl").write_text('{"query": "a b", "passages": ["who", "the"]}\n', encoding="utf-8")
    run = ("run", tmp_path / "ours", "--task", "rerank", "--input", tmp_path / "in.jsonl", "--column", "query")
    (row,) = zoo(*run, "--pair-column", "passages", "--json").json["results"]
    wanted = scores(theirs, "a b", ["who", "the"])[:, 0]
    assert [part["index"] for part in row["passages"]] == np.argsort(-wanted).tolist()


@pytest.mark.slow
def test_one_of_several_classes_ranks(tmp_path: Path) -> None:
    theirs = classifier(("no", "yes"))
    wanted = torch.tensor(scores(theirs, QUERY, PASSAGES)).softmax(-1)[:, 1].numpy()
    with opened(theirs, characters(), tmp_path) as session:
        found = session.run(Pair(QUERY, PASSAGES), task="rerank", label="yes")["passages"]
        for options, message in (({}, "2 classes: .*: set label=CLASS"), ({"label": "maybe"}, "no class 'maybe'")):
            with pytest.raises(UsageError, match=message):
                session.run(Pair(QUERY, PASSAGES), task="rerank", **options)
    np.testing.assert_allclose([row["score"] for row in found], np.sort(wanted)[::-1], **COMPUTED)
