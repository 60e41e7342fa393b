"""``zoo quantize``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zoo.artifact import OPENVINO, VARIANTS, precision_variant, precisions, variant_of
from zoo.cli.completion import complete_models
from zoo.cli.options import (
    PATH,
    SectionedCommand,
    check_figure_option,
    figure_option,
    force_option,
    json_option,
    option,
    quiet_option,
)
from zoo.cli.report import bytes_text, emit_json, say
from zoo.errors import UsageError
from zoo_export.cli.options import (
    any_provider_option,
    factory_option,
    grid_option,
    model_directory,
    sleep_when_idle,
)
from zoo_export.cli.results import comparing, say_report, summary
from zoo_export.comparison import Comparison

if TYPE_CHECKING:
    from zoo_export.parity.report import Report
    from zoo_export.variants.reduced.recipe import Reduced

_PRECISION = "Precision"


@click.command(
    "quantize",
    cls=SectionedCommand,
    examples=(
        "zoo quantize gpt-tiny --dtype int8",
        "zoo quantize gpt-tiny --max-kl 0.01",
    ),
    page="howto/exports.md",
)
@click.argument("model", shell_complete=complete_models, default=".")
@option("--dtype", type=click.Choice(precisions()), section=_PRECISION, help="Precision to write.")
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
@any_provider_option
@factory_option
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
        remedy = "leave it out" if provider == OPENVINO else "add --cache int8"
        raise UsageError("--profile is only for keys and values in int8", "zoo quantize", remedy)
    comparison = Comparison(provider=provider, full_grid=grid == "full")  # type: ignore[arg-type]
    measured = {"max_kl": max_kl, "text": text}
    if cache is not None:
        if provider == OPENVINO:
            problem = f"keys and values in int8 are for onnxruntime; {OPENVINO} keeps its own"
            raise UsageError(problem, f"--provider {OPENVINO}", "leave out --cache")
        if figure is not None:
            raise UsageError("no figure shows the error of keys and values", "--figure", "leave it out")
        _quantize_cache(model, _cache_variant(dtype, profile), measured, comparison, force=force, as_json=as_json)
        return
    if dtype is None and max_kl is None:
        raise UsageError("no precision", "zoo quantize", "add --dtype NAME, --cache int8 or --max-kl X")
    check_figure_option(figure, force=force, forces_more=True)
    variant = None if dtype is None else _variant_of(dtype, provider)
    directory, report, precision = _quantize_weights(model, variant, measured, comparison, force=force)
    if report is None:
        if as_json:
            emit_json("quantize", {"directory": str(directory), "precision": precision, "files": []})
        else:
            say(f"{directory}: no smaller precision diverges by at most {max_kl:g} nats; float32 is kept")
        return
    if figure is not None:
        from zoo_export.variants.reduced.layers import plot_layers

        plot_layers(directory, precision, text=text).write(figure, force=force)
    _say_weights(directory, report, precision, as_json=as_json)


def _variant_of(dtype: str, provider: str) -> str:
    """Return the variant in a precision for a provider. Raises :class:`UsageError` if there is none."""
    variant = precision_variant(dtype, provider)
    if variant is None:
        raise UsageError(f"no {dtype} on {provider}", "--dtype", f"choose {', '.join(precisions(provider))}")
    return variant


def _smaller(provider: str) -> list[str]:
    """Return the variants for a provider whose weights are smaller than those of the model."""
    variants = [precision_variant(precision, provider) for precision in precisions(provider)]
    return [name for name in variants if name is not None and variant_of(name).own_weights]


def _quantize_weights(
    model: str, variant: str | None, measured: Mapping[str, Any], comparison: Comparison, *, force: bool
) -> tuple[Path, Report | None, str]:
    """Export a precision, or the smallest within the bound.

    Returns:
        The directory, the evidence, and the precision: float32 and no evidence if nothing smaller is within the bound.
    """
    from zoo_export.export import export_variant
    from zoo_export.variants.reduced.smallest import NoPrecisionError, SmallestPrecision, precision_recipe

    if comparison.provider == OPENVINO:
        from zoo_runtime.openvino.compiled import load_openvino

        load_openvino()  # which the smallest precision would take for one that cannot be had
    if variant is not None:
        recipe: SmallestPrecision | Reduced = precision_recipe(variant, **measured)
    else:
        recipe = SmallestPrecision(**measured, candidates=_smaller(comparison.provider))
    with (
        model_directory(model, force=force and not Path(model).is_dir()) as (place, directory),
        comparing() as progress,
    ):
        try:
            candidate, report = export_variant(place, recipe, replace(comparison, progress=progress), force=force)
        except NoPrecisionError:
            return directory, None, "float32"
    return directory, report, candidate.variant


def _say_weights(directory: Path, report: Report, precision: str, *, as_json: bool) -> None:
    """Print what a precision saves and costs."""
    certificate = report.evidence["certificate"]
    if as_json:
        facts = {"precision": precision, "certificate": certificate, **summary(report, precision)}
        emit_json("quantize", {"directory": str(directory), **facts})
        return
    say_report(report, directory, precision)
    sizes = f"{bytes_text(certificate['bytes'])} of weights instead of {bytes_text(certificate['float32_bytes'])}"
    if not variant_of(precision).own_weights:
        sizes = f"computes in {certificate['precision']}, on the model's own weights"
    say(f"{precision}: {sizes}, measured on {_measured_on(certificate)}")
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in certificate["kept_float32"].items():
        names_by_reason.setdefault(reason, []).append(name)
    for reason, names in names_by_reason.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        say(f"float32 is kept for {', '.join(names[:3])}{more}: {reason}")
    _say_outputs(certificate)


def _cache_variant(dtype: str | None, profile: str | None) -> str:
    """Return the variant with keys and values in int8 and this precision or profile."""
    base = dtype or profile or ""
    for name, variant in VARIANTS.items():
        if variant.interface == "int8 cache" and variant.base == base and None in (dtype, profile):
            return name
    problem = f"keys and values in int8 cannot be combined with {' and '.join(filter(None, (dtype, profile)))}"
    remedy = "choose --dtype int8 or int4, whose graphs are those of the profile cpu" if dtype else "choose another"
    raise UsageError(problem, "zoo quantize", remedy)


def _quantize_cache(
    model: str, variant: str, measured: Mapping[str, Any], comparison: Comparison, *, force: bool, as_json: bool
) -> None:
    """Export keys and values in int8, and print the result."""
    from zoo_export.export import export_variant
    from zoo_export.variants import recipe_of

    recipe = recipe_of(variant, **measured)
    with (
        model_directory(model, force=force and not Path(model).is_dir()) as (place, directory),
        comparing() as progress,
    ):
        _, report = export_variant(place, recipe, replace(comparison, progress=progress), force=force)
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
    for output, errors in certificate["outputs"].items():
        say(f"{output}: " + ", ".join(f"{key.replace('_', ' ')} {value:.4g}" for key, value in errors.items()))
