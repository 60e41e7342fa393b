"""``zoo export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zoo.artifact import profiles
from zoo.cli.completion import complete_models, complete_offers, complete_settings
from zoo.cli.options import PATH, SectionedCommand, force_option, json_option, option, quiet_option
from zoo.errors import UsageError
from zoo_export.cli.options import (
    VERIFICATION,
    factory_option,
    grid_option,
    provider_option,
    refuse_onnx_options,
    sleep_when_idle,
)
from zoo_export.comparison import Comparison

_FORMAT, _GRAPHS, _MODEL = "Format", "ONNX graphs", "Model"


_OF_ALL_FORMATS = ("model", "format_name", "texts", "output", "settings", "factory", "force", "as_json", "quiet")
"""The parameters that exporters of other formats have, too."""


@click.command(
    "export",
    cls=SectionedCommand,
    examples=(
        "zoo export gpt-tiny --onnx",
        "zoo export gpt-tiny --onnx --profile serving",
    ),
    page="howto/exports.md",
)
@click.argument("model", shell_complete=complete_models, default=".")
@option("--onnx", is_flag=True, section=_FORMAT, help="Short for --format onnx.")
@option(
    "--format",
    "format_name",
    shell_complete=complete_offers("exporters"),
    metavar="NAME",
    section=_FORMAT,
    help="Format of an installed exporter.",
)
@option(
    "--option",
    "texts",
    metavar="KEY=VALUE",
    multiple=True,
    section=_FORMAT,
    help="Option of the exporter; for ONNX functions=false.",
)
@option("--opset", type=int, metavar="N", section=_GRAPHS, help="Opset version, from 18 to 24.  [default: 23]")
@option(
    "--fix",
    multiple=True,
    metavar="DIM=SIZE",
    section=_GRAPHS,
    help="Give a free dimension a fixed size, such as batch=1. May be repeated.",
)
@option(
    "--profile",
    type=click.Choice(profiles()),
    section=_GRAPHS,
    help="'cpu' and 'cuda' update caches in place and are verified on that provider; 'openvino' runs on OpenVINO; "
    "'serving' has fixed sizes, and rows with pasts of their own; 'web' has operators that run on WebGPU in browsers.  "
    "[default: portable]",
)
@option("--attentions", is_flag=True, section=_GRAPHS, help="Write graphs that also return attention weights.")
@option(
    "--queries-keys", is_flag=True, section=_GRAPHS, help="With --attentions, also return the queries, keys and biases."
)
@option(
    "--adapter",
    "adapters",
    metavar="[NAME=]DIR",
    multiple=True,
    section=_GRAPHS,
    help="Write the variant 'adapters', in which each row chooses one of these low-rank adapters of the model.",
)
@option(
    "--lora-files",
    is_flag=True,
    section=_GRAPHS,
    help="Also write each adapter as a file of ONNX Runtime's LoraAdapter.",
)
@option("--generate", is_flag=True, section=_GRAPHS, help="Also write generate.onnx, which contains the decoding loop.")
@option(
    "--graph-only",
    is_flag=True,
    section=VERIFICATION,
    help="Skip verification, and do not create weights for a preset. The export is marked unverified.",
)
@provider_option
@grid_option
@option(
    "-o",
    "--output",
    type=PATH,
    metavar="DIR",
    section=_MODEL,
    help="Directory to build a preset in, or to copy the model directory to.",
)
@option(
    "--set",
    "settings",
    shell_complete=complete_settings,
    metavar="KEY=VALUE",
    multiple=True,
    section=_MODEL,
    help="Change a value of the preset.",
)
@factory_option
@force_option("Replace an earlier export.")
@json_option
@quiet_option
def command(
    model: str,
    onnx: bool,
    format_name: str | None,
    texts: tuple[str, ...],
    opset: int | None,
    fix: tuple[str, ...],
    profile: str | None,
    attentions: bool,
    queries_keys: bool,
    adapters: tuple[str, ...],
    lora_files: bool,
    generate: bool,
    graph_only: bool,
    provider: str,
    grid: str,
    output: Path | None,
    settings: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Export MODEL: a model directory (the current one by default), or a preset, which is built first.

    Files are written only if they match the PyTorch model.
    """
    sleep_when_idle()
    from zoo.exporters import read_options
    from zoo_export.cli.target import Target, export_format

    name = _format(onnx, format_name)
    target = Target(model, output, settings, force, as_json)
    comparison = Comparison(provider=provider, full_grid=grid == "full")  # type: ignore[arg-type]
    if name != "onnx" and not adapters:
        refuse_onnx_options(f"--format {name}", *_OF_ALL_FORMATS)
        export_format(target, name, read_options(name, texts))
        return
    from zoo_export.cli.exporting import export_adapters, export_graphs, export_onnx  # late: these import onnx

    if adapters:
        export_adapters(target, adapters, lora_files, name, comparison)
        return
    if lora_files:
        raise UsageError("no adapters to write", "--lora-files", "add --adapter DIR")
    values = {"opset": opset, "profile": profile, "attentions": attentions or None, "fix": fix or None}
    values |= {"queries_keys": queries_keys or None, "provider": provider, "grid": grid}
    request: Any = read_options(name, texts, {key: value for key, value in values.items() if value is not None})
    if generate and (graph_only or request.variant or fix):
        problem = "generate.onnx needs a verified portable export without fixed dimensions"
        raise UsageError(problem, "--generate", "export it separately")
    if graph_only:
        export_graphs(target, request)
    else:
        export_onnx(target, request, comparison, generate=generate)


def _format(onnx: bool, format_name: str | None) -> str:
    """Return the name of the format that was asked for."""
    if onnx and format_name not in (None, "onnx"):
        raise UsageError("--onnx means --format onnx", f"--format {format_name}", "choose one of them")
    if not onnx and format_name is None:
        raise UsageError("no format", "zoo export", "add --onnx or --format NAME")
    return format_name or "onnx"
