"""``zoo import``."""

from __future__ import annotations

from pathlib import Path

import click

from zoo.cli.output import emit_json, json_option


@click.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory to make; named as SOURCE by default.")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Convert the weights.")
@click.option("--force", is_flag=True, help="Replace an existing model directory.")
@json_option
def command(source: Path, output: Path | None, dtype: str | None, force: bool, as_json: bool) -> None:
    """Make a model directory from SOURCE, a checkpoint directory in the hub's layout."""
    from zoo.importing import import_checkpoint

    target = output or Path(source.resolve().name)
    spec = import_checkpoint(source, target, dtype=dtype, force=force)
    facts = {
        "directory": str(target),
        "architecture": spec.architecture.name,
        "task": spec.task,
        "parameters": spec.parameters(),
    }
    if as_json:
        emit_json("import", facts)
    else:
        click.echo(f"{target}: {spec.architecture.name} for {spec.task}, {spec.parameters():,} parameters")
