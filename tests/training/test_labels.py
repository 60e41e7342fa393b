"""Classes of a column of labels, and what the data says before the first step."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.conftest import Result
from zoo import plugins
from zoo.classes import default_names
from zoo.config import Settings
from zoo.errors import ArtifactError, UsageError
from zoo.registry import registry
from zoo.tables import read_numbered
from zoo.tokenizers.files.load import byte_tokenizer
from zoo.tokenizers.tokenizer import Tokenizer as Reader
from zoo.training.cache import Data, prepare
from zoo.training.criterion import Criterion
from zoo.training.data.labels import classes_of
from zoo.training.data.sources import find_source
from zoo.training.findings import class_counts
from zoo.training.objectives.classification import TextClassification, class_number, label_array
from zoo.training.objectives.tokens import TokenClassification
from zoo.training.options import TokenClassificationOptions

Zoo = Callable[..., Result]
WRITERS: dict[str, Callable[[pd.DataFrame, Path], Any]] = {
    ".csv": lambda frame, path: frame.to_csv(path, index=False),
    ".tsv": lambda frame, path: frame.to_csv(path, index=False, sep="\t"),
    ".jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True, force_ascii=False),
    ".parquet": lambda frame, path: frame.to_parquet(path),
}
"""Ways in which pandas writes a table."""
TRAIN = ("--set", "hidden_size=16", "--set", "num_layers=1", "--set", "num_heads=2", "--max-steps", "1", "-o", "m")


def classes(paths: Sequence[Path], task: str = "text-classification", **values: Any) -> dict[str, Any]:
    spec = registry().resolve("bert-tiny")
    _, objective = plugins.active().objective(task, task)
    return classes_of(spec, {"task": task, **values}, objective, find_source([*map(str, paths)], objective, {}))


def classifier(*names: str, problem_type: str = "single_label_classification") -> Any:
    values = {"task": "text-classification", "num_classes": len(names) or 2, "labels": names}
    return registry().resolve("bert-tiny", values={**values, "problem_type": problem_type}).config


def encoded(path: Path, task: str = "text-classification", **config: Any) -> Data:
    """Return the examples of a file for a model with the classes that are found in it."""
    found = classes([path], task)
    spec = registry().resolve("bert-tiny", values={"task": task, **found, **config})
    _, objective = plugins.active().objective(task, task)
    kind: type[Criterion] = TokenClassification if task == "token-classification" else TextClassification
    options = TokenClassificationOptions() if task == "token-classification" else Settings()
    criterion = kind(spec.config, Reader(byte_tokenizer()), options, 64)
    source = find_source([str(path)], objective, {})
    return prepare(source.rows, criterion, [path.read_bytes().hex(), task], skip_bad=1000)


LABELS = st.sampled_from([-1, 0, 1, 2, 30])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(labels=st.lists(LABELS, min_size=4, max_size=30).filter(lambda found: len(set(found)) > 1), data=st.data())
def test_classes_are_those_that_pandas_writes(labels: list[int], data: st.DataObject, tmp_path: Path) -> None:
    """Integers become floats where one is missing; the missing rows alone are left out."""
    missing = data.draw(st.sets(st.integers(0, len(labels) - 1), max_size=2))
    kept = [label for place, label in enumerate(labels) if place not in missing]
    if len(set(kept)) < 2:
        return
    column = pd.Series([None if place in missing else label for place, label in enumerate(labels)])
    frame = pd.DataFrame({"text": [f"row {place}" for place in range(len(labels))], "label": column})
    assert (frame["label"].dtype == np.float64) == bool(missing)
    names = tuple(map(str, sorted(set(kept))))
    for suffix, write in WRITERS.items():
        path = tmp_path / f"rows{suffix}"
        write(frame, path)
        assert classes([path]) == {
            "num_classes": len(names), "labels": names, "problem_type": "single_label_classification"
        }  # fmt: skip
        read = encoded(path)
        assert read.facts.bad == len(missing)
        assert [names[int(example["labels"][0])] for example in read.examples] == [str(label) for label in kept]
        spec = registry().resolve("bert-tiny", values={"task": "text-classification", **classes([path])})
        assert class_counts(spec.config, read) == dict(Counter(map(str, sorted(kept))))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["x", "y", "z"])), min_size=6, max_size=30))
def test_ambiguous_rows_are_those_of_pandas(rows: list[tuple[str, str]], tmp_path: Path) -> None:
    """Rows of a text that has several labels, after truncation."""
    if len({label for _, label in rows}) < 2:
        return
    frame = pd.DataFrame(rows, columns=["text", "label"])
    several = frame.groupby("text")["label"].transform("nunique") > 1
    frame["text"] = frame["text"].str.cat(["-" * 70 + str(place) for place in range(len(frame))])  # cut off
    frame.to_json(tmp_path / "rows.jsonl", orient="records", lines=True)
    assert encoded(tmp_path / "rows.jsonl").facts.ambiguous == several.sum()


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("task", ["text-classification", "image-classification"])
def test_real_numbers_are_refused_as_classes(suffix: str, task: str, tmp_path: Path) -> None:
    numbers = [round(random.Random(0).uniform(-2, 2) + place / 7, 4) for place in range(60)]
    frame = pd.DataFrame({"text": "a", "image": "a.png", "label": numbers})
    WRITERS[suffix](frame, path := tmp_path / f"rows{suffix}")
    with pytest.raises(UsageError, match=r"60 different numbers in 60 rows.*--set problem_type=regression"):
        classes([path], task) if task == "text-classification" else _image_classes(path)
    assert classes([path], problem_type="regression") == {"num_classes": 1, "labels": ()}


def _image_classes(path: Path) -> dict[str, Any]:
    _, objective = plugins.active().objective("image-classification", "image-classification")
    return classes_of(registry().resolve("vit-tiny"), {}, objective, find_source([str(path)], objective, {}))


@pytest.mark.parametrize(
    ("labels", "names"),
    {
        "ratings": ([1.0, 1.5, 2.0, 2.5] * 5, ("1", "1.5", "2", "2.5")),
        "codes": (["007", "010"] * 5, ("007", "010")),
        "versions": (["2.0", "beta"] * 5, ("2.0", "beta")),
        "booleans": ([True, False] * 5, ("False", "True")),
        "many classes": (list(range(50)) * 3, tuple(map(str, range(50)))),
        "one row of each": (list(range(10)), tuple(map(str, range(10)))),
        "a class called nan": (["nan", "jo", "nan"] * 3, ("jo", "nan")),
    }.values(),
)
def test_other_labels_stay_classes(labels: list[Any], names: tuple[str, ...], tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"row {place}", "label": label}) for place, label in enumerate(labels)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    assert classes([tmp_path / "rows.jsonl"])["labels"] == names
    read = encoded(tmp_path / "rows.jsonl")
    assert not read.facts.bad
    assert len({int(example["labels"][0]) for example in read.examples}) == len(names)


@pytest.mark.parametrize(
    ("labels", "fraction"), [([*range(25), 3], False), ([0.5, 1.5], True), ([*np.arange(0, 6, 0.25)] * 9, True)]
)
def test_numbers_that_nearly_all_differ_are_refused(labels: list[Any], fraction: bool, tmp_path: Path) -> None:
    rows = [json.dumps({"text": "a", "label": label}) for label in labels]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    with pytest.raises(UsageError, match="too many for classes"):
        classes([tmp_path / "rows.jsonl"])
    tags = [json.dumps({"text": ["a"], "label": [label]}) for label in labels]
    (tmp_path / "tags.jsonl").write_text("\n".join(tags))
    with pytest.raises(UsageError, match=r"too many for classes.*name another column"):
        classes([tmp_path / "tags.jsonl"], "token-classification")


def test_tags_that_are_floats_are_classes(tmp_path: Path) -> None:
    """An ignored one has no class."""
    rows = [{"text": ["a", "b", "c"], "label": label} for label in ([0.0, 1.0, -100.0], [1, 2, -100])]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert classes([tmp_path / "rows.jsonl"], "token-classification")["labels"] == ("0", "1", "2")
    read = encoded(tmp_path / "rows.jsonl", "token-classification")
    assert [example["labels"][::2].tolist() for example in read.examples] == [[0, 1, -100], [1, 2, -100]]


@pytest.mark.parametrize("label", ["", "nan", 7, 0.5])
def test_a_label_that_is_no_class_names_its_file_and_row(label: Any, zoo: Zoo) -> None:
    """And counts as an unusable row."""
    rows = [{"text": "a" * place, "label": place % 2} for place in range(1, 41)]
    Path("good.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("bad.jsonl").write_text(json.dumps({"text": "b", "label": label}))
    data = ("--data", "good.jsonl", "--data", "bad.jsonl") if label not in (7, 0.5) else (
        "--data", "good.jsonl", "--validation", "bad.jsonl"
    )  # fmt: skip
    done = zoo("train", "bert-tiny", "--task", "text-classification", *data, *TRAIN)
    done.failed(3, f"bad.jsonl, row 1: label {label!r} is not one of 0, 1")


@pytest.mark.parametrize(("label", "name"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_json_has_no_nan(label: float, name: str, zoo: Zoo) -> None:
    """Python's json module writes such names, which no other reader accepts. The row that has one is named."""
    rows = [{"text": "a", "label": 0.5}, {"text": "b", "label": label}]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    problem = f"not JSON (JSON has no {name}: write null for a missing value)"
    assert list(read_numbered(Path("rows.jsonl"))) == [(1, rows[0]), (2, problem)]
    done = zoo("train", "bert-tiny", "--task", "text-classification", "--data", "rows.jsonl", *TRAIN)
    done.failed(3, f"{problem}: rows.jsonl, row 2")
    Path("rows.json").write_text(json.dumps(rows))
    with pytest.raises(ArtifactError, match=rf"^not JSON \(JSON has no {name}: .*rows.json"):
        list(read_numbered(Path("rows.json")))


def test_several_numbers_are_no_class_twice() -> None:
    """Indicators of classes, which a list of classes is not."""
    config: Any = registry().resolve(
        "bert-tiny", ["task=text-classification", "num_classes=3", "problem_type=multi_label_classification"]
    ).config  # fmt: skip
    assert label_array(config, [2.0, 0]).tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="names a class twice"):
        label_array(config, [0, 1, 0])


def test_a_number_that_is_no_class_is_not_the_place_of_another() -> None:
    config: Any = registry().resolve("bert-tiny", ["task=text-classification", "labels=[1,2]"]).config
    assert label_array(config, 1).tolist() == label_array(config, "1.0").tolist() == [0]
    with pytest.raises(ValueError, match="label 0 is not one of 1, 2"):
        label_array(config, 0)


def words(path: Path) -> str:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
    return str(path)


def test_what_the_data_says_is_shown_and_recorded(zoo: Zoo, tmp_path: Path) -> None:
    """Classes, unknown tokens and equal inputs, before the first step, in the record and as JSON."""
    rows = [{"text": "a x", "label": "no"}, {"text": "a y", "label": "yes"}, {"text": "b a", "label": "no"}] * 4
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = ("train", "bert-tiny", "--task", "text-classification", "--data", "rows.jsonl", *TRAIN)
    done = zoo(*common, "--tokenizer", words(tmp_path / "words.json"))
    lines = done.err.splitlines()
    assert lines[:2] == [
        "warning: 33.33% of 24 tokens are unknown to the tokenizer: rows.jsonl: train one on such texts with zoo "
        "tokenizer train",
        "warning: 8 of 12 rows are the same to the model as another one, but have a different label: rows.jsonl",
    ]
    assert lines[3] == "note: 2 classes: no (8), yes (4)"
    assert lines[4].startswith("step 1 of 1")
    record = json.loads(Path("m/training.json").read_text())
    facts = {"rows": 12, "bad": 0, "truncated": 0, "tokens": 24, "encoded": 24, "unknown": 8, "ambiguous": 8,
             "noted": {}}  # fmt: skip
    assert (record["rows"], record["classes"]) == (facts, {"no": 8, "yes": 4})
    done = zoo(*common, "--force", "--json")
    assert (done.json["rows"]["ambiguous"], done.json["classes"]) == (0, {"no": 8, "yes": 4})
    Path("rows.jsonl").write_text("\n".join(json.dumps({"text": "x y", "label": place % 2}) for place in range(6)))
    done = zoo(*common, "--force", "--tokenizer", str(tmp_path / "words.json"))
    done.failed(3, "all 12 tokens of the texts are unknown to the tokenizer: rows.jsonl: train one on such texts")


def test_many_classes_are_folded(zoo: Zoo) -> None:
    rows = [{"text": f"{place}", "label": f"c{place}"} for place in range(20) for _ in range(40 - place)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = zoo("train", "bert-tiny", "--task", "text-classification", "--data", "rows.jsonl", *TRAIN)
    shown = ", ".join(f"c{place} ({40 - place})" for place in range(8))
    assert f"note: 20 classes: {shown}, ..., c18 (22), c19 (21)\n" in done.err


def test_equal_errors_are_reported_once(zoo: Zoo) -> None:
    """Without the advice to leave out all rows."""
    rows = [{"text": [300], "label": place % 2} for place in range(6)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = zoo("train", "bert-tiny", "--task", "text-classification", "--data", "rows.jsonl", *TRAIN)
    assert done.failed(3) == (
        "error: 6 of 6 rows cannot be used: rows.jsonl, row 1: text has the token id 300, outside of vocab_size 260: "
        "mend them\n"
    )


def test_regression_takes_its_size_from_the_data(zoo: Zoo) -> None:
    rows = [{"text": f"{place}", "label": [place / 7, place / 9]} for place in range(9)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = ("--data", "rows.jsonl", *TRAIN)
    zoo("train", "bert-tiny", "--task", "text-classification", *common).failed(2, "problem_type=regression")
    regression = ("--task", "text-classification", "--set", "problem_type=regression")
    assert zoo("train", "bert-tiny", *regression, *common).status == 0
    config = json.loads(Path("m/config.json").read_text())["config"]
    assert (config["num_classes"], config["problem_type"]) == (2, "regression")


@pytest.mark.parametrize("label", [[1, 0], [1.0, 0.0], [True, False], ["b", "a"]])
def test_indicators_of_exclusive_classes_are_not_lists_of_classes(label: list[Any], tmp_path: Path) -> None:
    """A list of both classes in every row would be learnt as both, with perfect scores."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": "x", "label": label[:: 1 - 2 * (at % 2)]}) for at in range(6)))
    with pytest.raises(UsageError, match=r"every row has every class .* list the classes that apply"):
        classes([path])


def test_truth_values_and_numbers_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": "x", "label": True if at % 2 else 1}) for at in range(6)))
    with pytest.raises(UsageError, match="labels are both truth values and numbers, as True and 1"):
        classes([path])
    for names in ((), default_names(2)):
        assert [class_number(classifier(*names), value) for value in (False, True)] == [0, 1]
    for names in (("a", "b", "c"), ("1", "2")):
        with pytest.raises(ValueError, match="label True is not one of"):
            class_number(classifier(*names), True)


@pytest.mark.parametrize(("named", "found"), [(False, ("ham", "spam")), (True, None)])
def test_names_of_data_replace_those_that_transformers_gives(
    tmp_path: Path, named: bool, found: tuple[str, ...] | None
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "x", "label": "spam" if at % 2 else "ham"} for at in range(6)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    names = ("no", "yes") if named else default_names(2)
    values = {"task": "text-classification", "labels": names, "problem_type": "single_label_classification"}
    spec = registry().resolve("bert-tiny", values=values)
    _, objective = plugins.active().objective("text-classification", "text-classification")
    read = find_source([str(path)], objective, {})
    assert classes_of(spec, {}, objective, read).get("labels") == found


def test_a_single_class_in_the_data_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": "x", "label": "b"}) for _ in range(6)))
    with pytest.raises(UsageError, match="all labels are 'b'"):
        classes([path])


def test_a_list_with_or_without_the_only_class_is_1_or_0() -> None:
    config = classifier("b", problem_type="multi_label_classification")
    labels = [["b"], [], 1, 0, "b", [1], True, [0.0]]
    assert [label_array(config, label).tolist() for label in labels] == [[1], [0], [1], [0], [1], [1], [1], [0]]
    for label in (["c"], ["b", "b"], 2):
        with pytest.raises(ValueError, match="a list with or without 'b'"):
            label_array(config, label)


def test_a_single_sigmoid_counts_class_1(zoo: Zoo) -> None:
    Path("rows.jsonl").write_text("\n".join(json.dumps({"text": "x", "label": int(at < 2)}) for at in range(6)))
    common = ("--task", "text-classification", "--data", "rows.jsonl", *TRAIN, "--set", "num_classes=1")
    done = zoo("train", "bert-tiny", *common, "--set", "problem_type=multi_label_classification")
    assert "note: 1 class: 1 (2)\n" in done.err
