"""Progress bars for long commands, on stderr and only if it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from zoo.cli.options import is_quiet
from zoo.cli.output import above_bar, is_terminal
from zoo.terminal import one_line

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import Task

__all__ = ["Progress", "ProgressBar", "is_shown", "show_progress"]

Progress = Callable[[int, int | None], None]
"""Called with the amount done and the total, which is None if unknown."""


def is_shown() -> bool:
    """Return whether progress bars are shown: on a terminal with control sequences, without ``--quiet``."""
    return is_terminal(sys.stderr) and not is_quiet()


class ProgressBar:
    """Updates a bar on the terminal."""

    def __init__(self, bar: Bar, what: str) -> None:
        self._bar, self._what = bar, what
        self._task = bar.add_task(what, total=None)

    def __call__(self, done: int, total: int | None) -> None:
        """Show the amount done and the total, which is None if unknown."""
        self._bar.update(self._task, completed=done, total=total)

    def describe(self, text: str) -> None:
        """Show what is going on now, in front of the bar."""
        self._bar.update(self._task, description=one_line(f"{self._what}: {text}" if self._what else text))


@contextmanager
def show_progress(
    what: str, *, unit: Literal["items", "bytes"] = "items", detailed: bool = False
) -> Iterator[ProgressBar | None]:
    """Yield a bar with progress, rate and remaining time; None if bars are not shown.

    The bar is indeterminate until the first call, and is removed when the block ends.

    Args:
        what: the text in front of the bar.
        unit: what is counted.
        detailed: leave room for a longer text, which is shortened if the terminal is narrow.
    """
    if not is_shown():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.text import Text

    console = Console(stderr=True)
    with (
        Bar(*_columns(unit, detailed), console=console, transient=True) as bar,
        above_bar(lambda text: console.print(Text.from_ansi(text), soft_wrap=True)),
    ):
        yield ProgressBar(bar, what)


def _columns(unit: str, detailed: bool) -> list[Any]:
    from rich import progress
    from rich.table import Column
    from rich.text import Text

    class Rate(progress.ProgressColumn):
        """Items per second."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.1f}/s", style="progress.data.speed")

    amount = [progress.MofNCompleteColumn(), Rate()]
    if unit == "bytes":
        amount = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
    column = Column(no_wrap=True, overflow="ellipsis")
    what = progress.TextColumn("{task.description}", markup=False, table_column=column)
    if detailed:
        return [what, progress.BarColumn(bar_width=12), *amount, progress.TimeRemainingColumn()]
    return [what, progress.BarColumn(), *amount, progress.TimeElapsedColumn(), progress.TimeRemainingColumn()]
