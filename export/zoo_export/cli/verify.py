"""``zoo verify``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from zoo.artifact import OPENVINO, variant_of
from zoo.cli.completion import complete_directories
from zoo.cli.options import (
    PATH,
    SectionedCommand,
    check_figure_option,
    figure_option,
    force_option,
    json_option,
    option,
    quiet_option,
    signed_by_option,
)
from zoo.cli.report import emit_json, say
from zoo.errors import UsageError
from zoo_export.cli.options import (
    VERIFICATION,
    factory_option,
    format_option,
    grid_option,
    refuse_onnx_options,
    refuse_options,
    sleep_when_idle,
    variant_option,
)
from zoo_export.cli.results import comparing, say_record, say_report, summary


@click.command(
    "verify",
    cls=SectionedCommand,
    examples=(
        "zoo verify gpt-tiny",
        "zoo verify gpt-tiny --recorded --signed-by signing.pub",
    ),
    page="explanation/verified.md",
)
@click.argument("directory", shell_complete=complete_directories, type=PATH, default=Path())
@format_option
@variant_option
@factory_option
@option(
    "--runtime",
    type=click.Choice(["onnxruntime", "openvino", "reference", "web-wasm", "web-webgpu"]),
    default="onnxruntime",
    show_default=True,
    section=VERIFICATION,
    help="Runtime to compare on: 'reference' is the slow evaluator of the onnx package, 'web-*' a headless browser.",
)
@option(
    "--recorded",
    is_flag=True,
    section=VERIFICATION,
    help="Compare with the numbers that the export keeps of its comparison. Needs no PyTorch.",
)
@option(
    "--provider",
    metavar="NAME",
    default="cpu",
    show_default=True,
    section=VERIFICATION,
    help="Execution provider to verify on: cpu, cuda or, with --recorded, another one of ONNX Runtime, such as coreml.",
)
@grid_option
@option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    section=VERIFICATION,
    help="Time limit for a call in a browser, which loads a graph or runs it once.  [default: 600]",
)
@option(
    "--retrace",
    is_flag=True,
    section=VERIFICATION,
    help="Trace the model again and compare the graphs byte for byte, instead of comparing results.",
)
@signed_by_option
@figure_option("Plot the error of every output beside the allowed error.")
@force_option("Replace an existing figure.")
@json_option
@quiet_option
def command(
    directory: Path,
    format_name: str | None,
    variant: str,
    runtime: str,
    recorded: bool,
    provider: str,
    grid: str,
    timeout: float | None,
    retrace: bool,
    signed_by: Path | None,
    figure: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Check the digests of the export in DIRECTORY, and compare it with the PyTorch model again."""
    sleep_when_idle()
    check_figure_option(figure, force=force)
    if signed_by is not None:
        from zoo.artifact.signature import check_signature

        directory = check_signature(directory, signed_by)  # before anything else in the directory is read
    if format_name not in (None, "onnx"):
        from zoo.exporters import verify_export

        shared = "directory", "format_name", "variant", "factory", "as_json", "quiet"
        refuse_onnx_options(f"--format {format_name}", *shared)
        with comparing() as progress:
            record = verify_export(directory, format_name, variant=variant, progress=progress)
        say_record(record, format_name, "verify", as_json)
        return
    if runtime != "onnxruntime":
        refuse_options("is only for onnxruntime", {"provider", "retrace"}, f"--runtime {runtime}")
    if not runtime.startswith("web-"):
        refuse_options("is only for browsers", {"timeout"}, f"--runtime {runtime}")
    if recorded:
        _verify_recorded(directory, variant, runtime, provider, as_json)
        return
    if provider not in ("cpu", "cuda") and not provider == variant_of(variant).provider == OPENVINO:
        remedy = f"use cpu, cuda or --runtime, or --recorded; variants for {OPENVINO} are compared where they run"
        raise UsageError(f"cannot compare with PyTorch on {provider!r}", "--provider", remedy)
    if retrace:
        refuse_options("is not for --retrace", {"figure", "force"})
        from zoo_export.export import retrace as trace_again

        files = trace_again(directory, variant=variant)
        if as_json:
            emit_json("verify", {"directory": str(directory), "files": files, "same": True})
        else:
            say(f"{directory}: {', '.join(files)} identical to a new trace")
        return
    from zoo_export.verify import verify_model

    with comparing() as progress:
        report = verify_model(
            directory,
            variant=variant,
            runtime=runtime,  # type: ignore[arg-type]
            provider=provider,  # type: ignore[arg-type]
            full_grid=grid == "full",
            timeout=timeout,
            progress=progress,
        )
    if figure is not None:
        from zoo.plots.evidence import draw_parity

        name = report.evidence["model"] + (f" ({variant})" if variant else "")
        draw_parity(report.evidence, name).write(figure, force=force)
    if as_json:
        emit_json("verify", {"directory": str(directory), **summary(report, variant), "evidence": report.evidence})
    else:
        say_report(report, directory, variant)


def _verify_recorded(directory: Path, variant: str, runtime: str, provider: str, as_json: bool) -> None:
    """Replay the recorded comparison of an export, and write nothing."""
    refuse_options("is not for --recorded", {"grid", "timeout", "retrace", "figure", "force"})
    if runtime.startswith("web-"):
        raise UsageError("recorded comparisons are not replayed in browsers", f"--runtime {runtime}")
    from zoo_runtime.recorded.replay import open_recorded, replay_on

    export = open_recorded(directory, variant)
    if runtime == "onnxruntime":
        result = replay_on(export, export.traits.provider or provider)
    else:
        from zoo_export.parity.runtimes import replay_elsewhere

        result = replay_elsewhere(export, runtime)  # type: ignore[arg-type]
    if as_json:
        emit_json("verify", {"directory": str(directory), "variant": variant, **asdict(result)})
    else:
        say(f"{directory}: {result}")
