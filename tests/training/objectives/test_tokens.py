"""Token classification: the labels of tokens, and the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertForTokenClassification

from tests.training.objectives.common import (
    ENCODER,
    assert_equal_losses,
    batch_of,
    criterion_of,
    mean_of,
    small_bert,
    tokenizer,
    trainer_of,
    with_twin,
)
from zoo.tokenizers.files.load import byte_tokenizer
from zoo.training.objectives.tokens import TokenClassification
from zoo.training.options import TokenClassificationOptions

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
ROWS = [
    {"text": ["my", "name", "is", "Ann", "Lee"], "label": ["O", "O", "O", "B-PER", "I-PER"]},
    {"text": ["I", "live", "in", "Bonn"], "label": ["O", "O", "O", 3]},
    {"text": ["yes"], "label": ["O"]},
]
words = st.lists(st.text("abéü.-", min_size=1, max_size=5), min_size=1, max_size=12)


def tagger(options: TokenClassificationOptions | None = None, **changes: Any) -> TokenClassification:
    model = small_bert("token-classification", labels=LABELS)
    return criterion_of(TokenClassification, model, options or TokenClassificationOptions(), **changes)


def test_loss_is_that_of_transformers() -> None:
    ours, theirs = with_twin("token-classification", BertForTokenClassification, labels=LABELS, pooler=False)
    criterion = criterion_of(TokenClassification, ours, TokenClassificationOptions())
    batch = batch_of(criterion, ROWS)
    loss = criterion.loss(ours, batch)
    assert loss.count == sum(len(row["text"]) for row in ROWS)
    wanted = theirs(**batch).loss
    assert_equal_losses(ours, mean_of(loss), theirs, wanted, {**ENCODER, "classifier.bias": "classifier.bias"})


@given(texts=words, every=st.booleans())
@settings(deadline=None, max_examples=80)
def test_words_are_aligned_as_by_the_tokenizer(texts: list[str], every: bool) -> None:
    """The tokenizer's own alignment of words that are given one by one is the reference."""
    criterion = tagger(TokenClassificationOptions(all_tokens=every), max_length=20)
    labels = [number % len(LABELS) for number in range(len(texts))]
    found = criterion.encode({"text": texts, "label": labels})
    reference = tokenizer()
    reference.enable_truncation(20)
    encoded = reference.encode(texts, is_pretokenized=True)
    assert found["input_ids"].tolist() == encoded.ids
    seen: set[int] = set()
    wanted = []
    for word in encoded.word_ids:
        wanted.append(-100 if word is None or (word in seen and not every) else labels[word])
        seen |= {word} - {None}
    assert found["labels"].tolist() == wanted


def test_spaces_have_no_target() -> None:
    """With tokens that are bytes, a word's first byte has its label."""
    model = small_bert("token-classification", labels=LABELS, vocab_size=260)
    criterion = criterion_of(TokenClassification, model, TokenClassificationOptions(), tokenizer=byte_tokenizer())
    found = criterion.encode({"text": ["é", "ab"], "label": ["B-PER", "O"]})
    assert bytes(found["input_ids"].tolist()).decode() == "é ab"
    assert found["labels"].tolist() == [1, -100, -100, 0, -100]


def test_token_ids_have_a_label_each() -> None:
    found = tagger().encode({"text": [5, 6, 7], "label": ["O", -100, "B-LOC"]})
    assert found["input_ids"].tolist() == [5, 6, 7]
    assert found["labels"].tolist() == [0, -100, 3]


def test_truncation_is_counted() -> None:
    criterion = tagger(max_length=4)
    found = criterion.encode(ROWS[0])
    assert found["labels"].tolist() == [-100, 0, -100, -100]
    assert criterion.encode({"text": [5] * 9, "label": [1] * 9})["labels"].tolist() == [1] * 4
    assert criterion.truncated == 2


def test_gradients_do_not_depend_on_the_division_of_a_step() -> None:
    results = []
    for size in (None, 1, 3):
        model = small_bert("token-classification", labels=LABELS)
        criterion = criterion_of(TokenClassification, model, TokenClassificationOptions())
        trainer = trainer_of(model, criterion, ROWS * 5, micro_batch_size=size)
        list(trainer.run())
        results.append(model.state_dict())
    for found in results[1:]:
        for name, values in results[0].items():
            torch.testing.assert_close(found[name], values, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": ["a", "b"], "label": ["O"]}, "text has 2 items, but label has 1"),
        ({"text": ["a"], "label": ["X"]}, "label 'X' is not one of O, B-PER"),
        ({"text": ["a"], "label": [5]}, "label 5 is not one of"),
        ({"text": "a b", "label": ["O", "O"]}, "text must be a list, got str"),
        ({"text": ["a"], "label": "O"}, "label must be a list, got str"),
        ({"text": ["a", " "], "label": ["O", "O"]}, "an empty word"),
        ({"text": [], "label": []}, "text is empty"),
        ({"text": ["a", 5], "label": ["O", "O"]}, "a list of words or of token ids"),
    ],
)
def test_bad_rows(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tagger().encode(row)


def test_several_classes_per_token_are_refused() -> None:
    model = small_bert("token-classification", problem_type="multi_label_classification")
    with pytest.raises(ValueError, match="each token has one class"):
        criterion_of(TokenClassification, model, TokenClassificationOptions())
