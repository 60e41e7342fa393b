"""``zoo plugins``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from zoo import plugins
from zoo.cli.options import PATH, Group, json_option
from zoo.cli.output import echo
from zoo.cli.plugins_check import check_plugin
from zoo.cli.report import columns, emit_json
from zoo.plugins import Plugin
from zoo.plugins.loading import CONTRIBUTIONS


def provides(plugin: Plugin) -> dict[str, list[str]]:
    """Return the names of a plugin's contributions by kind."""
    names = {kind: [item.name for item in getattr(plugin, kind)] for kind in CONTRIBUTIONS}
    return {"architectures": names.pop("architectures"), "presets": sorted(plugin.presets), **names}


@click.group(
    "plugins",
    cls=Group,
    examples=(
        "zoo plugins check gpt",
        "zoo plugins new zebra",
    ),
    page="tutorial.md",
)
def command() -> None:
    """List, check and create plugins."""


command.add_command(check_plugin)


@command.command(
    "list",
    examples=(
        "zoo plugins list",
        "zoo plugins list --json",
    ),
    page="explanation/isolation.md",
)
@json_option
def list_plugins(as_json: bool) -> None:
    """List every plugin with its distribution, status, contributions and import time.

    Plugins recorded as broken are loaded again.
    """
    all_plugins = plugins.active(retry=True).all
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
            for plugin in all_plugins
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
                for plugin in all_plugins
            ),
        ],
        right=[4],
    )


@command.command(
    "new",
    examples=(
        "zoo plugins new zebra",
        "zoo plugins new zebra -o plugins/zebra",
    ),
    page="tutorial.md",
)
@click.argument("name")
@click.option("-o", "--output", type=PATH, help="Directory to create; NAME by default.")
@click.option("--force", is_flag=True, help="Replace a generated plugin without added or edited files.")
@json_option
def new_plugin(name: str, output: Path | None, force: bool, as_json: bool) -> None:
    """Create a plugin distribution with the new architecture NAME: a small working decoder to modify."""
    from zoo.plugins.scaffold import name_plugin, write_plugin
    from zoo.registry import registry

    plugin = name_plugin(name, registry().names())
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
    place = target if target.is_absolute() else f"./{target}"  # pip reads this as a directory
    echo(f"{target}: {plugin.distribution}, {len(files)} files. Next:")
    echo(f"pip install -e {shlex.quote(f'{place}[test]')}")
    echo(f"zoo plugins check {plugin.name}")
    echo(f"zoo export {plugin.preset} --onnx")
