"""``zoo bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zoo.artifact import OPENVINO, PORTABLE, variant_of
from zoo.cli.completion import complete_models, complete_variants
from zoo.cli.lengths import parse_lengths, parse_numbers
from zoo.cli.options import BYTES, THREADS, DocumentedCommand, check_figure_option, figure_option, json_option
from zoo.cli.output import echo, message
from zoo.cli.report import bytes_text, columns, emit_json
from zoo.errors import UsageError
from zoo_export.cli.curves import BUSY, show_curves
from zoo_export.cli.options import refuse_options
from zoo_export.cli.results import measuring

_NOT_FOR_ENGINES = ("baseline", "max_memory", "provider", "dtype", "variant", "torch", "compiled", "figure", "force")
LAYERS = "layer-*"
"""The default presets of curves, of one layer each."""


@click.command(
    "bench",
    cls=DocumentedCommand,
    examples=(
        "zoo bench gpt-tiny --lengths 16,32,64 --figure speed.svg",
        "zoo bench --lengths 128..16384 --figure curves.svg",
    ),
    page="howto/run.md",
)
@click.argument("names", shell_complete=complete_models, metavar="[DIRECTORY | MODEL...]", nargs=-1)
@click.option("--batch", "batches", metavar="B,...", default="1", show_default=True, callback=parse_numbers,
              help="Batch sizes.")  # fmt: skip
@click.option("--lengths", metavar="N,...|A..B", callback=parse_lengths,
              help="Tokens per input.  [default: 128, or the model's maximum if smaller]")  # fmt: skip
@click.option(
    "--baseline",
    shell_complete=complete_models,
    metavar="MODEL",
    help="Baseline of curves.  [default: layer-full if given, else the first]",
)
@click.option("--max-memory", type=BYTES, metavar="SIZE", help="Memory limit per measurement.  [default: free memory]")
@click.option("--provider", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
              help="Execution provider to measure on.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16", "int8", "int4"]), help="Precision.")
@click.option(
    "--variant",
    shell_complete=complete_variants,
    metavar="NAME",
    help="Export to run.  [default: the best for the provider]",
)
@click.option("--threads", type=THREADS, help="Number of threads.  [default: the number of cores]")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=2.0, show_default=True,
              help="Measuring time per call.")  # fmt: skip
@click.option("--torch/--no-torch", default=True, help="Also measure torch and compare outputs.  [default: torch]")
@click.option("--compile/--no-compile", "compiled", default=True,
              help="Also measure torch.compile.  [default: compile, if it works]")  # fmt: skip
@click.option("--engines", is_flag=True,
              help="Measure every verified export instead, each on its engine, and name the fastest.")  # fmt: skip
@figure_option("Plot the result.", "--plot")
@click.option("--force", is_flag=True, help="Replace FILE.")
@click.option("--unverified", is_flag=True, help="Allow an export that is not verified.")
@json_option
def command(names: tuple[str, ...], engines: bool, figure: Path | None, force: bool, as_json: bool,
            baseline: str | None, max_memory: int | None, **options: Any) -> None:  # fmt: skip
    """Measure the speed of the exported model in DIRECTORY, compared with torch and the limits of this machine.

    With a range of --lengths, such as 128..16384, measure curves instead: time and memory of each MODEL against text
    length, doubling from point to point. A MODEL is a preset, a glob of presets, or a directory; the default is
    "layer-*".
    """
    lengths = options["lengths"]
    if engines:
        refuse_options("is not for --engines", _NOT_FOR_ENGINES)
        if len(names) != 1:
            raise UsageError("name one directory", "--engines")
        shared = {name: options[name] for name in ("batches", "lengths", "threads", "seconds", "unverified")}
        _measure_engines(Path(names[0]), as_json, **shared)
        return
    if options["variant"] and variant_of(options["variant"]).provider == OPENVINO:
        where = f"--variant {options['variant']}"
        raise UsageError(f"{OPENVINO} is measured beside the other engines only", where, "give --engines instead")
    if len(names) == 1 and not (lengths and (lengths.curve or not Path(names[0]).is_dir())):
        refuse_options("is only for curves", ("baseline", "max_memory"))
        _measure(Path(names[0]), figure, force, as_json, **options)
        return
    if lengths is None:
        remedy = "name the directory of an exported model, or give --lengths 128..16384"
        raise UsageError("curves need lengths" if names else "nothing to measure", None, remedy)
    refuse_options("is not for curves", options.keys() - {"lengths", "threads", "seconds"})
    show_curves(
        names or (LAYERS,), sorted(lengths), figure=figure, force=force, as_json=as_json, baseline=baseline,
        max_memory=max_memory, threads=options["threads"], seconds=options["seconds"],
    )  # fmt: skip


def _measure_engines(directory: Path, as_json: bool, **options: Any) -> None:
    """Measure every verified export of a model, and print the table."""
    from zoo_export.bench.engines import bench_engines

    with measuring() as watchers:
        watchers.pop("progress", None)
        result = bench_engines(directory, **watchers, **options)
    for name, reason in result["left_out"].items():
        message("warning", f"{name} not measured: {reason}")
    _warn_if_busy(result, "the order is")
    if as_json:
        emit_json("bench-engines", result)
        return
    threads = f", threads: {result['threads']}" if result["threads"] else ""
    echo(f"{result['model']}: {result['cpu']}{threads}\n")
    titles = ("ENGINE", "EXPORT", "WEIGHTS", "B x N", "PROMPT OR CALL, MS", "TOKEN, MS", "PER SECOND")
    rows = [_engine_row(case, item) for case in result["cases"] for item in case["exports"]]
    columns([titles, *rows], right=range(4, 7))
    echo()
    for case in result["cases"]:
        names = [f"{variant or PORTABLE} ({precision})" for precision, variant in case["fastest"].items()]
        echo(f"fastest at {case['batch']} x {case['length']}: {', '.join(names)}")


def _engine_row(case: dict[str, Any], item: dict[str, Any]) -> tuple[str, ...]:
    step = item["step_seconds"]
    return (
        item["engine"] if item["provider"] != "cuda" else f"{item['engine']}, cuda",
        item["variant"] or PORTABLE,
        item["precision"],
        f"{case['batch']} x {case['length']}",
        f"{1000 * item['seconds']:.3f}",
        "" if step is None else f"{1000 * step:.3f}",
        f"{case['batch'] / (step or item['seconds']):,.1f}",
    )


def _measure(directory: Path, figure: Path | None, force: bool, as_json: bool, **options: Any) -> None:
    """Measure one model and torch, and print the table."""
    from zoo_export.bench import bench_model

    check_figure_option(figure, force=force)
    with measuring() as watchers:
        result = bench_model(directory, **watchers, **options)
    for name, reason in result["left_out"].items():
        message("warning", f"{name} not measured: {reason}")
    _warn_if_busy(result, "ratios are")
    if figure is not None:
        from zoo_export.bench.plot import plot_bench

        plot_bench(result).write(figure, force=force)
    if as_json:
        emit_json("bench", result)
        return
    variant = f" ({result['variant']})" if result["variant"] else ""
    threads = f", threads: {result['threads']}" if result["threads"] else ""
    echo(f"{result['model']}{variant}: {result['dtype']} on {result['provider']}{threads}, {result['cpu']}\n")
    rows = [row for case in result["cases"] for row in _rows(case)]
    titles = ("GRAPH", "PHASE", "B x N", "", "MS", "BEST", "TOKENS/S", "ROWS/S", "VS TORCH", "OF LIMIT")
    columns([titles, *rows], right=range(4, 10))
    pasts = [(case, case["past_bytes"]) for case in result["cases"] if case["past_bytes"]]
    sizes = [f"{bytes_text(size)} for {case['batch']} x {case['length']}" for case, size in pasts]
    if sizes:
        echo(f"\npast: {', '.join(sizes)}")


def _warn_if_busy(result: dict[str, Any], what: str) -> None:
    """Warn if other processes kept the cores busy at some size."""
    waited = max(case["waited"] or 0 for case in result["cases"])
    if waited > BUSY:
        problem = f"threads waited for a free core for {waited:.0%} of the time"
        message("warning", f"{problem}, so {what} unreliable: repeat it on an idle machine")


def _rows(case: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row per backend, and one for the machine's limit if known."""
    label = case["graph"], case["phase"], f"{case['batch']} x {case['length']}"
    rows: list[tuple[str, ...]] = [
        (
            *label,
            name,
            f"{1000 * timing['seconds']:.3f}",
            f"{1000 * timing['best_seconds']:.3f}",
            f"{timing['tokens_per_second']:,.0f}",
            f"{timing['rows_per_second']:,.0f}",
            f"{timing['times_torch']:.2f}x" if timing["times_torch"] else "",
            f"{timing['of_limit']:.1%}" if timing["of_limit"] else "",
        )
        for name, timing in case["backends"].items()
    ]
    limit = case["limit"]
    if limit["bound"] is None:
        return rows
    rate, unit = ("bytes_per_second", "GB/s") if limit["bound"] == "memory" else ("flops_per_second", "GFLOP/s")
    tokens = case["batch"] * (1 if case["phase"] == "decode" else case["length"]) / limit["seconds"]
    shown = f"{1000 * limit['seconds']:.3f}", "", f"{tokens:,.0f}", f"{case['batch'] / limit['seconds']:,.0f}", "", ""
    return [*rows, (*label, f"limit: {limit['bound']}, {limit[rate] / 1e9:.1f} {unit}", *shown)]
