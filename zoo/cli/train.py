"""``zoo train``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zoo.artifact import check_model_target
from zoo.cli.completion import (
    complete_models,
    complete_offers,
    complete_recipes,
    complete_tasks,
    complete_training_settings,
)
from zoo.cli.options import PATH, DataCommand, force_option, is_quiet, json_option, option, quiet_option
from zoo.cli.output import echo, message
from zoo.cli.progress import ProgressBar, show_progress
from zoo.cli.report import emit_json, say
from zoo.errors import UsageError
from zoo.registry.recipes import find_recipe
from zoo.training.curve import MISSING
from zoo.training.plan import make_plan
from zoo.training.settings import CHANGEABLE, LowRankSettings, TrainingSettings

if TYPE_CHECKING:
    from zoo.training.cache import Facts
    from zoo.training.loop import Step
    from zoo.training.progress import Evaluation
    from zoo.training.run import Run

_COLUMNS = ("text", "pair", "negative", "target", "image", "label")


def column_options(command: Any) -> Any:
    """Add an option for the name of each column."""
    for role in reversed(_COLUMNS):
        text = f"The column of the data that holds the {role}."
        command = option(f"--{role}-column", section="Data", metavar="NAME", help=text)(command)
    return command


def given_columns(options: Mapping[str, str | None]) -> dict[str, str]:
    """Return the names of columns that were given, by role."""
    return {role: name for role in _COLUMNS if (name := options.get(f"{role}_column")) is not None}


@click.command(
    "train",
    cls=DataCommand,
    examples=(
        "zoo train gpt-tiny --data notes.txt -o notes --max-steps 30",
        "zoo train transformer-tiny --recipe copy-task -o copier",
    ),
    page="howto/train.md",
)
@click.argument("model", shell_complete=complete_models)
@option("--data", section="Data", metavar="PATH", multiple=True, help="Files, directories, or the name of a data set.")
@option("--validation", section="Data", metavar="PATH", multiple=True, help="The same, for evaluations.")
@column_options
@option("--skip-bad", section="Data", metavar="N", type=click.IntRange(0), default=0, help="Unusable rows to skip.")
@option(
    "--task",
    shell_complete=complete_tasks,
    section="Model",
    metavar="NAME",
    help="Train the model of a directory for another task.",
)
@option(
    "--set", "settings", shell_complete=complete_training_settings, section="Model", metavar="KEY=VALUE", multiple=True,
    help="A setting of training, of the objective or of the model's configuration, such as learning_rate=3e-4.",
)  # fmt: skip
@option("--tokenizer", section="Model", metavar="FILE", help="A tokenizer.json or a vocabulary to attach, or 'bytes'.")
@option(
    "--objective",
    shell_complete=complete_offers("objectives"),
    section="Training",
    metavar="NAME",
    help="The objective; by default the first for the task.",
)
@option(
    "--recipe",
    shell_complete=complete_recipes,
    section="Training",
    metavar="NAME",
    help="Data and settings: see zoo why --recipe NAME.",
)
@option(
    "--lora", section="Training", metavar="KEY=VALUE,...",
    help="Train low-rank adapters of a model directory: rank, alpha, dropout, targets; e.g. rank=8,targets=*.query.",
)  # fmt: skip
@option("--max-steps", section="Training", metavar="N", type=click.IntRange(1), help="Number of steps.")
@option("--epochs", section="Training", metavar="N", type=float, help="Passes over the data; 3 by default.")
@option("--seed", section="Training", metavar="N", type=click.IntRange(0, 2**63 - 1), help="Random seed.")
@option("--tracker", "trackers", shell_complete=complete_offers("trackers"), section="Training", metavar="NAME",
        multiple=True, help="Send metrics to a tracker: tensorboard, trackio, wandb, or one of a plugin.")  # fmt: skip
@option("--fsdp/--no-fsdp", section="Training", default=None, help="Divide the weights among torchrun's processes.")
@option("--resume", section="Training", is_flag=True, help="Continue the unfinished training in the directory MODEL.")
@click.option("-o", "--output", type=PATH, metavar="DIR", help="Directory to create.")
@force_option("Replace an existing model directory.")
@json_option
@quiet_option
def command(
    model: str,
    data: tuple[str, ...],
    validation: tuple[str, ...],
    skip_bad: int,
    task: str | None,
    settings: tuple[str, ...],
    tokenizer: str | None,
    objective: str | None,
    recipe: str | None,
    lora: str | None,
    max_steps: int | None,
    epochs: float | None,
    seed: int | None,
    trackers: tuple[str, ...],
    fsdp: bool | None,
    resume: bool,
    output: Path | None,
    force: bool,
    as_json: bool,
    **columns: str | None,
) -> None:
    """Train MODEL, a preset or a model directory, and write a model directory.

    A run that ends early, by an error, a signal or a power failure, leaves its last checkpoint in the directory, which
    --resume continues to the same weights.
    """
    plan = None
    if resume:
        _refuse_with_resume()
    else:
        if output is None:
            raise UsageError("no directory to write", "--output", "add -o DIR")
        if is_first():
            check_model_target(output, force=force)
        plan = make_plan(
            model,
            recipe=find_recipe(recipe) if recipe is not None else None,
            texts=settings,
            settings={"max_steps": max_steps, "epochs": epochs, "seed": seed, "fsdp": fsdp},
            task=task,
            tokenizer=tokenizer,
            objective=objective,
            data=data,
            validation=validation,
            columns=given_columns(columns),
            skip_bad=skip_bad,
            lora=LowRankSettings.parse(lora, "--lora") if lora is not None else None,
            trackers=trackers,
        )
    from zoo.training import launch
    from zoo.training.processes import joined

    run: Run | None = None
    try:
        with joined() as processes:
            with show_progress("reading data") as progress:
                if plan is None or output is None:
                    run = launch.resume(
                        Path(model),
                        data=data,
                        validation=validation,
                        settings=_changed_settings(settings, fsdp),
                        processes=processes,
                        progress=progress,
                    )
                    if is_first() and not is_quiet():
                        echo("; ".join((f"continuing at step {run.trainer.done:,}", *run.plan.changes)), err=True)
                else:
                    run = launch.start(plan, output, force=force, processes=processes, progress=progress)
            missing = (MISSING,) if find_spec("matplotlib") is None else ()
            for note in (*run.notes, *missing) if is_first() and not is_quiet() else ():
                message("note", note)
            if is_first():
                limit = run.trainer.criterion.text_limit
                show_facts(run.data.facts, limit, "--set max_length=N sets another length, up to the model's positions")
            with show_progress("", detailed=True) if is_first() else nullcontext() as bar:
                reporter = Reporter(run.trainer.done, run.trainer.steps, bar)
                outcome = run.train(reporter, reporter.watch)
    except KeyboardInterrupt:
        if is_first():
            _tell_saved(run, output)
        raise
    if not is_first():
        return
    evaluation = outcome.evaluation
    if as_json:
        result = {"directory": str(outcome.directory), "steps": outcome.steps, "kept_step": outcome.kept}
        scores = (
            None
            if evaluation is None
            else {"loss": evaluation.loss, "accuracy": evaluation.accuracy, **evaluation.terms}
        )
        data_facts = {"rows": asdict(run.data.facts), "classes": run.classes}
        emit_json("train", {**result, "loss": outcome.loss, "evaluation": scores, **data_facts})
        return
    text = f"{outcome.directory}: {outcome.steps:,} steps, loss {outcome.loss:.4f}"
    if evaluation is not None:
        text += f"; on data for evaluation, at step {outcome.kept:,}: {_evaluation_text(evaluation)}"
    say(text)


def show_facts(facts: Facts, limit: int | None, remedy: str) -> None:
    """Print on one line how many rows were truncated, left out, and divided, if there are any.

    Args:
        facts: what was found when rows were read.
        limit: the number of tokens to which they were truncated.
        remedy: what to do about truncated rows.
    """
    why = f" ({remedy})" if remedy else ""
    parts = [f"{facts.truncated:,} truncated to {limit} tokens{why}"] if facts.truncated else []
    parts += [f"{facts.bad:,} left out"] if facts.bad else []
    if facts.noted.get("windows", 0) > facts.rows - facts.bad:
        parts += [f"{count:,} {name}" for name, count in facts.noted.items() if count]
    if parts:
        echo(f"of {facts.rows:,} rows: {', '.join(parts)}", err=True)


def _tell_saved(run: Run | None, output: Path | None) -> None:
    """Say how a run that a signal has ended can be continued."""
    if run is not None and run.saved:
        echo(f"saved at step {run.saved:,}: zoo train {run.directory} --resume", err=True)
    elif output is not None and (run is None or run.saved == 0):
        echo("no step was finished, so nothing is saved", err=True)


def is_first() -> bool:
    """Return whether this is the process that writes and reports, of those that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


_RESUMABLE = ("model", "resume", "data", "validation", "settings", "fsdp", "as_json", "quiet")
"""Parameters that may be given with ``--resume``."""


def _refuse_with_resume() -> None:
    """Raise :class:`UsageError` for other options with ``--resume``: the run is described in its directory."""
    context = click.get_current_context()
    for parameter in context.command.params:
        is_given = context.get_parameter_source(str(parameter.name)) is click.core.ParameterSource.COMMANDLINE
        if is_given and parameter.name not in _RESUMABLE:
            raise UsageError("cannot be changed when training continues", parameter.opts[-1], "leave it out")


def _changed_settings(texts: Sequence[str], fsdp: bool | None) -> dict[str, Any]:
    """Return the settings of training that are given with ``--resume``."""
    for text in texts:
        key = text.partition("=")[0]
        if key not in TrainingSettings.field_types():
            remedy = f"only these can: {', '.join(CHANGEABLE)}"
            raise UsageError(f"{key} cannot be changed when training continues", f"--set {text}", remedy)
    changes = TrainingSettings.parse_settings(texts, "--set")
    return changes if fsdp is None else {**changes, "fsdp": fsdp}


def _evaluation_text(found: Evaluation) -> str:
    scores: dict[str, float | None] = {"loss": found.loss, **(found.terms or {"accuracy": found.accuracy})}
    return ", ".join(f"{name} {value:.4f}" for name, value in scores.items() if value is not None)


class Reporter:
    """Shows steps: on a terminal in a bar, and those with an evaluation, or all without a terminal, on lines.

    Args:
        done: steps of earlier processes.
        steps: steps of the whole run.
        bar: the bar, if there is one.
    """

    def __init__(self, done: int, steps: int, bar: ProgressBar | None) -> None:
        self._done = done
        self._steps = steps
        self._bar = bar
        self._started = time.monotonic()
        if bar is not None:
            bar.describe("training")
            bar(done, steps)

    def watch(self, step: Step) -> None:
        """Show the number, the loss and the learning rate of a step in the bar."""
        if self._bar is not None:
            self._bar.describe(f"loss {step.loss:.4f}, rate {step.learning_rate:.1e}")
            self._bar(step.number, self._steps)

    def __call__(self, run: Run, step: Step, evaluation: Evaluation | None) -> None:
        """Print a line for a recorded step."""
        if is_quiet() or not is_first() or (self._bar is not None and evaluation is None):
            return
        text = f"step {step.number:,} of {self._steps:,}: loss {step.loss:.4f}"
        text += f", {step.targets / step.seconds:,.0f} targets/s, {step.utilization:.0%} of peak"
        if evaluation is not None:
            text += f"; evaluation: {_evaluation_text(evaluation)}"
        elif step.number < self._steps:
            elapsed = time.monotonic() - self._started
            left = round(elapsed / (step.number - self._done) * (self._steps - step.number))
            text += f", {timedelta(seconds=left)} left"
        echo(text, err=True)
