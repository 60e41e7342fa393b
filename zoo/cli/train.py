"""``zoo train``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zoo.artifact import check_model_target
from zoo.cli.options import Command, force_option, is_quiet, json_option, option, quiet_option
from zoo.cli.progress import show_progress
from zoo.cli.report import emit_json, say
from zoo.config import Settings
from zoo.errors import UsageError, nearest
from zoo.training.plan import Plan
from zoo.training.settings import TrainingSettings

if TYPE_CHECKING:
    from zoo.training.loop import Evaluation, Step
    from zoo.training.run import Run

_COLUMNS = ("text", "pair", "target", "label")


def _column(role: str) -> Callable[[Any], Any]:
    return option(
        f"--{role}-column", section="Data", metavar="NAME", help=f"The column of the data that holds the {role}."
    )


@click.command("train", cls=Command)
@click.argument("model")
@option("--data", section="Data", metavar="PATH", multiple=True, help="Files, directories, or the name of a data set.")
@option("--validation", section="Data", metavar="PATH", multiple=True, help="The same, for evaluations.")
@_column("text")
@_column("pair")
@_column("target")
@_column("label")
@option("--skip-bad", section="Data", metavar="N", type=click.IntRange(0), default=0, help="Unusable rows to skip.")
@option("--task", section="Model", metavar="NAME", help="Train the model of a directory for another task.")
@option("--set", "values", section="Model", metavar="KEY=VALUE", multiple=True, help="Change a configuration value.")
@option("--tokenizer", section="Model", metavar="FILE", help="A tokenizer.json or a vocabulary to attach, or 'bytes'.")
@option("--objective", section="Training", metavar="NAME", help="What to learn; by default what the task says.")
@option(
    "--option", "options", section="Training", metavar="KEY=VALUE", multiple=True,
    help="A setting of training or of the objective, such as learning_rate=3e-4.",
)  # fmt: skip
@option("--max-steps", section="Training", metavar="N", type=click.IntRange(1), help="Number of steps.")
@option("--epochs", section="Training", metavar="N", type=float, help="Passes over the data; 3 by default.")
@option("--seed", section="Training", metavar="N", type=click.IntRange(0, 2**63 - 1), help="Random seed.")
@option("--resume", section="Training", is_flag=True, help="Continue the unfinished training in the directory MODEL.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Directory to create.")
@force_option("Replace an existing model directory.")
@json_option
@quiet_option
def command(
    model: str,
    data: tuple[str, ...],
    validation: tuple[str, ...],
    skip_bad: int,
    task: str | None,
    values: tuple[str, ...],
    tokenizer: str | None,
    objective: str | None,
    options: tuple[str, ...],
    max_steps: int | None,
    epochs: float | None,
    seed: int | None,
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
    if resume:
        _refuse_with_resume()
        from zoo.training.run import resume as resume_run

        with show_progress("reading data") as progress:
            run = resume_run(Path(model), progress=progress)
    else:
        if not data:
            raise UsageError("no data", "--data", "name files, directories, or a data set")
        if output is None:
            raise UsageError("no directory to write", "--output", "add -o DIR")
        check_model_target(output, force=force)
        named = {role: name for role in _COLUMNS if (name := columns[f"{role}_column"]) is not None}
        plan = _plan(model, data, validation, named, skip_bad, task, values, tokenizer, objective, options,
                     {"max_steps": max_steps, "epochs": epochs, "seed": seed})  # fmt: skip
        from zoo.training.run import start

        with show_progress("reading data") as progress:
            run = start(plan, output, force=force, progress=progress)
    facts = run.data.facts
    if facts.truncated or facts.bad:
        click.echo(f"{facts.rows:,} rows: {facts.truncated:,} truncated, {facts.bad:,} left out", err=True)
    with show_progress("training") as progress:
        outcome = run.train(lambda run, step, found: _report(run, step, found, progress))
    found = outcome.evaluation
    if as_json:
        result = {"directory": str(outcome.directory), "steps": outcome.steps, "kept_step": outcome.kept}
        scores = None if found is None else {"loss": found.loss, "accuracy": found.accuracy}
        emit_json("train", {**result, "loss": outcome.loss, "evaluation": scores})
        return
    text = f"{outcome.directory}: {outcome.steps:,} steps, loss {outcome.loss:.4f}"
    if found is not None:
        text += f"; on data for evaluation, at step {outcome.kept:,}: {_evaluation_text(found)}"
    say(text)


def _refuse_with_resume() -> None:
    """Raise :class:`UsageError` for other options with ``--resume``: the run is described in its directory."""
    context = click.get_current_context()
    given = [
        name for name in context.params
        if name not in ("model", "resume", "as_json")
        and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]  # fmt: skip
    if given:
        raise UsageError("cannot be changed when training continues", f"--{given[0].replace('_', '-')}", "leave it out")


def _plan(
    model: str,
    data: tuple[str, ...],
    validation: tuple[str, ...],
    columns: dict[str, str],
    skip_bad: int,
    task: str | None,
    values: tuple[str, ...],
    tokenizer: str | None,
    objective: str | None,
    options: tuple[str, ...],
    chosen: dict[str, Any],
) -> Plan:
    """Return the plan of the options. The objective is found by the task of the model."""
    from zoo import plugins
    from zoo.cli.model_argument import find_model
    from zoo.registry import load_reference

    spec, _ = find_model(model, values if not Path(model).is_dir() else ())
    plugin, found = plugins.active().objective(objective, task or spec.task)
    own = load_reference(found.options, plugin) if found.options else Settings
    texts: dict[bool, list[str]] = {True: [], False: []}
    for text in options:
        key = text.partition("=")[0]
        if "=" in text and key not in TrainingSettings.field_types() and key not in own.field_types():
            choices = {*TrainingSettings.field_types(), *own.field_types()}
            raise UsageError(f"unknown key {key!r}", f"--option {text}", nearest(key, choices))
        texts[key in own.field_types()].append(text)
    settings = TrainingSettings.parse_settings(texts[False], "--option")
    settings |= {key: value for key, value in chosen.items() if value is not None}
    return Plan(
        model=model,
        values=values,
        task=task,
        tokenizer=tokenizer,
        objective=found.name,
        options=own.parse_settings(texts[True], "--option"),
        data=data,
        validation=validation,
        columns=columns,
        skip_bad=skip_bad,
        settings=TrainingSettings.from_dict(settings, "--option"),
    )


def _evaluation_text(found: Evaluation) -> str:
    return f"loss {found.loss:.4f}" + (f", accuracy {found.accuracy:.4f}" if found.accuracy is not None else "")


def _report(run: Run, step: Step, evaluation: Evaluation | None, progress: Any) -> None:
    """Show a step: in the progress bar, and on a line of its own after an evaluation or without a terminal."""
    if progress is not None:
        progress(step.number, run.trainer.steps)
    if is_quiet() or (progress is not None and evaluation is None):
        return
    text = f"step {step.number:,} of {run.trainer.steps:,}: loss {step.loss:.4f}"
    text += f", {step.targets / step.seconds:,.0f} targets/s"
    if evaluation is not None:
        text += f"; evaluation: {_evaluation_text(evaluation)}"
    click.echo(text, file=sys.stderr)
