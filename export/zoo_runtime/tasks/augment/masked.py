"""Text augmentation: variants of a text, made by masking some tokens and predicting replacements in context.

V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.config import Settings
from zoo.errors import ArtifactError, UsageError
from zoo_runtime.generation.choices import draw, probabilities
from zoo_runtime.generation.options import Generation
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer, label
from zoo_runtime.running.text_runner import TextRunner, Tokens
from zoo_runtime.tasks.classification import softmax
from zoo_runtime.tasks.encoders import mask_token

__all__ = ["Augment"]


@dataclass(frozen=True, kw_only=True)
class AugmentOptions(Settings):
    """Options of text augmentation."""

    num_variants: int = 4
    """Number of variants per text. Variants may coincide, especially for short texts."""
    fraction: float = 0.15
    """Fraction of tokens to replace, rounded to a whole number of tokens, but at least one."""
    whole_words: bool = True
    """Replace whole words, if the tokenizer reports word boundaries: those that fit into ``fraction``, or the shortest
    word if none fits. Inputs given as token ids have no words."""
    temperature: float = 1.0
    """Divides logits before sampling. 0 takes the likeliest token each time."""
    top_k: int = 10
    """Sample from the k likeliest tokens."""
    seed: int = 0
    """Random seed for positions and samples. A variant depends on the seed, the text, its input number and the number
    of the variant, never on its batch."""
    special_tokens: tuple[int, ...] = ()
    """Further tokens that are neither replaced nor inserted, besides those of the tokenizer and the model."""

    def __post_init__(self) -> None:
        self.require_positive("num_variants", "top_k")
        for name in ("temperature", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"fraction must lie in [0, 1], got {self.fraction}")


@dataclass(frozen=True)
class Maskable(Tokens):
    """A text with replaceable tokens."""

    words: Sequence[Sequence[int]]
    """Groups of positions to mask together."""
    shown: Sequence[int]
    """Positions of the text itself, without the special tokens that the tokenizer adds."""


class Augment(TextRunner):
    """``variants`` of a text, each with its ``text``, its ``ids`` and its ``changes``.

    Some tokens are masked, and a masked language model predicts replacements, as in the contextual augmentation of Wu
    et al. (2019, Conditional BERT) and Kumar et al. (2020), but without conditioning on a label. A variant may
    therefore differ in meaning. :class:`zoo_runtime.tasks.augment.prompted.AugmentByPrompt` conditions on labels.

    Those papers predict all masks independently in one pass. Here masks are filled one at a time, from left to right,
    and each prediction sees the earlier ones, so that the pieces of a word or a name fit together. This takes one pass
    per masked token.

    A replacement differs from the original token, unless no other token is allowed. Special tokens (including the mask)
    and ids without a token in the tokenizer are neither replaced nor inserted. Texts are decoded from ids, so whatever
    the tokenizer discards, such as capitals, is lost.
    """

    options = AugmentOptions
    makes_variants = True
    needs = ("logits",)

    def __init__(self, session: Context, chosen: AugmentOptions) -> None:
        super().__init__(session, chosen)
        self.mask = mask_token(session)
        size = self.ids_input.upper or 0
        for token in chosen.special_tokens:
            if not 0 <= token < size:
                problem = f"special token {token} is outside the vocabulary of {size}"
                raise UsageError(problem, session.path, "is this the model's tokenizer?")
        named = (session.option(f"{name}_token_id") for name in ("pad", "bos", "eos"))
        self.special = {self.mask, *chosen.special_tokens, *(token for token in named if token is not None)}
        ordinary = set(range(size))
        if (tokenizer := session.tokenizer) is not None:
            self.special |= tokenizer.special_ids
            ordinary &= set(tokenizer.backend.get_vocab(with_added_tokens=True).values())
        self.allowed = np.zeros(size, dtype=bool)
        """Mask of the tokens that may be inserted, (V,)."""
        self.allowed[sorted(ordinary - self.special)] = True
        self.sampling = Generation(temperature=chosen.temperature, top_k=chosen.top_k) if chosen.temperature else None

    def read(self, value: Any, number: int) -> Maskable:
        """Convert an input to token ids, and find the replaceable ones."""
        item = super().read(value, number)
        where = f"input {number}"
        if self.mask in item.ids:
            raise ArtifactError("already contains a mask", where, "fill it first, with the task fill-mask")
        encoded = item.encoding
        around = encoded.special_tokens_mask if encoded is not None else [token in self.special for token in item.ids]
        shown = [place for place, added in enumerate(around) if not added]
        free = [place for place in shown if item.ids[place] not in self.special]
        if not free:
            raise ArtifactError("no replaceable tokens", where, "give at least one token that is not special")
        words = [[place] for place in free]
        if encoded is not None and self.chosen.whole_words:
            words = list(_words(encoded, free, value))
        return Maskable(number, item.ids, words, shown, types=item.types)

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        answers: list[Any] = [{"tokens": len(item.ids), "variants": []} for item in items]
        for variant in range(self.chosen.num_variants):  # one at a time, to keep to the batch size
            for place, varied in enumerate(self._vary(items, variant)):
                if isinstance(varied, ArtifactError):
                    answers[place] = varied
                elif isinstance(answers[place], dict):
                    answers[place]["variants"].append(varied)
        return answers

    def _vary(self, items: Sequence[Any], variant: int) -> list[Any]:
        """Return one variant or error per item."""
        drafts = [_Draft(item, self.mask, self.chosen, variant) for item in items]
        for step in range(max(len(draft.places) for draft in drafts)):
            live = [draft for draft in drafts if step < len(draft.places) and draft.error is None]
            if not live:
                break
            masked = [Tokens(draft.item.number, draft.ids, types=draft.item.types) for draft in live]
            logits = self.compute(masked)["logits"]
            for draft, rows in zip(live, logits, strict=True):
                self._fill(draft, draft.places[step], rows[draft.places[step]])
        return [draft.error or self._result(draft) for draft in drafts]

    def _fill(self, draft: _Draft, place: int, logits: Array) -> None:
        """Fill a masked position from its logits (V,)."""
        if not np.isfinite(logits).all():
            where = f"input {draft.item.number}"
            draft.error = ArtifactError("output contains NaN or infinity", where, "check the weights")
            return
        old = draft.item.ids[place]
        allowed = self.allowed.copy()
        allowed[old] = False
        if not allowed.any():
            new = old
        else:
            scores = np.where(allowed, logits.astype(np.float64), -np.inf)
            if self.sampling is None:
                new = int(scores.argmax())
            else:
                new = draw(probabilities(scores, self.sampling), draft.random.random())
        draft.ids[place] = new
        draft.changes.append(
            {"place": place, "token": old, "text": self.decode([old]), "new_token": new, "new_text": self.decode([new]),
             "probability": float(softmax(logits)[new])}
        )  # fmt: skip

    def _result(self, draft: _Draft) -> dict[str, Any]:
        text = self.decode([draft.ids[place] for place in draft.item.shown])
        return {"text": text, "ids": draft.ids, "changes": draft.changes}

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            for variant in answer.result["variants"]:
                text = variant["ids"] if variant["text"] is None else repr(variant["text"])
                changes = (
                    f"{change['token']} -> {change['new_token']}"
                    if change["text"] is None
                    else f"{change['text']!r} -> {change['new_text']!r}"
                    for change in variant["changes"]
                )
                yield f"{label(answer)}: {text}  {', '.join(changes)}"


class _Draft:
    """A variant in progress, whose masks are filled one by one."""

    def __init__(self, item: Maskable, mask: int, options: AugmentOptions, variant: int) -> None:
        self.item = item
        self.ids = list(item.ids)
        self.random = np.random.default_rng((options.seed, item.number, variant))
        self.places = sorted(_choose(item.words, options.fraction, self.random))
        self.changes: list[dict[str, Any]] = []
        self.error: ArtifactError | None = None
        for place in self.places:
            self.ids[place] = mask


def _choose(words: Sequence[Sequence[int]], fraction: float, random: np.random.Generator) -> list[int]:
    """Choose random words that fit into a fraction of all positions, or the shortest word; return their positions."""
    target = max(1, round(fraction * sum(map(len, words))))
    shuffled = [words[place] for place in random.permutation(len(words))]
    places: list[int] = []
    for word in shuffled:
        if len(places) + len(word) <= target:
            places += word
    shortest = min(shuffled, key=len)
    return places or [*shortest]


def _words(encoded: Any, free: Sequence[int], text: str) -> Iterator[list[int]]:
    """Group positions by word. Groups containing spaces stay single tokens: some tokenizers have only one "word"."""
    groups: dict[int | None, list[int]] = {}
    for place in free:
        groups.setdefault(encoded.word_ids[place], []).append(place)
    for word, places in groups.items():
        written = text[encoded.offsets[places[0]][0] : encoded.offsets[places[-1]][1]].strip()
        if word is None or any(letter.isspace() for letter in written):
            yield from ([place] for place in places)
        else:
            yield places
