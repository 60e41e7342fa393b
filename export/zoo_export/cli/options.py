"""Options and helpers shared by the exporter's commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from zoo.cli.model_argument import find_preset, refuse_settings
from zoo.cli.options import option
from zoo.errors import UsageError

__all__ = [
    "VERIFICATION",
    "format_option",
    "grid_option",
    "model_directory",
    "provider_option",
    "refuse_onnx_options",
    "variant_option",
]

VERIFICATION = "Verification"

provider_option = option(
    "--provider", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, section=VERIFICATION,
    help="Execution provider to verify on.",
)  # fmt: skip
grid_option = option(
    "--grid", type=click.Choice(["standard", "full"]), default="standard", show_default=True, section=VERIFICATION,
    help="'full' also compares at points that take minutes for large models.",
)  # fmt: skip
variant_option = click.option(
    "--variant", default="", metavar="NAME", help="Variant of the export.  [default: the plain one]"
)
format_option = click.option("--format", "format_name", metavar="NAME", help="Format of the export.  [default: onnx]")


def refuse_onnx_options(where: str, *shared: str) -> None:
    """Raise :class:`UsageError` for a given ONNX-only option. ``shared`` names the options of all formats."""
    context = click.get_current_context()
    for param in context.command.params:
        source = context.get_parameter_source(str(param.name))
        if param.name not in shared and source not in (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP, None):
            raise UsageError(f"{param.opts[0]} is only for ONNX", where, "leave it out")


def model_directory(model: str, *, output: Path | None = None, settings: Sequence[str] = (), force: bool) -> Path:
    """Return the directory of MODEL: the given one, a copy of it in ``output``, or a preset built now."""
    spec = find_preset(model, settings)
    source = Path(model)
    if spec is None:
        refuse_settings(settings)
        if output is None or output.resolve() == source.resolve():
            return source
        from zoo.artifact import copy_model

        copy_model(source, output, force=force)
        return output
    target = output or Path(spec.name)
    from zoo.cli.build import build

    build(spec, target, force=force)
    return target
