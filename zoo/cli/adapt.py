"""``zoo adapt``."""

from __future__ import annotations

from pathlib import Path

import click

from zoo.artifact import check_model_target
from zoo.cli.completion import complete_directories, complete_tasks
from zoo.cli.options import (
    PATH,
    DocumentedCommand,
    json_option,
    quiet_option,
    seed_option,
    settings_option,
    strict_option,
)
from zoo.cli.progress import show_progress
from zoo.cli.report import emit_json, say, say_head
from zoo.errors import UsageError
from zoo.models.count import parameter_count


@click.command(
    "adapt",
    cls=DocumentedCommand,
    examples=(
        "zoo adapt vit-tiny --set image_size=12 -o larger",
        "zoo adapt notes --merge adapter -o tuned",
    ),
    page="howto/resolution.md",
)
@click.argument("directory", shell_complete=complete_directories, type=PATH)
@click.option(
    "--task",
    shell_complete=complete_tasks,
    metavar="TASK",
    help="Keep the trunk, and give the model a head for this task.",
)
@settings_option
@click.option("--merge", "adapter", type=PATH, metavar="ADAPTER", help="Merge low-rank adapters.")
@click.option("-o", "--output", type=PATH, required=True, help="Directory to create.")
@seed_option
@strict_option
@click.option("--force", is_flag=True, help="Replace an existing model directory.")
@json_option
@quiet_option
def command(
    directory: Path,
    task: str | None,
    settings: tuple[str, ...],
    adapter: Path | None,
    output: Path,
    seed: int,
    strict: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Change the configuration or task of the model in DIRECTORY, keeping its weights; or merge adapters into them.

    Tensors whose shape does not change are copied. The architecture converts the others: a ViT interpolates its
    position embeddings for another image_size; learned text positions are truncated for a smaller max_seq_len. If it
    has no rule for a tensor, or a tensor would be dropped or added, nothing is written and all such tensors are listed.

    With --task, the tensors of the head may be dropped, and those that the new head lacks are initialised; both are
    listed, or refused with --strict.

    With --merge, the update of each weight in the directory ADAPTER, which zoo train --lora or the PEFT library wrote,
    is added to the weight. The result is a model like any other.
    """
    if bool(settings or task) == (adapter is not None):
        raise UsageError("give --task or --set, or --merge alone")
    check_model_target(output, force=force)
    if adapter is not None:
        _merge(directory, adapter, output, force, as_json)
        return
    from zoo.models.adapt import adapt_directory

    with show_progress("adapting", unit="bytes") as progress:
        adapted = adapt_directory(
            directory, output, task=task, seed=seed, strict=strict, settings=settings, force=force, progress=progress
        )
    parameters = parameter_count(adapted.spec)
    if as_json:
        facts = {
            "directory": str(output),
            "task": adapted.spec.task,
            "parameters": parameters,
            "settings": {key: {"before": old, "now": new} for key, (old, new) in adapted.settings.items()},
            "tensors": {name: {"before": old, "now": new} for name, (old, new) in adapted.shapes.items()},
            "new": list(adapted.head.new),
            "dropped": list(adapted.head.dropped),
        }
        emit_json("adapt", facts)
        return
    spec = adapted.spec
    what = f"{spec.architecture.name} for {spec.task}, " if "task" in adapted.settings else ""
    say(f"{output}: {what}{parameters:,} parameters")
    for name, (old, new) in adapted.shapes.items():
        say(f"{name}: {old} became {new}")
    say_head(adapted.head.new, adapted.head.dropped)


def _merge(directory: Path, adapter: Path, output: Path, force: bool, as_json: bool) -> None:
    from zoo.training.adapters.merge import merge_directory

    with show_progress("merging", unit="bytes") as progress:
        merged = merge_directory(directory, adapter, output, force=force, progress=progress)
    parameters = parameter_count(merged.spec)
    if as_json:
        facts = {"updated": list(merged.updated), "replaced": list(merged.replaced), "equal": list(merged.equal)}
        emit_json("adapt", {"directory": str(output), "parameters": parameters, **facts})
        return
    say(f"{output}: {parameters:,} parameters; {len(merged.updated)} weights updated")
    for name in merged.replaced:
        say(f"{name}: from the adapter")
    for name in merged.equal:
        say(f"{name}: the adapter holds a copy equal to the model's, left out")
