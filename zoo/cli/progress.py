"""Progress bars for long commands, on stderr and only if it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from zoo.cli.options import is_quiet
from zoo.cli.output import is_terminal

if TYPE_CHECKING:
    from rich.progress import Task

__all__ = ["Progress", "is_shown", "show_progress"]

Progress = Callable[[int, int | None], None]
"""Called with the amount done and the total, which is None if unknown."""


def is_shown() -> bool:
    """Return whether progress bars are shown: on a terminal with control sequences, without ``--quiet``."""
    return is_terminal(sys.stderr) and not is_quiet()


@contextmanager
def show_progress(what: str, *, unit: Literal["items", "bytes"] = "items") -> Iterator[Progress | None]:
    """Yield a function that updates a bar with progress, rate and remaining time; None if bars are not shown.

    The bar is indeterminate until the first call, and is removed when the block ends.
    """
    if not is_shown():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(*_columns(unit), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _columns(unit: str) -> list[Any]:
    from rich import progress
    from rich.text import Text

    class Rate(progress.ProgressColumn):
        """Items per second."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.1f}/s", style="progress.data.speed")

    amount = [progress.MofNCompleteColumn(), Rate()]
    if unit == "bytes":
        amount = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
    what = progress.TextColumn("{task.description}")
    return [what, progress.BarColumn(), *amount, progress.TimeElapsedColumn(), progress.TimeRemainingColumn()]
