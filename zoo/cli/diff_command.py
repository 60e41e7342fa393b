"""``zoo diff``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zoo.cli.export_command import provider_option, variant_option
from zoo.cli.output import columns, emit_json, json_option
from zoo.errors import ParityError

if TYPE_CHECKING:
    from zoo_export.bisect import ModuleError

DEPTH = 2


def rows(modules: list[ModuleError], everything: bool) -> list[tuple[str, ...]]:
    """The modules down to the blocks, or all of them, and every one that diverges first."""
    first = next((item for item in modules if item.diverges), None)
    return [
        (
            item.path,
            item.kind,
            f"{item.error:.2e}",
            f"{item.torch_error:.2e}",
            f"{item.error / item.scale:.1e}" if item.scale else "",
            "<- begins here" if item is first else "diverges" if item.diverges else "",
        )
        for item in modules
        if everything or item is first or item.path.count(".") < DEPTH
    ]


@click.command("diff")
@click.argument("directory", type=click.Path(path_type=Path), default=Path())
@click.option("--all", "everything", is_flag=True, help="Show the modules inside blocks too.")
@variant_option
@provider_option
@json_option
def command(directory: Path, everything: bool, variant: str, provider: str, as_json: bool) -> None:
    """Compare the graphs in DIRECTORY with the PyTorch model module by module, and name the first that diverges."""
    from zoo_export.parity import diff_model

    graphs = diff_model(directory, variant=variant, provider=provider)  # type: ignore[arg-type]
    if as_json:
        emit_json("diff", {"graphs": {name: [asdict(item) for item in found] for name, found in graphs.items()}})
    else:
        for name, found in graphs.items():
            columns(
                [(name.upper(), "CLASS", "ERROR", "TORCH", "RELATIVE", ""), *rows(found, everything)], right=[2, 3, 4]
            )
    for name, found in graphs.items():
        first = next((item for item in found if item.diverges), None)
        if first is not None:
            raise ParityError(f"graph {name!r} diverges from the model in {first}", directory)
