"""``zoo diff``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zoo.cli.options import Command, json_option
from zoo.cli.report import columns, emit_json
from zoo.errors import ParityError
from zoo_export.cli.options import provider_option, variant_option

if TYPE_CHECKING:
    from zoo_export.parity.modules import ModuleError

DEPTH = 2


def rows(modules: list[ModuleError], everything: bool) -> list[tuple[str, ...]]:
    """Rows for modules down to the level of blocks, or for all modules, plus the first one that diverges."""
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


@click.command("diff", cls=Command)
@click.argument("directory", type=click.Path(path_type=Path), default=Path())
@click.option("--all", "everything", is_flag=True, help="Also show modules inside blocks.")
@variant_option
@provider_option
@json_option
def command(directory: Path, everything: bool, variant: str, provider: str, as_json: bool) -> None:
    """Compare the graphs in DIRECTORY with the PyTorch model, module by module, and find the first that diverges."""
    from zoo_export.verify import diff_model

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
