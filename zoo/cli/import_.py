"""``zoo import``."""

from __future__ import annotations

from pathlib import Path

import click

from zoo.artifact import check_model_target
from zoo.cli.completion import complete_offers, complete_sources, complete_tasks
from zoo.cli.options import PATH, DocumentedCommand, json_option, quiet_option, seed_option, strict_option
from zoo.cli.output import message
from zoo.cli.progress import show_progress
from zoo.cli.report import emit_json, say, say_head
from zoo.errors import UsageError
from zoo.models.count import parameter_count


@click.command(
    "import",
    cls=DocumentedCommand,
    examples=(
        "zoo import Qwen/Qwen3-0.6B -o qwen",
        "zoo import bert-checkpoint -o classifier --task text-classification",
    ),
    page="checkpoints.md",
)
@click.argument("source", shell_complete=complete_sources)
@click.option("-o", "--output", type=PATH, help="Directory to create; named as SOURCE by default.")
@click.option(
    "--model-type",
    shell_complete=complete_offers("importers"),
    metavar="NAME",
    help="Model type of the checkpoint; by default model_type in its config.json.",
)
@click.option(
    "--via",
    type=click.Choice(["timm", "transformers"]),
    help="Use the class of this library, even if zoo has an architecture of its own for the model type.",
)
@click.option(
    "--task",
    shell_complete=complete_tasks,
    metavar="TASK",
    help="Make a model for this task, with a new head if SOURCE has none for it.",
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a value that the checkpoint lacks.")
@seed_option
@strict_option
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Convert the weights.")
@click.option(
    "--allow-missing",
    multiple=True,
    metavar="PATTERN",
    help="Initialise missing tensors matching PATTERN, e.g. a new head.",
)
@click.option("--allow-key", "allow_keys", multiple=True, metavar="PATTERN", help="Ignore matching config.json keys.")
@click.option("--drop-tokens", is_flag=True, help="Leave out added tokens of the tokenizer that the model lacks.")
@click.option(
    "--verify/--no-verify",
    default=None,
    help="Compare with the original implementation; by default if it is installed.",
)
@click.option("--revision", help="Branch, tag or commit on the hub.")
@click.option("--offline", is_flag=True, help="Use the hub's local cache; download nothing.")
@click.option("--force", is_flag=True, help="Replace an existing model directory.")
@json_option
@quiet_option
def command(
    source: str,
    output: Path | None,
    model_type: str | None,
    via: str | None,
    task: str | None,
    settings: tuple[str, ...],
    seed: int,
    strict: bool,
    dtype: str | None,
    allow_missing: tuple[str, ...],
    allow_keys: tuple[str, ...],
    drop_tokens: bool,
    verify: bool | None,
    revision: str | None,
    offline: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Create a model directory from SOURCE: a checkpoint directory in hub layout, a name on the hub, or a file."""
    if via is not None and model_type is not None:
        raise UsageError("contradicts --via", f"--model-type {model_type}", "leave out one of the two")
    path, name, commit = Path(source), None, None
    target = output or Path(path.resolve().stem if path.is_file() else path.resolve().name)
    check_model_target(target, force=force)
    from zoo.checkpoints import import_checkpoint
    from zoo.checkpoints.hub import fetch, is_hub_name

    if is_hub_name(source):
        path = fetch(source, revision=revision, offline=offline)
        name, commit = source, path.name  # the hub's cache names a snapshot after its commit
    elif (revision or offline) and path.exists():
        raise UsageError("is a path, not a name on the hub", source, "leave out --revision and --offline")
    with show_progress("importing", unit="bytes") as progress:
        imported = import_checkpoint(
            path,
            target,
            name=name,
            revision=commit,
            model_type="via-timm" if via == "timm" else model_type or via,
            dtype=dtype,
            task=task,
            seed=seed,
            strict=strict,
            settings=settings,
            allow_missing=allow_missing,
            allow_keys=allow_keys,
            drop_tokens=drop_tokens,
            verify=verify,
            force=force,
            progress=progress,
        )
    for note in imported.notes:
        message("note", f"{source}: {note}")
    spec = imported.spec
    facts = {
        "directory": str(target),
        "architecture": spec.architecture.name,
        "task": spec.task,
        "parameters": parameter_count(spec),
        "new": list(imported.head.new),
        "dropped": list(imported.head.dropped),
        "notes": list(imported.notes),
        "comparison": imported.comparison.to_dict(),
        "answers": imported.answers.to_dict(),
    }
    if as_json:
        emit_json("import", facts)
        return
    say(f"{target}: {spec.architecture.name} for {spec.task}, {parameter_count(spec):,} parameters")
    say_head(imported.head.new, imported.head.dropped)
    say(imported.comparison)
    if imported.answers.counts:
        say(imported.answers)
