"""``zoo relink``."""

from __future__ import annotations

from pathlib import Path

import click

from zoo.cli.output import emit_json, json_option


@click.command("relink")
@click.argument("directory", type=click.Path(path_type=Path), default=Path())
@json_option
def command(directory: Path, as_json: bool) -> None:
    """Point the graphs in DIRECTORY at the weights that were put there since.

    The weights need the tensors that the graphs were exported for, in whatever order and files. What was not compared
    counts as unverified until zoo verify has passed.
    """
    from zoo_export.relink import relink

    verified = relink(directory)
    if as_json:
        emit_json("relink", {"directory": str(directory), "verified": verified})
    else:
        click.echo(
            f"{directory}: linked, " + ("still verified" if verified else f"not verified: zoo verify {directory}")
        )
