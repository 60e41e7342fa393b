"""The byte tokenizer, and the tokenizer.json that a model carries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from zoo import ArtifactError, UsageError
from zoo.tokenizer import byte_tokenizer, load_tokenizer, write_tokenizer

SPECIAL = {"<pad>": 256, "<bos>": 257, "<eos>": 258, "<mask>": 259}
BYTES = byte_tokenizer()
SOURCE, TARGET = Path("source.json"), Path("tokenizer.json")


def words(vocabulary: dict[str, int]) -> Tokenizer:
    """A tokenizer that knows these words."""
    return Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=min(vocabulary, default="")))


@settings(deadline=None, max_examples=300)
@given(st.text())
def test_ids_of_a_text_are_its_bytes(text: str) -> None:
    """For any text that does not spell out a special token; and they decode to it again."""
    assume(not any(token in text for token in SPECIAL))
    ids = BYTES.encode(text).ids
    assert ids == list(text.encode())
    assert BYTES.decode(ids, skip_special_tokens=False) == text


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.sampled_from(list(SPECIAL)) | st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=5),
        max_size=6,
    )
)
def test_special_tokens_stand_for_themselves_between_bytes(parts: list[str]) -> None:
    """Ids 256 to 259, which decoding leaves out unless asked not to."""
    ids = BYTES.encode("".join(parts)).ids
    assert ids == [item for part in parts for item in ([SPECIAL[part]] if part in SPECIAL else part.encode())]
    assert BYTES.decode(ids) == "".join(part for part in parts if part not in SPECIAL)
    assert BYTES.decode(ids, skip_special_tokens=False) == "".join(parts)


def test_vocabulary_is_260_tokens() -> None:
    """256 bytes and four special tokens, each id once."""
    vocabulary = BYTES.get_vocab(with_added_tokens=True)
    assert sorted(vocabulary.values()) == list(range(260))
    assert {token: vocabulary[token] for token in SPECIAL} == SPECIAL


def test_bytes_are_written_as_a_file_any_library_reads() -> None:
    """tokenizers' own reader gives the same ids."""
    write_tokenizer("bytes", TARGET, 260)
    text = "naïve \t\n\0 日本 🦓 <eos>"
    assert Tokenizer.from_file(str(TARGET)).encode(text).ids == [*text[:-5].encode(), 258]


def test_copy_of_a_file_is_the_file() -> None:
    """Byte for byte, also where the model states no vocabulary."""
    words({"a": 0, "b": 1}).save(str(SOURCE), pretty=True)
    for size in (2, None):
        write_tokenizer(SOURCE, TARGET, size)
        assert TARGET.read_bytes() == SOURCE.read_bytes()


def test_padding_and_truncation_of_the_file_do_not_apply() -> None:
    """A text keeps its length, so that one too long is noticed."""
    tokenizer = byte_tokenizer()
    tokenizer.enable_padding(length=8)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(SOURCE))
    loaded = load_tokenizer(SOURCE)
    assert loaded.encode("abc").ids == list(b"abc")
    assert loaded.encode("abcdefghi").ids == list(b"abcdefghi")


@pytest.mark.parametrize(
    ("source", "size", "message"),
    [
        ("bytes", 259, "the tokenizer has 260 tokens, the model 259: bytes"),
        (SOURCE, 2, "the tokenizer has 3 tokens, the model 2: source.json"),
    ],
)
def test_tokenizer_larger_than_the_vocabulary_is_refused(source: str | Path, size: int, message: str) -> None:
    """The model has no embedding for its last tokens."""
    words({"a": 0, "b": 1, "c": 2}).save(str(SOURCE))
    with pytest.raises(UsageError) as caught:
        write_tokenizer(source, TARGET, size)
    assert str(caught.value) == message
    assert not TARGET.exists()


def test_tokenizer_with_an_id_beyond_the_vocabulary_is_refused() -> None:
    """Few tokens may still have large ids."""
    words({"a": 0, "b": 500}).save(str(SOURCE))
    with pytest.raises(UsageError, match="500"):
        write_tokenizer(SOURCE, TARGET, 260)
    assert not TARGET.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"not json",
        b"\xff\xfe",
        b'{"version": "1.0", "model": {"type": "BPE"}}',
        b'{"version": "9.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}}',
        b"[" * 100_000,
        BYTES.to_str().encode()[:-1],
        BYTES.to_str().encode().replace(b'"!":33', b'"!":-33'),
        BYTES.to_str().encode().replace(b'"ByteLevel"', b'"ByteLeval"'),
    ],
    ids=range(12),
)
def test_broken_file_is_an_artifact_error(content: bytes) -> None:
    """One line that names the file, whether it is read or attached."""
    SOURCE.write_bytes(content)
    for attempt in (lambda: load_tokenizer(SOURCE), lambda: write_tokenizer(SOURCE, TARGET, None)):
        with pytest.raises(ArtifactError) as caught:
            attempt()
        assert "source.json" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 3
    assert not TARGET.exists()


@pytest.mark.parametrize("source", [Path("absent.json"), Path()])
def test_file_that_cannot_be_read_is_an_artifact_error(source: Path) -> None:
    """Absent, or a directory."""
    with pytest.raises(ArtifactError):
        write_tokenizer(source, TARGET, None)


CONTENT = json.dumps(json.loads(BYTES.to_str()), ensure_ascii=False).encode()


@settings(deadline=None, max_examples=100)
@given(place=st.integers(0, len(CONTENT) - 1), removed=st.integers(0, 3), added=st.binary(max_size=3))
def test_damaged_file_is_read_or_refused(place: int, removed: int, added: bytes) -> None:
    """The library's own errors, panics included, never come through."""
    SOURCE.write_bytes(CONTENT[:place] + added + CONTENT[place + removed :])
    try:
        tokenizer = load_tokenizer(SOURCE)
    except ArtifactError as error:
        assert "source.json" in str(error)
    else:
        assert isinstance(tokenizer.encode("some text").ids, list)
