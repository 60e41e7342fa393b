"""``zoo plugins``."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path

import click

from zoo import plugins
from zoo.cli.output import columns, emit_json, json_option
from zoo.cli.plugins_check import check_plugin
from zoo.loading import CONTRIBUTIONS
from zoo.plugins import Plugin


def provides(plugin: Plugin) -> dict[str, list[str]]:
    """What a plugin contributes, by kind."""
    names = {kind: [item.name for item in getattr(plugin, kind)] for kind in CONTRIBUTIONS}
    return {"architectures": names.pop("architectures"), "presets": sorted(plugin.presets), **names}


@click.group("plugins")
def command() -> None:
    """Show the plugins, and check them."""


command.add_command(check_plugin)


@command.command("list")
@json_option
def list_plugins(as_json: bool) -> None:
    """List every plugin with its distribution, status, contributions and import time.

    A plugin that was broken when it was last read is read again.
    """
    found = plugins.active(retry=True).all
    if as_json:
        rows = [
            {
                "name": plugin.name,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "built_in": plugin.built_in,
                "status": plugin.status,
                "reason": plugin.reason,
                "complaints": list(plugin.complaints),
                "import_seconds": plugin.import_seconds,
                "provides": provides(plugin),
            }
            for plugin in found
        ]
        emit_json("plugins.list", {"plugins": rows})
        return
    columns(
        [
            ("NAME", "DISTRIBUTION", "VERSION", "STATUS", "IMPORT", "PROVIDES"),
            *(
                (
                    plugin.name,
                    plugin.distribution,
                    plugin.version,
                    plugin.status,
                    "-" if plugin.import_seconds is None else f"{1000 * plugin.import_seconds:.1f} ms",
                    plugin.reason
                    or "; ".join(f"{kind} {', '.join(names)}" for kind, names in provides(plugin).items() if names),
                )
                for plugin in found
            ),
        ],
        right=[4],
    )


@command.command()
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=plugins.LOCK, show_default=True, help="File to make."
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@json_option
def freeze(output: Path, force: bool, as_json: bool) -> None:
    """Write a lock of the third-party plugins, for zoo --locked.

    No plugin is imported. Each distribution is compared with its own RECORD first; -P no:NAME leaves one out.
    """
    from zoo import lock

    frozen = lock.freeze(plugins.allowed())
    lock.write(output, frozen, force=force)
    if as_json:
        emit_json("plugins.freeze", {"file": str(output), "distributions": [asdict(locked) for locked in frozen]})
        return
    click.echo(f"{output}: {', '.join(f'{locked.name} {locked.version}' for locked in frozen) or 'no plugins'}")


@command.command("new")
@click.argument("name")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory to make; NAME by default.")
@click.option("--force", is_flag=True, help="Replace a plugin that was made this way and has no files beside these.")
@json_option
def new_plugin(name: str, output: Path | None, force: bool, as_json: bool) -> None:
    """Write a distribution with the new architecture NAME: a small decoder that works, to be changed."""
    from zoo.scaffold import name_plugin, write_plugin

    plugin = name_plugin(name)
    target = output or Path(name)
    files = write_plugin(plugin, target, force=force)
    if as_json:
        result = {
            "directory": str(target),
            "files": files,
            "distribution": plugin.distribution,
            "module": plugin.module,
            "architecture": plugin.name,
            "preset": plugin.preset,
        }
        emit_json("plugins.new", result)
        return
    place = target if target.is_absolute() else f"./{target}"  # what pip takes for a directory
    click.echo(f"{target}: {plugin.distribution}, {len(files)} files. Next:")
    click.echo(f"pip install -e {shlex.quote(f'{place}[test]')}")
    click.echo(f"zoo plugins check {plugin.name}")
    click.echo(f"zoo export {plugin.preset} --onnx")
