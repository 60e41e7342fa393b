"""``zoo get``."""

from __future__ import annotations

from pathlib import Path

import click

from zoo.artifact import check_model_target
from zoo.cli.completion import complete_presets, complete_tasks
from zoo.cli.options import DocumentedCommand, force_option, json_option, output_option, quiet_option, seed_option
from zoo.cli.progress import show_progress
from zoo.cli.report import emit_json, say, say_head
from zoo.models.count import parameter_count
from zoo.registry import registry


@click.command(
    "get",
    cls=DocumentedCommand,
    examples=(
        "zoo get bert-base",
        "zoo get clip-vit-base-patch32 -o clip",
    ),
    page="checkpoints.md",
)
@click.argument("name", shell_complete=complete_presets)
@output_option("Directory to create; NAME by default.")
@click.option(
    "--task",
    shell_complete=complete_tasks,
    metavar="TASK",
    help="Make a model for this task, with a new head if the weights have none.",
)
@seed_option
@click.option(
    "--verify/--no-verify",
    default=None,
    help="Compare with the original implementation; by default if it is installed.",
)
@click.option("--offline", is_flag=True, help="Use the hub's local cache; download nothing.")
@force_option("Replace an existing model directory.")
@json_option
@quiet_option
def command(
    name: str,
    output: Path | None,
    task: str | None,
    seed: int,
    verify: bool | None,
    offline: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Create a model directory with the published weights of the preset NAME, downloaded from the hub."""
    spec = registry().resolve(name)
    target = output or Path(spec.name)
    check_model_target(target, force=force)
    from zoo.checkpoints.published import get_weights

    with show_progress("importing", unit="bytes") as progress:
        imported = get_weights(
            name, target, task=task, seed=seed, offline=offline, verify=verify, force=force, progress=progress
        )
    parameters = parameter_count(imported.spec)
    if as_json:
        result = {
            "directory": str(target),
            "source": spec.source,
            "architecture": imported.spec.architecture.name,
            "task": imported.spec.task,
            "parameters": parameters,
            "new": list(imported.head.new),
            "dropped": list(imported.head.dropped),
            "comparison": imported.comparison.to_dict(),
            "answers": imported.answers.to_dict(),
        }
        emit_json("get", result)
        return
    facts = f"{imported.spec.architecture.name} for {imported.spec.task}, {parameters:,} parameters"
    say(f"{target}: {facts}, from {spec.source}")
    say_head(imported.head.new, imported.head.dropped)
    say(imported.comparison)
    if imported.answers.counts:
        say(imported.answers)
