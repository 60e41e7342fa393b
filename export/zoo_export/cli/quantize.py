"""``zoo quantize``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from zoo.artifact import INT8_CACHE, INT8_CACHES, PRECISIONS
from zoo.cli.options import (
    PATH,
    Command,
    check_figure_option,
    figure_option,
    force_option,
    json_option,
    option,
    quiet_option,
)
from zoo.cli.report import bytes_text, emit_json, say
from zoo.errors import UsageError
from zoo_export.cli.options import grid_option, model_directory, provider_option, sleep_when_idle
from zoo_export.cli.results import comparing, say_report, summary

_PRECISION = "Precision"


@click.command("quantize", cls=Command)
@click.argument("model", default=".")
@option("--dtype", type=click.Choice(PRECISIONS), section=_PRECISION, help="Precision to write.")
@option(
    "--cache",
    type=click.Choice(["int8"]),
    section=_PRECISION,
    help="Store keys and values in this precision; with --dtype, beside weights that are quantised already.",
)
@option(
    "--profile",
    type=click.Choice(["cpu"]),
    section=_PRECISION,
    help="With --cache: extend keys and values in place.",
)
@option(
    "--max-kl",
    type=float,
    metavar="X",
    section=_PRECISION,
    help="Largest mean KL divergence in nats. Without --dtype and --cache, write the smallest precision within it.",
)
@option(
    "--text",
    type=PATH,
    metavar="FILE",
    section=_PRECISION,
    help="Text to measure the divergence on; a built-in sample by default.",
)
@provider_option
@grid_option
@figure_option("Plot the error of weights and blocks by layer.")
@force_option("Replace an earlier export of this precision, and FILE.")
@json_option
@quiet_option
def command(
    model: str,
    dtype: str | None,
    cache: str | None,
    profile: str | None,
    max_kl: float | None,
    text: Path | None,
    provider: str,
    grid: str,
    figure: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a smaller precision of MODEL, a float32 model directory (the current one by default) or a preset.

    The graphs are verified against the quantised weights. The divergence from float32 is measured and recorded.
    """
    sleep_when_idle()
    if profile is not None and cache is None:
        raise UsageError("--profile is only for keys and values in int8", "zoo quantize", "add --cache int8")
    options: dict[str, Any] = {
        "max_kl": max_kl, "text": text, "force": force, "provider": provider, "full_grid": grid == "full",
    }  # fmt: skip
    if cache is not None:
        if figure is not None:
            raise UsageError("no figure shows the error of keys and values", "--figure", "leave it out")
        _quantize_cache(model, dtype, profile, options, as_json=as_json)
        return
    if dtype is None and max_kl is None:
        raise UsageError("no precision", "zoo quantize", "add --dtype NAME, --cache int8 or --max-kl X")
    check_figure_option(figure, force=force, forces_more=True)
    from zoo_export.precision.certify import export_variant

    with (
        model_directory(model, force=force and not Path(model).is_dir()) as (place, directory),
        comparing() as progress,
    ):
        chosen, report = export_variant(place, dtype, progress=progress, **options)  # type: ignore[arg-type]
    if report is None:
        if as_json:
            emit_json("quantize", {"directory": str(directory), "precision": chosen, "files": []})
        else:
            say(f"{directory}: no smaller precision diverges by at most {max_kl:g} nats; float32 is kept")
        return
    if figure is not None:
        from zoo_export.precision.layers import plot_layers

        plot_layers(directory, chosen, text=text).write(figure, force=force)
    certificate = report.evidence["certificate"]
    if as_json:
        facts = {"precision": chosen, "certificate": certificate, **summary(report, chosen)}
        emit_json("quantize", {"directory": str(directory), **facts})
        return
    say_report(report, directory, chosen)
    sizes = f"{bytes_text(certificate['bytes'])} of weights instead of {bytes_text(certificate['float32_bytes'])}"
    say(f"{chosen}: {sizes}, measured on {_measured_on(certificate)}")
    kept: dict[str, list[str]] = {}
    for name, reason in certificate["kept_float32"].items():
        kept.setdefault(reason, []).append(name)
    for reason, names in kept.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        say(f"float32 is kept for {', '.join(names[:3])}{more}: {reason}")
    _say_outputs(certificate)


def _quantize_cache(
    model: str, dtype: str | None, profile: str | None, options: Mapping[str, Any], *, as_json: bool
) -> None:
    """Export keys and values in int8, and print the result."""
    variant = "-".join(filter(None, (dtype, profile, INT8_CACHE)))
    if variant not in INT8_CACHES:
        what = f"keys and values in int8 cannot be combined with {' and '.join(filter(None, (dtype, profile)))}"
        remedy = "choose --dtype int8 or int4, whose graphs are those of the profile cpu" if dtype else "choose another"
        raise UsageError(what, "zoo quantize", remedy)
    from zoo_export.precision.cache import export_cache

    force = options["force"] and not Path(model).is_dir()
    with model_directory(model, force=force) as (place, directory), comparing() as progress:
        report = export_cache(place, variant, progress=progress, **options)
    certificate = report.evidence["certificate"]
    if as_json:
        facts = {"variant": variant, "certificate": certificate, **summary(report, variant)}
        emit_json("quantize", {"directory": str(directory), **facts})
        return
    say_report(report, directory, variant)
    sizes = ", ".join(
        f"{bytes_text(size['int8'])} instead of {bytes_text(size['float32'])} for {int(count):,} tokens"
        for count, size in certificate["past_bytes"].items()
    )
    say(f"{variant}: {sizes}, measured on {_measured_on(certificate)}")
    _say_outputs(certificate)


def _measured_on(certificate: Mapping[str, Any]) -> str:
    """Return what the error was measured on."""
    sample = certificate["sample"]
    amount = f"{sample['tokens']} tokens" if sample["tokens"] else f"{sample['windows']} inputs"
    return f"{amount} of {'the built-in text' if sample['text'] == 'built-in' else sample['text']}"


def _say_outputs(certificate: Mapping[str, Any]) -> None:
    """Print the measured error of each output."""
    for output, found in certificate["outputs"].items():
        say(f"{output}: " + ", ".join(f"{key.replace('_', ' ')} {value:.4g}" for key, value in found.items()))
