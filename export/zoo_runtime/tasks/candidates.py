"""Tasks on pairs of one text with several: zero-shot classification, reranking and multiple choice."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.classes import class_names
from zoo.config import Settings
from zoo.contract import dim_size
from zoo.errors import ArtifactError, UsageError, task_option
from zoo.plots import Distribution
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer, Pair, texts_of
from zoo_runtime.running.text_runner import Tokens
from zoo_runtime.tasks.classification import (
    ClassificationOptions,
    classify,
    distribution_of,
    problem_type,
    show_classes,
    softmax,
)
from zoo_runtime.tasks.label_texts import read_labels, text_of_label
from zoo_runtime.tasks.parts import Parts, PartsRunner

__all__ = ["MultipleChoice", "Rerank", "RerankOptions", "Texts", "ZeroShot", "ZeroShotOptions"]


@dataclass(frozen=True)
class Texts(Parts):
    """A text that is paired with each of ``others``."""

    others: tuple[str, ...] = ()


class _PairsRunner(PartsRunner):
    """Base class: a classifier of pairs of texts."""

    needs = ("logits",)
    takes_pairs = True
    parts: tuple[str, str]
    """Names of the two texts of a pair, for errors."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the model's classes."""
        logits = next(tensor for tensor in self.graph.output_tensors() if tensor.name == "logits")
        count = dim_size(logits.dims[-1], {})
        return class_names(self.session.option("labels"), count, self.session.option("problem_type"))

    def class_number(self, name: str) -> int:
        """Return the number of a class, or raise :class:`UsageError` if there is none of this name."""
        if name not in self.names:
            raise UsageError(f"no class {name!r}", self.session.path, f"known: {', '.join(self.names)}")
        return self.names.index(name)

    def pairs(self, text: str, others: Sequence[str], number: int) -> Texts:
        """Return the pairs of a text with others."""
        first, second = self.parts
        rows = tuple(
            self._read_pair(number, text, other, (first, f"text of {second} {place}"))
            for place, other in enumerate(others, 1)
        )
        for row in rows:
            self._check(row)
        return Texts(number, max((row.ids for row in rows), key=len), rows=rows, others=tuple(others))

    def logits(self, items: Sequence[Any]) -> list[Array | ArtifactError]:
        """Return the logits (pairs, classes) of each item, or an error if they are not finite."""
        stacked = [np.stack([row["logits"] for row in rows]) for rows in self.compute_rows(items)]
        return [
            logits
            if np.isfinite(logits).all()
            else ArtifactError("output contains NaN or infinity", f"input {item.number}", "check the weights")
            for item, logits in zip(items, stacked, strict=True)
        ]

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        return [
            logits if isinstance(logits, ArtifactError) else self.result(item, logits)
            for item, logits in zip(items, self.logits(items), strict=True)
        ]

    @abstractmethod
    def result(self, item: Any, logits: Array) -> dict[str, Any]:
        """Return the result of an item, given its logits (pairs, classes)."""


class _ListRunner(_PairsRunner):
    """Base class: an input is a text and the texts that it is paired with."""

    fewest: int
    """Minimum number of the latter."""
    expected: tuple[str, str]
    """Description of an input, and its form on the command line, for errors."""

    def gather(self, texts: Sequence[str]) -> list[Any]:
        """Return one input, a text and the others; a single text stays as it is, for :meth:`read` to refuse."""
        return [Pair(texts[0], list(texts[1:]))] if len(texts) > 1 else list(texts)

    def samples(self) -> Sequence[Any]:
        return [Pair(value, ["wet", "tea", "a"]) for value in super().samples() if isinstance(value, str)]

    def read(self, value: Any, number: int) -> Tokens:
        text, *others = texts_of(value) or ("",)
        if len(others) < self.fewest or isinstance(value, str):
            what, remedy = self.expected
            raise ArtifactError(f"expected {what}", f"input {number}", f"give {remedy}")
        return self.pairs(text, others, number)


@dataclass(frozen=True, kw_only=True)
class ZeroShotOptions(Settings):
    """Options of zero-shot classification, with the names of transformers' pipeline."""

    labels: tuple[str, ...] = ()
    """The classes, as they fit into the template. Required."""
    hypothesis_template: str = "This example is {}."
    """The second text of each pair, with {} for the label."""
    multi_label: bool = False
    """Whether several labels may be true: each then has a probability of its own."""
    entailment: str | None = None
    """The name of the model's class for entailment; by default the one that begins with ``entail``."""


class ZeroShot(_PairsRunner):
    """``classes``: the probability of each label, from a model of natural language inference (Yin et al. 2019).

    Each label makes a hypothesis. Its probability is a softmax over the logits of entailment of all labels, or for
    ``multi_label`` and a single label one over entailment and contradiction. Probabilities are those of transformers'
    pipeline: contradiction is the first class, or the last if the first is entailment.
    """

    options = ZeroShotOptions
    parts = ("text", "label")
    sample_options = MappingProxyType({"labels": ("wet", "tea", "a"), "hypothesis_template": "{}"})

    def __init__(self, session: Context, chosen: ZeroShotOptions) -> None:
        super().__init__(session, chosen)
        self.labels = read_labels(chosen.labels, chosen.hypothesis_template, "zero-shot-classification")
        entailing = [name for name in self.names if name.lower().startswith("entail")]
        if chosen.entailment is None and not entailing:
            problem = f"no class begins with 'entail': {', '.join(self.names)}"
            raise UsageError(problem, session.path, task_option("entailment=CLASS", "name it with {}"))
        if len(self.names) < 2:
            raise UsageError("zero-shot classification needs 2 classes, the model has 1", session.path)
        self.entailment = self.class_number(chosen.entailment or entailing[0])
        self.contradiction = 0 if self.entailment else len(self.names) - 1

    def samples(self) -> Sequence[Any]:
        return [value for value in super().samples() if isinstance(value, str)]

    def read(self, value: Any, number: int) -> Tokens:
        if not isinstance(value, str):
            raise ArtifactError("expected one text", f"input {number}", "the labels make up the second texts")
        template = self.chosen.hypothesis_template
        return self.pairs(value, [text_of_label(template, name) for name in self.labels], number)

    def result(self, item: Any, logits: Array) -> dict[str, Any]:
        if self.chosen.multi_label or len(self.labels) == 1:
            chances = softmax(logits[:, [self.contradiction, self.entailment]])[:, 1]
        else:
            chances = softmax(logits[:, self.entailment])
        order = np.argsort(-chances, kind="stable").tolist()
        classes = [{"label": self.labels[at], "probability": float(chances[at])} for at in order]
        return {"tokens": item.tokens, "label": classes[0]["label"], "classes": classes}

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        yield from map(show_classes, answers)

    def distributions(self, answer: Answer) -> Sequence[Distribution]:
        return [distribution_of(answer, exclusive=not self.chosen.multi_label and len(self.labels) > 1)]


@dataclass(frozen=True, kw_only=True)
class RerankOptions(ClassificationOptions):
    """Options of reranking."""

    top_k: int | None = None
    """Number of passages, best first; by default all."""
    label: str | None = None
    """The class whose score ranks the passages, for a model with several."""


class Rerank(_ListRunner):
    """``passages``: the passages of a query, highest score first (Nogueira and Cho 2019).

    A passage has its ``index`` among those given, from 0. A model with one class gives its number or probability, as
    its ``problem_type`` says.
    """

    options = RerankOptions
    parts = ("query", "passage")
    fewest = 1
    expected = "a query and passages", "QUERY PASSAGE..."

    def __init__(self, session: Context, chosen: RerankOptions) -> None:
        super().__init__(session, chosen)
        self.problem = problem_type(session, self.graph, chosen.function_to_apply)
        if len(self.names) > 1 and chosen.label is None:
            remedy = task_option("label=CLASS", "set {} to rank by one")
            raise UsageError(f"the model has {len(self.names)} classes", session.path, remedy)
        self.place = 0 if chosen.label is None else self.class_number(chosen.label)

    def result(self, item: Any, logits: Array) -> dict[str, Any]:
        classes = classify(logits, self.problem, None)
        key = "values" if self.problem == "regression" else "probabilities"
        scores = np.array([row[key][self.place] for row in classes])
        order = np.argsort(-scores, kind="stable")[: self.chosen.top_k].tolist()
        passages = [{"text": item.others[at], "score": float(scores[at]), "index": at} for at in order]
        return {"tokens": item.tokens, "passages": passages}

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            yield from (f"{passage['score']:.4f} {passage['text']!r}" for passage in answer.result["passages"])


class MultipleChoice(_ListRunner):
    """``choices``: the choices for a text, likeliest first.

    A choice has its ``index`` among those given, from 0. Its probability is a softmax over the scores of all choices,
    each of which is paired with the text.
    """

    parts = ("text", "choice")
    fewest = 2
    expected = "a text and two choices or more", "TEXT CHOICE CHOICE..."

    def result(self, item: Any, logits: Array) -> dict[str, Any]:
        chances = softmax(logits[:, 0])
        order = np.argsort(-chances, kind="stable").tolist()
        choices = [{"text": item.others[at], "probability": float(chances[at]), "index": at} for at in order]
        return {"tokens": item.tokens, "choices": choices}

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            yield from (f"{choice['probability']:.4f} {choice['text']!r}" for choice in answer.result["choices"])
