"""``zoo tokenizer``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from zoo.cli.output import SIZE, bytes_text, emit_json, json_option
from zoo.cli.run_command import parse_ids
from zoo.errors import UsageError


@contextmanager
def reading_progress(total: int) -> Iterator[Callable[[int], None] | None]:
    """A progress bar on stderr, on a terminal only: bytes of text that were read."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("training", total=total)
        yield lambda size: bar.advance(task, size)


def open_tokenizer(source: str) -> Any:
    """The tokenizer of a model directory, which is checked, or of a file, or ``bytes``."""
    from zoo.artifact import MANIFEST, ModelDirectory
    from zoo.tokenizer import read_tokenizer

    if (Path(source) / MANIFEST).is_file():
        ModelDirectory.open(source, weights=False)
    return read_tokenizer(source)


@click.group("tokenizer")
def command() -> None:
    """Train a tokenizer, or see what one makes of a text."""


@command.command("train")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--vocab-size", metavar="N", type=SIZE, required=True, help="Tokens, special ones included: 32K.")
@click.option(
    "--kind", type=click.Choice(["bpe", "wordpiece", "unigram"]), default="bpe", show_default=True,
    help="As GPT-2 on bytes, as BERT, or as SentencePiece.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default="tokenizer.json", show_default=True, help="File to make."
)
@click.option("--special", metavar="TOKEN", multiple=True, help="A special token beside those of the kind.")
@click.option("--min-frequency", type=click.IntRange(min=1), help="How often a pair must occur; 2 by default.")
@click.option("--lowercase", is_flag=True, help="Lower-case every text.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
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
    from zoo.tokenizer import tokenizer_json
    from zoo.tokenizer_training import Lines, special_tokens, train_tokenizer

    storage.check_file_target(output, force=force)
    lines = Lines(files)
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
    made = tokenizer.get_vocab_size()
    named = special_tokens(tokenizer)
    if as_json:
        facts = {"lines": lines.count, "bytes": size, "special_tokens": named}
        emit_json("tokenizer.train", {"file": str(output), "kind": kind, "vocab_size": made, **facts})
        return
    short = f" of {vocab_size:,}, the text holds no more" if made < vocab_size else ""
    click.echo(f"{output}: {kind}, {made:,} tokens{short}, from {lines.count:,} lines, {bytes_text(size)}")
    click.echo("special tokens: " + "  ".join(f"{token} {number}" for token, number in named.items()))


@command.command("encode")
@click.argument("source")
@click.argument("texts", metavar="TEXT...", nargs=-1, required=True)
@click.option("--no-special", is_flag=True, help="Without the special tokens that the tokenizer puts around a text.")
@json_option
def encode(source: str, texts: tuple[str, ...], no_special: bool, as_json: bool) -> None:
    """Print the ids and the tokens of each TEXT.

    SOURCE is a model directory, a tokenizer file, its directory, or 'bytes'.
    """
    tokenizer = open_tokenizer(source)
    encoded = [tokenizer.encode(text, add_special_tokens=not no_special) for text in texts]
    if as_json:
        rows = [
            {"text": text, "ids": item.ids, "tokens": item.tokens} for text, item in zip(texts, encoded, strict=True)
        ]
        emit_json("tokenizer.encode", {"results": rows})
        return
    for item in encoded:
        click.echo(",".join(map(str, item.ids)))
        click.echo(" ".join(item.tokens))


@command.command("decode")
@click.argument("source")
@click.argument("ids")
@json_option
def decode(source: str, ids: str, as_json: bool) -> None:
    """Print the text of IDS, such as 1,2,3, special tokens included.

    SOURCE is a model directory, a tokenizer file, its directory, or 'bytes'.
    """
    numbers = parse_ids(ids, "IDS")
    tokenizer = open_tokenizer(source)
    known = set(tokenizer.get_vocab().values())
    for number in numbers:
        if number not in known:
            raise UsageError(f"no token {number} in a vocabulary of {len(known)}", source)
    text = tokenizer.decode(numbers, skip_special_tokens=False)
    if as_json:
        emit_json("tokenizer.decode", {"ids": numbers, "text": text})
    else:
        click.echo(text)
