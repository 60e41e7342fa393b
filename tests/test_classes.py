"""Problem types: which answers a classifier's logits mean, and which configurations are refused."""

from __future__ import annotations

from typing import Any

import pytest

from zoo.classes import ClassifierConfig
from zoo.errors import UsageError
from zoo_plugins.bert.config import BERTConfig
from zoo_plugins.perceiver.config import PerceiverConfig
from zoo_plugins.rnn.config import RNNConfig
from zoo_plugins.textcnn.config import TextCNNConfig
from zoo_plugins.vit.config import ViTConfig

TEXTS, TOKENS = {"task": "text-classification"}, {"task": "token-classification"}
HEADS: list[tuple[type[ClassifierConfig], dict[str, Any]]] = [
    (BERTConfig, TEXTS),
    (BERTConfig, TOKENS),
    (PerceiverConfig, TEXTS),
    (RNNConfig, TEXTS),
    (RNNConfig, TOKENS),
    (TextCNNConfig, {}),
    (ViTConfig, {}),
]


@pytest.mark.parametrize(("cls", "values"), HEADS)
def test_problem_type_follows_from_the_number_of_classes_unless_stated(
    cls: type[ClassifierConfig], values: dict[str, Any]
) -> None:
    def problem(**more: Any) -> str | None:
        return cls.from_dict({**values, **more}).problem_type

    assert problem(num_classes=3) == problem(num_classes=3, problem_type=None) == "single_label_classification"
    assert problem(num_classes=1) == "regression"
    assert problem(num_classes=1, problem_type="multi_label_classification") == "multi_label_classification"
    assert problem(num_classes=3, problem_type="regression") == "regression"


@pytest.mark.parametrize(("cls", "values"), HEADS)
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"num_classes": 1, "problem_type": "single_label_classification"},
            "needs at least 2 classes, but num_classes",
        ),
        ({"problem_type": "ranking"}, "problem_type must be one of 'single_label_classification', 'multi_label"),
        ({"num_classes": 3, "labels": ["a", "b"]}, "2 labels for num_classes 3"),
        ({"num_classes": 0}, "num_classes must be positive, got 0"),
    ],
)
def test_contradictions_are_refused(
    cls: type[ClassifierConfig], values: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        cls.from_dict({**values, **more}, "x.toml")


@pytest.mark.parametrize(
    ("cls", "task"),
    [(BERTConfig, "fill-mask"), (PerceiverConfig, "fill-mask"), (ViTConfig, "image-feature-extraction")],
)
def test_model_without_a_classifier_has_no_problem_type(cls: type[ClassifierConfig], task: str) -> None:
    assert cls.from_dict({"task": task, "num_classes": 1}).problem_type is None
