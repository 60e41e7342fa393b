"""``zoo export``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from zoo import plugins
from zoo.artifact import LOOP, PROFILES, Record
from zoo.cli.output import bytes_text, emit_json, json_option
from zoo.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from zoo_export.parity import Progress, Report

    from zoo.registry import ModelSpec

provider_option = click.option(
    "--provider",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where to run the graph.",
)
variant_option = click.option(
    "--variant", default="", metavar="NAME", help="Which export, where there are several; the plain one by default."
)
format_option = click.option("--format", "format_name", metavar="NAME", help="The exporter of a plugin, such as onnx.")
grid_option = click.option(
    "--grid", type=click.Choice(["standard", "whole"]), default="standard", show_default=True,
    help="Compare at every point that is cheap, or at every point.",
)  # fmt: skip


@contextmanager
def parity_progress(what: str = "comparing") -> Iterator[Progress | None]:
    """A progress bar on stderr, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda number, total: bar.update(task, completed=number - 1, total=total)


def summary(report: Report, variant: str = "") -> dict[str, Any]:
    """The worst of each output, for the command line; of a loop, how many tokens were compared."""
    if variant == LOOP:
        parts = report.evidence["comparisons"].values()
        return {
            "verified": report.passed,
            "provider": report.evidence["provider"],
            "files": ["generate.onnx"],
            "tokens": sum(level["tokens"] for part in parts for level in part["levels"].values()),
        }
    outputs = [
        {"graph": graph, "output": name, "optimisations": level, **errors}
        for graph, part in report.evidence["graphs"].items()
        for name, levels in part["outputs"].items()
        for level, errors in levels.items()
    ]
    worst = max(outputs, key=lambda item: item["max_abs_error"] / item["limit"] if item["limit"] else 0.0)
    return {
        "verified": report.passed,
        "provider": report.evidence["provider"],
        "points": len(report.evidence["grid"]["points"]),
        "left_out": report.evidence["grid"]["left_out"],
        "files": [".".join(filter(None, (name, variant, "onnx"))) for name in report.evidence["graphs"]],
        "outputs": len(outputs),
        "worst": worst,
    }


def say(report: Report, directory: Path, variant: str = "") -> None:
    """What was compared, in two lines."""
    facts = summary(report, variant)
    if variant == LOOP:
        click.echo(f"{directory}: generate.onnx verified on {facts['provider']} at {facts['tokens']} tokens")
        return
    worst = facts["worst"]
    left = f" ({facts['left_out']} of the whole grid left out)" if facts["left_out"] else ""
    click.echo(
        f"{directory}: {', '.join(facts['files'])} verified on {facts['provider']} at {facts['points']} points{left}"
    )
    ratio = f"{worst['ratio']:.2f} x torch's own" if worst["ratio"] is not None else "torch has none"
    click.echo(
        f"largest error, relative to what is allowed: {worst['max_abs_error']:.2e} of {worst['limit']:.2e} "
        f"in {worst['graph']} {worst['output']} ({ratio})"
    )


def refuse_onnx_options(where: str, *shared: str) -> None:
    """Raise :class:`UsageError` for an option that only ONNX has; ``shared`` are those that others have too."""
    context = click.get_current_context()
    for param in context.command.params:
        source = context.get_parameter_source(str(param.name))
        if param.name not in shared and source not in (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP):
            raise UsageError(f"{param.opts[0]} is for ONNX", where, "leave it out")


def say_record(record: Record, format_name: str, command: str, as_json: bool) -> None:
    """What another exporter than ONNX's wrote or verified; loudly, where nothing was verified."""
    directory, files, verified = record.stored.path, ", ".join(record.files), record.evidence["verified"]
    by, _ = plugins.active().exporter(format_name)
    if not verified:
        what = f"{files} NOT VERIFIED: {by} does not compare what it writes with the model"
        click.echo(f"warning: {directory}: {what}", err=True)
    if as_json:
        facts = {"format": format_name, "files": record.files, "verified": verified, "evidence": record.evidence}
        emit_json(command, {"directory": str(directory), **facts})
    elif verified:
        click.echo(f"{directory}: {files} verified by {by}")


@click.command("export")
@click.argument("model", default=".")
@click.option("--onnx", is_flag=True, help="Short for --format onnx.")
@format_option
@click.option("--option", "texts", metavar="KEY=VALUE", multiple=True, help="Choose something about another format.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Directory to build a preset in, or to copy a model to.",
)
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Change a value of the preset.")
@click.option("--force", is_flag=True, help="Replace an earlier export.")
@click.option("--loop", is_flag=True, help="Write generate.onnx too: all of generation in one graph.")
@click.option("--dtype", type=click.Choice(["fp32", "fp16", "bf16"]), help="Write the model in this precision.")
@click.option("--quantize", type=click.Choice(["int8", "int4"]), help="Write the model with quantised weights.")
@click.option("--max-kl", type=float, metavar="X", help="Write the smallest precision that diverges by X nats at most.")
@click.option("--text", type=click.Path(path_type=Path), help="Text to measure a smaller precision on.")
@click.option("--graph-only", is_flag=True, help="Write the graph without comparing it; a preset is not even built.")
@click.option(
    "--standalone",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Also write a copy that needs nothing else, as DIR/onnx/model.onnx.",
)
@click.option("--hub", type=click.Path(path_type=Path), metavar="DIR", help="Write a checkpoint for other libraries.")
@click.option("--kind", help="With --hub, the family's layout, such as roberta; by default the first that fits.")
@click.option("--check", is_flag=True, help="Write nothing: compare the graph that is there with a new one.")
@click.option("--inline", is_flag=True, help="Write no functions, for consumers that know none.")
@click.option(
    "--profile",
    type=click.Choice(["portable", *PROFILES]),
    default="portable",
    show_default=True,
    help="Write a decoder's caches in place, and logits on request, and compare on that provider.",
)
@click.option("--attentions", is_flag=True, help="Write graphs that also return their attention weights.")
@click.option("--opset", type=int, help="Version of the standard operators: 23, or 24, which the profiles need.")
@provider_option
@grid_option
@json_option
def command(
    model: str,
    onnx: bool,
    format_name: str | None,
    texts: tuple[str, ...],
    output: Path | None,
    settings: tuple[str, ...],
    force: bool,
    loop: bool,
    dtype: str | None,
    quantize: str | None,
    max_kl: float | None,
    text: Path | None,
    graph_only: bool,
    standalone: Path | None,
    hub: Path | None,
    kind: str | None,
    check: bool,
    inline: bool,
    profile: str,
    attentions: bool,
    opset: int | None,
    provider: str,
    grid: str,
    as_json: bool,
) -> None:
    """Export MODEL, a model directory (the current one by default) or a preset, which is built first.

    The graph is written only when it has been shown equal to the model. The options from --loop to --grid are for ONNX.
    """
    format_name = format_name or ("onnx" if onnx else None)
    if hub is not None or kind is not None:
        if format_name is not None or hub is None:
            raise UsageError("--hub DIR writes a checkpoint and nothing else", "zoo export", "export graphs separately")
        refuse_onnx_options("--hub", "model", "hub", "kind", "output", "settings", "force", "as_json")
        _hub(_prepare(model, output, settings, force and not Path(model).is_dir()), hub, kind, force, as_json)
        return
    if format_name is None:
        raise UsageError("no format", "zoo export", "add --onnx, --format NAME or --hub DIR")
    if format_name != "onnx":
        shared = ("model", "format_name", "texts", "output", "settings", "force", "as_json")
        refuse_onnx_options(f"--format {format_name}", *shared)
        _other(format_name, texts, model, output, settings, force, as_json)
        return
    plugins.active().exporter(format_name)  # whatever else this command makes needs it too
    if texts:
        raise UsageError("ONNX has options of its own", f"--option {texts[0]}", "see zoo export --help")
    if graph_only and (standalone or loop):
        raise UsageError("--standalone and --loop need what is verified", "zoo export", "leave out --graph-only")
    if check and (graph_only or standalone or output or force or settings):
        raise UsageError("--check writes nothing", "zoo export", "give it a model directory alone")
    from zoo_export.exporter import Options, check_export, export_graphs_only, export_model, export_preset

    options = Options(opset=opset, functions=not inline, attentions=attentions, profile=profile)  # type: ignore[arg-type]
    if attentions and (loop or standalone):
        raise UsageError(
            "--loop and --standalone return no attention weights", "--attentions", "export them separately"
        )
    if profile != "portable" and (loop or standalone):
        raise UsageError("--loop and --standalone are portable", "--profile", "export them separately")
    provider = provider if profile == "portable" else profile
    precision = quantize or (dtype if dtype != "fp32" else None)
    if precision or max_kl is not None:
        if (dtype and quantize) or loop or standalone or graph_only or check or options.variant:
            raise UsageError("one precision at a time, alone", "zoo export", "export the rest separately")
        directory = _prepare(model, output, settings, force and not Path(model).is_dir())
        _smaller(directory, precision, max_kl, text, force, provider, grid == "whole", as_json)
        return
    if text is not None:
        raise UsageError(
            "only a smaller precision is measured on text", "--text", "add --quantize, --dtype or --max-kl"
        )
    if check:
        directory, files = Path(model), check_export(Path(model), options=options)
        if as_json:
            emit_json("export", {"directory": str(directory), "files": files, "same": True})
        else:
            click.echo(f"{directory}: {', '.join(files)} as this code exports it")
        return
    if graph_only:
        source = _preset(model, settings)
        if source is not None:
            directory = output or Path(source.name)
            files = export_preset(source, directory, options=options, force=force)
        else:
            directory = _prepare(model, output, settings, force)
            files = export_graphs_only(directory, options=options, force=force)
        _warn(directory, files, options.variant)
        _warn_of_cpu(directory, options.variant)
        if as_json:
            emit_json("export", {"directory": str(directory), "files": files, "verified": False})
        return
    if (standalone or loop) and _exported(model, output, force, options.variant):
        _also(Path(model), loop, standalone, force, provider, as_json)
        return
    directory = _prepare(model, output, settings, force)
    with parity_progress() as progress:
        report = export_model(
            directory,
            options=options,
            force=force,
            provider=provider,  # type: ignore[arg-type]
            whole_grid=grid == "whole",
            progress=progress,
        )
    _warn_of_cpu(directory, options.variant)
    if as_json:
        emit_json("export", {"directory": str(directory), **summary(report, options.variant)})
    else:
        say(report, directory, options.variant)

    if loop or standalone:
        _also(directory, loop, standalone, force, provider, as_json)


def _other(
    format_name: str, texts: tuple[str, ...], model: str, output: Path | None, settings: tuple[str, ...],
    force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Export to another format than ONNX."""
    from zoo.exporting import export_to, read_options

    options = read_options(format_name, texts)
    directory = _prepare(model, output, settings, force)
    with parity_progress() as progress:
        record = export_to(directory, format_name, options=options, force=force, progress=progress)
    say_record(record, format_name, "export", as_json)


def _hub(directory: Path, target: Path, kind: str | None, force: bool, as_json: bool) -> None:
    """Write a checkpoint in the hub's layout."""
    from zoo.checkpoints import export_checkpoint

    made = export_checkpoint(directory, target, kind=kind, force=force)
    if as_json:
        facts = {"kind": made.kind, "files": made.files, "comparison": made.comparison.to_dict()}
        emit_json("export", {"directory": str(target), **facts})
        return
    click.echo(f"{target}: {made.kind} checkpoint, {', '.join(made.files)}")
    click.echo(made.comparison)


def _exported(model: str, output: Path | None, force: bool, variant: str) -> bool:
    """Whether MODEL is a directory that is exported already, and is to stay as it is."""
    if output is not None or force or not Path(model).is_dir():
        return False
    from zoo.artifact import ModelDirectory

    return ModelDirectory.open(model).export(variant).exists


def _smaller(
    directory: Path, precision: str | None, max_kl: float | None, text: Path | None,
    force: bool, provider: str, whole_grid: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write a smaller precision, certified."""
    from zoo_export.certify import export_variant

    with parity_progress() as progress:
        chosen, report = export_variant(
            directory,
            precision,  # type: ignore[arg-type]
            max_kl=max_kl,
            text=text,
            force=force,
            provider=provider,  # type: ignore[arg-type]
            whole_grid=whole_grid,
            progress=progress,
        )
    if report is None:
        if as_json:
            emit_json("export", {"directory": str(directory), "precision": chosen, "files": []})
        else:
            click.echo(f"{directory}: no smaller precision diverges by {max_kl:g} nats at most: fp32 it is")
        return
    certificate = report.evidence["certificate"]
    if as_json:
        facts = {"precision": chosen, "certificate": certificate, **summary(report, chosen)}
        emit_json("export", {"directory": str(directory), **facts})
        return
    say(report, directory, chosen)
    sample = certificate["sample"]
    amount = f"{sample['tokens']} tokens" if sample["tokens"] else f"{sample['windows']} inputs"
    click.echo(
        f"{chosen}: {bytes_text(certificate['bytes'])} of weights instead of {bytes_text(certificate['fp32_bytes'])}, "
        f"on {amount} of {sample['text']}" + (" text" if sample["text"] == "built-in" else "")
    )
    for output, found in certificate["outputs"].items():
        click.echo(f"{output}: " + ", ".join(f"{key.replace('_', ' ')} {value:.4g}" for key, value in found.items()))


def _also(directory: Path, loop: bool, standalone: Path | None, force: bool, provider: str, as_json: bool) -> None:
    """Write what is made from a verified export."""
    files, target = [], directory
    if loop:
        from zoo_export.exporter import export_loop

        report = export_loop(directory, force=force, provider=provider)  # type: ignore[arg-type]
        files = ["generate.onnx"]
        if not as_json:
            say(report, directory, LOOP)
    if standalone is not None:
        from zoo_export.standalone import write_standalone

        target, files = standalone, [*files, *write_standalone(directory, standalone, force=force)]
        if not as_json:
            click.echo(f"{standalone}: {', '.join(files)}")
    if as_json:
        emit_json("export", {"directory": str(target), "verified": True, "files": files})


def _warn(directory: Path, files: list[str], variant: str) -> None:
    """Say loudly what was not done."""
    command = f"zoo verify {directory}" + (f" --variant {variant}" if variant else "")
    click.echo(f"warning: {directory}: {', '.join(files)} NOT VERIFIED: {command} completes it", err=True)


def _warn_of_cpu(directory: Path, variant: str) -> None:
    """Name the operators of a graph for CUDA that CUDA has no kernels for. One in bfloat16 has no CPU to run on."""
    from zoo.artifact import ModelDirectory

    export = ModelDirectory.open(directory, weights=False).export(variant)
    if variant != "cuda" and export.dtype != "bfloat16":
        return
    from zoo_export.cuda_kernels import nodes_without_kernel

    what = "does not run" if export.dtype == "bfloat16" else "runs partly on the CPU"
    for file in export.graph_files.values():
        found = Counter(node.operator for node in nodes_without_kernel((directory / file).read_bytes()))
        if found:
            names = ", ".join(f"{count} x {operator}" for operator, count in sorted(found.items()))
            click.echo(f"warning: {directory}: {file} {what}: CUDA has no kernel for {names}", err=True)


def _preset(model: str, settings: tuple[str, ...]) -> ModelSpec | None:
    """The preset of that name, None where ``model`` is a path."""
    from zoo.registry import registry

    source = Path(model)
    if source.is_dir():
        return None
    if source.exists() or "/" in model:
        raise ArtifactError("not a directory" if source.exists() else "no such directory", model)
    return registry().resolve(model, settings)


def _prepare(model: str, output: Path | None, settings: tuple[str, ...], force: bool) -> Path:
    """The model directory to export: the one named, a copy of it, or one built from the preset of that name."""
    spec = _preset(model, settings)
    source = Path(model)
    if spec is None:
        if settings:
            raise UsageError("a model directory has its configuration already", "--set", "build a preset instead")
        if output is None or output.resolve() == source.resolve():
            return source
        from zoo.artifact import copy_model

        copy_model(source, output, force=force)
        return output
    target = output or Path(spec.name)
    from zoo.cli.build_command import build

    build(spec, target, force=force)
    return target
