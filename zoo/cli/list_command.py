"""``zoo list``."""

from __future__ import annotations

import click

from zoo.cli.output import COUNT, columns, count_text, emit_json, json_option
from zoo.registry import ModelSpec, registry


@click.command("list")
@click.argument("pattern", default="*")
@click.option("--task", help="Only models for this task.")
@click.option("--arch", help="Only models of this architecture.")
@click.option("--min-params", type=COUNT, help="Only models with at least so many parameters, such as 100M.")
@click.option("--max-params", type=COUNT, help="Only models with at most so many parameters.")
@json_option
def command(
    pattern: str,
    task: str | None,
    arch: str | None,
    min_params: int | None,
    max_params: int | None,
    as_json: bool,
) -> None:
    """List the presets whose name matches PATTERN, a glob."""
    found = registry().search(
        pattern, task=task, architecture=arch, min_parameters=min_params, max_parameters=max_params
    )
    specs = [item for item in found if isinstance(item, ModelSpec)]
    failed = [item for item in found if not isinstance(item, ModelSpec)]
    if as_json:
        rows = [
            {
                "name": spec.name,
                "architecture": spec.architecture.name,
                "task": spec.task,
                "parameters": spec.cost.parameters if spec.cost else None,
                "plugin": spec.plugin.name,
                "distribution": spec.plugin.distribution,
                "description": spec.description,
                "available": True,
            }
            for spec in specs
        ]
        rows += [{"name": name, "available": False, "reason": str(error)} for name, error in failed]
        emit_json("list", {"models": rows})
        return
    rows_text = [(spec.name, spec.architecture.name, spec.task, _size(spec), spec.description) for spec in specs]
    rows_text += [(name, "-", "-", "-", f"unavailable: {error}") for name, error in failed]
    columns([("NAME", "ARCH", "TASK", "PARAMS", "DESCRIPTION"), *sorted(rows_text)], right=[3])


def _size(spec: ModelSpec) -> str:
    """Only what is known in closed form: listing builds no model."""
    return count_text(spec.cost.parameters) if spec.cost else "-"
