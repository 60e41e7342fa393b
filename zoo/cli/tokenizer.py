"""``zoo tokenizer``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from zoo.cli.completion import complete_sources
from zoo.cli.options import COUNT, PATH, Group, json_option, parse_ids
from zoo.cli.output import echo
from zoo.cli.progress import show_progress
from zoo.cli.report import bytes_text, emit_json
from zoo.errors import OTHER_PLACE, UsageError, ZooWarning


@contextmanager
def reading_progress(total: int) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that adds bytes of text read to a progress bar; None if bars are not shown."""
    done = 0
    with show_progress("training", unit="bytes") as show:
        if show is None:
            yield None
            return

        def advance(size: int) -> None:
            nonlocal done
            done += size
            show(done, total)

        yield advance


@click.group(
    "tokenizer",
    cls=Group,
    examples=(
        "zoo tokenizer train corpus.txt --vocab-size 270",
        'zoo tokenizer encode tokenizer.json "the model"',
    ),
    page="howto/tokenizers.md",
)
def command() -> None:
    """Train a tokenizer, or apply one to text."""


@command.command(
    "train",
    examples=(
        "zoo tokenizer train corpus.txt --vocab-size 270",
        "zoo tokenizer train corpus.txt --kind wordpiece --vocab-size 120 --lowercase -o words.json",
    ),
    page="howto/tokenizers.md",
)
@click.argument("files", type=PATH, nargs=-1, required=True)
@click.option(
    "--vocab-size",
    metavar="N",
    type=COUNT,
    required=True,
    help="Vocabulary size, special tokens included, such as 32K.",
)
@click.option(
    "--kind", type=click.Choice(["bpe", "wordpiece", "unigram"]), default="bpe", show_default=True,
    help="Byte-level BPE as in GPT-2, WordPiece as in BERT, or Unigram as in SentencePiece.",
)  # fmt: skip
@click.option(
    "-o",
    "--output",
    type=PATH,
    default="tokenizer.json",
    show_default=True,
    help="File to create.",
)
@click.option("--special", metavar="TOKEN", multiple=True, help="An additional special token.")
@click.option("--min-frequency", type=click.IntRange(min=1), help="Minimum frequency of a merged pair; 2 by default.")
@click.option("--lowercase", is_flag=True, help="Convert text to lower case.")
@click.option("--force", is_flag=True, help="Replace an existing tokenizer.")
@json_option
def train(
    files: tuple[Path, ...],
    vocab_size: int,
    kind: str,
    output: Path,
    special: tuple[str, ...],
    min_frequency: int | None,
    lowercase: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Train a tokenizer on the UTF-8 text of FILES. The same text gives the same file."""
    from zoo import storage
    from zoo.tokenizers.files.load import tokenizer_json
    from zoo.tokenizers.train import TextLines, special_tokens, train_tokenizer

    _check_output(output, files, force=force)
    lines = TextLines(files)
    size = sum(path.stat().st_size for path in files)
    with reading_progress(size * (2 if kind == "wordpiece" else 1)) as lines.progress:
        tokenizer = train_tokenizer(
            lines,
            kind=kind,
            vocab_size=vocab_size,
            special=special,
            min_frequency=min_frequency,
            lowercase=lowercase,
        )
    with storage.new_file(output, force=force) as path:
        path.write_text(tokenizer_json(tokenizer), encoding="utf-8")
    actual_size = tokenizer.get_vocab_size()
    named = special_tokens(tokenizer)
    if as_json:
        facts = {"lines": lines.count, "bytes": size, "special_tokens": named}
        emit_json("tokenizer.train", {"file": str(output), "kind": kind, "vocab_size": actual_size, **facts})
        return
    short = f" of {vocab_size:,} (the text yields no more)" if actual_size < vocab_size else ""
    echo(f"{output}: {kind}, {actual_size:,} tokens{short}, from {lines.count:,} lines, {bytes_text(size)}")
    echo("special tokens: " + "  ".join(f"{token} {number}" for token, number in named.items()))


def _check_output(output: Path, inputs: tuple[Path, ...], *, force: bool) -> None:
    """Raise :class:`UsageError` unless ``output`` is free, or a tokenizer outside model directories and ``force``."""
    from zoo import storage
    from zoo.artifact.directory import listed_files
    from zoo.tokenizers.files.load import is_tokenizer_json

    if any(storage.is_same_file(path, output) for path in inputs):
        raise UsageError("input and output are the same file", f"--output {output}", "choose another name")
    storage.check_file_target(output, force=force)
    if not output.exists():
        return
    if output.name in (listed_files(output.parent) or ()):
        raise UsageError("belongs to a model directory", output, OTHER_PLACE)
    if not is_tokenizer_json(output):
        raise UsageError("exists and is not a tokenizer", output, OTHER_PLACE)


@command.command(
    "encode",
    examples=(
        'zoo tokenizer encode tokenizer.json "the model"',
        'zoo tokenizer encode gpt-tiny "hello" "time flies" --json',
    ),
    page="howto/tokenizers.md",
)
@click.argument("source", shell_complete=complete_sources)
@click.argument("texts", metavar="TEXT...", nargs=-1, required=True)
@click.option("--no-special", is_flag=True, help="Omit the special tokens that the tokenizer adds.")
@json_option
def encode(source: str, texts: tuple[str, ...], no_special: bool, as_json: bool) -> None:
    """Print the ids and the tokens of each TEXT.

    SOURCE is a model directory, a tokenizer file, its directory, or 'bytes'. The tokens are those that the model would
    read: texts for a sentence encoder are truncated to its maximum length.
    """
    from zoo.tokenizers.loading import open_tokenizer
    from zoo.tokenizers.long_texts.truncation import truncated_texts

    tokenizer = open_tokenizer(source, special_tokens=not no_special)
    encoded = [tokenizer.encode(text, where=f"text {number}") for number, text in enumerate(texts, 1)]
    if tokenizer.truncated:
        warnings.warn(truncated_texts(tokenizer.truncated, tokenizer.limit), ZooWarning, stacklevel=1)
    if as_json:
        rows = [
            {"text": text, "ids": item.ids, "tokens": item.tokens} for text, item in zip(texts, encoded, strict=True)
        ]
        emit_json("tokenizer.encode", {"results": rows})
        return
    for item in encoded:
        echo(",".join(map(str, item.ids)))
        echo(" ".join(item.tokens))


@command.command(
    "decode",
    examples=(
        "zoo tokenizer decode tokenizer.json 76,78,67",
        "zoo tokenizer decode gpt-tiny 104,105 --json",
    ),
    page="howto/tokenizers.md",
)
@click.argument("source", shell_complete=complete_sources)
@click.argument("ids")
@json_option
def decode(source: str, ids: str, as_json: bool) -> None:
    """Print the text of IDS, such as 1,2,3, special tokens included.

    SOURCE is a model directory, a tokenizer file, its directory, or 'bytes'.
    """
    numbers = parse_ids(ids, "IDS")
    from zoo.tokenizers.loading import open_tokenizer

    tokenizer = open_tokenizer(source)
    vocabulary = set(tokenizer.backend.get_vocab().values())
    for number in numbers:
        if number not in vocabulary:
            raise UsageError(f"no token {number} in a vocabulary of {len(vocabulary)}", source)
    text = tokenizer.decode(numbers, special_tokens=True)
    if as_json:
        emit_json("tokenizer.decode", {"ids": numbers, "text": text})
    else:
        echo(text)
