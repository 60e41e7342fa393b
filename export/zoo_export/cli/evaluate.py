"""``zoo evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zoo.cli.options import Command, json_option, option, quiet_option
from zoo.cli.progress import show_progress
from zoo.cli.report import columns, emit_json
from zoo.cli.train import column_options, given_columns
from zoo.registry.recipes import find_recipe
from zoo.training.plan import make_plan

if TYPE_CHECKING:
    from zoo_export.evaluate import Scores


@click.command("evaluate", cls=Command)
@click.argument("directory", type=click.Path(path_type=Path), default=Path())
@option("--data", section="Data", metavar="PATH", multiple=True, help="Files, directories, or the name of a data set.")
@option("--recipe", section="Data", metavar="NAME", help="Use the data set of a recipe, and its settings.")
@option("--split", section="Data", metavar="NAME", default="test", show_default=True, help="The part of a data set.")
@column_options
@option("--skip-bad", section="Data", metavar="N", type=click.IntRange(0), default=0, help="Unusable rows to skip.")
@option("--limit", section="Data", metavar="N", type=click.IntRange(1), help="Read only the first N rows.")
@option("--objective", section="What", metavar="NAME", help="Whose loss; by default what the task says.")
@option(
    "--variant", "variants", section="What", metavar="NAME", multiple=True,
    help="Only this export, or 'torch' for the PyTorch model; '' is the default export.",
)  # fmt: skip
@json_option
@quiet_option
def command(
    directory: Path,
    data: tuple[str, ...],
    recipe: str | None,
    split: str,
    skip_bad: int,
    limit: int | None,
    objective: str | None,
    variants: tuple[str, ...],
    as_json: bool,
    **named: str | None,
) -> None:
    """Score the model in DIRECTORY and its exports on labelled data.

    Loss and accuracy are those of the training objective, given the targets before each one. Texts that are generated
    by exports are the answers of zoo run.
    """
    plan = make_plan(
        str(directory),
        recipe=find_recipe(recipe) if recipe is not None else None,
        settings={},
        objective=objective,
        data=data,
        columns=given_columns(named),
        skip_bad=skip_bad,
    )
    from zoo_export.evaluate import evaluate

    with show_progress("evaluating") as progress:
        found = list(evaluate(directory, plan, split=split, variants=variants, limit=limit, progress=progress))
    if as_json:
        emit_json("evaluate", {"directory": str(directory), "scores": [_row(item) for item in found]})
        return
    names = list(dict.fromkeys(name for item in found for name in _row(item)))
    columns([names, *([_text(_row(item).get(name)) for name in names] for item in found)])


def _row(scores: Scores) -> dict[str, str | float | None]:
    known: dict[str, str | float | None] = {"variant": scores.variant or "onnx", "targets": scores.targets}
    return {
        **known,
        "loss": scores.loss,
        "perplexity": scores.perplexity,
        "accuracy": scores.accuracy,
        **scores.answers,
    }


def _text(value: str | float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
