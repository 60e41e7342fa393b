"""``zoo import``."""

from __future__ import annotations

from pathlib import Path

import click

from zoo.artifact import is_model
from zoo.cli.output import emit_json, json_option
from zoo.errors import UsageError
from zoo.storage import check_target


@click.command("import")
@click.argument("source")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory to make; named as SOURCE by default.")
@click.option("--kind", help="What made the checkpoint; by default what its config.json calls model_type.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="What the checkpoint does not say.")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Convert the weights.")
@click.option("--allow-missing", multiple=True, metavar="PATTERN", help="Tensors that may be missing; initialised.")
@click.option("--allow-key", "allow_keys", multiple=True, metavar="PATTERN", help="Keys of config.json to pass over.")
@click.option(
    "--verify/--no-verify",
    default=None,
    help="Compare with the original implementation; by default where it is installed.",
)
@click.option("--revision", help="Of a name on the hub: branch, tag or commit.")
@click.option("--offline", is_flag=True, help="Download nothing: take a name on the hub from the cache.")
@click.option("--force", is_flag=True, help="Replace an existing model directory.")
@json_option
def command(
    source: str,
    output: Path | None,
    kind: str | None,
    settings: tuple[str, ...],
    dtype: str | None,
    allow_missing: tuple[str, ...],
    allow_keys: tuple[str, ...],
    verify: bool | None,
    revision: str | None,
    offline: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Make a model directory from SOURCE: a checkpoint directory in the hub's layout, a name on the hub, or a file."""
    from zoo.checkpoints import import_checkpoint
    from zoo.checkpoints.hub import fetch, is_hub_name

    path = Path(source)
    target = output or Path(path.resolve().stem if path.is_file() else path.resolve().name)
    if is_hub_name(source):
        check_target(target, force=force, replaceable=is_model)  # before anything is downloaded
        path = fetch(source, revision=revision, offline=offline)
    elif revision or offline:
        raise UsageError("is a path, not a name on the hub", source, "leave out --revision and --offline")
    imported = import_checkpoint(
        path,
        target,
        name=source,
        kind=kind,
        dtype=dtype,
        settings=settings,
        allow_missing=allow_missing,
        allow_keys=allow_keys,
        verify=verify,
        force=force,
    )
    spec = imported.spec
    facts = {
        "directory": str(target),
        "architecture": spec.architecture.name,
        "task": spec.task,
        "parameters": spec.parameters(),
        "comparison": imported.comparison.to_dict(),
    }
    if as_json:
        emit_json("import", facts)
        return
    click.echo(f"{target}: {spec.architecture.name} for {spec.task}, {spec.parameters():,} parameters")
    click.echo(imported.comparison)
