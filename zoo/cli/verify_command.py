"""``zoo verify``."""

from __future__ import annotations

from pathlib import Path

import click

from zoo.cli.export_command import (
    format_option,
    grid_option,
    parity_progress,
    provider_option,
    refuse_onnx_options,
    say,
    say_record,
    summary,
    variant_option,
)
from zoo.cli.output import emit_json, json_option


@click.command("verify")
@click.argument("directory", type=click.Path(path_type=Path), default=Path())
@format_option
@variant_option
@provider_option
@grid_option
@json_option
def command(directory: Path, format_name: str | None, variant: str, provider: str, grid: str, as_json: bool) -> None:
    """Check every digest of an exported model, and compare it with the PyTorch model again."""
    if format_name not in (None, "onnx"):
        from zoo.exporting import verify_export

        refuse_onnx_options(f"--format {format_name}", "directory", "format_name", "variant", "as_json")
        with parity_progress() as progress:
            record = verify_export(directory, format_name, variant=variant, progress=progress)
        say_record(record, format_name, "verify", as_json)
        return
    from zoo_export.parity import verify_model

    with parity_progress() as progress:
        report = verify_model(
            directory,
            variant=variant,
            provider=provider,  # type: ignore[arg-type]
            whole_grid=grid == "whole",
            progress=progress,
        )
    if as_json:
        emit_json("verify", {"directory": str(directory), **summary(report, variant), "evidence": report.evidence})
    else:
        say(report, directory, variant)
