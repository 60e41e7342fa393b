"""``zoo why``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from zoo.cli.completion import complete_models, complete_recipes
from zoo.cli.model_argument import find_model, refuse_settings
from zoo.cli.options import DocumentedCommand, json_option, settings_option
from zoo.cli.report import columns, emit_json
from zoo.errors import UsageError
from zoo.registry import Assignment
from zoo.registry.resolution import DEFAULT


@click.command(
    "why",
    cls=DocumentedCommand,
    examples=(
        "zoo why gpt-medium",
        "zoo why --recipe copy-task",
    ),
    page="howto/presets.md",
)
@click.argument("model", shell_complete=complete_models, required=False)
@settings_option
@click.option(
    "--recipe",
    shell_complete=complete_recipes,
    metavar="NAME",
    help="Explain a recipe for training instead of a model.",
)
@json_option
def command(model: str | None, settings: tuple[str, ...], recipe: str | None, as_json: bool) -> None:
    """Show the source of each configuration value of MODEL, a preset or model directory, and the values it replaced."""
    if (model is None) == (recipe is None):
        raise UsageError("name a model, or a recipe with --recipe NAME")
    if recipe is not None:
        refuse_settings(settings)
        from zoo.registry.recipes import find_recipe

        resolved = find_recipe(recipe)
        _explain(
            recipe,
            {key: assignments[-1].value for key, assignments in resolved.origins.items()},
            resolved.origins,
            as_json,
        )
        return
    assert model is not None
    spec, stored = find_model(model, settings)
    from zoo.training.defaults import preset_defaults

    training = preset_defaults(spec)
    values, origins = spec.config.to_dict(), spec.origins or {}
    if stored is not None:
        assignments, source = stored.description["config"], str(stored.path / "config.json")
        origins = {key: [Assignment(value, source if key in assignments else DEFAULT)] for key, value in values.items()}
    values |= {f"training.{key}": value for key, value in training.items()}
    origins = {**origins, **{f"training.{key}": assignments for key, assignments in spec.training.items()}}
    _explain(spec.name, values, origins, as_json)


def _explain(name: str, values: Mapping[str, Any], origins: Mapping[str, Sequence[Assignment]], as_json: bool) -> None:
    """Print each value with its source and the values it replaced."""
    if as_json:
        explained = {
            key: {
                "value": value,
                "source": origins[key][-1].source,
                "replaced": [{"value": old.value, "source": old.source} for old in origins[key][:-1]],
            }
            for key, value in values.items()
        }
        emit_json("why", {"name": name, "config": explained})
        return
    rows = []
    for key, value in values.items():
        replaced = "; ".join(f"instead of {old.value} from {old.source}" for old in reversed(origins[key][:-1]))
        rows.append((key, value, origins[key][-1].source, replaced))
    columns(rows)
