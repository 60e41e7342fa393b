"""``zoo relink``."""

from __future__ import annotations

from pathlib import Path

import click

from zoo.cli.completion import complete_directories
from zoo.cli.options import PATH, DocumentedCommand, json_option, quiet_option
from zoo.cli.output import VERDICTS
from zoo.cli.report import emit_json, say


@click.command(
    "relink",
    cls=DocumentedCommand,
    examples=(
        "zoo relink gpt-tiny",
        "zoo relink gpt-tiny --json",
    ),
    page="explanation/weights.md",
)
@click.argument("directory", shell_complete=complete_directories, type=PATH, default=Path())
@json_option
@quiet_option
def command(directory: Path, as_json: bool) -> None:
    """Make the export in DIRECTORY use new weights without re-exporting.

    The weights must have the same tensors as those exported, in any order and any files. Graphs with new weights are
    unverified until zoo verify passes.
    """
    from zoo_export.relink import relink

    verified = relink(directory)
    if as_json:
        emit_json("relink", {"directory": str(directory), "verified": verified})
    else:
        say(
            f"{directory}: linked, " + ("still verified" if verified else f"not verified: zoo verify {directory}"),
            verdicts=VERDICTS,
        )
