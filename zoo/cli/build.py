"""``zoo build``."""

from __future__ import annotations

from pathlib import Path

import click

from zoo.artifact import check_model_target
from zoo.artifact.provenance import Origin
from zoo.cli.completion import complete_presets
from zoo.cli.model_argument import resolve_preset
from zoo.cli.options import (
    BYTES,
    DocumentedCommand,
    force_option,
    is_quiet,
    json_option,
    output_option,
    quiet_option,
    settings_option,
)
from zoo.cli.output import message
from zoo.cli.progress import show_progress
from zoo.cli.report import bytes_text, emit_json, say
from zoo.models.count import parameter_count
from zoo.registry import ModelSpec


def build(
    spec: ModelSpec,
    target: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    tokenizer: str | None = None,
    max_shard_bytes: int | None = None,
    force: bool = False,
) -> None:
    """Create the model of ``spec`` and save it. The target is checked before torch is imported."""
    check_model_target(target, force=force)
    from zoo.models import create, persist

    with show_progress("building", unit="bytes") as progress:
        persist.save_spec(
            spec,
            create.build(spec, seed=seed, dtype=dtype),
            target,
            tokenizer=tokenizer or spec.tokenizer,
            origin=Origin(kind="initialised", seed=seed),
            max_shard_bytes=max_shard_bytes or persist.MAX_SHARD_BYTES,
            force=force,
            progress=progress,
        )


@click.command(
    "build",
    cls=DocumentedCommand,
    examples=(
        "zoo build gpt-tiny",
        "zoo build gpt-tiny --set num_layers=4 -o deeper",
    ),
    page="reference/model-directory.md",
)
@click.argument("name", shell_complete=complete_presets)
@settings_option
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Random seed of the initial weights.",
)
@click.option(
    "--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default="float32", show_default=True,
    help="Dtype of the weights.",
)  # fmt: skip
@output_option("Directory to create; NAME by default.")
@click.option("--tokenizer", metavar="FILE", help="A tokenizer.json or a vocabulary to attach, or 'bytes'.")
@click.option(
    "--max-shard-size",
    type=BYTES,
    metavar="SIZE",
    default="5GB",
    show_default=True,
    help="Maximum size of a weights file.",
)
@force_option("Replace an existing model directory.")
@json_option
@quiet_option
def command(
    name: str,
    settings: tuple[str, ...],
    seed: int,
    dtype: str,
    output: Path | None,
    tokenizer: str | None,
    max_shard_size: int,
    force: bool,
    as_json: bool,
) -> None:
    """Create a model directory with freshly initialised weights from the preset NAME."""
    spec = resolve_preset(name, () if tokenizer else settings)
    if tokenizer or spec.tokenizer:
        from zoo.tokenizers.special import fit

        fitted = fit(spec, tokenizer, type(spec.config).parse_settings(settings, "--set"))
        spec = resolve_preset(name, settings, fitted.values)
        if fitted.note and not is_quiet():
            message("note", fitted.note)
    target = output or Path(spec.name)
    build(
        spec, target, seed=seed, dtype=dtype, tokenizer=tokenizer, max_shard_bytes=max_shard_size, force=force
    )  # fmt: skip
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    if as_json:
        emit_json("build", {"directory": str(target), "parameters": parameter_count(spec), "weight_bytes": size})
    else:
        say(f"{target}: {parameter_count(spec):,} parameters, {bytes_text(size)}")
