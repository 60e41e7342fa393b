"""``zoo run``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zoo.artifact import ADAPTERS
from zoo.cli.completion import complete_directories, complete_offers, complete_tasks, complete_variants
from zoo.cli.options import PATH, THREADS, DocumentedCommand, json_option, quiet_answers_option, signed_by_option
from zoo.cli.report import emit_json
from zoo.errors import ArtifactError, UsageError
from zoo.reading import read_text
from zoo.tables import PARQUET
from zoo_runtime.cli.answers import AnswerCounts, described, open_stream, print_answers, print_stream, show_counts
from zoo_runtime.cli.flags import BatchFlags, InputFlags, OutputFlags, TaskFlags, take
from zoo_runtime.cli.inputs import count_inputs, parse_inputs, read_inputs, with_adapters
from zoo_runtime.cli.outputs import check_columns, check_outputs, keep_record, open_results, show_summary, write_answers
from zoo_runtime.files.rows import is_table

if TYPE_CHECKING:
    from zoo_runtime import Runner, Session
    from zoo_runtime.cli.figures import AnswerFigure
    from zoo_runtime.cli.maps import AnswerMaps

GENERATION = (
    ("--max-new-tokens", int, "Maximum new tokens.  [default: 32]"),
    ("--min-new-tokens", int, "Minimum new tokens before an end token."),
    ("--temperature", float, "Sampling temperature; 0 takes the likeliest token.  [default: 0]"),
    ("--top-k", int, "Sample from the K likeliest tokens; for masks, show the K likeliest."),
    ("--top-p", float, "Sample from the likeliest tokens that together have this probability."),
    ("--min-p", float, "Sample from tokens with at least this fraction of the likeliest one's probability."),
    ("--repetition-penalty", float, "Make tokens that are already in the text less likely."),
    ("--seed", int, "Random seed for sampling.  [default: 0]"),
    ("--num-beams", int, "Use beam search with this many beams."),
    ("--draft", str, "Exported model with the same tokenizer that drafts tokens, to need fewer calls."),
    ("--prompt-lookup", int, "Draft this many tokens from earlier places of the text, to need fewer calls."),
    ("--json-schema", PATH, "Generate JSON that satisfies the schema in this file."),
    ("--regex", str, "Generate a text that matches this regular expression."),
    ("--logprobs", int, "Add log-probabilities to results, of each new token and of this many likeliest ones."),
    ("--length-penalty", float, "Divide a beam's log-probability by its length to this power.  [default: 1]"),
)
"""Common task options with flags of their own. All others are set with ``--option``."""


def generation_options(command: Any) -> Any:
    """Add the flags of ``GENERATION`` to a command."""
    for name, kind, text in reversed(GENERATION):
        command = click.option(name, type=kind, help=text)(command)
    return command


@click.command(
    "run",
    cls=DocumentedCommand,
    examples=(
        'zoo run gpt-tiny "hello" --max-new-tokens 8',
        "zoo run judge --input reviews.jsonl -o answers.jsonl",
    ),
    page="howto/run.md",
)
@click.argument("directory", shell_complete=complete_directories, type=PATH)
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option(
    "--input", "input_file", metavar="FILE",
    help="Inputs: lines of text, .jsonl, .json, .csv, .parquet; - for stdin. A folder, pattern or URL is a batch.",
)  # fmt: skip
@click.option("--column", help="Column of inputs in a file with columns.  [default: text; messages with --chat]")
@click.option("--pair-column", metavar="NAME", help="Column of second texts, for tasks on pairs.")
@click.option("--id-column", help="Column of unique ids.  [default: id if present, else row numbers]")
@click.option("-o", "--output", "output_name", metavar="PATH",
              help="Write results to a .jsonl, .csv, .tsv or .parquet file; those of a batch to a folder.")  # fmt: skip
@click.option(
    "--engine",
    shell_complete=complete_offers("engines"),
    metavar="NAME",
    help="Engine that runs the files of a batch: local, ray.  [default: local]",
)
@click.option("--workers", type=click.IntRange(min=1), help="Workers for a batch.  [default: as the cores allow]")
@click.option("--training-data", metavar="FILE", type=PATH,
              help="For augment: write rows of inputs and variants to a .jsonl, .csv or .parquet file.")  # fmt: skip
@click.option("--figure", type=PATH, metavar="FILE",
              help="Plot the probabilities in the answers, as those of --task next-token: .svg or .png.")  # fmt: skip
@click.option("--maps", type=PATH, metavar="FOLDER",
              help="Write the class of each pixel to .png files, or its depth to .npy files.")  # fmt: skip
@click.option("--resume", is_flag=True, help="Continue an interrupted run with the same output, .jsonl or a folder.")
@click.option("--force", is_flag=True, help="Replace an existing output once the new one is complete.")
@click.option("--pair", "pairs", nargs=2, metavar="TEXT TEXT", multiple=True, help="An input of two texts.")
@click.option("--ids", "id_lists", metavar="1,2,3", multiple=True, help="An input as token ids; a pair as 1,2/3,4.")
@click.option("--tokenizer", type=PATH, help="Tokenizer or vocabulary file to use instead.")
@click.option("--special/--no-special", "special_tokens", default=True,
              help="Put the tokenizer's special tokens around texts.  [default: special]")  # fmt: skip
@click.option("--truncate/--no-truncate", default=None,
              help="Truncate long texts, and count them.  [default: for sentence encoders]")  # fmt: skip
@click.option("--chat", is_flag=True, help="Answer chats: texts of the user, or JSON lists of messages.")
@click.option("--image", type=PATH, metavar="FILE", help="Answer each TEXT as a chat about this image.")
@click.option("--task", shell_complete=complete_tasks, help="Task to run.  [default: the model's own]")
@click.option("--option", "settings", metavar="KEY=VALUE", multiple=True, help="Set any option of the task.")
@generation_options
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop string: end before this text. May be repeated.")
@click.option("--logit-bias", multiple=True, metavar="TOKEN=VALUE",
              help="Add a value to the logit of a token, a number or a text. May be repeated.")  # fmt: skip
@click.option(
    "--stream/--no-stream",
    default=None,
    help="Print text as it is generated.  [default: if a single text goes to a terminal]",
)
@click.option("--batch-size", type=click.IntRange(min=1), help="Inputs per batch.")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16", "int8", "int4"]), help="Precision.")
@click.option(
    "--variant",
    shell_complete=complete_variants,
    metavar="NAME",
    help="Export to run.  [default: the best for the provider]",
)
@click.option(
    "--adapter", "adapters", metavar="NAME", multiple=True,
    help="Low-rank adapter to run with, from the variant 'adapters'; once, or once for each TEXT.",
)  # fmt: skip
@click.option(
    "--provider",
    type=click.Choice(["cpu", "cuda", "openvino", "auto"]),
    default="cpu",
    show_default=True,
    help="Execution provider of ONNX Runtime, or OpenVINO, for which there is a profile.",
)
@click.option(
    "--provider-option", "provider_texts", metavar="KEY=VALUE", multiple=True,
    help="Option of ONNX Runtime for the provider, such as gpu_mem_limit for CUDA. May be repeated.",
)  # fmt: skip
@click.option("--threads", type=THREADS, help="Threads per operator.  [default: the number of cores]")
@click.option("--memory", type=click.Choice(["fast", "mapped"]), default="fast", show_default=True,
              help="Repack weights for speed, or use the memory-mapped file.")  # fmt: skip
@click.option("--unverified", is_flag=True, help="Allow an export that is not verified.")
@signed_by_option
@json_option
@quiet_answers_option
def command(directory: Path, signed_by: Path | None, **flags: Any) -> None:
    """Run the exported model in DIRECTORY on each TEXT, or on the lines of stdin, with ONNX Runtime.

    The model's generation_config.json, if any, overrides these defaults.
    """
    if signed_by is not None:
        from zoo.artifact.signature import check_signature

        directory = check_signature(directory, signed_by)
    flags["options"] = _take_options(flags)
    flags["chat"] = flags["chat"] or flags["image"] is not None
    flags["provider_options"] = dict(map(_parse_option, flags.pop("provider_texts")))
    inputs, outputs = take(InputFlags, flags), take(OutputFlags, flags)
    task, batch = take(TaskFlags, flags), take(BatchFlags, flags)
    if inputs.adapters and flags["variant"] is flags["dtype"] is None:
        flags["variant"] = ADAPTERS
    if batch.is_asked(inputs.input_file):
        _run_batch(directory, inputs, outputs, task, batch, flags)
    else:
        _run_inputs(directory, inputs, outputs, task, flags)


def _take_options(flags: dict[str, Any]) -> dict[str, Any]:
    """Remove the task's options from the flags and return those that are set, by name."""
    options = {name: flags.pop(name) for name in (flag[2:].replace("-", "_") for flag, _, _ in GENERATION)}
    options = {name: value for name, value in options.items() if value is not None}
    for name in ("stop", "logit_bias"):
        if values := flags.pop(name):
            options[name] = values
    if "json_schema" in options:
        options["json_schema"] = _read_text(options["json_schema"], "--json-schema")
    return options


def _run_batch(
    directory: Path,
    inputs: InputFlags,
    outputs: OutputFlags,
    task: TaskFlags,
    batch: BatchFlags,
    session: Mapping[str, Any],
) -> None:
    """Run many files. ``session`` are arguments of :func:`zoo_runtime.load_session`."""
    from zoo_runtime.cli.run_batch import check_batch, run_batches

    single = {
        "TEXT": inputs.texts, "--pair": inputs.pairs, "--ids": inputs.id_lists, "--image": inputs.image,
        "--training-data": outputs.training_data, "--figure": outputs.figure, "--maps": outputs.maps,
        "--force": outputs.force, "--json": outputs.as_json, "--stream": outputs.stream,
        "a second --adapter": inputs.adapters[1:],
    }  # fmt: skip
    check_batch(inputs.input_file, outputs.output_name, [name for name, value in single.items() if value])
    run_batches(
        directory, str(inputs.input_file), str(outputs.output_name), engine=batch.engine or "local",
        workers=batch.workers, resume=outputs.resume, session={**session, "chat": inputs.chat}, task=task.task,
        settings=task.settings, options=task.options, column=inputs.main_column, id_column=inputs.id_column,
        pair_column=inputs.pair_column, adapter=next(iter(inputs.adapters), None), batch_size=task.batch_size,
    )  # fmt: skip


def _run_inputs(
    directory: Path, inputs: InputFlags, outputs: OutputFlags, task: TaskFlags, session_options: Mapping[str, Any]
) -> None:
    """Run the inputs of the command line, one file or stdin."""
    from zoo_runtime import load_session
    from zoo_runtime.running.runner import GathersTexts, WritesMaps

    check_outputs(outputs, inputs.input_file)
    results = open_results(outputs, inputs)
    values = parse_inputs(inputs)
    figure, maps = _open_figure(outputs, len(values)), _open_maps(outputs)
    keep = _keeps_columns(inputs, outputs, task)
    rows = read_inputs(values, inputs, keep=keep, resume=outputs.resume)
    with load_session(directory, task=task.task, chat=inputs.chat, **session_options) as session:
        runner = _open_runner(session, directory, inputs, outputs, task)
        keep_record(results, directory, inputs, task, session_options)
        if isinstance(runner, GathersTexts) and inputs.texts and not inputs.chat:
            values = [*runner.gather(inputs.texts), *values[len(inputs.texts) :]]
            rows = read_inputs(values, inputs, keep=keep, resume=outputs.resume)
        rows = with_adapters(rows, inputs.adapters, len(values))
        alone = len(inputs.texts) == len(values) == 1 and not outputs.as_json and results is None and figure is None
        if (pieces := _stream(session, runner, values, outputs, inputs, alone=alone)) is not None:
            print_stream(session, runner, inputs.texts[0], pieces)
            return
        report = AnswerCounts(quiet=len(values) == 1)
        earlier = 0 if results is None else len(results.done)
        written = 0
        with results.writing() if results is not None else contextlib.nullcontext():
            left = rows if results is None else results.missing(rows)
            pending = check_columns(results, left, inputs)
            answers = report.watch(session.answer(runner, pending, task.batch_size))
            if figure is not None:
                answers = figure.watch(answers)
            if maps is not None and isinstance(runner, WritesMaps):
                answers = maps.watch(runner, answers)
            if results is not None or not sys.stdout.isatty():  # on a terminal, results show the progress
                answers = show_counts(answers, earlier, count_inputs(values, inputs.input_file))
            if results is not None:
                written = write_answers(results, session, runner, answers)
            elif outputs.as_json:
                facts = {"task": task.task or session.task, "provider": session.provider}
                emit_json(
                    "run", facts | {"results": [described(answer, is_table(inputs.input_file)) for answer in answers]}
                )
            else:
                print_answers(session, runner, answers, together=bool(values))
        if figure is not None:
            figure.write(session, runner, task.task or session.task)
    if results is not None:
        show_summary(results, written, earlier, report.summary)
    if len(values) == 1 and report.errors:
        raise report.errors[0]
    if report.errors:
        raise ArtifactError(report.summary, directory, "see the warnings above")


def _open_figure(outputs: OutputFlags, count: int) -> AnswerFigure | None:
    if outputs.figure is None:
        return None
    from zoo_runtime.cli.figures import AnswerFigure

    return AnswerFigure(outputs.figure, count, force=outputs.force)


def _open_maps(outputs: OutputFlags) -> AnswerMaps | None:
    if outputs.maps is None:
        return None
    from zoo_runtime.cli.maps import AnswerMaps

    return AnswerMaps(outputs.maps, force=outputs.force, resume=outputs.resume)


def _keeps_columns(inputs: InputFlags, outputs: OutputFlags, task: TaskFlags) -> bool:
    """Whether the columns of a file stay with its inputs: the output has them, or an option, such as a prompt, may."""
    if (outputs.output is not None or outputs.as_json) and is_table(inputs.input_file):
        return True
    parquet = outputs.output is not None and outputs.output.suffix.lower() == PARQUET
    return bool(task.settings) or outputs.training_data is not None or parquet


def _open_runner(
    session: Session, directory: Path, inputs: InputFlags, outputs: OutputFlags, flags: TaskFlags
) -> Runner[Any]:
    """Open the runner of a task, which must be able to give the outputs."""
    from zoo_runtime.onnx_runtime.adapters import number_of
    from zoo_runtime.running.choosing import parse_options
    from zoo_runtime.running.runner import MakesVariants, WritesMaps

    for name in inputs.adapters:
        number_of(name, session.adapters, directory)
    options = parse_options(flags.task or session.task, session.stored.spec.task, flags.settings)
    if twice := sorted(options.keys() & flags.options.keys()):
        raise UsageError(f"{twice[0]} is set twice", f"--option {twice[0]}", "leave out one of them")
    runner = session.runner(flags.task, **options, **flags.options)
    task = flags.task or session.task
    if outputs.training_data is not None and not isinstance(runner, MakesVariants):
        raise UsageError(f"the task {task} makes no variants", "--training-data", "--task augment")
    if inputs.image is not None and not runner.image_chats:
        raise UsageError(f"the task {task} reads no chats with an image", f"--image {inputs.image}", "leave it out")
    if outputs.maps is not None and not isinstance(runner, WritesMaps):
        raise UsageError(f"the task {task} gives no maps of pixels", "--maps", "leave it out")
    if outputs.figure is not None:
        from zoo_runtime.plots import check_plottable

        check_plottable(runner, task)
    return runner


def _stream(
    session: Session,
    runner: Runner[Any],
    values: Sequence[Any],
    outputs: OutputFlags,
    inputs: InputFlags,
    *,
    alone: bool,
) -> Iterator[str] | None:
    """Return the pieces of the answer to a single text if they are to be printed one by one, else None."""
    alone = alone and runner.streams
    if outputs.stream and not alone:
        raise UsageError("only a single generated text can be streamed", "--stream", "leave it out")
    if not alone or outputs.stream is False or not (outputs.stream or sys.stdout.isatty()):
        return None
    return open_stream(session, runner, values[0], next(iter(inputs.adapters), None), required=bool(outputs.stream))


def _read_text(path: Path, option: str) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read ({getattr(error, 'strerror', None) or error})", f"{option} {path}") from error


def _parse_option(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise UsageError(f"{text!r} is not KEY=VALUE", "--provider-option")
    return key, value
