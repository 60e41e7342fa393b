"""``zoo adapt``."""

from __future__ import annotations

from pathlib import Path

import click

from zoo.cli.output import emit_json, json_option


@click.command("adapt")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True, required=True, help="Change a configuration value."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Directory to make.")
@click.option("--force", is_flag=True, help="Replace an existing model directory.")
@json_option
def command(directory: Path, settings: tuple[str, ...], output: Path, force: bool, as_json: bool) -> None:
    """Make a model of another configuration with the weights of the one in DIRECTORY.

    Tensors whose shapes stay are kept as they are. What becomes of the others the architecture says: a ViT interpolates
    its positions for another image_size, learned positions of texts are cut for a smaller max_seq_len. Where it says
    nothing, or a tensor would be lost or new, nothing is written and all such tensors are listed.
    """
    from zoo.adapting import adapt_directory

    adapted = adapt_directory(directory, output, settings=settings, force=force)
    parameters = adapted.spec.parameters()
    if as_json:
        facts = {
            "directory": str(output),
            "parameters": parameters,
            "settings": {key: {"before": old, "now": new} for key, (old, new) in adapted.settings.items()},
            "tensors": {name: {"before": old, "now": new} for name, (old, new) in adapted.shapes.items()},
        }
        emit_json("adapt", facts)
        return
    click.echo(f"{output}: {parameters:,} parameters")
    for name, (old, new) in adapted.shapes.items():
        click.echo(f"{name}: {old} became {new}")
