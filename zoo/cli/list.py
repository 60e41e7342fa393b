"""``zoo list``."""

from __future__ import annotations

import click

from zoo.cli.completion import complete_architectures, complete_presets, complete_tasks
from zoo.cli.options import COUNT, DocumentedCommand, json_option
from zoo.cli.report import columns, count_text, emit_json
from zoo.errors import UsageError, nearest
from zoo.plugins.presets import known_provider
from zoo.registry import PresetSummary, Registry, registry
from zoo.registry.nearby import no_match


def _check(presets: Registry, pattern: str, task: str | None, arch: str | None) -> None:
    """Raise :class:`UsageError` for an unknown task or architecture, and for a pattern that matches no name."""
    provided = [architecture for plugin in presets.plugins.loaded() for architecture in plugin.architectures]
    tasks = {name for architecture in provided for name in architecture.tasks}
    if task is not None and task not in tasks:
        raise UsageError(f"unknown task {task!r}", "--task", known_provider(task) or nearest(task, tasks))
    names = presets.plugins.architecture_names()
    if arch is not None and arch not in names:
        raise UsageError(f"unknown architecture {arch!r}", "--arch", known_provider(arch) or nearest(arch, names))
    if not presets.names(pattern):
        raise no_match(presets, pattern)


@click.command(
    "list",
    cls=DocumentedCommand,
    examples=(
        "zoo list --task text-generation --max-params 1B",
        'zoo list "gpt-*" --json',
    ),
    page="howto/presets.md",
)
@click.argument("pattern", shell_complete=complete_presets, default="*")
@click.option("--task", shell_complete=complete_tasks, help="Only models for this task.")
@click.option("--arch", shell_complete=complete_architectures, help="Only models of this architecture.")
@click.option("--min-params", type=COUNT, help="Only models with at least this many parameters, such as 100M.")
@click.option("--max-params", type=COUNT, help="Only models with at most this many parameters.")
@json_option
def command(
    pattern: str,
    task: str | None,
    arch: str | None,
    min_params: int | None,
    max_params: int | None,
    as_json: bool,
) -> None:
    """List the presets whose name matches PATTERN, a glob or a part of the name.

    Where WEIGHTS is yes, zoo get NAME downloads published ones.
    """
    presets = registry()
    _check(presets, pattern, task, arch)
    summaries = presets.search(pattern, task=task, architecture=arch)
    models = [item for item in summaries if isinstance(item, PresetSummary)]
    failed = [item for item in summaries if not isinstance(item, PresetSummary)]
    if (min_params, max_params) != (None, None):
        from zoo.models.count import within_size

        models, failed = list(within_size(presets, models, min_params, max_params)), []
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
                "source": model.source,
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
            "yes" if model.source else "-",
            model.description,
        )
        for model in models
    ]
    rows_text += [(name, "-", "-", "-", "-", f"unavailable: {error}") for name, error in failed]
    columns([("NAME", "ARCH", "TASK", "PARAMS", "WEIGHTS", "DESCRIPTION"), *sorted(rows_text)], right=[3])
