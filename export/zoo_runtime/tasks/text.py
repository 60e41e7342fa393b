"""Tasks for text encoders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from zoo.classes import ProblemType, problem_of
from zoo.config import Settings
from zoo.contract import Graph, dim_size
from zoo.errors import ArtifactError, UsageError
from zoo_runtime.runner import (
    Answer,
    Context,
    Pair,
    TextRunner,
    Tokens,
    are_ids,
    finite,
    label,
    require_outputs,
    segments_of,
)

__all__ = [
    "Embed",
    "Features",
    "FillMask",
    "NextSentence",
    "ReplacedTokens",
    "TextClassification",
    "TokenClassification",
    "classify",
    "mask_token",
    "problem_type",
    "show_classes",
    "softmax",
]

Array = np.ndarray[Any, Any]


class Features(TextRunner):
    """``last_hidden_state``, (tokens, hidden) for each input; or ``features``, if the model selects layers."""

    def __init__(self, session: Context, chosen: Settings) -> None:
        super().__init__(session, chosen)
        names = {tensor.name for tensor in self.graph.output_tensors()}
        self.output = "features" if "features" in names else "last_hidden_state"
        require_outputs(self.graph, (self.output,), session.path)

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        hidden = self.compute(items)[self.output]
        results = [{"tokens": len(item.ids), self.output: rows[: len(item.ids)]}
                   for item, rows in zip(items, hidden, strict=True)]  # fmt: skip
        return finite(items, hidden, results)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            states = answer.result[self.output]
            yield f"{label(answer)}: {len(states)} tokens x {len(states[0])}, the first {_start(states[0])}"


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(Settings):
    """Pooling options, for encoders whose graph does not include pooling."""

    pooling: Literal["mean", "cls"] = "mean"
    """Mean over all tokens, or the first token."""
    normalize: bool = True
    """Whether to scale the vector to unit length."""


class Embed(TextRunner):
    """``embedding``, one vector per input: the graph's own, or pooled from its hidden states."""

    options = EmbedOptions

    def __init__(self, session: Context, chosen: EmbedOptions) -> None:
        super().__init__(session, chosen)
        self.own = any(tensor.name == "sentence_embedding" for tensor in self.graph.output_tensors())
        require_outputs(self.graph, () if self.own else ("last_hidden_state",), session.path)
        if self.own and chosen != EmbedOptions():
            raise UsageError("the model's own pooling is part of its graph", session.path, "leave out the options")

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        outputs = self.compute(items)
        vectors = outputs["sentence_embedding"] if self.own else self._pool(items, outputs["last_hidden_state"])
        results = [{"tokens": len(item.ids), "embedding": vector} for item, vector in zip(items, vectors, strict=True)]
        return finite(items, vectors, results)

    def _pool(self, items: Sequence[Tokens], hidden: Array) -> Array:
        hidden = hidden.astype(np.float32)
        if self.chosen.pooling == "cls":
            vectors = hidden[:, 0]
        else:
            vectors = np.stack([rows[: len(item.ids)].mean(0) for item, rows in zip(items, hidden, strict=True)])
        if self.chosen.normalize:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return vectors

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        """Yield a line per embedding, with its cosine similarities to all inputs."""
        vectors = np.stack([answer.result["embedding"] for answer in answers]).astype(np.float64)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        for answer, vector in zip(answers, vectors, strict=True):
            values = answer.result["embedding"]
            cosines = " ".join(f"{value:.4f}" for value in vectors @ vector)
            yield f"{label(answer)}: {len(values)} numbers {_start(values)}  cosines {cosines}"


class TextClassification(TextRunner):
    """The classes of a text, or of a pair such as premise and hypothesis: see :func:`classify`."""

    needs = ("logits",)
    takes_pairs = True

    def __init__(self, session: Context, chosen: Settings) -> None:
        super().__init__(session, chosen)
        self.problem = problem_type(session, self.graph)

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        found = classify(logits, self.problem, self.session.option("labels"))
        results = [{"tokens": len(item.ids), **scores} for item, scores in zip(items, found, strict=True)]
        return finite(items, logits, results)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            yield show_classes(answer, self.session.option("labels"))


class NextSentence(TextRunner):
    """``follows``: the probability that the second text of a pair follows the first (Devlin et al. 2019).

    It is the probability of the first of the two classes. For ALBERT, this is the probability that two consecutive
    texts are in order (Lan et al. 2020).
    """

    needs = ("next_sentence_logits",)
    takes_pairs = True

    def __init__(self, session: Context, chosen: Settings) -> None:
        super().__init__(session, chosen)
        if (segments := segments_of(self.graph)) < 2:
            what = f"next-sentence needs two segments, the model has {segments}"
            raise UsageError(what, session.path, "choose another task")

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


class TokenClassification(TextRunner):
    """``classes``: for each token, special ones included, the likeliest class and its probability.

    With several labels, each token has the ``probabilities`` of all; for regression, its ``values``: see
    :func:`classify`.
    """

    needs = ("logits",)

    def __init__(self, session: Context, chosen: Settings) -> None:
        super().__init__(session, chosen)
        self.problem = problem_type(session, self.graph)

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        return finite(items, logits, [self._classes(item, row) for item, row in zip(items, logits, strict=True)])

    def _classes(self, item: Tokens, logits: Array) -> dict[str, Any]:
        names = self.session.option("labels")
        found = classify(logits[: len(item.ids)], self.problem, names)
        if self.problem == "single_label_classification":
            found = [_likeliest(scores["probabilities"], names) for scores in found]
        classes = [
            {"token": token, "text": self.decode([token]), **scores}
            for token, scores in zip(item.ids, found, strict=True)
        ]
        return {"tokens": len(item.ids), "classes": classes}

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        names = self.session.option("labels")
        for answer in answers:
            parts = (
                f"{_text(part)!r} "
                + (f"{part['label']} {part['probability']:.4f}" if "probability" in part else _scores(part, names))
                for part in answer.result["classes"]
            )
            yield f"{label(answer)}: " + "  ".join(parts)


def _likeliest(chances: Array, names: Sequence[str] | None) -> dict[str, Any]:
    best = int(chances.argmax())
    return {"label": names[best] if names else str(best), "probability": float(chances[best])}


class ReplacedTokens(TextRunner):
    """``replaced``: for each token, special ones included, the probability that it replaces the original one."""

    needs = ("logits",)

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        return finite(items, logits, [self._chances(item, row) for item, row in zip(items, logits, strict=True)])

    def _chances(self, item: Tokens, logits: Array) -> dict[str, Any]:
        chances = sigmoid(logits)
        replaced = [
            {"token": token, "text": self.decode([token]), "probability": float(chance)}
            for token, chance in zip(item.ids, chances[: len(item.ids)], strict=True)
        ]
        return {"tokens": len(item.ids), "replaced": replaced}

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            parts = (f"{_text(part)!r} {part['probability']:.4f}" for part in answer.result["replaced"])
            yield f"{label(answer)}: " + "  ".join(parts)


@dataclass(frozen=True, kw_only=True)
class FillMaskOptions(Settings):
    """Options of filling masks."""

    top_k: int = 5
    """Number of tokens per mask, likeliest first."""

    def __post_init__(self) -> None:
        self.require_positive("top_k")


class FillMask(TextRunner):
    """``masks``: the likeliest tokens for each mask of an input."""

    options = FillMaskOptions
    needs = ("logits",)

    def __init__(self, session: Context, chosen: FillMaskOptions) -> None:
        super().__init__(session, chosen)
        self.target = mask_token(session)

    def samples(self) -> Sequence[Any]:
        """Return token ids of texts with a mask in the middle."""
        texts = [value if are_ids(value) else self._encode(0, value).ids for value in super().samples()]
        return [[*ids[: len(ids) // 2], self.target, *ids[len(ids) // 2 + 1 :]] for ids in texts]

    def read(self, value: Any, number: int) -> Tokens:
        item = super().read(value, number)
        if self.target not in item.ids:
            mask = self.decode([self.target])
            remedy = f"write {mask}" if mask else f"use token {self.target}"
            raise ArtifactError("no mask to fill", f"input {number}", remedy)
        return item

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        return finite(items, logits, [self._fill(item, row) for item, row in zip(items, logits, strict=True)])

    def _fill(self, item: Tokens, logits: Array) -> dict[str, Any]:
        masks = []
        for place in (place for place, token in enumerate(item.ids) if token == self.target):
            chances = softmax(logits[place])
            best = np.argsort(-chances, kind="stable")[: self.chosen.top_k].tolist()
            masks.append(
                [{"token": token, "text": self.decode([token]), "probability": float(chances[token])} for token in best]
            )
        return {"tokens": len(item.ids), "masks": masks}

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            for filled in answer.result["masks"]:
                choices = (f"{_text(item)!r} {item['probability']:.4f}" for item in filled)
                yield f"{label(answer)}: " + "  ".join(choices)


def mask_token(session: Context) -> int:
    """Return the model's mask token, or raise :class:`UsageError` if it has none."""
    token = session.option("mask_token_id")
    if token is None:
        raise UsageError("the model has no mask_token_id", session.path, "set it when building the model")
    return int(token)


def problem_type(session: Context, graph: Graph) -> ProblemType:
    """Return how the ``logits`` of a classifier's graph become answers: see :func:`zoo.classes.problem_of`.

    Raises :class:`UsageError` if the configured problem type does not fit the number of classes.
    """
    logits = next(tensor for tensor in graph.output_tensors() if tensor.name == "logits")
    try:
        return problem_of(session.option("problem_type"), dim_size(logits.dims[-1], {}))
    except ValueError as error:
        raise UsageError(str(error), session.path) from error


def classify(logits: Array, problem: ProblemType, names: Sequence[str] | None) -> list[dict[str, Any]]:
    """Convert logits (B, classes) to results.

    A result has the ``probabilities`` of the classes, and the ``label`` of the likeliest if classes have names; for
    regression, only ``values``.
    """
    if problem == "regression":
        return [{"values": row} for row in logits]
    chances = softmax(logits) if problem == "single_label_classification" else sigmoid(logits)
    return [{**({"label": names[int(row.argmax())]} if names else {}), "probabilities": row} for row in chances]


def show_classes(answer: Answer, names: Sequence[str] | None, *, most: int | None = None) -> str:
    """Return a human-readable line: every class in order, or the ``most`` likeliest."""
    return f"{label(answer)}: {_scores(answer.result, names, most)}"


def _scores(result: Mapping[str, Any], names: Sequence[str] | None, most: int | None = None) -> str:
    scores = np.asarray(result.get("probabilities", result.get("values")))
    places = range(len(scores)) if most is None else np.argsort(-scores, kind="stable")[:most].tolist()
    return "  ".join(f"{names[at] if names else at}: {scores[at]:.4f}" for at in places)


def sigmoid(logits: Array) -> Array:
    """Sigmoid in float64, without overflow."""
    return softmax(np.stack((np.zeros_like(logits), logits), -1))[..., 1]


def softmax(logits: Array) -> Array:
    """Softmax along the last dimension, in float64."""
    with np.errstate(invalid="ignore"):  # callers check for NaN
        weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    result: Array = weights / weights.sum(-1, keepdims=True)
    return result


def _text(item: Mapping[str, Any]) -> Any:
    """A token in human-readable output: its text, or its id without a tokenizer."""
    return item["token"] if item["text"] is None else item["text"]


def _start(vector: Sequence[float]) -> str:
    return f"[{' '.join(f'{value:.5f}' for value in vector[:4])} ...]"
