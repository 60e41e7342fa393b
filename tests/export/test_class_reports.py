"""Precision, recall and F1 are those of scikit-learn; tables, files and figures hold what the command computed."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zoo as library
from tests.cli.test_progress import terminal
from tests.conftest import Result
from tests.export.test_scores_of_answers import build, phrases
from tests.exported import sign_export
from zoo.artifact import ModelDirectory
from zoo.models import persist
from zoo.tables import read_numbered
from zoo_export.cli import class_tables
from zoo_export.opened import ModuleSession
from zoo_export.scoring.reports import ClassReport, report_indicators, report_labels

Zoo = Callable[..., Result]
NAMES = ("a", "b", "c", "d", "e")
NUMBERS = st.integers(0, len(NAMES) - 1)
PAIRS = st.one_of(
    st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=40),
    st.lists(st.tuples(st.just(2), st.just(2)), min_size=1, max_size=5),  # one class alone
)


@given(PAIRS)
def test_one_class_each(pairs: list[tuple[int, int]]) -> None:
    """Missing classes and a single one included. The mean is over classes that are a label or an answer."""
    from sklearn import metrics

    wanted, found = (list(numbers) for numbers in zip(*pairs, strict=True))
    report = report_labels(NAMES, wanted, found)
    columns = metrics.precision_recall_fscore_support(wanted, found, labels=range(len(NAMES)), zero_division=0)
    rows = [(item.precision, item.recall, item.f1, item.support) for item in report.classes]
    assert np.array(rows) == pytest.approx(np.stack(columns, 1))
    assert report.f1("macro") == pytest.approx(metrics.f1_score(wanted, found, average="macro", zero_division=0))
    assert report.f1("micro") == pytest.approx(metrics.accuracy_score(wanted, found))
    matrix = np.zeros((len(NAMES), len(NAMES)), int)
    for item in report.confusions or ():
        matrix[NAMES.index(item.label), NAMES.index(item.answer)] = item.count
    assert (matrix == metrics.confusion_matrix(wanted, found, labels=range(len(NAMES)))).all()


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30))
def test_two_classes(pairs: list[tuple[bool, bool]]) -> None:
    from sklearn import metrics

    wanted, found = (list(values) for values in zip(*pairs, strict=True))
    report = report_labels(("no", "yes"), wanted, found)
    expected = metrics.precision_recall_fscore_support(wanted, found, average="binary", zero_division=0)
    assert [getattr(report.classes[1], name) for name in ("precision", "recall", "f1")] == pytest.approx(expected[:3])


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_several_classes_each(classes: int, rows: int, seed: int, share: float) -> None:
    """All classes count in the mean, also those that never occur."""
    from sklearn import metrics

    rng = np.random.default_rng(seed)
    wanted, found = rng.random((rows, classes)) < share, rng.random((rows, classes)) < share
    report = report_indicators([str(number) for number in range(classes)], wanted, found)
    assert report.confusions is None
    # scikit-learn reads one column as a binary label
    columns = [metrics.f1_score(wanted[:, at], found[:, at], zero_division=0) for at in range(classes)]
    assert [item.f1 for item in report.classes] == pytest.approx(columns)
    assert report.f1("macro", absent=True) == pytest.approx(np.mean(columns))
    if classes > 1:
        expected = metrics.f1_score(wanted, found, average="micro", zero_division=0)
        assert report.f1("micro", absent=True) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("wanted", "found", "problems"),
    [
        ([0, 1, 2], [1, 1, 1], ["each of 3 inputs has the answer 'b', of 5 classes"]),
        ([1, 1], [1, 1], []),  # all right
        ([1], [0], ["classes that occur are never an answer: 'b' (1 of 1 inputs)"]),
        ([0, 1, 2, 2], [0, 0, 1, 1], ["classes that occur are never an answer: 'c' (2 of 4 inputs)"]),
        ([0, 1, 2, 3, 4, 4], [0, 0, 0, 0, 0, 0], ["each of 6 inputs has the answer 'a', of 5 classes"]),
        ([0, 1, 2, 3, 4, 4, 0], [0, 0, 0, 0, 0, 0, 1],
         ["classes that occur are never an answer: 'e' (2 of 7 inputs), 'c' (1 of 7 inputs), 'd' (1 of 7 inputs)"]),
    ],
)  # fmt: skip
def test_suspicious_answers(wanted: list[int], found: list[int], problems: list[str]) -> None:
    assert report_labels(NAMES, wanted, found).problems() == problems


def printed(report: ClassReport, capsys: pytest.CaptureFixture[str]) -> list[str]:
    class_tables.print_reports({"torch": report, "onnx": report})
    return capsys.readouterr().out.splitlines()


def test_many_classes_are_abridged(capsys: pytest.CaptureFixture[str]) -> None:
    """The worst classes and the largest confusions are printed, and the number of those that are not."""
    names = [f"class-{number}" for number in range(101)]
    rng = np.random.default_rng(0)
    wanted = np.repeat(np.arange(100), 50)
    found = np.where(rng.random(5000) < 0.8, wanted, rng.integers(0, 100, 5000))
    report = report_labels(names, wanted, found)
    lines = printed(report, capsys)
    assert lines[1] == "torch, onnx: classes"
    scores = sorted(item.f1 for item in report.classes if item.support)
    assert f"left out: 80 of 100 classes, with an F1 of {scores[19]:.4f} or more (all: --json)" in lines
    assert "neither a label nor an answer: 1 of 101 classes" in lines
    wrong = Counter({(one, other): int(count) for (one, other), count in Counter(
        zip(wanted.tolist(), found.tolist(), strict=True)).items() if one != other})  # fmt: skip
    place = lines.index("torch, onnx: largest confusions")
    assert [int(line.split()[-1]) for line in lines[place + 2 : place + 12]] == [n for _, n in wrong.most_common(10)]
    rest = wrong.total() - sum(count for _, count in wrong.most_common(10))
    assert lines[-1] == f"left out: {len(wrong) - 10:,} of {len(wrong):,} pairs of classes, {rest} inputs (all: --json)"


def evaluate(zoo: Zoo, rows: list[dict[str, Any]], *options: str) -> Result:
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return zoo("evaluate", "m", "--data", "rows.jsonl", "--variant", "torch", *options)


def labelled(names: tuple[str, ...], count: int = 30) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [{"id": f"r{number}", "text": text, "label": str(rng.choice(names)), "prediction_torch": number}
            for number, text in enumerate(phrases(count))]  # fmt: skip


def lines_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_the_command(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, JSON, predictions and a figure of one class each, without scikit-learn."""
    from sklearn import metrics

    build("bert-tiny", task="text-classification", labels=("good", "fair", "bad"))
    rows = labelled(("good", "fair", "bad"))
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)  # an import raises
    said = evaluate(zoo, rows, "--json", "--predictions", "p.jsonl", "--figure", "c.svg")
    monkeypatch.undo()
    assert said.status == 0, said.err
    written = lines_of("p.jsonl")
    wanted, found = [row["target"] for row in written], [row["prediction_torch"] for row in written]
    assert wanted == [row["label"] for row in rows]
    assert [row["input_prediction_torch"] for row in written] == list(range(30))
    assert [row["id"] for row in written] == [row["id"] for row in rows]
    assert all(1 / 3 <= row["probability_torch"] <= 1 for row in written)
    (score,), (classes,) = said.json["scores"], said.json["classes"]
    assert score["f1"] == pytest.approx(metrics.f1_score(wanted, found, average="macro", zero_division=0))
    assert score["accuracy"] == pytest.approx(metrics.accuracy_score(wanted, found))
    columns = metrics.precision_recall_fscore_support(wanted, found, labels=["good", "fair", "bad"], zero_division=0)
    for item, *expected in zip(classes["classes"], *columns, strict=True):
        assert [item[name] for name in ("precision", "recall", "f1", "support")] == pytest.approx(expected)
    assert {(item["label"], item["answer"]): item["count"] for item in classes["confusion"]} == Counter(
        zip(wanted, found, strict=True)
    )
    text = Path("c.svg").read_text()
    assert "m: labels and answers" in text and "label (class)" in text and "good" in text
    table = evaluate(zoo, rows).out
    assert "torch: inputs by label (row) and answer (column)" in table
    assert "torch:" not in evaluate(zoo, rows, "--metric", "f1").out
    evaluate(zoo, rows, "--predictions", "p.jsonl").failed(2, "already exists: p.jsonl: use --force")
    evaluate(zoo, rows, "--predictions", "rows.jsonl", "--force").failed(2, "is part of the data")
    assert lines_of("rows.jsonl") == rows
    assert evaluate(zoo, rows, "--predictions", "p.csv", "--force").status == 0
    with Path("p.csv").open(newline="") as file:
        assert [row["prediction_torch"] for row in csv.DictReader(file)] == found


def test_long_labels_can_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"customer-service/complaints/delivery/{end}" for end in ("late", "damaged", "lost")] * 4
    names = [f"{name}-{place}" for place, name in enumerate(names)]
    report = report_labels(names, list(range(12)), [*range(1, 12), 0])
    with terminal(monkeypatch, "stdout") as screen:
        monkeypatch.setenv("COLUMNS", "60")
        class_tables.print_reports({"torch": report})
    lines = screen.plain.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("label"))
    shown = [tuple(line.split()[:2]) for line in lines[place + 1 : place + 11]]
    assert len(set(shown)) == 10
    assert all("…" in one and "…" in other for one, other in shown), shown


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_targets_of_a_regression_are_those_of_the_data(zoo: Zoo, suffix: str) -> None:
    """They are not rounded to float32, in which they are trained on."""
    build("bert-tiny", task="text-classification", num_classes=1, problem_type="regression")
    numbers = [0.1, 3, 1.23456789012345, -1e-9]
    rows = [{"text": text, "label": number} for text, number in zip(phrases(4), numbers, strict=True)]
    assert evaluate(zoo, rows, "--predictions", f"p.{suffix}").status == 0
    found = [row["target"] for row in read_numbered_values(Path(f"p.{suffix}"))]
    assert list(map(float, found)) == numbers


def read_numbered_values(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        return list(pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist())
    return [row for _, row in read_numbered(path)]


@pytest.mark.parametrize(
    ("preset", "task", "objective"),
    [("bert-tiny", "fill-mask", "masked-lm"), ("bert-tiny", "pretraining", "pretraining"),
     ("bert-tiny", "replaced-token-detection", "replaced-token-detection")],
)  # fmt: skip
def test_objectives_without_answers_for_rows(zoo: Zoo, preset: str, task: str, objective: str) -> None:
    """Their losses are means over tokens that are drawn at random: there is nothing to write for a row."""
    build(preset, task=task)
    rows = [{"text": text, "pair": text, "label": 0} for text in phrases(4)]
    remedy = f"zoo run gives no answers for the objective {objective}: leave out --predictions"
    evaluate(zoo, rows, "--objective", objective, "--predictions", "p.jsonl").failed(2, remedy)
    assert not Path("p.jsonl").exists()


def test_predictions_in_parquet(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types of columns stay, and what parquet cannot hold is refused before answers are computed."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    build("bert-tiny", task="text-classification", labels=("x", "y"))
    rows = [{**row, "when": 2**64 - 1 - number} for number, row in enumerate(labelled(("x", "y"), 5))]
    assert evaluate(zoo, rows, "--predictions", "p.parquet").status == 0
    found = pq.read_table("p.parquet")
    assert found["when"].to_pylist() == [row["when"] for row in rows]

    columns = {"when": pa.array([1, 2], pa.uint64()), "target": pa.array([3, None], pa.int8()),
               "prediction_torch": pa.array([1, 2], pa.int16())}  # fmt: skip
    small = pa.table({"text": ["a", "b"], "label": ["x", "y"], **columns})
    pq.write_table(small, "small.parquet")
    given = ("evaluate", "m", "--variant", "torch", "--predictions", "q.parquet", "--data")
    assert zoo(*given, "small.parquet").status == 0
    types = {field.name: field.type for field in pq.read_schema("q.parquet")}
    assert (types["when"], types["input_target"], types["target"]) == (pa.uint64(), pa.int8(), pa.string())
    assert (types["input_prediction_torch"], types["prediction_torch"]) == (pa.int16(), pa.string())

    monkeypatch.setattr("zoo_export.evaluate._score", lambda *_: pytest.fail("computed"))
    for value, problem in ((2**64, "the integer 18446744073709551616 in column 'when'"), ("a", "column 'when' (")):
        rows = [{**row, "when": value if number == 3 else number} for number, row in enumerate(rows)]
        evaluate(zoo, rows, "--predictions", "r.parquet").failed(6, f"error: parquet cannot hold {problem}")
    assert not Path("r.parquet").exists()


def test_one_answer_to_all(zoo: Zoo) -> None:
    model = library.create_model("bert-tiny", task="text-classification", labels=("x", "y"), num_classes=2,
                                 hidden_size=16, num_heads=2, max_seq_len=64)  # fmt: skip
    model.get_parameter("classifier.bias").data[1] = 50
    library.save(model, "m", tokenizer="bytes")
    said = evaluate(zoo, labelled(("x", "y")))
    assert said.status == 0
    assert said.err == "warning: torch: each of 30 inputs has the answer 'y', of 2 classes\n"


def test_other_tasks(zoo: Zoo) -> None:
    """Predictions are the answers of ``zoo run``. There is no confusion matrix of numbers and texts."""
    build("bert-tiny", task="text-classification", num_classes=1, problem_type="regression")
    rows: list[dict[str, Any]] = [{"text": text, "label": len(text) / 9} for text in phrases(5)]
    assert evaluate(zoo, rows, "--predictions", "p.jsonl").status == 0
    assert [row["target"] for row in lines_of("p.jsonl")] == pytest.approx([row["label"] for row in rows])
    assert all(isinstance(row["prediction_torch"], float) for row in lines_of("p.jsonl"))
    evaluate(zoo, rows, "--figure", "c.svg").failed(2, "they have no confusion matrix: --figure: leave it out")
    evaluate(zoo, rows, "--force").failed(2, "nothing to replace: --force")

    shutil.rmtree("m")
    build("transformer-tiny")
    pairs = [{"text": one, "target": two} for one, two in zip(phrases(4), phrases(5), strict=False)]
    assert evaluate(zoo, pairs, "--predictions", "q.csv", "--max-new-tokens", "3").status == 0
    with Path("q.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["target"] for row in written] == [row["target"] for row in pairs]
    assert list(written[0]) == ["text", "target", "prediction_torch", "finish_reason_torch"]

    shutil.rmtree("m")
    build("gpt-tiny")
    rows = [{"text": text, "source": number} for number, text in enumerate(phrases(6))]
    assert evaluate(zoo, rows, "--predictions", "r.jsonl").status == 0
    stored = ModelDirectory.open("m")
    with closing(ModuleSession(stored, persist.load_directory(stored))) as session:
        alone = session.run([row["text"] for row in rows], task="score")
    for row, written, result in zip(rows, lines_of("r.jsonl"), alone, strict=True):
        names = ("tokens", "log_probability", "perplexity")
        assert written == {**row, **{f"{name}_torch": pytest.approx(result[name]) for name in names}}

    shutil.rmtree("m")
    build("bert-tiny", task="fill-mask")
    evaluate(zoo, rows, "--predictions", "s.jsonl").failed(2, "no answers for the objective masked-lm")


@pytest.mark.slow
def test_equal_warnings_are_shown_once(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here of a missing library, for two variants."""
    build("bert-tiny", task="text-classification", num_classes=1, problem_type="regression")
    sign_export(Path("m"))
    Path("rows.jsonl").write_text("".join(json.dumps({"text": text, "label": len(text)}) + "\n" for text in phrases(4)))
    monkeypatch.setitem(sys.modules, "scipy.stats", None)  # an import raises
    said = zoo("evaluate", "m", "--data", "rows.jsonl", "--json")
    assert [score["variant"] for score in said.json["scores"]] == ["torch", "onnx"]
    assert said.err == "warning: scores of scipy are left out: pip install attention-zoo[metrics]\n"


def test_entities_by_type(zoo: Zoo) -> None:
    """Types of entities have a row each, as in seqeval's report; words without prefixes have a matrix."""
    seqeval, schemes = pytest.importorskip("seqeval.metrics"), pytest.importorskip("seqeval.scheme")
    names = ("O", "B-X", "I-X", "B-Y", "I-Y")
    build("bert-tiny", task="token-classification", labels=names)
    rng = np.random.default_rng(2)
    rows: list[dict[str, Any]] = [
        {"text": text.split(), "label": rng.choice(names, len(text.split())).tolist()} for text in phrases(40)
    ]
    said = evaluate(zoo, rows, "--json", "--predictions", "p.jsonl")
    assert said.status == 0, said.err
    written = lines_of("p.jsonl")
    wanted, found = ([row[name] for row in written] for name in ("target", "prediction_torch"))
    assert wanted == [row["label"] for row in rows]
    report = seqeval.classification_report(
        wanted, found, mode="strict", scheme=schemes.IOB2, output_dict=True, zero_division=0
    )
    (classes,) = said.json["classes"]
    assert classes["confusion"] is None
    for item in classes["classes"]:
        expected = report[item["label"]]
        assert item["support"] == expected["support"]
        scores = [expected[name] for name in ("precision", "recall", "f1-score")]
        assert [item[name] for name in ("precision", "recall", "f1")] == pytest.approx(scores)
    assert [item["label"] for item in classes["classes"]] == ["X", "Y"]
