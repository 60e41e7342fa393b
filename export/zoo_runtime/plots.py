"""Plots of answers: the probabilities that a task gives for its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zoo.errors import UsageError
from zoo.plots import Plot, distributions
from zoo_runtime.running.inputs import Answer
from zoo_runtime.running.runner import Runner

if TYPE_CHECKING:
    from zoo_runtime.running.session import Session

__all__ = ["check_plottable", "draw_answers", "plot_answers"]


def plot_answers(session: Session, inputs: Sequence[Any], *, task: str | None = None, **options: Any) -> Plot:
    """Plot the probabilities that a task gives for each input, as ``next-token`` does for the token after a text.

    Args:
        session: the open model.
        inputs: at most 12 inputs.
        task: a task to run instead of the model's own.
        options: options of the task, such as ``top_k``.

    Raises:
        UsageError: the task gives no probabilities, or matplotlib is not installed.
        ArtifactError: an input cannot be read.
    """
    runner = session.runner(task, **options)
    check_plottable(runner, task or session.task)
    answers = list(session.answer(runner, (Answer(number, value) for number, value in enumerate(inputs, 1))))
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return draw_answers(session, runner, answers, task or session.task)


def draw_answers(session: Session, runner: Runner[Any], answers: Sequence[Answer], task: str) -> Plot:
    """Plot answers that a runner has given."""
    panels = [item for answer in answers for item in runner.distributions(answer)]
    variant = f" ({session.export.variant})" if session.export.variant else ""
    return distributions(f"{session.stored.description['name']}{variant}: probabilities by {task}", panels)


def check_plottable(runner: Runner[Any], task: str) -> None:
    """Raise :class:`UsageError` unless the task gives probabilities."""
    if type(runner).distributions is Runner.distributions:
        raise UsageError(
            f"the task {task} gives no probabilities", runner.session.path, "choose another: --task next-token"
        )
