"""The task perplexity."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import zoo
from zoo_runtime import Answer, TextRunner, Tokens


@dataclass(frozen=True, kw_only=True)
class Options(zoo.Settings):
    """Settings for ``--option``."""

    start: int | None = None
    """Token to put before each text, so that its first token is scored, too; ``bos_token_id`` by default."""


@dataclass(frozen=True)
class Text(Tokens):
    """A text to score. ``ids`` are the model's input: all tokens except the last."""

    targets: list[int]
    """The token after each of ``ids``."""
    size: int | None
    """Size of the text in bytes; None for token ids, or if not all tokens are targets."""


class Perplexity(TextRunner):
    """``perplexity`` of a text, and the log-probabilities of its tokens.

    ``scores`` lists the natural log-probability of each token given the tokens before it, and ``log_probability`` is
    their sum. Perplexity is the exponential of their negative mean. ``bits_per_byte`` is their negative sum in bits per
    UTF-8 byte of the text, which does not depend on the tokenizer; it is null for token ids, and if there is no start
    token, since the first token is then not scored.
    """

    options = Options
    needs = ("logits",)
    batch_size = 4  # logits of all positions are in memory: 200 MB per 1024 tokens of GPT-2

    def __init__(self, session: Any, chosen: Options) -> None:
        super().__init__(session, chosen)
        self.start = session.option("bos_token_id") if chosen.start is None else chosen.start
        if chosen.start is not None and not 0 <= chosen.start < self.ids_input.upper:
            raise zoo.UsageError(f"start {chosen.start} is outside the vocabulary of {self.ids_input.upper}")

    def read(self, value: Any, number: int) -> Text:
        """Return the tokens of a text, with the start token unless the tokenizer already put it there."""
        ids = super().read(value, number).ids
        started = ids[0] == self.start
        if self.start is not None and not started:
            ids, started = [self.start, *ids], True
        if len(ids) < 2:
            remedy = "give more, or a start token: --option start=ID"
            raise zoo.ArtifactError("has only one token, and none before it", f"input {number}", remedy)
        size = len(value.encode()) if started and isinstance(value, str) else None
        return Text(number, ids[:-1], ids[1:], size)

    def answer(self, items: Sequence[Text]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        return [self._score(item, row[: len(item.ids)]) for item, row in zip(items, logits, strict=True)]

    def _score(self, item: Text, logits: np.ndarray) -> Any:
        shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
        chosen = shifted[np.arange(len(item.targets)), item.targets] - np.log(np.exp(shifted).sum(-1))
        mean = -chosen.mean()
        if not mean < 700:  # exp would overflow; also true for NaN
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
