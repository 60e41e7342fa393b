"""Prefixes of long texts: their tokens are the first of the whole text, for every kind of tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from zoo.tokenizers.files.load import bert_tokenizer, byte_level_tokenizer, byte_tokenizer
from zoo.tokenizers.long_texts.prefixes import TextPrefixes
from zoo.tokenizers.tokenizer import Tokenizer as ModelTokenizer

TEXTS = ["the rain in Spain stays mainly in the plain, 1234 times.\n\n", "été 雨が降る 🙂🙂 don't", "     x  y  "] * 20
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
CLIP = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def learn(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def bpe(**options: Any) -> Any:
    return trainers.BpeTrainer(vocab_size=420, show_progress=False, **options)


def gpt2(add_prefix_space: bool = False) -> Tokenizer:
    tokenizer = byte_level_tokenizer(models.BPE(), add_prefix_space=add_prefix_space)
    return learn(tokenizer, bpe(initial_alphabet=ALPHABET, special_tokens=["<|endoftext|>"]))


def llama3(normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return learn(tokenizer, bpe(initial_alphabet=ALPHABET, special_tokens=["<|eot_id|>"]))


def bert() -> Tokenizer:
    tokenizer = bert_tokenizer(models.WordPiece(unk_token="[UNK]"), lowercase=True)
    special = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    learn(tokenizer, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def llama2() -> Tokenizer:
    """A SentencePiece BPE without a pre-tokenizer, with bytes for unknown characters."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    learn(made, bpe(special_tokens=["<unk>", *pieces]))
    facts = json.loads(made.to_str())["model"]
    merges = [tuple(pair) for pair in facts["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=facts["vocab"], merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def gemma() -> Tokenizer:
    tokenizer = llama2()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    return learn(
        tokenizer,
        trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False),
    )


def clip() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    split = pre_tokenizers.Split(Regex(CLIP), "removed", invert=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return learn(tokenizer, bpe(end_of_word_suffix="</w>", special_tokens=["<|endoftext|>"], initial_alphabet=ALPHABET))


def added() -> Tokenizer:
    tokenizer = gpt2()
    tokenizer.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True), AddedToken("rain", single_word=True)])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_tokenizer, "gpt2": gpt2, "roberta": lambda: gpt2(add_prefix_space=True), "llama3": llama3,
    "qwen": lambda: llama3(normalizers.NFC()), "bert": bert, "llama2": llama2, "gemma": gemma, "unigram": unigram,
    "clip": clip, "added": added,
}  # fmt: skip


@cache
def made(kind: str) -> Tokenizer:
    return KINDS[kind]()


@cache
def prefixes(kind: str) -> TextPrefixes:
    return TextPrefixes(made(kind))


WORDS = ["the", "rain", "Spain", "12", "34567", "don't", ",", "...", "<tool>", "[MASK]", "<|endoftext|>", "été",
         "e\u0301", "\u0301", "雨", "雨が降る", "🙂", "½", "ﬁ", "İ", "ẞ", "\x00", "\u200d", "\u3164",
         "ж", "한국어", "▁", "Ġ"]  # fmt: skip
SPACES = [" ", "  ", "     ", "\n", " \n", "\t", "\u3000", "\xa0", ""]
LONG = st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(SPACES)), min_size=20, max_size=80).map(
    lambda parts: "".join(word + space for word, space in parts)
)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(text=LONG, count=st.integers(0, 6))
def test_tokens_of_a_prefix_are_the_first_of_the_text(kind: str, text: str, count: int) -> None:
    backend = made(kind)
    prefix = prefixes(kind).with_more_tokens(text, count)
    ids = backend.encode(prefix, add_special_tokens=False).ids
    assert text.startswith(prefix)
    assert ids == backend.encode(text, add_special_tokens=False).ids[: len(ids)]
    assert len(ids) > count or prefix == text
    if prefixes(kind).exceeds(text, count):
        assert len(backend.encode(text, add_special_tokens=False).ids) > count


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(text=LONG, limit=st.integers(6, 9), strategy=st.sampled_from(["longest_first", "only_second"]))
def test_truncated_texts_are_those_of_the_library(kind: str, text: str, limit: int, strategy: Any) -> None:
    reference = Tokenizer.from_str(made(kind).to_str())
    reference.enable_truncation(limit, strategy=strategy)
    compare(reference, truncating(kind, limit, strategy), ("a", text) if strategy == "only_second" else (text,))


@pytest.mark.slow_after(8)
@pytest.mark.parametrize("kind", ["bert", "unigram"])
@pytest.mark.parametrize("limit", [5, 6])
@pytest.mark.parametrize("words", [(24, 24), (24, 36), (36, 24), (24, 3), (3, 24)])
def test_truncated_pairs_are_those_of_the_library(kind: str, limit: int, words: tuple[int, int]) -> None:
    """Both texts are short, since the library makes a pair of each window of one with each of the other."""
    reference = Tokenizer.from_str(made(kind).to_str())
    reference.enable_truncation(limit)
    first, second = words
    compare(reference, truncating(kind, limit, "longest_first"), ("the rain " * first, "in Spain " * second))


def truncating(kind: str, limit: int, strategy: Any) -> ModelTokenizer:
    tokenizer = ModelTokenizer(made(kind), limit=limit, strategy=strategy)
    tokenizer.__dict__["_prefixes"] = prefixes(kind)
    return tokenizer


def compare(reference: Tokenizer, tokenizer: ModelTokenizer, texts: tuple[str, ...]) -> None:
    expected, found = reference.encode(*texts), tokenizer.encode(*texts, overflowing=False)
    assert (found.ids, found.offsets, found.sequence_ids) == (expected.ids, expected.offsets, expected.sequence_ids)
    assert bool(found.overflowing) == bool(expected.overflowing)


def test_short_texts_do_not_serialise_the_vocabulary() -> None:
    assert TextPrefixes(None).with_more_tokens("the rain in Spain", 100) == "the rain in Spain"  # no tokenizer at all


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_are_shortened(kind: str) -> None:
    prefix = prefixes(kind).with_more_tokens("the rain in Spain " * 10_000, 100)
    assert len(prefix) < 8000


UNSPACED = {"commas": "rain,", "ideographs": "\u96e8\u6c34", "lines": "rain\n"}


@pytest.mark.parametrize("text", UNSPACED)
def test_texts_without_spaces_are_shortened_as_bert_reads_them(text: str) -> None:
    whole = UNSPACED[text] * 10_000
    prefix = prefixes("bert").with_more_tokens(whole, 100)
    assert len(prefix) < 8000
    ids = made("bert").encode(prefix, add_special_tokens=False).ids
    assert ids == made("bert").encode(whole, add_special_tokens=False).ids[: len(ids)]


@pytest.mark.parametrize("kind", ["unigram", "llama2", "gemma"])
def test_one_long_word_exceeds_what_its_pieces_can_hold(kind: str) -> None:
    word = "rainspain" * 10_000
    assert prefixes(kind).exceeds(word, 100)
    assert prefixes(kind).with_more_tokens(word, 100) == word
    is_one = kind == "unigram"  # unknown characters may be one token, if they do not become bytes
    assert prefixes(kind).exceeds("\u2603" * 10_000, 100) != is_one


@pytest.mark.parametrize("text", [" ", ",", "\n", "\u96e8", "\U0001f642\u200d", "\\"])
def test_texts_exceed_what_bytes_and_pieces_can_hold(text: str) -> None:
    assert prefixes("llama2").exceeds(text * 20_000, 100)


@pytest.mark.parametrize("content", ["x,y", "\u96e8\u6c34", "x\ny", "rain"])
def test_added_tokens_across_punctuation_are_kept_whole(content: str) -> None:
    tokenizer = Tokenizer.from_str(made("bert").to_str())
    tokenizer.add_tokens([AddedToken(content, single_word=content == "rain")])
    whole = ("x,y\u96e8\u6c34x\n" * 4000).replace(" ", "")
    assert TextPrefixes(tokenizer).with_more_tokens(whole, 3) == whole


@pytest.mark.parametrize("change", ["crossing token", "word across spaces", "lookahead", "expression", "dropout"])
def test_texts_of_tokenizers_that_join_words_are_left_whole(change: str) -> None:
    """A prefix would have other tokens."""
    tokenizer = Tokenizer.from_str(made("gpt2").to_str())
    if change == "crossing token":
        tokenizer.add_tokens(["rain in"])
    elif change == "word across spaces":
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated")
    elif change == "lookahead":
        split = pre_tokenizers.Split(Regex(r"\w+(?=\s)"), "removed")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel()])
    elif change == "expression":
        tokenizer.normalizer = normalizers.Replace(Regex(r"rain in"), "")
    else:
        tokenizer.model.dropout = 0.5
    text = "the rain in Spain " * 1000
    assert TextPrefixes(tokenizer).with_more_tokens(text, 3) == text
