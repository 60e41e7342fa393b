"""``zoo build``."""

from __future__ import annotations

from pathlib import Path

import click

from zoo.cli.output import SIZE, bytes_text, emit_json, json_option
from zoo.registry import ModelSpec, registry


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
    """Make the model of ``spec`` and save it. The target is checked before any weight is made."""
    from zoo import models, storage
    from zoo.artifact import is_model

    storage.check_target(target, force=force, replaceable=is_model)
    model = models.build(spec, seed=seed, dtype=dtype)
    models.save_spec(
        spec,
        model,
        target,
        tokenizer=tokenizer or spec.tokenizer,
        seed=seed,
        max_shard_bytes=max_shard_bytes or models.MAX_SHARD_BYTES,
        force=force,
    )


@click.command("build")
@click.argument("name")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Change a configuration value.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of the initial weights.")
@click.option(
    "--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default="float32", show_default=True,
    help="Of the weights.",
)  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory to make; NAME by default.")
@click.option("--tokenizer", metavar="FILE", help="A tokenizer.json or a vocabulary to attach, or 'bytes'.")
@click.option("--max-shard-size", type=SIZE, default="5B", show_default=True, help="Bytes a weights file may have.")
@click.option("--force", is_flag=True, help="Replace an existing model directory.")
@json_option
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
    """Make a model directory with freshly initialised weights from the preset NAME."""
    spec = registry().resolve(name, settings)
    target = output or Path(spec.name)
    build(
        spec, target, seed=seed, dtype=dtype, tokenizer=tokenizer, max_shard_bytes=max_shard_size, force=force
    )  # fmt: skip
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    if as_json:
        emit_json("build", {"directory": str(target), "parameters": spec.parameters(), "weight_bytes": size})
    else:
        click.echo(f"{target}: {spec.parameters():,} parameters, {bytes_text(size)}")
