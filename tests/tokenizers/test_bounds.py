"""Bounds on the number of tokens of a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from zoo.tokenizers.files.load import byte_level_tokenizer, byte_tokenizer
from zoo.tokenizers.long_texts.bounds import longest_token


def trained() -> Tokenizer:
    """A byte-level tokenizer with merges, as GPT-2 has one."""
    tokenizer = byte_level_tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the rain in Spain stays mainly", "été 雨 🙂🙂🙂", "        " * 4] * 9, trainer)
    return tokenizer


TRAINED = trained()


@given(st.text() | st.text(alphabet="aein thrSé🙂 ", max_size=200))
def test_no_text_has_fewer_tokens(text: str) -> None:
    for tokenizer, longest in ((TRAINED, longest_token(TRAINED)), (byte_tokenizer(), len("<|endoftext|>"))):
        assert longest is not None
        assert len(tokenizer.encode(text).ids) * longest >= len(text.encode())


def test_bound_is_the_longest_token() -> None:
    assert longest_token(byte_tokenizer()) == max(len(token) for token in byte_tokenizer().get_vocab())
    longest = longest_token(TRAINED)
    assert longest is not None
    assert longest == max(map(len, TRAINED.get_vocab()))
    assert longest > 4


def lossy(change: str) -> Tokenizer:
    """A byte-level tokenizer that may leave out parts of texts."""
    tokenizer = Tokenizer.from_str(TRAINED.to_str())
    if change == "normalizer":
        tokenizer.normalizer = normalizers.Strip()
    elif change == "removed":
        removing = pre_tokenizers.Split(" ", "removed")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([removing, pre_tokenizers.ByteLevel()])
    elif change == "other divider":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])
    elif change == "stripping":
        tokenizer.add_special_tokens([AddedToken("<s>", lstrip=True)])
    elif change == "truncation":
        tokenizer.enable_truncation(5)
    elif change == "alphabet":
        tokenizer.model = models.BPE(vocab={"a": 0, "b": 1}, merges=[])
    else:
        tokenizer.model = models.WordLevel({"a": 0}, unk_token="a")
    return tokenizer


@pytest.mark.parametrize(
    "change", ["normalizer", "removed", "other divider", "stripping", "truncation", "alphabet", "words"]
)
def test_unknown_where_parts_may_be_left_out(change: str) -> None:
    tokenizer = lossy(change)
    assert longest_token(tokenizer) is None
    text = " x" * 5000 if change == "other divider" else " " * 50_000
    if change == "stripping":
        text += "<s>"
    if change in ("normalizer", "removed", "stripping", "truncation", "alphabet"):
        assert len(tokenizer.encode(text).ids) * len("<|endoftext|>") < len(text)
