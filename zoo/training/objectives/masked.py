"""Masked language modelling and next-sentence prediction: the pretraining of BERT (Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from zoo.contract import standard_fields
from zoo.tokenizers.library import guarded
from zoo.training.criterion import IGNORED, Batch, Criterion, Ids, Loss, Row, is_list, listed_ids, padded, wide
from zoo.training.data.examples import Example
from zoo.training.data.labels import class_name
from zoo.training.objectives.causal import token_loss
from zoo.training.options import MaskingOptions

if TYPE_CHECKING:
    from tokenizers import Encoding

__all__ = ["Corruption", "MaskedLM", "Pretraining"]

_MASKED, _RANDOM = 0.8, 0.1
"""Shares of the chosen tokens that are replaced by the mask token, and by a random one; the rest is kept."""
_ALL_SPECIAL = "text has only special tokens"
_FOLLOWS = {"0": 0, "1": 1, "False": 0, "True": 1}


class Corruption(Criterion):
    """Base class of objectives that change some tokens of a text.

    A text that is longer than ``max_length`` becomes several examples, each with the tokenizer's special tokens, so
    nothing is truncated; one that has only special tokens is left out. Special tokens are never chosen: those of the
    tokenizer and of the model's configuration.
    """

    settings: MaskingOptions
    divides = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        values = [value for name, value in self.config.to_dict().items() if name.endswith("_token_id")]
        special = {item for value in values for item in (value if is_list(value) else [value])}
        if self._tokenizer is not None:
            with guarded():
                words = self._tokenizer.backend.encode("a b", add_special_tokens=False).word_ids
            if self.settings.whole_word and len(set(words)) < 2:
                raise ValueError("whole_word needs a tokenizer that divides texts into words")
            special |= self._tokenizer.special_ids | set(self._tokenizer.encode("").ids)
        self._special = np.array(sorted(special - {None}), np.int32)
        self._vocab_size = standard_fields(self.config).vocab_size or 0
        if not self._vocab_size:
            raise ValueError(f"{type(self.config).__name__} has no vocab_size")

    @abstractmethod
    def corrupt(self, ids: Ids, chosen: Ids, random: np.random.Generator) -> tuple[Ids, Ids]:
        """Return the tokens that the model reads, and the target of each token, -100 for none.

        Args:
            ids: (T,).
            chosen: the positions to change, (n,).
            random: the only source of random numbers.
        """

    def examples(self, row: Row) -> Iterable[Example]:
        if is_list(row["text"]):
            ids = listed_ids(row, "text")
            starts = range(0, max(1, len(ids)), self.max_length)
            examples = [self._example(ids[start : start + self.max_length], None) for start in starts]
        else:
            truncated = self.truncated
            first = self.encode_text(row)
            self.truncated = truncated
            examples = [self._example(piece.ids, piece) for piece in (first, *first.overflowing)]
        usable = [example for example in examples if len(self._places(example))]
        if not usable:
            raise ValueError(_ALL_SPECIAL)
        return usable

    def encode(self, row: Row) -> Example:
        """Return the first example of a row."""
        return next(iter(self.examples(row)))

    def _example(self, ids: Sequence[int], encoded: Encoding | None) -> Example:
        return {"input_ids": self.checked(ids, "text"), **self.word_field(encoded)}

    def _places(self, example: Example) -> Ids:
        """Return the positions of tokens that are not special."""
        return np.flatnonzero(~np.isin(example["input_ids"], self._special)).astype(np.int32)

    def word_field(self, encoded: Encoding | None) -> dict[str, Ids]:
        """Return the field ``words``, the number of each token's word, if whole words are to be chosen."""
        if not self.settings.whole_word:
            return {}
        if encoded is None:
            raise ValueError("whole_word needs texts, since token ids do not tell where words begin")
        words = list(zip(encoded.sequence_ids, encoded.word_ids, strict=True))
        numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
        return {"words": np.array([numbers[word] for word in words], np.int32)}

    def choose(self, example: Example, random: np.random.Generator) -> Ids:
        """Return random positions of a share ``rate`` of an example's tokens, rounded, and of at least one.

        Words are added in random order, as long as they do not exceed that number, apart from the first one.
        """
        places = self._places(example)
        count = max(1, int(self.settings.rate * len(places) + 0.5))
        words = example.get("words")
        if words is None:
            return random.choice(places, count, replace=False)
        selected: list[Ids] = []
        for word in random.permutation(np.unique(words[places])):
            members = places[words[places] == word]
            if not selected or sum(map(len, selected)) + len(members) <= count:
                selected.append(members)
        return np.concatenate(selected)

    def random_tokens(self, count: int, random: np.random.Generator) -> Ids:
        """Return tokens drawn uniformly from the vocabulary, (count,)."""
        return random.integers(self._vocab_size, size=count).astype(np.int32)

    def collate(self, examples: Sequence[Example], generators: Sequence[np.random.Generator]) -> Batch:
        read, targets = [], []
        for example, random in zip(examples, generators, strict=True):
            ids, target = self.corrupt(example["input_ids"], self.choose(example, random), random)
            read.append({**example, "input_ids": ids})
            targets.append(target)
        return {**self.text_batch(read), "targets": padded(targets, IGNORED)}


class MaskedLM(Corruption):
    """The cross-entropy of the chosen tokens, of which 80 % are masked, 10 % are replaced and 10 % are kept."""

    models_language = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        mask = standard_fields(self.config).mask_token_id
        if mask is None:
            raise ValueError("mask_token_id is not set, so no token can be masked")
        self._mask = mask

    def corrupt(self, ids: Ids, chosen: Ids, random: np.random.Generator) -> tuple[Ids, Ids]:
        read, targets = ids.copy(), np.full_like(ids, IGNORED)
        targets[chosen] = ids[chosen]
        kinds = random.random(len(chosen))
        read[chosen[kinds < _MASKED]] = self._mask
        replaced = chosen[(kinds >= _MASKED) & (kinds < _MASKED + _RANDOM)]
        read[replaced] = self.random_tokens(len(replaced), random)
        return read, targets

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return token_loss(self.outputs(model, batch)["logits"], batch["targets"])


class Pretraining(MaskedLM):
    """The sum of the means of two losses: of masked tokens, and of whether the second text follows the first.

    The columns are ``text``, ``pair`` and ``label``: 0 if the pair follows the text, 1 if it does not, as in
    transformers' ``next_sentence_label``. Evaluations give the loss and the accuracy of both.
    """

    terms = 2
    names = ("masked_lm", "next_sentence")
    divides = False

    def encode(self, row: Row) -> Example:
        label = _FOLLOWS.get(class_name(row["label"]))
        if label is None:
            raise ValueError(f"label must be 0 if the pair follows the text, or 1 if not, got {row['label']!r}")
        encoded = self.encode_text(row, "text", "pair")
        example = {**self.pair_fields(encoded), **self.word_field(encoded)}
        if not len(self._places(example)):
            raise ValueError(_ALL_SPECIAL)
        return {**example, "label": np.array([label], np.int32)}

    def examples(self, row: Row) -> Iterable[Example]:
        return (self.encode(row),)

    def collate(self, examples: Sequence[Example], generators: Sequence[np.random.Generator]) -> Batch:
        labels = torch.tensor([int(example["label"][0]) for example in examples])
        return {**super().collate(examples, generators), "labels": labels}

    def counts(self, batch: Batch) -> tuple[int, ...]:
        return int(batch["targets"].ne(IGNORED).sum()), len(batch["labels"])

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        outputs, labels = self.outputs(model, batch), batch["labels"]
        logits = wide(outputs["next_sentence_logits"])
        follows = F.cross_entropy(logits, labels, reduction="sum")
        right = int(logits.detach().argmax(-1).eq(labels).sum())
        further = (Loss(follows, len(labels), right),)
        return replace(token_loss(outputs["logits"], batch["targets"]), further=further)
