"""Classification of the words of a text, such as named entities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from zoo.classes import ClassifierConfig
from zoo.contract import standard_fields
from zoo.tokenizers.words import join_words, places_in_words
from zoo.training.criterion import IGNORED, Batch, Criterion, Ids, Loss, Row, is_list, listed_ids, padded
from zoo.training.data.examples import Example
from zoo.training.objectives.causal import token_loss
from zoo.training.objectives.classification import class_number
from zoo.training.options import TokenClassificationOptions

__all__ = ["TokenClassification"]


class TokenClassification(Criterion):
    """The cross-entropy of the class of each word, read at the word's first token (Devlin et al. 2019, section 5.3).

    The columns are ``text``, a list of words or of token ids, and ``label``, a list of the same length. Words are
    joined by spaces and encoded as a text, as ``zoo run`` does it. Other tokens have no target, nor do items whose
    label is -100.
    """

    config: ClassifierConfig
    settings: TokenClassificationOptions

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        problem = standard_fields(self.config).problem_type
        if problem != "single_label_classification":
            raise ValueError(f"each token has one class, but problem_type is {problem!r}")

    def encode(self, row: Row) -> Example:
        for name in ("text", "label"):
            if not is_list(row[name]):
                raise ValueError(f"{name} must be a list, got {type(row[name]).__name__}")
        if len(row["text"]) != len(row["label"]):
            raise ValueError(f"text has {len(row['text'])} items, but label has {len(row['label'])}")
        labels = [IGNORED if item == IGNORED else class_number(self.config, item) for item in row["label"]]
        kinds = {isinstance(item, str) for item in row["text"]}
        if len(kinds) > 1:
            raise ValueError("text must be a list of words or of token ids, not of both")
        if kinds == {True}:
            return self._encode_words(row["text"], labels)
        ids = listed_ids(row, "text")
        self.truncated += len(ids) > self.max_length
        ids, labels = ids[: self.max_length], labels[: self.max_length]
        return {"input_ids": self.checked(ids, "text"), "labels": np.array(labels, np.int32)}

    def _encode_words(self, words: Sequence[str], labels: Sequence[int]) -> Example:
        encoded = self.encode_text({"text": join_words(words)})
        targets, last = np.full(len(encoded.ids), IGNORED, np.int32), None
        for place, word in enumerate(places_in_words(words, encoded.offsets)):
            if word is not None:
                if self.settings.all_tokens or word != last:
                    targets[place] = labels[word]
                last = word
        return {"input_ids": self.checked(encoded.ids, "text"), "labels": targets}

    def collate(self, examples: Sequence[Example], generators: Sequence[np.random.Generator]) -> Batch:
        labels: list[Ids] = [example["labels"] for example in examples]
        return {**self.text_batch(examples), "labels": padded(labels, IGNORED)}

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return token_loss(self.outputs(model, batch)["logits"], batch["labels"])
