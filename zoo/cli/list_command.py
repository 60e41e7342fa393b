"""``zoo list``."""

from __future__ import annotations

import click

from zoo.cli.output import COUNT, columns, count_text, emit_json, json_option
from zoo.registry import Summary, registry


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
    models = [item for item in found if isinstance(item, Summary)]
    failed = [item for item in found if not isinstance(item, Summary)]
    if as_json:
        rows = [
            {
                "name": model.name,
                "architecture": model.architecture,
                "task": model.task,
                "parameters": model.parameters,
                "plugin": model.plugin.name,
                "distribution": model.plugin.distribution,
                "description": model.description,
                "available": True,
            }
            for model in models
        ]
        rows += [{"name": name, "available": False, "reason": str(error)} for name, error in failed]
        emit_json("list", {"models": rows})
        return
    rows_text = [
        (
            model.name,
            model.architecture,
            model.task,
            "-" if model.parameters is None else count_text(model.parameters),
            model.description,
        )
        for model in models
    ]
    rows_text += [(name, "-", "-", "-", f"unavailable: {error}") for name, error in failed]
    columns([("NAME", "ARCH", "TASK", "PARAMS", "DESCRIPTION"), *sorted(rows_text)], right=[3])
