"""Options and helpers shared by the exporter's commands."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from click.core import ParameterSource

from zoo.artifact import copy_model
from zoo.artifact.directory import new_model_with_export
from zoo.cli.completion import complete_variants
from zoo.cli.model_argument import find_preset, refuse_settings
from zoo.cli.options import option
from zoo.errors import UsageError
from zoo.factories import allow_factories

__all__ = [
    "VERIFICATION",
    "any_provider_option",
    "factory_option",
    "format_option",
    "grid_option",
    "model_directory",
    "provider_option",
    "refuse_onnx_options",
    "refuse_options",
    "sleep_when_idle",
    "variant_option",
]

VERIFICATION = "Verification"

provider_option = option(
    "--provider", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, section=VERIFICATION,
    help="Execution provider to verify on.",
)  # fmt: skip
any_provider_option = option(
    "--provider", type=click.Choice(["cpu", "cuda", "openvino"]), default="cpu", show_default=True,
    section=VERIFICATION, help="Execution provider to verify on, or OpenVINO, which has variants of its own.",
)  # fmt: skip
grid_option = option(
    "--grid", type=click.Choice(["standard", "full"]), default="standard", show_default=True, section=VERIFICATION,
    help="'full' also compares at points that take minutes for large models.",
)  # fmt: skip
variant_option = click.option(
    "--variant",
    shell_complete=complete_variants,
    default="",
    metavar="NAME",
    help="Variant of the export.  [default: the plain one]",
)
factory_option = click.option(
    "--factory",
    metavar="MODULE:NAME",
    multiple=True,
    expose_value=False,
    callback=lambda context, _, references: context.with_resource(allow_factories(*references)),
    help="Let this code of yours build the model, if it was made by it. It runs on this machine.",
)
format_option = click.option("--format", "format_name", metavar="NAME", help="Format of the export.  [default: onnx]")


def sleep_when_idle() -> None:
    """Let idle threads of torch sleep instead of busy-waiting, unless the user's environment says otherwise.

    A comparison alternates between torch and ONNX Runtime, and its operators are short: waiting threads of the one take
    the cores of the other, and of other processes. Must be called before torch is imported, which reads the setting.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def refuse_onnx_options(where: str, *shared: str) -> None:
    """Raise :class:`UsageError` for a given ONNX-only option. ``shared`` names the options of all formats."""
    names = {str(parameter.name) for parameter in click.get_current_context().command.params}
    refuse_options("is only for ONNX", names.difference(shared), where)


def refuse_options(why: str, names: Container[str], where: str | None = None) -> None:
    """Raise :class:`UsageError` if the command line has one of these options of the running command."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = str(parameter.name)
        if name in names and context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise UsageError(f"{parameter.opts[0]} {why}", where, "leave it out")


@contextmanager
def model_directory(
    model: str, *, output: Path | None = None, settings: Sequence[str] = (), force: bool
) -> Iterator[tuple[Path, Path]]:
    """Yield the directory of MODEL, and the name that it has at the end.

    It is the given one, or a new one with a copy of it for ``output``, or with a preset built now. A new one gets its
    name, and replaces what was there, at the end of the block, together with the export that the block writes.
    """
    spec = find_preset(model, settings)
    source = Path(model)
    if spec is None:
        refuse_settings(settings)
        if output is None or output.resolve() == source.resolve():
            yield source, source
            return
        target = output
    else:
        target = output or Path(spec.name)
    with new_model_with_export(target, force=force) as place:
        if spec is None:
            copy_model(source, place, force=False)
        else:
            from zoo.cli.build import build

            build(spec, place, force=False)
        yield place, target
