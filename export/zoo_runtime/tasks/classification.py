"""Classification of texts and pairs of texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from zoo.arrays import Array
from zoo.classes import ProblemType, class_names, problem_of
from zoo.config import Settings
from zoo.contract import Graph, dim_size
from zoo.errors import ArtifactError, UsageError
from zoo.plots import Distribution
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer, Pair, are_ids, label
from zoo_runtime.running.runner import finite
from zoo_runtime.running.text_runner import TextRunner, Tokens

__all__ = [
    "ClassificationOptions",
    "NextSentence",
    "TextClassification",
    "classify",
    "distribution_of",
    "problem_type",
    "rank_classes",
    "show_classes",
    "sigmoid",
    "softmax",
]

_PROBLEMS: Mapping[str, ProblemType] = {
    "softmax": "single_label_classification",
    "sigmoid": "multi_label_classification",
    "none": "regression",
}


@dataclass(frozen=True, kw_only=True)
class ClassificationOptions(Settings):
    """Options of classification, with the names of transformers' pipelines."""

    top_k: int | None = None
    """Number of ``classes``, likeliest first; by default all."""
    function_to_apply: Literal["auto", "softmax", "sigmoid", "none"] = "auto"
    """How logits become scores; ``auto`` is by the model's ``problem_type``."""

    def __post_init__(self) -> None:
        if self.top_k is not None:
            self.require_positive("top_k")


class TextClassification(TextRunner):
    """The classes of a text, or of a pair such as premise and hypothesis.

    See :func:`classify` and :func:`rank_classes`.
    """

    options = ClassificationOptions
    needs = ("logits",)
    takes_pairs = True

    def __init__(self, session: Context, chosen: ClassificationOptions) -> None:
        super().__init__(session, chosen)
        self.problem = problem_type(session, self.graph, chosen.function_to_apply)

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        classes = classify(logits, self.problem, self.session.option("labels"))
        results = [
            {"tokens": len(item.ids), **rank_classes(scores, self.session, self.problem, self.chosen.top_k)}
            for item, scores in zip(items, classes, strict=True)
        ]
        return finite(items, logits, results)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        yield from map(show_classes, answers)

    def distributions(self, answer: Answer) -> Sequence[Distribution]:
        return [distribution_of(answer, exclusive=self.problem == "single_label_classification")]


class NextSentence(TextRunner):
    """``follows``: the probability that the second text of a pair follows the first (Devlin et al. 2019).

    It is the probability of the first of the two classes. For ALBERT, this is the probability that two consecutive
    texts are in order (Lan et al. 2020).
    """

    needs = ("next_sentence_logits",)
    takes_pairs = True

    def __init__(self, session: Context, chosen: Settings) -> None:
        super().__init__(session, chosen)
        if (segments := self.inputs.segments) < 2:
            problem = f"next-sentence needs two segments, the model has {segments}"
            raise UsageError(problem, session.path, "choose another task")

    def samples(self) -> Sequence[Any]:
        singles = super().samples()[:-1]
        return [Pair(*pair) for pair in pairwise(singles)]

    def read(self, value: Any, number: int) -> Tokens:
        if isinstance(value, str) or are_ids(value):
            raise ArtifactError("no second text", f"input {number}", "give a pair")
        return super().read(value, number)

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        logits = self.compute(items)["next_sentence_logits"]
        results = [
            {"tokens": len(item.ids), "follows": float(chances[0])}
            for item, chances in zip(items, softmax(logits), strict=True)
        ]
        return finite(items, logits, results)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            yield f"{label(answer)}: follows {answer.result['follows']:.4f}"


def problem_type(session: Context, graph: Graph, function: str = "auto") -> ProblemType:
    """Return how the ``logits`` of a classifier's graph become answers: see :func:`zoo.classes.problem_of`.

    Args:
        session: the open model.
        graph: its graph.
        function: ``softmax``, ``sigmoid`` or ``none``; ``auto`` for the configured problem type.

    Raises:
        UsageError: the problem type does not fit the number of classes.
    """
    logits = next(tensor for tensor in graph.output_tensors() if tensor.name == "logits")
    try:
        return problem_of(_PROBLEMS.get(function) or session.option("problem_type"), dim_size(logits.dims[-1], {}))
    except ValueError as error:
        raise UsageError(str(error), session.path) from error


def classify(logits: Array, problem: ProblemType, names: Sequence[str] | None) -> list[dict[str, Any]]:
    """Convert logits (B, classes) to results.

    A result has the ``probabilities`` of the classes; for regression, only ``values``. If classes have names, it begins
    with the ``label`` of the likeliest or, for several labels, the ``labels`` of all that are likelier than not, in the
    order of the classes.
    """
    if problem == "regression":
        return [{"values": row} for row in logits]
    if problem == "single_label_classification":
        return [
            {**({"label": names[int(row.argmax())]} if names else {}), "probabilities": row} for row in softmax(logits)
        ]
    return [
        {
            **({"labels": [name for name, chance in zip(names, row, strict=True) if chance > 0.5]} if names else {}),
            "probabilities": row,
        }
        for row in sigmoid(logits)
    ]


def rank_classes(
    scores: Mapping[str, Any], session: Context, problem: ProblemType, count: int | None
) -> dict[str, Any]:
    """Add ``classes`` to a result of :func:`classify`: the name and the score of each, highest first."""
    key, values = ("value", scores["values"]) if "values" in scores else ("probability", scores["probabilities"])
    names = class_names(session.option("labels"), len(values), problem)
    order = np.argsort(-np.asarray(values), kind="stable")[:count]
    return {**scores, "classes": [{"label": names[at], key: float(values[at])} for at in order.tolist()]}


def show_classes(answer: Answer, most: int | None = None) -> str:
    """Return a human-readable line: the ``most`` likeliest classes, or all."""
    classes = (
        f"{part['label']}: {part.get('probability', part.get('value')):.4f}" for part in answer.result["classes"][:most]
    )
    return f"{label(answer)}: {'  '.join(classes)}"


def distribution_of(answer: Answer, *, exclusive: bool) -> Distribution:
    """Return the probabilities of the classes in an answer. Raises :class:`UsageError` for those of a regression."""
    classes = answer.result["classes"]
    if any("probability" not in item for item in classes):
        raise UsageError("a regression gives no probabilities", label(answer))
    items = [(str(item["label"]), float(item["probability"])) for item in classes]
    return Distribution(title=label(answer), items=items, exclusive=exclusive)


def sigmoid(logits: Array) -> Array:
    """Sigmoid in float64, without overflow."""
    return softmax(np.stack((np.zeros_like(logits), logits), -1))[..., 1]


def softmax(logits: Array) -> Array:
    """Softmax along the last dimension, in float64."""
    with np.errstate(invalid="ignore"):  # callers check for NaN
        weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    result: Array = weights / weights.sum(-1, keepdims=True)
    return result
