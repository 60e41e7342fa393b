"""``zoo publish``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from zoo.artifact.outputs import check_output_target
from zoo.cli.options import BYTES, Command, force_option, json_option, option, quiet_option
from zoo.cli.report import emit_json, say
from zoo.errors import UsageError
from zoo_export.cli.options import sleep_when_idle
from zoo_export.cli.results import comparing


@click.command("publish", cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@option(
    "--layout",
    type=click.Choice(["hub", "standalone", "transformers-js", "web"]),
    required=True,
    section="Layout",
    help="'hub' writes a checkpoint for other libraries, 'standalone' a self-contained ONNX model, 'transformers-js' "
    "one for each verified precision with what transformers.js reads beside it, 'web' a page that runs the model.",
)
@option(
    "--model-type",
    metavar="NAME",
    section="Layouts hub and transformers-js",
    help="Model type to write.  [default: the first that fits]",
)
@option(
    "--max-shard-size",
    type=BYTES,
    metavar="SIZE",
    section="Layouts hub and web",
    help="Maximum size of a file of weights.  [default: 5GB for hub, 32MB for web]",
)
@option(
    "--variant",
    metavar="NAME",
    section="Layout web",
    help="Variant of the export, such as int8.  [default: the plain one]",
)
@force_option("Replace what an earlier publish wrote to OUT.")
@json_option
@quiet_option
def command(
    directory: Path, target: Path, layout: str, model_type: str | None, max_shard_size: int | None,
    variant: str | None, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write the model in DIRECTORY to OUT in a layout that other tools read, and verify the result."""
    check_output_target(target, f"publish --layout {layout}", force=force)
    for name, value, layouts in (
        ("--model-type", model_type, ["hub", "transformers-js"]),
        ("--max-shard-size", max_shard_size, ["hub", "web"]),
        ("--variant", variant, ["web"]),
    ):
        if value is not None and layout not in layouts:
            what = f"{name} is for {' and '.join(f'--layout {known}' for known in layouts)}"
            raise UsageError(what, f"--layout {layout}", "leave it out")
    if layout == "standalone":
        from zoo_export.publish.standalone import write_standalone

        files = write_standalone(directory, target, force=force)
        if as_json:
            emit_json("publish", {"directory": str(target), "layout": layout, "files": files})
        else:
            say(f"{target}: {', '.join(files)}")
        return
    if layout == "transformers-js":
        from zoo_export.publish.transformers_js import write_transformers_js

        sleep_when_idle()
        with comparing() as progress:
            published = write_transformers_js(directory, target, model_type=model_type, force=force, progress=progress)
        if as_json:
            emit_json("publish", {"directory": str(target), "layout": layout, **asdict(published)})
        else:
            say(f"{target}: {published.model_type}, dtype {' or '.join(published.dtypes)}")
        return
    if layout == "web":
        from zoo_export.publish.web import write_web

        page = write_web(directory, target, variant=variant or "", max_shard_bytes=max_shard_size, force=force)
        if as_json:
            facts = {"files": page.files, "doubts": dict(page.doubts)}
            emit_json("publish", {"directory": str(target), "layout": layout, **facts})
            return
        say(f"{target}: index.html and {len(page.files) - 1} more files")
        for runtime, doubt in page.doubts.items():
            said = "verified" if doubt is None else f"not verified ({doubt}), so visitors must agree before it runs"
            say(f"{runtime}: {said}")
        return
    from zoo.checkpoints import export_checkpoint

    made = export_checkpoint(directory, target, model_type=model_type, max_shard_bytes=max_shard_size, force=force)
    if as_json:
        facts = {"model_type": made.model_type, "files": made.files, "comparison": made.comparison.to_dict()}
        emit_json("publish", {"directory": str(target), "layout": layout, **facts})
        return
    say(f"{target}: {made.model_type} checkpoint, {', '.join(made.files)}")
    say(made.comparison)
