"""The bytes of single tokens: they add up to the text, and are those of other libraries."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.runtime.test_streaming import KINDS, PIECES, tokenizer_of
from tests.tokenizers.test_prefixes import made
from zoo.tokenizers.stream import continuation
from zoo.tokenizers.token_bytes import TokenBytes

TEXTS = st.text("ab ,é€😀中\u0301\n\t", min_size=1, max_size=12)


@pytest.mark.parametrize("kind", ["bytes", "gpt2", "llama3", "qwen"])
def test_byte_level_tokens_have_the_bytes_of_transformers(kind: str) -> None:
    backend = made(kind)
    found, symbols = TokenBytes(backend), {symbol: byte for byte, symbol in bytes_to_unicode().items()}
    special = {token.content for token in backend.get_added_tokens_decoder().values()}
    for name, token in backend.get_vocab().items():
        assert found(token) == (None if name in special else bytes(symbols[symbol] for symbol in name))


@pytest.mark.parametrize("kind", ["bytes", "gpt2", "llama3", "llama2", "unigram"])
@settings(max_examples=40)
@given(text=TEXTS)
def test_bytes_add_up_to_the_generated_text(kind: str, text: str) -> None:
    """As for a text that follows a prompt."""
    backend = made(kind)
    prompt = backend.encode("the rain", add_special_tokens=False).ids
    ids = backend.encode(text, add_special_tokens=False).ids
    found = TokenBytes(backend)
    joined = b"".join(found(token) or b"" for token in ids)
    assert joined.decode() == continuation(backend, prompt, ids)


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_special_tokens_have_no_bytes(kind: str) -> None:
    backend = tokenizer_of(kind)
    special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    found = TokenBytes(backend)
    assert {token for token in range(backend.get_vocab_size()) if found(token) is None} == special
    assert found(backend.get_vocab_size() + 1) is None


def test_tokens_of_pieces_and_bytes() -> None:
    found = TokenBytes(tokenizer_of("byte fallback"))
    assert [found(PIECES.index(piece)) for piece in ("▁the", "a", "é", "▁▁")] == [b" the", b"a", "é".encode(), b"  "]
    assert [found(len(PIECES) + byte) for byte in (0xC3, 0xA9, 0x41)] == [b"\xc3", b"\xa9", b"A"]
    words = TokenBytes(tokenizer_of("wordpiece"))
    assert [words(token) for token in (1, 9, 8)] == [b" the", b"ing", b"!"]
