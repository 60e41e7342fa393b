"""``zoo run``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zoo.cli.output import emit_json, json_option
from zoo.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from zoo_export.runtime import Answer, Runner, Session

Item = TypeVar("Item")

GENERATION = (
    ("--max-new-tokens", int, "Tokens after which a text ends at the latest.  [default: 32]"),
    ("--min-new-tokens", int, "Tokens before which no text ends by itself."),
    ("--temperature", float, "Sample, with logits divided by this; 0 takes the likeliest token.  [default: 0]"),
    ("--top-k", int, "Sample from the K likeliest tokens; of masks, how many to show."),
    ("--top-p", float, "Sample from the likeliest tokens that together have this probability."),
    ("--min-p", float, "Sample from tokens with at least this fraction of the likeliest one's probability."),
    ("--repetition-penalty", float, "Make tokens that are in the text already less likely."),
    ("--seed", int, "Of sampling.  [default: 0]"),
    ("--num-beams", int, "Search the likeliest text with this many beams."),
    ("--length-penalty", float, "Divide a beam's log-probability by its length to this power.  [default: 1]"),
)
"""Options that are common enough for a name of their own; the others are set with ``--option``."""


def parse_ids(text: str, where: str = "--ids") -> list[int]:
    """``1,2,3`` as numbers."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise UsageError(f"{text!r} is not a list of token ids", where, "write 1,2,3") from error


def generation_options(command: Any) -> Any:
    """Add the options of generation to a command."""
    for name, kind, text in reversed(GENERATION):
        command = click.option(name, type=kind, help=text)(command)
    return command


@click.command("run")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option("--input", "input_file", metavar="FILE", help="Inputs: text by lines, .jsonl or .parquet; - for stdin.")
@click.option("--column", default="text", show_default=True, help="What holds the inputs in .jsonl and .parquet.")
@click.option("--pair-column", metavar="NAME", help="What holds the second texts there, of a task of pairs.")
@click.option("--id-column", help="What names the inputs there.  [default: id, else their numbers]")
@click.option("--output", type=click.Path(path_type=Path), help="Write results to a .jsonl or .parquet file.")
@click.option("--resume", is_flag=True, help="Go on where an earlier run into the same .jsonl ended.")
@click.option("--force", is_flag=True, help="Replace the output, once the new one is complete.")
@click.option("--pair", "pairs", nargs=2, metavar="TEXT TEXT", multiple=True, help="An input of two texts.")
@click.option("--ids", "id_lists", metavar="1,2,3", multiple=True, help="An input as token ids; a pair as 1,2/3,4.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A tokenizer, or a vocabulary, to use instead.")
@click.option("--task", help="What to do, where the model can do more than it declares.")
@click.option("--option", "settings", metavar="KEY=VALUE", multiple=True, help="Change an option of the task.")
@generation_options
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. May be repeated.")
@click.option("--stream/--no-stream", default=None, help="Print text as it comes.  [default: one text to a terminal]")
@click.option("--batch-size", type=click.IntRange(min=1), help="Inputs that are computed at once.")
@click.option("--dtype", type=click.Choice(["fp32", "fp16", "bf16", "int8", "int4"]), help="Which precision to run.")
@click.option("--variant", metavar="NAME", help="Which export to run.  [default: the best for the provider]")
@click.option(
    "--provider", type=click.Choice(["cpu", "cuda", "auto"]), default="cpu", show_default=True, help="Where to run."
)
@click.option("--threads", type=click.IntRange(min=1), help="For one operator.  [default: the number of cores]")
@click.option("--memory", type=click.Choice(["fast", "mapped"]), default="fast", show_default=True,
              help="Repack weights for speed, or compute with the pages of the file.")  # fmt: skip
@click.option("--unverified", is_flag=True, help="Run an export that was not shown equal to the model.")
@json_option
def command(
    directory: Path,
    texts: tuple[str, ...],
    input_file: str | None,
    column: str,
    pair_column: str | None,
    id_column: str | None,
    output: Path | None,
    resume: bool,
    force: bool,
    pairs: tuple[tuple[str, str], ...],
    id_lists: tuple[str, ...],
    tokenizer: Path | None,
    task: str | None,
    settings: tuple[str, ...],
    stop: tuple[str, ...],
    stream: bool | None,
    batch_size: int | None,
    as_json: bool,
    **rest: Any,
) -> None:
    """Run the exported model in DIRECTORY on each TEXT, or on the lines of stdin, with ONNX Runtime.

    Before the defaults below comes what the model's generation_config.json says, where it has one.
    """
    from zoo_export.runtime import Pair, load_session
    from zoo_export.runtime.rows import Results

    options = {name: rest.pop(name) for name in (flag[2:].replace("-", "_") for flag, _, _ in GENERATION)}
    options = {name: value for name, value in options.items() if value is not None} | ({"stop": stop} if stop else {})
    if (resume or force) and output is None:
        raise UsageError("nothing to continue or replace", "--resume, --force", "name a file with --output")
    if output is not None and as_json:
        raise UsageError("results to a file and to stdout", f"--output {output}", "leave out --json")
    if input_file is not None and output is not None and _same(Path(input_file), output):
        raise UsageError("the input and the output are one file", f"--output {output}", "choose another name")
    results = Results(output, force=force, resume=resume) if output is not None else None
    given = [*texts, *(Pair(*pair) for pair in pairs), *map(_parse_input, id_lists)]
    inputs = _inputs(given, input_file, column, id_column, pair_column)
    with load_session(directory, tokenizer=tokenizer, **rest) as session:
        more = session.options(task).parse_settings(settings)
        if twice := sorted(more.keys() & options.keys()):
            raise UsageError(f"{twice[0]} is set twice", f"--option {twice[0]}", "leave out one of them")
        runner = session.runner(task, **more, **options)
        alone = len(texts) == len(given) == 1 and results is None and not as_json and runner.streams
        if stream and not alone:
            raise UsageError("only one text that is generated can be streamed", "--stream", "leave it out")
        if alone and (stream or (stream is None and sys.stdout.isatty())):
            pieces = _pieces(session, runner, texts[0], wanted=bool(stream))
            if pieces is not None:
                _stream(session, runner, texts[0], pieces)
                return
        failures: list[Answer] = []
        done = results.done if results is not None else ()
        with results.writing() if results is not None else contextlib.nullcontext():
            pending = (item for item in inputs if item.error is not None or item.id not in done)
            answers = _watch(session.answer(runner, pending, batch_size), failures, quiet=len(given) == 1)
            if results is not None:
                for answer in answers:
                    if answer.error is None:
                        results.write(answer.id, answer.result)
            elif as_json:
                facts = {"task": task or session.task, "provider": session.provider}
                emit_json("run", facts | {"results": [_described(answer) for answer in answers]})
            else:
                _print(session, runner, answers, together=bool(given))
    if failures:
        only = failures[0].error
        if len(given) == 1 and only is not None:
            raise only
        raise ArtifactError(f"no result for {len(failures)} of the inputs", directory, "see the warnings above")


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _parse_input(text: str) -> Any:
    """``1,2`` as token ids, ``1,2/3,4`` as a pair of them."""
    from zoo_export.runtime import Pair

    parts = text.split("/")
    return Pair(*map(parse_ids, parts)) if len(parts) == 2 else parse_ids(text)


def _inputs(
    given: Sequence[Any], file: str | None, column: str, id_column: str | None, pair_column: str | None
) -> Iterator[Answer]:
    """What is to be answered: what is given, else the rows of a file, else the lines of stdin."""
    from zoo_export.runtime import Answer
    from zoo_export.runtime.rows import read_rows

    if given and file is not None:
        raise UsageError("inputs twice", f"--input {file}", "leave out the texts, or the file")
    if given and pair_column is not None:
        raise UsageError("there is no file with columns", f"--pair-column {pair_column}", "give --pair TEXT TEXT")
    if given:
        return iter([Answer(number, value, id=number) for number, value in enumerate(given, 1)])
    listens = file is not None or (sys.stdin is not None and not sys.stdin.isatty())
    rows = read_rows(file or "-", column, id_column, pair_column) if listens else iter(())
    first = next(rows, None)
    if first is None:
        raise UsageError("nothing to run on", file, "give a text, --input FILE, or --ids 1,2,3")
    return chain([first], rows)


def _watch(answers: Iterator[Answer], failures: list[Answer], *, quiet: bool) -> Iterator[Answer]:
    """Report answers that are none as they come, and count on a terminal."""
    from zoo_export.runtime.text import printable

    with _counter() as count:
        for answer in _kept_apart(answers):
            if answer.error is not None:
                failures.append(answer)
                if not quiet:
                    click.echo(f"warning: {printable(str(answer.error))}", err=True)
            count()
            yield answer


@contextlib.contextmanager
def _counter() -> Iterator[Callable[[], None]]:
    """How many inputs are done, on stderr, on a terminal only, unless the results go there too."""
    if not sys.stderr.isatty() or sys.stdout.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    with Progress(MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("running", total=None)
        yield lambda: bar.advance(task)


def _kept_apart(items: Iterator[Item]) -> Iterator[Item]:
    """The same items; what a plugin prints while it makes them goes to stderr, as stdout is for results."""
    while True:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def _described(answer: Answer) -> dict[str, Any]:
    from zoo_export.runtime.rows import plain
    from zoo_export.runtime.runner import texts_of

    # A lone surrogate, which stands for a byte that is not UTF-8, cannot be printed.
    texts = [text.encode("utf-8", "backslashreplace").decode() for text in texts_of(answer.input)]
    text = texts if len(texts) > 1 else next(iter(texts), None)
    return {"text": text, **(plain(answer.result) if answer.error is None else {"error": str(answer.error)})}


def _print(session: Session, runner: Runner[Any], answers: Iterator[Answer], *, together: bool) -> None:
    """Lines for people: of all inputs at once where there are few, so that they can be set in relation."""
    from zoo_export.runtime.text import printable

    sound = (answer for answer in answers if answer.error is None)
    for group in [list(sound)] if together else ([answer] for answer in sound):
        for line in _kept_apart(session.show(runner, group)) if group else ():
            click.echo(printable(line, "\n\t"))


def _pieces(session: Session, runner: Runner[Any], text: str, *, wanted: bool) -> Iterator[str] | None:
    """What can be streamed. None where that is nothing, unless it is wanted: it is shown when it is complete."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return session.pieces(runner, text)
    except UsageError:
        if wanted:
            raise
        return None


def _stream(session: Session, runner: Runner[Any], text: str, pieces: Iterator[str]) -> None:
    """Print a generated text as it comes, after its prompt where it continues one."""
    from zoo_export.runtime.text import printable

    with contextlib.redirect_stdout(sys.stderr):
        lead = session.lead(runner, text)
    try:
        click.echo(printable(lead, "\n\t"), nl=False)
        for piece in _kept_apart(pieces):
            click.echo(printable(piece, "\n\t"), nl=False)
    finally:
        click.echo()
