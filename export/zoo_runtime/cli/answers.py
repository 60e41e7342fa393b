"""Answers of ``zoo run``: counted, printed and streamed."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from zoo.cli.output import echo, message
from zoo.cli.progress import show_progress
from zoo.errors import UsageError, ZooError
from zoo.tables import has_bytes, join_columns

if TYPE_CHECKING:
    from zoo_runtime import Answer, Runner, Session

__all__ = [
    "AnswerCounts",
    "described",
    "open_stream",
    "print_answers",
    "print_stream",
    "show_counts",
    "stdout_to_stderr",
]

Item = TypeVar("Item")
_NUMBER = re.compile(r"\d[\d,.]*")
_SHOWN = 3
"""Errors that differ in numbers only, of which each has a warning."""


class AnswerCounts:
    """Counts answers and collects their errors, printing warnings of them unless ``quiet``.

    Of the errors that differ in numbers only, the first three have a warning each, and the others one together.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.total = 0
        self.errors: list[ZooError] = []
        self._alike: Counter[str] = Counter()

    def watch(self, answers: Iterator[Answer]) -> Iterator[Answer]:
        """Pass answers on."""
        for answer in stdout_to_stderr(answers):
            self.total += 1
            if answer.error is not None:
                self.errors.append(answer.error)
                kind = _NUMBER.sub("N", answer.error.what)
                self._alike[kind] += 1
                if not self.quiet and self._alike[kind] <= _SHOWN:
                    message("warning", answer.error.command_line)
            yield answer
        for kind, count in self._alike.items():
            if not self.quiet and count > _SHOWN:
                message("warning", f"{count - _SHOWN:,} more inputs failed likewise: {kind}")

    @property
    def summary(self) -> str:
        """The number of failures, for messages."""
        return f"{len(self.errors)} of {self.total} inputs failed"


def show_counts(answers: Iterator[Answer], earlier: int, total: int | None) -> Iterator[Answer]:
    """Pass answers on, showing progress, including the results of an earlier run."""
    with show_progress("running") as show:
        if show is not None:
            show(earlier, total)
        for number, answer in enumerate(answers, earlier + 1):
            if show is not None:
                show(number, total)
            yield answer


def stdout_to_stderr(items: Iterator[Item]) -> Iterator[Item]:
    """Pass items on, redirecting what a plugin prints meanwhile to stderr, since stdout is for results."""
    while True:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def described(answer: Answer, is_row: bool = False) -> dict[str, Any]:
    """Return an answer for JSON: the text, if there is one, and the result or the error.

    ``is_row`` says that the input is the row of a table, whose id and other columns come first.
    """
    from zoo_runtime.files.results import plain, plain_id
    from zoo_runtime.running.inputs import texts_of

    # Invalid UTF-8 bytes become lone surrogates, which cannot be printed.
    texts = [text.encode("utf-8", "backslashreplace").decode() for text in texts_of(answer.input)]
    text = texts if len(texts) > 1 else next(iter(texts), None)
    found = {"text": text, **(plain(answer.result) if answer.error is None else {"error": answer.error.command_line})}
    if not is_row:
        return found
    kept = {
        name: value
        for name, value in answer.columns.items()
        if not (has_bytes(value) or (name, value) in (("id", answer.id), ("text", found["text"])))
    }
    id = {"id": plain_id(answer.id)}
    return id | join_columns(plain(kept), found | id)


def print_answers(session: Session, runner: Runner[Any], answers: Iterator[Answer], *, together: bool) -> None:
    """Print human-readable lines, for all answers at once if ``together``, so that they can be compared."""
    sound = (answer for answer in answers if answer.error is None)
    for group in [list(sound)] if together else ([answer] for answer in sound):
        for line in stdout_to_stderr(session.show(runner, group)) if group else ():
            echo(line)


def open_stream(
    session: Session, runner: Runner[Any], text: Any, adapter: str | None, *, required: bool
) -> Iterator[str] | None:
    """Return the streamed pieces, or None if the task cannot stream; raise instead if streaming is ``required``."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return session.pieces(runner, text, adapter)
    except UsageError:
        if required:
            raise
        return None


def print_stream(session: Session, runner: Runner[Any], text: str, pieces: Iterator[str]) -> None:
    """Print a text as it is generated, preceded by its prompt if it continues one."""
    with contextlib.redirect_stdout(sys.stderr):
        lead = session.lead(runner, text)
    try:
        echo(lead, nl=False)
        for piece in stdout_to_stderr(pieces):
            echo(piece, nl=False)
    finally:
        echo()
