"""Texts far beyond a model's positions: refused or truncated without encoding all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from zoo.errors import ArtifactError
from zoo.tokenizers.inputs import LongInputError
from zoo.tokenizers.loading import load_tokenizer
from zoo_runtime import load_session

Exported = Callable[..., Path]
TEXT = "a b " * 900_000


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("bert-tiny", "feature-extraction"),
        ("bert-tiny", "sentence-embedding"),
        ("gpt-tiny", "text-generation"),
        ("gpt-tiny", "next-token"),
    ],
)
def test_long_text_is_refused_by_its_first_part(exported_model: Exported, name: str, task: str) -> None:
    """Its tokens are not counted."""
    session = load_session(exported_model(name), tokenizer="bytes")
    runner = session.runner_with(task, {})
    positions = session.option("max_seq_len")
    with pytest.raises(LongInputError, match=f"more than {positions} tokens exceed the model's {positions} positions"):
        runner.read(TEXT, 1)


def test_long_text_is_truncated(exported_model: Exported) -> None:
    folder = exported_model("bert-tiny")
    found = load_tokenizer(folder, tokenizer="bytes", truncate=20)
    with pytest.warns(match="1 text truncated to 20 tokens"):
        ids = found(TEXT)["input_ids"]
    assert ids.tolist() == [list(TEXT[:20].encode())]
    with pytest.raises(ArtifactError, match="more than"):
        load_tokenizer(folder, tokenizer="bytes")(TEXT)
