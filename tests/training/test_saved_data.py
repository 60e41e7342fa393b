"""Directories that the datasets library has saved, and the size of the cache."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.conftest import Result, full, nth_call
from tests.training.test_run import FAST
from zoo import memo
from zoo.errors import ArtifactError, UsageError
from zoo.training.cache import LIMIT, prepare
from zoo.training.data.rows import data_files, read_rows
from zoo.training.data.sources import find_source

Zoo = Callable[..., Result]
TEXTS = {"words": ["good and fine", "bad and awful"] * 10, "kind": [1, 0] * 10}


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets")


def features(datasets: Any) -> Any:
    return datasets.Features({"words": datasets.Value("string"), "kind": datasets.ClassLabel(names=["no", "yes"])})


def test_saved_splits_are_read(zoo: Zoo, datasets: Any) -> None:
    """Classes are named; training reads one split and evaluates on another, ``zoo evaluate`` reads a third."""
    data = datasets.Dataset.from_dict(TEXTS, features=features(datasets))
    datasets.DatasetDict(train=data, validation=data.select(range(6)), test=data.select(range(4))).save_to_disk("kinds")
    columns = ("--text-column", "words", "--label-column", "kind")
    said = zoo("train", "bert-tiny", "--task", "text-classification", "--data", "kinds", *columns, "-o", "m", *FAST,
               "--tokenizer", "bytes", "--max-steps", "2", "--json")  # fmt: skip
    assert said.status == 0, said.err
    assert json.loads(Path("m/config.json").read_text())["config"]["labels"] == ["no", "yes"]
    record = json.loads(Path("m/training.json").read_text())
    assert (record["data"], record["rows"]["rows"], record["best"]["targets"]) == ("kinds", 20, 6)
    scores = zoo("evaluate", "m", "--data", "kinds", *columns, "--json").json["scores"]
    assert scores[0]["targets"] == 4
    zoo("evaluate", "m", "--data", "kinds", *columns, "--split", "tests").failed(
        2, "kinds has no split 'tests'", "'test'"
    )
    assert zoo("evaluate", "m", "--data", "kinds/train", *columns, "--json").json["scores"][0]["targets"] == 20


def test_saved_rows_are_those_of_the_library(datasets: Any) -> None:
    """Over several shards, with lists of classes, and with images as files."""
    from PIL import Image

    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    tags = datasets.Features({"words": datasets.List(datasets.Value("string")), "image": datasets.Image(),
                              "tags": datasets.List(datasets.ClassLabel(names=["O", "X"]))})  # fmt: skip
    rows = [{"words": ["a"] * number, "tags": [number % 2] * number, "image": picture} for number in range(1, 9)]
    datasets.Dataset.from_list(rows, features=tags).save_to_disk("words", num_shards=3)
    (found,) = data_files([Path("words")])
    read = list(read_rows(found, {"text": "words", "label": "tags"}, {"image": "image"}))
    wanted = [([*row["words"]], ["OX"[tag] for tag in row["tags"]]) for row in rows]
    assert [(row["text"], row["label"]) for row in read] == wanted
    assert all(isinstance(row["image"]["bytes"], bytes) for row in read)
    with pytest.raises(UsageError, match="no column 'tag'"):
        next(read_rows(found, {"label": "tag"}, {}))


def test_copies_of_saved_data_are_the_same_data(datasets: Any) -> None:
    from zoo import plugins

    _, objective = plugins.active().objective("text-classification", "text-classification")
    columns = {"text": "words", "label": "kind"}
    for name in ("one", "other"):
        datasets.Dataset.from_dict(TEXTS, features=features(datasets)).save_to_disk(name)
    changed = {**TEXTS, "kind": [0, 1] * 10}
    datasets.Dataset.from_dict(changed, features=features(datasets)).save_to_disk("changed")
    digests = [
        next(iter(find_source([name], objective, columns).digests.values())) for name in ("one", "other", "changed")
    ]
    assert digests[0] == digests[1] != digests[2]


def test_saved_data_needs_the_library(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("saved").mkdir()
    for name in ("state.json", "dataset_info.json"):
        Path("saved", name).write_text("{}")
    arguments = ("train", "gpt-tiny", "--data", "saved", "-o", "m", *FAST)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "datasets", None)
        zoo(*arguments).failed(1, "needs the package datasets", "pip install attention-zoo[datasets]")
    pytest.importorskip("datasets")
    zoo(*arguments).failed(3, "not a saved data set", "saved")


@pytest.mark.parametrize("content", ["[" * 100_000, "{}", "5", '{"splits": 5}'])
def test_malformed_list_of_splits(content: str, zoo: Zoo) -> None:
    Path("data").mkdir()
    Path("data/dataset_dict.json").write_text(content)
    zoo("train", "gpt-tiny", "--data", "data", "-o", "model").failed(3, "not the splits of a saved data set")


class Digits:
    """An objective whose example is a text's letters."""

    packed, max_length, truncated, encoded, unknown, label_fields = False, 9, 0, 0, 0, ()
    noted: ClassVar[Counter[str]] = Counter()

    def examples(self, row: Any) -> Any:
        return ({"input_ids": np.array(list(row["text"].encode() * 1000), np.int32)},)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(memo.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "examples"


def entry(text: str) -> Any:
    return prepare([{"text": text}], Digits(), text)  # type: ignore[arg-type]


def age(folder: Path, hours: float) -> None:
    """Change the times of the entries that are there, as if that much time had passed."""
    for path in [*folder.iterdir(), *folder.glob("*/*")]:
        found = path.stat().st_mtime - hours * 3600
        os.utime(path, (found, found))


def test_least_recently_used_examples_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry has about 12 kB. One that is open stays readable, and what a killed process left is removed."""
    monkeypatch.setenv(LIMIT, "4e-5")
    opened = entry("abc")
    age(folder, 2)
    first = set(folder.iterdir())
    entry("def")
    second = set(folder.iterdir()) - first
    age(folder, 2)
    (folder / ".left").mkdir()
    os.utime(folder / ".left", (time.time() - 9000,) * 2)
    entry("abc")  # used again
    last = entry("ghi" * 3)  # 36 kB
    names = set(folder.iterdir())
    assert first < names
    assert not second & names
    assert len(names) == 2
    assert len(last.examples[0]["input_ids"]) == 9000
    age(folder, 2)
    entry("jklm" * 3)  # too large alone
    assert len(list(folder.iterdir())) == 1
    assert opened.examples[0]["input_ids"][:3].tolist() == list(b"abc")


def test_entries_of_the_last_hour_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "0")
    entry("abc")
    entry("def")
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("name", ["facts.json", "examples.json", "input_ids.ends", "input_ids.values"])
@pytest.mark.parametrize("content", [b"", b"x", b"5", b"{}", b"[" * 100_000, b'{"count": "1", "fields": [2]}'])
def test_damaged_entries_are_replaced(name: str, content: bytes, folder: Path) -> None:
    """Files of the cache may be empty after a crash of the machine."""
    entry("abc")
    (found,) = folder.iterdir()
    (found / name).write_bytes(content)
    assert entry("abc").examples[0]["input_ids"][:3].tolist() == list(b"abc")
    assert list(folder.iterdir()) == [found]


def test_cached_data_names_its_unusable_rows(folder: Path) -> None:
    """As data that is read anew does, by the names that its files have now."""
    for place in ("old", "new"):
        Path(place).mkdir()
        lines = ('{"text": "a"}', "[]", '{"text": null}', "[]", '{"text": "b"}')
        Path(place, "rows.jsonl").write_text("\n".join(lines))

    def prepared(place: str, skip_bad: int, key: str = "key") -> Any:
        (path,) = data_files([Path(place)])
        rows = list(read_rows(path, {"text": "text"}, {}))
        return prepare(rows, Digits(), key, skip_bad=skip_bad)  # type: ignore[arg-type]

    assert prepared("old", 3).facts.bad == 3
    Path("old/rows.jsonl").unlink()
    said = []
    for key in ("key", "another"):
        with pytest.raises(ArtifactError) as error:
            prepared("new", 2, key)
        said.append(error.value.command_line)
    problem = "new/rows.jsonl, row 2: not a JSON object; new/rows.jsonl, row 3: 'text' is null"
    assert said == [f"3 of 5 rows cannot be used: {problem}: mend them, or leave them out with --skip-bad 3"] * 2
    assert prepared("new", 3).facts.bad == 3
    assert len(list(folder.iterdir())) == 1


def test_full_cache_is_not_used(folder: Path) -> None:
    """The examples go to a temporary folder."""
    with nth_call("replace", 1, full):
        found = entry("abc")
    assert found.examples[0]["input_ids"][:3].tolist() == list(b"abc")
    assert list(folder.iterdir()) == []


def test_limit_must_be_a_number(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "5 GB")
    with pytest.raises(UsageError, match="must be a number of GB, got '5 GB': ZOO_CACHE_GB"):
        entry("abc")
