"""``zoo evaluate``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zoo.cli.completion import complete_directories, complete_offers, complete_recipes, complete_variants
from zoo.cli.options import PATH, DataCommand, check_figure_option, is_quiet, json_option, option, quiet_option
from zoo.cli.output import echo, message
from zoo.cli.progress import show_progress
from zoo.cli.report import columns, emit_json
from zoo.cli.train import column_options, given_columns, show_facts
from zoo.errors import ArtifactError, UsageError, close_to
from zoo.registry.recipes import find_recipe
from zoo.training.plan import as_trained, make_plan
from zoo_export.cli.class_tables import draw_confusions, print_reports, report_facts

if TYPE_CHECKING:
    from zoo_export.evaluate import Scores
    from zoo_export.scoring.reports import ClassReport

Row = dict[str, str | float | None]

METRICS = (
    "loss", "masked_lm_loss", "next_sentence_loss", "perplexity", "accuracy", "masked_lm_accuracy",
    "next_sentence_accuracy", "precision", "recall", "f1", "f1_micro", "f1_macro", "exact_match", "mean_squared_error",
    "pearson", "spearman", "bleu", "chrf", "word_error_rate", "character_error_rate", "unfinished",
)  # fmt: skip
"""The names of scores, in the order of the table."""

_DEFAULT = "onnx"
"""The name of the default export."""

_OF_LOSS = {"loss", "perplexity", "accuracy", *(f"{name}_{kind}" for name in ("masked_lm", "next_sentence")
                                                for kind in ("loss", "accuracy"))}  # fmt: skip
"""Scores that need no answers."""


@click.command(
    "evaluate",
    cls=DataCommand,
    examples=(
        "zoo evaluate judge --data reviews.jsonl",
        "zoo evaluate copier --recipe copy-task --variant torch",
    ),
    page="howto/train.md",
)
@click.argument("directory", shell_complete=complete_directories, type=PATH, default=Path())
@option("--data", section="Data", metavar="PATH", multiple=True, help="Files, directories, or the name of a data set.")
@option(
    "--recipe",
    shell_complete=complete_recipes,
    section="Data",
    metavar="NAME",
    help="Use the data set of a recipe, and its settings.",
)
@option("--split", section="Data", metavar="NAME", default="test", show_default=True, help="The part of a data set.")
@column_options
@option("--skip-bad", section="Data", metavar="N", type=click.IntRange(0), default=0, help="Unusable rows to skip.")
@option("--limit", section="Data", metavar="N", type=click.IntRange(1), help="Read only the first N rows.")
@option(
    "--objective",
    shell_complete=complete_offers("objectives"),
    section="What",
    metavar="NAME",
    help="Whose loss; by default what the task says.",
)
@option(
    "--variant", "variants", shell_complete=complete_variants, section="What", metavar="NAME", multiple=True,
    help="Only this export, 'onnx' for the default one, or 'torch' for the PyTorch model.",
)  # fmt: skip
@option(
    "--metric", "metrics", section="What", metavar="NAME", multiple=True,
    help="Show only these scores, such as bleu,chrf. May be repeated.",
)  # fmt: skip
@option("--truncate/--no-truncate", section="Answers", default=None,
        help="Truncate long texts, and count them.  [default: as zoo run]")  # fmt: skip
@option("--max-new-tokens", section="Answers", metavar="N", type=click.IntRange(1),
        help="Longest generated text.  [default: the longest target]")  # fmt: skip
@option("--option", "settings", section="Answers", metavar="KEY=VALUE", multiple=True,
        help="Set any option of the task of zoo run, such as scheme=IOB1 or num_beams=4.")  # fmt: skip
@option("--predictions", section="Files", metavar="FILE", type=PATH,
        help="Write the rows with their targets and answers, to .jsonl, .csv, .tsv or .parquet.")  # fmt: skip
@option("--figure", section="Files", metavar="FILE", type=PATH, help="Plot the confusion matrix: .svg or .png.")
@option("--force", section="Files", is_flag=True, help="Replace existing files.")
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
    metrics: tuple[str, ...],
    truncate: bool | None,
    max_new_tokens: int | None,
    settings: tuple[str, ...],
    predictions: Path | None,
    figure: Path | None,
    force: bool,
    as_json: bool,
    **named: str | None,
) -> None:
    """Score the model in DIRECTORY and its exports on labelled data.

    Loss and accuracy are those of the training objective, given the targets before each one. The other scores are
    computed from the answers of zoo run.
    """
    wanted = _wanted(metrics)
    if force and figure is predictions is None:
        raise UsageError("nothing to replace", "--force", "name a file with --predictions or --figure")
    check_figure_option(figure, force=force, forces_more=True)
    found_recipe = find_recipe(recipe) if recipe is not None else None
    default = make_plan(
        str(directory),
        recipe=found_recipe,
        settings={},
        objective=objective,
        data=data,
        columns=given_columns(named),
        skip_bad=skip_bad,
    )
    plan = as_trained(default, found_recipe)
    changed = [f"{name} {value}" for name, value in plan.options.items() if value != default.options[name]]
    if plan.settings.max_length != default.settings.max_length:
        changed.append(f"max_length {plan.settings.max_length}")
    if changed and not is_quiet():
        message("note", f"options as in the model's training: {', '.join(changed)}")
    from zoo_export.evaluate import evaluate
    from zoo_export.scoring.predictions import PredictionFile

    file = None if predictions is None else PredictionFile(predictions, plan.data, force=force)
    answers = not wanted or not set(wanted) <= _OF_LOSS or file is not None or figure is not None
    options = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    names = ["" if name == _DEFAULT else name for name in variants]
    with show_progress("evaluating") as progress, _each_warning_once():
        evaluating = evaluate(
            directory, plan, split=split, variants=names, limit=limit, truncate=truncate, options=options,
            texts=settings, answers=answers, predictions=file is not None, confusion=figure is not None,
            progress=progress,
        )  # fmt: skip
        show_facts(evaluating.facts, evaluating.limit, evaluating.remedy)
        if evaluating.left_out:
            message("warning", evaluating.left_out)
        if file is not None:
            file.check(evaluating.rows)
        scores = list(evaluating.scores)
    rows = [_row(item) for item in scores]
    failed = [item for item in scores if item.errors]
    if wanted and not failed:
        rows = _choose(rows, wanted, directory)
    for problem, having in _by_text({_name(item): item.problems for item in scores}).items():
        message("warning", f"{', '.join(having)}: {problem}")
    for note in dict.fromkeys(note for item in scores for note in item.notes) if not is_quiet() else ():
        message("note", note)
    reports = {_name(item): item.report for item in scores if item.report is not None}
    if as_json:
        facts = [{"variant": name, **report_facts(report)} for name, report in reports.items()]
        emit_json("evaluate", {"directory": str(directory), "scores": rows, "classes": facts})
    else:
        _print(rows, {} if wanted else reports)
    if figure is not None and not failed:
        draw_confusions(directory.resolve().name, reports, figure, force=force)
    if file is not None:
        count = file.write(evaluating.rows, {_name(item): item.predictions for item in scores})
        if not is_quiet():
            echo(f"{file.path}: {count:,} rows", err=True)
    if failed:
        counts = ", ".join(f"{len(item.errors):,} of {_name(item)}" for item in failed)
        raise ArtifactError(f"rows without an answer: {counts}: {failed[0].errors[0].command_line}", directory)


def _wanted(metrics: Sequence[str]) -> list[str]:
    """Return the chosen metrics. Raises :class:`UsageError` for one that does not exist."""
    wanted = [name.strip() for text in metrics for name in text.split(",")]
    for name in wanted:
        if name not in METRICS:
            close = close_to(name, METRICS)
            remedy = f"{f'{close} ' if close else ''}known: {', '.join(METRICS)}"
            raise UsageError(f"no metric {name!r}", f"--metric {name}", remedy)
    return wanted


def _print(rows: Sequence[Row], reports: Mapping[str, ClassReport]) -> None:
    """Print the scores and, unless the command was given ``--quiet``, those of classes."""
    if rows:
        names = list(dict.fromkeys(name for row in rows for name in row))
        columns([names, *([_text(row.get(name)) for name in names] for row in rows)])
    if not is_quiet():
        print_reports(reports)


@contextmanager
def _each_warning_once() -> Iterator[None]:
    """Show equal warnings, such as one for each variant, only once."""
    show, seen = warnings.showwarning, set[str]()

    def show_new(message: Warning | str, *rest: Any, **options: Any) -> None:
        if str(message) not in seen:
            seen.add(str(message))
            show(message, *rest, **options)

    with warnings.catch_warnings():
        warnings.showwarning = show_new
        yield


def _by_text(problems: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the variants that have each problem."""
    found: dict[str, list[str]] = {}
    for variant, texts in problems.items():
        for text in texts:
            found.setdefault(text, []).append(variant)
    return found


def _choose(rows: Sequence[Row], wanted: Sequence[str], directory: Path) -> list[Row]:
    """Return the chosen scores of each row that has some. Raises :class:`UsageError` if no row has one of them."""
    for name in wanted:
        if not any(row.get(name) is not None for row in rows):
            defined = [other for other in METRICS if any(row.get(other) is not None for row in rows)]
            raise UsageError(
                f"{name} is not defined for this model and data", directory, f"known: {', '.join(defined)}"
            )
    chosen = [{name: row[name] for name in ("variant", "targets", *wanted) if name in row} for row in rows]
    return [row for row in chosen if len(row) > 2]


def _name(scores: Scores) -> str:
    return scores.variant or _DEFAULT


def _row(scores: Scores) -> Row:
    row: Row = {"variant": _name(scores), "targets": scores.targets, "loss": scores.loss}
    for name in ("masked_lm_loss", "next_sentence_loss"):
        row |= {name: scores.terms[name]} if name in scores.terms else {}
    if scores.perplexity is not None:
        row["perplexity"] = scores.perplexity
    named = {name: value for name, value in scores.terms.items() if name not in row}
    return {**row, **(named or {"accuracy": scores.accuracy}), **scores.answers}


def _text(value: str | float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
