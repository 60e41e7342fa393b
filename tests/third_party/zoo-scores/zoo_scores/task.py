"""Texts in, their perplexity under a language model out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from zoo_export import Answer, TextRunner, Tokens

import zoo


@dataclass(frozen=True, kw_only=True)
class Options(zoo.Settings):
    """What can be chosen with ``--option``."""

    start: int | None = None
    """The token before a text, so that its first token is scored too; the model's ``bos_token_id`` by default."""


@dataclass(frozen=True)
class Text(Tokens):
    """``ids`` are what the model reads: all tokens but the last."""

    targets: list[int]
    """The token after each of them."""
    size: int | None
    """Bytes of the text, where it is one and all of its tokens are targets."""


class Perplexity(TextRunner):
    """``perplexity`` of a text, and what it is made of.

    ``log_probability`` is that of its tokens, natural, each given those before it, and is listed for each in
    ``scores``. Perplexity is the exponential of minus their mean; ``bits_per_byte`` is minus their sum over the bytes
    of the text in UTF-8, which does not depend on the tokenizer. It is null where the first token has nothing before
    it, which leaves a part of the text unscored, and for token ids.
    """

    options = Options
    needs = ("logits",)
    batch_size = 4  # logits of all positions are held: 200 MB for each 1024 tokens of GPT-2

    def __init__(self, session: Any, chosen: Options) -> None:
        super().__init__(session, chosen)
        self.start = session.option("bos_token_id") if chosen.start is None else chosen.start
        if chosen.start is not None and not 0 <= chosen.start < self.ids_input.upper:
            raise zoo.UsageError(f"start {chosen.start} is outside the vocabulary of {self.ids_input.upper}")

    def read(self, value: Any, number: int) -> Text:
        """The tokens of a text, behind the one that texts start with unless the tokenizer put it there."""
        ids = super().read(value, number).ids
        started = ids[0] == self.start
        if self.start is not None and not started:
            ids, started = [self.start, *ids], True
        if len(ids) < 2:
            remedy = "give more, or a token to start with: --option start=ID"
            raise zoo.ArtifactError("has one token, and nothing before it", f"input {number}", remedy)
        size = len(value.encode()) if started and isinstance(value, str) else None
        return Text(number, ids[:-1], ids[1:], size)

    def answer(self, items: Sequence[Text]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        return [self._score(item, row[: len(item.ids)]) for item, row in zip(items, logits, strict=True)]

    def _score(self, item: Text, logits: np.ndarray) -> Any:
        shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
        chosen = shifted[np.arange(len(item.targets)), item.targets] - np.log(np.exp(shifted).sum(-1))
        mean = -chosen.mean()
        if not mean < 700:  # beyond which exp is no number, and NaN
            return zoo.ArtifactError("has no finite perplexity", f"input {item.number}", "look at the weights")
        return {
            "tokens": len(item.targets),
            "perplexity": float(np.exp(mean)),
            "bits_per_byte": None if item.size is None else float(-chosen.sum() / np.log(2) / item.size),
            "log_probability": float(chosen.sum()),
            "scores": [
                {"token": token, "text": self.decode([token]), "log_probability": float(value)}
                for token, value in zip(item.targets, chosen, strict=True)
            ],
        }

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            result, bits = answer.result, answer.result["bits_per_byte"]
            more = "" if bits is None else f", {bits:.4f} bits per byte"
            yield f"{answer.input!r}: perplexity {result['perplexity']:.2f} over {result['tokens']} tokens{more}"
