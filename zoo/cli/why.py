"""``zoo why``."""

from __future__ import annotations

import click

from zoo.cli.model_argument import find_model
from zoo.cli.options import json_option
from zoo.cli.report import columns, emit_json
from zoo.registry import Assignment
from zoo.registry.resolution import DEFAULT


@click.command("why")
@click.argument("model")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Change a configuration value.")
@json_option
def command(model: str, settings: tuple[str, ...], as_json: bool) -> None:
    """Show the source of each configuration value of MODEL, a preset or model directory, and the values it replaced."""
    spec, stored = find_model(model, settings)
    values, origins = spec.config.to_dict(), spec.origins or {}
    if stored is not None:
        given, source = stored.description["config"], str(stored.path / "config.json")
        origins = {key: [Assignment(value, source if key in given else DEFAULT)] for key, value in values.items()}
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
        replaced = "; ".join(f"instead of {old.value} from {old.source}" for old in reversed(origins[key][:-1]))
        rows.append((key, value, origins[key][-1].source, replaced))
    columns(rows)
