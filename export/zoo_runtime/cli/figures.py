"""The figure of ``zoo run``: the probabilities in answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.cli.options import is_quiet
from zoo.cli.output import echo
from zoo.errors import UsageError
from zoo.plots.plot import check_figure

if TYPE_CHECKING:
    from zoo_runtime import Answer, Runner, Session

__all__ = ["AnswerFigure"]


class AnswerFigure:
    """Collects answers, and plots them.

    Args:
        target: the file, which must not exist unless ``force``.
        count: the number of inputs on the command line.
        force: whether to replace the file.
    """

    def __init__(self, target: Path, count: int, *, force: bool) -> None:
        from zoo.plots.bars import MOST

        check_figure(target, force=force)
        if not 0 < count <= MOST:
            problem = f"a figure shows 1 to {MOST} inputs of the command line, got {count}"
            raise UsageError(problem, f"--figure {target}", "give them as TEXT")
        self._target = target
        self._force = force
        self._answers: list[Answer] = []

    def watch(self, answers: Iterator[Answer]) -> Iterator[Answer]:
        """Pass answers on."""
        for answer in answers:
            if answer.error is None:
                self._answers.append(answer)
            yield answer

    def write(self, session: Session, runner: Runner[Any], task: str) -> None:
        """Write the plot; nothing if no input has an answer."""
        from zoo_runtime.plots import draw_answers

        if self._answers:
            plot = draw_answers(session, runner, self._answers, task)
            plot.write(self._target, force=self._force)
            if not is_quiet():
                echo(f"{self._target}: {plot.title}", err=True)
