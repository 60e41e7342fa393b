"""The tasks of encoders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from zoo.config import Settings
from zoo.errors import ArtifactError, UsageError
from zoo_export.runtime.runner import Answer, TextRunner, Tokens, are_ids, finite, label, require_outputs, segments_of

if TYPE_CHECKING:
    from zoo_export.runtime.session import Session

__all__ = [
    "Embed",
    "Features",
    "FillMask",
    "NextSentence",
    "ReplacedTokens",
    "TextClassification",
    "TokenClassification",
    "mask_token",
    "softmax",
]

Array = np.ndarray[Any, Any]


class Features(TextRunner):
    """``last_hidden_state``, (tokens, hidden) for each input; or ``features``, where the model has layers chosen."""

    def __init__(self, session: Any, chosen: Settings) -> None:
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
    """Of an encoder that does not say itself how its tokens become one vector."""

    pooling: Literal["mean", "cls"] = "mean"
    """The mean over the tokens, or the first of them."""
    normalize: bool = True
    """Whether the vector has unit length."""


class Embed(TextRunner):
    """``embedding``, one vector for each input: the graph's own, or pooled from its hidden states."""

    options = EmbedOptions

    def __init__(self, session: Any, chosen: EmbedOptions) -> None:
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
        """With the cosines between the inputs."""
        vectors = np.stack([answer.result["embedding"] for answer in answers]).astype(np.float64)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        for answer, vector in zip(answers, vectors, strict=True):
            values = answer.result["embedding"]
            cosines = " ".join(f"{value:.4f}" for value in vectors @ vector)
            yield f"{label(answer)}: {len(values)} numbers {_start(values)}  cosines {cosines}"


class TextClassification(TextRunner):
    """``probabilities`` of the classes, and the ``label`` of the likeliest where the model names its classes.

    Of a text, or of a pair, as a premise and a hypothesis are.
    """

    needs = ("logits",)
    takes_pairs = True

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        names = self.session.option("labels")
        results = []
        for item, chances in zip(items, softmax(logits), strict=True):
            best = {"label": names[int(chances.argmax())]} if names else {}
            results.append({"tokens": len(item.ids), **best, "probabilities": chances})
        return finite(items, logits, results)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        names = self.session.option("labels") or ()
        for answer in answers:
            chances = (
                f"{names[place] if names else place}: {value:.4f}"
                for place, value in enumerate(answer.result["probabilities"])
            )
            yield f"{label(answer)}: " + "  ".join(chances)


class NextSentence(TextRunner):
    """``follows``: how likely it is that the second text of a pair comes right after the first (Devlin et al. 2019).

    The first of the two classes says so. ALBERT's tells whether two neighbours are in order (Lan et al. 2020).
    """

    needs = ("next_sentence_logits",)
    takes_pairs = True

    def __init__(self, session: Any, chosen: Settings) -> None:
        super().__init__(session, chosen)
        if (segments := segments_of(self.graph)) < 2:
            what = f"next-sentence needs two segments, and the model has {segments}"
            raise UsageError(what, session.path, "choose another task")

    def read(self, value: Any, number: int) -> Tokens:
        if isinstance(value, str) or are_ids(value):
            raise ArtifactError("has no second text", f"input {number}", "give a pair")
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
    """``classes``: the likeliest class of each token, special ones included."""

    needs = ("logits",)

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        return finite(items, logits, [self._classes(item, row) for item, row in zip(items, logits, strict=True)])

    def _classes(self, item: Tokens, logits: Array) -> dict[str, Any]:
        names = self.session.option("labels")
        classes = []
        for token, chances in zip(item.ids, softmax(logits[: len(item.ids)]), strict=True):
            best = int(chances.argmax())
            name = names[best] if names else str(best)
            classes.append(
                {"token": token, "text": self.decode([token]), "label": name, "probability": float(chances[best])}
            )
        return {"tokens": len(item.ids), "classes": classes}

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            parts = (f"{_text(part)!r} {part['label']} {part['probability']:.4f}" for part in answer.result["classes"])
            yield f"{label(answer)}: " + "  ".join(parts)


class ReplacedTokens(TextRunner):
    """``replaced``: for each token, special ones included, how likely it is that another stood in its place."""

    needs = ("logits",)

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        return finite(items, logits, [self._chances(item, row) for item, row in zip(items, logits, strict=True)])

    def _chances(self, item: Tokens, logits: Array) -> dict[str, Any]:
        chances = softmax(np.stack((np.zeros_like(logits), logits), -1))[:, 1]  # the sigmoid, without overflow
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
    """What is told of each mask."""

    top_k: int = 5
    """Tokens, the likeliest first."""

    def __post_init__(self) -> None:
        self.require_positive("top_k")


class FillMask(TextRunner):
    """``masks``: for each mask token of an input, what it may stand for."""

    options = FillMaskOptions
    needs = ("logits",)

    def __init__(self, session: Any, chosen: FillMaskOptions) -> None:
        super().__init__(session, chosen)
        self.target = mask_token(session)

    def read(self, value: Any, number: int) -> Tokens:
        item = super().read(value, number)
        if self.target not in item.ids:
            mask = self.decode([self.target])
            remedy = f"write {mask}" if mask else f"use token {self.target}"
            raise ArtifactError("has no mask to fill", f"input {number}", remedy)
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


def mask_token(session: Session) -> int:
    """The token to fill in, or a :class:`UsageError` where the model names none."""
    token = session.option("mask_token_id")
    if token is None:
        what = "the model does not say which token is its mask"
        raise UsageError(what, session.path, "set mask_token_id when building")
    return int(token)


def softmax(logits: Array) -> Array:
    """Probabilities along the last dimension, in float64."""
    with np.errstate(invalid="ignore"):  # whoever calls looks for what is not finite
        weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    result: Array = weights / weights.sum(-1, keepdims=True)
    return result


def _text(item: Mapping[str, Any]) -> Any:
    """What a token is called in a line for people."""
    return item["token"] if item["text"] is None else item["text"]


def _start(vector: Sequence[float]) -> str:
    return f"[{' '.join(f'{value:.5f}' for value in vector[:4])} ...]"
