"""Model directories that get another head: ``zoo adapt --task`` and ``zoo train --task`` keep the trunk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo import UsageError, adapt, load
from zoo.models.heads import retask
from zoo.models.tensors import stored_tensors
from zoo.registry import registry

Zoo = Callable[..., Any]


def tensors(folder: Path | str) -> dict[str, torch.Tensor]:
    return stored_tensors(load(folder))[0]


@pytest.mark.slow
def test_trunk_is_kept_bit_for_bit(copy_of: Callable[..., Path], zoo: Zoo) -> None:
    old = copy_of("bert-tiny", "--set", "task=pretraining")
    result = zoo(
        "adapt", old, "--task", "token-classification", "--set", "labels=O,B-X,I-X", "-o", "new", "--json"
    ).json
    assert result["task"] == "token-classification"
    assert result["new"] == ["classifier.weight", "classifier.bias"]
    before, after = tensors(old), tensors("new")
    assert set(before) - set(after) == set(result["dropped"])
    assert all(torch.equal(after[name], before[name]) for name in after.keys() - set(result["new"]))
    assert load("new").config.num_classes == 3
    origin = json.loads(Path("new/config.json").read_text())["origin"]
    assert (origin["seed"], origin["parent"]["kind"]) == (0, "initialised")
    assert {"fresh classifier.weight", "without next_sentence.bias"} <= set(origin["changes"])


def test_seed_determines_the_new_head(copy_of: Callable[..., Path]) -> None:
    old = copy_of("bert-tiny")
    one, same, other = (
        tensors(adapt(old, f"new-{place}", task="question-answering", seed=seed))
        for place, seed in enumerate((1, 1, 2))
    )
    assert torch.equal(one["span.weight"], same["span.weight"])
    assert not torch.equal(one["span.weight"], other["span.weight"])


def test_classes_belong_to_their_task(copy_of: Callable[..., Path]) -> None:
    """A classifier of texts is not one of tokens, even if it has the same name and shape."""
    old = copy_of("bert-tiny", "--set", "task=text-classification", "--set", "labels=a,b")
    new = adapt(old, "tokens", task="token-classification", seed=3)
    assert load(new).config.labels == ()
    assert not torch.equal(tensors(new)["classifier.weight"], tensors(old)["classifier.weight"])
    renamed = adapt(old, "renamed", task="text-classification", labels=("c", "d"))
    assert load(renamed).config.labels == ("c", "d")
    assert torch.equal(tensors(renamed)["classifier.weight"], tensors(old)["classifier.weight"])


def test_text_classification_gets_a_pooler(copy_of: Callable[..., Path]) -> None:
    """As in transformers, unless the user decides otherwise; a model that has none by choice keeps it so."""
    old = copy_of("bert-tiny", "--set", "pooler=false")
    assert load(adapt(old, "pooled", task="text-classification")).config.pooler
    bare = adapt(old, "bare", task="text-classification", pooler=False)
    assert not load(bare).config.pooler
    assert not load(adapt(bare, "three", task="text-classification", num_classes=3)).config.pooler


def test_image_classifiers_become_feature_extractors_and_back(copy_of: Callable[..., Path]) -> None:
    """A second classifier belongs to the head, and a distillation token to the trunk."""
    old = copy_of("vit-tiny", "--set", "distilled=true")
    features = adapt(old, "features", task="image-feature-extraction")
    again = adapt(features, "again", task="image-classification", distillation_head=True, num_classes=3)
    trunk = tensors(features)
    assert "embeddings.distillation_token" in trunk
    assert tensors(again).keys() == tensors(old).keys()
    assert all(torch.equal(tensors(again)[name], value) for name, value in trunk.items())


def test_trunk_and_head_change_together(copy_of: Callable[..., Path], zoo: Zoo) -> None:
    old = copy_of("bert-tiny")
    found = zoo("adapt", old, "--task", "fill-mask", "--set", "max_seq_len=9", "-o", "new", "--json").json
    assert list(found["tensors"]) == ["embeddings.position.weight"]
    assert found["dropped"] == ["pooler.weight", "pooler.bias"]


@pytest.mark.parametrize(
    ("setting", "fragments"),
    [
        ("num_layers=3", ("blocks.2.attention.query.weight would be new; ",)),
        ("num_layers=1", ("blocks.1.attention.query.weight would be lost; ",)),
        ("max_seq_len=900", ("embeddings.position.weight has shape (128, 64), not (900, 64)",)),
    ],
)
def test_trunk_is_never_initialised(
    copy_of: Callable[..., Path], zoo: Zoo, setting: str, fragments: tuple[str, ...]
) -> None:
    """Neither by ``adapt`` nor by training."""
    old = copy_of("bert-tiny")
    zoo("adapt", old, "--task", "fill-mask", "--set", setting, "-o", "new").failed(2, *fragments)
    Path("corpus.txt").write_text("a line of text\n" * 50)
    data = ("--data", "corpus.txt", "--max-steps", 1)
    zoo("train", old, "--task", "fill-mask", "--set", setting, *data, "-o", "new").failed(2, *fragments)
    assert not Path("new").exists()


def test_without_a_task_no_head_is_replaced(copy_of: Callable[..., Path], zoo: Zoo) -> None:
    old = copy_of("bert-tiny", "--set", "task=text-classification")
    zoo("adapt", old, "--set", "num_classes=5", "-o", "new").failed(
        2, "classifier.weight has shape (2, 64), not (5, 64); classifier.bias", "pass --task to replace the head"
    )


def test_unknown_tasks_are_rejected(copy_of: Callable[..., Path], zoo: Zoo) -> None:
    old = copy_of("bert-tiny")
    zoo("adapt", old, "--task", "fill-masks", "-o", "new").failed(2, "--task fill-masks: did you mean 'fill-mask'?")
    with pytest.raises(UsageError, match="task must be one of"):
        adapt(old, "new", task="text-generation")


def test_retask_shares_the_tensors_that_it_keeps(copy_of: Callable[..., Path]) -> None:
    """Large models are not copied."""
    old = load(copy_of("bert-tiny"))
    found = retask(registry().resolve("bert-tiny"), old, {"task": "text-classification", "num_classes": 3}, 0)
    assert found.model.embeddings.token.weight.data_ptr() == old.embeddings.token.weight.data_ptr()
    assert found.head.new == ("classifier.weight", "classifier.bias")
