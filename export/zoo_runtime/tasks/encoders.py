"""Tasks for text encoders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from zoo.arrays import Array
from zoo.artifact.prefixes import read_matryoshka, read_prefixes
from zoo.config import Settings
from zoo.contract import dim_size
from zoo.errors import ArtifactError, UsageError
from zoo.plots import Distribution
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer, are_ids, label
from zoo_runtime.running.runner import finite, require_outputs
from zoo_runtime.running.text_runner import TextRunner, Tokens
from zoo_runtime.tasks.classification import sigmoid, softmax
from zoo_runtime.tasks.sources import PrefixOptions, task_prefix

__all__ = [
    "Embed",
    "EmbedOptions",
    "Features",
    "FillMask",
    "ReplacedTokens",
    "mask_token",
    "shown_token",
    "shown_vector",
    "token_name",
]


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
            yield f"{label(answer)}: {len(states)} tokens x {len(states[0])}, the first {shown_vector(states[0])}"


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(PrefixOptions):
    """Prefixes, the size of vectors; and pooling, for encoders whose graph does not include it."""

    dimensions: int | None = None
    """Return the first numbers only, scaled to unit length, for a model that is trained for it."""

    pooling: Literal["mean", "cls"] = "mean"
    """Mean over all tokens, or the first token."""
    normalize: bool = True
    """Whether to scale the vector to unit length."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dimensions is not None:
            self.require_positive("dimensions")


_VECTORS = ("sentence_embedding", "text_embeds")
"""Outputs of graphs that are vectors of texts."""


class Embed(TextRunner):
    """``embedding``, one vector per input: the graph's own, or pooled from its hidden states."""

    options = EmbedOptions

    def __init__(self, session: Context, chosen: EmbedOptions) -> None:
        super().__init__(session, chosen)
        self.own = next((tensor.name for tensor in self.graph.output_tensors() if tensor.name in _VECTORS), None)
        """The output that is a vector of a text, if there is one."""
        require_outputs(self.graph, () if self.own else ("last_hidden_state",), session.path)
        name = self.own or "last_hidden_state"
        self.width = dim_size(next(one for one in self.graph.output_tensors() if one.name == name).dims[-1], {})
        """Size of the model's vectors."""
        self._check_dimensions(chosen.dimensions)
        if self.own and (chosen.pooling, chosen.normalize) != (EmbedOptions.pooling, EmbedOptions.normalize):
            raise UsageError("the model's own pooling is part of its graph", session.path, "leave out the options")
        self.prefix = task_prefix(session, chosen)

    @classmethod
    def defaults(cls, session: Context, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the model's default prefix, unless a prefix is given."""
        default = None if given.keys() & {"prefix", "task_prefix"} else read_prefixes(session.stored).default
        return {} if default is None else {"task_prefix": default}

    def read(self, value: Any, number: int) -> Tokens:
        """Put the prefix before a text."""
        return super().read(self.prefix + value if isinstance(value, str) else value, number)

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        outputs = self.compute(items)
        vectors = outputs[self.own] if self.own else self._pool(items, outputs["last_hidden_state"])
        if self.chosen.dimensions not in (None, self.width):
            vectors = _unit(vectors[:, : self.chosen.dimensions].astype(np.float32))
        results = [{"tokens": len(item.ids), "embedding": vector} for item, vector in zip(items, vectors, strict=True)]
        return finite(items, vectors, results)

    def _pool(self, items: Sequence[Tokens], hidden: Array) -> Array:
        hidden = hidden.astype(np.float32)
        if self.chosen.pooling == "cls":
            vectors = hidden[:, 0]
        else:
            vectors = np.stack([rows[: len(item.ids)].mean(0) for item, rows in zip(items, hidden, strict=True)])
        return _unit(vectors) if self.chosen.normalize else vectors

    def _check_dimensions(self, wanted: int | None) -> None:
        """Raise :class:`UsageError` unless the model has vectors of a size."""
        if wanted is None or wanted == self.width:
            return
        trained = read_matryoshka(self.session.stored)
        if trained is True and wanted < self.width:
            return
        sizes = sorted({*(trained if isinstance(trained, tuple) else ()), self.width})
        if wanted in sizes:
            return
        known = f"1 to {self.width}" if trained is True else " or ".join(map(str, sizes))
        remedy = "a checkpoint says in its config.json with matryoshka_dimensions that it is trained for others"
        raise UsageError(f"vectors have {known} dimensions, not {wanted}", self.session.path, remedy)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        """Yield a line per embedding, with its cosine similarities to all inputs."""
        vectors = _unit(np.stack([answer.result["embedding"] for answer in answers]).astype(np.float64))
        for answer, vector in zip(answers, vectors, strict=True):
            values = answer.result["embedding"]
            cosines = " ".join(f"{value:.4f}" for value in vectors @ vector)
            yield f"{label(answer)}: {len(values)} numbers {shown_vector(values)}  cosines {cosines}"


def _unit(vectors: Array) -> Array:
    """Return vectors (B, E) of unit length."""
    scaled: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    return scaled


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
            parts = (f"{shown_token(part)!r} {part['probability']:.4f}" for part in answer.result["replaced"])
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
        texts = [value if are_ids(value) else self.tokenizer.encode(value).ids for value in super().samples()]
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
                choices = (f"{shown_token(item)!r} {item['probability']:.4f}" for item in filled)
                yield f"{label(answer)}: " + "  ".join(choices)

    def distributions(self, answer: Answer) -> Sequence[Distribution]:
        return [
            Distribution(title=label(answer), items=[(token_name(item), item["probability"]) for item in filled])
            for filled in answer.result["masks"]
        ]


def mask_token(session: Context) -> int:
    """Return the model's mask token, or raise :class:`UsageError` if it has none."""
    token = session.option("mask_token_id")
    if token is None:
        raise UsageError("the model has no mask_token_id", session.path, "set it when building the model")
    return int(token)


def shown_token(item: Mapping[str, Any]) -> Any:
    """A token in human-readable output: its text, or its id without a tokenizer."""
    return item["token"] if item["text"] is None else item["text"]


def token_name(item: Mapping[str, Any]) -> str:
    """A token in a plot: its text, with its id if the text is not valid, or its id."""
    text = repr(shown_token(item))
    return f"{text} {item['token']}" if "\N{REPLACEMENT CHARACTER}" in text else text


def shown_vector(vector: Sequence[float]) -> str:
    """The first numbers of a vector, for human-readable output."""
    return f"[{' '.join(f'{value:.5f}' for value in vector[:4])} ...]"
