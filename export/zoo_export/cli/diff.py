"""``zoo diff``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zoo.cli.completion import complete_directories
from zoo.cli.options import PATH, SectionedCommand, check_figure_option, figure_option, force_option, json_option
from zoo.cli.output import VERDICTS
from zoo.cli.report import columns, emit_json
from zoo.errors import ParityError
from zoo_export.cli.options import factory_option, provider_option, variant_option

if TYPE_CHECKING:
    from zoo_export.parity.modules import ModuleError

DEPTH = 2


def chosen(modules: list[ModuleError], everything: bool) -> list[ModuleError]:
    """Return the modules down to the level of blocks, or all, and the first one that diverges."""
    first = next((item for item in modules if item.diverges), None)
    return [item for item in modules if everything or item is first or item.path.count(".") < DEPTH]


def rows(modules: list[ModuleError], everything: bool) -> list[tuple[str, ...]]:
    """Return the rows of the table."""
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
        for item in chosen(modules, everything)
    ]


@click.command(
    "diff",
    cls=SectionedCommand,
    examples=(
        "zoo diff gpt-tiny",
        "zoo diff gpt-tiny --all --figure modules.svg",
    ),
    page="howto/exports.md",
)
@click.argument("directory", shell_complete=complete_directories, type=PATH, default=Path())
@click.option("--all", "everything", is_flag=True, help="Also show modules inside blocks.")
@variant_option
@factory_option
@provider_option
@figure_option("Plot the errors of the modules beside the allowed ones.")
@force_option("Replace an existing figure.")
@json_option
def command(
    directory: Path, everything: bool, variant: str, provider: str, figure: Path | None, force: bool, as_json: bool
) -> None:
    """Compare the graphs in DIRECTORY with the PyTorch model, module by module, and find the first that diverges."""
    check_figure_option(figure, force=force)
    from zoo_export.diff import diff_model

    graphs = diff_model(directory, variant=variant, provider=provider)  # type: ignore[arg-type]
    if figure is not None:
        from zoo.artifact import ModelDirectory
        from zoo_export.parity.plot import draw_modules

        name = str(ModelDirectory.open(directory).description["name"]) + (f" ({variant})" if variant else "")
        shown = {graph: chosen(errors, everything) for graph, errors in graphs.items()}
        draw_modules(name, shown).write(figure, force=force)
    if as_json:
        facts = {
            name: [{**asdict(item), "diverges": item.diverges} for item in errors] for name, errors in graphs.items()
        }
        emit_json("diff", {"graphs": facts})
    else:
        for name, errors in graphs.items():
            columns(
                [(name.upper(), "CLASS", "ERROR", "TORCH", "RELATIVE", ""), *rows(errors, everything)],
                right=[2, 3, 4],
                verdicts=VERDICTS,
            )
    for name, errors in graphs.items():
        first = next((item for item in errors if item.diverges), None)
        if first is not None:
            raise ParityError(f"graph {name!r} diverges from the model in {first}", directory)
