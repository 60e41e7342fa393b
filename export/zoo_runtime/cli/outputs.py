"""Files of results of ``zoo run``: checked, opened, written and summarised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.cli.options import is_quiet
from zoo.cli.output import echo, message
from zoo.cli.progress import is_shown
from zoo.errors import UsageError
from zoo.storage import is_same_file
from zoo.tables import PARQUET
from zoo_runtime.cli.flags import InputFlags, OutputFlags, TaskFlags

if TYPE_CHECKING:
    from zoo_runtime import Answer, Runner, Session
    from zoo_runtime.files.augmented import AugmentedRows
    from zoo_runtime.files.results import Results

__all__ = ["check_columns", "check_outputs", "keep_record", "open_results", "show_summary", "write_answers"]


def check_outputs(flags: OutputFlags, input_file: str | None) -> None:
    """Raise :class:`UsageError` for outputs that exclude each other, or would replace the input."""
    output = flags.output
    rows = flags.training_data
    if rows is not None and (output is not None or flags.as_json or flags.resume):
        raise UsageError("gives the only output", "--training-data", "leave out --output, --json and --resume")
    target = rows or output
    if (flags.resume and target is None) or (flags.force and target is flags.figure is flags.maps is None):
        raise UsageError("nothing to continue or replace", "--resume, --force", "name a file with --output")
    if output is not None and flags.as_json:
        raise UsageError("cannot write results to both a file and stdout", f"--output {output}", "leave out --json")
    if input_file is not None and target is not None and is_same_file(Path(input_file), target):
        option = f"--output {output}" if output is not None else f"--training-data {rows}"
        raise UsageError("input and output are the same file", option, "choose another name")


def open_results(flags: OutputFlags, inputs: InputFlags) -> Results | AugmentedRows | None:
    """Open the file that answers are written to, or return None if they are printed."""
    target = flags.training_data or flags.output
    if target is None:
        return None
    from zoo_runtime.files.augmented import AugmentedRows
    from zoo_runtime.files.results import Results
    from zoo_runtime.files.rows import column_types, is_table

    types = column_types(inputs.input_file)
    if flags.training_data is not None:
        return AugmentedRows(target, inputs.main_column, force=flags.force, types=types)
    return Results(
        target, force=flags.force, resume=flags.resume, types=types, keep=is_table(inputs.input_file),
        id_column=inputs.id_column,
    )  # fmt: skip


def keep_record(
    results: Results | AugmentedRows | None,
    directory: Path,
    inputs: InputFlags,
    task: TaskFlags,
    session_options: Mapping[str, Any],
) -> None:
    """Record the model and options of a run that can be resumed, and check the record of an earlier run."""
    if results is None:
        return
    from zoo_runtime.cli.run_batch import plan_of
    from zoo_runtime.files.results import Results
    from zoo_runtime.files.run_record import RunRecord

    if not isinstance(results, Results) or not results.is_resumable:
        return
    plan = plan_of(
        directory, str(results.path), {**session_options, "chat": inputs.chat}, task=task.task, settings=task.settings,
        options=task.options, column=inputs.main_column, id_column=inputs.id_column, pair_column=inputs.pair_column,
        adapter=",".join(inputs.adapters) or None, batch_size=task.batch_size,
    )  # fmt: skip
    results.record = RunRecord(results.path, plan.identity())
    if results.done:
        results.record.check()


def check_columns(
    results: Results | AugmentedRows | None, rows: Iterator[Answer], inputs: InputFlags
) -> Iterator[Answer]:
    """Return the rows, after a check that the columns to be kept of the first ones fit a parquet file.

    The columns of the inputs themselves are not checked: rows whose input has a wrong type fail, and are not written.

    Raises :class:`StorageError` if they do not fit.
    """
    from zoo_runtime.files.rows import is_table

    if results is None or results.path.suffix.lower() != PARQUET or not is_table(inputs.input_file):
        return rows
    from zoo_runtime.files.parquet_types import BATCH, check_rows

    first = list(islice(rows, BATCH))
    read = [row.columns for row in first if row.error is None]
    names = dict.fromkeys(name for columns in read for name in columns)
    kept = [name for name in names if name not in (inputs.main_column, inputs.pair_column)]
    check_rows(({name: columns.get(name) for name in kept} for columns in read), results.types, results.path)
    return chain(first, rows)


def write_answers(
    results: Results | AugmentedRows,
    session: Session,
    runner: Runner[Any],
    answers: Iterator[Answer],
) -> int:
    """Write answers, and in parquet what describes them; return their number."""
    from zoo_runtime.files.results import Results
    from zoo_runtime.files.vector_search import source

    if not isinstance(results, Results):
        return _write_rows(results, answers)
    results.metadata = source(session.stored)
    written = 0
    for answer in answers:
        if answer.error is None:
            results.write(answer.id, answer.result, answer.columns, answer.input)
            written += 1
    if results.needs_example:
        results.describe(session.example(runner))
    return written


def _write_rows(rows: AugmentedRows, answers: Iterator[Answer]) -> int:
    """Write rows for training, those of failed inputs too, as long as they have a text."""
    written = 0
    for answer in answers:
        if answer.error is None or rows.column in answer.columns:
            rows.write(answer.id, answer.result, answer.columns)
            written += 1
    return written


def show_summary(results: Results | AugmentedRows, written: int, earlier: int, failures: str) -> None:
    """Print remarks on columns, and how many rows were written, kept from an earlier run, and failed."""
    from zoo_runtime.files.augmented import AugmentedRows

    if isinstance(results, AugmentedRows):
        variants = "variant" if results.empty == 1 else "variants"
        lost = f", {results.empty} empty {variants} left out" if results.empty else ""
        if not is_quiet():
            echo(f"{results.path}: {results.rows} rows of {written} inputs{lost}", err=True)
        return
    for note in results.notes if not is_quiet() else ():
        message("note", note)
    if is_shown():
        resumed = f", {earlier} kept from an earlier run" if earlier else ""
        echo(f"{results.path}: {written} results written{resumed}, {failures}", err=True)
