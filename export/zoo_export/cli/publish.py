"""``zoo publish``."""

from __future__ import annotations

from pathlib import Path

import click

from zoo.artifact.outputs import check_output_target
from zoo.cli.options import BYTES, Command, force_option, json_option, option, quiet_option
from zoo.cli.report import emit_json, say
from zoo.errors import UsageError

_HUB = "Layout hub"


@click.command("publish", cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@option(
    "--layout",
    type=click.Choice(["hub", "standalone"]),
    required=True,
    section="Layout",
    help="'hub' writes a checkpoint for other libraries, 'standalone' a self-contained ONNX model.",
)
@option("--model-type", metavar="NAME", section=_HUB, help="Model type to write.  [default: the first that fits]")
@option("--max-shard-size", type=BYTES, metavar="SIZE", section=_HUB, help="Maximum size of a file.  [default: 5GB]")
@force_option("Replace what an earlier publish wrote to OUT.")
@json_option
@quiet_option
def command(
    directory: Path, target: Path, layout: str, model_type: str | None, max_shard_size: int | None, force: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Write the model in DIRECTORY to OUT in a layout that other tools read, and verify the result."""
    check_output_target(target, f"publish --layout {layout}", force=force)
    if layout == "standalone":
        for name, value in (("--model-type", model_type), ("--max-shard-size", max_shard_size)):
            if value is not None:
                raise UsageError(f"{name} is for --layout hub", "--layout standalone", "leave it out")
        from zoo_export.publish.standalone import write_standalone

        files = write_standalone(directory, target, force=force)
        if as_json:
            emit_json("publish", {"directory": str(target), "layout": layout, "files": files})
        else:
            say(f"{target}: {', '.join(files)}")
        return
    from zoo.checkpoints import export_checkpoint

    made = export_checkpoint(directory, target, model_type=model_type, max_shard_bytes=max_shard_size, force=force)
    if as_json:
        facts = {"model_type": made.model_type, "files": made.files, "comparison": made.comparison.to_dict()}
        emit_json("publish", {"directory": str(target), "layout": layout, **facts})
        return
    say(f"{target}: {made.model_type} checkpoint, {', '.join(made.files)}")
    say(made.comparison)
