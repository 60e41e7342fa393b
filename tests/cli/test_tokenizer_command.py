"""``zoo tokenizer``: training, use in a model, encoding and decoding."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from zoo.cli import tokenizer as tokenizer_command


@pytest.fixture(autouse=True)
def text() -> None:
    """Write a text of 300 lines, a file that is not text, and a blank file."""
    Path("text.txt").write_text("the zoo shows that the model equals its export\n" * 300)
    Path("latin.txt").write_bytes("café\n".encode("latin-1"))
    Path("blank.txt").write_text("\n\n")


def test_train_reports_its_result(zoo) -> None:
    """As text and as JSON, with the ids that a configuration needs."""
    done = zoo("tokenizer", "train", "text.txt", "--vocab-size", "260", "-o", "new/mine.json")
    assert (done.status, done.err) == (0, "")
    assert done.out == ("new/mine.json: bpe, 260 tokens, from 300 lines, 14.1 kB\nspecial tokens: <|endoftext|> 259\n")
    done = zoo(
        "tokenizer", "train", "text.txt", "text.txt", "--vocab-size", "9K", "--kind", "wordpiece", "--special", "<x>",
        "--lowercase", "--min-frequency", "3", "--json",
    )  # fmt: skip
    size = Tokenizer.from_file("tokenizer.json").get_vocab_size()
    assert done.json == {
        "schema": "zoo.tokenizer.train/1",
        "file": "tokenizer.json",
        "kind": "wordpiece",
        "vocab_size": size,
        "lines": 600,
        "bytes": 2 * 14_100,
        "special_tokens": {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "<x>": size - 1},
    }
    out = zoo("tokenizer", "train", "text.txt", "--vocab-size", "9K", "-o", "other.json").out
    assert " tokens of 9,000 (the text yields no more), from 300 lines" in out


@pytest.mark.parametrize(
    ("arguments", "status", "fragments"),
    [
        (["--vocab-size", "300"], 2, ("Missing argument 'FILES...'",)),
        (["text.txt"], 2, ("Missing option '--vocab-size'",)),
        (["absent.txt", "--vocab-size", "300"], 3, ("no such file: absent.txt",)),
        ([".", "--vocab-size", "300"], 3, ("not a file: .",)),
        (["text.txt", "latin.txt", "--vocab-size", "300"], 3, ("not UTF-8: latin.txt, line 1, byte 3",)),
        (["blank.txt", "--vocab-size", "300"], 3, ("no text to train on: blank.txt",)),
        (["text.txt", "--vocab-size", "0"], 2, ("vocabulary of 0 is too small", "--vocab-size")),
        (["text.txt", "--vocab-size", "many"], 2, ("'many' is not a count: --vocab-size: write 32000, 32K",)),
        (["text.txt", "--vocab-size", "1T"], 2, ("a vocabulary of 1000000000000 tokens is too large",)),
        (["text.txt", "--vocab-size", "256"], 2, ("too small", "--vocab-size: use at least 257")),
        (["text.txt", "--vocab-size", "9", "--kind", "wordpiece"], 2, ("vocabulary of 9 is too small",)),
        (["text.txt", "--vocab-size", "300", "--kind", "words"], 2, ("'words'", "'wordpiece'")),
        (["text.txt", "--vocab-size", "300", "--special", ""], 2, ("a special token is blank",)),
        (["text.txt", "--vocab-size", "300", "--min-frequency", "0"], 2, ("--min-frequency", "0")),
        (["text.txt", "--vocab-size", "300", "-o", "blank.txt"], 2, ("already exists: blank.txt: use --force",)),
        (["text.txt", "--vocab-size", "300", "-o", ".", "--force"], 2, ("exists and is not a file: .",)),
        (["text.txt", "--vocab-size", "300", "-o", "text.txt/mine"], 6, ("cannot write (", "text.txt/mine")),
    ],
)  # fmt: skip
def test_bad_input_is_reported_in_one_line(
    arguments: list[str], status: int, fragments: tuple[str, ...], zoo, snapshot
) -> None:
    """The status is that of its error class, and no file is created."""
    before = snapshot()
    zoo("tokenizer", "train", *arguments).failed(status, *fragments)
    assert snapshot() == before


def test_unigram_without_its_package_names_the_package(zoo, snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is optional."""
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    before = snapshot()
    done = zoo("tokenizer", "train", "text.txt", "--vocab-size", "300", "--kind", "unigram")
    done.failed(2, "pip install attention-zoo[sentencepiece]")
    assert snapshot() == before


def test_existing_file_is_replaced_with_force(zoo, snapshot) -> None:
    """The result equals that of a new file, and no temporary file remains."""
    arguments = ["tokenizer", "train", "text.txt", "--vocab-size", "280", "-o"]
    assert zoo("tokenizer", "train", "text.txt", "--vocab-size", "270", "-o", "old.json").status == 0
    assert zoo(*arguments, "old.json", "--force").status == 0
    assert zoo(*arguments, "new.json").status == 0
    assert Path("old.json").read_bytes() == Path("new.json").read_bytes()
    assert set(snapshot()) == {"blank.txt", "latin.txt", "new.json", "old.json", "text.txt"}


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("text.txt", "input and output are the same file: --output text.txt: choose another name"),
        ("hard.txt", "input and output are the same file"),
        ("blank.txt", "exists and is not a tokenizer: blank.txt: choose another place"),
        ("soft.json", "exists and is not a file: soft.json"),
        ("model/tokenizer.json", "belongs to a model directory: model/tokenizer.json: choose another place"),
        ("model/model.safetensors", "belongs to a model directory: model/model.safetensors"),
        ("model/manifest.json", "belongs to a model directory: model/manifest.json"),
    ],
)
def test_force_replaces_only_tokenizers(copy_of, zoo, snapshot, output: str, message: str) -> None:
    """Inputs, links, other files and the files of models are kept."""
    copy_of("gpt-tiny").rename("model")
    Path("hard.txt").hardlink_to("text.txt")
    Path("soft.json").symlink_to("model/tokenizer.json")
    before = snapshot()
    zoo("tokenizer", "train", "text.txt", "--vocab-size", "280", "-o", output, "--force").failed(2, message)
    assert snapshot() == before


def test_progress_is_shown_on_terminals(zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if standard error is a terminal."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with tokenizer_command.reading_progress(100) as progress:
        assert progress is not None
        progress(50)
    assert "training" in terminal.getvalue()
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with tokenizer_command.reading_progress(100) as progress:
        assert progress is None


def test_trained_tokenizer_is_attached_to_a_model(zoo) -> None:
    """The size of the vocabulary and the end token are the tokenizer's; the model then runs on text."""
    assert zoo("tokenizer", "train", "text.txt", "--vocab-size", "280", "-o", "mine.json").status == 0
    done = zoo("build", "gpt-tiny", "--tokenizer", "mine.json", "--set", "vocab_size=260")
    done.failed(2, "the tokenizer has 280 tokens, the model 260: mine.json: leave out --set vocab_size")
    assert not Path("gpt-tiny").exists()
    done = zoo("build", "gpt-tiny", "--tokenizer", "mine.json")
    taken = "vocab_size 280, eos_token_id 279 ('<|endoftext|>')"
    assert (done.status, done.err) == (0, f"note: from the tokenizer mine.json: {taken}\n")
    assert Path("gpt-tiny/tokenizer.json").read_bytes() == Path("mine.json").read_bytes()
    ids = Tokenizer.from_file("mine.json").encode("the zoo").ids
    assert zoo("tokenizer", "encode", "gpt-tiny", "the zoo", "--json").json["results"][0]["ids"] == ids


@pytest.mark.parametrize("source", ["vocab.txt", "files"])
def test_vocabulary_is_attached_as_tokenizer_json(source: str, zoo) -> None:
    """Given as a file or as its directory."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "time", "fli", "##es"]
    Path("files").mkdir()
    for path in (Path("vocab.txt"), Path("files/vocab.txt")):
        path.write_text("\n".join(tokens))
    assert zoo("build", "bert-tiny", "--tokenizer", source, "--set", "mask_token_id=4").status == 0
    assert not Path("bert-tiny/vocab.txt").exists()
    for where in ("bert-tiny", source):
        done = zoo("tokenizer", "encode", where, "Time flies")
        assert done.out == "2,5,6,7,3\n[CLS] time fli ##es [SEP]\n"
    done = zoo("tokenizer", "encode", "bert-tiny", "Time flies", "what", "--no-special", "--json")
    assert done.json == {
        "schema": "zoo.tokenizer.encode/1",
        "results": [
            {"text": "Time flies", "ids": [5, 6, 7], "tokens": ["time", "fli", "##es"]},
            {"text": "what", "ids": [1], "tokens": ["[UNK]"]},
        ],
    }
    assert zoo("tokenizer", "decode", "bert-tiny", "2,5,6,7,3").out == "[CLS] time flies [SEP]\n"


def test_bytes_are_encoded_and_decoded(zoo) -> None:
    """With the name of the built-in tokenizer."""
    assert zoo("tokenizer", "encode", "bytes", "hé").out == "104,195,169\nh Ã ©\n"
    assert zoo("tokenizer", "decode", "bytes", "104 195,169").out == "hé\n"
    done = zoo("tokenizer", "decode", "bytes", "104,10,258", "--json")
    assert done.json == {"schema": "zoo.tokenizer.decode/1", "ids": [104, 10, 258], "text": "h\n<eos>"}


@pytest.mark.parametrize(
    ("arguments", "status", "fragments"),
    [
        (["encode", "bytes"], 2, ("Missing argument 'TEXT...'",)),
        (["encode", "absent.json", "a"], 3, ("no such tokenizer: absent.json: check the path",)),
        (["encode", "text.txt", "a"], 3, ("not a WordPiece vocabulary (no [UNK]): text.txt: known: tokenizer.json,",)),
        (["encode", ".", "a"], 3, ("no tokenizer in this directory: .: known: tokenizer.json,",)),
        (["decode", "bytes", "1,x"], 2, ("'1,x' is not a list of token ids: IDS",)),
        (["decode", "bytes", "260"], 2, ("no token 260 in a vocabulary of 260: bytes",)),
        (["decode", "bytes", "--", "-1"], 2, ("no token -1 in a vocabulary of 260: bytes",)),
        (["decode", "bytes", str(2**70)], 2, (f"no token {2**70}",)),
        (["trian"], 2, ("No such command 'trian': did you mean 'train'?",)),
        (["nope"], 2, ("No such command 'nope': known: decode, encode, train",)),
    ],
)
def test_unencodable_input_is_reported_in_one_line(
    arguments: list[str], status: int, fragments: tuple[str, ...], zoo
) -> None:
    """The message has the problem and its place."""
    zoo("tokenizer", *arguments).failed(status, *fragments)


def test_texts_are_those_that_the_model_reads(zoo) -> None:
    """A sentence encoder truncates texts, so the command does as well, and says so."""
    Path("vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    options = ["--set", "task=sentence-embedding", "--set", "mask_token_id=4", "--tokenizer", "vocab.txt"]
    assert zoo("build", "bert-tiny", *options).status == 0
    assert zoo("publish", "bert-tiny", "hub", "--layout", "hub").status == 0
    Path("hub/sentence_bert_config.json").write_text('{"max_seq_length": 4}')
    assert zoo("import", "hub", "-o", "short", "--no-verify").status == 0
    done = zoo("tokenizer", "encode", "short", "a b a")
    assert done.out == "2,5,6,3\n[CLS] a b [SEP]\n"
    assert "1 text truncated to 4 tokens" in done.err
    assert zoo("tokenizer", "encode", "short", "a b", "--no-special").out == "5,6\na b\n"
    zoo("tokenizer", "encode", "short", "\udcff").failed(3, "text 1", "is not valid Unicode")


def test_tokenizer_of_an_altered_model_is_rejected(copy_of, zoo) -> None:
    """As in every command that reads a model."""
    model = copy_of("gpt-tiny")
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.5
    (model / "tokenizer.json").write_text(json.dumps(content))
    zoo("tokenizer", "encode", model, "a").failed(3, "tokenizer.json")
