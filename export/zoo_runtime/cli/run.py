"""``zoo run``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

from zoo.artifact import ADAPTERS
from zoo.cli.options import PATH, THREADS, json_option
from zoo.cli.output import echo
from zoo.cli.progress import is_shown
from zoo.cli.report import emit_json
from zoo.errors import ArtifactError, UsageError
from zoo.reading import read_text
from zoo.storage import is_same_file
from zoo_runtime.cli.answers import Report, described, open_stream, print_answers, print_stream, show_counts
from zoo_runtime.cli.batches import check_batch, is_batch, run_batches
from zoo_runtime.cli.figures import AnswerFigure
from zoo_runtime.cli.inputs import adapted, count_inputs, parse_input, read_inputs
from zoo_runtime.files.chats import as_chat, parse_chat

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


@click.command("run")
@click.argument("directory", type=PATH)
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option(
    "--input", "input_file", metavar="FILE",
    help="Inputs: lines of text, .jsonl, .json, .csv, .parquet; - for stdin. A folder, pattern or URL is a batch.",
)  # fmt: skip
@click.option("--column", help="Column of inputs in a file with columns.  [default: text; messages with --chat]")
@click.option("--pair-column", metavar="NAME", help="Column of second texts, for tasks on pairs.")
@click.option("--id-column", help="Column of ids.  [default: id if present, else row numbers]")
@click.option("-o", "--output", "output_name", metavar="PATH",
              help="Write results to a .jsonl or .parquet file; those of a batch to a folder.")  # fmt: skip
@click.option("--engine", metavar="NAME", help="Engine that runs the files of a batch: local, ray.  [default: local]")
@click.option("--workers", type=click.IntRange(min=1), help="Workers for a batch.  [default: as the cores allow]")
@click.option("--training-data", metavar="FILE", type=PATH,
              help="For augment: write rows of inputs and variants to a .jsonl, .csv or .parquet file.")  # fmt: skip
@click.option("--figure", type=PATH, metavar="FILE",
              help="Plot the probabilities in the answers, as those of --task next-token: .svg or .png.")  # fmt: skip
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
@click.option("--task", help="Task to run.  [default: the model's own]")
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
@click.option("--variant", metavar="NAME", help="Export to run.  [default: the best for the provider]")
@click.option(
    "--adapter", "adapters", metavar="NAME", multiple=True,
    help="Low-rank adapter to run with, from the variant 'adapters'; once, or once for each TEXT.",
)  # fmt: skip
@click.option(
    "--provider",
    type=click.Choice(["cpu", "cuda", "auto"]),
    default="cpu",
    show_default=True,
    help="Execution provider.",
)
@click.option(
    "--provider-option", "provider_texts", metavar="KEY=VALUE", multiple=True,
    help="Option of ONNX Runtime for the provider, such as gpu_mem_limit for CUDA. May be repeated.",
)  # fmt: skip
@click.option("--threads", type=THREADS, help="Threads per operator.  [default: the number of cores]")
@click.option("--memory", type=click.Choice(["fast", "mapped"]), default="fast", show_default=True,
              help="Repack weights for speed, or use the memory-mapped file.")  # fmt: skip
@click.option("--unverified", is_flag=True, help="Allow an export that is not verified.")
@json_option
def command(
    directory: Path,
    texts: tuple[str, ...],
    input_file: str | None,
    column: str | None,
    pair_column: str | None,
    id_column: str | None,
    output_name: str | None,
    engine: str | None,
    workers: int | None,
    training_data: Path | None,
    figure: Path | None,
    resume: bool,
    force: bool,
    pairs: tuple[tuple[str, str], ...],
    id_lists: tuple[str, ...],
    tokenizer: Path | None,
    chat: bool,
    task: str | None,
    settings: tuple[str, ...],
    stop: tuple[str, ...],
    logit_bias: tuple[str, ...],
    stream: bool | None,
    batch_size: int | None,
    provider_texts: tuple[str, ...],
    adapters: tuple[str, ...],
    as_json: bool,
    **rest: Any,
) -> None:
    """Run the exported model in DIRECTORY on each TEXT, or on the lines of stdin, with ONNX Runtime.

    The model's generation_config.json, if any, overrides these defaults.
    """
    from zoo_runtime import Pair, load_session
    from zoo_runtime.files.augmented import AugmentedRows
    from zoo_runtime.files.results import Results
    from zoo_runtime.files.rows import column_types
    from zoo_runtime.files.vectors import source
    from zoo_runtime.onnx_runtime.adapters import number_of
    from zoo_runtime.plots import check_plottable

    options = {name: rest.pop(name) for name in (flag[2:].replace("-", "_") for flag, _, _ in GENERATION)}
    options = {name: value for name, value in options.items() if value is not None}
    options |= {name: value for name, value in {"stop": stop, "logit_bias": logit_bias}.items() if value}
    if "json_schema" in options:
        options["json_schema"] = _read_text(options["json_schema"], "--json-schema")
    column = column or ("messages" if chat else "text")
    provider_options = dict(map(_parse_option, provider_texts))
    if adapters and rest["variant"] is rest["dtype"] is None:
        rest["variant"] = ADAPTERS
    if engine is not None or workers is not None or (input_file is not None and is_batch(input_file)):
        given_apart = {
            "TEXT": texts, "--pair": pairs, "--ids": id_lists, "--training-data": training_data, "--figure": figure,
            "--force": force, "--json": as_json, "--stream": stream, "a second --adapter": adapters[1:],
        }  # fmt: skip
        check_batch(input_file, output_name, [name for name, value in given_apart.items() if value])
        run_batches(
            directory, str(input_file), str(output_name), engine=engine or "local", workers=workers, resume=resume,
            session={**rest, "tokenizer": tokenizer, "provider_options": provider_options, "chat": chat},
            task=task, settings=settings, options=options, column=column, id_column=id_column,
            pair_column=pair_column, adapter=next(iter(adapters), None), batch_size=batch_size,
        )  # fmt: skip
        return
    output = None if output_name is None else Path(output_name)
    if training_data is not None and (output is not None or as_json or resume):
        raise UsageError("gives the only output", "--training-data", "leave out --output, --json and --resume")
    target = training_data or output
    option = f"--output {output}" if output is not None else f"--training-data {training_data}"
    if (resume and target is None) or (force and target is figure is None):
        raise UsageError("nothing to continue or replace", "--resume, --force", "name a file with --output")
    if output is not None and as_json:
        raise UsageError("cannot write results to both a file and stdout", f"--output {output}", "leave out --json")
    if input_file is not None and target is not None and is_same_file(Path(input_file), target):
        raise UsageError(
            "input and output are the same file",
            option,
            "choose another name",
        )
    results: Results | AugmentedRows | None = None
    if training_data is not None:
        results = AugmentedRows(training_data, column, force=force, types=column_types(input_file))
    elif output is not None:
        results = Results(output, force=force, resume=resume, types=column_types(input_file))
    prompts = [parse_chat(text) for text in texts] if chat else list(texts)
    given: list[Any] = [*prompts, *(Pair(*pair) for pair in pairs), *map(parse_input, id_lists)]
    drawing = None if figure is None else AnswerFigure(figure, len(given), force=force)
    # An option such as a prompt may name columns.
    keep = bool(settings) or training_data is not None or (output is not None and output.suffix.lower() == ".parquet")
    inputs = read_inputs(given, input_file, column, id_column, pair_column, keep=keep)
    if chat and not given:
        inputs = map(as_chat, inputs)
    with load_session(
        directory, tokenizer=tokenizer, task=task, provider_options=provider_options, chat=chat, **rest
    ) as session:
        for name in adapters:
            number_of(name, session.adapters, directory)
        more = session.options(task).parse_settings(settings)
        if twice := sorted(more.keys() & options.keys()):
            raise UsageError(f"{twice[0]} is set twice", f"--option {twice[0]}", "leave out one of them")
        runner = session.runner(task, **more, **options)
        if training_data is not None and not runner.makes_variants:
            raise UsageError(f"the task {task or session.task} makes no variants", "--training-data", "--task augment")
        if drawing is not None:
            check_plottable(runner, task or session.task)
        if len(gathered := runner.gather(texts)) != len(texts):
            given = [*gathered, *given[len(texts) :]]
            inputs = read_inputs(given, None, column, None, None)
        if adapters:
            if len(adapters) not in (1, len(given)):
                what = f"{len(adapters)} adapters for {len(given)} inputs"
                raise UsageError(what, "--adapter", "give one, or one each")
            inputs = adapted(inputs, adapters)
        alone = len(texts) == len(given) == 1 and results is None and drawing is None and not as_json and runner.streams
        if stream and not alone:
            raise UsageError("only a single generated text can be streamed", "--stream", "leave it out")
        if alone and (stream or (stream is None and sys.stdout.isatty())):
            pieces = open_stream(session, runner, prompts[0], next(iter(adapters), None), wanted=bool(stream))
            if pieces is not None:
                print_stream(session, runner, texts[0], pieces)
                return
        if isinstance(results, Results):
            results.metadata = source(session.stored)
        report = Report(quiet=len(given) == 1)
        done = results.done if results is not None else set()
        earlier = len(done)
        with results.writing() if results is not None else contextlib.nullcontext():
            pending = (item for item in inputs if item.error is not None or item.id not in done)
            answers = report.watch(session.answer(runner, pending, batch_size))
            if drawing is not None:
                answers = drawing.watch(answers)
            if results is not None or not sys.stdout.isatty():  # on a terminal, results show the progress
                answers = show_counts(answers, earlier, count_inputs(given, input_file))
            if results is not None:
                written = 0
                for answer in answers:
                    if answer.error is None or (training_data is not None and column in answer.columns):
                        results.write(answer.id, answer.result, answer.columns)
                        written += 1
                if isinstance(results, Results) and results.needs_example:
                    results.describe(session.example(runner), id_column)
            elif as_json:
                facts = {"task": task or session.task, "provider": session.provider}
                emit_json("run", facts | {"results": [described(answer) for answer in answers]})
            else:
                print_answers(session, runner, answers, together=bool(given))
        if drawing is not None:
            drawing.write(session, runner, task or session.task)
    if isinstance(results, AugmentedRows):
        lost = f", {results.empty} empty variants left out" if results.empty > 1 else ", 1 empty variant left out"
        echo(f"{training_data}: {results.rows} rows of {written} inputs{lost * bool(results.empty)}", err=True)
    elif results is not None and is_shown():
        kept = f", {earlier} kept from an earlier run" if earlier else ""
        echo(f"{output}: {written} results written{kept}, {report.summary}", err=True)
    if report.errors:
        if len(given) == 1:
            raise report.errors[0]
        raise ArtifactError(report.summary, directory, "see the warnings above")


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
