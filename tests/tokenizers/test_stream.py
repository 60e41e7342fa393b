"""Streamed pieces add up to the decoded text, and come as early as those of the library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream, Metaspace, WordPiece
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import zoo
from tests.runtime.test_streaming import KINDS, PIECES, token_ids, tokenizer_of
from tests.tokenizers.test_model_tokenizer import trained
from zoo.tokenizers.cleaning import remove_spaces

FALLBACK = len(PIECES)
"""The token of byte 0 in the vocabulary with byte fallback."""


def library(backend: Backend, ids: Sequence[int]) -> list[str | None]:
    """Return the pieces of tokenizers' stream, one for each token."""
    stream = DecodeStream(skip_special_tokens=True)
    return [stream.step(backend, token) for token in ids]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_pieces_add_up_to_the_decoded_text(kind: str, data: st.DataObject) -> None:
    """For any sequence of tokens, including bytes of incomplete and invalid characters."""
    tokenizer = zoo.Tokenizer(tokenizer_of(kind))
    ids = data.draw(token_ids(kind))
    assert "".join(tokenizer.stream(ids)) == tokenizer.decode(ids)
    prompt = data.draw(token_ids(kind, whole=True))
    assert "".join(tokenizer.stream(ids, prompt)) == tokenizer.continuation(prompt, ids)


CLEANED = ["do", "n", "'", "t", "s", "m", "ve", "re", ".", ",", "##n't", "##s", "[X]"]


@pytest.mark.slow_after(1)
@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.integers(0, len(CLEANED) - 1), max_size=12), metaspace=st.booleans())
def test_pieces_add_up_where_spaces_are_removed(ids: list[int], metaspace: bool) -> None:
    """As of transformers' decoded text, whose end the next token may change."""
    words = {word.replace("##", "\u2581") if metaspace else word: number for number, word in enumerate(CLEANED)}
    backend = Backend(WordLevel(words, unk_token="[X]"))
    backend.decoder = Metaspace() if metaspace else WordPiece(cleanup=False)
    backend.add_special_tokens(["[X]"])
    theirs: Any = PreTrainedTokenizerFast
    wanted = theirs(tokenizer_object=backend, unk_token="[X]", clean_up_tokenization_spaces=True)
    remove_spaces(backend)
    tokenizer = zoo.Tokenizer(backend)
    assert tokenizer.decode(ids) == wanted.decode(ids, skip_special_tokens=True)
    assert "".join(tokenizer.stream(ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
@settings(deadline=None, max_examples=60)
@given(text=st.text("abcdeé日🙂 .,", max_size=30), seed=st.integers(0, 3))
def test_pieces_of_a_text_are_those_of_the_library(kind: str, text: str, seed: int) -> None:
    backend = trained(kind, seed)
    ids = backend.encode(text).ids
    assert list(zoo.Tokenizer(backend).stream(ids)) == [piece for piece in library(backend, ids) if piece]


def test_invalid_bytes_do_not_break_the_stream() -> None:
    """The library's stream raises an error: the text of earlier bytes of a run depends on later ones."""
    backend, ids = tokenizer_of("byte fallback"), [FALLBACK + byte for byte in (0xC3, 0xA9, 0xFF)]
    ids.append(3)
    with pytest.raises(Exception, match=r"(?i)prefix"):
        library(backend, ids)
    assert list(zoo.Tokenizer(backend).stream(ids)) == ["\ufffd\ufffd\ufffda"]
    assert list(zoo.Tokenizer(backend).stream(ids[:2])) == ["é"]


def test_pieces_come_as_soon_as_they_are_complete() -> None:
    read: list[int] = []
    tokenizer = zoo.Tokenizer(tokenizer_of("bytes"))
    shown = [(piece, len(read)) for piece in tokenizer.stream(read.append(byte) or byte for byte in "aé🙂b".encode())]
    assert shown == [("a", 1), ("é", 3), ("🙂", 7), ("b", 8)]


def test_incomplete_character_of_the_prompt_is_completed() -> None:
    tokenizer = zoo.Tokenizer(tokenizer_of("bytes"))
    assert list(tokenizer.stream([0xAC, 0x61, 0x62], prompt=[0x61, 0xE2, 0x82])) == ["€", "a", "b"]
