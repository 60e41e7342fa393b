"""``zoo why``."""

from __future__ import annotations

import click

from zoo.cli.output import columns, emit_json, json_option
from zoo.registry import registry


@click.command("why")
@click.argument("name")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Change a configuration value.")
@json_option
def command(name: str, settings: tuple[str, ...], as_json: bool) -> None:
    """Show where each configuration value of the preset NAME comes from, and what it replaced."""
    spec = registry().resolve(name, settings)
    values, origins = spec.config.to_dict(), spec.origins or {}
    if as_json:
        explained = {
            key: {
                "value": value,
                "source": origins[key][-1].source,
                "replaced": [{"value": old.value, "source": old.source} for old in origins[key][:-1]],
            }
            for key, value in values.items()
        }
        emit_json("why", {"name": spec.name, "config": explained})
        return
    rows = []
    for key, value in values.items():
        replaced = "; ".join(f"instead of {old.value} of {old.source}" for old in reversed(origins[key][:-1]))
        rows.append((key, value, origins[key][-1].source, replaced))
    columns(rows)
